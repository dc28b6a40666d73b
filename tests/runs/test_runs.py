"""Runs over objects: what they say of damage, who lives, what is tried again, and what looking costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from support.kept import heads

import dcr
from dcr.errors import Denied, IncompleteError, LocalError, OptionError, Unavailable, WireError
from dcr.protocol.delivery import Posted
from dcr.protocol.wire import Abort, Ack, Commit, Head, Join, Leave, MemberRef, Message, Nack, Open, Seal
from dcr.runs import StoredRun
from dcr.runs.patience import Patient
from dcr.runs.records import CATALOGUE, NEWEST, OPENS, bell_key, encode_bell, mailbox_key, name_of
from dcr.testing.conformance.scene import attempt, chunk, identity, opening, sealing, send_all, vote
from dcr.testing.memory import MemoryObjects

REF = MemberRef("engine", "life")
JOIN = Message(Join(REF, None))
SOON = {"poll_s": 0.001, "idle_s": 0.002, "pack_s": 0.0}


class Counted(MemoryObjects):
    """Objects that count their calls, by verb and room, and fail as they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.failures: list[Exception | None] = []
        self.changed = None  # type: ignore[assignment]

    async def put(self, key: str, pieces: Sequence[bytes], *, absent: bool = False) -> bool:
        self._count("put", key)
        return await super().put(key, pieces, absent=absent)

    async def get(self, key: str, **rest: Any) -> Any:
        self._count("get", key)
        return await super().get(key, **rest)

    async def list(self, prefix: str, **rest: Any) -> Any:
        self._count("list", prefix)
        return await super().list(prefix, **rest)

    def _count(self, verb: str, key: str) -> None:
        self.calls[f"{verb} {key.rpartition('/')[0].partition('/')[0]}"] += 1
        self.calls[verb] += 1
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure


@pytest.fixture
def objects() -> Counted:
    return Counted()


@pytest.fixture
async def run(objects: Counted) -> StoredRun:
    run = StoredRun(objects, **SOON)
    await run.ledger.swap(Head("kit", 1, None, b""), b"0")
    return run


# ---------------------------------------------------------------------- damage


async def test_an_opening_that_is_no_message_is_told_once_and_the_next_attempt_is_seen(
    run: StoredRun, objects: Counted
) -> None:
    async with run.sender() as sender, StoredRun(objects, **SOON).member(REF) as link:
        await run.store.write_open(opening(identity(1)))
        key = OPENS + name_of(identity(1))
        objects.data[key] = objects.data[key].replace(b"open", b"oxen")
        await run.objects.put(bell_key(1), [encode_bell([Posted(identity(1))])])
        with anyio.fail_after(5):
            with pytest.raises(WireError, match="opens/"):
                await link.receive()
            await sender.send(opening(identity(2)))
            assert await link.receive() == opening(identity(2))


async def test_a_bell_that_is_no_record_is_told_once_and_the_next_one_is_heard(
    run: StoredRun, objects: Counted
) -> None:
    async with StoredRun(objects, **SOON).member(REF) as link, run.sender() as sender:
        await run.objects.put(bell_key(1), [b"\xff\xff"])
        with anyio.fail_after(5):
            with pytest.raises(WireError, match="live/bells"):
                await link.receive()
            await sender.send(opening(identity(1)))
            assert await link.receive() == opening(identity(1))


async def test_a_head_that_is_damaged_is_an_error_that_names_it(run: StoredRun, objects: Counted) -> None:
    (key,) = (key for key in objects.data if key.startswith("heads/"))
    data = bytearray(objects.data[key])
    data[5] ^= 1
    objects.data[key] = bytes(data)
    with pytest.raises(WireError, match=key):
        await StoredRun(objects).ledger.read()


async def test_a_seal_of_a_chunk_that_was_never_sent_is_not_read(run: StoredRun) -> None:
    async with run.sender() as sender:
        sent = [chunk(identity(), frame, b"body") for frame in range(3)]
        await send_all(sender, [opening(identity()), *sent[:2], sealing(identity(), sent)])
    with pytest.raises(IncompleteError, match=r"frames \[2\]"):
        [message async for message in run.store.read(identity())]


