"""The publisher: a trainer's end. It captures, ships, seals, collects votes, moves the head, then its baseline.

One version is in flight at a time. All work runs in tasks that the publisher owns; what its user awaits only waits
for them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from anyio.streams.memory import MemoryObjectReceiveStream

from dcr import digest, frames, kernels, plugins
from dcr.baseline import Baseline, HealSet
from dcr.budget import ByteBudget, MiB
from dcr.closing import Contexts, started
from dcr.commit import Votes
from dcr.errors import DcrError, DigestMismatch, Fenced, NotCommittedError, StateError, VoteError, WireError
from dcr.frames import FRAME_ELEMS, Layout
from dcr.ledger import Headship
from dcr.observe import Event, Observer, Summary, ignore
from dcr.patch import Operation, Patch
from dcr.pipeline import Pipeline
from dcr.placement import canonical_table
from dcr.refit import Refit, Report
from dcr.roster import Roster
from dcr.seams import Codec, Run, Source, Stage, Transport
from dcr.stages.compress import Compress
from dcr.stages.construct import Construct, Whole, source_table
from dcr.stages.transfer import Transfer
from dcr.views import Bits, Lanes
from dcr.wire import Abort, ChunkRef, Commit, Identity, Message, Open, Seal

ABORT_TIMEOUT_S = 10.0
COMMIT_TIMEOUT_S = 120.0


class Publisher:
    """Publishes versions of a source's weights; an async context manager.

    transport: None finds one by the URL's scheme. codec: encodes chunks; a name (see `dcr plugins`) or a value.
    operation: how bit-preserving changes travel. budget: bytes of encoded chunks in flight, 256 MiB by default.
    quorum: how many members that hold the base must prepare a version before it is committed, or "all" of them.
    vote_timeout_s: how long they may take, counted from the seal. stages: stages of your own between compress and
    transfer. frame_elems: elements per frame. workers: threads that compare, and as many that compress.
    anchor_every: after every so many commits the committed bits are stored whole as well, so that a late joiner reads
    few deltas; what lies before the last but one such anchor is removed. None: all versions are kept, and the first is
    the only anchor.
    """

    def __init__(
        self,
        url: str,
        *,
        source: Source,
        transport: Transport | None = None,
        codec: str | Codec = "gaps",
        operation: Operation = Operation.STEP,
        budget: ByteBudget | None = None,
        quorum: int | Literal["all"] = "all",
        vote_timeout_s: float = 600.0,
        stages: Sequence[Stage[Any, Any]] = (),
        frame_elems: int = FRAME_ELEMS,
        anchor_every: int | None = None,
        workers: int = 1,
        observe: Observer = ignore,
    ) -> None:
        self._url = url
        self._source = source
        self._transport: Transport = transport or plugins.transport_for(url)
        self._codec: Codec = plugins.load("dcr.codecs", codec) if isinstance(codec, str) else codec
        self._operation = operation
        self._budget = budget or ByteBudget(256 * MiB)
        self._quorum = quorum
        self._vote_timeout_s = vote_timeout_s
        self._stages = tuple(stages)
        self._frame_elems = frame_elems
        self._workers = workers
        self._anchor_every = anchor_every
        self._anchors: list[int] = []
        self._commits = 0
        self._observe = observe
        self._roster = Roster(observe)
        self._refit: Refit | None = None
        self._turn = anyio.Lock()
        self._drained = anyio.Event()
        self._last_version = -1
        self._broken: Exception | None = None
        self.heal_set = HealSet()

    # ------------------------------------------------------------------ what its user calls

    async def publish(self, version: int | None = None) -> Refit:
        """Begin to publish the weights as they are now; returns once the version before it has ended.

        version: greater than every one before it; None takes the next number. Do not change the weights before
        `captured()` returns.

        Raises:
            StateError: the number was used. Any error of the version before it that nobody has been told yet.
        """
        async with self._turn:
            await self._settled()
            if self._broken is not None:
                raise StateError(f"this publisher cannot go on: {self._broken}") from self._broken
            number = self._last_version + 1 if version is None else version
            if number <= self._last_version:
                raise StateError(
                    f"version {number} is not new: this run has used {self._last_version}; "
                    f"publish {self._last_version + 1} or more"
                )
            refit = Refit(number)
            try:
                self._requests.send_nowait(refit)  # there is room: the version before has ended
            except (AttributeError, anyio.ClosedResourceError, anyio.BrokenResourceError):
                raise StateError("this publisher is not open: use it within `async with`") from None
            self._last_version, self._refit = number, refit
            return refit

    async def captured(self) -> None:
        """Wait until the last `publish` has read the weights: they may change from now on."""
        if self._refit is not None:
            await self._refit.captured()

    async def joined(self, members: int) -> None:
        """Wait until at least so many members take part."""
        while len(self._roster) < members:
            await self._roster.news()

    @property
    def members(self) -> list[str]:
        """The members that take part now."""
        return sorted(ref.member for ref in self._roster)

    @property
    def version(self) -> int | None:
        """The last committed version, None before the first."""
        return self._baseline.identity.version if self._baseline.identity else None

    # ------------------------------------------------------------------ life

    async def __aenter__(self) -> Publisher:
        self._contexts = contexts = Contexts()
        try:
            self._run: Run = await contexts.enter(self._transport.open(self._url))
            self._link = await contexts.enter(self._run.sender())
            self._requests, receive = anyio.create_memory_object_stream[Refit](1)
            contexts.call(self._requests.close)
            contexts.call(receive.close)
            self._group = await contexts.enter(anyio.create_task_group())
            contexts.call(self._group.cancel_scope.cancel)
            await started(self._group, self._start)
            self._group.start_soon(self._listen)
            self._group.start_soon(self._work, receive)
        except BaseException as error:
            await contexts.close(error)
            raise
        return self

    async def _start(self) -> None:
        self._plan = frames.plan(self._source.schema, self._source.shards, self._frame_elems)
        layout = Layout(self._source.schema, tuple(one.spec for one in self._plan))
        self._opening = frames.encode(layout)
        self._baseline = Baseline(layout)
        self._headship = await Headship.take(self._run.ledger)
        await self._resume()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self._settled()
                self._requests.close()
                await self._drained.wait()
        finally:
            self._roster.end(StateError("the publisher was closed"))
            await self._contexts.close(error)

    async def _settled(self) -> None:
        """The version before has ended, and somebody knows how."""
        if self._refit is not None and not self._refit.seen:
            await self._refit.committed()

    async def _resume(self) -> None:
        """If the source holds the very bits of the head's version, start from it; else an anchor comes next."""
        head = self._headship.head
        self._last_version = await self._run.store.newest() if self._run.store else -1
        if head.identity is None:
            return
        self._last_version = max(self._last_version, head.identity.version)
        bits, lanes = await anyio.to_thread.run_sync(self._scan)
        if digest.root(lanes) == head.root:
            self._baseline.adopt(bits, head.identity, lanes)
            self.heal_set.forget(head.identity.version)

    def _scan(self) -> tuple[list[Bits], Lanes]:
        """The source's canonical bits per frame, and their digest. Blocking."""
        storages, lanes = self._source.storages(), digest.zero(len(self._source.schema.tensors))
        bits: list[Bits] = []
        for frame, source in zip(self._baseline.layout.frames, self._plan, strict=True):
            bits.append(kernels.read(source_table(source, storages), source.kind))
            lanes[list(frame.tensors)] += kernels.digest(canonical_table(frame, bits[-1]), frame.keys)
        return bits, lanes

    # ------------------------------------------------------------------ tasks

    async def _listen(self) -> None:
        while True:
            try:
                message = await self._link.receive()
            except WireError as error:
                self._observe(Event("ignored", detail=str(error)))
            except (DcrError, OSError) as error:
                self._broken = error
                self._roster.end(error)
                return
            else:
                self._roster.receive(message)

    async def _work(self, requests: MemoryObjectReceiveStream[Refit]) -> None:
        async for refit in requests:
            try:
                await self._publish(refit)
            except Exception as error:
                error.add_note(f"publishing version {refit.version}")
                refit.fail(error)
                self._emit("failed", refit.version, detail=str(error))
            except BaseException:
                refit.fail(StateError(f"the publisher was closed while version {refit.version} was in flight"))
                raise
        self._drained.set()

    def _emit(self, name: str, version: int, **rest: Any) -> None:
        self._observe(Event(name, version, **rest))

    # ------------------------------------------------------------------ one version

    async def _publish(self, refit: Refit) -> None:
        began_s = time.monotonic()
        head, base = self._headship.head, self._baseline.identity
        try:
            await self._headship.require()
        except Fenced as error:
            self._broken = error
            raise
        identity = Identity(head.run, head.term, refit.version, 1)
        votes = self._roster.open(identity, base, self._quorum, refit)
        compress = Compress(identity, self._codec, self._operation, self._budget, workers=self._workers)
        try:
            refs, stages, captured_s, wire_bytes = await self._send(refit, votes, base, compress)
            sealed = self._seal(votes, base, refs)
            await self._link.send(sealed)
            self._emit("sealed", refit.version)
            again = await self._collect(votes, compress)
        except BaseException as error:
            self._baseline.drop()
            self._roster.close()
            await self._abort(identity, error)
            raise
        changed = sum(patch.changed for patch in self._baseline.patches())
        await self._commit(votes)
        awaited = self._roster.committed(votes)
        self._roster.close()
        report = Report(
            identity=identity,
            is_anchor=base is None,
            elements=self._source.schema.numel,
            changed=changed,
            chunks=len(refs),
            wire_bytes=wire_bytes + again,
            dense_bytes=self._source.schema.nbytes,
            sent_again=again,
            captured_s=captured_s,
            wall_s=time.monotonic() - began_s,
            stages=stages,
            members=_answers(votes, self._roster),
        )
        refit.finish(report, awaited)
        self._emit("committed", refit.version, nbytes=report.wire_bytes)
        try:
            await self._anchor(identity, is_anchor=base is None)
        except Exception as error:  # the version is committed; only late joiners read more
            self._emit("anchor_failed", refit.version, detail=f"{type(error).__name__}: {error}")

    async def _anchor(self, committed: Identity, *, is_anchor: bool) -> None:
        """Where it is due, store the committed bits whole beside their delta, and remove what nobody needs any more."""
        self._commits += 1
        if not is_anchor and self._anchor_every and self._commits % self._anchor_every == 0:
            identity = msgspec.structs.replace(committed, attempt=committed.attempt + 1)
            compress = Compress(identity, self._codec, self._operation, self._budget, workers=self._workers)
            await self._link.send(Message(Open(identity, None, self._baseline.layout.digest, ()), self._opening))
            refs, _, nbytes = await self._ship(Whole(self._baseline), compress)
            lanes, nothing = self._baseline.lanes, np.zeros_like(self._baseline.lanes)
            await self._link.send(_sealed(identity, None, refs, digests=(nothing, lanes, nothing)))
            self._emit("anchored", identity.version, nbytes=nbytes)
            is_anchor = True
        if is_anchor:
            self._anchors.append(committed.version)
            if self._anchor_every and self._run.store is not None and len(self._anchors) > 1:
                await self._run.store.prune(frozenset(), below=self._anchors[-2])

    async def _send(
        self, refit: Refit, votes: Votes, base: Identity | None, compress: Compress
    ) -> tuple[list[ChunkRef], Summary, float, int]:
        """Open the attempt and send its chunks."""
        began_s = captured_s = time.monotonic()
        storages, layout = self._source.storages(), self._baseline.layout
        opened = Open(votes.identity, base, layout.digest, tuple(sorted(votes.electorate)))
        await self._link.send(Message(opened, self._opening))
        self._emit("opened", refit.version)

        def captured() -> None:
            nonlocal captured_s
            captured_s = time.monotonic()
            refit.mark_captured()
            self._emit("captured", refit.version)

        count = len(self._plan)
        construct = Construct(
            self._baseline,
            self._plan,
            storages,
            workers=self._workers,
            audited=refit.version % count if count else None,
            captured=captured,
        )
        refs, summary, sent_bytes = await self._ship(construct, compress)
        if missing := {patch.frame.index for patch in self._baseline.patches()} - {ref.frame for ref in refs}:
            raise StateError(f"a stage dropped the chunks of frames {sorted(missing)[:8]}; a version needs them all")
        return refs, summary, captured_s - began_s, sent_bytes

    async def _ship(self, first: Stage[int, Patch], compress: Compress) -> tuple[list[ChunkRef], Summary, int]:
        """All frames through the pipeline: what the seal must list, the statistics, the bytes sent."""
        transfer, refs = Transfer(self._link), list[ChunkRef]()
        pipeline: Pipeline[int, ChunkRef] = Pipeline(first, compress, *self._stages, transfer)
        summary = await pipeline.run(
            range(len(self._plan)), into=refs.append, version=self._last_version, observe=self._observe
        )
        return refs, summary, transfer.sent_bytes

    def _seal(self, votes: Votes, base: Identity | None, refs: Sequence[ChunkRef]) -> Message:
        lanes = self._baseline.lanes
        target, touched = self._baseline.target()
        votes.root = digest.root(target)
        return _sealed(votes.identity, base, refs, digests=(lanes, target, touched))

    async def _collect(self, votes: Votes, compress: Compress) -> int:
        """Wait until the vote is carried, sending chunks again that were refused. Returns bytes sent again.

        Raises:
            VoteError: too many members refused, or did not answer in time; names them.
        """
        again_bytes = 0
        with anyio.move_on_after(self._vote_timeout_s):
            while not votes.carried and not votes.lost:
                if again := self._roster.take_again():
                    again_bytes += await self._send_again(again, compress)
                else:
                    await self._roster.news()
        for member in votes.missing:
            votes.drop(member, f"no vote within {self._vote_timeout_s:g} s")
            self._roster.give_up_on(member)
        if not votes.carried:
            await self._require_own_baseline(votes)
            reasons = "; ".join(f"{ref.member}: {why}" for ref, why in sorted(votes.refused.items()))
            raise VoteError(
                f"{votes.identity} was given up: {len(votes.prepared)} of {len(votes.electorate)} members prepared it, "
                f"{votes.needed} are needed ({reasons})"
            )
        return again_bytes

    async def _require_own_baseline(self, votes: Votes) -> None:
        """Members refused: look at this side's own memory before any of them is blamed.

        Raises:
            DigestMismatch: the baseline is not what it was; it is forgotten, and the next version is an anchor.
        """
        if self._baseline.identity is None:
            return
        found = await anyio.to_thread.run_sync(self._baseline.rescan)
        try:
            digest.require_equal(found, self._baseline.lanes, self._source.schema, f"{votes.identity}: the baseline")
        except DigestMismatch:
            self._baseline.clear()
            raise

    async def _send_again(self, again: Sequence[int], compress: Compress) -> int:
        """The same bits as before, from the overlay."""
        sent = 0
        for frame in again:
            patch = self._baseline.held(frame)
            if patch is None:
                self._emit("ignored", self._last_version, frame=frame, detail="asked for again, and never sent")
                continue
            chunk, body = await anyio.to_thread.run_sync(compress.encode, patch)
            await self._link.send(Message(chunk, body))
            sent += len(body)
            self._emit("sent_again", chunk.identity.version, frame=frame)
        return sent

    async def _commit(self, votes: Votes) -> None:
        """Move the head, then the baseline; neither is interrupted.

        Raises:
            NotCommittedError: the head could not be moved, and was not. Fenced: another publisher has taken over. Else
                what made the outcome unknowable. After the last two this publisher is of no use any more.
        """
        base = self._baseline.identity
        with anyio.CancelScope(shield=True):
            try:
                with anyio.fail_after(COMMIT_TIMEOUT_S):
                    await self._headship.move(votes.identity, votes.root)
            except Exception as error:
                if not isinstance(error, NotCommittedError):
                    self._broken = error
                self._baseline.drop()
                raise
            indices = await anyio.to_thread.run_sync(self._baseline.fold, votes.identity)
            if base is not None:
                self.heal_set.add(votes.identity.version, indices)
            oldest = self._roster.oldest  # with no member that holds any, whoever comes is seeded
            self.heal_set.forget(votes.identity.version if oldest is None else oldest)
            with anyio.move_on_after(ABORT_TIMEOUT_S):
                await self._link.send(Message(Commit(votes.identity)))

    async def _abort(self, identity: Identity, error: BaseException) -> None:
        reason = f"{type(error).__name__}: {error}"
        with anyio.move_on_after(ABORT_TIMEOUT_S, shield=True):
            try:
                await self._link.send(Message(Abort(identity, reason)))
            except (DcrError, OSError) as failed:
                error.add_note(f"the abort could not be sent either: {failed}")
        self._emit("aborted", identity.version, detail=reason)


def _sealed(
    identity: Identity, base: Identity | None, refs: Sequence[ChunkRef], *, digests: tuple[Lanes, Lanes, Lanes]
) -> Message:
    """A Seal; digests: of the base, of the target, and of the old bits that are replaced."""
    seal = Seal(identity, base, tuple(refs), digest.root(digests[0]), digest.root(digests[1]))
    return Message(seal, b"".join(map(digest.pack, digests)))


def _answers(votes: Votes, roster: Roster) -> dict[str, str]:
    said = {ref.member: "behind" for ref in roster}
    said |= {ref.member: why for ref, why in votes.refused.items()}
    return said | {ref.member: "prepared" for ref in votes.prepared}
