"""Codecs: every change comes back bit for bit, and no body, however it was made, gives anything but a sound change.

N  elements of a frame      K  changed elements
"""

from __future__ import annotations

import struct
import tomllib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dcr import kernels
from dcr.codecs import codec
from dcr.codecs.codec import (
    BALANCED,
    FAST,
    GAPS,
    GAPS_SPARSE,
    HUFFMAN,
    PLANES_DENSE,
    RAW,
    RAW_DENSE,
    RAW_SPARSE,
    STORED,
    ZSTD,
    Gaps,
    Raw,
)
from dcr.codecs.patch import Change, Operation
from dcr.errors import LayoutError, PayloadError
from dcr.layout.views import UNSIGNED

examples = settings(deadline=None, max_examples=100)
CODECS = pytest.mark.parametrize("kind", [RAW, FAST, GAPS], ids=["raw", "fast", "gaps"])
WIDTHS = pytest.mark.parametrize("width", [1, 2, 4, 8])
STREAM = struct.Struct("<BII")


def sparse(positions: list[int], values: list[int], width: int = 2, operation: Operation = Operation.STEP) -> Change:
    return Change(operation, np.array(positions, np.uint32), np.array(values, UNSIGNED[width]))


def dense(values: list[int] | NDArray[np.unsignedinteger], width: int = 2) -> Change:
    return Change(Operation.OVERWRITE, None, np.array(values, UNSIGNED[width]))


def decode(body: bytes, change: Change, numel: int) -> Change:
    """Decode a body under the header that `change` would have."""
    return codec.decode(
        body, operation=change.operation, changed=len(change.values), numel=numel, width=change.values.itemsize
    )


def assert_same(found: Change, expected: Change) -> None:
    assert found.operation is expected.operation
    assert found.values.dtype == expected.values.dtype
    np.testing.assert_array_equal(found.values, expected.values)
    if expected.positions is None:
        assert found.positions is None
    else:
        assert found.positions is not None
        assert found.positions.dtype == np.uint32
        np.testing.assert_array_equal(found.positions, expected.positions)


def assert_sound(found: Change, changed: int, numel: int, width: int) -> None:
    """What a receiver relies on: K values of the width, at ascending positions within the frame, or all N."""
    assert found.values.dtype == UNSIGNED[width]
    if found.positions is None:
        assert found.operation is Operation.OVERWRITE
        assert len(found.values) == changed == numel
    else:
        assert len(found.values) == len(found.positions) == changed
        places = found.positions.astype(np.int64)
        assert (np.diff(places, prepend=-1) > 0).all()
        assert (places < numel).all()


