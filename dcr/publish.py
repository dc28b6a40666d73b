"""The publisher: a trainer's end. It captures, ships, seals, collects votes, moves the head, then its baseline.

One version is in flight at a time. All work runs in tasks that the publisher owns; what its user awaits only waits
for them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Literal

import anyio
import anyio.to_thread
import numpy as np

from dcr import digest, frames, kernels, plugins
from dcr.baseline import Baseline, HealSet
from dcr.budget import ByteBudget
from dcr.commit import Sender, Votes, after
from dcr.errors import DcrError, Fenced, StateError, VoteError
from dcr.frames import FRAME_ELEMS, Layout
from dcr.observe import Event, Observer, Summary, ignore
from dcr.patch import Operation
from dcr.pipeline import Pipeline
from dcr.placement import canonical_table
from dcr.refit import Refit, Report
from dcr.seams import Codec, Run, Source, Stage, Transport
from dcr.stages.compress import Compress
from dcr.stages.construct import Construct, source_table
from dcr.stages.transfer import Transfer
from dcr.wire import Abort, Ack, ChunkRef, Commit, Head, Identity, Join, Leave, MemberRef, Message, Nack, Open, Seal

ABORT_TIMEOUT_S = 10.0
COMMIT_TIMEOUT_S = 120.0


class Publisher:
    """Publishes versions of a source's weights; use it as an async context manager (`dcr.publisher`).

    transport: None finds one by the URL's scheme. codec: encodes chunks; a name (see `dcr plugins`) or a value.
    operation: how bit-preserving changes travel. budget: bytes of encoded chunks in flight.
    quorum: how many members that hold the base must prepare a version before it is committed, or "all" of them.
    vote_timeout_s: how long they may take, counted from the seal. stages: stages of your own between compress and
    transfer. frame_elems: elements per frame. workers: threads that compare, and as many that compress.
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
        workers: int = 1,
        observe: Observer = ignore,
    ) -> None:
        self._url = url
        self._source = source
        self._transport: Transport = transport or plugins.transport_for(url)
        self._codec: Codec = plugins.load("dcr.codecs", codec) if isinstance(codec, str) else codec
        self._operation = operation
        self._budget = budget or ByteBudget(256 << 20)
        self._quorum = quorum
        self._vote_timeout_s = vote_timeout_s
        self._stages = tuple(stages)
        self._frame_elems = frame_elems
        self._workers = workers
        self._observe = observe
        self._stack = AsyncExitStack()
        self._members: dict[MemberRef, Identity | None] = {}  # what each one holds, or has voted for
        self._again: list[int] = []
        self._votes: Votes | None = None
        self._news = anyio.Event()
        self._refit: Refit | None = None
        self._turn = anyio.Lock()
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
            number = self._last_version + 1 if version is None else version
            if number <= self._last_version:
                raise StateError(
                    f"version {number} is not new: this run has used {self._last_version}; "
                    f"publish {self._last_version + 1} or more"
                )
            self._last_version = number
            self._refit = refit = Refit(number)
            await self._requests.send(refit)
            return refit

    async def captured(self) -> None:
        """Wait until the last `publish` has read the weights."""
        if self._refit is not None:
            await self._refit.captured()

    async def joined(self, members: int) -> None:
        """Wait until at least so many members take part."""
        while len(self._members) < members:
            await self._news.wait()

    @property
    def members(self) -> list[str]:
        """The members that take part now."""
        return sorted(ref.member for ref in self._members)

    @property
    def baseline(self) -> Baseline:
        """The last committed bits."""
        return self._baseline

    # ------------------------------------------------------------------ life

    async def __aenter__(self) -> Publisher:
        async with AsyncExitStack() as stack:
            self._run: Run = await stack.enter_async_context(self._transport.open(self._url))
            self._link = await stack.enter_async_context(self._run.sender())
            self._plan = frames.plan(self._source.schema, self._source.shards, self._frame_elems)
            layout = Layout(self._source.schema, tuple(one.spec for one in self._plan))
            self._opening = frames.encode(layout)
            self._baseline = Baseline(layout)
            self._head, self._tag = await self._take_term()
            await self._resume()
            send, receive = anyio.create_memory_object_stream[Refit](1)
            self._requests = await stack.enter_async_context(send)
            self._group = await stack.enter_async_context(anyio.create_task_group())
            self._group.start_soon(self._listen)
            self._group.start_soon(self._work, receive)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self._settled()
        finally:
            self._group.cancel_scope.cancel()
            await self._stack.aclose()

    async def _settled(self) -> None:
        """The version before has ended, and somebody knows how."""
        if self._broken is not None:
            raise StateError(f"this publisher cannot go on: {self._broken}") from self._broken
        if self._refit is not None and not self._refit.seen:
            await self._refit.committed()

    async def _take_term(self) -> tuple[Head, bytes]:
        """Take the next term, so that publishers before this one are refused from now on."""
        while True:
            head, tag = await self._run.ledger.read()
            if head is None:
                ours = Head(uuid.uuid4().hex, 1, None, b"")
            else:
                ours = Head(head.run, head.term + 1, head.identity, head.root)
            if await self._run.ledger.swap(ours, tag):
                now, tag = await self._run.ledger.read()
                if now == ours:
                    return ours, tag

    async def _resume(self) -> None:
        """If the source holds the very bits of the head's version, start from it; else an anchor comes next."""
        self._last_version = await self._run.store.newest() if self._run.store else -1
        if self._head.identity is None:
            return
        self._last_version = max(self._last_version, self._head.identity.version)
        bits, lanes = await anyio.to_thread.run_sync(self._scan)
        if digest.root(lanes) == self._head.root:
            self._baseline.adopt(bits, self._head.identity, lanes)

    def _scan(self) -> tuple[list[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
        storages, bits = self._source.storages(), []
        lanes = digest.zero(len(self._source.schema.tensors))
        for frame, source in zip(self._baseline.layout.frames, self._plan, strict=True):
            bits.append(kernels.read(source_table(source, storages), source.kind))
            lanes[list(frame.tensors)] += kernels.digest(canonical_table(frame, bits[-1]), frame.keys)
        return bits, lanes

    # ------------------------------------------------------------------ tasks

    async def _work(self, requests: Any) -> None:
        async with requests:
            async for refit in requests:
                try:
                    await self._publish(refit)
                except Exception as error:
                    error.add_note(f"publishing version {refit.version}")
                    if isinstance(error, Fenced):
                        self._broken = error
                    refit.fail(error)
                    self._emit("failed", refit.version, detail=str(error))
                except BaseException:
                    refit.fail(StateError(f"the publisher was closed while version {refit.version} was in flight"))
                    raise

    async def _listen(self) -> None:
        while True:
            message = await self._link.receive()
            match message.header:
                case Join(member=member, holds=holds):
                    self._members[member] = holds
                    self._emit("joined", member=member, detail=str(holds or "nothing"))
                case Leave(member=member):
                    self._leave(member)
                case Ack() as ack:
                    self._on_ack(ack)
                case Nack() as nack:
                    self._on_nack(nack)
                case _:
                    pass
            self._tell()

    def _leave(self, member: MemberRef) -> None:
        self._members.pop(member, None)
        if self._votes is not None:
            self._votes.leave(member)
        if self._refit is not None:
            self._refit.answer(member, "left")
        self._emit("left", member=member)

    def _on_ack(self, ack: Ack) -> None:
        version = ack.identity.version
        if ack.kind == "prepared":
            if self._votes is not None and self._votes.prepare(ack):
                self._emit("prepared", version, member=ack.member)
            return
        self._members[ack.member] = ack.identity
        if self._refit is not None and self._refit.version == version:
            self._refit.answer(ack.member, "installed")
        self.heal_set.forget(min((held.version if held else -1 for held in self._members.values()), default=-1))
        self._emit("installed", version, member=ack.member)

    def _on_nack(self, nack: Nack) -> None:
        version = nack.identity.version
        if nack.frames:
            self._again += nack.frames
            self._emit("refused", version, member=nack.member, frame=nack.frames[0], detail=nack.reason)
            return
        if nack.member in self._members:
            self._members[nack.member] = nack.holds
        if self._votes is not None:
            self._votes.refuse(nack)
        if self._refit is not None and self._refit.version == version:
            self._refit.answer(nack.member, nack.reason)
        self._emit("refused", version, member=nack.member, detail=nack.reason)

    def _tell(self) -> None:
        """Wake whoever waits for news of members."""
        news, self._news = self._news, anyio.Event()
        news.set()

    def _emit(self, name: str, version: int | None = None, *, member: MemberRef | None = None, **rest: Any) -> None:
        self._observe(Event(name, version, member.member if member else None, **rest))

    # ------------------------------------------------------------------ one version

    async def _publish(self, refit: Refit) -> None:
        began_s = time.monotonic()
        base = self._baseline.identity
        identity = Identity(self._head.run, self._head.term, refit.version, 1)
        electorate = frozenset(ref for ref, holds in self._members.items() if base is None or holds == base)
        votes = self._votes = Votes(identity, b"", electorate, self._quorum)
        state = Sender.SENDING
        compress = Compress(identity, self._codec, self._operation, self._budget, workers=self._workers)
        try:
            refs, stages, captured_s, wire_bytes = await self._send(refit, identity, base, compress, electorate)
            sealed = self._seal(identity, base, refs)
            assert isinstance(sealed.header, Seal)
            votes.root = sealed.header.root
            await self._link.send(sealed)
            self._emit("sealed", refit.version)
            state = after(state, "sealed")
            again = await self._collect(votes, compress)
        except BaseException as error:
            self._votes = None
            self._baseline.drop()
            state = after(state, "gave_up")
            await self._abort(identity, error)
            raise
        await self._commit(after(state, "quorum"), identity, votes.root)
        self._votes = None
        self._members |= dict.fromkeys(votes.prepared & self._members.keys(), identity)
        changed = sum(patch.changed for patch in self._baseline.patches())
        indices = await anyio.to_thread.run_sync(self._baseline.fold, identity)
        if base is not None:
            self.heal_set.add(identity.version, indices)
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
            members=_answers(votes, self._members),
        )
        refit.finish(report, votes.prepared & self._members.keys())
        self._emit("committed", refit.version, nbytes=report.wire_bytes)

    async def _send(
        self,
        refit: Refit,
        identity: Identity,
        base: Identity | None,
        compress: Compress,
        electorate: frozenset[MemberRef],
    ) -> tuple[list[ChunkRef], Summary, float, int]:
        """Open the attempt and send its chunks."""
        storages = self._source.storages()
        members = tuple(sorted(electorate))
        await self._link.send(Message(Open(identity, base, self._baseline.layout.digest, members), self._opening))
        self._emit("opened", refit.version)
        began_s = captured_s = time.monotonic()

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
        transfer = Transfer(self._link)
        refs: list[ChunkRef] = []
        pipeline: Pipeline[int, ChunkRef] = Pipeline(construct, compress, *self._stages, transfer)
        summary = await pipeline.run(range(count), into=refs.append)
        if missing := {patch.frame.index for patch in self._baseline.patches()} - {ref.frame for ref in refs}:
            raise StateError(f"a stage dropped the chunks of frames {sorted(missing)[:8]}; a version needs them all")
        return refs, summary, captured_s - began_s, transfer.sent_bytes

    def _seal(self, identity: Identity, base: Identity | None, refs: Sequence[ChunkRef]) -> Message:
        lanes = self._baseline.lanes
        target, touched = self._baseline.target()
        seal = Seal(identity, base, tuple(refs), digest.root(lanes), digest.root(target))
        return Message(seal, digest.pack(lanes) + digest.pack(target) + digest.pack(touched))

    async def _collect(self, votes: Votes, compress: Compress) -> int:
        """Wait until the vote is carried, sending chunks again that were refused. Returns bytes sent again.

        Raises:
            VoteError: too many members refused, or did not answer in time; names them.
        """
        again = 0
        with anyio.move_on_after(self._vote_timeout_s):
            while not votes.carried and not votes.lost:
                news = self._news
                for frame in self._take_again():
                    message = await anyio.to_thread.run_sync(compress.encode, self._baseline.held(frame))
                    await self._link.send(message)
                    again += len(message.body)
                    self._emit("sent_again", votes.identity.version, frame=frame)
                if not votes.carried and not votes.lost:
                    await news.wait()
        for member in votes.missing:
            votes.drop(member, f"no vote within {self._vote_timeout_s:g} s")
            self._members.pop(member, None)
        if not votes.carried:
            reasons = "; ".join(f"{ref.member}: {why}" for ref, why in sorted(votes.refused.items()))
            raise VoteError(
                f"{votes.identity} was given up: {len(votes.prepared)} of {len(votes.electorate)} members prepared it, "
                f"{votes.needed} are needed ({reasons})"
            )
        return again

    def _take_again(self) -> list[int]:
        frames_again, self._again = sorted(set(self._again)), []
        return frames_again

    async def _commit(self, state: Sender, identity: Identity, root: bytes) -> None:
        """Move the head, and know whether it moved.

        Raises:
            Fenced: it is another publisher's now.
        """
        ours = Head(self._head.run, self._head.term, identity, root)
        with anyio.CancelScope(shield=True), anyio.fail_after(COMMIT_TIMEOUT_S):
            while state is not Sender.COMMITTED:
                if state is Sender.SWAPPING:
                    try:
                        event = "swapped" if await self._run.ledger.swap(ours, self._tag) else "lost"
                    except Exception as error:
                        self._emit("unsure", identity.version, detail=str(error))
                        event = "no_answer"
                    state = after(state, event)
                if state is not Sender.COMMITTED:
                    state = await self._read_back(state, ours)
            _, self._tag = await self._run.ledger.read()
            self._head = ours
            await self._link.send(Message(Commit(identity)))

    async def _read_back(self, state: Sender, ours: Head) -> Sender:
        """What became of a swap: the head says."""
        head, tag = await self._run.ledger.read()
        if state is Sender.UNKNOWN:
            if head == ours:
                return after(state, "head_is_ours")
            if tag == self._tag:
                return after(state, "head_is_base")
            state = after(state, "lost")
        self._baseline.drop()
        found = f"term {head.term}, {head.identity}" if head else "no head"
        raise Fenced(f"{ours.identity} was not committed: the head is at {found}; another publisher has taken over")

    async def _abort(self, identity: Identity, error: BaseException) -> None:
        with anyio.move_on_after(ABORT_TIMEOUT_S, shield=True):
            try:
                await self._link.send(Message(Abort(identity, f"{type(error).__name__}: {error}")))
            except (DcrError, OSError) as failed:
                error.add_note(f"the abort could not be sent either: {failed}")
        self._emit("aborted", identity.version, detail=str(error))


def _answers(votes: Votes, members: dict[MemberRef, Identity | None]) -> dict[str, str]:
    said = {ref.member: "behind" for ref in members}
    said |= {ref.member: why for ref, why in votes.refused.items()}
    return said | {ref.member: "prepared" for ref in votes.prepared}
