"""What every kernel computes, in numpy: the definition that compiled kernels are compared with, bit for bit.

    B  rows of a table      N  elements of a table      K  changed elements      T  tensors

Positions are uint32, ascending, numbered within a table. Bits are unsigned integers of the element's width.
Nothing here interprets a value, except `cast`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dcr.layout.views import STORAGE, TENSOR, UNSIGNED, Bits, Lanes, Positions, Runs, Table, box_of

# Value maps that a read can apply. A NaN becomes the one quiet, positive NaN of the target, whatever its payload.
NONE, F32_BF16, F32_F16 = 0, 1, 2
SOURCE_WIDTH = {NONE: None, F32_BF16: 4, F32_F16: 4}
TARGET_WIDTH = {NONE: None, F32_BF16: 2, F32_F16: 2}

# How a change's values combine with the old bits, modulo 2^width: new = value, old ^ value, old + value.
OVERWRITE, XOR, STEP = 0, 1, 2

# Odd multipliers of the digest's mixing function.
M1, M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
M3, M4 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def cast(bits: NDArray[np.uint32], kind: int) -> NDArray[np.uint16]:
    """float32 bits to bfloat16 or float16 bits: round to nearest even, denormals kept, overflow to infinity."""
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if kind == F32_BF16:
        wide = bits.astype(np.uint64)
        rounded = (wide + 0x7FFF + ((wide >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
        return np.where(nan, np.uint16(0x7FC0), rounded.astype(np.uint16))
    with np.errstate(over="ignore", invalid="ignore"):
        half = bits.view(np.float32).astype(np.float16).view(np.uint16)
    return np.where(nan, np.uint16(0x7E00), half)


def read(table: Table, kind: int = NONE) -> Bits:
    """The table's elements, dense, in numbering order: bits [N], after the value map."""
    parts = [_elements(table, row) for row in table.rows]
    dense = np.concatenate(parts) if parts else np.zeros(0, UNSIGNED[table.width])
    result: Bits = dense if kind == NONE else cast(dense, kind)
    return result


def compare(table: Table, base: Bits, kind: int = NONE) -> tuple[Positions, Bits]:
    """Positions [K] at which the table (after the value map) differs from base [N], and its new bits [K] there."""
    new = read(table, kind)
    positions = np.flatnonzero(new != base).astype(np.uint32)
    return positions, new[positions]


def capture(table: Table, keys: Lanes, base: Bits, kind: int = NONE) -> tuple[Positions, Bits, Bits, Lanes, Lanes]:
    """What `compare` finds, the old bits [K], and the digest sums [T, 2] of the new and of the old ones."""
    positions, new = compare(table, base, kind)
    old = base[positions]
    return positions, new, old, digest_at(table, keys, positions, new), digest_at(table, keys, positions, old)


def gather(table: Table, positions: Positions) -> Bits:
    """The bits [K] at the given positions."""
    return read(table)[positions]


def resolve(values: Bits, old: Bits, operation: int) -> Bits:
    """The new bits [K] that values [K] make of old bits [K]."""
    match operation:
        case 1:
            return np.bitwise_xor(values, old)
        case 2:
            return np.add(values, old)
        case _:
            return values


def prepare(
    table: Table, keys: Lanes, positions: Positions, values: Bits, operation: int
) -> tuple[Bits, Bits, Lanes, Lanes]:
    """The new and the old bits [K] at the given positions, and the digest sums [T, 2] of either."""
    old = gather(table, positions)
    new = resolve(values, old, operation)
    return new, old, digest_at(table, keys, positions, new), digest_at(table, keys, positions, old)


def scatter(table: Table, positions: Positions, bits: Bits) -> int:
    """Write bits [K] at the given positions, read them back; the number of positions that do not hold their bits."""
    for row, first, index in _split(table, positions):
        here = _indices(row, "here")[positions[index] - first]
        table.storages[row[STORAGE]][here] = bits[index]
    return int(np.count_nonzero(gather(table, positions) != bits))


def select(positions: Positions, runs: Runs) -> tuple[Positions, Positions]:
    """Those positions [K] that lie in runs [R, 2]: their indices [K'], and their numbers over the runs alone [K']."""
    starts, counts = runs[:, 0], runs[:, 1]
    held = np.cumsum(counts) - counts
    run = np.searchsorted(starts + counts, positions, side="right")
    inside = run < len(runs)
    inside[inside] = positions[inside] >= starts[run[inside]]
    indices, run = np.flatnonzero(inside), run[inside]
    return indices.astype(np.uint32), (positions[indices] - starts[run] + held[run]).astype(np.uint32)


def digest(table: Table, keys: Lanes, kind: int = NONE) -> Lanes:
    """Digest sums [T, 2] over all elements of a table; keys [T, 2] are indexed by column TENSOR."""
    positions = np.arange(table.numel, dtype=np.uint32)
    return digest_at(table, keys, positions, read(table, kind))


def digest_at(table: Table, keys: Lanes, positions: Positions, bits: Bits) -> Lanes:
    """Digest sums [T, 2] over given positions [K], as if they held bits [K].

    The two lanes of an element are mixed from the tensor's key, its canonical index and its bits; lanes add up
    modulo 2^64, so sums over disjoint sets of elements add up to the sum over their union.
    """
    sums = np.zeros_like(keys)
    for row, first, index in _split(table, positions):
        tensor = row[TENSOR]
        there = _indices(row, "there")[positions[index] - first]
        sums[tensor] += mix(keys[tensor], there.astype(np.uint64), bits[index].astype(np.uint64))
    return sums


def mix(key: NDArray[np.uint64], index: NDArray[np.uint64], bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The lane sums [2] of elements with canonical indices [K] and bits [K] of one tensor with key [2]."""
    u = (index ^ key[0]) * M1
    u ^= u >> np.uint64(32)
    x = u + (bits ^ key[1]) * M2
    x ^= x >> np.uint64(32)
    x *= M3
    x ^= x >> np.uint64(29)
    y = x * M4
    y ^= y >> np.uint64(32)
    return np.array([x.sum(dtype=np.uint64), y.sum(dtype=np.uint64)], np.uint64)


def _indices(row: NDArray[np.int64], side: str) -> NDArray[np.int64]:
    """Element indices on one side of a row's box, in numbering order."""
    box = box_of(row)
    index = np.full((1,) * len(box.dims), box.here0 if side == "here" else box.there0, np.int64)
    for d, dim in enumerate(box.dims):
        shape = [1] * len(box.dims)
        shape[d] = dim.n
        index = index + (np.arange(dim.n) * getattr(dim, side)).reshape(shape)
    return index.reshape(-1)


def _elements(table: Table, row: NDArray[np.int64]) -> Bits:
    elements: Bits = table.storages[row[STORAGE]][_indices(row, "here")]
    return elements


def _split(table: Table, positions: Positions) -> list[tuple[NDArray[np.int64], int, slice]]:
    """For each row that is touched: the row, the number of its first element, and the slice of `positions` in it."""
    touched, first = [], 0
    for row in table.rows:
        size = box_of(row).numel
        low, high = np.searchsorted(positions, [first, first + size])
        if high > low:
            touched.append((row, first, slice(int(low), int(high))))
        first += size
    return touched
