"""The source that every map ends in: local tensors, boxes to canonical tensors, and who of several holders owns what.

P  pieces of one rank      R  ranks that hold the same region
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from dcr.errors import SchemaError
from dcr.kernels import reference
from dcr.layout import coverage
from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import Shard
from dcr.layout.overlap import intersect
from dcr.layout.schema import PAIRS, Schema, TensorSpec
from dcr.layout.views import Bits
from dcr.probing.tensors import Tied
from dcr.seams import Copy, Residual, Twins
from dcr.sources.memory import SourceMemory, aliased
from dcr.sources.ranks import Peers

KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """A region that this rank holds: the local tensor, the box from its memory to the canonical tensor, the cast."""

    tensor: int
    local: int
    box: Box
    kind: int = reference.NONE


class Shares(NamedTuple):
    """What becomes of the regions that a rank holds.

    owned: what it publishes. held: all of them. copies: those that other ranks hold as well, with a key for each set of
    holders. twins: pairs of pieces of one region, where this rank holds it twice.
    """

    owned: list[Piece]
    held: list[Piece]
    copies: list[tuple[bytes, list[Piece]]]
    twins: list[tuple[Piece, Piece]]


class MappedSource:
    """A `dcr.seams.Source` over the local tensors of one rank. Making one is collective.

    schema: the whole model's, alike on all ranks (see `united`). shares: the regions of this rank, in which Piece.local
    is an index into `tensors` (see `shared`). tensors: the local tensors. find: every name of theirs and its tensor, as
    they are whenever it is called. residual: the groups without a map, alike on all ranks. proved: that each element is
    owned once has been checked by the caller.

    Raises:
        SchemaError: ranks differ in their residual groups.
        LayoutError: over all ranks a canonical element is owned by nobody, or more than once.
    """

    def __init__(
        self,
        schema: Schema,
        shares: Shares,
        tensors: Sequence[Tied],
        find: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        *,
        residual: Sequence[Residual] = (),
        peers: Peers | None = None,
        proved: bool = False,
    ) -> None:
        peers = peers or Peers()
        self._memory = SourceMemory(tensors, find)
        self.schema = schema
        self.residual = tuple(residual)
        _require_agreed(residual, peers)
        if not proved:
            whole = [tensor for group in residual if group.owned for tensor in group.tensors]
            coverage.require_covered(schema, covered(schema, shares.owned, peers, whole))
        self.shards: Sequence[Shard] = _shards(shares.owned)
        self.copies = [Copy(key, tuple(_shards(pieces))) for key, pieces in shares.copies]
        names = [one.name for one in tensors]
        self.twins = [
            *aliased(self._memory, tensors, _shards(shares.held)),
            *(
                Twins((names[one.local], names[other.local]), (_shard(one),), (_shard(other),))
                for one, other in shares.twins
            ),
        ]

    def storages(self) -> Sequence[Bits]:
        """See `dcr.seams.Source.storages`."""
        return self._memory.borrow()


def _shards(pieces: Iterable[Piece]) -> list[Shard]:
    return [_shard(piece) for piece in pieces]


def _shard(piece: Piece) -> Shard:
    return Shard(piece.tensor, piece.local, piece.box, piece.kind)


def stored(lies: Box, box: Box) -> list[Box]:
    """A box from a tensor's row-major elements, as boxes from its storage, in which they lie as `lies` says."""
    if len(lies.dims) == 1 and lies.dims[0][1:] == (1, 1):
        low, high = box.here_bounds
        if lies.there0 <= low and high < lies.there0 + lies.numel:
            return [Box(box.here0 + lies.here0 - lies.there0, box.there0, box.dims)]
    return [found.inverted() for found in intersect(box.inverted(), lies)]


def covered(schema: Schema, owned: Sequence[Piece], peers: Peers, whole: Sequence[int] = ()) -> coverage.Tally:
    """What all ranks own together; `whole`: tensors that this rank owns without a map. Collective."""
    return peers.sum(coverage.tally(schema, [(piece.tensor, piece.box) for piece in owned], whole))