# ---------------------------------------------------------------------- heads


@pytest.mark.parametrize("what", ["packs/", "seals/"])
async def test_an_attempt_that_is_given_up_while_it_is_read_ends_with_its_abort(
    run: StoredRun, objects: Counted, what: str
) -> None:
    async with run.sender() as sender:
        get = objects.get

        async def get_late(key: str, **rest: Any) -> Any:
            if key.startswith(what):
                objects.get = get  # type: ignore[method-assign]
                await sender.send(Message(Abort(identity(1), "no votes")))
            return await get(key, **rest)

        async with StoredRun(objects, **SOON).member(REF) as link:
            await send_all(sender, attempt(identity(1)))
            objects.get = get_late  # type: ignore[method-assign]
            shown: list[Message] = []
            with anyio.fail_after(5):
                while not shown or not isinstance(shown[-1].header, Abort):
                    shown.append(await link.receive())
            assert shown[0] == opening(identity(1))
            assert shown[-1].header == Abort(identity(1), "no votes")


async def test_heads_are_a_log_of_which_nothing_is_replaced(run: StoredRun, objects: Counted) -> None:
    for term in range(2, 40):
        _, tag = await run.ledger.read()
        assert await run.ledger.swap(Head("kit", term, None, b""), tag)
    assert [head.term for head in heads(objects)] == list(range(1, 40))


@pytest.mark.parametrize("hint", [None, b"1", b"17", b"39", b"99", b"nonsense"])
async def test_the_newest_head_is_found_whatever_the_hint_says(
    run: StoredRun, objects: Counted, hint: bytes | None
) -> None:
    for term in range(2, 40):
        await run.ledger.swap(Head("kit", term, None, b""), (await run.ledger.read())[1])
    objects.data.pop(NEWEST)
    if hint is not None:
        objects.data[NEWEST] = hint
    objects.calls.clear()
    head, tag = await StoredRun(objects).ledger.read()
    assert (head, tag) == (Head("kit", 39, None, b""), b"39")
    assert objects.calls["get"] < 40, "each head was read"


async def test_the_same_head_twice_under_one_tag_is_taken_once(objects: Counted) -> None:
    head, runs = Head("kit", 1, None, b""), [StoredRun(objects) for _ in range(2)]
    assert [await run.ledger.swap(head, b"0") for run in runs] == [True, False]


async def test_a_swap_whose_answer_was_lost_is_known_to_have_happened(objects: Counted) -> None:
    run, head = StoredRun(objects, patience_s=5.0), Head("kit", 1, None, b"")
    put = objects.put

    async def forgetful(key: str, pieces: Sequence[bytes], **rest: Any) -> bool:
        created = await put(key, pieces, **rest)
        if objects.calls["put heads"] == 1:
            raise TimeoutError("no answer")
        return created

    objects.put = forgetful  # type: ignore[method-assign]
    assert await run.ledger.swap(head, b"0")
    assert objects.calls["put heads"] == 2


# ---------------------------------------------------------------------- who lives


async def _said(sender: Any) -> list[Any]:
    """What a publisher hears in a moment."""
    found = []
    with anyio.move_on_after(0.05):
        while True:
            found.append((await sender.receive()).header)
    return found


async def test_a_sign_of_life_is_no_news(objects: Counted) -> None:
    run = StoredRun(objects, stale_s=0.05, **SOON)
    async with run.sender() as sender, run.member(REF) as link:
        await link.send(JOIN)
        assert await _said(sender) == [JOIN.header]
        assert await _said(sender) == []


async def test_the_same_join_said_again_is_news(run: StoredRun) -> None:
    async with run.sender() as sender, run.member(REF) as link:
        for _ in range(2):
            await link.send(JOIN)
            assert await _said(sender) == [JOIN.header]


async def test_a_link_that_never_said_join_counts_as_nobody(run: StoredRun) -> None:
    async with run.sender() as sender, run.member(REF):
        assert await _said(sender) == []
        assert await run.members() == []


