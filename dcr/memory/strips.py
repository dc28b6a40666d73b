"""Strips: where a rank keeps the elements of one frame, as tables whose numbering follows the frame's.

    N  elements of a frame      R  runs of consecutive elements of a frame

A rank may hold a part of a frame, or some elements twice. Its places are cut by the frame's regions into pieces, and
pieces that follow one another in the frame's numbering share a strip: one table, and the runs of the frame that it
holds. The first home of an element is the one whose bits count; every further one is a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcr.errors import LayoutError
from dcr.layout.boxes import MAX_DIMS, Box, Dim
from dcr.layout.frames import Frame, Region
from dcr.layout.overlap import compose, intersect
from dcr.layout.views import HERE, HERE_STRIDES, NDIM, SIZES, STORAGE, Bits, Rows, Table, rows_of

Cast = Callable[[Bits], Bits]
Runs = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Place:
    """A home of canonical elements of one tensor: its storage, and the box from there to canonical coordinates.

    cast: what makes the stored bits of canonical ones, where they are not the same.
    """

    tensor: int
    storage: int
    box: Box
    cast: Cast | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Strip:
    """Some elements of a frame, in the frame's order: its table, and the runs [R, 2] (start, count) it holds.

    runs: None if it holds the whole frame. copy: True if these elements have an earlier home on this rank.
    """

    table: Table
    runs: Runs | None
    copy: bool
    cast: Cast | None

    def elements(self, numel: int) -> slice | NDArray[np.bool_]:
        """Which of the frame's N elements it holds, as an index: a byte for each, and runs are copied as such."""
        return slice(None) if self.runs is None else covered(self.runs, numel)

    def dense(self, bits: Bits) -> Table:
        """The same elements as a table over a dense array of them, in the strip's order."""
        return Table((bits,), dense_rows(self.table.rows))


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """One box from frame numbers to a storage, and where it lies in the frame."""

    lane: int
    place: Place
    box: Box
    region: Region
    region_first: int
    copy: bool

    @property
    def kind(self) -> tuple[bool, Cast | None]:
        return self.copy, self.place.cast


def strips_of(
    frame: Frame, storages: Sequence[Bits], places: Mapping[int, Sequence[Place]], lane: Callable[[Place], int]
) -> list[Strip]:
    """The strips of one frame: first homes before copies.

    places: those of each tensor of the layout. lane: column TENSOR of a place's rows: in which sum its elements count.

    Raises:
        LayoutError: the first home of an element holds a cast of it.
    """
    pieces = [piece for part in _regions(frame) for piece in _pieces(*part, places, lane)]
    for piece in pieces:
        if piece.place.cast is not None and not piece.copy:
            raise LayoutError(f"frame {frame.index}: elements are kept only as a cast; they need a canonical home too")
    groups: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda piece: (piece.copy, piece.box.here_bounds[0])):
        for group in groups:
            last, width = group[-1], storages[group[-1].place.storage].itemsize
            follows = last.box.here_bounds[1] < piece.box.here_bounds[0]
            if follows and last.kind == piece.kind and width == storages[piece.place.storage].itemsize:
                group.append(piece)
                break
        else:
            groups.append([piece])
    return [_strip(frame, storages, group) for group in groups]


def covered(runs: Runs, numel: int) -> NDArray[np.bool_]:
    """Whether each of the numbers below N lies in some ascending runs."""
    edges = np.stack([runs[:, 0], runs.sum(axis=1)], axis=1).reshape(-1)
    inside: NDArray[np.bool_] = np.arange(len(edges) + 1) % 2 == 1
    return inside.repeat(np.diff(edges, prepend=0, append=numel))


def joined(runs: Runs) -> Runs:
    """Ascending runs, with those that touch made one."""
    if len(runs) < 2:
        return runs
    begins = np.concatenate([[True], runs[1:, 0] != runs[:-1].sum(axis=1)])
    starts = np.flatnonzero(begins)
    return np.stack([runs[starts, 0], np.add.reduceat(runs[:, 1], starts)], axis=1)


def shared(one: Runs, other: Runs) -> Runs:
    """What two ascending lists of runs have in common."""
    if not len(one) or not len(other):
        return np.zeros((0, 2), np.int64)
    edges = np.unique(np.concatenate([one[:, 0], one.sum(axis=1), other[:, 0], other.sum(axis=1)]))
    starts = edges[:-1]
    both = _holds(one, starts) & _holds(other, starts)
    return joined(np.stack([starts[both], np.diff(edges)[both]], axis=1))


def without(one: Runs, other: Runs) -> Runs:
    """What the first of two ascending lists of runs has, and the other has not."""
    if not len(one) or not len(other):
        return one
    edges = np.unique(np.concatenate([one[:, 0], one.sum(axis=1), other[:, 0], other.sum(axis=1)]))
    starts = edges[:-1]
    only = _holds(one, starts) & ~_holds(other, starts)
    return joined(np.stack([starts[only], np.diff(edges)[only]], axis=1))