def shared(pieces: Sequence[Piece], schema: Schema, peers: Peers) -> Shares:
    """What this rank owns of the regions that it holds; each region is owned once, and bytes per rank are even.

    Ranks that hold the same regions cut all of those, laid end to end, into equal spans; rank by rank each owns one.
    Collective: 16 bytes per piece and rank are exchanged.
    """
    ascending = [_ascending(piece) for piece in pieces if piece.box.numel]
    if peers.size == 1:
        return Shares(ascending, ascending, [], [])
    mine: dict[bytes, Piece] = {}
    twins: list[tuple[Piece, Piece]] = []
    for piece in ascending:
        first = mine.setdefault(_key(piece), piece)
        if first is not piece:
            twins.append((first, piece))
    holders: dict[bytes, list[int]] = defaultdict(list)
    for rank, data in enumerate(peers.gather(b"".join(mine))):
        for start in range(0, len(data), KEY_BYTES):
            holders[data[start : start + KEY_BYTES]].append(rank)
    groups: dict[tuple[int, ...], list[bytes]] = defaultdict(list)
    owned: list[Piece] = []
    copies: list[tuple[bytes, list[Piece]]] = []
    for key in mine:
        groups[tuple(holders[key])].append(key)
    for ranks, keys in groups.items():
        keys = sorted(keys, key=lambda key: (mine[key].tensor, mine[key].box.there0, key))
        together = [mine[key] for key in keys]
        owned += _span(together, schema, ranks.index(peers.rank), len(ranks))
        if len(ranks) > 1:
            copies.append((hashlib.blake2b(b"".join(keys), digest_size=KEY_BYTES).digest(), together))
    return Shares(owned, ascending, copies, twins)


def _span(pieces: Sequence[Piece], schema: Schema, index: int, count: int) -> Iterator[Piece]:
    """The index-th of `count` equal spans of some pieces' bytes."""
    widths = [schema.tensors[piece.tensor].width for piece in pieces]
    total = sum(piece.box.numel * width for piece, width in zip(pieces, widths, strict=True))
    low, high = index * total // count, (index + 1) * total // count
    first = 0
    for piece, width in zip(pieces, widths, strict=True):
        numel = piece.box.numel
        start, stop = (min(max(-((first - cut) // width), 0), numel) for cut in (low, high))
        first += numel * width
        for box in piece.box.run(start, stop - start):
            yield Piece(piece.tensor, piece.local, box, piece.kind)


def _ascending(piece: Piece) -> Piece:
    """The same region numbered by canonical index, so that all holders of a region number it alike."""
    here0, there0, dims = piece.box
    for dim in dims:
        if dim.there < 0:
            here0, there0 = here0 + (dim.n - 1) * dim.here, there0 + (dim.n - 1) * dim.there
    turned = [Dim(n, -here, -there) if there < 0 else Dim(n, here, there) for n, here, there in dims]
    box = Box(here0, there0, tuple(sorted(turned, key=lambda dim: -dim.there))).simplified()
    return Piece(piece.tensor, piece.local, box, piece.kind)


def _key(piece: Piece) -> bytes:
    """A name for a region, whatever the storage behind it: tensor, first element, and canonical dimensions merged."""
    box = Box(0, piece.box.there0, tuple(Dim(n, there, there) for n, _, there in piece.box.dims)).simplified()
    what = np.array([piece.tensor, box.there0, *(value for n, _, there in box.dims for value in (n, there))], "<i8")
    return hashlib.blake2b(what.tobytes(), digest_size=KEY_BYTES).digest()


def united(specs: Sequence[TensorSpec], peers: Peers) -> Schema:
    """The schema of the whole model, given each rank's tensors: by rank, each name once. Collective.

    Raises:
        SchemaError: two ranks say different things of one name.
    """
    for spec in specs:
        if spec.dtype in PAIRS:
            raise SchemaError(
                f"{spec.name}: only a module on one process (dcr.source(model)) publishes {spec.dtype}, whose elements "
                "are two words; keep it as torch.view_as_real gives it"
            )
    mine = Schema(tuple(specs))
    if len(set(peers.gather(mine.digest))) == 1:
        return mine
    known: dict[str, TensorSpec] = {}
    for rank, data in enumerate(peers.gather(msgspec.msgpack.encode(mine.tensors))):
        for spec in msgspec.msgpack.decode(data, type=tuple[TensorSpec, ...]):
            if known.setdefault(spec.name, spec) != spec:
                raise SchemaError(f"rank {rank} has {spec}, another rank has {known[spec.name]}")
    return Schema(tuple(known.values()))


def demoted(reasons: Mapping[str, str], peers: Peers) -> dict[str, str]:
    """Tensors that have no map on some rank, and the reason that the first such rank gives. Collective."""
    known: dict[str, str] = {}
    for data in peers.gather(msgspec.msgpack.encode(dict(reasons))):
        known = msgspec.msgpack.decode(data, type=dict[str, str]) | known
    return known


def _require_agreed(residual: Sequence[Residual], peers: Peers) -> None:
    """Groups are converted together, so all ranks must have the same in one order."""
    groups = peers.gather(msgspec.msgpack.encode([tuple(group.tensors) for group in residual]))
    for rank, found in enumerate(groups):
        if found != groups[0]:
            raise SchemaError(f"rank {rank} has other residual groups than rank 0; list them alike on all ranks")
