"""Patches and changes: what travels, relative or absolute, gives the new bits back, modulo the element's width."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dcr.codecs.patch import Operation, Patch, relative
from dcr.kernels import reference
from dcr.layout.frames import Frame, FrameSpec, Layout, Region
from dcr.layout.schema import Schema, TensorSpec
from dcr.layout.views import UNSIGNED

DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "float64"}
SUMS = np.zeros((1, 2), np.uint64)


def frame(numel: int, width: int = 2) -> Frame:
    spec = TensorSpec("w", DTYPES[width], (numel,))
    return Layout(Schema((spec,)), (FrameSpec(spec.dtype, (Region(0, 0, ((numel, 1),)),)),)).frames[0]


def patch(
    base: NDArray[np.unsignedinteger] | None, positions: list[int] | None, bits: list[int], width: int = 2
) -> Patch:
    numel = len(bits) if base is None else len(base)
    taken = None if positions is None else np.array(positions, np.uint32)
    old = None if base is None or taken is None else base[taken]
    return Patch(frame(numel, width), taken, np.array(bits, UNSIGNED[width]), base, len(bits), SUMS, SUMS, old)


@settings(deadline=None, max_examples=100)
@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from(list(Operation)), st.data())
def test_resolving_what_was_sent_gives_the_new_bits(width: int, operation: Operation, data: st.DataObject) -> None:
    word = st.integers(0, 2 ** (8 * width) - 1)
    base = np.array(data.draw(st.lists(word, min_size=1, max_size=9)), UNSIGNED[width])
    positions = sorted(data.draw(st.sets(st.integers(0, len(base) - 1))))
    bits = data.draw(st.lists(word, min_size=len(positions), max_size=len(positions)))
    change = relative(patch(base, positions, bits, width), operation)
    assert change.operation is operation
    assert reference.resolve(change.values, base[positions], change.operation).tolist() == bits


def test_a_step_is_taken_modulo_the_width() -> None:
    change = relative(patch(np.array([0xFFFF, 0], np.uint16), [0, 1], [1, 0xFFFF]), Operation.STEP)
    assert change.values.tolist() == [2, 0xFFFF]


def test_xor_sends_the_bits_that_flip() -> None:
    change = relative(patch(np.array([0x8000], np.uint16), [0], [0x8001]), Operation.XOR)
    assert change.values.tolist() == [1]


def test_steps_are_taken_from_the_bits_at_the_changed_positions() -> None:
    change = relative(patch(np.array([10, 20, 30], np.uint16), [2], [33]), Operation.STEP)
    assert (change.positions.tolist(), change.values.tolist()) == ([2], [3])


@pytest.mark.parametrize("operation", Operation)
def test_a_patch_without_a_base_can_only_overwrite(operation: Operation) -> None:
    change = relative(patch(None, None, [5, 6]), operation)
    assert (change.operation, change.positions, change.values.tolist()) == (Operation.OVERWRITE, None, [5, 6])


@pytest.mark.parametrize("operation", Operation)
def test_a_dense_patch_overwrites_even_with_a_base(operation: Operation) -> None:
    change = relative(patch(np.array([1, 2], np.uint16), None, [5, 6]), operation)
    assert (change.operation, change.positions, change.values.tolist()) == (Operation.OVERWRITE, None, [5, 6])


def test_making_a_change_leaves_patch_and_base_as_they_are() -> None:
    base = np.array([10, 20], np.uint16)
    one = patch(base, [1], [25])
    relative(one, Operation.STEP)
    assert (base.tolist(), one.bits.tolist()) == ([10, 20], [25])


def test_a_patch_counts_positions_and_both_bits_but_not_its_borrowed_base() -> None:
    assert patch(np.zeros(100, np.uint16), [3, 4], [1, 2]).nbytes == 2 * 4 + 2 * (2 + 2)


def test_a_dense_patch_counts_its_bits() -> None:
    assert patch(None, None, [1, 2, 3]).nbytes == 3 * 2
