"""`installed()` ends once nobody can answer any more: by an answer, by what a member holds, or by its leaving."""

from __future__ import annotations

from typing import ClassVar

import anyio
import pytest
from support.refits import said

from dcr.events import Event
from dcr.protocol.wire import Ack, Header, Identity, Join, Leave, MemberRef, Message, Nack
from dcr.publish.refit import Refit
from dcr.publish.roster import Roster

MEMBER, OTHER = MemberRef("m", "1"), MemberRef("other", "1")


class Report:
    """Of a report, what `installed` reads."""

    members: ClassVar = {"m": "prepared", "other": "prepared"}


def identity(version: int) -> Identity:
    return Identity("run", 1, version, 1)


def waiting() -> tuple[Roster, Refit]:
    """A roster that waits for two members to install version 5."""
    roster, refit = Roster(list[Event]().append), Refit(5)
    for member in (MEMBER, OTHER):
        roster.receive(Message(Join(member, identity(4), True)))
    roster.open(identity(5), identity(4), "all", refit)
    refit.finish(Report(), {MEMBER, OTHER})  # type: ignore[arg-type]
    roster.receive(Message(Ack("installed", OTHER, identity(5), b"")))
    return roster, refit


@pytest.mark.parametrize(
    ("header", "answer"),
    [
        (Ack("installed", MEMBER, identity(5), b""), "installed"),
        (Join(MEMBER, identity(5), True), "installed"),
        (Ack("installed", MEMBER, identity(6), b""), "passed over: it installed version 6 instead"),
        (Join(MEMBER, identity(7), True), "passed over: it installed version 7 instead"),
        (Nack(MEMBER, identity(5), None, "poisoned"), "poisoned"),
        (Leave(MEMBER), "left"),
    ],
    ids=str,
)
async def test_a_member_that_will_not_answer_any_more_is_not_waited_for(header: Header, answer: str) -> None:
    roster, refit = waiting()
    roster.receive(Message(header))
    with anyio.fail_after(5):
        assert said(await refit.installed()) == {"m": answer, "other": "installed"}


@pytest.mark.parametrize(
    "header",
    [Join(MEMBER, identity(4), True), Join(MEMBER, None, True), Ack("installed", MEMBER, identity(4), b"")],
    ids=str,
)
async def test_a_member_that_holds_an_earlier_version_is_waited_for(header: Header) -> None:
    roster, refit = waiting()
    roster.receive(Message(header))
    assert not refit.settled


async def test_who_was_not_awaited_is_not_named() -> None:
    roster, refit = waiting()
    stranger = MemberRef("late", "1")
    roster.receive(Message(Join(stranger, identity(6), True)))
    roster.receive(Message(Join(MEMBER, identity(6), True)))
    assert "late" not in await refit.installed()
