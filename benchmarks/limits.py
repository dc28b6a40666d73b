"""How small a change can be made: empirical entropies of the very data that is encoded.

    N  elements of a tensor      K  changed ones

Without the old weights: each element changes or not, independently, at the tensor's density, and the steps (new - old)
are drawn from their distribution. Given the old weights: the same within each class of elements whose old values share
sign-less exponents, which is what the old weights tell of how likely and how large a change is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from workloads import Words


def bytes_without(old: Sequence[Words], new: Sequence[Words]) -> float:
    """The limit in bytes for a receiver that uses nothing but the message."""
    return sum(_bits(a, b, np.zeros(len(a), np.uint8)) for a, b in zip(old, new, strict=True)) / 8


def bytes_given_old(old: Sequence[Words], new: Sequence[Words]) -> float:
    """The limit in bytes for a receiver that uses the old weights as well."""
    return sum(_bits(a, b, (a >> 7).astype(np.uint8)) for a, b in zip(old, new, strict=True)) / 8


def _bits(old: Words, new: Words, classes: NDArray[np.uint8]) -> float:
    """Classes [N] of one tensor; uint8 drops the sign, which is the bit above a bf16's exponent."""
    changed = np.flatnonzero(old != new)
    sizes = np.bincount(classes, minlength=256).astype(float)
    counts = np.bincount(classes[changed], minlength=256).astype(float)
    positions = (_entropy(np.stack([counts, sizes - counts], axis=1)) * sizes).sum()
    steps = (new[changed] - old[changed]).astype(np.uint32) | classes[changed].astype(np.uint32) << 16
    kinds, times = np.unique(steps, return_counts=True)
    per_class = counts[kinds >> 16]
    return float(positions - (times * np.log2(times / per_class)).sum())


def _entropy(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bits per draw of each row."""
    total = counts.sum(axis=1, keepdims=True)
    share = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
    return -(share * np.log2(share, out=np.zeros_like(share), where=share > 0)).sum(axis=1)
