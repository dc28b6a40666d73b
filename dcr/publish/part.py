"""One rank's part of a publisher: what it does with the tensors that it owns."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from dcr import kernels
from dcr.codecs.choice import Chosen
from dcr.codecs.patch import Patch
from dcr.errors import DigestMismatch, SchemaError, StateError
from dcr.events import ChunkSentAgain, ResendIgnored
from dcr.events.observers import Observer, Summary, tell
from dcr.layout import coverage, frames
from dcr.layout.boxes import Box, Dim
from dcr.layout.coverage import Tally
from dcr.layout.frames import FrameSpec, Layout, Shard, SourceFrame
from dcr.layout.schema import Schema
from dcr.layout.views import Bits, Lanes
from dcr.memory.baseline import Baseline
from dcr.memory.placement import canonical_table
from dcr.pipeline import Pipeline
from dcr.protocol import digest
from dcr.protocol.wire import ChunkRef, Identity, Message
from dcr.publish.copies import Copies, Detail, Root
from dcr.publish.frozen import slice_of
from dcr.publish.refit import ResidualTensors
from dcr.seams import Residual, Source, Stage, Writer
from dcr.stages.compress import Compress
from dcr.stages.construct import Construct, Conversion, Made, Tables, Whole, convert, source_table
from dcr.stages.transfer import Transfer


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """The frames of what a rank owns, for the other ranks; schema: the digest of the schema that it knows."""

    schema: bytes
    specs: tuple[FrameSpec, ...]


def require_one_schema(plans: Sequence[Plan]) -> None:
    """All ranks know one schema.

    Raises:
        SchemaError: they do not; names two that differ.
    """
    for number, plan in enumerate(plans):
        if plan.schema != plans[0].schema:
            raise SchemaError(
                f"ranks 0 and {number} differ in names, dtypes, shapes, or order of tensors: "
                "make every rank's source of one model, with the same options"
            )


class Shipped(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has sent of an attempt.

    changed: elements. residual_bytes: of tensors that were converted for it. made: what its conversions gave, where
    other ranks convert the same.
    """

    chunks: tuple[ChunkRef, ...]
    changed: int
    wire_bytes: int
    residual_bytes: int
    chosen: tuple[Chosen, ...] = ()
    made: tuple[Made, ...] = ()


