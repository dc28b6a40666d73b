"""Rules of the protocol: under the name of each, the switch that takes it out.

A switch replaces the code that holds the rule (`hooks`) by what somebody might have written who did not know of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import suppress
from typing import Any

import anyio
import msgspec
import numpy as np

from dcr import kernels
from dcr.errors import DcrError, Poisoned
from dcr.protocol import wire
from dcr.protocol.machines import AttemptEvent, MemberEvent, MemberState
from dcr.protocol.wire import Ack, Head, Identity, Message, Open
from simulation import hooks
from simulation.switches import Switch, becomes, removed, together

U64 = np.uint64

# ---------------------------------------------------------------------- only what is committed


@becomes(hooks.VERDICT)
def installed_after_the_commit(verdict: Any) -> Any:
    return lambda *head: True


@becomes(hooks.MEMBER_COMMITTED)
def the_head_is_followed(committed: Any) -> Any:
    async def newest_seal(self: Any) -> Identity | None:
        head, store = await committed(self), self.store
        newest = await store.newest() if store and head else 0
        sealed = await store.outlines(newest - 1, newest) if store and head else []
        return sealed[-1].identity if sealed else head

    return newest_seal


@becomes(hooks.VERDICT)
def a_commit_names_the_attempt(verdict: Any) -> Any:
    def by_number(identity: Identity, committed: Identity | None, term: int) -> bool | None:
        if committed is None or committed.version < identity.version:
            return None
        return committed.version == identity.version

    return by_number


# ---------------------------------------------------------------------- identities


@becomes(hooks.LEADER_START)
def numbers_go_on_after_a_restart(start: Any) -> Any:
    async def from_the_head(self: Any, layout: Any) -> Any:
        return msgspec.structs.replace(await start(self, layout), newest=-1)

    return from_the_head


def _numbers_come_back() -> Switch:
    last: list[Any] = []  # the version before
    free: list[int] = []  # its number, if it was given up

    @becomes(hooks.PUBLISH)
    def noticed(publish: Any) -> Any:
        last.clear()

        async def then_notice(self: Any, version: int | None = None) -> Any:
            free.clear()
            if last and last[0].ended:
                try:
                    await last[0].committed()
                except (DcrError, OSError):
                    free.append(last[0].version)
            refit = await publish(self, version)
            last[:] = [refit]
            return refit

        return then_notice

    @becomes(hooks.TAKE_NUMBER)
    def reused(take: Any) -> Any:
        return lambda number, before: free.pop() if free else take(number, before)

    return together(noticed, reused)


numbers_go_on_after_an_abort = _numbers_come_back()


@becomes(hooks.VOTES_PREPARE)
def votes_name_the_attempt(prepare: Any) -> Any:
    return lambda self, ack: prepare(self, msgspec.structs.replace(ack, identity=self.identity))


@becomes(hooks.VOTES_PREPARE)
def votes_name_the_bits(prepare: Any) -> Any:
    return lambda self, ack: prepare(self, msgspec.structs.replace(ack, root=self.root))


@becomes(hooks.VOTES_PREPARE)
def votes_name_the_incarnation(prepare: Any) -> Any:
    def by_name(self: Any, ack: Ack) -> bool:
        alike = [ref for ref in self.electorate if ref.member == ack.member.member]
        counted = [prepare(self, msgspec.structs.replace(ack, member=ref)) for ref in alike]
        return any(counted)

    return by_name


@becomes(hooks.RANK_PREPARE)
def chunks_name_the_attempt(prepare: Any) -> Any:
    async def any_attempt(self: Any, receipt: Any, receive: Any, again: Any) -> Any:
        async def renamed() -> Message:
            message = await receive()
            if not isinstance(message.header, wire.Chunk):
                return message
            return Message(msgspec.structs.replace(message.header, identity=receipt.identity), message.body)

        return await prepare(self, receipt, renamed, again)

    return any_attempt


# ---------------------------------------------------------------------- who may move the head


@becomes(hooks.VOTES_CARRIED)
def a_quorum_is_waited_for(carried: Any) -> Any:
    return property(lambda self: True)


@becomes(hooks.HEADSHIP_MOVE)
def a_swap_is_compared(move: Any) -> Any:
    async def retried_blind(self: Any, identity: Identity, root: bytes, machine: Any) -> None:
        ours = Head(self.head.run, self.head.term, identity, root)
        while not await self.ledger.swap(ours, (await self.ledger.read())[1]):
            pass
        self.head = ours

    return retried_blind


@becomes(hooks.HEADSHIP_READ_BACK)
def a_refused_swap_is_read_back(read_back: Any) -> Any:
    async def believed(self: Any, ours: Head, base: bytes, failure: Exception | None) -> AttemptEvent:
        return AttemptEvent.LOST

    return believed


the_head_is_read_first = removed(hooks.HEADSHIP_REQUIRE)


@becomes(hooks.RECEIPT)
def members_refuse_lower_terms(init: Any) -> Any:
    def any_term(self: Any, opened: Open, *, run: str, term: int, holds: Identity | None) -> None:
        init(self, opened, run=run, term=0, holds=holds)

    return any_term


@becomes(hooks.SHOWN_TO_MEMBERS)
def transports_show_the_heads_term(is_current: Any) -> Any:
    return lambda identity, head: True


# ---------------------------------------------------------------------- base first, and what is verified before a vote


@becomes(hooks.RECEIPT)
def base_versions_are_compared(init: Any) -> Any:
    def any_base(self: Any, opened: Open, *, run: str, term: int, holds: Identity | None) -> None:
        held = opened if opened.base is None else msgspec.structs.replace(opened, base=holds)
        init(self, held, run=run, term=term, holds=holds)
        self.base = opened.base

    return any_base


@becomes(hooks.REQUIRE_BASE)
def base_digests_are_compared(require: Any) -> Any:
    return lambda seal, layout, *, held, base, **rest: require(seal, layout, held=base, base=base, **rest)


@becomes(hooks.REQUIRE_BASE)
def touched_old_bits_are_compared(require: Any) -> Any:
    return lambda seal, layout, *, old, touched, **rest: require(seal, layout, old=touched, touched=touched, **rest)


@becomes(hooks.REQUIRE_EQUAL)
def targets_are_compared(require: Any) -> Any:
    def but_targets(found: Any, expected: Any, schema: Any, what: str) -> None:
        if not what.endswith("prepared and sealed digests"):
            require(found, expected, schema, what)

    return but_targets


@becomes(hooks.RECEIPT_MISSING)
def chunks_are_counted(missing: Any) -> Any:
    return property(lambda self: None if missing.fget(self) is None else frozenset())


bodies_match_their_digest = removed(hooks.CHECK_CHUNK)
contents_match_their_digest = removed(hooks.CHECK_CONTENT)
chunks_are_the_sealed_ones = removed(hooks.REQUIRE_SEALED)


def _weights_of_now() -> Switch:
    constructs: list[Any] = []  # that of the version in flight

    @becomes(hooks.CONSTRUCT)
    def noticed(init: Any) -> Any:
        def then_notice(self: Any, *args: Any, **named: Any) -> None:
            init(self, *args, **named)
            constructs[:] = [self]

        return then_notice

    @becomes(hooks.BASELINE_HELD)
    def read_again(held: Any) -> Any:
        return lambda self, frame: constructs[0].patch(frame)

    return together(noticed, read_again)


captured_bits_are_sent_again = _weights_of_now()


# ---------------------------------------------------------------------- live memory


def _relative_writes() -> Switch:
    old: dict[int, Any] = {}  # bits that were gathered, by those that they go with

    @becomes(hooks.PLACEMENT_INSTALL)
    def noticed(install: Any) -> Any:
        def then_install(self: Any, ready: Any) -> None:
            old.update((id(write.bits), write.old) for write in ready.writes)
            try:
                install(self, ready)
            finally:
                old.clear()

        return then_install

    @becomes(hooks.SCATTER)
    def relative(scatter: Any) -> Any:
        def against_live_bits(table: Any, positions: Any, bits: Any) -> Any:
            if id(bits) in old:
                bits = kernels.gather(table, positions) ^ old[id(bits)] ^ bits
            return scatter(table, positions, bits)

        return against_live_bits

    return together(noticed, relative)


what_is_written_is_absolute = _relative_writes()
a_failed_installation_is_undone = removed(hooks.UNDO)


@becomes(hooks.UNDO)
def all_frames_are_undone(undo: Any) -> Any:
    return lambda loader, begun, *rest: undo(loader, begun[-1:], *rest)


@becomes(hooks.UNDO)
def an_undo_that_failed_is_told(undo: Any) -> Any:
    def hushed_up(*args: Any) -> None:
        with suppress(Poisoned):
            undo(*args)

    return hushed_up


def _serves_too(*states: MemberState) -> Switch:
    return becomes(hooks.MAY_SERVE)(lambda may_serve: may_serve | set(states))


a_poisoned_member_does_not_serve = _serves_too(MemberState.POISONED)
a_member_that_writes_does_not_serve = _serves_too(MemberState.INSTALLING, MemberState.SEEDING)


@becomes(hooks.MEMBER_VERSION)
def a_label_follows_the_installation(version: Any) -> Any:
    return property(lambda self: None if version.fget(self) is None else self.latest)


@becomes(hooks.MEMBER_DOUBT)
def memory_in_doubt_is_read(doubt: Any) -> Any:
    async def trusted(self: Any, identity: Identity, error: Exception) -> bool:
        self.machine.move(MemberEvent.DROPPED)
        return False

    return trusted


what_was_seeded_is_read = removed(hooks.RANK_REQUIRE_ROOT)


@becomes(hooks.RECOGNISE_STORED)
def weights_are_recognised_by_their_bits(recognise: Any) -> Any:
    return lambda links, head, **held: head


@becomes(hooks.DIGESTS_EQUAL)
def an_anchor_is_held_if_its_bits_are(equal: Any) -> Any:
    return lambda held, target: True


@becomes(hooks.PLACEMENT_PREPARE)
def copies_are_compared_before_a_write(prepare: Any) -> Any:
    return lambda *args: dataclasses.replace(prepare(*args), copies_agree=True)


copies_are_compared_in_a_scan = becomes(hooks.COPIES_ASTRAY)(lambda astray: lambda bound: 0)


@becomes(hooks.RANKS_UNDO)
def all_ranks_are_undone(undo: Any) -> Any:
    def the_last(self: Any, ready: Any) -> None:
        undo(self, dataclasses.replace(ready, shares=ready.shares[-1:]))

    return the_last


@becomes(hooks.RANKS_SUMMED)
def ranks_compare_what_they_share(summed: Any) -> Any:
    return lambda *args: (summed(*args)[0], True)


@becomes(hooks.RANKS_SUMMED)
def what_ranks_share_is_counted_once(summed: Any) -> Any:
    def all_counted(parts: Any, tensors: Any, numbers: Any, sums: Any) -> Any:
        once, same = summed(parts, tensors, numbers, sums)
        total = np.zeros_like(once)
        np.add.at(total, np.searchsorted(tensors, parts.tensor[np.concatenate(numbers)]), np.concatenate(sums))
        return total, same

    return all_counted


storages_stay_where_they_were_bound = removed(hooks.RANK_REQUIRE_FINGERPRINT)


@becomes(hooks.MIX)
def positions_and_bits_are_words_of_their_own(mix: Any) -> Any:
    return lambda key, index, bits: mix(key, np.zeros_like(index), (index << U64(16)) | bits)


# ---------------------------------------------------------------------- the trainer's side


@becomes(hooks.RECOGNISE_HEAD)
def a_restarted_trainer_compares_its_bits(recognise: Any) -> Any:
    return lambda head, root: head.identity


def _of_the_record() -> Switch:
    targets: dict[Identity, Any] = {}  # what seals say of versions

    @becomes(hooks.LEADER_SEAL)
    def noticed(seal: Any) -> Any:
        async def then_seal(self: Any, identity: Identity, base: Any, refs: Any, digests: Any) -> None:
            targets[identity] = digests[1]
            await seal(self, identity, base, refs, digests)

        return then_seal

    @becomes(hooks.BASELINE_ADOPT)
    def believed(adopt: Any) -> Any:
        return lambda self, frames, identity, lanes: adopt(self, frames, identity, targets[identity].copy())

    return together(noticed, believed)


a_base_digest_is_the_trainers_own = _of_the_record()


@becomes(hooks.COMMON_BASE)
def a_version_opens_on_the_heads_digest(common_base: Any) -> Any:
    return lambda bases, *roots: bases[0]


@becomes(hooks.LEADER_SEAL)
def a_base_digest_is_the_ranks_own(seal: Any) -> Any:
    targets: list[Any] = []  # what the last seal said

    async def of_the_record(self: Any, identity: Identity, base: Any, refs: Any, digests: Any) -> None:
        held, target, touched = digests
        if base is not None and targets:
            held, target = targets[0], targets[0] + (target - held)
        targets[:] = [target]
        await seal(self, identity, base, refs, (held, target, touched))

    return of_the_record


def _moves_early(*, digests: bool) -> Switch:
    @becomes(hooks.BASELINE_DROP)
    def switch(drop: Any) -> Any:
        def fold(self: Any) -> None:
            lanes = self.lanes
            if self.identity is not None:
                self.fold(self.identity)
            if not digests:
                self.lanes = lanes
            drop(self)

        return fold

    return switch


the_baseline_moves_after_the_head = _moves_early(digests=True)
so_do_its_bits = _moves_early(digests=False)
a_refusal_sends_the_publisher_to_its_own_memory = removed(hooks.REQUIRE_BASELINE)
captured_weights_are_audited = removed(hooks.AUDIT)


@becomes(hooks.KEEP)
def _anchors_beside_commits(keep: Any) -> Any:
    kept: list[Any] = []

    async def beside(self: Any, report: Any) -> None:
        kept.append(asyncio.create_task(keep(self, report)))

    return beside


@becomes(hooks.WHOLE_RUN)
def _a_frame_at_a_time(run: Any) -> Any:
    async def slowly(self: Any, inbox: Any, outbox: Any) -> None:
        async for frame in inbox:
            await anyio.sleep(0.1)
            await outbox.send(self.patch(frame))

    return slowly


anchors_are_made_between_commits = together(_anchors_beside_commits, _a_frame_at_a_time)


@becomes(hooks.ANCHOR_OF)
def an_anchor_has_its_versions_root(anchor_of: Any) -> Any:
    async def any_anchor(store: Any, link: Any) -> Any:
        version = link.open.identity.version
        for outline in await store.outlines(version - 1, version):
            stored = type(link)(*await store.describe(outline.identity))
            if stored.open.base is None:
                return stored
        return None

    return any_anchor
