"""Placements: where an engine rank keeps the canonical elements that it holds, and what can be done to them there.

Engine-independent: a loader adapter finds storages and boxes, a `Placement` reads, writes and digests through them.

    N  elements of a frame      K  changed elements of a frame
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dcr import kernels
from dcr.codecs.patch import Change
from dcr.errors import DigestMismatch, LayoutError, ReadBackError
from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import Frame, Layout, Region
from dcr.layout.views import UNSIGNED, Bits, Lanes, Positions, Table
from dcr.memory.ready import Ready, Write
from dcr.memory.strips import Place, Runs, Strip, runs_of, shared, strips_of
from dcr.protocol import digest

__all__ = ["Place", "Placement", "canonical_table", "wanted"]


@dataclass(frozen=True, slots=True, eq=False)
class _Bound:
    """One frame, bound: its strips, and what its sums are of.

    parts: numbers of parts, or of tensors if all is held; tensors: that of each; keys: its digest keys.
    """

    frame: Frame
    strips: list[Strip]
    parts: tuple[int, ...]
    tensors: NDArray[np.int64]
    keys: Lanes


class Placement:
    """The strips of every frame of a layout over an engine rank's storages.

    storages: flat unsigned arrays, borrowed. places: for each tensor of the layout any number of them. The first home
    of an element is the one whose bits are digested; the others are copies, or casts.
    partial: True if elements may have no place on this rank; sums are then of `parts`, not of tensors.

    Raises:
        LayoutError: an element has no place, or a place leaves its tensor or its storage.
    """

    def __init__(
        self, layout: Layout, storages: Sequence[Bits], places: Sequence[Place], *, partial: bool = False
    ) -> None:
        _require_fits(layout, places)
        if not partial:
            _require_held(layout, places)
        by_tensor: dict[int, list[Place]] = defaultdict(list)
        for place in places:
            by_tensor[place.tensor].append(place)
        self._layout = layout
        self._partial = partial
        firsts = _firsts(by_tensor) if partial else []
        self._parts = [_region(place) for place in firsts]
        numbers = _numbers(firsts)
        self._frames = [
            _bind_parts(frame, storages, by_tensor, firsts, numbers)
            if partial
            else _bind_whole(frame, storages, by_tensor)
            for frame in layout.frames
        ]

    @property
    def parts(self) -> list[Region]:
        """At one of several ranks: the regions that its sums are of (see `dcr.seams.RankWeights`)."""
        return self._parts

    def touched(self, ready: Ready) -> set[int]:
        """The tensors whose bits a frame changes."""
        tensors = self._frames[ready.frame].tensors
        return set(tensors[(ready.old_sums != ready.new_sums).any(axis=1)].tolist())

    def prepare(self, index: int, change: Change) -> Ready:
        """See `dcr.seams.LiveWeights.prepare`."""
        bound = self._frames[index]
        if change.positions is None:
            return _prepare_dense(bound, self._partial, change.values)
        return _prepare_sparse(bound, self._partial, change, change.positions)

    def read(self, index: int) -> Bits:
        """See `dcr.seams.FrameReader.read`."""
        return _dense(self._frames[index])

    def install(self, ready: Ready) -> None:
        """See `dcr.seams.LiveWeights.install`."""
        for write in ready.writes:
            self._scatter(ready.frame, write.home, write.positions, write.bits)

    def undo(self, ready: Ready) -> None:
        """See `dcr.seams.LiveWeights.undo`."""
        for write in reversed(ready.writes):
            self._scatter(ready.frame, write.home, write.positions, write.old)

    def digest(self) -> Lanes:
        """See `dcr.seams.LiveWeights.digest`; over the elements that this rank owns."""
        lanes = digest.zero(len(self._parts) if self._partial else len(self._layout.schema.tensors))
        for bound in self._frames:
            lanes[list(bound.parts)] += _sums(bound)
            if differing := astray(bound):
                raise DigestMismatch(f"frame {bound.frame.index}: {differing} elements differ between two copies")
        return lanes

    def _scatter(self, index: int, home: int, positions: Positions, bits: Bits) -> None:
        bound = self._frames[index]
        wrong = kernels.scatter(bound.strips[home].table, positions, bits)
        if wrong:
            names = ", ".join(self._layout.schema.tensors[t].name for t in bound.frame.tensors[:3])
            raise ReadBackError(f"{wrong} of {len(bits)} elements of frame {index} ({names}) did not keep their bits")


def _bind_whole(frame: Frame, storages: Sequence[Bits], places: Mapping[int, Sequence[Place]]) -> _Bound:
    """Bind a frame of which every element is held: its sums are of tensors."""
    lanes = {tensor: lane for lane, tensor in enumerate(frame.tensors)}
    strips = strips_of(frame, storages, places, lambda place: lanes[place.tensor])
    return _Bound(frame, strips, frame.tensors, np.array(frame.tensors, np.int64), frame.keys)


def _bind_parts(
    frame: Frame,
    storages: Sequence[Bits],
    places: Mapping[int, Sequence[Place]],
    firsts: Sequence[Place],
    numbers: Mapping[int, Sequence[int]],
) -> _Bound:
    """Bind a frame at one of several ranks: its sums are of parts, each the first home of its elements.

    numbers: for each tensor, which of `firsts` are of it: a frame costs what it holds, however many parts there are.
    """
    own = [(number, row) for row, tensor in enumerate(frame.tensors) for number in numbers.get(tensor, ())]
    lanes = {id(firsts[number]): lane for lane, (number, _) in enumerate(own)}
    strips = strips_of(frame, storages, places, lambda place: lanes.get(id(place), 0))
    rows = np.array([row for _, row in own], np.int64)
    tensors = np.array([firsts[number].tensor for number, _ in own], np.int64)
    return _Bound(frame, strips, tuple(number for number, _ in own), tensors, frame.keys[rows])


def _numbers(firsts: Sequence[Place]) -> dict[int, list[int]]:
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, place in enumerate(firsts):
        numbers[place.tensor].append(number)
    return numbers


def _prepare_sparse(bound: _Bound, partial: bool, change: Change, positions: Positions) -> Ready:
    if len(bound.strips) == 1 and bound.strips[0].runs is None:
        return _prepare_whole(bound, partial, change, positions)
    kernels.check_ascending(positions, bound.frame.numel)
    writes, agree = [], True
    old_sums, new_sums = np.zeros_like(bound.keys), np.zeros_like(bound.keys)
    # canonical bits of what is held, by position: what copies are compared with and made of
    old, new = np.zeros_like(change.values), np.zeros_like(change.values)
    for home, strip in enumerate(bound.strips):
        kept, local = _select(positions, strip)
        if strip.copy:
            found = kernels.gather(strip.table, local)
            expected, bits = old[kept], new[kept]
            if strip.cast is not None:
                expected, bits = strip.cast(expected), strip.cast(bits)
            agree = agree and np.array_equal(found, expected)
        else:
            bits, found, new_part, old_part = kernels.prepare(
                strip.table, bound.keys, local, change.values[kept], change.operation
            )
            new_sums, old_sums = new_sums + new_part, old_sums + old_part
            old[kept], new[kept] = found, bits
        writes.append(Write(home, local, bits, found))
    return _ready(bound, partial, writes, old_sums, new_sums, agree)


def _prepare_whole(bound: _Bound, partial: bool, change: Change, positions: Positions) -> Ready:
    """The usual case: one home for every element of the frame."""
    bits, found, new_sums, old_sums = kernels.prepare(
        bound.strips[0].table, bound.keys, positions, change.values, change.operation
    )
    return _ready(bound, partial, [Write(0, positions, bits, found)], old_sums, new_sums, True)


def _prepare_dense(bound: _Bound, partial: bool, values: Bits) -> Ready:
    if len(values) != bound.frame.numel:
        raise LayoutError(f"frame {bound.frame.index} has {bound.frame.numel} elements, {len(values)} were given")
    writes = []
    new_sums = np.zeros_like(bound.keys)
    for home, strip in enumerate(bound.strips):
        wanted = values[strip.elements(len(values))]
        if not strip.copy:
            new_sums += kernels.digest(strip.dense(wanted), bound.keys)
        if strip.cast is not None:
            wanted = strip.cast(wanted)
        local, old = kernels.compare(strip.table, wanted)
        writes.append(Write(home, local, kernels.gather(strip.dense(wanted), local), old))
    return _ready(bound, partial, writes, _sums(bound), new_sums, not astray(bound))


def _ready(
    bound: _Bound, partial: bool, writes: Sequence[Write], old_sums: Lanes, new_sums: Lanes, agree: bool
) -> Ready:
    return Ready(bound.frame.index, tuple(writes), old_sums, new_sums, agree, bound.parts if partial else ())


def _select(positions: Positions, strip: Strip) -> tuple[Positions | slice, Positions]:
    """Which positions [K] of a frame a strip holds, and their numbers within it."""
    return (slice(None), positions) if strip.runs is None else kernels.select(positions, strip.runs)


def _sums(bound: _Bound) -> Lanes:
    """Digest sums [parts of the frame, 2] over all elements of a frame that this rank holds."""
    sums = np.zeros_like(bound.keys)
    for strip in bound.strips:
        if not strip.copy:
            sums += kernels.digest(strip.table, bound.keys)
    return sums


def _dense(bound: _Bound) -> Bits:
    """The bits [N] of a frame, as far as this rank holds them."""
    firsts = [strip for strip in bound.strips if not strip.copy]
    if len(firsts) == 1 and firsts[0].runs is None:
        return kernels.read(firsts[0].table)
    dense = np.zeros(bound.frame.numel, UNSIGNED[bound.frame.width])
    for strip in firsts:
        dense[strip.elements(len(dense))] = kernels.read(strip.table)
    return dense


def astray(bound: _Bound) -> int:
    """Count the elements of copies that are not what the first home of the same element says."""
    copies = [strip for strip in bound.strips if strip.copy]
    if not copies:
        return 0
    dense, differing = _dense(bound), 0
    for strip in copies:
        expected = dense[strip.elements(len(dense))]
        positions, _ = kernels.compare(strip.table, expected if strip.cast is None else strip.cast(expected))
        differing += len(positions)
    return differing


def canonical_table(frame: Frame, dense: Bits) -> Table:
    """A frame's own numbering as a table over a dense array [N]."""
    return Table((dense,), frame.rows)


