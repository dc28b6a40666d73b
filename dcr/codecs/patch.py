"""Patches and changes: the changed elements of one frame, before and after the wire.

    N  elements of a frame      K  changed elements

A `Patch` holds absolute new bits: it is what the publisher keeps until the commit. A `Change` holds the values that
travel: relative to old bits, or absolute.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dcr.kernels import reference
from dcr.layout.frames import Frame
from dcr.layout.views import Bits, Lanes, Positions


class Operation(enum.IntEnum):
    """How a change's values combine with the old bits (all modulo 2^width)."""

    OVERWRITE = reference.OVERWRITE  # new = value
    XOR = reference.XOR  # new = old ^ value
    STEP = reference.STEP  # new = old + value


@dataclass(frozen=True, slots=True, eq=False)
class Patch:
    """Changed elements of one frame.

    positions: uint32 [K], ascending, or None when all N elements are given.
    bits: absolute new bits [K] (or [N]). old: the bits before them [K]; None without a base, or where all N are given.
    base: the frame's old bits [N], borrowed from the baseline, valid until the commit; None if there are none.
    changed: K, also when all N are given.
    old_sums, new_sums: digest sums [tensors of the frame, 2] over the elements that are given; the old ones are zero
    without a base.
    """

    frame: Frame
    positions: Positions | None
    bits: Bits
    base: Bits | None
    changed: int
    old_sums: Lanes
    new_sums: Lanes
    old: Bits | None = None

    @property
    def number(self) -> int:
        """Its frame's number: what events and an error's notes say of it."""
        return self.frame.index

    @property
    def where(self) -> str:
        return f"frame {self.number}"

    @property
    def nbytes(self) -> int:
        """Host memory held for this patch, in bytes."""
        return sum(array.nbytes for array in (self.bits, self.positions, self.old) if array is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Change:
    """What a chunk says about one frame: values [K] at positions [K], or all N values (positions None)."""

    operation: Operation
    positions: Positions | None
    values: Bits


def relative(patch: Patch, operation: Operation) -> Change:
    """A patch as values to send; a patch without old bits, a dense one among them, can only overwrite."""
    if patch.old is None or operation is Operation.OVERWRITE:
        return Change(Operation.OVERWRITE, patch.positions, patch.bits)
    values = patch.bits ^ patch.old if operation is Operation.XOR else patch.bits - patch.old
    return Change(operation, patch.positions, values)
