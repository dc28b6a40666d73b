"""Tables check every row when they are made: nothing that leaves a storage ever reaches a kernel."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.errors import LayoutError
from dcr.layout.boxes import MAX_DIMS, Box, Dim
from dcr.layout.views import COLUMNS, NDIM, SIZES, STORAGE, TENSOR, Bits, Table, box_of, rows_of

examples = settings(deadline=None, max_examples=100)
WORDS = st.integers(-(1 << 40), 1 << 40)
BOXES = st.builds(
    Box, WORDS, WORDS, st.lists(st.builds(Dim, st.integers(1, 5), WORDS, WORDS), max_size=MAX_DIMS).map(tuple)
)


def storage(elements: int, dtype: type = np.uint16) -> Bits:
    return np.zeros(elements, dtype)


def one_row(box: Box, index: int = 0) -> np.ndarray:
    return rows_of([(index, 0, box)])


@examples
@given(BOXES)
def test_a_row_gives_its_simplified_box_back(box: Box) -> None:
    assert box_of(one_row(box)[0]) == box.simplified()


def test_rows_keep_their_order_storage_and_tensor() -> None:
    rows = rows_of([(3, 7, Box(0, 0)), (1, 9, Box(5, 6))])
    assert rows[:, [STORAGE, TENSOR]].tolist() == [[3, 7], [1, 9]]


def test_empty_boxes_make_no_row() -> None:
    assert rows_of([(0, 0, Box(0, 0, (Dim(4, 1, 1), Dim(0, 1, 1))))]).shape == (0, COLUMNS)


def test_a_box_with_too_many_dimensions_is_refused() -> None:
    box = Box(0, 0, tuple(Dim(2, 3**d, 1) for d in range(MAX_DIMS + 1)))
    with pytest.raises(LayoutError, match=f"{MAX_DIMS + 1} dimensions"):
        one_row(box)


def test_dimensions_that_merge_do_not_count_as_too_many() -> None:
    dims = tuple(Dim(2, 2**d, 2**d) for d in reversed(range(MAX_DIMS + 3)))
    assert box_of(one_row(Box(0, 0, dims))[0]) == Box(0, 0, (Dim(2 ** (MAX_DIMS + 3), 1, 1),))


def test_numel_is_the_sum_over_rows() -> None:
    rows = rows_of([(0, 0, Box(0, 0, (Dim(3, 4, 4), Dim(2, 1, 1)))), (0, 0, Box(2, 2))])
    assert Table((storage(12),), rows).numel == 7


def test_a_table_without_rows_is_empty() -> None:
    assert Table((), rows_of([])).numel == 0


@pytest.mark.parametrize(
    "box",
    [Box(8, 0, (Dim(3, 1, 1),)), Box(-1, 0), Box(10, 0), Box(4, 0, (Dim(3, -3, 1),)), Box(1 << 32, 0)],
    ids=["past the end", "before the start", "just past", "backwards past the start", "as if 32-bit"],
)
def test_a_row_that_leaves_its_storage_is_refused(box: Box) -> None:
    with pytest.raises(LayoutError, match="of storage 0, which has 10 elements"):
        Table((storage(10),), one_row(box))


@pytest.mark.parametrize(
    "box", [Box(0, 0, (Dim(10, 1, 1),)), Box(9, 0, (Dim(10, -1, 1),)), Box(9, 0)], ids=["all", "backwards", "last"]
)
def test_a_row_up_to_the_edges_is_accepted(box: Box) -> None:
    assert Table((storage(10),), one_row(box)).numel == box.numel


@pytest.mark.parametrize("index", [-1, 1])
def test_a_row_of_an_unknown_storage_is_refused(index: int) -> None:
    with pytest.raises(LayoutError, match="which has no elements"):
        Table((storage(10),), one_row(Box(0, 0), index))


def test_a_row_without_any_storage_is_refused() -> None:
    with pytest.raises(LayoutError, match="which has no elements"):
        Table((), one_row(Box(0, 0)))


def test_the_bad_row_is_named_among_good_ones() -> None:
    rows = rows_of([(0, 0, Box(0, 0)), (1, 0, Box(3, 0)), (0, 0, Box(1, 0))])
    with pytest.raises(LayoutError, match=r"row 1 touches \[3, 3\] of storage 1, which has 3 elements"):
        Table((storage(2), storage(3)), rows)


def test_storages_of_different_widths_are_refused() -> None:
    with pytest.raises(LayoutError, match="one width"):
        Table((storage(4, np.uint16), storage(4, np.uint32)), rows_of([]))


def test_two_to_the_32_elements_are_refused() -> None:
    box = Box(0, 0, (Dim(1 << 16, 0, 1 << 16), Dim(1 << 16, 0, 1)))
    with pytest.raises(LayoutError, match="positions are 32-bit"):
        Table((storage(1),), one_row(box))


def test_one_element_less_than_two_to_the_32_is_accepted() -> None:
    assert Table((storage(1),), one_row(Box(0, 0, (Dim((1 << 32) - 1, 0, 1),)))).numel == (1 << 32) - 1


@pytest.mark.parametrize("first", [(1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32])
def test_canonical_offsets_past_32_bits_survive(first: int) -> None:
    box = Box(0, first, (Dim(2, 1, 1 << 33),))
    assert box_of(Table((storage(2),), one_row(box)).rows[0]).there_bounds == (first, first + (1 << 33))


def test_extents_whose_product_wraps_round_64_bits_are_refused() -> None:
    rows = one_row(Box(0, 0, (Dim(2, 0, 1), Dim(2, 0, 3))))
    rows[0, SIZES][:2] = 1 << 32
    with pytest.raises(LayoutError):
        Table((storage(1),), rows)


def test_a_reach_that_wraps_round_64_bits_is_refused() -> None:
    with pytest.raises(LayoutError):
        Table((storage(8),), one_row(Box(0, 0, (Dim(5, 1 << 62, 1),))))


def test_columns_beyond_a_rows_dimensions_do_not_count() -> None:
    rows = one_row(Box(0, 0))
    assert rows[0, NDIM] == 0
    rows[0, SIZES] = 1 << 20
    assert Table((storage(1),), rows).numel == 1
