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
from functools import partial

import anyio
import msgspec
import numpy as np

from dcr.codecs import choice
from dcr.codecs.choice import Chooser
from dcr.codecs.patch import Operation
from dcr.errors import Fenced, NotCommittedError, RanksLost, StateError, VoteError
from dcr.events import (
    AttemptOpened,
    AttemptSealed,
    CaptureCompleted,
    CaptureFailed,
    CaptureStarted,
    PublishCompleted,
    PublishFailed,
    PublishStarted,
)
from dcr.events.observers import Observer, Summary, tell
from dcr.pipeline.budget import ByteBudget
from dcr.protocol import digest
from dcr.protocol.wire import ChunkRef, Head, Identity
from dcr.publish.anchors import Anchors
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


class Flight:
    """One version on its way, as one rank knows it. Nothing of a version is kept anywhere else but its overlay.

    base: the version it starts from. stale: which residual groups are converted for it. attempt: what was opened.
    old, new, touched: digests [T, 2] over all ranks: of the base, of the target, and of the old bits that are replaced.
    """

    def __init__(self, refit: Refit, tensors: int) -> None:
        self.refit = refit
        self.began_s = time.monotonic()
        self.base: Identity | None = None
        self.stale: tuple[bool, ...] = ()
        self.attempt: Opened | None = None
        self.old = self.new = self.touched = digest.zero(tensors)
        self.captured_s: float | None = None
        self.again_bytes = 0

    @property
    def version(self) -> int:
        return self.refit.version

    @property
    def identity(self) -> Identity:
        """
        Raises:
            StateError: no attempt has been opened.
        """
        if self.attempt is None:
            raise StateError(f"version {self.version} has not been opened")
        return self.attempt.identity

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began_s


