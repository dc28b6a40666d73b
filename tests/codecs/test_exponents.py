"""A change by class: compiled and reference agree at every level, and what comes back is what was split.

N elements of a frame, K of them changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dcr import _native, kernels
from dcr.codecs.codec import BALANCED, CLASS_SPARSE, SMALL, raw_sparse_bytes
from dcr.codecs.patch import Change, Operation
from dcr.errors import BaseMismatch, LayoutError, PayloadError
from dcr.kernels import exponents
from dcr.layout.views import UNSIGNED, Bits, Positions

WIDTHS = (1, 2, 4, 8)
every_width = pytest.mark.parametrize("width", WIDTHS)
examples = settings(deadline=None, max_examples=60)
BLOCK, CHUNK = 64, 4096


@pytest.fixture(params=_native.features()["levels"], autouse=True, scope="module")
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    yield _native.use_level(request.param)
    _native.use_level(_native.features()["levels"][-1])


def octets(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def frame(N: int, width: int, share: float = 0.1, seed: int = 0) -> tuple[Bits, Positions, Bits]:
    """Old bits with grades all over, positions and values of a change."""
    random = np.random.default_rng((N, width, seed))
    base = np.frombuffer(random.bytes(N * width), UNSIGNED[width])
    positions = np.flatnonzero(random.random(N) < share).astype(np.uint32)
    return base, positions, np.frombuffer(random.bytes(len(positions) * width), UNSIGNED[width])


def both_ways(base: Bits, cuts: np.ndarray, positions: Positions, values: Bits) -> None:
    found, expected = kernels.split(base, cuts, positions, values), exponents.split(base, cuts, positions, values)
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert found[2] == expected[2]
    ranks, grouped, counts = found
    for implementation in (kernels, exponents):
        merged, bits = implementation.merge(base, cuts, counts, ranks, grouped)
        np.testing.assert_array_equal(merged, positions)
        np.testing.assert_array_equal(bits, values)


def scaled(N: int, share: float, seed: int = 0) -> tuple[Bits, Change]:
    """bf16 weights and a change that small ones are likelier to see, as after an optimizer's step."""
    random = np.random.default_rng((N, seed))
    weights = random.standard_normal(N).astype(np.float32) * 0.02
    base = (weights.view(np.uint32) >> 16).astype(np.uint16)
    near = np.abs(weights) < np.quantile(np.abs(weights), 0.3)
    at = np.flatnonzero(random.random(N) < np.where(near, 3 * share, share / 100)).astype(np.uint32)
    steps = np.where(near[at], random.integers(1, 9, len(at)), 1) * random.choice([-1, 1], len(at))
    return base, Change(Operation.STEP, at, steps.astype(np.int16).view(np.uint16))


def decode(body: bytes, change: Change, base: Bits) -> Change:
    return SMALL.decode(
        body,
        operation=change.operation,
        changed=len(change.values),
        numel=len(base),
        width=base.itemsize,
        base=base,
    )


# ---------------------------------------------------------------------- kernels


@every_width
@pytest.mark.parametrize("N", [0, 1, 63, 64, 65, 128, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 70])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_a_change_agrees_and_comes_back(N: int, width: int, share: float) -> None:
    base, positions, values = frame(N, width, share)
    both_ways(base, octets(40, 110, 200), positions, values)


@every_width
@pytest.mark.parametrize("cuts", [(0, 0, 0), (255, 255, 255), (0, 128, 255), (1, 2, 3), (127, 127, 128)], ids=str)
def test_cuts_at_the_edges_agree(width: int, cuts: tuple[int, int, int]) -> None:
    base, positions, values = frame(300, width, 0.5)
    both_ways(base, octets(*cuts), positions, values)


@every_width
def test_a_grade_is_the_eight_bits_below_the_sign(width: int) -> None:
    """Every grade in turn is the lowest of the last class, with and without a sign; its lower bits do not count."""
    for grade in range(0, 256, 2 if width == 1 else 1):
        at = np.array([grade], UNSIGNED[width])
        at = at << UNSIGNED[width].type(8 * width - 9) if width > 1 else at >> np.uint8(1)
        sign = UNSIGNED[width].type(1) << UNSIGNED[width].type(8 * width - 1)
        base = np.concatenate([at, at | sign, at - UNSIGNED[width].type(grade > 0)])
        both_ways(base, octets(0, 0, grade), np.arange(3, dtype=np.uint32), base)
        counts = kernels.split(base, octets(0, 0, grade), np.arange(3, dtype=np.uint32), base)[2]
        assert counts == [0, 0, int(grade > 0), 3 - int(grade > 0)]


@examples
@given(st.data(), st.sampled_from(WIDTHS), st.integers(0, 400))
def test_any_change_agrees_and_comes_back(data: st.DataObject, width: int, N: int) -> None:
    base = np.frombuffer(data.draw(st.binary(min_size=N * width, max_size=N * width)), UNSIGNED[width])
    cuts = np.sort(np.frombuffer(data.draw(st.binary(min_size=3, max_size=3)), np.uint8))
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, N - 1)) if N else st.just(set()))), np.uint32)
    both_ways(base, cuts, positions, base[positions][::-1].copy())


