"""The proof of coverage: whole for every partition, broken by every gap and every overlap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pieces import tilings

from dcr.errors import LayoutError
from dcr.layout.boxes import Box, Dim
from dcr.layout.coverage import require_covered, tally, uncovered
from dcr.layout.schema import Schema, TensorSpec

examples = settings(deadline=None, max_examples=200)


def schema(*sizes: int) -> Schema:
    return Schema(tuple(TensorSpec(f"t{i}", "bfloat16", (n,)) for i, n in enumerate(sizes)))


def span(start: int, stop: int) -> Box:
    return Box(0, start, (Dim(stop - start, 1, 1),))


@examples
@given(tilings(), st.integers(1, 4))
def test_pieces_of_any_layout_cover_their_tensor(case: tuple[Box, list[Box]], ranks: int) -> None:
    _, pieces = case
    one = schema(5, sum(piece.numel for piece in pieces))
    total = sum((tally(one, [(1, p) for p in pieces[rank::ranks]]) for rank in range(ranks)), tally(one, (), [0]))
    require_covered(one, total)


@examples
@given(st.integers(3, 100), st.data())
def test_the_same_count_of_other_elements_is_found_out(n: int, data: st.DataObject) -> None:
    missing, twice = data.draw(st.lists(st.integers(0, n - 1), min_size=2, max_size=2, unique=True))
    one = schema(n)
    boxes = [(0, Box(0, i)) for i in range(n) if i != missing] + [(0, Box(0, twice))]
    assert uncovered(one, tally(one, boxes)) == [0]


@pytest.mark.parametrize(
    "boxes",
    [[(0, 40), (50, 100)], [(0, 60), (50, 100)], [(0, 50), (51, 101)], [], [(0, 100), (0, 100)]],
    ids=["gap", "overlap", "gap outside", "nothing", "twice"],
)
def test_gaps_and_overlaps_are_named(boxes: list[tuple[int, int]]) -> None:
    one = schema(100, 7)
    total = tally(one, [(0, span(*box)) for box in boxes], [1])
    with pytest.raises(LayoutError, match=r"1 of 2 tensors .* t0 \(\d+ of 100 elements\)"):
        require_covered(one, total)


def test_a_transposed_half_is_no_plain_half() -> None:
    """Equal counts and equal bounds, other elements."""
    one = schema(36)
    rows = Box(0, 0, (Dim(3, 6, 6), Dim(6, 1, 1)))
    cols = Box(0, 3, (Dim(6, 3, 6), Dim(3, 1, 1)))
    assert uncovered(one, tally(one, [(0, rows), (0, cols)])) == [0]


def test_sums_of_many_ranks_do_not_overflow() -> None:
    ranks, rows = 1 << 12, 1 << 20
    one = schema(ranks * rows)
    total = sum((tally(one, [(0, span(r * rows, (r + 1) * rows))]) for r in range(ranks)), tally(one, ()))
    assert total.dtype == np.int64
    require_covered(one, total)


def test_empty_and_scalar_tensors_are_covered() -> None:
    one = Schema((TensorSpec("empty", "float32", (0, 3)), TensorSpec("scalar", "float32", ())))
    require_covered(one, tally(one, [(1, Box(0, 0))]))
    assert uncovered(one, tally(one, ())) == [1]
