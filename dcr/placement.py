"""Placements: where an engine rank keeps each canonical element, and what can be done to it there.

Engine-independent: a loader adapter finds storages and boxes, a `Placement` reads, writes and digests through them.

    N  elements of a frame      K  changed elements of a frame
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dcr import digest, kernels
from dcr.boxes import Box
from dcr.errors import DigestMismatch, LayoutError, ReadBackError
from dcr.frames import Frame, Layout, Region
from dcr.patch import Change
from dcr.ready import Ready, Write
from dcr.views import Bits, Lanes, Positions, Table, rows_of


@dataclass(frozen=True, slots=True)
class Place:
    """One home of a whole tensor: its storage, and the box from there to canonical coordinates."""

    tensor: int
    storage: int
    box: Box


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """A further home of some of a frame's elements: those numbered from `first` on, and the first home of the same."""

    first: int
    table: Table
    twin: Table


@dataclass(frozen=True, slots=True, eq=False)
class _Homes:
    """All tables of one frame."""

    main: Table
    copies: tuple[_Copy, ...]


class Placement:
    """The tables of every frame of a layout over an engine rank's storages.

    storages: flat unsigned arrays, borrowed. places: for each tensor of the layout one place or more; the first is
    the one whose bits are digested, the others are copies (aliases that the engine keeps apart).

    Raises:
        LayoutError: a tensor has no place, or a place does not hold the whole tensor.
    """

    def __init__(self, layout: Layout, storages: Sequence[Bits], places: Sequence[Place]) -> None:
        by_tensor: dict[int, list[Place]] = defaultdict(list)
        for place in places:
            spec = layout.schema.tensors[place.tensor]
            if place.box.numel != spec.numel:
                raise LayoutError(f"a place of {spec.name} holds {place.box.numel} of {spec.numel} elements")
            by_tensor[place.tensor].append(place)
        self._layout = layout
        self._homes = [_homes(frame, storages, by_tensor, layout) for frame in layout.frames]

    def prepare(self, index: int, change: Change) -> Ready:
        """See `dcr.seams.Loader.prepare`."""
        frame, homes = self._layout.frames[index], self._homes[index]
        if change.positions is None:
            return _prepare_dense(frame, homes, change.values)
        return _prepare_sparse(frame, homes, change, change.positions)

    def read(self, index: int) -> Bits:
        """See `dcr.seams.Readable.read`."""
        return kernels.read(self._homes[index].main)

    def install(self, ready: Ready) -> None:
        """See `dcr.seams.Loader.install`."""
        for write in ready.writes:
            self._scatter(ready.frame, write.home, write.positions, write.bits)

    def undo(self, ready: Ready) -> None:
        """See `dcr.seams.Loader.undo`."""
        for write in reversed(ready.writes):
            self._scatter(ready.frame, write.home, write.positions, write.old)

    def digest(self) -> Lanes:
        """See `dcr.seams.Loader.digest`."""
        lanes = digest.zero(len(self._layout.schema.tensors))
        for frame, homes in zip(self._layout.frames, self._homes, strict=True):
            lanes[list(frame.tensors)] += kernels.digest(homes.main, frame.keys)
            for copy in homes.copies:
                positions, _ = kernels.compare(copy.table, kernels.read(copy.twin))
                if len(positions):
                    raise DigestMismatch(f"frame {frame.index}: {len(positions)} elements differ between two copies")
        return lanes

    def _scatter(self, index: int, home: int, positions: Positions, bits: Bits) -> None:
        homes = self._homes[index]
        wrong = kernels.scatter(homes.copies[home - 1].table if home else homes.main, positions, bits)
        if wrong:
            names = ", ".join(self._layout.schema.tensors[t].name for t in self._layout.frames[index].tensors[:3])
            raise ReadBackError(f"{wrong} of {len(bits)} elements of frame {index} ({names}) did not keep their bits")


def _prepare_sparse(frame: Frame, homes: _Homes, change: Change, positions: Positions) -> Ready:
    new, old, new_sums, old_sums = kernels.prepare(homes.main, frame.keys, positions, change.values, change.operation)
    writes, agree = [Write(0, positions, new, old)], True
    for home, copy in enumerate(homes.copies, start=1):
        low, high = np.searchsorted(positions, [copy.first, copy.first + copy.table.numel])
        local = positions[low:high] - np.uint32(copy.first)
        found = kernels.gather(copy.table, local)
        agree = agree and np.array_equal(found, old[low:high])
        writes.append(Write(home, local, new[low:high], found))
    return Ready(frame.index, tuple(writes), old_sums, new_sums, agree)


def _prepare_dense(frame: Frame, homes: _Homes, values: Bits) -> Ready:
    positions, old = kernels.compare(homes.main, values)
    writes, agree = [Write(0, positions, values[positions], old)], True
    for home, copy in enumerate(homes.copies, start=1):
        wanted = values[copy.first : copy.first + copy.table.numel]
        local, found = kernels.compare(copy.table, wanted)
        same, _ = kernels.compare(copy.table, kernels.read(copy.twin))
        agree = agree and not len(same)
        writes.append(Write(home, local, wanted[local], found))
    return Ready(
        frame.index,
        tuple(writes),
        kernels.digest(homes.main, frame.keys),
        kernels.digest(canonical_table(frame, values), frame.keys),
        agree,
    )


def canonical_table(frame: Frame, dense: Bits) -> Table:
    """A frame's own numbering as a table over a dense array [N]."""
    return Table((dense,), frame.rows)


def _homes(frame: Frame, storages: Sequence[Bits], by_tensor: dict[int, list[Place]], layout: Layout) -> _Homes:
    entries, copies, first = [], [], 0
    for region in frame.spec.regions:
        places = by_tensor[region.tensor]
        if not places:
            raise LayoutError(f"no place is known for {layout.schema.tensors[region.tensor].name}")
        local = frame.tensors.index(region.tensor)
        main = [(places[0].storage, local, box) for box in _compose(region, places[0].box)]
        entries += main
        for place in places[1:]:
            boxes = [(place.storage, local, box) for box in _compose(region, place.box)]
            copies.append(_Copy(first, _table(storages, boxes), _table(storages, main)))
        first += region.box(0).numel
    return _Homes(_table(storages, entries), tuple(copies))


def _compose(region: Region, place: Box) -> Iterator[Box]:
    """The storage boxes of a region, in its numbering, given the box of the whole tensor."""
    for run in region.runs().tolist():
        yield from place.run(*run)


def _table(storages: Sequence[Bits], entries: list[tuple[int, int, Box]]) -> Table:
    """A table over only those storages that are used, so that all have one width."""
    used = sorted({storage for storage, _, _ in entries})
    local = {storage: index for index, storage in enumerate(used)}
    rows = rows_of([(local[storage], tensor, box) for storage, tensor, box in entries])
    return Table(tuple(storages[storage] for storage in used), rows)
