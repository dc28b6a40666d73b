"""What two boxes share: exact for every pair, in order, and few boxes for the pairs that parallel layouts make.

The oracle expands both boxes, element by element, and joins them on the canonical index.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pieces import expand, joined, tilings

from dcr.errors import LayoutError
from dcr.layout.boxes import Box, Dim, is_injective, whole
from dcr.layout.overlap import compose, intersect, locate, numbered, row_runs

examples = settings(deadline=None, max_examples=400)


def shared(a: Box, b: Box) -> list[list[int]]:
    """Pairs (a's storage, b's storage) of the elements in both, in a's numbering order."""
    found = {there: here for here, there in expand(b).tolist()}
    return [[here, found[there]] for here, there in expand(a).tolist() if there in found]


STRIDES = st.sampled_from([-12, -3, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 24])


@st.composite
def any_boxes(draw: st.DrawFn) -> Box:
    dims = st.builds(Dim, st.integers(0, 5), st.integers(-30, 30), STRIDES)
    return draw(st.builds(Box, st.integers(0, 50), st.integers(-5, 40), st.lists(dims, max_size=4).map(tuple)))


@st.composite
def homes(draw: st.DrawFn) -> Box:
    """Boxes whose canonical side nests, with gaps or without, in any order of dimensions."""
    dims, span = [], 0
    for n in draw(st.lists(st.integers(1, 5), max_size=4)):
        stride = span + 1 + draw(st.sampled_from([0, 0, 0, 1, 3]))
        dims.append(Dim(n, draw(st.integers(-9, 9)), stride * draw(st.sampled_from([1, 1, 1, -1]))))
        span += (n - 1) * stride
    return Box(draw(st.integers(0, 50)), draw(st.integers(-5, 60)), tuple(draw(st.permutations(dims))))


@examples
@given(any_boxes(), homes())
def test_intersect_holds_what_both_hold_in_the_first_ones_order(a: Box, b: Box) -> None:
    assert joined(intersect(a, b)).tolist() == shared(a, b)


@examples
@given(homes(), homes())
def test_compose_follows_both_maps(first: Box, then: Box) -> None:
    if not is_injective([(dim.n, dim.here) for dim in then.dims]):
        with pytest.raises(LayoutError, match="strides that nest"):
            compose(Box(0, 0, (Dim(1 << 20, 1, 1),)), then)
        return
    onward = dict(expand(then).tolist())
    expected = [[here, onward[there]] for here, there in expand(first).tolist() if there in onward]
    assert joined(compose(first, then)).tolist() == expected


@examples
@given(tilings())
def test_locate_finds_every_element_in_its_home_in_order(case: tuple[Box, list[Box]]) -> None:
    region, pieces = case
    found = locate(region, pieces)
    where = {there: (index, here) for index, piece in enumerate(pieces) for here, there in expand(piece).tolist()}
    expected = [(here, *where[there]) for here, there in expand(region).tolist()]
    assert [(here, index, home) for index, box in found for here, home in expand(box).tolist()] == expected


def test_an_element_with_two_homes_is_refused() -> None:
    with pytest.raises(LayoutError, match="in two homes"):
        locate(whole((4,), (1,)), [whole((3,), (1,)), Box(0, 2, (Dim(2, 1, 1),))])


def test_a_home_that_meets_itself_is_refused() -> None:
    with pytest.raises(LayoutError, match="strides that nest"):
        intersect(whole((4,), (1,)), Box(0, 0, (Dim(2, 1, 2), Dim(3, 1, 1))))


@examples
@given(any_boxes())
def test_numbered_counts_the_same_elements(box: Box) -> None:
    assert expand(numbered(box)).tolist() == [[i, there] for i, (_, there) in enumerate(expand(box).tolist())]


@examples
@given(any_boxes())
def test_row_runs_are_dense_on_both_sides(box: Box) -> None:
    runs = list(row_runs(box))
    assert joined(runs).tolist() == expand(box).tolist()
    assert all(run.dims == () or run.dims[0][1:] == (1, 1) for run in runs)


ROWS, COLS = 96, 64


def part(rows: range, cols: range) -> Box:
    """A dense storage that holds some rows and columns of a ROWS x COLS tensor."""
    return Box(0, rows.start * COLS + cols.start, (Dim(len(rows), len(cols), COLS), Dim(len(cols), 1, 1)))


EVERY_ROW, EVERY_COL = range(ROWS), range(COLS)
ROPE = Box(0, 0, (Dim(6, 16 * COLS, 16 * COLS), Dim(2, COLS, 8 * COLS), Dim(8, 2 * COLS, COLS), Dim(COLS, 1, 1)))
USUAL = {
    "column x column": (part(EVERY_ROW, range(16, 48)), part(EVERY_ROW, range(32, 64)), 1),
    "column x row": (part(EVERY_ROW, range(16, 48)), part(range(24, 48), EVERY_COL), 1),
    "row x row": (part(range(10, 40), EVERY_COL), part(range(24, 48), EVERY_COL), 1),
    "block x block": (part(range(10, 40), range(7, 40)), part(range(24, 48), range(16, 48)), 1),
    "flat x row": (Box(0, 1000, (Dim(3000, 1, 1),)), part(range(24, 48), EVERY_COL), 1),
    "flat x column": (Box(0, 1000, (Dim(3000, 1, 1),)), part(EVERY_ROW, range(16, 48)), 3),
    "column x flat": (part(EVERY_ROW, range(16, 48)), Box(0, 1000, (Dim(3000, 1, 1),)), 3),
    "rope x column": (ROPE, part(EVERY_ROW, range(16, 48)), 1),
    "flat x rope": (Box(0, 1000, (Dim(3000, 1, 1),)), ROPE, 7),
    "whole x transposed": (part(EVERY_ROW, EVERY_COL), Box(0, 0, (Dim(COLS, ROWS, 1), Dim(ROWS, 1, COLS))), 1),
    "apart": (part(range(10), EVERY_COL), part(range(20, 30), EVERY_COL), 0),
}


@pytest.mark.parametrize("name", USUAL)
def test_the_usual_pairs_need_few_boxes(name: str) -> None:
    a, b, most = USUAL[name]
    found = intersect(a, b)
    assert joined(found).tolist() == shared(a, b)
    assert len(found) <= most


def test_sizes_past_32_bits_cost_no_more() -> None:
    rows, cols = 1 << 18, 1 << 16
    column = Box(0, 1 << 14, (Dim(rows, 1 << 14, cols), Dim(1 << 14, 1, 1)))
    flat = Box(7, 3 * cols + 5, (Dim(rows * cols // 2, 1, 1),))
    found = intersect(flat, column)
    assert len(found) <= 3
    assert sum(box.numel for box in found) == (rows // 2) * (1 << 14)
