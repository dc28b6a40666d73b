"""Hypothesis strategies for tables: boxes of every shape that a row can say, over storages of random bits.

`tables` are for reading: strides may be zero or negative, and boxes may overlap. `injective_tables` are for writing:
each element of a storage is claimed once at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from dcr.layout.boxes import MAX_DIMS, Box, Dim
from dcr.layout.views import COLUMNS, UNSIGNED, Bits, Positions, Rows, Runs, Table

TENSORS = 3
# Extents: mostly small, so that six dimensions stay cheap, but some long enough for whole vectors and their tails.
LONG = st.sampled_from([31, 64, 129, 300, 1000])
SEEDS = st.integers(0, 2**32 - 1)


def raw_rows(entries: Sequence[tuple[int, int, Box]]) -> Rows:
    """Rows [B, COLUMNS] as they are: boxes keep their empty, single and mergeable dimensions."""
    rows = np.zeros((len(entries), COLUMNS), np.int64)
    for row, (storage, tensor, box) in zip(rows, entries, strict=True):
        row[:5] = storage, box.here0, tensor, box.there0, len(box.dims)
        for d, dim in enumerate(box.dims):
            row[[5 + d, 5 + MAX_DIMS + d, 5 + 2 * MAX_DIMS + d]] = dim
    return rows


def random_bits(seed: int, size: int, width: int) -> Bits:
    return np.random.default_rng(seed).integers(0, 1 << (8 * width), size, UNSIGNED[width], endpoint=False)


@st.composite
def extents(draw: st.DrawFn) -> list[int]:
    sizes = draw(st.lists(st.integers(1, 4), max_size=MAX_DIMS))
    if sizes and draw(st.booleans()):
        sizes = [*sizes[:2], draw(LONG)] if draw(st.booleans()) else [draw(LONG), *sizes[:2]]
    if sizes and draw(st.integers(0, 9)) == 0:
        sizes[draw(st.integers(0, len(sizes) - 1))] = 0
    return sizes


@st.composite
def readable_boxes(draw: st.DrawFn) -> Box:
    """A box of any strides, the lowest element of which is one of the storage's first few."""
    dims = tuple(
        Dim(n, draw(st.sampled_from([1, 1, -1, 0, 2, 3, -5, 17, n])), draw(st.integers(-(1 << 40), 1 << 40)))
        for n in draw(extents())
    )
    return _placed(draw(st.integers(0, 9)), draw(st.integers(0, 1 << 40)), dims)


@st.composite
def tables(draw: st.DrawFn, width: int) -> Table:
    """Up to six boxes over one to three storages, in which they may overlap."""
    entries = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, TENSORS - 1), readable_boxes()), max_size=6))
    return _over(entries, draw(SEEDS), width)


@st.composite
def injective_tables(draw: st.DrawFn, width: int) -> Table:
    """Up to six boxes over one to three storages, no element claimed twice."""
    entries, ends = [], [0, 0, 0]
    for _ in range(draw(st.integers(0, 6))):
        sizes, span = draw(extents()), 0
        strides = [0] * len(sizes)
        for d in draw(st.permutations(range(len(sizes)))):
            stride = span + 1 + draw(st.sampled_from([0, 0, 0, 1, 5]))
            strides[d] = stride * draw(st.sampled_from([1, 1, -1]))
            span += max(0, sizes[d] - 1) * stride
        dims = tuple(Dim(n, here, draw(st.integers(0, 99))) for n, here in zip(sizes, strides, strict=True))
        storage = draw(st.integers(0, 2))
        box = _placed(ends[storage] + draw(st.integers(0, 5)), draw(st.integers(0, 99)), dims)
        ends[storage] = _end(box)
        entries.append((storage, draw(st.integers(0, TENSORS - 1)), box))
    return _over(entries, draw(SEEDS), width)


@st.composite
def positions_in(draw: st.DrawFn, numel: int) -> Positions:
    """Ascending positions below `numel`: none of them, all, or a random part."""
    share = draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))
    chosen = np.random.default_rng(draw(SEEDS)).random(numel) < share
    return np.flatnonzero(chosen).astype(np.uint32)


@st.composite
def runs_in(draw: st.DrawFn, numel: int) -> Runs:
    """Runs (start, count) below `numel` that ascend without overlap; some empty, some next to each other."""
    ends = sorted(draw(st.lists(st.integers(0, numel), max_size=40)))
    starts = ends[: len(ends) // 2 * 2 : 2]
    counts = [end - start for start, end in zip(starts, ends[1::2], strict=True)]
    return np.array([starts, counts], np.int64).T.copy()


def _placed(lowest: int, there0: int, dims: tuple[Dim, ...]) -> Box:
    return Box(lowest - sum(min(0, (dim.n - 1) * dim.here) for dim in dims), there0, dims)


def _end(box: Box) -> int:
    """The first element behind a box, or behind where it would lie if it were not empty."""
    return box.here0 + sum(max(0, (dim.n - 1) * dim.here) for dim in box.dims) + 1


def _over(entries: Sequence[tuple[int, int, Box]], seed: int, width: int) -> Table:
    sizes = [4, 4, 4]
    for storage, _, box in entries:
        sizes[storage] = max(sizes[storage], _end(box) + seed % 3)
    storages = tuple(random_bits(seed + i, size, width) for i, size in enumerate(sizes))
    return Table(storages, raw_rows(entries))
