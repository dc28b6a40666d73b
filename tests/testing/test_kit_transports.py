"""The kit for transports notices: for every test in it there is a transport here that is wrong in just that way."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import msgspec
import pytest
from support.bent import (
    Bent,
    BentTransport,
    after,
    changing,
    doubling,
    dropping,
    half_sent,
    kit_tests,
    once,
    receiving,
    ref_of,
    replacing,
    sending,
    swapping,
    taken_and_then_a_wait,
)
from support.kept import attempts, clear

from dcr.errors import IncompleteError, LocalError
from dcr.protocol.catalogue import Outline
from dcr.protocol.wire import (
    Abort,
    Ack,
    Chunk,
    Commit,
    Head,
    Identity,
    Join,
    Leave,
    MemberRef,
    Message,
    Nack,
    Open,
    Seal,
)
from dcr.runs.records import OPENS, pack_key
from dcr.testing import TransportTests
from dcr.testing.conformance.scene import opening, sealing

Broken = Callable[[], BentTransport]
ANY_HEAD = Head("somebody else's", 1, None, b"")


class Kit(TransportTests):
    """The kit over a transport in memory, with short waits. It is not collected: it is no Test by name."""

    url = "memory:///{run}"
    deadline_s = 0.1
    lost_after_s = 0.3

    async def remove_part(self, url: str, of: Identity, part: str) -> str:
        return await self._damaged(url).remove_part(url, of, part)

    async def truncate_part(self, url: str, of: Identity, part: str) -> str:
        return await self._damaged(url).truncate_part(url, of, part)

    def _damaged(self, url: str) -> Kit:
        """The kit over what is bent: damage is done there."""
        kit = Kit()
        kit.transport = self.transport.straight
        kit.remove_part = super(Kit, kit).remove_part
        kit.truncate_part = super(Kit, kit).truncate_part
        return kit


# ---------------------------------------------------------------------- what is wrong with ledgers


async def _swap_whatever_the_tag(ledger: Any, head: Head, tag: bytes) -> bool:
    return await ledger.swap(head, (await ledger.read())[1])


async def _swap_and_say_no(ledger: Any, head: Head, tag: bytes) -> bool:
    current = (await ledger.read())[1]
    await ledger.swap(head, current)
    return current == tag


async def _compare_then_swap(ledger: Any, head: Head, tag: bytes) -> bool:
    if (await ledger.read())[1] != tag:
        return False
    await anyio.sleep(0.01)
    while not await _swap_whatever_the_tag(ledger, head, tag):
        pass
    return True


async def _swap_with_the_answer_turned_round(ledger: Any, head: Head, tag: bytes) -> bool:
    return not await ledger.swap(head, tag)


async def _swap_half(ledger: Any, head: Head, tag: bytes) -> bool:
    try:
        await anyio.sleep(0.01)
        return await ledger.swap(head, tag)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await ledger.swap(ANY_HEAD, tag)
        raise


async def _read_without_the_root(ledger: Any) -> tuple[Head | None, bytes]:
    head, tag = await ledger.read()
    return (msgspec.structs.replace(head, root=b"") if head else None), tag


async def _read_with_another_tag(ledger: Any) -> tuple[Head | None, bytes]:
    head, tag = await ledger.read()
    return head, tag + b"/" + uuid.uuid4().bytes


async def _swap_with_another_tag(ledger: Any, head: Head, tag: bytes) -> bool:
    return await ledger.swap(head, tag.split(b"/")[0])


async def _read_somebody_elses(ledger: Any) -> tuple[Head | None, bytes]:
    head, tag = await ledger.read()
    return head or ANY_HEAD, tag


def _ledger_of_its_own(ledger: Any) -> Any:
    return MemoryLedger()


class MemoryLedger:
    """A ledger that nobody shares."""

    def __init__(self) -> None:
        self._heads: list[Head | None] = [None]

    async def read(self) -> tuple[Head | None, bytes]:
        return self._heads[-1], b"%d" % len(self._heads)

    async def swap(self, head: Head, tag: bytes) -> bool:
        self._heads.append(head)
        return True


# ---------------------------------------------------------------------- what is wrong with delivery


def _cut(kind: type, size: int) -> Callable[[Any], Bent]:
    return receiving(changing(kind, lambda message: Message(message.header, message.body[:size])))


def _only_while_somebody_receives() -> BentTransport:
    receiving_now: list[bool] = []

    async def receive(link: Any) -> Message:
        receiving_now.append(True)
        return await link.receive()

    async def send(link: Any, message: Message) -> None:
        if receiving_now:
            await link.send(message)

    return BentTransport(sender=replacing(send=send), member=replacing(receive=receive))


def _to_the_first_taker() -> BentTransport:
    fault = once(_attempt_part)
    return BentTransport(member=lambda link: receiving(fault)(link))


def _attempt_part(message: Message) -> Any:
    kind, header = type(message.header), message.header
    return (kind, header.identity, getattr(header, "frame", None)) if kind in (Open, Chunk, Seal) else None


def _only_what_comes_after_joining() -> BentTransport:
    sent: list[Message] = []

    def member(link: Any) -> Bent:
        before = list(sent)
        return receiving(lambda message: () if message in before else (message,))(link)

    async def send(link: Any, message: Message) -> None:
        sent.append(message)
        await link.send(message)

    return BentTransport(sender=replacing(send=send), member=member)


def _of_any_term() -> BentTransport:
    """Members are handed everything that anybody sends."""
    sent, count = list[Message](), anyio.Semaphore(0)

    async def send(link: Any, message: Message) -> None:
        sent.append(message)
        count.release()

    async def receive(link: Any) -> Message:
        await count.acquire()
        return sent.pop(0)

    return BentTransport(sender=replacing(send=send), member=replacing(receive=receive))


def _sealed_at_the_end() -> BentTransport:
    """A sender that closes seals what it has opened."""

    def run(straight: Any) -> Bent:
        @asynccontextmanager
        async def sender() -> AsyncIterator[Any]:
            sent: list[Message] = []

            async def send(link: Any, message: Message) -> None:
                sent.append(message)
                await link.send(message)

            async with straight.sender() as link:
                yield replacing(send=send)(link)
                if sent and not isinstance(sent[-1].header, Seal):
                    await link.send(sealing(sent[0].header.identity, sent[1:]))

        return Bent(straight, sender=sender)

    return BentTransport(run=run)


def _each_writer_over_the_others() -> BentTransport:
    """Chunks are named by their number alone: a writer's takes the place of another's."""

    def run(straight: Any) -> Bent:
        @asynccontextmanager
        async def writer(part: tuple[int, int]) -> AsyncIterator[Any]:
            number = 0

            async def send(link: Any, message: Message) -> None:
                nonlocal number
                await link.send(message)
                data, identity = straight.objects.objects.data, message.header.identity
                data[pack_key(identity, (1, number))] = data.pop(pack_key(identity, (part[0], number)))
                number += 1

            async with straight.writer(part) as link:
                yield replacing(send=send)(link)

        return Bent(straight, writer=writer)

    return BentTransport(run=run)


async def _taken_for_sent(link: Any, message: Message) -> None:
    with suppress(LocalError):
        await link.send(message)


def _deaf_writers() -> BentTransport:
    return BentTransport(writer=replacing(send=_taken_for_sent))


def _one_run_for_all() -> BentTransport:
    return BentTransport(url=lambda url: "memory:///one")


def without_a_store(limit: int | None = None) -> BentTransport:
    """A transport that stores nothing; with a limit, a sender waits while so many messages have not been received."""
    room = anyio.Semaphore(limit or 1 << 30)

    async def send(link: Any, message: Message) -> None:
        await room.acquire()
        await link.send(message)

    async def receive(link: Any) -> Message:
        message: Message = await link.receive()
        room.release()
        return message

    return BentTransport(store=lambda _: None, sender=replacing(send=send), member=replacing(receive=receive))


# ---------------------------------------------------------------------- what is wrong with answers


def _deaf_to_what_was_before() -> BentTransport:
    def run(straight: Any) -> Bent:
        @asynccontextmanager
        async def sender() -> AsyncIterator[Any]:
            before = [Message(join) for join in await straight.members()]
            async with straight.sender() as link:
                yield receiving(lambda message: () if message in before else (message,))(link)

        return Bent(straight, sender=sender)

    return BentTransport(run=run)


def _only_of_the_last_attempt() -> BentTransport:
    def sender(link: Any) -> Bent:
        opened: list[Identity] = []

        def note(message: Message) -> list[Message]:
            opened.extend([message.header.identity] if isinstance(message.header, Open) else [])
            return [message]

        late = receiving(lambda message: () if getattr(message.header, "identity", None) in opened[:-1] else (message,))
        return sending(note)(late(link))

    return BentTransport(sender=sender)


async def _impatient(link: Any) -> Message:
    with anyio.move_on_after(0.05):
        return await link.receive()
    return Message(Leave(MemberRef("a", "1")))


def _impatient_sides() -> BentTransport:
    return BentTransport(sender=replacing(receive=_impatient), member=replacing(receive=_impatient))


async def _no_members(run: Any) -> list[Join]:
    return []


async def _members_without_what_they_hold(run: Any) -> list[Join]:
    return [Join(join.member, None) for join in await run.members()]


def _slash(message: Message) -> Message:
    header = message.header
    ref = MemberRef(header.member.member.replace("/", "_"), header.member.incarnation)
    return Message(msgspec.structs.replace(header, member=ref), message.body)


# ---------------------------------------------------------------------- what is wrong with closing


def _wrapping_errors(side: str) -> BentTransport:
    def run(straight: Any) -> Bent:
        @asynccontextmanager
        async def grouped(*ref: MemberRef) -> AsyncIterator[Any]:
            async with getattr(straight, side)(*ref) as link, anyio.create_task_group():
                yield link

        return Bent(straight, **{side: grouped})

    return BentTransport(run=run)


async def _waits_on(link: Any) -> Message:
    """A receive that does not notice that its link is closed."""
    try:
        return await link.receive()
    except IncompleteError:
        await anyio.sleep_forever()
        raise


def _slow_to_close() -> BentTransport:
    def run(straight: Any) -> Bent:
        @asynccontextmanager
        async def member(ref: MemberRef) -> AsyncIterator[Any]:
            async with straight.member(ref) as link:
                try:
                    yield link
                finally:
                    with anyio.CancelScope(shield=True):
                        await anyio.sleep(0.4)

        return Bent(straight, member=member)

    return BentTransport(run=run)


def _opened_once() -> BentTransport:
    opened: list[str] = []

    def url(asked: str) -> str:
        opened.append(asked)
        if len(opened) > 2:
            raise LocalError("this run was closed")
        return asked

    return BentTransport(url=url)


def _leaving_a_task() -> BentTransport:
    tasks: list[Any] = []

    def run(straight: Any) -> Any:
        tasks.append(asyncio.ensure_future(asyncio.sleep(60)))
        return straight

    return BentTransport(run=run)


def _leaving_a_thread() -> BentTransport:
    def run(straight: Any) -> Any:
        threading.Thread(target=threading.Event().wait, args=(1,)).start()
        return straight

    return BentTransport(run=run)


# ---------------------------------------------------------------------- what is wrong with stores


def _store(**methods: Callable[..., Any]) -> Broken:
    return lambda: BentTransport(store=replacing(**methods))


async def _never_minus_one(store: Any) -> int:
    return max(0, await store.newest())


async def _newest_sealed(store: Any) -> int:
    return max((one.identity.version for one in await store.outlines(-1, 1 << 40)), default=-1)


async def _no_attempts(store: Any, after: int, to: int) -> list[Outline]:
    return []


async def _first_attempt(store: Any, after: int, to: int) -> list[Outline]:
    return (await store.outlines(after, to))[:1]


async def _all_attempts(store: Any, after: int, to: int) -> list[Outline]:
    opened = sorted(attempts(store.objects.objects))
    return [Outline(of, None, "anchor", b"", b"", 0) for of in opened if after < of.version <= to]


async def _described_by_its_open(store: Any, of: Identity) -> tuple[Message, Message]:
    opened, _ = await store.describe(of)
    return opened, opened


async def _described_whatever_is_left(store: Any, of: Identity) -> tuple[Message, Message]:
    try:
        return await store.describe(of)
    except IncompleteError:
        return opening(of), sealing(of, [])


async def _read_without_bodies(store: Any, of: Identity) -> AsyncIterator[Message]:
    async for message in store.read(of):
        yield Message(message.header)


async def _read_by_name(store: Any, of: Identity) -> AsyncIterator[Message]:
    messages = [message async for message in store.read(of)]
    chunks = sorted(messages[1:-1], key=lambda message: str(message.header.frame))
    for message in (messages[0], *chunks, messages[-1]):
        yield message


async def _read_each_frame_once(store: Any, of: Identity) -> AsyncIterator[Message]:
    frames = set()
    async for message in store.read(of):
        frame = getattr(message.header, "frame", None)
        if frame is not None and frame in frames:
            raise IncompleteError(f"frame {frame} is there twice")
        frames.add(frame)
        yield message


async def _read_whatever_is_left(store: Any, of: Identity) -> AsyncIterator[Message]:
    try:
        async for message in store.read(of):
            yield message
    except IncompleteError:
        return


async def _read_once(store: Any, of: Identity) -> AsyncIterator[Message]:
    try:
        async for message in store.read(of):
            yield message
    finally:
        clear(store.objects.objects)


async def _prune_nothing(store: Any, keep: Any, below: int) -> None:
    pass


async def _prune_what_is_kept(store: Any, keep: Any, below: int) -> None:
    await store.prune(frozenset(), below)


async def _prune_what_is_newer(store: Any, keep: Any, below: int) -> None:
    await store.prune(keep, below + 1)


async def _prune_the_number_too(store: Any, keep: Any, below: int) -> None:
    await store.prune(keep, below)
    await store.objects.delete([entry.key for entry in await store.objects.list_all(OPENS)])


def _troubled_by_pruning() -> BentTransport:
    """A member that is told of an attempt that was removed, though it needs nothing of it any more."""
    pruned: list[int] = []

    async def prune(store: Any, keep: Any, below: int) -> None:
        pruned.append(below)
        await store.prune(keep, below)

    async def receive(link: Any) -> Message:
        if pruned:
            raise IncompleteError("the attempt vanished")
        return await link.receive()

    return BentTransport(store=replacing(prune=prune), member=replacing(receive=receive))


def _forgetting(what: str) -> BentTransport:
    """Everything is forgotten when the first sender closes."""

    def run(straight: Any) -> Bent:
        @asynccontextmanager
        async def sender() -> AsyncIterator[Any]:
            async with straight.sender() as link:
                yield link
            straight.objects.objects.data.clear()

        return Bent(straight, sender=sender)

    return BentTransport(run=run)


# ---------------------------------------------------------------------- each test, and what it notices


def _sender(fault: Any) -> Broken:
    """What a sender receives."""
    return lambda: BentTransport(sender=receiving(fault()))


def _member(fault: Any) -> Broken:
    """What a member receives."""
    return lambda: BentTransport(member=receiving(fault()))


def _ledger(**methods: Callable[..., Any]) -> Broken:
    return lambda: BentTransport(ledger=replacing(**methods))


def _run(**methods: Callable[..., Any]) -> Broken:
    return lambda: BentTransport(run=replacing(**methods))


HALF_CHUNK = half_sent(lambda message: Message(message.header, message.body[:5]))
HALF_ANSWER = half_sent(lambda message: Message(msgspec.structs.replace(message.header, reason="half")))

BREAKS: list[tuple[str, Broken, tuple[Any, ...]]] = [
    ("a_new_run_has_no_head", _ledger(read=_read_somebody_elses), ()),
    ("a_head_is_read_back_as_it_was_written", _ledger(read=_read_without_the_root), ()),
    ("a_head_is_seen_by_everybody_who_opens_the_run", lambda: BentTransport(ledger=_ledger_of_its_own), ()),
    ("a_tag_stays_while_nobody_swaps", _ledger(read=_read_with_another_tag, swap=_swap_with_another_tag), ()),
    ("a_stale_tag_is_refused", _ledger(swap=_swap_whatever_the_tag), ()),
    ("a_refused_swap_changes_nothing", _ledger(swap=_swap_and_say_no), ()),
    ("of_many_swaps_at_once_exactly_one_wins", _ledger(swap=_compare_then_swap), ()),
    ("the_head_is_that_of_the_winner", _ledger(swap=_swap_with_the_answer_turned_round), ()),
    *[
        ("a_swap_cancelled_at_any_await_happened_or_did_not", _ledger(swap=_swap_half), (how,))
        for how in ("scope", "task")
    ],
    ("a_url_that_makes_no_sense_is_refused", _one_run_for_all, ()),
    #
    ("messages_arrive_whole_and_in_the_order_of_sending", lambda: BentTransport(member=_cut(Chunk, 3000)), ()),
    ("messages_arrive_whole_and_in_the_order_of_sending", _member(lambda: once(_attempt_part_of_three)), ()),
    ("messages_arrive_in_order_while_more_are_being_sent", _member(lambda: swapping(Chunk)), ()),
    ("a_chunk_without_a_body_arrives", _member(lambda: lambda message: (message,) * bool(message.body)), ()),
    ("a_large_body_arrives_whole", lambda: BentTransport(member=_cut(Chunk, 1 << 20)), ()),
    ("an_attempt_waits_for_a_member_that_does_not_receive_yet", _only_while_somebody_receives, ()),
    ("every_member_receives_everything", _to_the_first_taker, ()),
    ("a_member_that_joins_in_the_middle_receives_the_attempt_from_its_opening", _only_what_comes_after_joining, ()),
    ("a_chunk_that_is_sent_again_after_the_seal_arrives_again", _member(lambda: once(_attempt_part)), ()),
    ("a_commit_reaches_every_member", _member(lambda: dropping(Commit)), ()),
    ("the_next_attempt_follows_the_commit", _member(lambda: after(Commit, lambda _: ())), ()),
    ("an_abort_reaches_every_member_in_the_middle_of_the_attempt", _member(lambda: dropping(Abort)), ()),
    ("the_next_attempt_follows_the_abort", _member(lambda: after(Abort, lambda _: ())), ()),
    ("a_later_term_ends_the_attempt_of_the_one_before", _member(lambda: dropping(Abort)), ()),
    ("an_attempt_of_a_superseded_term_is_not_delivered", _of_any_term, ()),
    ("an_attempt_whose_sender_is_gone_is_never_sealed", _sealed_at_the_end, ()),
    ("two_runs_never_mix", _one_run_for_all, ()),
    ("the_members_of_two_runs_never_mix", _one_run_for_all, ()),
    ("a_slow_receiver_holds_its_sender_back", without_a_store, ()),
    #
    ("chunks_of_several_writers_meet_in_one_seal", lambda: BentTransport(writer=sending(doubling(Chunk))), ()),
    ("chunks_of_several_writers_meet_in_one_seal", _each_writer_over_the_others, ()),
    ("a_stored_attempt_holds_the_chunks_of_all_writers", _each_writer_over_the_others, ()),
    ("a_writer_takes_chunks_of_open_attempts_and_nothing_else", _deaf_writers, ()),
    #
    ("a_join_reaches_the_sender", _sender(lambda: changing(Join, lambda m: Message(Join(m.header.member, None)))), ()),
    ("a_join_from_before_the_sender_came_reaches_it", _deaf_to_what_was_before, ()),
    ("a_member_that_joins_again_is_heard_with_what_it_holds_now", _sender(lambda: once(ref_of)), ()),
    ("two_lives_of_one_member_are_told_apart", _sender(lambda: once(lambda m: ref_of(m).member)), ()),
    ("a_member_may_have_any_name", _sender(lambda: changing(Join, _slash)), ("a/b",)),
    ("votes_reach_the_sender_once", _sender(lambda: doubling(Ack)), ()),
    (
        "votes_reach_the_sender_once",
        _sender(lambda: once(_voter)),
        (),
    ),
    ("refusals_reach_the_sender_once", _sender(lambda: doubling(Nack)), ()),
    (
        "refusals_reach_the_sender_once",
        _sender(lambda: changing(Nack, _short)),
        (),
    ),
    ("the_answers_of_one_member_arrive_in_the_order_of_sending", _sender(lambda: swapping(Nack)), ()),
    ("an_answer_to_the_attempt_before_is_heard", _only_of_the_last_attempt, ()),
    ("a_leave_reaches_the_sender_once", _sender(lambda: doubling(Leave)), ()),
    ("a_leave_reaches_the_sender_once", _sender(lambda: dropping(Leave)), ()),
    ("a_run_lists_its_members_and_what_they_hold", _run(members=_no_members), ()),
    ("a_run_lists_what_a_member_that_joined_again_holds_now", _run(members=_members_without_what_they_hold), ()),
    ("a_run_does_not_list_a_member_that_left", lambda: BentTransport(member=sending(dropping(Leave))), ()),
    ("a_member_that_vanishes_has_left_after_a_while", _sender(lambda: dropping(Leave)), ()),
    ("a_member_that_stays_is_not_taken_for_lost", lambda: BentTransport(sender=replacing(receive=_impatient)), ()),
    #
    *[
        (f"a_receive_of_{side}_cancelled_at_any_await_loses_nothing", broken, (how,))
        for side, broken in (
            ("a_member", lambda: BentTransport(member=replacing(receive=taken_and_then_a_wait))),
            ("the_sender", lambda: BentTransport(sender=replacing(receive=taken_and_then_a_wait))),
        )
        for how in ("scope", "task")
    ],
    *[
        (f"a_send_of_{side}_cancelled_at_any_await_is_whole_or_nothing", broken, (how,))
        for side, broken in (
            ("the_sender", lambda: BentTransport(sender=replacing(send=HALF_CHUNK))),
            ("a_member", lambda: BentTransport(member=replacing(send=HALF_ANSWER))),
        )
        for how in ("scope", "task")
    ],
    #
    *[
        (
            name,
            lambda: BentTransport(sender=replacing(receive=_waits_on), member=replacing(receive=_waits_on)),
            (side,),
        )
        for name in (
            "a_receive_on_a_closed_link_is_an_error",
            "a_receive_that_waits_while_its_link_is_closed_is_an_error",
        )
        for side in ("sender", "member")
    ],
    *[
        ("an_error_of_its_user_leaves_a_link_as_it_is", lambda side=side: _wrapping_errors(side), (side,))
        for side in ("sender", "member")
    ],
    ("a_side_that_is_cancelled_while_it_receives_closes", _slow_to_close, ("member",)),
    ("a_run_can_be_opened_again", _opened_once, ()),
    ("no_task_is_left_after_closing", _leaving_a_task, ()),
    ("no_thread_is_left_after_the_loop", _leaving_a_thread, ()),
    #
    ("nothing_was_opened_in_a_new_run", _store(newest=_never_minus_one), ()),
    ("the_newest_version_counts_though_it_was_only_opened", _store(newest=_newest_sealed), ()),
    ("a_sealed_attempt_is_listed", _store(outlines=_no_attempts), ()),
    ("attempts_at_one_version_are_listed_together", _store(outlines=_first_attempt), ()),
    ("an_attempt_without_its_seal_is_not_listed", _store(outlines=_all_attempts), ()),
    ("an_attempt_that_was_given_up_is_not_listed", _store(outlines=_all_attempts), ()),
    ("an_attempt_is_described_by_its_open_and_its_seal", _store(describe=_described_by_its_open), ()),
    ("an_attempt_is_read_as_it_was_sent", _store(read=_read_without_bodies), ()),
    ("many_chunks_are_read_in_the_order_of_sending", _store(read=_read_by_name), ()),
    ("a_chunk_that_was_sent_again_does_not_spoil_its_attempt", _store(read=_read_each_frame_once), ()),
    ("a_stored_attempt_outlives_its_links", lambda: _forgetting("attempts"), ()),
    ("the_head_outlives_its_links", lambda: _forgetting("head"), ()),
    ("a_reader_may_stop_in_the_middle", _store(read=_read_once), ()),
    ("an_attempt_that_was_never_sent_is_an_error", _store(describe=_described_whatever_is_left), ()),
    *[
        (f"an_attempt_with_a_{damage}_part_is_refused_by_name", _store(read=_read_whatever_is_left), (part,))
        for damage in ("missing", "truncated")
        for part in ("open", "chunk", "seal")
    ],
    *[
        ("an_attempt_with_a_missing_part_is_not_described", _store(describe=_described_whatever_is_left), (part,))
        for part in ("open", "seal")
    ],
    ("pruning_removes_what_is_older_and_not_kept", _store(prune=_prune_nothing), ()),
    ("a_pruned_attempt_is_an_error", _store(prune=_prune_nothing), ()),
    ("pruning_leaves_what_is_kept", _store(prune=_prune_what_is_kept), ()),
    ("pruning_leaves_what_is_newer", _store(prune=_prune_what_is_newer), ()),
    ("pruning_does_not_trouble_a_member_that_has_taken_what_is_removed", _troubled_by_pruning, ()),
    ("the_newest_version_is_known_after_pruning", _store(prune=_prune_the_number_too), ()),
]


def _attempt_part_of_three(message: Message) -> Any:
    return isinstance(message.header, Chunk) and message.header.frame // 3


def _voter(message: Message) -> MemberRef | None:
    return ref_of(message) if isinstance(message.header, Ack) else None


def _short(message: Message) -> Message:
    return Message(msgspec.structs.replace(message.header, reason=message.header.reason[:999]))


@pytest.mark.parametrize(("test", "broken", "args"), BREAKS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_kit_notices(test: str, broken: Broken, args: tuple[Any, ...]) -> None:
    kit = Kit()
    kit.transport = broken()
    with pytest.raises((AssertionError, pytest.fail.Exception, IncompleteError, LocalError)):
        getattr(kit, f"test_{test}")(*args)


def test_every_test_of_the_kit_can_fail() -> None:
    assert kit_tests(TransportTests) - {f"test_{name}" for name, _, _ in BREAKS} == set()


def test_a_transport_that_holds_its_sender_back_passes() -> None:
    kit = Kit()
    kit.deadline_s = 10.0
    kit.transport = without_a_store(limit=8)
    kit.test_a_slow_receiver_holds_its_sender_back()


def test_what_is_not_bent_passes() -> None:
    """The wrapping itself changes nothing: the breaks are what the kit notices."""
    kit = Kit()
    kit.deadline_s = 10.0
    same = receiving(lambda message: (message,))
    kit.transport = BentTransport(run=Bent, ledger=Bent, store=Bent, sender=same, member=same)
    kit.test_messages_arrive_whole_and_in_the_order_of_sending()
    kit.test_votes_reach_the_sender_once()
    kit.test_an_attempt_is_read_as_it_was_sent()


def test_a_store_without_hooks_says_what_to_override() -> None:
    class Bare(TransportTests):
        transport = BentTransport()
        url = "memory:///{run}"

    with pytest.raises(pytest.fail.Exception, match="override remove_part"):
        Bare().test_an_attempt_with_a_missing_part_is_refused_by_name("open")