def wanted(places: Sequence[Place]) -> dict[int, Runs]:
    """The canonical runs [R, 2] (start, count) of each tensor that some places hold."""
    found: dict[int, list[Runs]] = defaultdict(list)
    for place in places:
        if place.box.numel:
            found[place.tensor].append(runs_of(_ascending(place.box)))
    return {tensor: _merged(np.concatenate(parts)) for tensor, parts in found.items()}


def _firsts(places: Mapping[int, Sequence[Place]]) -> list[Place]:
    """The places that are the first home of their elements.

    Raises:
        LayoutError: a place is that for some of its elements and not for others.
    """
    firsts: list[Place] = []
    for homes in places.values():
        held = np.zeros((0, 2), np.int64)
        for place in homes:
            runs = runs_of(_ascending(place.box))
            again = int(shared(runs, held)[:, 1].sum())
            if again not in (0, place.box.numel):
                raise LayoutError(f"a place holds {place.box.numel} elements, and an earlier one {again} of them")
            if not again:
                firsts.append(place)
                held = _merged(np.concatenate([held, runs]))
    return firsts


def _region(place: Place) -> Region:
    """The canonical side of a place."""
    box = _ascending(place.box).simplified()
    return Region(place.tensor, box.here0, tuple((dim.n, dim.here) for dim in box.dims))


