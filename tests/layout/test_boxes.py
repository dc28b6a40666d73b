"""Boxes are affine maps with a numbering: every operation on them must keep both.

The oracle expands a box, element by element, into the pairs (here, there) that it stands for.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pieces import expand, joined

from dcr.errors import LayoutError
from dcr.layout.boxes import Box, Dim, is_injective, whole

examples = settings(deadline=None, max_examples=100)
# Few strides and extents, so that dimensions often merge, on one side or on both; and some past 32 bits.
STRIDES = st.sampled_from([-4, -1, 0, 1, 2, 3, 4, 6, 9, 1 << 31, (1 << 32) + 1, -(1 << 33)])
OFFSETS = st.integers(-5, 50) | st.sampled_from([(1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40])


def boxes(least: int = 0) -> st.SearchStrategy[Box]:
    dims = st.builds(Dim, st.integers(least, 4), STRIDES, STRIDES)
    return st.builds(Box, OFFSETS, OFFSETS, st.lists(dims, max_size=4).map(tuple))


@examples
@given(boxes(), st.data())
def test_a_run_holds_exactly_its_elements_in_numbering_order(box: Box, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, box.numel))
    count = data.draw(st.integers(0, box.numel - start))
    assert joined(list(box.run(start, count))).tolist() == expand(box)[start : start + count].tolist()


@examples
@given(boxes(least=1), st.data())
def test_a_run_is_a_head_a_body_and_a_tail(box: Box, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, box.numel - 1))
    count = data.draw(st.integers(1, box.numel - start))
    assert len(list(box.run(start, count))) <= max(1, 2 * len(box.dims) - 1)


@examples
@given(boxes(), st.lists(st.integers(1, 9), min_size=1))
def test_runs_one_after_another_make_the_box_again(box: Box, counts: list[int]) -> None:
    pieces: list[Box] = []
    start = 0
    for count in [*counts, box.numel]:
        count = min(count, box.numel - start)
        pieces += box.run(start, count)
        start += count
    assert joined(pieces).tolist() == expand(box).tolist()


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, 13), (12, 1), (5, -1)])
def test_a_run_that_leaves_its_box_is_refused(start: int, count: int) -> None:
    box = Box(0, 0, (Dim(3, 4, 4), Dim(4, 1, 1)))
    with pytest.raises(LayoutError, match="box of 12 elements"):
        list(box.run(start, count))


@examples
@given(boxes())
def test_simplified_keeps_the_map_and_the_numbering(box: Box) -> None:
    assert expand(box.simplified()).tolist() == expand(box).tolist()


@examples
@given(boxes(least=1))
def test_simplified_leaves_no_dimension_that_could_go(box: Box) -> None:
    dims = box.simplified().dims
    assert all(dim.n > 1 for dim in dims)
    assert not any(
        outer.here == inner.here * inner.n and outer.there == inner.there * inner.n
        for outer, inner in itertools.pairwise(dims)
    )


@pytest.mark.parametrize("dims", [(Dim(2, 3, 4), Dim(3, 1, 1)), (Dim(2, 4, 3), Dim(3, 1, 1))], ids=["here", "there"])
def test_dimensions_that_merge_on_one_side_only_stay_apart(dims: tuple[Dim, ...]) -> None:
    assert Box(0, 0, dims).simplified().dims == dims


@examples
@given(boxes())
def test_inverted_swaps_the_two_sides(box: Box) -> None:
    assert expand(box.inverted()).tolist() == expand(box)[:, ::-1].tolist()


@examples
@given(boxes())
def test_bounds_are_the_lowest_and_highest_element_touched(box: Box) -> None:
    pairs = expand(box)
    expected = [(int(side.min()), int(side.max())) if box.numel else (0, -1) for side in pairs.T]
    assert [box.here_bounds, box.there_bounds] == expected


def test_a_box_without_dimensions_has_one_element() -> None:
    box = Box(7, 9)
    assert (box.numel, box.here_bounds, list(box.run(0, 1))) == (1, (7, 7), [box])


@examples
@given(st.permutations(range(3)), st.tuples(*[st.integers(1, 4)] * 3), st.integers(0, 5))
def test_whole_maps_a_permuted_tensor_to_row_major_coordinates(
    order: list[int], shape: tuple[int, ...], offset: int
) -> None:
    memory = np.arange(offset + int(np.prod(shape)), dtype=np.int64)
    tensor = memory[offset:].reshape(shape).transpose(order)
    pairs = expand(whole(tensor.shape, [stride // 8 for stride in tensor.strides], offset))
    assert pairs[:, 0].tolist() == tensor.reshape(-1).tolist()
    assert pairs[:, 1].tolist() == list(range(tensor.size))


def test_whole_of_a_contiguous_tensor_is_one_run() -> None:
    assert whole((4, 5, 6), (30, 6, 1), 3) == Box(3, 0, (Dim(120, 1, 1),))


@pytest.mark.parametrize("first", [(1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32])
def test_a_run_across_the_32_bit_limits_keeps_its_offsets(first: int) -> None:
    row = 1 << 31
    box = Box(5, 0, (Dim(4, row + 8, row), Dim(row, 1, 1)))
    (element,) = box.run(first, 1)
    assert element == Box(5 + (row + 8) * (first // row) + first % row, first)


def test_a_body_of_rows_past_32_bits_stays_one_box() -> None:
    row = 1 << 31
    box = Box(0, 0, (Dim(5, row + 8, row), Dim(row, 1, 1)))
    head, body, tail = box.run(row - 2, 3 * row + 4)
    assert head == Box(row - 2, row - 2, (Dim(2, 1, 1),))
    assert body == Box(row + 8, row, (Dim(3, row + 8, row), Dim(row, 1, 1)))
    assert tail == Box(4 * (row + 8), 4 * row, (Dim(2, 1, 1),))


SIZES_STRIDES = st.lists(st.tuples(st.integers(1, 4), st.integers(-12, 12)), max_size=3)


def meet(sizes_strides: list[tuple[int, int]]) -> bool:
    places = expand(Box(0, 0, tuple(Dim(n, stride, 0) for n, stride in sizes_strides)))[:, 0]
    return len(set(places.tolist())) < len(places)


@examples
@given(SIZES_STRIDES)
def test_what_is_called_injective_never_meets(sizes_strides: list[tuple[int, int]]) -> None:
    assert not (is_injective(sizes_strides) and meet(sizes_strides))


slices = st.builds(slice, st.integers(0, 2), st.integers(3, 5), st.integers(1, 3))


@examples
@given(st.permutations(range(3)), st.tuples(slices, slices, slices))
def test_sliced_and_permuted_tensors_are_injective(order: list[int], cut: tuple[slice, ...]) -> None:
    tensor = np.zeros((5, 5, 5), np.uint8)[cut].transpose(order)
    assert is_injective(list(zip(tensor.shape, tensor.strides, strict=True)))


@pytest.mark.parametrize(
    "sizes_strides",
    [[(3, 0)], [(3, 1), (2, 2)], [(2, 4), (5, 1)], [(2, 3), (2, -3)]],
    ids=["expanded", "window", "rows overlap", "same stride twice"],
)
def test_layouts_that_meet_are_not_injective(sizes_strides: list[tuple[int, int]]) -> None:
    assert not is_injective(sizes_strides)
