"""What the compiled kernels refuse, before anything is written, and offsets that do not fit 32 bits."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
import pytest

from dcr import _native, kernels
from dcr.errors import LayoutError
from dcr.layout.boxes import MAX_DIMS, Box, Dim
from dcr.layout.views import HERE, HERE_STRIDES, NDIM, SIZES, STORAGE, TENSOR, Bits, Rows, Table, rows_of

KEYS = np.arange(4, dtype=np.uint64).reshape(2, 2)


def two_rows() -> Table:
    """Twelve elements, four of storage 0 and eight (two dims) of storage 1, all zero."""
    entries = [(0, 0, Box(1, 0, (Dim(4, 2, 1),))), (1, 1, Box(0, 0, (Dim(2, 5, 4), Dim(4, 1, 1))))]
    return Table((np.zeros(8, np.uint16), np.zeros(9, np.uint16)), rows_of(entries))


EVERY = np.arange(12, dtype=np.uint32)
ONES = np.ones(12, np.uint16)
CALLS: dict[str, Callable[[Table], object]] = {
    "read": kernels.read,
    "compare": lambda table: kernels.compare(table, ONES),
    "capture": lambda table: kernels.capture(table, KEYS, ONES),
    "gather": lambda table: kernels.gather(table, EVERY),
    "prepare": lambda table: kernels.prepare(table, KEYS, EVERY, ONES, kernels.STEP),
    "scatter": lambda table: kernels.scatter(table, EVERY, ONES),
    "digest": lambda table: kernels.digest(table, KEYS),
    "digest_at": lambda table: kernels.digest_at(table, KEYS, EVERY, ONES),
}


WITH_KEYS = ("capture", "prepare", "digest", "digest_at")


def refused(table: Table, call: Callable[[Table], object]) -> None:
    """The call raises, and no storage has been written to."""
    with pytest.raises(LayoutError):
        call(table)
    assert not any(storage.any() for storage in table.storages)


def set_dims(rows: Rows, sizes: list[int], strides: list[int]) -> None:
    rows[1, NDIM] = len(sizes)
    rows[1, SIZES.start : SIZES.start + len(sizes)] = sizes
    rows[1, HERE_STRIDES.start : HERE_STRIDES.start + len(sizes)] = strides


# A row that was right when its table was made and is overwritten later: kernels look again.
DAMAGE: dict[str, Callable[[Rows], None]] = {
    "ends one behind the storage": lambda rows: rows.__setitem__((1, HERE), 1),
    "starts one before the storage": lambda rows: rows.__setitem__((1, HERE), -1),
    "goes below the storage by a stride": lambda rows: set_dims(rows, [2, 4], [-1, 1]),
    "ends inside the storage, modulo 2^64": lambda rows: set_dims(rows, [2, 4], [5, -0x5555555555555555]),
    "no such storage": lambda rows: rows.__setitem__((1, STORAGE), 2),
    "negative storage": lambda rows: rows.__setitem__((1, STORAGE), -1),
    "too many dims": lambda rows: rows.__setitem__((1, NDIM), MAX_DIMS + 1),
    "negative dims": lambda rows: rows.__setitem__((1, NDIM), -1),
    "negative extent": lambda rows: set_dims(rows, [-2, -4], [0, 0]),
    "2^32 elements": lambda rows: set_dims(rows, [2**16, 2**16], [0, 0]),
    "2^64 elements": lambda rows: set_dims(rows, [2**32, 2**32], [0, 0]),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_rows_are_checked_again(damage: Callable[[Rows], None], call: Callable[[Table], object]) -> None:
    table = two_rows()
    damage(table.rows)
    refused(table, call)


def test_rows_of_2_32_elements_in_all_are_refused() -> None:
    table = two_rows()
    set_dims(table.rows, [2**32 - 1], [0])
    refused(table, lambda table: kernels.gather(table, EVERY[:3]))


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([[4, 2], [5, 2]], id="overlap"),
        pytest.param([[4, 2], [0, 2]], id="descend"),
        pytest.param([[-1, 2]], id="below zero"),
        pytest.param([[0, 2], [3, -1]], id="negative count"),
        pytest.param([[1 << 32, 1]], id="beyond 32 bits"),
        pytest.param([[0, (1 << 32) - 1], [(1 << 32) - 1, 1]], id="2^32 elements"),
        pytest.param([[0, (1 << 63) - 1]], id="2^63 elements"),
    ],
)
def test_runs_that_are_no_set_of_numbers_are_refused(runs: list[list[int]]) -> None:
    with pytest.raises(LayoutError):
        kernels.select(EVERY, np.array(runs, np.int64))


def test_select_refuses_positions_that_do_not_ascend() -> None:
    with pytest.raises(LayoutError):
        kernels.select(EVERY[::-1].copy(), np.array([[0, 12]], np.int64))


@pytest.mark.parametrize("tensor", [-1, 2])
@pytest.mark.parametrize("call", [CALLS[name] for name in WITH_KEYS], ids=WITH_KEYS)
def test_a_tensor_without_a_key_is_refused(call: Callable[[Table], object], tensor: int) -> None:
    table = two_rows()
    table.rows[1, TENSOR] = tensor
    refused(table, call)


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param(np.array([0, 2, 1], np.uint32), id="out of order"),
        pytest.param(np.array([0, 1, 1], np.uint32), id="repeated"),
        pytest.param(np.array([0, 1, 12], np.uint32), id="behind the end"),
        pytest.param(np.array([0, 1, 2**32 - 1], np.uint32), id="far behind the end"),
        pytest.param(np.array([0, 1, 2], np.int64), id="of another type"),
        pytest.param(np.arange(6, dtype=np.uint32)[::2], id="not contiguous"),
    ],
)
@pytest.mark.parametrize("name", ["gather", "prepare", "scatter", "digest_at"])
def test_positions_that_cannot_be_meant_are_refused(name: str, positions: np.ndarray) -> None:
    bits = np.ones(3, np.uint16)
    calls: dict[str, Callable[[Table], object]] = {
        "gather": lambda table: kernels.gather(table, positions),
        "prepare": lambda table: kernels.prepare(table, KEYS, positions, bits, kernels.STEP),
        "scatter": lambda table: kernels.scatter(table, positions, bits),
        "digest_at": lambda table: kernels.digest_at(table, KEYS, positions, bits),
    }
    refused(two_rows(), calls[name])


WRONG_BITS = [
    pytest.param(np.ones(11, np.uint16), id="too few"),
    pytest.param(np.ones(13, np.uint16), id="too many"),
    pytest.param(np.ones(12, np.uint32), id="too wide"),
    pytest.param(np.ones(12, np.uint8), id="too narrow"),
    pytest.param(np.ones(12, np.int16), id="signed"),
    pytest.param(np.ones(12, np.float16), id="values"),
    pytest.param(np.ones(24, np.uint16)[::2], id="not contiguous"),
    pytest.param(np.ones((2, 6), np.uint16), id="two-dimensional"),
    pytest.param(np.ones(12, ">u2"), id="in network order"),
]


@pytest.mark.parametrize("bits", WRONG_BITS)
def test_scatter_refuses_bits_that_do_not_fit(bits: np.ndarray) -> None:
    refused(two_rows(), lambda table: kernels.scatter(table, EVERY, bits))


@pytest.mark.parametrize("values", WRONG_BITS)
def test_prepare_refuses_values_that_do_not_fit(values: np.ndarray) -> None:
    refused(two_rows(), lambda table: kernels.prepare(table, KEYS, EVERY, values, kernels.XOR))


@pytest.mark.parametrize("operation", [-1, 3])
def test_prepare_refuses_an_unknown_operation(operation: int) -> None:
    refused(two_rows(), lambda table: kernels.prepare(table, KEYS, EVERY, ONES, operation))


@pytest.mark.parametrize("base", WRONG_BITS)
def test_compare_refuses_a_base_that_does_not_fit(base: np.ndarray) -> None:
    refused(two_rows(), lambda table: kernels.compare(table, base))
    refused(two_rows(), lambda table: kernels.capture(table, KEYS, base))


def test_scatter_refuses_a_read_only_storage_behind_a_writeable_one() -> None:
    table = two_rows()
    table.storages[1].flags.writeable = False
    refused(table, CALLS["scatter"])


def test_reading_a_read_only_storage_is_allowed() -> None:
    table = two_rows()
    for storage in table.storages:
        storage.flags.writeable = False
    assert len(kernels.read(table)) == 12


def test_storages_of_two_widths_are_refused() -> None:
    table = two_rows()
    object.__setattr__(table, "storages", (table.storages[0], np.zeros(9, np.uint32)))
    refused(table, kernels.read)


@pytest.mark.parametrize("kind", [-1, 3, kernels.F32_BF16, kernels.F32_F16])
def test_a_value_map_that_does_not_fit_is_refused(kind: int) -> None:
    refused(two_rows(), lambda table: kernels.read(table, kind))


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="portable"):
        _native.use_level("mmx")


def test_a_table_without_rows_is_empty() -> None:
    table = Table((), rows_of([]))
    assert len(kernels.read(table)) == 0
    assert kernels.scatter(table, EVERY[:0], ONES[:0]) == 0
    assert not kernels.digest(table, KEYS).any()


NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux; named since python 3.13


def reserved(elements: int, width: int) -> Bits:
    """A storage of zeros that takes memory only where it is touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return np.frombuffer(mmap.mmap(-1, elements * width, flags=flags), f"u{width}")


