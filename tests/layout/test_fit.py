"""Boxes from index maps: exact for every map, few for the layouts that parallel training makes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.pieces import expand

from dcr.errors import LayoutError
from dcr.layout.boxes import Box
from dcr.layout.fit import HOLE, fit

examples = settings(deadline=None, max_examples=300)
Index = NDArray[np.int64]


def drawn(found: list[tuple[int, Box]], numel: int, starts: list[int]) -> Index:
    """The index map that boxes stand for; each canonical element may be claimed once."""
    index = np.full(numel, HOLE, np.int64)
    for source, box in found:
        for here, there in expand(box).tolist():
            assert index[there] == HOLE
            index[there] = starts[source] + here
    return index


@examples
@given(st.lists(st.integers(-1, 30), max_size=40), st.integers(1, 6))
def test_any_map_is_fitted_exactly(values: list[int], columns: int) -> None:
    values = values[: len(values) // columns * columns]
    index = np.array(values, np.int64)
    starts = [0, 7, 8, 25]
    assert drawn(fit(index, (-1, columns), starts=starts), len(index), starts).tolist() == values


@examples
@given(st.permutations(range(4)), st.tuples(*[st.integers(1, 5)] * 4), st.data())
def test_a_permuted_slice_is_one_box(order: list[int], shape: tuple[int, ...], data: st.DataObject) -> None:
    memory = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    cut = tuple(slice(data.draw(st.integers(0, n - 1)), n) for n in shape)
    tensor = memory[cut].transpose(order)
    found = fit(tensor.reshape(-1), tensor.shape)
    assert drawn(found, tensor.size, [0]).tolist() == tensor.reshape(-1).tolist()
    assert len(found) == 1


@examples
@given(st.permutations(range(4)), st.tuples(*[st.integers(1, 5)] * 4), st.data())
def test_a_permuted_slice_with_steps_is_drawn_exactly(
    order: list[int], shape: tuple[int, ...], data: st.DataObject
) -> None:
    memory = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    cut = tuple(slice(data.draw(st.integers(0, n - 1)), n, data.draw(st.integers(1, 2))) for n in shape)
    tensor = memory[cut].transpose(order)
    found = fit(tensor.reshape(-1), tensor.shape)  # steps may read as one another: few boxes, not always one
    assert drawn(found, tensor.size, [0]).tolist() == tensor.reshape(-1).tolist()


def numbers(*shape: int) -> Index:
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)


def grouped(part: slice) -> Index:
    """Attention weights interleaved by group: 2 query heads, a key and a value head for each of 3 groups."""
    return numbers(3, 4, 8, 16)[:, part].reshape(-1, 16)


def rope(heads: int, dim: int) -> Index:
    return numbers(heads, 2, dim // 2, 16).transpose(0, 2, 1, 3).reshape(-1, 16)


def padded(before: int, after: int) -> Index:
    hole = np.full((1, 16), HOLE, np.int64)
    return np.concatenate([hole.repeat(before, 0), numbers(5, 16), hole.repeat(after, 0)])


LAYOUTS = {
    "whole": (numbers(6, 16), 1),
    "vector": (numbers(64), 1),
    "scalar": (numbers(1).reshape(()), 1),
    "empty": (numbers(0, 4), 0),
    "columns": (numbers(6, 32)[:, 8:24], 1),
    "queries": (grouped(slice(0, 2)), 1),
    "keys": (grouped(slice(2, 3)), 1),
    "rope": (rope(3, 8), 1),
    "rope of one pair": (rope(3, 2), 1),
    "rope of two pairs": (rope(3, 4), 1),
    "transposed": (numbers(16, 6).T, 1),
    "experts transposed": (numbers(3, 16, 6).transpose(0, 2, 1), 1),
    "up then gate": (np.concatenate([numbers(8, 16)[5:], numbers(8, 16)[:5]]), 2),
    "rows of another rank before and after": (padded(3, 2), 1),
    "one row alone, then a block": (np.concatenate([numbers(9, 16)[:1], numbers(9, 16)[4:]]), 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_needs_few_boxes(name: str) -> None:
    index, boxes = LAYOUTS[name]
    found = fit(index.reshape(-1), index.shape)
    assert drawn(found, index.size, [0]).tolist() == index.reshape(-1).tolist()
    assert len(found) == boxes


def test_experts_of_several_sources_stay_apart() -> None:
    """Equal distances between sources must not join them."""
    index = numbers(4, 3, 16)
    found = fit(index.reshape(-1), index.shape, starts=[0, 48, 96, 144])
    assert [(source, box.here0) for source, box in found] == [(0, 0), (1, 0), (2, 0), (3, 0)]


def test_a_map_without_structure_is_refused() -> None:
    index = np.random.default_rng(0).permutation(1 << 16).astype(np.int64)
    with pytest.raises(LayoutError, match="not affine"):
        fit(index, (1 << 8, 1 << 8))


def test_a_map_of_too_many_boxes_is_refused() -> None:
    rows = np.random.default_rng(0).permutation(64).astype(np.int64)
    index = (rows[:, None] * 16 + np.arange(16)).reshape(-1)
    with pytest.raises(LayoutError, match=r"needs \d+ boxes; at most 8"):
        fit(index, (64, 16), most=8)
