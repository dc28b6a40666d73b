"""What several ranks, or several names, hold alike: compared before each version, and never chosen among.

Each rank digests its copies of what other ranks hold too: one read of these bytes. Ranks then compare 16 bytes per set
of holders, and only where these differ the digests tensor by tensor, so that an error can name tensors and ranks.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dcr import kernels
from dcr.errors import CopiesDiffer
from dcr.layout import frames
from dcr.layout.frames import Shard, SourceFrame
from dcr.layout.schema import Schema, keys
from dcr.layout.views import Bits, Lanes
from dcr.protocol import digest
from dcr.publish.frozen import SLICES, slice_of
from dcr.seams import Source, Twins
from dcr.stages.construct import Made, Tables

SHOWN = 5


class Root(msgspec.Struct, frozen=True, array_like=True):
    """The digest of a rank's copy of some regions. key: which regions, and who holds them."""

    key: bytes
    root: bytes


class Detail(msgspec.Struct, frozen=True, array_like=True):
    """The same tensor by tensor."""

    key: bytes
    tensors: tuple[int, ...]
    lanes: bytes


@dataclass(frozen=True, slots=True, eq=False)
class _Regions:
    """Some regions of this rank: their frames, and the tensors that they belong to."""

    plan: Sequence[SourceFrame]
    tables: Tables
    tensors: tuple[int, ...]


class Copies:
    """This rank's copies of what others hold too, and what it holds twice itself."""

    def __init__(self, source: Source, frame_elems: int) -> None:
        self._schema = source.schema
        self._frame_elems = frame_elems
        self._keys = keys(source.schema.tensors)
        frozen: Container[int] = getattr(source, "frozen", ())
        self._regions: dict[bytes, _Regions] = {}
        self._moving: list[bytes] = []
        self._still: list[Sequence[bytes]] = []  # per set of holders, the parts of what is frozen, alike on all ranks
        for one in getattr(source, "copies", ()):
            still = [shard for shard in one.shards if shard.tensor in frozen]
            self._moving.append(one.key)
            self._regions[one.key] = self._cut([shard for shard in one.shards if shard.tensor not in frozen])
            parts = {one.key + bytes([turn]): slice_of(still, turn) for turn in range(min(SLICES, len(still)))}
            self._still.append(list(parts))
            self._regions |= {key: self._cut(shards) for key, shards in parts.items()}
        self._twins: Sequence[Twins] = getattr(source, "twins", ())
        self._lanes: dict[bytes, Lanes] = {}

    def roots(self, storages: Sequence[Bits], turn: int | None = None) -> tuple[Root, ...]:
        """What this rank's copies hold. One read of them; in a worker thread.

        turn: which slice of what is frozen is read, as for `dcr.publish.frozen.slice_of`; None: all of it.

        Raises:
            CopiesDiffer: two names of one tensor lie apart on this rank, and hold different bits.
        """
        for twins in self._twins:
            self._require_equal(twins, storages)
        chosen = [key for keys in self._still for key in (keys if turn is None else slice_of(keys, turn))]
        self._lanes = {key: self._digest(self._regions[key], storages) for key in (*self._moving, *chosen)}
        return tuple(Root(key, _root(lanes)) for key, lanes in self._lanes.items())

    def details(self, differing: Sequence[bytes]) -> tuple[Detail, ...]:
        """What `roots` has found, tensor by tensor."""
        return tuple(
            Detail(key, self._regions[key].tensors, digest.pack(self._lanes[key]))
            for key in differing
            if key in self._lanes
        )

    def _require_equal(self, twins: Twins, storages: Sequence[Bits]) -> None:
        if all(_is_same(one, other, storages) for one, other in zip(twins.one, twins.other, strict=True)):
            return
        one, other = self._cut(twins.one), self._cut(twins.other)
        if (self._digest(one, storages) != self._digest(other, storages)).any():
            raise CopiesDiffer(
                f"{twins.names[0]} and {twins.names[1]} are published as one tensor, no longer share their memory, and "
                "hold different bits; tie them again, or make a new source and a new publisher"
            )

    def _cut(self, shards: Sequence[Shard]) -> _Regions:
        plan = frames.plan(self._schema, shards, self._frame_elems)
        return _Regions(plan, Tables(plan), tuple(sorted({shard.tensor for shard in shards})))

    def _digest(self, regions: _Regions, storages: Sequence[Bits]) -> Lanes:
        lanes, tables = digest.zero(len(regions.tensors)), regions.tables.over(storages)
        place = {tensor: index for index, tensor in enumerate(regions.tensors)}
        for number, frame in enumerate(regions.plan):
            tensors = sorted({region.tensor for region in frame.spec.regions})
            found = kernels.digest(tables[number], self._keys[tensors], frame.kind)
            lanes[[place[tensor] for tensor in tensors]] += found
        return lanes


