"""A member that is known to be dead is dismissed: no vote waits for it any more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import torch
from support.refits import FAST, Rollout, Weights, publish, running, said
from typer.testing import CliRunner

import dcr
import dcr.blocking
from dcr.cli import main
from dcr.events import AttemptSealed, MemberJoined
from dcr.protocol.wire import Join, MemberRef, Message
from dcr.publish import dismissal
from dcr.publish.roster import Roster
from dcr.runs.records import mailbox_key

DEAD = MemberRef("dead", "life")


@pytest.fixture
def trainer() -> Weights:
    return Weights({"w": torch.arange(64, dtype=torch.bfloat16)})


@asynccontextmanager
async def silent(url: str, member: MemberRef = DEAD) -> AsyncIterator[None]:
    """A member that says that it is there, and then nothing."""
    async with FAST.open(url) as run, run.member(member) as link:
        await link.send(Message(Join(member, None)))
        yield


async def die(url: str, member: MemberRef = DEAD) -> None:
    """Be a member that is killed: what it said last stays."""
    async with FAST.open(url) as run:
        async with run.member(member) as link:
            await link.send(Message(Join(member, None)))
            mailbox = await run.objects.get(mailbox_key(member))
        await run.objects.put(mailbox_key(member), [mailbox.data])


@asynccontextmanager
async def published(url: str, trainer: Weights, **options: object) -> AsyncIterator[dcr.Publisher]:
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST, **options) as publisher:
        yield publisher


async def test_an_open_vote_is_decided_without_it(tmp_path: Path, trainer: Weights) -> None:
    engine = Rollout(Weights({"w": torch.zeros(64, dtype=torch.bfloat16)}))
    sealed = anyio.Event()

    def observe(event: dcr.Event) -> None:
        if isinstance(event, AttemptSealed):
            sealed.set()

    async with (
        running(tmp_path, [engine]) as url,
        published(url, trainer, observe=observe) as publisher,
        silent(url),
    ):
        await publisher.joined(2)
        refit = await publisher.publish(1)
        await sealed.wait()
        assert await publisher.dismiss("dead")
        assert said(await refit.installed()) == {"dead": "dismissed", "rollout": "installed"}
        assert publisher.members == ["rollout"]


async def test_the_run_forgets_it(tmp_path: Path, trainer: Weights) -> None:
    url = f"local://{tmp_path}"
    async with published(url, trainer) as publisher, silent(url):
        await publisher.joined(1)
        await publisher.dismiss("dead")
        async with FAST.open(url) as run:
            assert await run.members() == []
        assert not await publisher.dismiss("dead")


async def test_who_lives_all_the_same_takes_part_again(tmp_path: Path, trainer: Weights) -> None:
    engine = Rollout(Weights({"w": torch.zeros(64, dtype=torch.bfloat16)}))
    joined = anyio.Event()

    def observe(event: dcr.Event) -> None:
        if isinstance(event, MemberJoined) and event.holds == 1:
            joined.set()

    async with running(tmp_path, [engine]) as url, published(url, trainer, observe=observe) as publisher:
        await publisher.joined(1)
        assert await publisher.dismiss("rollout")
        assert publisher.members == []
        await publish(publisher, 1)
        await joined.wait()
        trainer.w.data.neg_()
        assert said(await (await publisher.publish(2)).installed()) == {"rollout": "installed"}


def test_the_blocking_face_dismisses(tmp_path: Path, trainer: Weights) -> None:
    with dcr.blocking.publisher(f"local://{tmp_path}", source=dcr.source(trainer)) as publisher:
        assert publisher.head is None
        publisher.publish(4).committed()
        assert (publisher.head, publisher.version) == (4, 4)
        assert publisher.dismiss("nobody") is False


def test_the_command_takes_it_out_of_the_run(tmp_path: Path, trainer: Weights) -> None:
    url = f"local://{tmp_path}"

    async def leave_behind() -> None:
        async with published(url, trainer) as publisher:
            await publish(publisher, 1)
        await die(url)

    anyio.run(leave_behind)
    results = [CliRunner().invoke(main, ["dismiss", url, "dead"]) for _ in range(2)]
    assert [result.exit_code for result in results] == [0, 1]
    assert "dead takes no part" in results[0].stdout
    assert "no member of" in results[1].stderr
    assert "there are: none" in results[1].stderr


def test_the_command_writes_out_what_would_colour_a_name(tmp_path: Path, trainer: Weights) -> None:
    url = f"local://{tmp_path}"

    async def leave_behind() -> None:
        async with published(url, trainer) as publisher:
            await publish(publisher, 1)
        await die(url, MemberRef("red\x1b[31m", "life"))

    anyio.run(leave_behind)
    assert r"there are: red\x1b[31m" in CliRunner().invoke(main, ["dismiss", url, "dead"]).stderr


def test_the_command_says_that_there_is_no_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["dismiss", f"local://{tmp_path}/nothing", "dead"])
    assert (result.exit_code, "no run at" in result.stderr) == (2, True)


async def test_a_trainer_that_comes_back_with_other_weights_knows_the_head(tmp_path: Path, trainer: Weights) -> None:
    url = f"local://{tmp_path}"
    async with published(url, trainer) as publisher:
        await publish(publisher, 5)
    trainer.w.data.neg_()
    async with published(url, trainer) as publisher:
        assert (publisher.version, publisher.head) == (None, 5)
        await publish(publisher)
        assert (publisher.version, publisher.head) == (6, 6)


async def test_dismissing_gives_up_every_life_of_a_name_and_no_other(tmp_path: Path, trainer: Weights) -> None:
    url = f"local://{tmp_path}"
    refs = [MemberRef("dead", "1"), MemberRef("dead", "2"), MemberRef("dead.1", "1")]
    async with FAST.open(url) as run:
        for ref in refs:
            await die(url, ref)
        assert await dismissal.dismiss(run, "dead") == 2
        assert [join.member for join in await run.members()] == refs[2:]


def test_every_life_of_a_name_leaves_the_roster_and_those_that_do_not_answer_as_well() -> None:
    roster = Roster(lambda event: None)
    lives = [MemberRef("dead", str(number)) for number in range(3)]
    for ref in (*lives, MemberRef("live", "1")):
        roster.receive(Message(Join(ref, None)))
    roster.give_up_on(lives[2])
    assert roster.dismiss("dead")
    assert [ref.member for ref in roster] == ["live"]
    roster.give_up_on(MemberRef("live", "1"))
    assert roster.dismiss("live")
    assert not roster.dismiss("live")
