"""Tables of strided regions: the one argument shape that every kernel takes.

    B  boxes (rows of a table)        N  elements of a table, numbered over its rows one after another

A `Table` says where N elements lie: in which storages, at which offsets and strides, and which canonical element
each of them is. Positions (uint32) are numbers within one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dcr.errors import LayoutError
from dcr.layout.boxes import MAX_DIMS, Box, Dim

# Columns of a row, all int64, all in elements.
STORAGE, HERE, TENSOR, THERE, NDIM = range(5)
SIZES = slice(5, 5 + MAX_DIMS)
HERE_STRIDES = slice(5 + MAX_DIMS, 5 + 2 * MAX_DIMS)
THERE_STRIDES = slice(5 + 2 * MAX_DIMS, 5 + 3 * MAX_DIMS)
COLUMNS = 5 + 3 * MAX_DIMS

# uint8, uint16, uint32 or uint64: bits, never values.
Bits = NDArray[np.unsignedinteger]
Positions = NDArray[np.uint32]
Rows = NDArray[np.int64]
Runs = NDArray[np.int64]  # [runs, 2]: first number, count
Lanes = NDArray[np.uint64]  # [tensors, 2]

UNSIGNED: dict[int, np.dtype[np.unsignedinteger]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Strided regions over host storages.

    storages: 1-D unsigned arrays of one width, each a whole storage; they are borrowed and must outlive the table.
    rows: int64 [B, COLUMNS], one box each. Column TENSOR is an index into whatever per-tensor array goes with the
    table (keys, digest lanes).

    Raises:
        LayoutError: a row leaves its storage, or storages differ in width.
    """

    storages: tuple[Bits, ...]
    rows: Rows
    numel: int = field(init=False)

    def __post_init__(self) -> None:
        if len({storage.dtype for storage in self.storages}) > 1:
            raise LayoutError("the storages of one table must have one width")
        sizes = _padded_sizes(self.rows)
        _require_small(self.rows, sizes)
        lengths = np.array([len(storage) for storage in self.storages], np.int64)
        low, high = _bounds(self.rows[:, HERE], sizes, self.rows[:, HERE_STRIDES])
        storage = self.rows[:, STORAGE]
        known = (storage >= 0) & (storage < len(lengths))
        held = lengths[np.where(known, storage, 0)] if len(lengths) else np.zeros(len(storage), np.int64)
        bad = np.flatnonzero(~known | (low < 0) | (high >= held))
        if len(bad):
            row = bad[0]
            raise LayoutError(
                f"row {row} touches [{low[row]}, {high[row]}] of storage {storage[row]}, "
                f"which has {held[row] if known[row] else 'no'} elements"
            )
        total = int(sizes.prod(axis=1).sum())
        if total >= 1 << 32:
            raise LayoutError(f"a table of {total} elements: positions are 32-bit, split it into frames")
        object.__setattr__(self, "numel", total)

    @property
    def width(self) -> int:
        return self.storages[0].itemsize if self.storages else 1


def rows_of(entries: Sequence[tuple[int, int, Box]]) -> Rows:
    """Rows [B, COLUMNS] from (storage, tensor, box) entries; empty boxes are dropped.

    Raises:
        LayoutError: a box has more than MAX_DIMS dimensions after simplification.
    """
    rows = []
    for storage, tensor, box in entries:
        if not box.numel:
            continue
        here0, there0, dims = box.simplified()
        if len(dims) > MAX_DIMS:
            raise LayoutError(f"a box of {len(dims)} dimensions; at most {MAX_DIMS} are supported")
        unused = (0,) * (MAX_DIMS - len(dims))
        n, here, there = zip(*dims, strict=True) if dims else ((), (), ())
        rows.append((storage, here0, tensor, there0, len(dims), *n, *unused, *here, *unused, *there, *unused))
    return np.array(rows, np.int64).reshape(-1, COLUMNS)


def box_of(row: NDArray[np.int64]) -> Box:
    """The box in a row."""
    values = row.tolist()
    ndim = values[NDIM]
    dims = zip(values[SIZES][:ndim], values[HERE_STRIDES][:ndim], values[THERE_STRIDES][:ndim], strict=True)
    return Box(values[HERE], values[THERE], tuple(Dim(*dim) for dim in dims))


def _padded_sizes(rows: Rows) -> Rows:
    """Extents [B, MAX_DIMS], 1 beyond a row's dimensions."""
    used = np.arange(MAX_DIMS) < rows[:, NDIM, None]
    return np.where(used, rows[:, SIZES], 1)


def _require_small(rows: Rows, sizes: Rows) -> None:
    """Nothing that is computed from these rows wraps round 64 bits; floats are exact enough to tell."""
    reach = np.abs(rows[:, HERE].astype(float)) + (np.abs(sizes.astype(float)) * np.abs(rows[:, HERE_STRIDES])).sum(
        axis=1
    )
    if (reach >= 2.0**62).any() or (sizes.astype(float).prod(axis=1) >= 2.0**32).any():
        raise LayoutError(
            "a row reaches over 2^62 elements of its storage, or has 2^32 elements or more: positions are 32-bit"
        )


def _bounds(first: Rows, sizes: Rows, strides: Rows) -> tuple[Rows, Rows]:
    """Lowest and highest element [B] that each row touches."""
    reach = np.where(sizes.min(axis=1, keepdims=True, initial=1) > 0, (sizes - 1) * strides, 0)
    return first + np.minimum(reach, 0).sum(axis=1), first + np.maximum(reach, 0).sum(axis=1)