class Flights:
    """Takes versions from the capture to the commit. under_way: those that are; never more than one.

    head: what the head names, as the ranks know it. broken: why there can be no further version.
    """

    def __init__(
        self,
        ranks: Ranks,
        part: Part,
        link: Writer,
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
        self._root = head.root
        self.head = head.identity
        self.under_way: list[Flight] = []
        self._compress = partial(Compress, codec=codec, operation=operation, budget=budget, workers=workers)
        self._anchors = Anchors(ranks, part, link, compress=self._compress, retention=retention, observe=observe)
        self._observe = observe
        self.broken: Exception | None = None

    async def fly(self, refit: Refit) -> None:
        """Publish a version; `refit` is told how it ends.

        Raises: why it was given up.
        """
        flight = Flight(refit, len(self._part.schema.tensors))
        assert not self.under_way
        self.under_way.append(flight)
        tell(self._observe, PublishStarted, flight.version)
        try:
            report = await self._publish(flight)
        except Exception as error:
            tell(self._observe, PublishFailed, flight.version, *_why(error), flight.seconds)
            raise
        finally:
            self.under_way.remove(flight)
        self._tell_completed(report)
        await self._anchors.keep(report)

    async def _publish(self, flight: Flight) -> Report:
        """Take a version up to its commit, and tell its refit. Raises: why it was given up."""
        refit, received_bytes = flight.refit, self._ranks.received_bytes
        tell(self._observe, CaptureStarted, flight.version)
        try:
            await self._ranks.share(f"bind {flight.version}", self._part.bind, type(None))
            refit.mark_bound()
            await self._begin(flight)
            compress = await self._open(flight)
            shipped, stages = await self._ship(flight, compress)
            refs = [ref for one in shipped for ref in one.chunks]
            await self._seal(flight, refs)
            await self._collect(flight, compress)
        except BaseException as error:
            if isinstance(error, (Fenced, RanksLost)):
                self.broken = error
            if isinstance(error, Exception) and not refit.was_captured:
                tell(self._observe, CaptureFailed, flight.version, *_why(error), flight.seconds)
            self._part.drop()
            if self._ranks.leader is not None:
                await self._ranks.leader.abort(error)
            raise
        outcome = await self._commit(flight)
        schema = self._part.baseline.layout.schema
        report = Report(
            identity=flight.identity,
            base=flight.base,
            elements=schema.numel,
            changed=sum(one.changed for one in shipped),
            chunks=len(refs),
            wire_bytes=sum(one.wire_bytes for one in shipped) + flight.again_bytes,
            dense_bytes=schema.nbytes,
            residual=self._part.residual,
            residual_bytes=sum(one.residual_bytes for one in shipped),
            gathered_bytes=self._ranks.received_bytes - received_bytes,
            sent_again=flight.again_bytes,
            captured_s=flight.seconds if flight.captured_s is None else flight.captured_s,
            wall_s=flight.seconds,
            chosen=choice.merged([one.chosen for one in shipped]),
            stages=stages,
            members=outcome.answers,
        )
        refit.finish(report, self._ranks.leader.awaited if self._ranks.leader else None)
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

    async def _begin(self, flight: Flight) -> None:
        """What all ranks start from; no base if their digests do not add up to the head's: then all are sent anew."""
        leader, version = self._ranks.leader, flight.version

        async def look() -> Begun:
            broken = leader.broken if leader is not None else None
            stale, held = tuple(await self._part.look()), await self._part.copies()
            return Begun(self._part.baseline.identity, stale, held, "" if broken is None else f"{broken!r}")

        begun = await self._ranks.share(f"begin {version}", look, Begun)
        if begun[0].broken:
            self.broken = StateError(f"this publisher cannot go on: {begun[0].broken}")
            raise self.broken
        if parted := differing([one.copies for one in begun]):
            look_closer = partial(self._part.details, parted)
            details = await self._ranks.share(f"copies {version}", look_closer, tuple[Detail, ...])
            raise error_of(details, self._part.schema)
        lanes = await self._ranks.add(f"baseline {version}", self._part.baseline.lanes)
        flight.base = common_base([one.base for one in begun], digest.root(lanes), self._root)
        if flight.base is None:
            self._part.baseline.clear()
        else:
            flight.old = lanes
        flight.stale = tuple(
            flight.base is None or any(flags) for flags in zip(*(one.stale for one in begun), strict=True)
        )

    async def _open(self, flight: Flight) -> Compress:
        """Open the attempt; what encodes its patches."""
        attempt = await self._ranks.lead(
            f"open {flight.version}", lambda leader: leader.open(flight.refit, flight.base), Opened
        )
        flight.attempt, identity = attempt, attempt.identity
        tell(
            self._observe,
            AttemptOpened,
            flight.version,
            run=identity.run,
            term=identity.term,
            attempt=identity.attempt,
            base=flight.base.version if flight.base else None,
        )
        return self._compress(identity, reads_base=attempt.reads_base)

    async def _ship(self, flight: Flight, compress: Compress) -> tuple[list[Shipped], Summary]:
        """All ranks' chunks; what each one sent, and this one's statistics."""
        summaries: list[Summary] = []

        def captured() -> None:
            flight.captured_s = flight.seconds
            flight.refit.mark_captured()
            tell(self._observe, CaptureCompleted, flight.version, flight.captured_s)

        async def work() -> Shipped:
            shipped, summary = await self._part.ship(self._link, compress, flight.stale, captured)
            summaries.append(summary)
            return shipped

        shipped = await self._ranks.share(f"ship {flight.version}", work, Shipped)
        if (error := error_of_made([one.made for one in shipped], self._part.schema)) is not None:
            raise error
        return shipped, summaries[0]

    async def _seal(self, flight: Flight, refs: Sequence[ChunkRef]) -> None:
        own = self._part.baseline.lanes
        target, touched = self._part.baseline.target()
        summed = await self._ranks.add(f"digests {flight.version}", np.stack([target - own, touched]))
        flight.new, flight.touched = flight.old + summed[0], summed[1]
        digests = flight.old, flight.new, flight.touched
        await self._ranks.lead(
            f"seal {flight.version}",
            lambda leader: leader.seal(flight.identity, flight.base, refs, digests),
            type(None),
        )
        tell(self._observe, AttemptSealed, flight.version, len(refs))

    async def _collect(self, flight: Flight, compress: Compress) -> None:
        """Wait until the vote is carried, sending chunks again that were refused.

        Raises:
            VoteError: too many members refused, or did not answer in time; names them.
            DigestMismatch: they had reason to.
        """
        version = flight.version
        while True:
            call = await self._ranks.lead(f"vote {version}", Leader.call, Call)
            if call.lost:
                what = f"{flight.identity}: the baseline"
                await self._ranks.share(f"look {version}", partial(self._part.require_baseline, what), type(None))
                raise VoteError(call.lost)
            if not call.again:
                return
            again = partial(self._part.ship_again, self._link, compress, call.again)
            flight.again_bytes += sum(await self._ranks.share(f"again {version}", again, int))

    async def _commit(self, flight: Flight) -> Outcome:
        """Move the head, then the baselines; neither is interrupted."""
        leader, identity = self._ranks.leader, flight.identity
        with anyio.fail_after(2 * COMMIT_TIMEOUT_S, shield=True):
            try:
                outcome = await self._ranks.lead(f"commit {flight.version}", Leader.commit, Outcome)
            except Exception as error:
                if not isinstance(error, NotCommittedError):
                    self.broken = error
                if leader is None or leader.outcome is None:
                    self._part.drop()
                    raise
                outcome = leader.outcome  # the head has moved, though not all ranks have heard of it
            self._root, self.head = digest.root(flight.new), identity
            await self._part.fold(identity)
            if leader is not None:
                await leader.announce(identity)
        return outcome


def _why(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)
