"""What is ready to be installed: absolute bits and, for the undo, the bits they replace."""

from __future__ import annotations

from dataclasses import dataclass

from dcr.layout.views import Bits, Lanes, Positions


@dataclass(frozen=True, slots=True, eq=False)
class Write:
    """One scatter: bits [K] at positions [K], and the old bits [K] found there.

    home: 0 for the first home of the frame's elements, then its copies; positions are numbered within the home.
    """

    home: int
    positions: Positions
    bits: Bits
    old: Bits

    @property
    def nbytes(self) -> int:
        return self.positions.nbytes + self.bits.nbytes + self.old.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """One frame, prepared: writing it is all that is left.

    writes: the frame's elements, then those of each further copy that the engine keeps of them.
    old_sums, new_sums: digest sums [tensors of the frame, 2] over the elements that the change names.
    copies_agree: False if a copy held other old bits than the first.
    parts: at one of several ranks, the parts that the sums are of instead (see `dcr.seams.RankReady`).
    """

    frame: int
    writes: tuple[Write, ...]
    old_sums: Lanes
    new_sums: Lanes
    copies_agree: bool
    parts: tuple[int, ...] = ()

    @property
    def number(self) -> int:
        """Its frame's number: what events say of it."""
        return self.frame

    @property
    def changed(self) -> int:
        """Elements that will be written, in the first home; none if this rank holds none of the frame."""
        return len(self.writes[0].positions) if self.writes else 0

    @property
    def nbytes(self) -> int:
        """Host memory held, in bytes."""
        return sum(write.nbytes for write in self.writes)