class Part:
    """The frames that one rank owns, and its baseline of them.

    Frames are numbered over all ranks, in rank order; a rank's direct frames come before those of its residual groups.

    stages, workers, observe: as for `dcr.publisher`.
    """

    def __init__(
        self,
        source: Source,
        *,
        stages: Sequence[Stage[Any, Any]] = (),
        frame_elems: int = frames.FRAME_ELEMS,
        workers: int = 1,
        observe: Observer,
    ) -> None:
        self._source = source
        self._stages = tuple(stages)
        self._workers = workers
        self._observe = observe
        frozen: Container[int] = getattr(source, "frozen", ())
        self._direct = _cut(source.schema, source.shards, frozen, frame_elems)
        self._tables = Tables(self._direct)
        self._copies = Copies(source, frame_elems)
        self._storages: Sequence[Bits] = ()  # while a version is captured
        self._groups = [(group, _plan(group, source.schema, frozen, frame_elems)) for group in source.residual]
        self._turn = 0  # versions committed: which frames are audited, and which slice of the frozen ones is looked at
        self._fingerprints: list[bytes] = []  # of what the conversions of the committed version have read
        self._found: list[bytes] = []  # of what they read now
        self._published: dict[int, Lanes] = {}  # digests of what is frozen, to hold where the baseline is forgotten
        self._scanned: tuple[dict[int, Bits], dict[int, Lanes]] = {}, {}  # bits, and these digests

    @property
    def schema(self) -> Schema:
        return self._source.schema

    @property
    def plan(self) -> Plan:
        """What this rank owns."""
        own = [*self._direct, *(frame for _, plan in self._groups for frame in plan)]
        return Plan(self.schema.digest, tuple(frame.spec for frame in own))

    @property
    def tally(self) -> Tally:
        """What this rank owns, for the proof that over all ranks each element is owned once (`dcr.layout.coverage`)."""
        owned = [tensor for group, _ in self._groups if group.owned for tensor in group.tensors]
        return coverage.tally(self.schema, ((one.tensor, one.box) for one in self._source.shards), owned)

    def join(self, plans: Sequence[Plan], rank: int) -> None:
        """Take this rank's place among all ranks; the layout is the same on each of them."""
        layout = Layout(self.schema, tuple(spec for plan in plans for spec in plan.specs))
        self.baseline = Baseline(layout)
        first = sum(len(plan.specs) for plan in plans[:rank])
        self._own = range(first, first + len(plans[rank].specs))
        self._conversions: list[Conversion] = []
        first += len(self._direct)
        self._frozen = frozenset(
            number
            for number, spec in zip(self._own, plans[rank].specs, strict=True)
            if spec.regions[0].tensor in getattr(self._source, "frozen", ())
        )
        for group, own in self._groups:
            self._conversions.append(Conversion(group, own, first, is_shared=len(plans) > 1))
            first += len(own)

    # ------------------------------------------------------------------ what the weights are

    @property
    def residual(self) -> tuple[ResidualTensors, ...]:
        """What has no map, on any rank."""
        specs = self.schema.tensors
        return tuple(
            ResidualTensors(tuple(specs[tensor].name for tensor in group.tensors), group.reason, self._nbytes(group))
            for group, _ in self._groups
        )

    def owns(self, frame: int) -> bool:
        return frame in self._own

    async def bind(self) -> None:
        """Take the weights as they lie now, for one version.

        Raises:
            StorageRebound: a weight is no longer what it was; nothing has changed here.
        """
        self._storages = await anyio.to_thread.run_sync(self._source.storages)

    async def look(self) -> list[bool]:
        """Per residual group: whether what its conversion reads differs from what it read for the committed version."""
        self._found = await anyio.to_thread.run_sync(self._look)
        if self.baseline.identity is None or not self._fingerprints:
            return [True] * len(self._found)
        return [one != other for one, other in zip(self._found, self._fingerprints, strict=True)]

    async def copies(self) -> tuple[Root, ...]:
        """What this rank's copies of elements hold, for the other ranks.

        Raises:
            CopiesDiffer: this rank itself holds some elements twice, and not alike.
        """
        return await anyio.to_thread.run_sync(self._copies.roots, self._storages, self._slice)

    async def details(self, differing: Sequence[bytes]) -> tuple[Detail, ...]:
        """The same of some copies, tensor by tensor."""
        return self._copies.details(differing)

    def _look(self) -> list[bytes]:
        return [group.fingerprint() for group, _ in self._groups]

    async def scan(self) -> tuple[Lanes, tuple[Made, ...]]:
        """The digest of the weights as they are, and what conversions gave; `adopt` makes them the baseline."""
        lanes, made = await anyio.to_thread.run_sync(self._scan)
        return lanes, made

    def adopt(self, identity: Identity | None, lanes: Lanes, *, alike: bool = True) -> None:
        """The weights that were scanned are those of a committed version; None: they are not.

        alike: whether all ranks' conversions gave the same; if not, they are made again for the next version, which
        says so.
        """
        (scanned, published), self._scanned = self._scanned, ({}, {})
        if identity is not None:
            self.baseline.adopt(scanned, identity, lanes)
            self._published = published
            self._fingerprints = self._found if alike else []

    def _scan(self) -> tuple[Lanes, tuple[Made, ...]]:
        self._found = self._look()
        self._scanned = {}, {}
        lanes, made = digest.zero(len(self.schema.tensors)), list[Made]()
        self._read(self._own[: len(self._direct)], self._direct, self._source.storages(), lanes)
        for one in self._conversions:
            arrays, digests = convert(one, self.schema)
            made += digests
            self._read(range(one.first, one.first + len(one.plan)), one.plan, arrays, lanes)
        return lanes, tuple(made)

    def _read(self, numbers: range, plan: Sequence[SourceFrame], storages: Sequence[Bits], lanes: Lanes) -> None:
        """Keep canonical bits per frame; add their digest to `lanes`."""
        bits, published = self._scanned
        for number, source in zip(numbers, plan, strict=True):
            frame = self.baseline.layout.frames[number]
            bits[number] = kernels.read(source_table(source, storages), source.kind)
            sums = kernels.digest(canonical_table(frame, bits[number]), frame.keys)
            lanes[list(frame.tensors)] += sums
            if number in self._frozen:
                published[number] = sums

    # ------------------------------------------------------------------ one version

    async def ship(
        self, link: Writer, compress: Compress, stale: Sequence[bool], captured: Callable[[], None]
    ) -> tuple[Shipped, Summary]:
        """Compare, convert what is stale, compress and send. `bind` comes first.

        Raises:
            FrozenChanged: a tensor that must not change has; names it. StateError: a stage dropped chunks. Any error of
                a stage.
        """
        own = self._own[: len(self._direct)]
        moving = [frame for frame in own if frame not in self._frozen]
        looked_at = slice_of([frame for frame in own if frame in self._frozen], self._turn)
        fed = own if self._slice is None else [*moving, *looked_at]

        def read() -> None:
            self._storages = ()  # nothing of the trainer's memory is kept between two versions
            captured()

        conversions = [one for one, changed in zip(self._conversions, stale, strict=True) if changed]
        construct = Construct(
            self.baseline,
            self._direct,
            self._storages,
            first=self._own.start,
            tables=self._tables,
            conversions=conversions,
            workers=self._workers,
            audited=moving[self._turn % len(moving)] if moving else None,
            captured=read,
            is_dense=compress.is_dense,
            frozen=self._frozen,
            published=self._published,
        )
        try:
            refs, wire_bytes, summary = await self._send(construct, fed, link, compress)
        except DigestMismatch:  # what weights were compared with may have rotted
            await self.require_baseline(f"{compress.identity}: the baseline")
            raise
        patches = list(self.baseline.patches())
        if missing := {patch.frame.index for patch in patches} - {ref.frame for ref in refs}:
            raise StateError(f"a stage dropped the chunks of frames {sorted(missing)[:8]}; a version needs them all")
        residual_bytes = sum(self._nbytes(one.group) for one in conversions if one.group.owned)
        changed, chosen = sum(patch.changed for patch in patches), self._chosen(compress, len(refs))
        return Shipped(tuple(refs), changed, wire_bytes, residual_bytes, chosen, tuple(construct.made)), summary

    def _chosen(self, compress: Compress, sent: int) -> tuple[Chosen, ...]:
        """What was made of this rank's frames."""
        skipped = len(self._own) - sent
        return (*compress.chosen, *([Chosen("skip", "", "nothing changed", skipped, 0, 0)] if skipped else []))

    async def ship_whole(self, link: Writer, compress: Compress) -> Shipped:
        """Send the committed bits of all of this rank's frames."""
        refs, wire_bytes, _ = await self._send(Whole(self.baseline), self._own, link, compress)
        return Shipped(tuple(refs), 0, wire_bytes, 0, compress.chosen)

    async def ship_again(self, link: Writer, compress: Compress, wanted: Sequence[int]) -> int:
        """Send those of the frames that are this rank's once more, the same bits as before. Returns bytes sent."""
        sent, version = 0, compress.identity.version
        for frame in filter(self.owns, wanted):
            patch = self.baseline.held(frame)
            if patch is None:
                tell(self._observe, ResendIgnored, version, frame)
                continue
            chunk, body = await anyio.to_thread.run_sync(compress.encode, patch)
            await link.send(Message(chunk, body))
            sent += len(body)
            tell(self._observe, ChunkSentAgain, version, frame, len(body))
        return sent

    async def _send(
        self, first: Stage[int, Patch], own: Sequence[int], link: Writer, compress: Compress
    ) -> tuple[list[ChunkRef], int, Summary]:
        transfer, refs = Transfer(link, compress.sent), list[ChunkRef]()
        pipeline: Pipeline[int, ChunkRef] = Pipeline(first, compress, *self._stages, transfer)
        version = compress.identity.version
        summary = await pipeline.run(own, into=refs.append, version=version, observe=self._observe)
        return refs, transfer.sent_bytes, summary

    def drop(self) -> None:
        """The version in flight is given up."""
        self._storages = ()
        self.baseline.drop()

    async def fold(self, identity: Identity) -> None:
        """The head names `identity`."""
        self._turn += 1
        self._published |= {
            patch.number: patch.new_sums for patch in self.baseline.patches() if patch.number in self._frozen
        }
        await anyio.to_thread.run_sync(self.baseline.fold, identity)
        self._fingerprints = self._found

    async def require_baseline(self, what: str) -> None:
        """Members refused: look at this side's own memory before any of them is blamed.

        Raises:
            DigestMismatch: the baseline is not what it was; it is forgotten, and the next version is an anchor.
        """
        if self.baseline.identity is None:
            return
        found = await anyio.to_thread.run_sync(self.baseline.rescan)
        try:
            digest.require_equal(found, self.baseline.lanes, self.schema, what)
        except DigestMismatch:
            self.baseline.clear()
            raise

    @property
    def _slice(self) -> int | None:
        """Which slice of what is frozen is looked at; None: all of it, since there is no version yet."""
        return None if self.baseline.identity is None else self._turn

    def _nbytes(self, group: Residual) -> int:
        """Canonical bytes of a group."""
        specs = self.schema.tensors
        return sum(specs[tensor].numel * specs[tensor].width for tensor in group.tensors)


def _cut(schema: Schema, shards: Sequence[Shard], frozen: Container[int], frame_elems: int) -> list[SourceFrame]:
    """Frames of what may change, and then frames of what must not."""
    still = [shard for shard in shards if shard.tensor in frozen]
    moving = [shard for shard in shards if shard.tensor not in frozen] if still else shards
    return [*frames.plan(schema, moving, frame_elems), *frames.plan(schema, still, frame_elems)]


def _plan(group: Residual, schema: Schema, frozen: Container[int], frame_elems: int) -> list[SourceFrame]:
    """The frames of a residual group over the arrays that it converts to; none where another rank owns it."""
    if not group.owned:
        return []
    boxes = [Box(0, 0, (Dim(schema.tensors[tensor].numel, 1, 1),)) for tensor in group.tensors]
    shards = [Shard(tensor, number, box) for number, (tensor, box) in enumerate(zip(group.tensors, boxes, strict=True))]
    return _cut(schema, shards, frozen, frame_elems)
