"""The state digest: a sum that splits, updates in place, and notices what folded checksums miss.

The oracle mixes one element at a time with Python's integers, from the definition in `dcr.kernels.reference.mix`.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dcr import kernels
from dcr.errors import DigestMismatch
from dcr.kernels import reference
from dcr.layout.boxes import Box, Dim
from dcr.layout.schema import Schema, TensorSpec, keys
from dcr.layout.views import Lanes, Table, rows_of
from dcr.protocol import digest

examples = settings(deadline=None, max_examples=100)
MASK = (1 << 64) - 1
WEIGHT = TensorSpec("w", "bfloat16", (64,))
KEY = keys((WEIGHT,))
WORDS = st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=40).map(lambda words: np.array(words, np.uint16))


def table(bits: NDArray[np.unsignedinteger], there0: int = 0) -> Table:
    return Table((bits,), rows_of([(0, 0, Box(0, there0, (Dim(len(bits), 1, 1),)))]))


def of(bits: NDArray[np.unsignedinteger] | list[int], key: Lanes = KEY, there0: int = 0) -> Lanes:
    """The digest [1, 2] of bits [N] that lie at canonical elements there0 and on."""
    return kernels.digest(table(np.array(bits, np.uint16), there0), key)


def mixed(key: list[int], index: int, bits: int) -> tuple[int, int]:
    u = ((index ^ key[0]) * 0x9E3779B97F4A7C15) & MASK
    u ^= u >> 32
    x = (u + (bits ^ key[1]) * 0xD6E8FEB86659FD93) & MASK
    x ^= x >> 32
    x = (x * 0xBF58476D1CE4E5B9) & MASK
    x ^= x >> 29
    y = (x * 0x94D049BB133111EB) & MASK
    return x, y ^ (y >> 32)


@pytest.mark.parametrize("room", [kernels, reference], ids=["kernels", "reference"])
@examples
@given(bits=WORDS, there0=st.sampled_from([0, 5, (1 << 31) - 3, (1 << 32) - 3, 1 << 40]))
def test_it_is_the_sum_of_the_mixed_elements(room: ModuleType, bits: NDArray[np.uint16], there0: int) -> None:
    lanes = [mixed(KEY[0].tolist(), there0 + i, word) for i, word in enumerate(bits.tolist())]
    expected = [[sum(lane) & MASK for lane in zip(*lanes, strict=True)]]
    assert room.digest(table(bits, there0), KEY).tolist() == expected


@examples
@given(WORDS, st.data())
def test_it_adds_up_over_any_split(bits: NDArray[np.uint16], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(bits)))
    parts = of(bits[:at]) + of(bits[at:], there0=at)
    assert parts.tolist() == of(bits).tolist()


@examples
@given(WORDS, st.data())
def test_a_change_updates_it_by_the_sums_of_old_and_new_bits(bits: NDArray[np.uint16], data: st.DataObject) -> None:
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, len(bits) - 1)))), np.uint32)
    after = bits.copy()
    after[positions] ^= np.array(data.draw(st.lists(st.integers(0, 0xFFFF), min_size=40)), np.uint16)[: len(positions)]
    where = table(bits)
    old = kernels.digest_at(where, KEY, positions, bits[positions])
    new = kernels.digest_at(where, KEY, positions, after[positions])
    assert (of(bits) - old + new).tolist() == of(after).tolist()


@examples
@given(WORDS, st.data())
def test_two_swapped_elements_are_noticed(bits: NDArray[np.uint16], data: st.DataObject) -> None:
    i, j = (data.draw(st.integers(0, len(bits) - 1)) for _ in range(2))
    swapped = bits.copy()
    swapped[[i, j]] = bits[[j, i]]
    assert (of(swapped) == of(bits)).all() == (bits[i] == bits[j])


@examples
@given(WORDS)
def test_a_shift_by_one_is_noticed(bits: NDArray[np.uint16]) -> None:
    assert (of(np.roll(bits, 1)) == of(bits)).all() == (len(set(bits.tolist())) == 1)


@pytest.mark.parametrize("bit", range(16))
def test_one_flipped_bit_changes_both_lanes(bit: int) -> None:
    assert (of([1, 2 ^ (1 << bit), 3]) != of([1, 2, 3])).all()


@pytest.mark.parametrize(
    "pattern", [0x8000, 0x7FC0, 0xFFC0, 0x7FC1, 0x0001], ids=["-0.0", "NaN", "-NaN", "NaN'", "tiny"]
)
def test_bits_count_and_not_values(pattern: int) -> None:
    assert (of([pattern]) != of([0])).all()


def test_an_even_number_of_equal_errors_does_not_cancel_out() -> None:
    assert (of([7, 7, 0, 0]) != of([0, 0, 0, 0])).all()


@pytest.mark.parametrize(
    "other",
    [TensorSpec("v", "bfloat16", (64,)), TensorSpec("w", "float16", (64,)), TensorSpec("w", "bfloat16", (8, 8))],
    ids=["name", "dtype", "shape"],
)
def test_the_same_bits_in_another_tensor_differ(other: TensorSpec) -> None:
    assert (of([1, 2, 3], keys((other,))) != of([1, 2, 3])).all()


def test_nothing_has_the_digest_zero() -> None:
    assert digest.zero(2).tolist() == [[0, 0], [0, 0]]


def test_an_element_of_zero_bits_is_not_nothing() -> None:
    assert (of([0]) != digest.zero(1)).all()


LANES = np.array([[1, 2], [3, MASK]], np.uint64)


def test_packing_is_little_endian_and_gives_the_lanes_back() -> None:
    packed = digest.pack(LANES)
    assert packed == b"".join(word.to_bytes(8, "little") for word in (1, 2, 3, MASK))
    assert digest.unpack(packed).tolist() == LANES.tolist()


def test_the_total_is_taken_modulo_two_to_the_64() -> None:
    assert digest.total(LANES) == (4).to_bytes(8, "little") + (1).to_bytes(8, "little")


@pytest.mark.parametrize("at", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_the_root_depends_on_every_lane(at: tuple[int, int]) -> None:
    other = LANES.copy()
    other[at] ^= np.uint64(1)
    assert digest.root(other) != digest.root(LANES)


def test_the_root_depends_on_the_order_of_tensors() -> None:
    assert digest.root(LANES[::-1]) != digest.root(LANES)


def test_a_root_is_32_bytes() -> None:
    assert len(digest.root(LANES)) == 32


SEVEN = Schema(tuple(TensorSpec(f"t{i}", "bfloat16", (1,)) for i in range(7)))


def test_equal_digests_are_accepted() -> None:
    digest.require_equal(np.ones((7, 2), np.uint64), np.ones((7, 2), np.uint64), SEVEN, "held and sealed")


@pytest.mark.parametrize("lane", [0, 1])
def test_a_difference_in_one_lane_names_its_tensor(lane: int) -> None:
    found = digest.zero(7)
    found[4, lane] = 1
    with pytest.raises(DigestMismatch, match=r"held and sealed: 1 of 7 tensors differ: t4$"):
        digest.require_equal(found, digest.zero(7), SEVEN, "held and sealed")


def test_many_differences_are_counted_and_the_first_named() -> None:
    with pytest.raises(DigestMismatch, match="7 of 7 tensors differ: t0, t1, t2, t3, t4 and 2 more"):
        digest.require_equal(np.ones((7, 2), np.uint64), digest.zero(7), SEVEN, "held and sealed")
