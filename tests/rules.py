"""Rules of the protocol: under the name of each, the switch that takes it out.

A switch replaces the code that holds the rule by what somebody might have written who did not know of it.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock

import anyio
import msgspec
import numpy as np
from switches import Switch, becomes, removed, together

from dcr import chain, commit, digest, kernels, placement, reference, wire
from dcr.baseline import Baseline
from dcr.commit import MAY_SERVE, Member, Receipt, Sender, Votes
from dcr.errors import Poisoned
from dcr.placement import Placement
from dcr.publish import Publisher
from dcr.publish.flight import Flights
from dcr.publish.headship import Headship
from dcr.publish.part import Part
from dcr.stages import apply, construct
from dcr.stages.construct import Construct, Whole
from dcr.stages.transfer import Fetch
from dcr.subscribe import Subscriber, ranks, subscriber
from dcr.subscribe.attempts import Attempts
from dcr.subscribe.backlog import Backlog
from dcr.subscribe.membership import Membership
from dcr.subscribe.rank import Prepared, Rank
from dcr.subscribe.ranks import Ranks
from dcr.testing.memory import _MemberLink
from dcr.wire import Ack, Head, Identity, Message, Open

U64 = np.uint64

# ---------------------------------------------------------------------- only what is committed


@becomes(Attempts, "_outcome")
def installed_after_the_commit(outcome: Any) -> Any:
    async def at_once(self: Attempts, identity: Identity) -> bool:
        return True

    return at_once


@becomes(Membership, "committed")
def the_head_is_followed(committed: Any) -> Any:
    async def newest_seal(self: Membership) -> Identity | None:
        head, store = await committed(self), self.store
        sealed = await store.attempts(await store.newest()) if store and head else []
        return sealed[-1] if sealed else head

    return newest_seal


@becomes(Attempts, "_outcome")
def a_commit_names_the_attempt(outcome: Any) -> Any:
    async def by_number(self: Attempts, identity: Identity) -> bool:
        while (committed := await self._member.committed()) is None or committed.version < identity.version:
            message = await self._member.next()
            if message is not None and isinstance(message.header, wire.Abort):
                return False
        return committed.version == identity.version

    return by_number


# ---------------------------------------------------------------------- identities


@becomes(Publisher, "_start")
def numbers_go_on_after_a_restart(start: Any) -> Any:
    async def from_the_head(self: Publisher, link: Any) -> None:
        await start(self, link)
        head = self._leader.headship.head.identity
        self._last_version = head.version if head else -1

    return from_the_head


@becomes(Publisher, "publish")
def numbers_go_on_after_an_abort(publish: Any) -> Any:
    async def again(self: Publisher, version: int | None = None) -> Any:
        if self._refit is not None and self._refit._error is not None:
            self._last_version = self._refit.version - 1
        return await publish(self, version)

    return again


@becomes(Votes, "prepare")
def votes_name_the_attempt(prepare: Any) -> Any:
    return lambda self, ack: prepare(self, msgspec.structs.replace(ack, identity=self.identity))


@becomes(Votes, "prepare")
def votes_name_the_bits(prepare: Any) -> Any:
    return lambda self, ack: prepare(self, msgspec.structs.replace(ack, root=self.root))


@becomes(Votes, "prepare")
def votes_name_the_incarnation(prepare: Any) -> Any:
    def by_name(self: Votes, ack: Ack) -> bool:
        alike = [ref for ref in self.electorate if ref.member == ack.member.member]
        counted = [prepare(self, msgspec.structs.replace(ack, member=ref)) for ref in alike]
        return any(counted)

    return by_name


@becomes(Fetch, "_chunk")
def chunks_name_the_attempt(take: Any) -> Any:
    async def any_attempt(self: Fetch, chunk: wire.Chunk, body: bytes, lease: Any) -> Any:
        return await take(self, msgspec.structs.replace(chunk, identity=self._receipt.identity), body, lease)

    return any_attempt


# ---------------------------------------------------------------------- who may move the head


@becomes(Votes, "carried")
def a_quorum_is_waited_for(carried: Any) -> Any:
    return property(lambda self: True)


@becomes(Headship, "move")
def a_swap_is_compared(move: Any) -> Any:
    async def retried_blind(self: Headship, identity: Identity, root: bytes) -> None:
        ours = Head(self.head.run, self.head.term, identity, root)
        while not await self._ledger.swap(ours, (await self._ledger.read())[1]):
            pass
        self.head = ours

    return retried_blind


@becomes(Headship, "_read_back")
def a_refused_swap_is_read_back(read_back: Any) -> Any:
    async def believed(self: Headship, ours: Head, base: bytes, failure: Exception | None) -> Sender:
        return Sender.FENCED

    return believed


the_head_is_read_first = removed(Headship, "require")


@becomes(Receipt, "__init__")
def members_refuse_lower_terms(init: Any) -> Any:
    def any_term(self: Receipt, opened: Open, *, run: str, term: int, holds: Identity | None) -> None:
        init(self, opened, run=run, term=0, holds=holds)

    return any_term


@becomes(_MemberLink, "_look")
def transports_show_the_heads_term(look: Any) -> Any:
    def any_term(self: _MemberLink) -> Message | None:
        attempts = self._run.attempts
        newest = max(attempts, key=lambda one: (one.version, one.attempt), default=None)
        head = self._run.ledger.head
        if newest is None or head is None or newest.term >= head.term or attempts[newest].aborted:
            return look(self)
        with mock.patch.object(self._run.ledger, "head", msgspec.structs.replace(head, term=newest.term)):
            return look(self)

    return any_term


# ---------------------------------------------------------------------- base first, and what is verified before a vote


@becomes(Receipt, "__init__")
def base_versions_are_compared(init: Any) -> Any:
    def any_base(self: Receipt, opened: Open, *, run: str, term: int, holds: Identity | None) -> None:
        held = opened if opened.base is None else msgspec.structs.replace(opened, base=holds)
        init(self, held, run=run, term=term, holds=holds)
        self.base = opened.base

    return any_base


@becomes(apply, "_require_base")
def base_digests_are_compared(require: Any) -> Any:
    return lambda seal, layout, *, held, base, **rest: require(seal, layout, held=base, base=base, **rest)


@becomes(apply, "_require_base")
def touched_old_bits_are_compared(require: Any) -> Any:
    return lambda seal, layout, *, old, touched, **rest: require(seal, layout, old=touched, touched=touched, **rest)


@becomes(digest, "require_equal")
def targets_are_compared(require: Any) -> Any:
    def but_targets(found: Any, expected: Any, schema: Any, what: str) -> None:
        if not what.endswith("prepared and sealed digests"):
            require(found, expected, schema, what)

    return but_targets


@becomes(Receipt, "missing")
def chunks_are_counted(missing: Any) -> Any:
    return property(lambda self: None if self._seal is None else frozenset())


bodies_match_their_digest = removed(wire, "check_chunk")
contents_match_their_digest = removed(apply, "check_content")
chunks_are_the_sealed_ones = removed(commit, "_require_sealed")


@becomes(Part, "ship_again")
def captured_bits_are_sent_again(ship_again: Any) -> Any:
    async def weights_of_now(self: Part, link: Any, compress: Any, again: Any) -> int:
        now = Construct(self.baseline, self._direct, self._source.storages())
        with mock.patch.object(self.baseline, "_overlay", {frame: now.patch(frame) for frame in again}):
            return await ship_again(self, link, compress, again)

    return weights_of_now


# ---------------------------------------------------------------------- live memory


@becomes(Placement, "install")
def what_is_written_is_absolute(install: Any) -> Any:
    def relative(self: Placement, ready: Any) -> None:
        strips, writes = self._frames[ready.frame].strips, []
        for write in ready.writes:
            bits = kernels.gather(strips[write.home].table, write.positions) ^ write.old ^ write.bits
            writes.append(dataclasses.replace(write, bits=bits))
        install(self, dataclasses.replace(ready, writes=tuple(writes)))

    return relative


a_failed_installation_is_undone = removed(apply, "_undo")


@becomes(apply, "_undo")
def all_frames_are_undone(undo: Any) -> Any:
    return lambda loader, begun, cause: undo(loader, begun[-1:], cause)


@becomes(apply, "_undo")
def an_undo_that_failed_is_told(undo: Any) -> Any:
    def hushed_up(*args: Any) -> None:
        with suppress(Poisoned):
            undo(*args)

    return hushed_up


def _serves_too(*states: Member) -> Switch:
    return becomes(subscriber, "MAY_SERVE")(lambda before: MAY_SERVE | set(states))


a_poisoned_member_does_not_serve = _serves_too(Member.POISONED)
a_member_that_writes_does_not_serve = _serves_too(Member.INSTALLING, Member.SEEDING)


@becomes(Subscriber, "version")
def a_label_follows_the_installation(version: Any) -> Any:
    def of_the_head(self: Subscriber) -> int | None:
        member = self._member
        return member.head.identity.version if member and member.holds and member.head else None

    return property(of_the_head)


@becomes(Membership, "doubt")
def memory_in_doubt_is_read(doubt: Any) -> Any:
    async def trusted(self: Membership, identity: Identity, error: Exception) -> bool:
        if self.holds is not None:
            self.move("dropped")
        return False

    return trusted


what_was_seeded_is_read = removed(Rank, "require_root")


@becomes(Backlog, "recognise")
def weights_are_recognised_by_their_bits(recognise: Any) -> Any:
    async def believed(self: Backlog) -> None:
        member = self._member
        head = await member.committed()
        if head is not None and member.store is not None:
            await member.rank.bind((await member.store.describe(head))[0])
            await member.hold(head)

    return believed


@becomes(Rank, "inspect")
def an_anchor_is_held_if_its_bits_are(inspect: Any) -> Any:
    async def believed(self: Rank, receipt: Receipt, *rest: Any) -> tuple[bytes, Prepared]:
        root, _ = await inspect(self, receipt, *rest)
        return root, Prepared(receipt.identity, root, self._lanes, [])

    return believed


@becomes(placement, "_prepare_sparse")
def copies_are_compared_before_a_write(prepare: Any) -> Any:
    return lambda *args: dataclasses.replace(prepare(*args), copies_agree=True)


copies_are_compared_in_a_scan = removed(placement, "_astray")


@becomes(Ranks, "undo")
def all_ranks_are_undone(undo: Any) -> Any:
    def the_last(self: Ranks, ready: Any) -> None:
        undo(self, dataclasses.replace(ready, shares=ready.shares[-1:]))

    return the_last


@becomes(ranks, "_summed")
def ranks_compare_what_they_share(summed: Any) -> Any:
    return lambda *args: (summed(*args)[0], True)


@becomes(ranks, "_summed")
def what_ranks_share_is_counted_once(summed: Any) -> Any:
    def all_counted(parts: Any, tensors: Any, numbers: Any, sums: Any) -> Any:
        once, same = summed(parts, tensors, numbers, sums)
        total = np.zeros_like(once)
        np.add.at(total, np.searchsorted(tensors, parts.tensor[np.concatenate(numbers)]), np.concatenate(sums))
        return total, same

    return all_counted


storages_stay_where_they_were_bound = removed(Rank, "require_epoch")


@becomes(reference, "mix")
def positions_and_bits_are_words_of_their_own(mix: Any) -> Any:
    return lambda key, index, bits: mix(key, np.zeros_like(index), (index << U64(16)) | bits)


# ---------------------------------------------------------------------- the trainer's side


@becomes(Publisher, "_resume")
def a_restarted_trainer_compares_its_bits(resume: Any) -> Any:
    async def believed(self: Publisher, head: Head) -> None:
        lanes, _ = await self._part.scan()
        self._part.adopt(head.identity, lanes)

    return believed


@becomes(Publisher, "_resume")
def a_base_digest_is_the_trainers_own(resume: Any) -> Any:
    async def of_the_record(self: Publisher, head: Head) -> None:
        await resume(self, head)
        store = self._run.store
        if head.identity is not None and store is not None and self._part.baseline.identity is not None:
            _, sealed = await store.describe(head.identity)
            self._part.baseline.lanes = np.split(digest.unpack(sealed.body), 3)[1]

    return of_the_record


@becomes(Flights, "_common_base")
def a_version_opens_on_the_heads_digest(common_base: Any) -> Any:
    return lambda self, begun, lanes: begun[0].base


@becomes(Flights, "_begin")
def a_base_digest_is_the_ranks_own(begin: Any) -> Any:
    async def of_the_record(self: Flights, refit: Any) -> Any:
        begun = await begin(self, refit)
        if begun.base is not None:
            self._lanes = self._target
        return begun

    return of_the_record


def _moves_early(*, digests: bool) -> Switch:
    @becomes(Baseline, "drop")
    def switch(drop: Any) -> Any:
        def fold(self: Baseline) -> None:
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
a_refusal_sends_the_publisher_to_its_own_memory = removed(Part, "require_baseline")
captured_weights_are_audited = removed(construct, "_audit")


@becomes(Publisher, "_work")
def _anchors_have_tasks(work: Any) -> Any:
    async def with_a_group(self: Publisher, requests: Any) -> None:
        self._flights.group = self._group
        await work(self, requests)

    return with_a_group


@becomes(Flights, "_keep")
def _anchors_beside_commits(keep: Any) -> Any:
    async def beside(self: Any, report: Any) -> None:
        self.group.start_soon(partial(keep, self, report))

    return beside


@becomes(Whole, "run")
def _a_frame_at_a_time(run: Any) -> Any:
    async def slowly(self: Whole, inbox: Any, outbox: Any) -> None:
        async for frame in inbox:
            await anyio.sleep(0.1)
            await outbox.send(self.patch(frame))

    return slowly


anchors_are_made_between_commits = together(_anchors_have_tasks, _anchors_beside_commits, _a_frame_at_a_time)


@becomes(chain, "anchor_of")
def an_anchor_has_its_versions_root(anchor_of: Any) -> Any:
    async def any_anchor(store: Any, link: chain.Stored) -> chain.Stored | None:
        for identity in await store.attempts(link.open.identity.version):
            stored = chain.Stored(*await store.describe(identity))
            if stored.open.base is None:
                return stored
        return None

    return any_anchor