async def test_a_link_may_speak_for_several_members_that_leave_with_it(run: StoredRun) -> None:
    refs = [MemberRef("a", "1"), MemberRef("b", "1")]
    async with run.sender() as sender:
        async with run.member(REF) as link:
            await send_all(link, [Message(Join(ref, None)) for ref in refs])
            assert {header.member for header in await _said(sender)} == set(refs)
            assert [join.member for join in await run.members()] == refs
        assert await _said(sender) == [Leave(ref) for ref in refs]
        assert await run.members() == []


async def _kill(run: StoredRun, messages: Sequence[Message] = (JOIN,)) -> None:
    """A link that ends without a word: its mailbox stays as it was."""
    async with run.member(REF) as link:
        await send_all(link, messages)
        mailbox = await run.objects.get(mailbox_key(REF))
    assert mailbox is not None
    assert mailbox.data is not None
    await run.objects.put(mailbox_key(REF), [mailbox.data])


async def test_a_member_that_was_killed_has_left_once_its_mailbox_was_still_for_long_enough(objects: Counted) -> None:
    run = StoredRun(objects, stale_s=0.05, **SOON)
    async with run.sender() as sender:
        await _kill(run)
        with anyio.fail_after(5):
            assert [(await sender.receive()).header for _ in range(2)] == [JOIN.header, Leave(REF)]
    assert mailbox_key(REF) not in objects.data


async def test_a_member_that_died_before_its_publisher_came_is_not_announced(objects: Counted) -> None:
    run = StoredRun(objects, stale_s=0.2, **SOON)
    await _kill(run)
    await run.ledger.swap(Head("kit", 1, None, b""), b"0")
    async with run.sender() as sender:
        assert await _said(sender) == []


async def test_a_member_gives_a_sign_of_life_to_a_new_publisher(run: StoredRun, objects: Counted) -> None:
    async with StoredRun(objects, **SOON).member(REF) as link:
        await link.send(JOIN)
        await run.ledger.swap(Head("kit", 2, None, b""), b"1")
        async with run.sender() as sender:
            with anyio.fail_after(5):  # far sooner than the next beat
                assert await sender.receive() == JOIN


async def test_answers_are_read_by_the_publisher_that_asked_only(run: StoredRun) -> None:
    async with run.member(REF) as link, run.sender() as sender:
        await link.send(JOIN)
        await sender.send(opening(identity(1)))
        await link.send(Message(Ack("prepared", REF, identity(7), b"")))
        await link.send(Message(Nack(REF, identity(1), None, "for a reason")))
        assert [type(header) for header in await _said(sender)] == [Join, Nack]


# ---------------------------------------------------------------------- patience


@pytest.mark.parametrize("error", [Unavailable("busy"), ConnectionResetError(), TimeoutError(), OSError(116, "stale")])
async def test_what_passes_is_tried_again(objects: Counted, error: Exception) -> None:
    objects.failures = [error, error]
    assert await Patient(objects, 10.0).put("a", [b"x"])
    assert objects.calls["put"] == 3


@pytest.mark.parametrize("error", [Denied("who are you"), PermissionError(), OSError(28, "full"), LocalError("no")])
async def test_what_does_not_pass_is_not_tried_again(objects: Counted, error: Exception) -> None:
    objects.failures = [error]
    with pytest.raises(type(error)):
        await Patient(objects, 10.0).get("a")
    assert objects.calls["get"] == 1


async def test_patience_ends(objects: Counted) -> None:
    objects.failures = [ConnectionResetError("cut")] * 1000
    with pytest.raises(Unavailable, match="cut"):
        await Patient(objects, 0.1).get("a")


async def test_a_member_goes_on_after_its_store_was_away(run: StoredRun, objects: Counted) -> None:
    sent = attempt(identity())
    async with StoredRun(objects, patience_s=5.0, **SOON).member(REF) as link, run.sender() as sender:
        await send_all(sender, sent)
        objects.failures = [ConnectionResetError("cut")] * 3
        with anyio.fail_after(5):
            assert [await link.receive() for _ in sent] == sent