def differing(roots: Sequence[Sequence[Root]]) -> list[bytes]:
    """The keys under which ranks hold different bits, given every rank's roots."""
    found: dict[bytes, bytes] = {}
    return sorted({one.key for rank in roots for one in rank if found.setdefault(one.key, one.root) != one.root})


def error_of(details: Sequence[Sequence[Detail]], schema: Schema) -> CopiesDiffer:
    """What to raise, on every rank alike, given every rank's details of what differs."""
    holders: _Holders = defaultdict(lambda: defaultdict(list))
    for rank, some in enumerate(details):
        for one in some:
            rows = digest.unpack(one.lanes)
            for tensor, row in zip(one.tensors, rows, strict=True):
                holders[one.key, tensor][digest.pack(row[None])].append(rank)
    return CopiesDiffer(
        f"ranks hold different bits of what they hold alike: {_shown(_parted(holders), schema)}; nothing was "
        "published: make the copies equal (torch.distributed.broadcast from one of the ranks), and see why they parted"
    )


def error_of_made(made: Sequence[Sequence[Made]], schema: Schema) -> CopiesDiffer | None:
    """What to raise, on every rank alike, if ranks have converted one tensor to different bits; made: every rank's."""
    holders: _Holders = defaultdict(lambda: defaultdict(list))
    for rank, tensors in enumerate(made):
        for each in tensors:
            holders[b"", each.tensor][each.lanes].append(rank)
    if not (parted := _parted(holders)):
        return None
    return CopiesDiffer(
        f"ranks export different bits of what they export alike: {_shown(parted, schema)}; nothing was published: make "
        "equal what the export reads on these ranks, and see why it parted"
    )


# Per key and tensor, which ranks hold which bits.
_Holders = defaultdict[tuple[bytes, int], defaultdict[bytes, list[int]]]


def _parted(holders: _Holders) -> dict[int, Mapping[bytes, Sequence[int]]]:
    return {tensor: by_bits for (_, tensor), by_bits in sorted(holders.items()) if len(by_bits) > 1}


def _shown(parted: Mapping[int, Mapping[bytes, Sequence[int]]], schema: Schema) -> str:
    shown = [f"{schema.tensors[tensor].name} on {_sides(by_bits)}" for tensor, by_bits in sorted(parted.items())]
    more = [f"and {len(parted) - SHOWN} more tensors"] if len(parted) > SHOWN else []
    return "; ".join(shown[:SHOWN] + more)


def _sides(by_bits: Mapping[bytes, Sequence[int]]) -> str:
    """Which ranks agree with each other, the most of them first."""
    sides = sorted(by_bits.values(), key=lambda ranks: (-len(ranks), ranks))
    return " against ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for ranks in sides)


def _is_same(one: Shard, other: Shard, storages: Sequence[Bits]) -> bool:
    """Whether two shards of one region lie in the same memory."""
    first, second = storages[one.storage], storages[other.storage]
    return first is second or first.__array_interface__["data"][0] == second.__array_interface__["data"][0]


def _root(lanes: Lanes) -> bytes:
    return hashlib.blake2b(digest.pack(lanes), digest_size=16).digest()
