"""The baseline moves only with the head, from absolute bits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dcr import kernels
from dcr.codecs.patch import Patch
from dcr.errors import StateError
from dcr.layout.frames import FrameSpec, Layout, Region
from dcr.layout.schema import Schema, TensorSpec
from dcr.layout.views import Lanes
from dcr.memory.baseline import Baseline
from dcr.memory.placement import canonical_table
from dcr.protocol.wire import Identity

# Frame 0 holds all of `a` and the first half of `b`, frame 1 the second half of `b`.
SCHEMA = Schema((TensorSpec("a", "bfloat16", (3,)), TensorSpec("b", "bfloat16", (8,))))
LAYOUT = Layout(
    SCHEMA,
    (
        FrameSpec("bfloat16", (Region(0, 0, ((3, 1),)), Region(1, 0, ((4, 1),)))),
        FrameSpec("bfloat16", (Region(1, 4, ((4, 1),)),)),
    ),
)
SIZES = [7, 4]
Model = list[NDArray[np.uint16]]


def version(number: int) -> Identity:
    return Identity("run", 1, number, 1)


def lanes_of(bits: Model) -> Lanes:
    """The digest of a whole model, taken anew."""
    lanes = np.zeros((2, 2), np.uint64)
    for frame, dense in zip(LAYOUT.frames, bits, strict=True):
        lanes[list(frame.tensors)] += kernels.digest(canonical_table(frame, dense), frame.keys)
    return lanes


def whole(index: int, bits: NDArray[np.uint16], base: NDArray[np.uint16] | None = None) -> Patch:
    frame = LAYOUT.frames[index]
    new = kernels.digest(canonical_table(frame, bits), frame.keys)
    old = np.zeros_like(new) if base is None else kernels.digest(canonical_table(frame, base), frame.keys)
    return Patch(frame, None, bits, base, len(bits), old, new)


def sparse(index: int, base: NDArray[np.uint16], changes: Mapping[int, int]) -> Patch:
    frame = LAYOUT.frames[index]
    positions = np.array(sorted(changes), np.uint32)
    bits = np.array([changes[int(position)] for position in positions], np.uint16)
    table = canonical_table(frame, base)
    old = kernels.digest_at(table, frame.keys, positions, base[positions])
    new = kernels.digest_at(table, frame.keys, positions, bits)
    return Patch(frame, positions, bits, base, len(positions), old, new)


@pytest.fixture
def baseline() -> Baseline:
    """At version 1, with all bits zero."""
    made = Baseline(LAYOUT)
    bits = [np.zeros(size, np.uint16) for size in SIZES]
    made.adopt(dict(enumerate(bits)), version(1), lanes_of(bits))
    return made


def change(baseline: Baseline, index: int, changes: Mapping[int, int]) -> Patch:
    base = baseline.base(index)
    assert base is not None
    patch = sparse(index, base, changes)
    baseline.hold(patch)
    return patch


def bits_of(baseline: Baseline) -> list[list[int]]:
    return [baseline.base(index).tolist() for index in range(2)]  # type: ignore[union-attr]


def test_a_new_baseline_holds_nothing() -> None:
    made = Baseline(LAYOUT)
    assert (made.identity, made.base(0), made.base(1), made.lanes.tolist()) == (None, None, None, [[0, 0], [0, 0]])


def test_an_anchor_becomes_the_baseline_when_it_is_folded() -> None:
    made, bits = Baseline(LAYOUT), [np.arange(size, dtype=np.uint16) for size in SIZES]
    for index in (0, 1):
        made.hold(whole(index, bits[index]))
    made.fold(version(1))
    assert (made.identity, bits_of(made)) == (version(1), [dense.tolist() for dense in bits])
    assert made.lanes.tolist() == lanes_of(bits).tolist()


def test_what_is_held_changes_nothing_until_it_is_folded(baseline: Baseline) -> None:
    before = baseline.lanes.tolist()
    change(baseline, 0, {2: 7})
    assert (bits_of(baseline), baseline.lanes.tolist(), baseline.identity) == ([[0] * 7, [0] * 4], before, version(1))


def test_folding_writes_the_held_bits(baseline: Baseline) -> None:
    change(baseline, 0, {2: 7, 3: 8})
    change(baseline, 1, {3: 9})
    baseline.fold(version(2))
    assert (baseline.identity, bits_of(baseline)) == (version(2), [[0, 0, 7, 8, 0, 0, 0], [0, 0, 0, 9]])


def test_folding_a_dense_patch_replaces_its_frame(baseline: Baseline) -> None:
    base = baseline.base(1)
    baseline.hold(whole(1, np.array([1, 2, 3, 4], np.uint16), base))
    baseline.fold(version(2))
    assert bits_of(baseline) == [[0] * 7, [1, 2, 3, 4]]


def test_the_target_is_the_digest_of_the_bits_with_the_overlay_applied(baseline: Baseline) -> None:
    change(baseline, 0, {2: 7, 3: 8})
    change(baseline, 1, {3: 9})
    target, _ = baseline.target()
    expected = [np.array([0, 0, 7, 8, 0, 0, 0], np.uint16), np.array([0, 0, 0, 9], np.uint16)]
    assert target.tolist() == lanes_of(expected).tolist()


def test_the_touched_sums_are_those_of_the_old_bits_at_the_changed_elements(baseline: Baseline) -> None:
    change(baseline, 0, {2: 7})
    touched = baseline.target()[1]
    frame, base = LAYOUT.frames[0], np.zeros(7, np.uint16)
    expected = kernels.digest_at(canonical_table(frame, base), frame.keys, np.array([2], np.uint32), base[[2]])
    assert touched.tolist() == expected.tolist()


def test_a_rescan_digests_the_committed_bits_and_not_what_lies_over_them(baseline: Baseline) -> None:
    change(baseline, 0, {2: 7})
    assert baseline.rescan().tolist() == baseline.lanes.tolist()


def test_a_rescan_finds_a_bit_that_flipped_in_memory(baseline: Baseline) -> None:
    bits = baseline.base(1)
    assert bits is not None
    bits[2] ^= 1
    assert (baseline.rescan() != baseline.lanes).any(axis=1).tolist() == [False, True]


def test_a_rescan_of_nothing_is_nothing() -> None:
    assert Baseline(LAYOUT).rescan().tolist() == [[0, 0], [0, 0]]


def test_a_version_that_is_given_up_leaves_no_trace(baseline: Baseline) -> None:
    before = baseline.lanes.tolist()
    change(baseline, 0, {2: 7})
    baseline.drop()
    assert (bits_of(baseline), list(baseline.patches())) == ([[0] * 7, [0] * 4], [])
    assert (baseline.target()[0].tolist(), baseline.identity) == (before, version(1))


def test_a_frame_that_was_given_up_can_be_captured_again(baseline: Baseline) -> None:
    change(baseline, 0, {2: 7})
    baseline.drop()
    change(baseline, 0, {2: 9})
    baseline.fold(version(3))
    assert bits_of(baseline)[0][2] == 9


def test_a_frame_is_captured_once_per_version(baseline: Baseline) -> None:
    change(baseline, 0, {2: 7})
    with pytest.raises(StateError, match="frame 0 was captured twice"):
        change(baseline, 0, {3: 7})


def test_after_a_fold_the_next_version_starts_empty(baseline: Baseline) -> None:
    change(baseline, 0, {2: 7})
    baseline.fold(version(2))
    assert list(baseline.patches()) == []


def test_held_patches_are_given_out_by_frame_and_in_frame_order(baseline: Baseline) -> None:
    second, first = change(baseline, 1, {0: 1}), change(baseline, 0, {0: 1})
    assert list(baseline.patches()) == [first, second]
    assert baseline.held(1) is second


def test_a_frame_that_the_version_does_not_touch_has_nothing_to_send_again(baseline: Baseline) -> None:
    change(baseline, 0, {0: 1})
    assert baseline.held(1) is None


def test_forgetting_all_bits_makes_the_next_version_an_anchor(baseline: Baseline) -> None:
    change(baseline, 0, {2: 7})
    baseline.clear()
    assert (baseline.identity, baseline.base(0), baseline.base(1)) == (None, None, None)
    assert (baseline.lanes.tolist(), list(baseline.patches())) == ([[0, 0], [0, 0]], [])


def test_adopted_bits_drop_what_was_in_flight(baseline: Baseline) -> None:
    change(baseline, 0, {2: 7})
    bits = [np.full(size, 5, np.uint16) for size in SIZES]
    baseline.adopt(dict(enumerate(bits)), version(9), lanes_of(bits))
    assert (list(baseline.patches()), bits_of(baseline)) == ([], [[5] * 7, [5] * 4])


CHANGES = st.dictionaries(st.integers(0, 10), st.integers(0, 3), max_size=8)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(CHANGES, st.booleans()), max_size=6))
def test_over_many_versions_it_holds_the_committed_bits_and_their_digest(
    steps: list[tuple[dict[int, int], bool]],
) -> None:
    made, model = Baseline(LAYOUT), [np.zeros(size, np.uint16) for size in SIZES]
    made.adopt({frame: dense.copy() for frame, dense in enumerate(model)}, version(0), lanes_of(model))
    for number, (changes, committed) in enumerate(steps, start=1):
        new = [dense.copy() for dense in model]
        for index, offset in ((0, 0), (1, 7)):
            local = {at - offset: bits for at, bits in changes.items() if offset <= at < offset + SIZES[index]}
            if local:
                change(made, index, local)
                new[index][list(local)] = list(local.values())
        assert made.target()[0].tolist() == lanes_of(new).tolist()
        if committed:
            made.fold(version(number))
            model = new
        else:
            made.drop()
        assert (bits_of(made), made.lanes.tolist()) == ([d.tolist() for d in model], lanes_of(model).tolist())
