"""One version on its way: what all ranks of a publisher do together, from the capture to the commit.

    bind     every rank takes its weights as they lie now; an error here is one of `publish`
    begin    every rank looks at what its conversions read, and at its copies of what others hold too
             copies are equal; sum of the baselines' digests = the head's, or an anchor
    open     the first rank opens the attempt
    ship     every rank compares, compresses and sends what it owns
    seal     the first rank lists all chunks and the summed digests
    vote     members prepare; the ranks send again what was refused
    commit   the first rank moves the head; every rank folds its baseline

An error in any of them is every rank's: the version is given up, and what comes next starts from the same base.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import anyio
import msgspec
import numpy as np

from dcr.codecs import choice
from dcr.codecs.choice import Chooser
from dcr.codecs.patch import Operation
from dcr.errors import Fenced, NotCommittedError, RanksLost, StateError, VoteError
from dcr.events import (
    AnchorCompleted,
    AnchorFailed,
    AnchorStarted,
    AttemptOpened,
    AttemptSealed,
    CaptureCompleted,
    CaptureFailed,
    CaptureStarted,
    PruneCompleted,
    PruneFailed,
    PruneStarted,
    PublishCompleted,
    PublishFailed,
    PublishStarted,
)
from dcr.events.observers import Observer, Summary, tell
from dcr.pipeline.budget import ByteBudget
from dcr.protocol import digest
from dcr.protocol.wire import ChunkRef, Head, Identity
from dcr.publish.copies import Detail, Root, differing, error_of, error_of_made
from dcr.publish.leader import COMMIT_TIMEOUT_S, Call, Leader, Opened, Outcome
from dcr.publish.meeting import Ranks
from dcr.publish.part import Part, Shipped
from dcr.publish.refit import Refit, Report
from dcr.publish.retention import Retention
from dcr.seams import BasedCodec, Codec, Writer
from dcr.stages.compress import Compress


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """Where a rank starts from.

    stale: which residual groups must be converted. copies: what it holds of what others hold too. broken: why no
    version can follow.
    """

    base: Identity | None
    stale: tuple[bool, ...]
    copies: tuple[Root, ...] = ()
    broken: str = ""


def common_base(bases: Sequence[Identity | None], root: bytes, head_root: bytes) -> Identity | None:
    """The version that all ranks hold, if their digests add up to what the head says of it; None: send all anew.

    root: of the sum of the ranks' own baselines. head_root: what the head says.
    """
    return bases[0] if root == head_root and all(base == bases[0] for base in bases) else None


class Flights:
    """Takes versions from the capture to the commit, one at a time.

    leader: on the first rank only. head: what the head names, as the ranks know it. broken: why there can be no
    further version.
    """

    def __init__(
        self,
        ranks: Ranks,
        part: Part,
        link: Writer,
        leader: Leader | None,
        head: Head,
        *,
        codec: Codec | BasedCodec | Chooser,
        operation: Operation,
        budget: ByteBudget,
        workers: int,
        retention: Retention,
        observe: Observer,
    ) -> None:
        self._ranks = ranks
        self._part = part
        self._link = link
        self._leader = leader
        self._root = head.root
        self.head = head.identity
        self._compress = partial(Compress, codec=codec, operation=operation, budget=budget, workers=workers)
        self._retention = retention
        self._observe = observe
        self.broken: Exception | None = None

    async def fly(self, refit: Refit) -> None:
        """Publish a version; `refit` is told how it ends.

        Raises: why it was given up.
        """
        began_s = time.monotonic()
        tell(self._observe, PublishStarted, refit.version)
        try:
            report = await self._publish(refit, began_s)
        except Exception as error:
            tell(self._observe, PublishFailed, refit.version, *_why(error), time.monotonic() - began_s)
            raise
        self._tell_completed(report)
        await self.keep(report)

    async def _publish(self, refit: Refit, began_s: float) -> Report:
        """Take a version up to its commit, and tell `refit`. Raises: why it was given up."""
        received_bytes = self._ranks.received_bytes
        tell(self._observe, CaptureStarted, refit.version)
        try:
            await self._ranks.share(f"bind {refit.version}", self._part.bind, type(None))
            refit.mark_bound()
            begun = await self._begin(refit)
            opened = await self._open(refit, begun.base)
            identity, compress = opened.identity, self._compress(opened.identity, reads_base=opened.reads_base)
            shipped, captured_s, stages = await self._ship(refit, compress, begun, began_s)
            refs = [ref for one in shipped for ref in one.chunks]
            await self._seal(identity, begun.base, refs)
            again_bytes = await self._collect(identity, compress)
        except BaseException as error:
            if isinstance(error, (Fenced, RanksLost)):
                self.broken = error
            if isinstance(error, Exception) and not refit.was_captured:
                tell(self._observe, CaptureFailed, refit.version, *_why(error), time.monotonic() - began_s)
            self._part.drop()
            if self._leader is not None:
                await self._leader.abort(error)
            raise
        outcome = await self._commit(identity)
        schema = self._part.baseline.layout.schema
        report = Report(
            identity=identity,
            base=begun.base,
            elements=schema.numel,
            changed=sum(one.changed for one in shipped),
            chunks=len(refs),
            wire_bytes=sum(one.wire_bytes for one in shipped) + again_bytes,
            dense_bytes=schema.nbytes,
            residual=self._part.residual,
            residual_bytes=sum(one.residual_bytes for one in shipped),
            gathered_bytes=self._ranks.received_bytes - received_bytes,
            sent_again=again_bytes,
            captured_s=captured_s - began_s,
            wall_s=time.monotonic() - began_s,
            chosen=choice.merged([one.chosen for one in shipped]),
            stages=stages,
            members=outcome.answers,
        )
        refit.finish(report, self._leader.awaited if self._leader else None)
        return report

    def _tell_completed(self, report: Report) -> None:
        tell(
            self._observe,
            PublishCompleted,
            report.version,
            term=report.identity.term,
            attempt=report.identity.attempt,
            base=report.base.version if report.base else None,
            total_elems=report.elements,
            changed_elems=report.changed,
            chunks=report.chunks,
            wire_bytes=report.wire_bytes,
            dense_bytes=report.dense_bytes,
            sent_again_bytes=report.sent_again,
            captured_s=report.captured_s,
            duration_s=report.wall_s,
        )

    # ------------------------------------------------------------------ steps

    async def _begin(self, refit: Refit) -> Begun:
        """What all ranks start from; no base if their digests do not add up to the head's: then all are sent anew."""

        async def look() -> Begun:
            broken = self._leader.broken if self._leader is not None else None
            stale, held = tuple(await self._part.look()), await self._part.copies()
            return Begun(self._part.baseline.identity, stale, held, "" if broken is None else f"{broken!r}")

        begun = await self._ranks.share(f"begin {refit.version}", look, Begun)
        if begun[0].broken:
            self.broken = StateError(f"this publisher cannot go on: {begun[0].broken}")
            raise self.broken
        if parted := differing([one.copies for one in begun]):
            look_closer = partial(self._part.details, parted)
            details = await self._ranks.share(f"copies {refit.version}", look_closer, tuple[Detail, ...])
            raise error_of(details, self._part.schema)
        lanes = await self._ranks.add(f"baseline {refit.version}", self._part.baseline.lanes)
        self._lanes, base = lanes, common_base([one.base for one in begun], digest.root(lanes), self._root)
        if base is None:
            self._part.baseline.clear()
            self._lanes = np.zeros_like(lanes)
        stale = tuple(base is None or any(flags) for flags in zip(*(one.stale for one in begun), strict=True))
        return Begun(base, stale)

    async def _open(self, refit: Refit, base: Identity | None) -> Opened:
        async def lead() -> Opened:
            assert self._leader is not None
            return await self._leader.open(refit, base)

        opened = await self._ranks.decide(f"open {refit.version}", lead, Opened)
        tell(
            self._observe,
            AttemptOpened,
            refit.version,
            run=opened.identity.run,
            term=opened.identity.term,
            attempt=opened.identity.attempt,
            base=base.version if base else None,
        )
        return opened

    async def _ship(
        self, refit: Refit, compress: Compress, begun: Begun, began_s: float
    ) -> tuple[list[Shipped], float, Summary]:
        """All ranks' chunks; what each one sent, and when this one had read its weights, and its statistics."""
        captured_s = time.monotonic()
        summaries: list[Summary] = []

        def captured() -> None:
            nonlocal captured_s
            captured_s = time.monotonic()
            refit.mark_captured()
            tell(self._observe, CaptureCompleted, refit.version, captured_s - began_s)

        async def work() -> Shipped:
            shipped, summary = await self._part.ship(self._link, compress, begun.stale, captured)
            summaries.append(summary)
            return shipped

        shipped = await self._ranks.share(f"ship {refit.version}", work, Shipped)
        if (error := error_of_made([one.made for one in shipped], self._part.schema)) is not None:
            raise error
        return shipped, captured_s, summaries[0]

    async def _seal(self, identity: Identity, base: Identity | None, refs: Sequence[ChunkRef]) -> None:
        own = self._part.baseline.lanes
        target, touched = self._part.baseline.target()
        summed = await self._ranks.add(f"digests {identity.version}", np.stack([target - own, touched]))
        self._target = self._lanes + summed[0]

        async def lead() -> None:
            assert self._leader is not None
            await self._leader.seal(identity, base, refs, (self._lanes, self._target, summed[1]))

        await self._ranks.decide(f"seal {identity.version}", lead, type(None))
        tell(self._observe, AttemptSealed, identity.version, len(refs))

    async def _collect(self, identity: Identity, compress: Compress) -> int:
        """Wait until the vote is carried, sending chunks again that were refused. Returns bytes sent again.

        Raises:
            VoteError: too many members refused, or did not answer in time; names them.
            DigestMismatch: they had reason to.
        """

        async def lead() -> Call:
            assert self._leader is not None
            return await self._leader.call()

        version, again_bytes = identity.version, 0
        while True:
            call = await self._ranks.decide(f"vote {version}", lead, Call)
            if call.lost:
                what = f"{identity}: the baseline"
                await self._ranks.share(f"look {version}", partial(self._part.require_baseline, what), type(None))
                raise VoteError(call.lost)
            if not call.again:
                return again_bytes
            again = partial(self._part.ship_again, self._link, compress, call.again)
            again_bytes += sum(await self._ranks.share(f"again {version}", again, int))

    async def _commit(self, identity: Identity) -> Outcome:
        """Move the head, then the baselines; neither is interrupted."""

        async def lead() -> Outcome:
            assert self._leader is not None
            return await self._leader.commit()

        with anyio.fail_after(2 * COMMIT_TIMEOUT_S, shield=True):
            try:
                outcome = await self._ranks.decide(f"commit {identity.version}", lead, Outcome)
            except Exception as error:
                if not isinstance(error, NotCommittedError):
                    self.broken = error
                if self._leader is None or self._leader.outcome is None:
                    self._part.drop()
                    raise
                outcome = self._leader.outcome  # the head has moved, though not all ranks have heard of it
            self._root, self.head = digest.root(self._target), identity
            await self._part.fold(identity)
            if self._leader is not None:
                await self._leader.announce(identity)
        return outcome

    async def keep(self, report: Report) -> None:
        """Where it is due, store the committed bits whole beside their delta, and remove what nobody needs any more.

        What fails is told by an event, and not raised: the version is committed, and only late joiners read more.
        """
        due, committed = self._retention.count(report.wire_bytes), report.identity
        if not (report.is_anchor or due):
            return
        if not report.is_anchor and not await self._anchor(
            msgspec.structs.replace(committed, attempt=committed.attempt + 1)
        ):
            return
        below = self._retention.anchor(committed.version)
        if below is not None:
            prune = partial(self._prune, committed.version, below)
            with suppress(RanksLost):  # the next version tells
                await self._ranks.decide(f"prune {committed.version}", prune, type(None))

    async def _anchor(self, identity: Identity) -> bool:
        """Store an anchor of the committed version; whether that went well."""
        version, began_s = identity.version, time.monotonic()
        tell(self._observe, AnchorStarted, version)
        try:
            shipped = await self._store_anchor(identity)
        except Exception as error:
            tell(self._observe, AnchorFailed, version, *_why(error), time.monotonic() - began_s)
            return False
        chunks, wire_bytes = sum(len(one.chunks) for one in shipped), sum(one.wire_bytes for one in shipped)
        tell(self._observe, AnchorCompleted, version, chunks, wire_bytes, time.monotonic() - began_s)
        return True

    async def _prune(self, version: int, below: int) -> None:
        assert self._leader is not None
        began_s = time.monotonic()
        tell(self._observe, PruneStarted, version, below)
        try:
            await self._leader.prune(below)
        except Exception as error:
            tell(self._observe, PruneFailed, version, below, *_why(error), time.monotonic() - began_s)
        else:
            tell(self._observe, PruneCompleted, version, below, time.monotonic() - began_s)

    async def _store_anchor(self, identity: Identity) -> list[Shipped]:
        version = identity.version

        async def opened() -> None:
            assert self._leader is not None
            await self._leader.open_anchor(identity)

        async def sealed() -> None:
            assert self._leader is not None
            nothing = np.zeros_like(self._target)
            await self._leader.seal_anchor(identity, refs, (nothing, self._target, nothing))

        await self._ranks.decide(f"open anchor {version}", opened, type(None))
        ship = partial(self._part.ship_whole, self._link, self._compress(identity))
        shipped = await self._ranks.share(f"ship anchor {version}", ship, Shipped)
        refs = [ref for one in shipped for ref in one.chunks]
        await self._ranks.decide(f"seal anchor {version}", sealed, type(None))
        return shipped


def _why(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)