@st.composite
def changes(draw: st.DrawFn, *, most: int = 60) -> tuple[Change, int]:
    """A change and its frame's N; positions near and far, values small steps or any bits."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    top = 2 ** (8 * width)
    word = st.integers(0, top - 1) | st.integers(-130, 130).map(lambda step: step % top)
    if draw(st.booleans()):
        values = draw(st.lists(word, max_size=most))
        return dense(values, width), len(values)
    gaps = draw(st.lists(st.integers(0, 3) | st.integers(250, 800) | st.integers(0, 20_000), max_size=most))
    positions = (np.cumsum(np.array(gaps, np.int64) + 1) - 1).tolist()
    values = draw(st.lists(word, min_size=len(positions), max_size=len(positions)))
    numel = (positions[-1] if positions else 0) + 1 + draw(st.integers(0, 600))
    return sparse(positions, values, width, draw(st.sampled_from(list(Operation)))), numel


# ---------------------------------------------------------------------- round trips


@CODECS
@examples
@given(drawn=changes())
def test_a_change_comes_back_bit_for_bit(kind: Raw | Gaps, drawn: tuple[Change, int]) -> None:
    change, numel = drawn
    assert_same(decode(kind.encode(change, numel), change, numel), change)


@CODECS
@examples
@given(drawn=changes())
def test_no_body_is_larger_than_the_worst_case(kind: Raw | Gaps, drawn: tuple[Change, int]) -> None:
    change, numel = drawn
    assert len(kind.encode(change, numel)) <= codec.worst_case_bytes(numel, change.values.itemsize)


@CODECS
@WIDTHS
def test_random_bits_at_all_positions_stay_within_the_worst_case(kind: Raw | Gaps, width: int) -> None:
    numel = 5000
    values = np.random.default_rng(width).integers(0, 256, numel * width, np.uint8).view(UNSIGNED[width])
    for change in (
        Change(Operation.XOR, np.arange(numel, dtype=np.uint32), values),
        Change(Operation.OVERWRITE, None, values),
    ):
        body = kind.encode(change, numel)
        assert len(body) <= codec.worst_case_bytes(numel, width)
        assert_same(decode(body, change, numel), change)


@CODECS
@pytest.mark.parametrize("operation", Operation)
def test_all_65536_patterns_come_back(kind: Raw | Gaps, operation: Operation) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    change = Change(operation, np.arange(1 << 16, dtype=np.uint32) * 3, patterns)
    assert_same(decode(kind.encode(change, 3 << 16), change, 3 << 16), change)


@CODECS
def test_all_65536_patterns_come_back_dense(kind: Raw | Gaps) -> None:
    change = dense(np.arange(1 << 16, dtype=np.uint16))
    assert_same(decode(kind.encode(change, 1 << 16), change, 1 << 16), change)


@CODECS
@WIDTHS
@pytest.mark.parametrize("numel", [0, 1, 7])
def test_no_changes_come_back_as_none(kind: Raw | Gaps, width: int, numel: int) -> None:
    change = sparse([], [], width)
    assert_same(decode(kind.encode(change, numel), change, numel), change)


@CODECS
@WIDTHS
def test_a_change_of_every_element_comes_back(kind: Raw | Gaps, width: int) -> None:
    change = sparse(list(range(300)), [7] * 300, width)
    assert_same(decode(kind.encode(change, 300), change, 300), change)


@CODECS
@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 765, 65_536])
def test_a_gap_at_an_escape_boundary_comes_back(kind: Raw | Gaps, gap: int) -> None:
    change = sparse([gap, 2 * gap + 1, 2 * gap + 2], [1, 2, 3])
    assert_same(decode(kind.encode(change, 2 * gap + 3), change, 2 * gap + 3), change)


@CODECS
def test_zero_values_of_an_overwrite_come_back(kind: Raw | Gaps) -> None:
    change = sparse([0, 5, 6], [0, 0, 3], operation=Operation.OVERWRITE)
    assert_same(decode(kind.encode(change, 9), change, 9), change)


@CODECS
@WIDTHS
def test_steps_at_the_symbol_boundary_come_back(kind: Raw | Gaps, width: int) -> None:
    top = 2 ** (8 * width)
    steps = [s % top for s in (1, -1, 127, -127, 128, -128, 129, -129, top // 2, top // 2 - 1, 0)]
    change = sparse(list(range(len(steps))), steps, width)
    assert_same(decode(kind.encode(change, 50), change, 50), change)


@CODECS
@pytest.mark.parametrize("last", [(1 << 31) - 1, 1 << 31, (1 << 32) - 2])
def test_positions_at_the_32_bit_limits_come_back(kind: Raw | Gaps, last: int) -> None:
    change = sparse([3, last], [1, 2])
    assert_same(decode(kind.encode(change, (1 << 32) - 1), change, (1 << 32) - 1), change)


@CODECS
def test_the_same_change_always_gives_the_same_bytes(kind: Raw | Gaps) -> None:
    change = sparse(list(range(0, 5000, 5)), [3] * 1000)
    assert kind.encode(change, 5000) == kind.encode(change, 5000)


def test_small_steps_cost_about_two_bytes_each_before_compression() -> None:
    body = GAPS.encode(sparse(list(range(0, 2000, 2)), [1, 0xFFFF] * 500), 2000)
    assert len(body) < 2 * 1000 + 28


# ---------------------------------------------------------------------- names, sizes, choices


def test_gaps_and_balanced_are_one_codec() -> None:
    assert GAPS is BALANCED
    assert (RAW.name, FAST.name, BALANCED.name) == ("raw", "fast", "gaps")


def test_every_codec_can_be_asked_for_by_its_name_and_found_by_that_of_its_chunks() -> None:
    points = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]
    found = {
        name: getattr(codec, value.removeprefix("dcr.codecs.codec:")) for name, value in points["dcr.codecs"].items()
    }
    assert found["balanced"] is BALANCED
    assert found["fast"] is FAST
    assert all(found[kind.name] is kind for kind in (RAW, FAST, GAPS))


def encodings(body: bytes) -> list[int]:
    """The encoding of each stream of a body."""
    at, found = 1, []
    while at < len(body):
        encoding, _, size = STREAM.unpack_from(body, at)
        found.append(encoding)
        at += STREAM.size + size
    return found


def scattered(numel: int, density: float, width: int = 2, *, seed: int = 1) -> Change:
    """Steps of mostly one unit, as an optimizer makes them, at independent positions."""
    random = np.random.default_rng(seed)
    positions = np.flatnonzero(random.random(numel) < density).astype(np.uint32)
    steps = random.geometric(0.85, len(positions)) * random.choice([-1, 1], len(positions))
    return Change(Operation.STEP, positions, steps.astype(f"i{width}").view(UNSIGNED[width]))


def test_each_stream_gets_the_encoding_that_makes_it_smallest() -> None:
    random = np.random.default_rng(0)
    steps = scattered(80_000, 0.05)
    assert encodings(GAPS.encode(steps, 80_000)) == [HUFFMAN, HUFFMAN, STORED]
    every_tenth = Change(Operation.STEP, np.arange(len(steps.values), dtype=np.uint32) * 10, steps.values)
    assert encodings(GAPS.encode(every_tenth, 80_000)) == [ZSTD, HUFFMAN, STORED]
    bits = random.integers(0, 1 << 16, len(steps.values)).astype(np.uint16)
    assert encodings(GAPS.encode(Change(Operation.XOR, steps.positions, bits), 80_000)) == [HUFFMAN, ZSTD, STORED]
    weights = (random.standard_normal(50_000, np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    assert encodings(GAPS.encode(dense(weights), 50_000)) == [STORED, HUFFMAN]


def test_dense_data_that_repeats_is_left_to_zstd() -> None:
    block = (np.random.default_rng(3).standard_normal(1000, np.float32).view(np.uint32) >> np.uint32(16)).astype(
        np.uint16
    )
    body = GAPS.encode(dense(np.tile(block, 60)), 60_000)
    assert encodings(body) == [ZSTD, ZSTD]
    assert len(body) < 4000


def test_fast_stores_every_stream() -> None:
    assert set(encodings(FAST.encode(scattered(100_000, 0.02), 100_000))) == {STORED}
    assert encodings(FAST.encode(dense([7] * 5000), 5000)) == [STORED]


@pytest.mark.parametrize("density", [0.003, 0.01, 0.03, 0.05])
def test_balanced_is_within_three_percent_of_the_entropy_of_positions_and_steps(density: float) -> None:
    numel = 1 << 22
    change = scattered(numel, density)
    share = len(change.values) / numel
    positions_bits = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share
    shares = np.unique(change.values, return_counts=True)[1] / len(change.values)
    steps_bits = max(2.0, float(-(shares * np.log2(shares)).sum()))  # Huffman: half of them are coded in 1 bit, or more
    per_change = len(GAPS.encode(change, numel)) / len(change.values)
    assert per_change < 1.035 * (positions_bits + steps_bits) / 8


@pytest.mark.parametrize("kind", [FAST, GAPS], ids=["fast", "gaps"])
@examples
@given(drawn=changes())
def test_a_sparse_body_is_never_larger_than_raw(kind: Gaps, drawn: tuple[Change, int]) -> None:
    change, numel = drawn
    if change.positions is not None:
        assert len(kind.encode(change, numel)) <= len(RAW.encode(change, numel)) == codec.raw_sparse_bytes(change)


@CODECS
@WIDTHS
@pytest.mark.parametrize("numel", [1, 2, 3, 5, 100, 40_000])
def test_what_construct_sends_is_never_larger_than_dense(kind: Raw | Gaps, width: int, numel: int) -> None:
    """Construct sends a sparse patch only where positions and bits take less than the frame; raw adds 19 bytes."""
    changed = max((k for k in range(numel + 1) if k * (4 + width) < numel * width), default=0)
    random = np.random.default_rng(numel)
    places = {
        "spread": np.sort(random.choice(numel, changed, replace=False)),
        "first": np.arange(changed),
        "last": np.arange(numel - changed, numel),
    }
    values = random.integers(0, 256, changed * width, np.uint8).view(UNSIGNED[width])
    for positions in places.values():
        body = kind.encode(Change(Operation.XOR, positions.astype(np.uint32), values), numel)
        assert len(body) <= numel * width + 19
    whole = Change(Operation.OVERWRITE, None, random.integers(0, 256, numel * width, np.uint8).view(UNSIGNED[width]))
    assert len(kind.encode(whole, numel)) <= numel * width + 1 + 9 * width


@CODECS
@pytest.mark.parametrize("position", [0, 1, (1 << 22) - 1])
def test_a_single_change_of_a_large_frame_takes_few_bytes(kind: Raw | Gaps, position: int) -> None:
    change = sparse([position], [1])
    body = kind.encode(change, 1 << 22)
    assert len(body) <= 31
    assert_same(decode(body, change, 1 << 22), change)


@CODECS
def test_a_whole_large_frame_comes_back(kind: Raw | Gaps) -> None:
    numel = 1 << 22
    values = np.random.default_rng(2).integers(0, 1 << 16, numel).astype(np.uint16)
    for change in (
        Change(Operation.XOR, np.arange(numel, dtype=np.uint32), values),
        Change(Operation.OVERWRITE, None, values),
        scattered(numel, 0.01),
    ):
        assert_same(decode(kind.encode(change, numel), change, numel), change)


@pytest.mark.parametrize("kind", [FAST, GAPS], ids=["fast", "gaps"])
def test_positions_that_do_not_ascend_are_not_encoded(kind: Gaps) -> None:
    with pytest.raises(LayoutError):
        kind.encode(sparse([5, 4], [1, 2]), 9)


# ---------------------------------------------------------------------- the format


def test_the_raw_sparse_format() -> None:
    body = RAW.encode(sparse([1, 0x0102], [0x0304, 0xFFFE]), 1000)
    positions = [STORED, 8, 0, 0, 0, 8, 0, 0, 0, *(1, 0, 0, 0, 2, 1, 0, 0)]
    values = [STORED, 4, 0, 0, 0, 4, 0, 0, 0, *(4, 3, 0xFE, 0xFF)]
    assert body == bytes([RAW_SPARSE, *positions, *values])


def test_the_raw_dense_format() -> None:
    assert RAW.encode(dense([0x0102, 3]), 2) == bytes([RAW_DENSE, STORED, 4, 0, 0, 0, 4, 0, 0, 0, 2, 1, 3, 0])


def test_the_gaps_format() -> None:
    body = GAPS.encode(sparse([1, 2, 258, 514], [1, 0xFFFF, 0x0203, 0]), 1000)
    gaps = [1, 0, 255, 0, 255, 0]
    symbols = [1, 0, 255, 255]
    exceptions = [3, 2, 0, 0]
    streams = [[STORED, len(s), 0, 0, 0, len(s), 0, 0, 0, *s] for s in (gaps, symbols, exceptions)]
    assert body == bytes([GAPS_SPARSE, *streams[0], *streams[1], *streams[2]])


def test_the_planes_format() -> None:
    body = GAPS.encode(dense([0x0102, 0x0304]), 2)
    assert body == bytes([PLANES_DENSE, STORED, 2, 0, 0, 0, 2, 0, 0, 0, 2, 4, STORED, 2, 0, 0, 0, 2, 0, 0, 0, 1, 3])


# ---------------------------------------------------------------------- bodies that are not what they say


def stored(data: bytes, *, raw_size: int | None = None, encoding: int = STORED) -> bytes:
    return STREAM.pack(encoding, len(data) if raw_size is None else raw_size, len(data)) + data


def packed(data: bytes, *, raw_size: int | None = None) -> bytes:
    return stored(
        zstandard.ZstdCompressor().compress(data), raw_size=len(data) if raw_size is None else raw_size, encoding=ZSTD
    )


def attempt(body: bytes, changed: int, numel: int, width: int, operation: Operation = Operation.STEP) -> None:
    """Decode: PayloadError or a sound change, nothing else."""
    try:
        found = codec.decode(body, operation=operation, changed=changed, numel=numel, width=width)
    except PayloadError:
        return
    assert_sound(found, changed, numel, width)


SAMPLES = [
    (sparse([0, 3, 300, 900], [1, 0xFFFF, 0x1234, 0]), 1000),
    (sparse(list(range(0, 600, 2)), [1] * 300), 600),
    (dense([1, 2, 3, 4]), 4),
    (dense([5] * 300), 300),
    (sparse(list(range(0, 700, 3)), [1, 0xFFFF, 1, 2, 0xFFFF, 1, 0x4000] * 33 + [1] * 3), 701),
]
SAMPLE_BODIES = pytest.mark.parametrize(
    ("change", "numel", "body"),
    [(change, numel, kind.encode(change, numel)) for kind in (RAW, FAST, GAPS) for change, numel in SAMPLES],
    ids=[
        f"{kind}-{name}"
        for kind in ("raw", "fast", "gaps")
        for name in ("sparse", "steps", "dense", "constant", "mixed")
    ],
)


@SAMPLE_BODIES
def test_every_truncation_is_refused(change: Change, numel: int, body: bytes) -> None:
    for size in range(len(body)):
        with pytest.raises(PayloadError):
            decode(body[:size], change, numel)


@SAMPLE_BODIES
def test_every_flipped_bit_is_refused_or_gives_a_sound_change(change: Change, numel: int, body: bytes) -> None:
    for at in range(min(len(body), 150)):
        for bit in range(8):
            flipped = bytearray(body)
            flipped[at] ^= 1 << bit
            attempt(bytes(flipped), len(change.values), numel, 2, change.operation)


@SAMPLE_BODIES
def test_bytes_after_the_last_stream_are_refused(change: Change, numel: int, body: bytes) -> None:
    with pytest.raises(PayloadError, match="follow the last stream"):
        decode(body + b"\0", change, numel)


@settings(deadline=None, max_examples=250)
@given(changes(most=20), st.sampled_from([RAW, FAST, GAPS]), st.data())
def test_a_mutated_body_is_refused_or_gives_a_sound_change(
    drawn: tuple[Change, int], kind: Raw | Gaps, data: st.DataObject
) -> None:
    change, numel = drawn
    body = bytearray(kind.encode(change, numel))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=5))
    changed = data.draw(st.just(len(change.values)) | st.integers(-1, 70))
    attempt(bytes(body), changed, numel, change.values.itemsize, change.operation)


@settings(deadline=None, max_examples=250)
@given(
    kind=st.integers(0, 4),
    streams=st.lists(
        st.builds(lambda data, size: stored(data, raw_size=size), st.binary(max_size=9), st.none() | st.integers(0, 40))
        | st.builds(
            lambda data, size: packed(data, raw_size=size), st.binary(max_size=9), st.none() | st.integers(0, 40)
        ),
        max_size=4,
    ),
    changed=st.integers(0, 6),
    numel=st.integers(0, 6),
    width=st.sampled_from([1, 2, 4, 8]),
    operation=st.sampled_from(list(Operation)),
)
def test_well_formed_streams_that_lie_are_refused_or_give_a_sound_change(
    kind: int, streams: list[bytes], changed: int, numel: int, width: int, operation: Operation
) -> None:
    attempt(bytes([kind]) + b"".join(streams), changed, numel, width, operation)


def refuse(body: bytes, *, changed: int, numel: int, width: int = 2, operation: Operation = Operation.STEP) -> str:
    with pytest.raises(PayloadError) as caught:
        codec.decode(body, operation=operation, changed=changed, numel=numel, width=width)
    return str(caught.value)


def test_an_empty_body_is_refused() -> None:
    refuse(b"", changed=0, numel=4)


def test_an_unknown_format_is_refused() -> None:
    assert "unknown body format 4" in refuse(b"\x04", changed=0, numel=4)


def test_more_changes_than_elements_are_refused() -> None:
    assert "5 changes in a frame of 4" in refuse(RAW.encode(sparse([0], [1]), 4), changed=5, numel=4)


def test_a_frame_beyond_32_bits_is_refused() -> None:
    for kind in (RAW, GAPS):
        refuse(kind.encode(sparse([0], [1]), 4), changed=1, numel=1 << 32)


def test_an_unknown_encoding_is_refused() -> None:
    body = bytes([RAW_SPARSE]) + stored(b"", encoding=3) + stored(b"")
    assert "unknown encoding 3" in refuse(body, changed=0, numel=4)


def test_a_stream_above_its_cap_is_refused() -> None:
    body = bytes([RAW_SPARSE]) + stored(bytes(8)) + stored(bytes(2))
    assert "stream 0 declares 8 bytes" in refuse(body, changed=1, numel=4)


@pytest.mark.parametrize("size", [1, 2, 3], ids=lambda size: f"{size} bytes")
def test_raw_positions_that_are_short_are_refused(size: int) -> None:
    refuse(bytes([RAW_SPARSE]) + stored(bytes(size)) + stored(bytes(2)), changed=1, numel=4)


def test_raw_values_that_are_no_whole_elements_are_refused() -> None:
    refuse(bytes([RAW_SPARSE]) + stored(bytes(4)) + stored(bytes(1)), changed=1, numel=4)


@pytest.mark.parametrize("size", [0, 2, 7])
def test_a_dense_body_that_is_short_is_refused(size: int) -> None:
    refuse(bytes([RAW_DENSE]) + stored(bytes(size)), changed=4, numel=4, operation=Operation.OVERWRITE)


def test_a_short_byte_plane_is_refused() -> None:
    body = bytes([PLANES_DENSE]) + stored(bytes(4)) + stored(bytes(3))
    refuse(body, changed=4, numel=4, operation=Operation.OVERWRITE)


@pytest.mark.parametrize("operation", [Operation.XOR, Operation.STEP])
def test_a_dense_body_that_is_relative_is_refused(operation: Operation) -> None:
    refuse(RAW.encode(dense([1, 2]), 2), changed=2, numel=2, operation=operation)


def test_a_dense_body_for_some_of_the_elements_is_refused() -> None:
    refuse(RAW.encode(dense([1, 2]), 2), changed=1, numel=2, operation=Operation.OVERWRITE)


@pytest.mark.parametrize("positions", [[1, 1], [2, 1], [0, 4], [0, 1 << 31]], ids=str)
def test_raw_positions_that_do_not_ascend_within_the_frame_are_refused(positions: list[int]) -> None:
    assert "not ascending" in refuse(RAW.encode(sparse(positions, [1, 2]), 4), changed=2, numel=4)


def test_gaps_that_leave_the_frame_are_refused() -> None:
    refuse(GAPS.encode(sparse([0, 4], [1, 2]), 5), changed=2, numel=4)


def test_gaps_past_32_bits_do_not_wrap_round() -> None:
    gaps = np.full((1 << 32) // 255 + 2, 255, np.uint8)
    gaps[-1] = 0
    with pytest.raises(PayloadError, match="leaves the frame"):
        kernels.positions_of(gaps, 1, 1 << 32)


def test_a_gap_stream_that_ends_within_a_gap_is_refused() -> None:
    body = bytes([GAPS_SPARSE]) + stored(b"\x00\xff") + stored(b"\x00") + stored(b"")
    refuse(body, changed=1, numel=4)


@pytest.mark.parametrize("exceptions", [b"", b"\x01", b"\x01\x02\x03\x04"], ids=["none", "half", "two"])
def test_exceptions_that_do_not_fit_the_symbols_are_refused(exceptions: bytes) -> None:
    body = bytes([GAPS_SPARSE]) + stored(b"\x00\x00") + stored(b"\xff\x00") + stored(exceptions)
    refuse(body, changed=2, numel=4)


def test_a_zstd_stream_shorter_than_declared_is_refused() -> None:
    body = bytes([GAPS_SPARSE]) + packed(b"\x00", raw_size=2) + packed(b"\x00\x00") + packed(b"")
    refuse(body, changed=2, numel=4)


def test_bytes_after_a_zstd_frame_are_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(2))
    body = bytes([GAPS_SPARSE]) + stored(frame + b"more", raw_size=2, encoding=ZSTD) + stored(bytes(2)) + stored(b"")
    refuse(body, changed=2, numel=4)


def test_a_huffman_stream_of_another_size_is_refused() -> None:
    packed = kernels.pack(np.array([0, 1, 0, 2] * 40, np.uint8)).tobytes()
    for size in (8, 120, 1 << 20):
        body = bytes([RAW_DENSE]) + stored(packed, raw_size=size, encoding=HUFFMAN)
        refuse(body, changed=size, numel=size, width=1, operation=Operation.OVERWRITE)


def test_a_huffman_stream_that_claims_too_much_is_refused_before_it_is_allocated() -> None:
    size = 1 << 31
    body = bytes([RAW_DENSE]) + stored(
        kernels.pack(np.array([0, 1, 0, 2] * 40, np.uint8)).tobytes(), raw_size=size, encoding=HUFFMAN
    )
    tracemalloc.start()
    try:
        refuse(body, changed=size, numel=size, width=1, operation=Operation.OVERWRITE)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def bomb(data: bytes, raw_size: int) -> bytes:
    """A body of one dense stream that declares raw_size bytes."""
    return bytes([RAW_DENSE]) + stored(data, raw_size=raw_size, encoding=ZSTD)


@pytest.mark.parametrize("sized", [True, False], ids=["size in the frame", "no size in the frame"])
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(sized: bool) -> None:
    body = bomb(zstandard.ZstdCompressor(write_content_size=sized).compress(bytes(1 << 26)), 8)
    tracemalloc.start()
    try:
        refuse(body, changed=4, numel=4, operation=Operation.OVERWRITE)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_claims_more_memory_than_there_is_is_refused() -> None:
    frame = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 62) + b"\x01\x00\x00"
    refuse(bomb(frame, 8), changed=4, numel=4, operation=Operation.OVERWRITE)


def test_a_declared_size_is_refused_before_it_is_allocated() -> None:
    refuse(bomb(b"", 0xFFFFFFFF), changed=4, numel=4, operation=Operation.OVERWRITE)