def _ascending(box: Box) -> Box:
    """The canonical side of a box as a storage side that ascends."""
    low = box.there_bounds[0]
    dims = sorted((Dim(dim.n, abs(dim.there), 0) for dim in box.dims), key=lambda dim: -dim.here)
    return Box(low, 0, tuple(dims))


def _merged(runs: Runs) -> Runs:
    """Runs in any order, perhaps overlapping, as ascending ones that do not touch."""
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    ends = np.maximum.accumulate(runs.sum(axis=1))
    begins = np.concatenate([[True], runs[1:, 0] > ends[:-1]])
    starts = np.flatnonzero(begins)
    lasts = np.append(starts[1:], len(runs)) - 1
    return np.stack([runs[starts, 0], ends[lasts] - runs[starts, 0]], axis=1)


def _require_fits(layout: Layout, places: Sequence[Place]) -> None:
    for place in places:
        spec, (low, high) = layout.schema.tensors[place.tensor], place.box.there_bounds
        if low < 0 or high >= spec.numel or place.box.numel > spec.numel:
            raise LayoutError(
                f"a place of {spec.name} holds {place.box.numel} elements in [{low}, {high}], it has {spec.numel}"
            )


def _require_held(layout: Layout, places: Sequence[Place]) -> None:
    """Every element of every tensor has a place."""
    held = {tensor: int(runs[:, 1].sum()) for tensor, runs in wanted(places).items()}
    for tensor, spec in enumerate(layout.schema.tensors):
        if spec.numel and not held.get(tensor):
            raise LayoutError(f"no place is known for {spec.name}")
        if held.get(tensor, 0) != spec.numel:
            raise LayoutError(f"the places of {spec.name} hold {held[tensor]} of its {spec.numel} elements")