@pytest.mark.parametrize("positions", [[3, 3], [4, 2], [0, 100]], ids=str)
def test_positions_that_do_not_ascend_or_leave_the_frame_are_refused(positions: list[int]) -> None:
    base = np.zeros(100, np.uint16)
    for implementation in (kernels, exponents):
        with pytest.raises(LayoutError):
            implementation.split(base, octets(1, 2, 3), np.array(positions, np.uint32), base[:2])


@pytest.mark.parametrize("ranks", [[0, 0, 1], [1, 0, 1], [0, 100, 1], [0, 1, 1], [0, 1, (1 << 32) - 1]], ids=str)
def test_numbers_that_a_class_does_not_have_are_refused(ranks: list[int]) -> None:
    """Two in the first class, which has 100 elements, and one in the last, which has one."""
    base = np.append(np.zeros(100, np.uint16), np.uint16(0x3F80))
    for implementation in (kernels, exponents):
        with pytest.raises(BaseMismatch):
            implementation.merge(base, octets(1, 2, 3), [2, 0, 0, 1], np.array(ranks, np.uint32), base[:3])


@every_width
def test_cuts_that_do_not_ascend_are_refused(width: int) -> None:
    base, positions, values = frame(100, width)
    for implementation in (kernels, exponents):
        with pytest.raises(LayoutError):
            implementation.split(base, octets(2, 1, 3), positions, values)


# ---------------------------------------------------------------------- cuts


@every_width
@pytest.mark.parametrize("N", [0, 1, 5, 200, 70_000])
def test_cuts_ascend(N: int, width: int) -> None:
    base, positions, _ = frame(N, width)
    cuts = exponents.cuts_of(base, positions)
    assert cuts.dtype == np.uint8
    assert (cuts[1:] >= cuts[:-1]).all()


def test_cuts_separate_what_changes_often_from_what_does_not() -> None:
    """Grades below 120 change ten times as often."""
    random = np.random.default_rng(0)
    base = (random.integers(110, 130, 1 << 20).astype(np.uint16) << 7) | random.integers(0, 128, 1 << 20, np.uint16)
    share = np.where(exponents.grades_of(base) < 120, 0.1, 0.01)
    cuts = exponents.cuts_of(base, np.flatnonzero(random.random(1 << 20) < share).astype(np.uint32))
    assert 120 in cuts


# ---------------------------------------------------------------------- the codec


@pytest.mark.parametrize("share", [0.01, 0.1])
def test_a_change_that_the_old_bits_explain_is_smaller_with_them(share: float) -> None:
    base, change = scaled(1 << 21, share)
    body = SMALL.encode(change, len(base), base=base)
    assert body[0] == CLASS_SPARSE
    assert len(body) < 0.9 * len(BALANCED.encode(change, len(base)))
    found = decode(body, change, base)
    np.testing.assert_array_equal(found.positions, change.positions)
    np.testing.assert_array_equal(found.values, change.values)
    assert found.operation is change.operation


@every_width
@pytest.mark.parametrize("operation", list(Operation))
@pytest.mark.parametrize("N", [0, 1, 70, 30_000])
def test_any_width_and_operation_comes_back(N: int, width: int, operation: Operation) -> None:
    base, positions, values = frame(N, width)
    change = Change(operation, positions, values)
    body = SMALL.encode(change, N, base=base)
    assert len(body) <= raw_sparse_bytes(change)
    found = decode(body, change, base)
    np.testing.assert_array_equal(found.positions, positions)
    np.testing.assert_array_equal(found.values, values)


def test_other_old_bits_are_a_base_mismatch() -> None:
    base, change = scaled(1 << 16, 0.05)
    body = SMALL.encode(change, len(base), base=base)
    assert body[0] == CLASS_SPARSE
    for other in (np.zeros_like(base), base[:-1], base.view(np.uint32)):
        with pytest.raises(BaseMismatch):
            SMALL.decode(
                body, operation=change.operation, changed=len(change.values), numel=len(base), width=2, base=other
            )


def test_a_reader_without_the_old_bits_says_so() -> None:
    base, change = scaled(1 << 16, 0.05)
    body = SMALL.encode(change, len(base), base=base)
    with pytest.raises(PayloadError, match="without the old bits"):
        BALANCED.decode(body, operation=change.operation, changed=len(change.values), numel=len(base), width=2)


@settings(deadline=None, max_examples=200)
@given(st.data())
@example(None)
def test_any_body_is_a_change_or_a_named_error(data: st.DataObject | None) -> None:
    base, change = scaled(1 << 14, 0.3)
    body = bytearray(SMALL.encode(change, len(base), base=base))
    if data is not None:
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(body) - 1) | st.integers(1, min(120, len(body) - 1)))
            body[at] = data.draw(st.integers(0, 255))
        del body[data.draw(st.integers(1, len(body)) | st.just(len(body))) :]
    try:
        found = decode(bytes(body), change, base)
    except (PayloadError, BaseMismatch):
        return
    assert found.positions is not None
    assert len(found.positions) == len(found.values) == len(change.values)
    assert (np.diff(found.positions.astype(np.int64)) > 0).all()
    assert found.positions[-1] < len(base)