# ---------------------------------------------------------------------- packs


async def test_chunks_that_are_sent_at_a_time_travel_together(objects: Counted) -> None:
    run = StoredRun(objects, poll_s=0.001, idle_s=0.002, pack_s=10.0)
    opened, *chunks, sealed = attempt(identity(), [b"%d" % n for n in range(20)])
    async with run.sender() as sender:
        await sender.send(opened)
        async with anyio.create_task_group() as group:
            for message in chunks:
                group.start_soon(sender.send, message)
            await anyio.lowlevel.checkpoint()
            await sender.send(sealed)
    assert objects.calls["put packs"] == 1
    found = [message async for message in run.store.read(identity())]
    assert sorted(map(repr, found[1:-1])) == sorted(map(repr, chunks))


async def test_a_pack_that_is_full_closes(objects: Counted) -> None:
    run = StoredRun(objects, poll_s=0.001, idle_s=0.002, pack_s=10.0, pack_bytes=1000)
    opened, *chunks, sealed = attempt(identity(), [bytes(600)] * 6)
    async with run.sender() as sender:
        await sender.send(opened)
        async with anyio.create_task_group() as group:
            for message in chunks:
                group.start_soon(sender.send, message)
        await sender.send(sealed)
    assert objects.calls["put packs"] == 3


async def test_frames_are_read_without_the_others(run: StoredRun) -> None:
    sent = attempt(identity(), [b"%d" % n for n in range(9)])
    async with run.sender() as sender:
        await send_all(sender, sent)
    found = [message async for message in run.store.read(identity(), frames={2, 7})]
    assert found == [sent[0], sent[3], sent[8], sent[-1]]


# ---------------------------------------------------------------------- what looking costs


@asynccontextmanager
async def _with_versions(objects: Counted, count: int) -> AsyncIterator[Any]:
    """A publisher's link that has committed so many versions."""
    run = StoredRun(objects, **SOON)
    async with run.sender() as sender:
        await run.ledger.swap(Head("kit", 1, None, b""), b"0")
        for version in range(1, count + 1):
            base = identity(version - 1) if version > 1 else None
            await send_all(sender, attempt(identity(version), base=base))
            await run.ledger.swap(Head("kit", 1, identity(version), b"root"), (await run.ledger.read())[1])
        yield sender


async def test_a_member_lists_nothing_whatever_is_kept(objects: Counted) -> None:
    theirs = Counted()
    async with _with_versions(objects, 5) as sender:
        theirs.data, theirs._tags = objects.data, objects._tags
        run = StoredRun(theirs, **SOON)
        async with run.member(REF) as link:
            await link.send(JOIN)
            assert (await link.receive()).header == Commit(identity(5))
            await send_all(sender, attempt(identity(6), base=identity(5)))
            kinds = [type((await link.receive()).header) for _ in range(5)]
            assert (kinds[0], kinds[-1]) == (Open, Seal)
            assert [one.identity.version for one in await run.store.outlines(0, 6)] == [1, 2, 3, 4, 5, 6]
    assert theirs.calls["list"] == 0


async def test_a_chain_is_read_with_two_records_for_each_version_and_one_layout(objects: Counted) -> None:
    async with _with_versions(objects, 50):
        pass
    run = StoredRun(objects, **SOON)
    objects.calls.clear()
    links = await dcr.runs.chain.back_from(run.store, identity(50), until=None)
    assert len(links) == 50
    assert objects.calls["get seals"] == 50
    assert objects.calls["get live"] <= 50
    assert objects.calls["get layouts"] == 1
    assert objects.calls["list"] == 0


async def test_a_catalogue_that_is_gone_or_old_is_made_up_for_by_the_seals(objects: Counted) -> None:
    async with _with_versions(objects, 3):
        old = objects.data[CATALOGUE]
    async with _with_versions_from(objects, 4):
        pass
    for catalogue in (old, b"nonsense", None):
        objects.data.pop(CATALOGUE, None)
        if catalogue is not None:
            objects.data[CATALOGUE] = catalogue
        outlines = await StoredRun(objects).store.outlines(1, 4)
        assert [one.identity.version for one in outlines] == [2, 3, 4]


