"""Stored deltas as one change: the same bits as one after another, in memory that the union bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcr.codecs.patch import Change, Operation
from dcr.errors import LayoutError
from dcr.kernels.reference import resolve
from dcr.layout.frames import FrameSpec, Layout, Region
from dcr.layout.schema import Schema, TensorSpec
from dcr.layout.views import UNSIGNED, Bits
from dcr.stages.compose import FrameUnion, Uncomposable

ELEMS = 40
DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "int64"}


def bound(width: int, numel: int = ELEMS) -> Layout:
    spec = FrameSpec(DTYPES[width], (Region(0, 0, ((numel, 1),)),))
    return Layout(Schema((TensorSpec("w", DTYPES[width], (numel,)),)), (spec,))


def applied(change: Change, bits: Bits) -> Bits:
    """The bits that a change makes of others."""
    new = bits.copy()
    at = slice(None) if change.positions is None else change.positions
    new[at] = resolve(change.values, new[at], change.operation)
    return new


def made(rng: np.random.Generator, width: int, operation: Operation, count: int | None, numel: int = ELEMS) -> Change:
    positions = None if count is None else np.sort(rng.choice(numel, count, replace=False)).astype(np.uint32)
    size = numel if count is None else count
    return Change(operation, positions, rng.integers(0, 1 << 8 * width, size, UNSIGNED[width], endpoint=False))


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([Operation.XOR, Operation.STEP]),
    st.lists(st.tuples(st.booleans(), st.none() | st.integers(0, ELEMS)), max_size=12),
    st.integers(0, 2**32 - 1),
)
def test_a_union_of_changes_makes_the_bits_that_they_make_in_turn(
    width: int, relative: Operation, drawn: list[tuple[bool, int | None]], seed: int
) -> None:
    rng, union = np.random.default_rng(seed), FrameUnion(bound(width).frames[0])
    base = rng.integers(0, 1 << 8 * width, ELEMS, UNSIGNED[width], endpoint=False)
    bits = base
    for is_relative, count in drawn:
        change = made(rng, width, relative if is_relative else Operation.OVERWRITE, count)
        union.add(change)
        bits = applied(change, bits)
        assert np.array_equal(union.over(base), bits)
    changes, composed = union.changes(), base
    positions = [np.arange(ELEMS) if change.positions is None else change.positions for change in changes]
    assert len(np.unique(np.concatenate([[], *positions]))) == sum(map(len, positions))
    for change in changes:
        composed = applied(change, composed)
    assert np.array_equal(composed, bits)


def test_elements_that_each_change_names_are_kept_once() -> None:
    rng, union = np.random.default_rng(3), FrameUnion(bound(2, 100_000).frames[0])
    for _ in range(200):
        positions = np.arange(0, 100, dtype=np.uint32)
        union.add(Change(Operation.STEP, positions, rng.integers(0, 1 << 16, 100, np.uint16)))
        assert union.elems <= 300
    assert [len(change.values) for change in union.changes()] == [100]


def test_a_union_of_most_of_a_frame_takes_one_array_for_the_frame() -> None:
    rng, union = np.random.default_rng(3), FrameUnion(bound(2, 1000).frames[0])
    for _ in range(20):
        union.add(made(rng, 2, Operation.STEP, 400, 1000))
        assert union.elems <= 1000


@pytest.mark.parametrize("first", [Operation.XOR, Operation.STEP])
def test_a_xor_that_meets_a_step_on_one_element_is_not_composed(first: Operation) -> None:
    union, then = FrameUnion(bound(2).frames[0]), Operation.XOR + Operation.STEP - first
    union.add(Change(first, np.array([1, 5], np.uint32), np.array([3, 4], np.uint16)))
    with pytest.raises(Uncomposable):
        union.add(Change(Operation(then), np.array([2, 5], np.uint32), np.array([3, 4], np.uint16)))


def test_a_xor_beside_a_step_is_a_change_of_its_own() -> None:
    union = FrameUnion(bound(2).frames[0])
    union.add(Change(Operation.XOR, np.array([1, 5], np.uint32), np.array([3, 4], np.uint16)))
    union.add(Change(Operation.STEP, np.array([2, 6], np.uint32), np.array([3, 4], np.uint16)))
    union.add(Change(Operation.OVERWRITE, np.array([2, 7], np.uint32), np.array([8, 9], np.uint16)))
    assert {change.operation: change.positions.tolist() for change in union.changes()} == {
        Operation.XOR: [1, 5],
        Operation.STEP: [6],
        Operation.OVERWRITE: [2, 7],
    }


@pytest.mark.parametrize("positions", [[3, 3], [4, 2], [ELEMS]])
def test_positions_that_no_frame_has_are_refused(positions: list[int]) -> None:
    union = FrameUnion(bound(2).frames[0])
    with pytest.raises(LayoutError):
        union.add(Change(Operation.STEP, np.array(positions, np.uint32), np.zeros(len(positions), np.uint16)))
