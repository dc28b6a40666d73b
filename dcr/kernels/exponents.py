"""Classes: a change split by what the old bits say of how likely an element is to change. The definition, in numpy.

    N  elements of a frame      K  changed elements      G  grades

The grade of an element is the 8 bits below its sign (of a single byte all 7): for bfloat16 the exponent. With one
learning rate for all, a large weight rarely changes and then by one step, a small one often and by many. Both ends hold
the old bits, so both know each element's class, and a change is coded class by class: the number of each changed
element among those of its class, and its value. `cuts` [CUTS] are the lowest grades of all classes but the first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dcr.errors import BaseMismatch, LayoutError
from dcr.kernels.streams import Octets
from dcr.layout.views import Bits, Positions

CLASSES = 4
CUTS = CLASSES - 1
SAMPLE = 8192  # elements that cuts are decided by, and as many changed ones
RUN = 64  # of them that lie together


def grades_of(base: Bits) -> Octets:
    """The grade of each element."""
    width = base.itemsize
    shift, one = base.dtype.type(8 * width - 8), base.dtype.type(1)
    return ((base << one) >> shift).astype(np.uint8)


def split(base: Bits, cuts: Octets, positions: Positions, values: Bits) -> tuple[Positions, Bits, list[int]]:
    """A change by class: numbers within the class [K], values [K], both class by class, and how many each has.

    Raises:
        LayoutError: positions do not ascend strictly, or leave the frame.
    """
    if len(positions) and (positions[-1] >= len(base) or (positions[1:] <= positions[:-1]).any()):
        raise LayoutError(f"positions must ascend strictly and lie below {len(base)}")
    classes = _classes_of(base, cuts)
    changed = classes[positions]
    parts = [_ranks(classes, number)[positions[changed == number]] for number in range(CLASSES)]
    grouped = np.concatenate([values[changed == number] for number in range(CLASSES)])
    return np.concatenate(parts).astype(np.uint32), grouped, [len(part) for part in parts]


def merge(base: Bits, cuts: Octets, counts: Sequence[int], ranks: Positions, values: Bits) -> tuple[Positions, Bits]:
    """The inverse of `split`: positions [K], ascending, and values [K].

    Raises:
        BaseMismatch: base has fewer elements of a class than a number in it says, or numbers do not ascend.
    """
    classes, ends = _classes_of(base, cuts), np.cumsum([0, *counts])
    parts = []
    for number in range(CLASSES):
        members, wanted = np.flatnonzero(classes == number), ranks[ends[number] : ends[number + 1]]
        if len(wanted) and (wanted[-1] >= len(members) or (wanted[1:] <= wanted[:-1]).any()):
            raise BaseMismatch(f"class {number} has {len(members)} elements in the old bits held here")
        parts.append(members[wanted])
    positions = np.concatenate(parts)
    order = np.argsort(positions)
    return positions[order].astype(np.uint32), values[order]


def cuts_of(base: Bits, positions: Positions) -> Octets:
    """Cuts that make the numbers within classes cheap: of all cuts, those with the least entropy on a sample."""
    sizes, changed = _sampled(base, positions)
    grades = np.flatnonzero(sizes)
    cuts = np.full(CUTS, 255, np.uint8)
    if not len(grades) or not changed.any():
        return cuts
    bits = _bits_between(sizes[grades], changed[grades])
    best, cut_at = bits[0], []  # best[j]: the fewest bits for the first j grades in the classes so far
    for _ in range(CUTS):
        total = best[:, None] + bits
        cut_at.append(total.argmin(axis=0))
        best = total.min(axis=0)
    end = len(grades)
    for index in reversed(range(CUTS)):
        end = int(cut_at[index][end])
        cuts[index] = grades[end] if end < len(grades) else 255
    return cuts


def _classes_of(base: Bits, cuts: Octets) -> NDArray[np.int64]:
    if (cuts[1:] < cuts[:-1]).any():
        raise LayoutError(f"the cuts between classes do not ascend: {cuts.tolist()}")
    return np.searchsorted(cuts, grades_of(base), side="right")


def _ranks(classes: NDArray[np.int64], number: int) -> NDArray[np.int64]:
    """The number of each element among those of a class; means something for these only."""
    return np.cumsum(classes == number) - 1


def _sampled(base: Bits, positions: Positions) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """About how many elements each grade [256] has, and how many changed ones."""
    runs = max(1, SAMPLE // RUN)
    every = max(RUN, len(base) // runs)
    some = base[: len(base) // every * every].reshape(-1, every)[:, :RUN].reshape(-1)
    few = positions[:: max(1, len(positions) // SAMPLE)]
    sizes = _counts(some) * (len(base) / max(1, len(some)))
    changed = _counts(base[few]) * (len(positions) / max(1, len(few)))
    return np.maximum(sizes, changed), changed


def _counts(some: Bits) -> NDArray[np.float64]:
    return np.bincount(grades_of(some), minlength=256).astype(np.float64)


def _bits_between(sizes: NDArray[np.float64], changed: NDArray[np.float64]) -> NDArray[np.float64]:
    """bits[i, j]: the entropy of which elements change in one class of the grades from i on and below j."""
    all_of, some_of = (np.concatenate([[0.0], np.cumsum(counts)]) for counts in (sizes, changed))
    size, hits = all_of[None, :] - all_of[:, None], some_of[None, :] - some_of[:, None]
    inside = (hits > 0) & (hits < size)
    size, hits = np.where(inside, size, 2.0), np.where(inside, hits, 1.0)
    bits = size * np.log2(size) - hits * np.log2(hits) - (size - hits) * np.log2(size - hits)
    forward = np.arange(len(all_of))[:, None] <= np.arange(len(all_of))[None, :]
    return np.where(forward, np.where(inside, bits, 0.0), np.inf)
