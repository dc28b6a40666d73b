"""The compiled kernels compute what `dcr.kernels.reference` computes, bit for bit, at every level of this machine.

N elements of a table, K of them changed, T tensors.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.strategies import TENSORS, injective_tables, positions_in, random_bits, runs_in, tables

from dcr import _native, kernels
from dcr.kernels import reference
from dcr.layout.boxes import Box, Dim
from dcr.layout.views import UNSIGNED, Bits, Lanes, Positions, Table, rows_of

WIDTHS = (1, 2, 4, 8)
OPERATIONS = (kernels.OVERWRITE, kernels.XOR, kernels.STEP)
CASTS = (kernels.F32_BF16, kernels.F32_F16)
KEYS: Lanes = random_bits(1, 2 * TENSORS, 8).reshape(TENSORS, 2)
SPECIAL_F32 = [0, 1 << 31, 1, 0x7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFC12345]

every_width = pytest.mark.parametrize("width", WIDTHS)
every_cast = pytest.mark.parametrize("kind", CASTS)
examples = settings(deadline=None, max_examples=30)


@pytest.fixture(params=_native.features()["levels"], autouse=True, scope="module")
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    yield _native.use_level(request.param)
    _native.use_level(_native.features()["levels"][-1])


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def whole(bits: Bits) -> Table:
    return Table((bits,), rows_of([(0, 0, Box(0, 0, (Dim(len(bits), 1, 1),)))]))


def changed(bits: Bits, positions: Positions) -> Bits:
    """A copy in which the elements at `positions`, and no others, hold other bits."""
    other = bits.copy()
    other[positions] ^= UNSIGNED[bits.itemsize].type(1 << (8 * bits.itemsize - 1))
    return other


def compare_agrees(table: Table, base: Bits, kind: int = kernels.NONE) -> None:
    """So does `capture`, which finds the same and more."""
    expected = reference.capture(table, KEYS, base, kind)
    for found, wanted in zip(kernels.capture(table, KEYS, base, kind), expected, strict=True):
        same(found, wanted)
    for found, wanted in zip(kernels.compare(table, base, kind), expected[:2], strict=True):
        same(found, wanted)


def prepare_agrees(table: Table, positions: Positions, values: Bits, operation: int) -> None:
    prepared = kernels.prepare(table, KEYS, positions, values, operation)
    for found, expected in zip(prepared, reference.prepare(table, KEYS, positions, values, operation), strict=True):
        same(found, expected)


def test_the_level_asked_for_is_in_use(level: str) -> None:
    assert kernels.describe()["level"] == level


@every_width
@examples
@given(data=st.data())
def test_read_agrees(width: int, data: st.DataObject) -> None:
    table = data.draw(tables(width))
    same(kernels.read(table), reference.read(table))


@every_width
@examples
@given(data=st.data())
def test_compare_agrees(width: int, data: st.DataObject) -> None:
    table = data.draw(tables(width))
    compare_agrees(table, changed(reference.read(table), data.draw(positions_in(table.numel))))


@every_width
@examples
@given(data=st.data())
def test_gather_agrees(width: int, data: st.DataObject) -> None:
    table = data.draw(tables(width))
    positions = data.draw(positions_in(table.numel))
    same(kernels.gather(table, positions), reference.gather(table, positions))


@every_width
@examples
@given(data=st.data())
def test_scatter_writes_what_the_reference_writes(width: int, data: st.DataObject) -> None:
    table = data.draw(injective_tables(width))
    positions = data.draw(positions_in(table.numel))
    bits = random_bits(7, len(positions), width)
    twin = Table(tuple(storage.copy() for storage in table.storages), table.rows)
    assert kernels.scatter(table, positions, bits) == reference.scatter(twin, positions, bits) == 0
    for found, expected in zip(table.storages, twin.storages, strict=True):
        same(found, expected)


@every_width
@pytest.mark.parametrize("operation", OPERATIONS)
@examples
@given(data=st.data())
def test_prepare_agrees(operation: int, width: int, data: st.DataObject) -> None:
    table = data.draw(tables(width))
    positions = data.draw(positions_in(table.numel))
    prepare_agrees(table, positions, random_bits(7, len(positions), width), operation)


@examples
@given(data=st.data())
def test_select_agrees(data: st.DataObject) -> None:
    numel = data.draw(st.integers(0, 3000))
    positions, runs = data.draw(positions_in(numel)), data.draw(runs_in(numel))
    for found, expected in zip(kernels.select(positions, runs), reference.select(positions, runs), strict=True):
        same(found, expected)


def test_select_numbers_what_is_kept_over_the_runs_alone() -> None:
    positions = np.array([1, 4, 9, 10, 11, 30, 2**32 - 2], np.uint32)
    runs = np.array([[4, 6], [11, 2], [20, 0], [2**32 - 4, 3]], np.int64)
    indices, local = kernels.select(positions, runs)
    assert indices.tolist() == [1, 2, 4, 6]
    assert local.tolist() == [0, 5, 6, 10]


@every_width
@examples
@given(data=st.data())
def test_digest_agrees(width: int, data: st.DataObject) -> None:
    table = data.draw(tables(width))
    same(kernels.digest(table, KEYS), reference.digest(table, KEYS))


@every_width
@examples
@given(data=st.data())
def test_digest_at_agrees(width: int, data: st.DataObject) -> None:
    table = data.draw(tables(width))
    positions = data.draw(positions_in(table.numel))
    bits = random_bits(3, len(positions), data.draw(st.sampled_from(WIDTHS)))
    same(kernels.digest_at(table, KEYS, positions, bits), reference.digest_at(table, KEYS, positions, bits))


@every_cast
@examples
@given(data=st.data())
def test_kernels_with_a_cast_agree(kind: int, data: st.DataObject) -> None:
    table = data.draw(tables(4))
    for storage in table.storages:
        storage[::3] = np.resize(np.array(SPECIAL_F32, np.uint32), len(storage[::3]))
    dense = reference.read(table, kind)
    same(kernels.read(table, kind), dense)
    same(kernels.digest(table, KEYS, kind), reference.digest(table, KEYS, kind))
    compare_agrees(table, changed(dense, data.draw(positions_in(table.numel))), kind)


# Layouts larger than the pieces that kernels work in.
LARGE = {
    "one run at an odd offset": Box(3, 5, (Dim(150_001, 1, 1),)),
    "one run backwards": Box(20_000, 0, (Dim(20_001, -1, 1),)),
    "one element many times": Box(9, 0, (Dim(10_000, 0, 1),)),
    "long rows": Box(1, 0, (Dim(7, 5003, 5000), Dim(5000, 1, 1))),
    "short rows": Box(1, 0, (Dim(700, 31, 17), Dim(17, 1, 1))),
    "transposed": Box(0, 0, (Dim(101, 1, 203), Dim(203, 101, 1))),
    "transposed, far too long for a slab": Box(2, 0, (Dim(3, 1, 300_000), Dim(300_000, 4, 1))),
    "batches of transposed": Box(5, 0, (Dim(3, 40_000, 40_000), Dim(50, -1, 700), Dim(700, 57, 1))),
    "interleaved": Box(0, 0, (Dim(40, 256, 256), Dim(2, 1, 128), Dim(128, 2, 1))),
}


@every_width
@pytest.mark.parametrize("box", [pytest.param(box, id=name) for name, box in LARGE.items()])
def test_large_layouts_agree(box: Box, width: int) -> None:
    box = box._replace(here0=box.here0 - min(0, box.here_bounds[0]))
    table = Table((random_bits(2, box.here_bounds[1] + 2, width),), rows_of([(0, 2, box)]))
    dense = reference.read(table)
    same(kernels.read(table), dense)
    same(kernels.digest(table, KEYS), reference.digest(table, KEYS))
    positions = np.flatnonzero(random_bits(4, table.numel, 1) < 8).astype(np.uint32)
    compare_agrees(table, changed(dense, positions))
    same(kernels.gather(table, positions), dense[positions])
    prepare_agrees(table, positions, random_bits(6, len(positions), width), kernels.STEP)
    same(
        kernels.digest_at(table, KEYS, positions, dense[positions]),
        reference.digest_at(table, KEYS, positions, dense[positions]),
    )


@every_width
def test_compare_finds_nothing_where_nothing_changed(width: int) -> None:
    bits = random_bits(5, 70_001, width)
    positions, values = kernels.compare(whole(bits), bits.copy())
    assert len(positions) == len(values) == 0


@every_width
def test_compare_finds_everything_where_everything_changed(width: int) -> None:
    bits = random_bits(6, 70_001, width)
    positions, values = kernels.compare(whole(bits), ~bits)
    same(positions, np.arange(70_001, dtype=np.uint32))
    same(values, bits)


@every_width
@pytest.mark.parametrize("bit", [0, -1])
def test_compare_finds_a_single_bit_wherever_it_is(width: int, bit: int) -> None:
    base = random_bits(8, 300, width)
    for position in range(300):
        bits = base.copy()
        bits[position] ^= UNSIGNED[width].type(1 << (bit % (8 * width)))
        assert kernels.compare(whole(bits), base)[0].tolist() == [position]


def test_every_bf16_pattern_equals_itself_and_no_other() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    same(kernels.read(whole(patterns)), patterns)
    assert len(kernels.compare(whole(patterns), patterns.copy())[0]) == 0
    for shift in (1, 0x80, 0x8000):  # the next value, another NaN payload or exponent, the other sign
        same(kernels.compare(whole(patterns), patterns ^ np.uint16(shift))[1], patterns)


@every_cast
def test_casts_agree_on_every_upper_half_and_at_every_tie(kind: int) -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    for lower in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF):
        bits = upper | np.uint32(lower)
        same(kernels.read(whole(bits), kind), reference.cast(bits, kind))


@every_cast
@pytest.mark.parametrize(
    ("bits", "bf16", "f16"),
    [
        (0x80000000, 0x8000, 0x8000),  # -0.0
        (0x00000001, 0x0000, 0x0000),  # the smallest denormal
        (0x007FFFFF, 0x0080, 0x0000),  # the largest denormal rounds up to a normal bfloat16
        (0x00010000, 0x0001, 0x0000),  # a denormal stays one
        (0x33000000, 0x3300, 0x0000),  # 2^-25: a tie, to even
        (0x33000001, 0x3300, 0x0001),  # just above it
        (0x387FE000, 0x3880, 0x0400),  # a tie at the edge of the normal halves
        (0x477FEFFF, 0x4780, 0x7BFF),  # the last that rounds down to the largest half
        (0x477FF000, 0x4780, 0x7C00),  # 65520: the first that overflows
        (0x7F7FFFFF, 0x7F80, 0x7C00),  # the largest float32
        (0xFF800000, 0xFF80, 0xFC00),  # -infinity
        (0x7F800001, 0x7FC0, 0x7E00),  # a signalling NaN whose payload would be cut off
        (0xFFFFFFFF, 0x7FC0, 0x7E00),  # a NaN whose rounding would carry out
    ],
)
def test_casts_round_as_stated(kind: int, bits: int, bf16: int, f16: int) -> None:
    found = kernels.read(whole(np.full(67, bits, np.uint32)), kind)
    assert set(found.tolist()) == {bf16 if kind == kernels.F32_BF16 else f16}


@examples
@given(data=st.data())
def test_digest_is_digest_at_over_all_positions(data: st.DataObject) -> None:
    table = data.draw(tables(data.draw(st.sampled_from(WIDTHS))))
    everything = np.arange(table.numel, dtype=np.uint32)
    same(kernels.digest(table, KEYS), kernels.digest_at(table, KEYS, everything, kernels.read(table)))


@examples
@given(data=st.data())
def test_digest_sums_split_over_rows(data: st.DataObject) -> None:
    table = data.draw(tables(2))
    parts = [kernels.digest(Table(table.storages, table.rows[i : i + 1]), KEYS) for i in range(len(table.rows))]
    same(sum(parts, np.zeros_like(KEYS)), kernels.digest(table, KEYS))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda bits: bits[[1, 0, *range(2, len(bits))]], id="two swapped"),
        pytest.param(lambda bits: np.roll(bits, 1), id="all shifted by one"),
        pytest.param(lambda bits: bits ^ (np.arange(len(bits)) == 77).astype(bits.dtype), id="one bit flipped"),
    ],
)
@every_width
def test_both_digest_lanes_see(change: Callable[[Bits], Bits], width: int) -> None:
    bits = random_bits(9, 300, width)
    lanes, others = (kernels.digest(whole(each), KEYS)[0] for each in (bits, np.ascontiguousarray(change(bits))))
    assert (lanes != others).all()


def test_scatter_counts_positions_that_another_one_overwrote() -> None:
    twice = rows_of([(0, 0, Box(0, 0, (Dim(100, 1, 1),))), (0, 0, Box(50, 0, (Dim(100, 1, 1),)))])
    table = Table((np.zeros(150, np.uint16),), twice)
    assert kernels.scatter(table, np.arange(200, dtype=np.uint32), np.arange(200, dtype=np.uint16)) == 50


# Tables in which some elements are claimed twice, by more positions than are written before any is read back.
SHARED = {
    "boxes far apart in numbering": [Box(0, 0, (Dim(9000, 1, 1),)), Box(5000, 0, (Dim(9000, 1, 1),))],
    "rows that overlap": [Box(0, 0, (Dim(9, 1000, 1000), Dim(2000, 1, 1)))],
    "rows that come back": [Box(0, 0, (Dim(2, 0, 9000), Dim(9000, 1, 1)))],
    "rows that overlap backwards": [Box(9000, 0, (Dim(9, -1000, 1000), Dim(2000, 1, 1)))],
    "one box inside another's gap, and one over both": [
        Box(0, 0, (Dim(3, 6000, 3000), Dim(3000, 1, 1))),
        Box(3000, 0, (Dim(3000, 1, 1),)),
        Box(2500, 0, (Dim(1000, 1, 1),)),
    ],
}


@every_width
@pytest.mark.parametrize("boxes", [pytest.param(boxes, id=name) for name, boxes in SHARED.items()])
def test_scatter_counts_what_was_overwritten_long_after(boxes: list[Box], width: int) -> None:
    table = Table((np.zeros(16_000, UNSIGNED[width]),), rows_of([(0, 0, box) for box in boxes]))
    twin = Table((table.storages[0].copy(),), table.rows)
    positions = np.arange(table.numel, dtype=np.uint32)
    bits = random_bits(11, table.numel, width)
    wrong = kernels.scatter(table, positions, bits)
    assert wrong == reference.scatter(twin, positions, bits) > 0
    same(table.storages[0], twin.storages[0])


def test_scatter_notices_two_storages_over_the_same_memory() -> None:
    memory = np.zeros(9000, np.uint16)
    box = Box(0, 0, (Dim(8000, 1, 1),))
    table = Table((memory[:8000], memory[1000:]), rows_of([(0, 0, box), (1, 0, box)]))
    assert kernels.scatter(table, np.arange(16_000, dtype=np.uint32), np.arange(16_000, dtype=np.uint16)) == 7000


# Of a storage whose halves are one memory, which no address tells: what is written to one is read from the other.
MIRROR = 1 << 16  # elements of a half: whole pages, however large those are
MAP_FIXED = 0x10
MIRRORED = {
    "the last chunk": (Box(0, 0, (Dim(2, MIRROR, 1),)), 1),
    "a chunk before": (Box(0, 0, (Dim(2, MIRROR, 64), Dim(64, 1, 1))), 64),
    "backwards": (Box(MIRROR + 63, 0, (Dim(2, -MIRROR, 64), Dim(64, -1, 1))), 64),
}


def mirrored(n: int, width: int) -> Bits:
    """An array [2 n] whose halves are one memory."""
    memory = mmap.mmap(-1, 2 * n * width)
    bits = np.frombuffer(memory, UNSIGNED[width])
    remap = ctypes.CDLL(None, use_errno=True).mmap
    remap.restype = ctypes.c_void_p
    how = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED
    with tempfile.TemporaryFile() as file:
        file.truncate(n * width)
        for address in (bits.ctypes.data, bits.ctypes.data + n * width):
            at, size = ctypes.c_void_p(address), ctypes.c_size_t(n * width)
            assert remap(at, size, *how, file.fileno(), ctypes.c_long(0)) == address
    return bits


@every_width
@pytest.mark.parametrize(("box", "wrong"), [pytest.param(*case, id=name) for name, case in MIRRORED.items()])
def test_scatter_reads_back_what_it_wrote_where_no_position_seems_shared(box: Box, wrong: int, width: int) -> None:
    table = Table((mirrored(MIRROR, width),), rows_of([(0, 0, box)]))
    positions = np.arange(table.numel, dtype=np.uint32)
    assert kernels.scatter(table, positions, positions.astype(UNSIGNED[width])) == wrong


LONG = whole(random_bits(1, 1 << 24, 2))


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(lambda: kernels.digest(LONG, KEYS), id="digest"),
        pytest.param(lambda: kernels.compare(LONG, LONG.storages[0]), id="compare"),
        pytest.param(lambda: kernels.blake3(LONG.storages[0].data.cast("B")), id="blake3"),
        pytest.param(lambda: kernels.pack(LONG.storages[0].view(np.uint8)), id="pack"),
    ],
)
def test_other_threads_run_while_a_kernel_does(kernel: Callable[[], object]) -> None:
    assert any(_runs_beside(kernel) for _ in range(10))  # a busy machine may let a thread wait for long


def _runs_beside(kernel: Callable[[], object]) -> bool:
    """Whether this thread ran while another one was in the kernel."""
    started, done = threading.Event(), False

    def work() -> None:
        nonlocal done
        started.set()
        kernel()
        done = True

    interval, ran_beside = sys.getswitchinterval(), False
    sys.setswitchinterval(100)  # from now on a thread runs until it lets go by itself
    try:
        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        ran_beside = not done
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    return ran_beside


def test_compare_allocates_nothing_of_the_size_of_the_table() -> None:
    bits = random_bits(1, 1 << 25, 1)
    table, base = whole(bits), bits.copy()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of this process's memory
    before = _peak_kib()
    kernels.compare(table, base)
    assert _peak_kib() - before < 4096


def test_what_compare_found_is_freed_with_its_arrays() -> None:
    bits = random_bits(1, 1 << 20, 8)
    table, base = whole(bits), ~bits
    kernels.compare(table, base)
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak_kib()
    for _ in range(20):
        kernels.compare(table, base)
    assert _peak_kib() - before < 5 * 20 * 1024  # a call finds 20 MiB


def _peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
