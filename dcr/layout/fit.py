"""Boxes from an index map: which source element each canonical element is, found out by running an exporter.

    N  elements of one canonical tensor      R  items of one level

Level by level: elements that follow each other in equal steps on both sides become one item, then items of one shape
that do so become one, and so on outwards. Elements are never joined across the end of a canonical row, since a row's
last element and the next row's first often happen to follow each other, which would cut across the true dimensions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dcr.errors import LayoutError
from dcr.layout.boxes import Box, Dim

Index = NDArray[np.int64]
HOLE = -1
BLOCK_ELEMS = 1 << 16  # temporary memory of the pass over all elements: it stays in cache

# The items of one source and shape (extent, step in the source, canonical step; outermost first): int64 [R, 2], the
# canonical and the source element at which each begins.
_Shape = tuple[int, tuple[Dim, ...]]
_Level = dict[_Shape, Index]


def fit(index: Index, shape: Sequence[int], *, starts: Sequence[int] = (0,), most: int = 1024) -> list[tuple[int, Box]]:
    """The boxes of a map, as (source, box from that source's elements to canonical ones), by canonical index.

    index: int64 [N], the source element that each canonical element is a copy of, HOLE where it is none; elements are
    numbered over all sources, source s from starts[s] on (ascending). shape: the canonical tensor's. A source element
    may occur more than once.

    Raises:
        LayoutError: the map needs more than `most` boxes.
    """
    if len(index) and index[0] >= 0 and _ascends(index):
        source = bisect_right(starts, index[0]) - 1
        if source == bisect_right(starts, index[-1]) - 1:
            return [(source, Box(int(index[0]) - starts[source], 0, (Dim(len(index), 1, 1),)).simplified())]
    firsts = np.asarray(starts, np.int64)
    row_elems = next((n for n in reversed(shape) if n > 1), 1)
    level = _rows(index, row_elems, firsts) or _elements(index, row_elems, firsts, most)
    while True:
        joined = _joined(level)
        if joined.keys() == level.keys():
            break
        level = joined
    count = sum(map(len, level.values()))
    if count > most:
        raise LayoutError(f"an index map of {len(index)} elements needs {count} boxes; at most {most} are used")
    found = [
        (source, Box(here - int(starts[source]), there, dims).simplified())
        for (source, dims), items in level.items()
        for there, here in items.tolist()
    ]
    return sorted(found, key=lambda pair: pair[1].there0)


def _ascends(index: Index) -> bool:
    """True if every element is the one before, and one more."""
    count, first = np.arange(min(len(index), BLOCK_ELEMS)), index[0]
    return bool(index[-1] - first == len(index) - 1) and all(
        np.array_equal(block := index[start : start + BLOCK_ELEMS], count[: len(block)] + (first + start))
        for start in range(0, len(index), BLOCK_ELEMS)
    )


def _rows(index: Index, row_elems: int, starts: Index) -> _Level | None:
    """Whole canonical rows in one common step, holes aside; None if the map is not made of such rows."""
    rows = index.reshape(-1, row_elems)
    there = np.flatnonzero(rows[:, 0] != HOLE)
    if not len(there) or row_elems == 1:
        return None
    step = int(rows[there[0], 1] - rows[there[0], 0])
    first, last = rows[there, 0], rows[there, -1]
    source = np.searchsorted(starts, first, side="right")
    if (last - first != step * (row_elems - 1)).any() or (source != np.searchsorted(starts, last, side="right")).any():
        return None
    steps = step * np.arange(row_elems)
    block = max(1, BLOCK_ELEMS // row_elems)
    for start in range(0, len(rows), block):
        some = rows[start : start + block]
        expected = np.where(some[:, :1] == HOLE, HOLE, some[:, :1] + steps)
        if not np.array_equal(some, expected):
            return None
    dims = (Dim(row_elems, step, 1),)
    return {
        (int(one) - 1, dims): np.stack([there[source == one] * row_elems, first[source == one]], axis=1)
        for one in np.unique(source)
    }


def _elements(index: Index, row_elems: int, starts: Index, most: int) -> _Level:
    """Runs of elements in equal steps, within a canonical row and one source."""
    there = np.flatnonzero(index != HOLE)
    here = index[there]
    if not len(there):
        return {}
    source = np.searchsorted(starts, here, side="right") - 1
    apart = (np.diff(there // row_elems) != 0) | (np.diff(source) != 0)
    changes = np.count_nonzero(np.diff(here, 2))
    if changes > 4 * (len(index) // row_elems + most):
        raise LayoutError(f"an index map of {len(index)} elements changes its step {changes} times: it is not affine")
    return _level((((int(source[i]), ()), there, here, i, n) for i, n in _runs(there, here, apart)))


def _joined(level: _Level) -> _Level:
    """Items of one source and shape that follow each other in equal steps, as one item each."""
    return _level(
        (shape, items[:, 0], items[:, 1], i, n)
        for shape, items in ((shape, items[np.argsort(items[:, 0])]) for shape, items in level.items())
        for i, n in _runs(items[:, 0], items[:, 1], np.zeros(len(items) - 1, bool))
    )


def _level(runs: Iterator[tuple[_Shape, Index, Index, int, int]]) -> _Level:
    """Group runs (the shape of their items, canonical and source elements, first item, items) by their own shape."""
    groups: dict[_Shape, list[tuple[int, int]]] = defaultdict(list)
    for (source, dims), there, here, i, n in runs:
        if n > 1:
            dims = (Dim(n, int(here[i + 1] - here[i]), int(there[i + 1] - there[i])), *dims)
        groups[source, dims].append((int(there[i]), int(here[i])))
    return {shape: np.array(items, np.int64) for shape, items in groups.items()}


def _runs(there: Index, here: Index, apart: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """(first item, items) of runs in equal steps, each as long as can be; `apart` [R - 1]: never join these two.

    A step that occurs once, before a longer run, is the gap in front of that run: its item stays single.
    """
    differs = (np.diff(there, 2) != 0) | (np.diff(here, 2) != 0) | apart[1:] | apart[:-1]
    ends = [*(np.flatnonzero(differs) + 1).tolist(), len(apart)] if len(apart) else []
    lone = apart[[end - 1 for end in ends]].tolist()
    item = 0
    for k, end in enumerate(ends):
        if item >= end:
            continue
        gap = end - item == 1 and (lone[k] or (k + 1 < len(ends) and ends[k + 1] - end > 1))
        stop = item + 1 if gap else end + 1
        yield item, stop - item
        item = stop
    if item < len(there):
        yield item, 1