@asynccontextmanager
async def _with_versions_from(objects: Counted, version: int) -> AsyncIterator[None]:
    run = StoredRun(objects, **SOON)
    async with run.sender() as sender:
        await send_all(sender, attempt(identity(version), base=identity(version - 1)))
        yield


async def test_a_side_that_sees_nothing_new_looks_less_often() -> None:
    slept: list[float] = []

    pace = StoredRun(Counted(), poll_s=0.001, idle_s=0.004).pace()
    for busy in (True, False, False, False, False, True):
        await pace.wait(None, busy=busy)
        slept.append(pace.pause_s)
    assert slept == pytest.approx([0.001, 0.0015, 0.00225, 0.003375, 0.004, 0.001])


async def test_a_member_that_has_followed_a_version_looks_less_often_once_it_is_the_head(objects: Counted) -> None:
    async with _with_versions(objects, 1) as sender:
        run = StoredRun(objects, poll_s=0.001, idle_s=0.1)
        async with run.member(REF) as link:
            await link.receive()
            sent = attempt(identity(2), base=identity(1))
            await send_all(sender, sent)
            assert [await link.receive() for _ in sent] == sent
            assert link.is_busy
            await run.ledger.swap(Head("kit", 1, identity(2), b"root"), (await run.ledger.read())[1])
            assert (await link.receive()).header == Commit(identity(2))
            assert not link.is_busy


# ---------------------------------------------------------------------- options


@asynccontextmanager
async def _open(url: str, *, color: str = "none") -> AsyncIterator[Counted]:
    objects = Counted()
    objects.data["said"] = f"{url} {color}".encode()
    yield objects


async def test_options_of_a_url_reach_the_run_and_the_objects() -> None:
    transport = dcr.stored(_open, poll_s=0.5, pack_s=0.0)
    async with transport.open("any://host/run?stale_s=7.5&color=red&pack_bytes=99") as run:
        assert (run.stale_s, run.pack_bytes, run.pack_s) == (7.5, 99, 0.0)
        assert (await run.objects.get("said")).data == b"any://host/run red"


@pytest.mark.parametrize("query", ["poll_s=fast", "shape=round", "poll_s=1&poll_s=2", "poll_s", "poll_s=-1"])
async def test_options_that_make_no_sense_are_refused(query: str) -> None:
    with pytest.raises(OptionError):
        async with dcr.stored(_open).open(f"any://host/run?{query}"):
            pass


def test_an_option_that_a_run_has_not_is_refused() -> None:
    with pytest.raises(OptionError, match="shape"):
        dcr.stored(_open, shape="round")


async def test_installed_and_held_reach_the_publisher_together(run: StoredRun, objects: Counted) -> None:
    """They are said one after the other, and read in one look."""
    async with run.sender() as sender, run.member(REF) as link:
        await sender.send(opening(identity()))
        await link.send(JOIN)
        await _said(sender)
        async with anyio.create_task_group() as group:
            objects.calls.clear()
            group.start_soon(link.send, vote("engine", identity(), "installed"))
            group.start_soon(link.send, Message(Join(REF, identity())))
        assert objects.calls["put live"] <= 2
        assert [type(header) for header in await _said(sender)] == [Ack, Join]


async def test_what_is_no_mailbox_is_told_once_and_hides_nobody(run: StoredRun, objects: Counted) -> None:
    for key in ("live/members/.DS_Store", "live/members/zzz"):
        await run.objects.put(key, [b"\xff"])
    async with run.sender() as sender, run.member(REF) as link:
        await link.send(JOIN)
        found, errors = [], 0
        with anyio.move_on_after(0.1):
            while True:
                try:
                    found.append((await sender.receive()).header)
                except WireError:
                    errors += 1
    assert (found, errors) == ([JOIN.header], 2)