def runs_of(box: Box) -> Runs:
    """The runs on the storage side of a box whose elements ascend there."""
    dims = list(box.simplified().dims)
    length = dims.pop().n if dims and dims[-1].here == 1 else 1
    starts = np.array([box.here0], np.int64)
    for dim in dims:
        starts = (starts[:, None] + np.arange(dim.n) * dim.here).reshape(-1)
    return joined(np.stack([starts, np.full_like(starts, length)], axis=1))


def dense_rows(rows: Rows) -> Rows:
    """Rows of a table, over a dense array of its elements in numbering order."""
    result = rows.copy()
    sizes = np.where(np.arange(MAX_DIMS) < rows[:, NDIM, None], rows[:, SIZES], 1)
    behind = np.ones_like(sizes)
    behind[:, :-1] = np.cumprod(sizes[:, ::-1], axis=1)[:, -2::-1]
    result[:, STORAGE] = 0
    result[:, HERE_STRIDES] = np.where(np.arange(MAX_DIMS) < rows[:, NDIM, None], behind, 0)
    counts = sizes.prod(axis=1)
    result[:, HERE] = np.cumsum(counts) - counts
    return result


def _holds(runs: Runs, starts: NDArray[np.int64]) -> NDArray[np.bool_]:
    at = np.searchsorted(runs[:, 0], starts, side="right") - 1
    held: NDArray[np.bool_] = (at >= 0) & (starts < runs[np.maximum(at, 0)].sum(axis=1))
    return held


def _regions(frame: Frame) -> Iterator[tuple[Region, int]]:
    """Regions, and the number of each one's first element."""
    first = 0
    for region in frame.spec.regions:
        yield region, first
        first += region.box(0).numel


def _pieces(
    region: Region, first: int, places: Mapping[int, Sequence[Place]], lane: Callable[[Place], int]
) -> Iterator[_Piece]:
    """What each place of a region's tensor holds of it."""
    held = np.zeros((0, 2), np.int64)
    homes = places.get(region.tensor, ())
    for place in homes:
        boxes = _within(region, first, place.box)
        taken = held
        for box in boxes:
            if len(homes) == 1:
                yield _Piece(lane(place), place, box, region, first, False)
                continue
            runs = runs_of(box)
            again = shared(runs, held)
            for part, copy in ((without(runs, again), False), (again, True)):
                yield from (_Piece(lane(place), place, cut, region, first, copy) for cut in _cut(box, runs, part))
            taken = _union(taken, runs)
        held = taken


def _within(region: Region, first: int, place: Box) -> list[Box]:
    """Boxes from frame numbers to a storage: what a place holds of a region."""
    box = region.box(first).simplified()
    if _is_run(box) and _is_run(place):
        low = max(box.there0, place.there0)
        high = min(box.there0 + box.numel, place.there0 + place.numel)
        at = box.here0 + low - box.there0
        return [Box(at, place.here0 + low - place.there0, (Dim(high - low, 1, 1),))] if low < high else []
    return intersect(box, place)


def _is_run(box: Box) -> bool:
    return not box.dims or (len(box.dims) == 1 and box.dims[0][1:] == (1, 1))


def _cut(box: Box, runs: Runs, part: Runs) -> Iterator[Box]:
    """Those elements of a box from frame numbers whose numbers lie in `part`, which lies in its runs."""
    if len(part) and part[:, 1].sum() == runs[:, 1].sum():
        yield box
        return
    for start, count in part.tolist():
        yield from intersect(Box(start, start, (Dim(count, 1, 1),)), box.inverted())


def _union(one: Runs, other: Runs) -> Runs:
    parts = np.concatenate([without(one, other), other])
    return joined(parts[np.argsort(parts[:, 0])])


def _strip(frame: Frame, storages: Sequence[Bits], pieces: Sequence[_Piece]) -> Strip:
    used = sorted({piece.place.storage for piece in pieces})
    local = {storage: index for index, storage in enumerate(used)}
    entries = [(local[piece.place.storage], piece.lane, box) for piece in pieces for box in _canonical(piece)]
    table = Table(tuple(storages[storage] for storage in used), rows_of(entries))
    runs = joined(np.concatenate([runs_of(piece.box) for piece in pieces]))
    whole = len(runs) == 1 and int(runs[0, 1]) == frame.numel
    copy, cast = pieces[0].kind
    return Strip(table, None if whole else runs, copy, cast)


def _canonical(piece: _Piece) -> list[Box]:
    """A piece as boxes from its storage to canonical coordinates, in the frame's order."""
    region, box = piece.region, piece.box
    if not region.dims or (len(region.dims) == 1 and region.dims[0][1] == 1):
        there0 = region.there0 + box.here0 - piece.region_first
        return [Box(box.there0, there0, tuple(Dim(dim.n, dim.there, dim.here) for dim in box.dims))]
    return compose(box.inverted(), region.box(piece.region_first))