EDGES = (2**31, 2**32)


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("edge", EDGES)
def test_a_run_across_an_edge_of_32_bits_is_one_run(edge: int, width: int) -> None:
    storage = reserved(2**32 + 4096, width)
    table = Table((storage,), rows_of([(0, 0, Box(edge - 100, edge - 100, (Dim(200, 1, 1),)))]))
    values = np.arange(1, 201, dtype=storage.dtype)
    assert kernels.scatter(table, np.arange(200, dtype=np.uint32), values) == 0
    np.testing.assert_array_equal(storage[edge - 100 : edge + 100], values)
    assert not storage[:4096].any()
    np.testing.assert_array_equal(kernels.read(table), values)
    assert kernels.compare(table, np.zeros(200, storage.dtype))[1].tolist() == values.tolist()


@pytest.mark.parametrize("stride", [2**31, -(2**31)])
def test_strides_may_exceed_32_bits(stride: int) -> None:
    storage = reserved(2**32 + 4096, 1)
    rows = rows_of([(0, 0, Box(2**31 - stride, 0, (Dim(3, stride, 7), Dim(5, 3, 1))))])
    table, values = Table((storage,), rows), np.arange(1, 16, dtype=np.uint8)
    assert kernels.scatter(table, np.arange(15, dtype=np.uint32), values) == 0
    for i, first in enumerate(sorted((0, 2**31, 2**32), reverse=stride < 0)):
        assert storage[first : first + 15 : 3].tolist() == values[5 * i : 5 * i + 5].tolist()
    np.testing.assert_array_equal(kernels.read(table), values)


