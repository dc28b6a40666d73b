"""Compose: stored deltas, one after another, into one change per frame. Reads no live memory and writes none.

    N  elements of a frame      K  changed elements of a frame

A later overwrite replaces what was there, XOR composes by xor and STEP by addition modulo the width; over an overwrite
either is resolved at once. So the elements of a frame fall into disjoint sets, one for each operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr import kernels
from dcr.codecs.patch import Change, Operation
from dcr.kernels import reference
from dcr.layout.frames import Frame, Layout
from dcr.layout.views import UNSIGNED, Bits, Positions
from dcr.pipeline import Inbox, Outbox, serve
from dcr.seams import LiveWeights, Undoable
from dcr.stages.compress import Unpacked

UNTOUCHED = 0
KIND = {operation: int(operation) + 1 for operation in Operation}

Kinds = NDArray[np.uint8]


class Uncomposable(Exception):
    """A XOR meets a STEP on one element: what they make of it together depends on bits that are not read here."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Some elements of a frame, as one or more changes leave them.

    positions: uint32 [K], ascending; None: all N. values: [K]. kinds: how each value combines with the bits before it.
    """

    positions: Positions | None
    values: Bits
    kinds: Kinds

    def add(self, later: Run) -> None:
        """Apply a later run, whose elements are all among these.

        Raises:
            Uncomposable: see there.
        """
        assert later.positions is not None
        at = later.positions if self.positions is None else np.searchsorted(self.positions, later.positions)
        for operation, kind in KIND.items():
            chosen = slice(None) if (later.kinds == kind).all() else np.flatnonzero(later.kinds == kind)
            self._combine(at[chosen], later.values[chosen], operation)

    def _combine(self, at: NDArray[Any], values: Bits, operation: Operation) -> None:
        if operation is not Operation.OVERWRITE:
            before = self.kinds[at]
            if ((before != UNTOUCHED) & (before != KIND[Operation.OVERWRITE]) & (before != KIND[operation])).any():
                raise Uncomposable("XOR and STEP meet on one element; what they make depends on its old bits")
            # an element that is untouched counts as 0 here, which either operation leaves the value as it is
            values = reference.resolve(values, self.values[at], operation)
            self.kinds[at] = np.where(before == UNTOUCHED, np.uint8(KIND[operation]), before)
        else:
            self.kinds[at] = KIND[operation]
        self.values[at] = values

    def over(self, base: Bits) -> None:
        """Apply it to a frame's bits [N], in place."""
        for operation, kind in KIND.items():
            chosen = np.flatnonzero(self.kinds == kind)
            at = chosen if self.positions is None else self.positions[chosen]
            base[at] = reference.resolve(self.values[chosen], base[at], operation)

    def changes(self) -> Iterator[Change]:
        """The same as changes of disjoint elements, one for each operation that occurs."""
        for operation, kind in KIND.items():
            at = np.flatnonzero(self.kinds == kind)
            if len(at) == len(self.kinds) and self.positions is None and operation is Operation.OVERWRITE:
                yield Change(operation, None, self.values)
            elif len(at):
                positions = at.astype(np.uint32) if self.positions is None else self.positions[at]
                yield Change(operation, positions, self.values[at])


class FrameUnion:
    """One frame's runs, each more than twice as long as the next: so every element is moved a few times only.

    Where they would take more memory than an array for the whole frame, there is that array instead.
    """

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._runs: list[Run] = []

    @property
    def elems(self) -> int:
        """Elements that are kept, counted once for each run that keeps them."""
        return sum(len(run.kinds) for run in self._runs)

    def add(self, change: Change) -> None:
        """Apply a later change.

        Raises:
            Uncomposable: see there. LayoutError: positions are not those of elements of this frame, ascending.
        """
        if change.positions is None and change.operation is Operation.OVERWRITE:
            self._runs = [self._whole(change.values.copy(), KIND[change.operation])]
            return
        numel = self._frame.numel
        positions = np.arange(numel, dtype=np.uint32) if change.positions is None else change.positions
        kernels.check_ascending(positions, numel)
        later = Run(positions, change.values, np.full(len(positions), KIND[change.operation], np.uint8))
        if self._runs and self._runs[0].positions is None:
            self._runs[0].add(later)
            return
        self._runs.append(later)
        while len(self._runs) > 1 and len(self._runs[-2].kinds) <= 2 * len(self._runs[-1].kinds):
            self._join()
        width = self._frame.width
        if self.elems * (4 + width + 1) > numel * (width + 1):
            self._spread()

    def over(self, base: Bits) -> Bits:
        """The frame's bits [N], made of those in live memory."""
        bits = base.copy()
        for run in self._runs:
            run.over(bits)
        return bits

    def changes(self) -> list[Change]:
        """All of it, as changes of disjoint elements; raises as `add`."""
        while len(self._runs) > 1:
            self._join()
        return [change for run in self._runs for change in run.changes()]

    def _join(self) -> None:
        """Make one run of the last two."""
        later, earlier = self._runs.pop(), self._runs.pop()
        assert earlier.positions is not None
        assert later.positions is not None
        positions = np.union1d(earlier.positions, later.positions)
        joined = Run(positions, np.zeros(len(positions), earlier.values.dtype), np.zeros(len(positions), np.uint8))
        joined.add(earlier)
        joined.add(later)
        self._runs.append(joined)

    def _spread(self) -> None:
        """Make one array for the whole frame of all runs."""
        whole = self._whole(np.zeros(self._frame.numel, UNSIGNED[self._frame.width]), UNTOUCHED)
        for run in self._runs:
            whole.add(run)
        self._runs = [whole]

    def _whole(self, values: Bits, kind: int) -> Run:
        return Run(None, values, np.full(len(values), kind, np.uint8))


class Union:
    """What a chain of deltas changes in all, frame by frame."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._frames: dict[int, FrameUnion] = {}

    def add(self, frame: int, change: Change) -> None:
        """Apply a later change; raises as `FrameUnion.add`."""
        if frame not in self._frames:
            self._frames[frame] = FrameUnion(self._layout.frames[frame])
        self._frames[frame].add(change)

    def over(self, frame: int, base: Bits) -> Bits:
        """A frame's bits [N], made of those in live memory."""
        return self._frames[frame].over(base) if frame in self._frames else base

    def prepare(self, weights: LiveWeights[Any]) -> list[Undoable]:
        """Have live weights prepare all of it; what is prepared is let go of. Raises as `FrameUnion.add`, or they."""
        readies: list[Undoable] = []
        for frame in sorted(self._frames):
            readies += [weights.prepare(frame, change) for change in self._frames.pop(frame).changes()]
        return readies


class Compose:
    """Changes of one delta in; they are added to the union of those before it."""

    name = "compose"
    workers = 1

    def __init__(self, union: Union) -> None:
        self._union = union

    async def run(self, inbox: Inbox[Unpacked], outbox: Outbox[int]) -> None:
        """See `dcr.seams.Stage`."""
        await serve(inbox, outbox, self.compose)

    def compose(self, unpacked: Unpacked) -> int:
        """Add one frame; its number.

        Raises:
            Uncomposable: a XOR meets a STEP. LayoutError: positions are not of this frame.
        """
        self._union.add(unpacked.chunk.frame, unpacked.change)
        return unpacked.chunk.frame