def test_strides_of_the_innermost_dim_may_exceed_32_bits() -> None:
    storage = reserved(2**32 + 4096, 1)
    table = Table((storage,), rows_of([(0, 0, Box(9, 0, (Dim(2, 1, 3), Dim(3, 2**31, 1))))]))
    values = np.arange(1, 7, dtype=np.uint8)
    assert kernels.scatter(table, np.arange(6, dtype=np.uint32), values) == 0
    assert storage[[9, 9 + 2**31, 9 + 2**32, 10, 10 + 2**31, 10 + 2**32]].tolist() == values.tolist()
    np.testing.assert_array_equal(kernels.read(table), values)


def test_positions_use_all_their_32_bits() -> None:
    storage = reserved(2**32 + 4096, 2)
    table = Table((storage,), rows_of([(0, 0, Box(4000, 0, (Dim(2**32 - 1, 1, 1),)))]))
    positions, values = np.array([0, 2**31 + 3, 2**32 - 2], np.uint32), np.array([1, 2, 3], np.uint16)
    assert kernels.scatter(table, positions, values) == 0
    assert storage[[4000, 4003 + 2**31, 3998 + 2**32]].tolist() == [1, 2, 3]
    assert kernels.gather(table, positions).tolist() == [1, 2, 3]


def test_a_table_may_hold_one_element_less_than_2_32() -> None:
    table = Table((np.arange(7, dtype=np.uint8),), rows_of([(0, 0, Box(6, 9, (Dim(2**32 - 1, 0, 0),)))]))
    last = np.array([0, 2**31, 2**32 - 2], np.uint32)
    assert kernels.gather(table, last).tolist() == [6, 6, 6]


def test_canonical_indices_beyond_32_bits_count() -> None:
    def lanes(there: int) -> list[int]:
        table = Table((np.ones(1, np.uint8),), rows_of([(0, 0, Box(0, there))]))
        return kernels.digest(table, KEYS[:1])[0].tolist()

    assert len({value for there in (5, 2**31 + 5, 2**32 + 5, 2**40 + 5) for value in lanes(there)}) == 8


def test_large_results_use_memory_that_is_free_again_and_no_other() -> None:
    rows = rows_of([(0, 0, Box(0, 0, (Dim(1 << 16, 1, 1),)))])
    table = Table((np.arange(1 << 16, dtype=np.uint16),), rows)
    held = [kernels.read(table) for _ in range(4)]
    assert len({bits.ctypes.data for bits in held}) == len(held)
    for number, bits in enumerate(held):
        bits.fill(number)
    assert [(int(bits[0]), int(bits[-1])) for bits in held] == [(n, n) for n in range(len(held))]
    del bits
    freed = held.pop().ctypes.data
    again = kernels.read(table)
    assert again.ctypes.data == freed
    assert again.ctypes.data not in {bits.ctypes.data for bits in held}
    np.testing.assert_array_equal(again, np.arange(1 << 16, dtype=np.uint16))
