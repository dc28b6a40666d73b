"""The compiled codec kernels compute what `dcr.kernels.streams` does, byte for byte, at every level of this machine.

N elements of a frame, K of them changed, n bytes of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.implementations import using
from support.strategies import random_bits

from dcr import _native, kernels
from dcr.codecs.codec import FAST, GAPS, Gaps
from dcr.codecs.patch import Change, Operation
from dcr.errors import LayoutError, PayloadError
from dcr.kernels import checked, streams
from dcr.kernels.streams import Octets
from dcr.layout.views import UNSIGNED, Positions

WIDTHS = (1, 2, 4, 8)
every_width = pytest.mark.parametrize("width", WIDTHS)
examples = settings(deadline=None, max_examples=60)
EDGES = [0, 1, 253, 254, 255, 256, 509, 510, 764, 765, 1019, 1020, 1021, 2039, 2040, 2295, 70_000]


@pytest.fixture(params=_native.features()["levels"], autouse=True, scope="module")
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    yield _native.use_level(request.param)
    _native.use_level(_native.features()["levels"][-1])


def same(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def octets(*values: int) -> Octets:
    return np.array(values, np.uint8)


def positions_at(gaps: list[int] | NDArray[np.int64]) -> Positions:
    return (np.cumsum(np.asarray(gaps, np.int64) + 1) - 1).astype(np.uint32)


def both_ways(positions: Positions) -> None:
    numel = int(positions[-1]) + 1 if len(positions) else 0
    gaps = kernels.gaps_of(positions)
    same(gaps, streams.gaps_of(positions))
    for reader in (kernels.positions_of, streams.positions_of):
        same(reader(gaps, len(positions), numel), positions)
        if numel:
            with pytest.raises(PayloadError):
                reader(gaps, len(positions), numel - 1)


def agree(call: Callable[[object], np.ndarray]) -> np.ndarray | None:
    """What both implementations give: the same array, or both a PayloadError (None)."""
    results: list[np.ndarray | None] = []
    for implementation in (kernels, streams):
        try:
            results.append(call(implementation))
        except PayloadError:
            results.append(None)
    found, expected = results
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        same(found, expected)
    return found


# ---------------------------------------------------------------------- gaps


@examples
@given(st.lists(st.integers(0, 3) | st.sampled_from(EDGES) | st.integers(0, 3000), max_size=200))
def test_gaps_agree_and_come_back(gaps: list[int]) -> None:
    both_ways(positions_at(gaps))


@pytest.mark.parametrize("mean", [0, 1, 20, 33, 100, 333, 2000, 100_000])
@pytest.mark.parametrize("K", [0, 1, 2, 15, 16, 17, 33, 5001])
def test_gaps_of_a_density_agree_and_come_back(mean: int, K: int) -> None:
    both_ways(positions_at(np.random.default_rng(K).geometric(1 / (mean + 1), K) - 1))


@pytest.mark.parametrize("gap", EDGES)
@pytest.mark.parametrize("lane", [0, 1, 15, 16, 17])
def test_a_gap_at_an_edge_agrees_in_every_lane(gap: int, lane: int) -> None:
    gaps = [3] * 40
    gaps[lane] = gap
    both_ways(positions_at(gaps))
    both_ways(positions_at([gap] * 40))


@pytest.mark.parametrize("last", [(1 << 31) - 1, 1 << 31, (1 << 32) - 2])
def test_gaps_up_to_32_bits_agree(last: int) -> None:
    both_ways(np.array([*range(20), last], np.uint32))


@pytest.mark.parametrize("positions", [[1, 1], [2, 1], [0, 5, 4, 9], [0, (1 << 32) - 1]], ids=str)
def test_positions_that_do_not_ascend_have_no_gaps(positions: list[int]) -> None:
    for implementation in (kernels, streams):
        with pytest.raises(LayoutError):
            implementation.gaps_of(np.array(positions, np.uint32))


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from([0, 1, 7, 254, 255, 255]) | st.integers(0, 255), max_size=120),
    st.integers(-2, 2),
    st.integers(-300, 300),
)
def test_any_gap_stream_is_read_or_refused_alike(stream: list[int], off: int, room: int) -> None:
    gaps = octets(*stream)
    last = gaps != 255
    changed, numel = max(0, int(last.sum()) + off), max(0, int(gaps.astype(int).sum() + last.sum()) + room)
    agree(lambda implementation: implementation.positions_of(gaps, changed, numel))


@pytest.mark.parametrize("at", [0, 15, 16, 17, 31, 47])
def test_positions_are_refused_where_the_frame_is_left_early(at: int) -> None:
    gaps = np.zeros(48, np.uint8)
    gaps[at] = 254
    for implementation in (kernels, streams):
        with pytest.raises(PayloadError, match="leaves the frame"):
            implementation.positions_of(gaps, 48, 200)


@pytest.mark.parametrize(("gaps", "changed"), [([], 1), ([0], 0), ([0, 255], 1), ([255] * 40, 0), ([0] * 20, 19)])
def test_gap_streams_of_another_number_of_gaps_are_refused(gaps: list[int], changed: int) -> None:
    for implementation in (kernels, streams):
        with pytest.raises(PayloadError, match=f"does not hold {changed} gaps"):
            implementation.positions_of(octets(*gaps), changed, 1 << 20)


# ---------------------------------------------------------------------- symbols


@every_width
@examples
@given(data=st.data())
def test_symbols_agree_and_come_back(width: int, data: st.DataObject) -> None:
    top = 2 ** (8 * width)
    word = st.integers(-130, 130).map(lambda step: step % top) | st.integers(0, top - 1)
    values = np.array(data.draw(st.lists(word, max_size=150)), UNSIGNED[width])
    symbols_agree(values)


@every_width
@pytest.mark.parametrize("K", [0, 1, 31, 64, 65, 10_001])
def test_symbols_of_random_bits_agree(width: int, K: int) -> None:
    symbols_agree(random_bits(3, K, width))


def test_symbols_of_all_16_bit_patterns_agree() -> None:
    symbols_agree(np.arange(1 << 16, dtype=np.uint16))


def symbols_agree(values: np.ndarray) -> None:
    symbols, exceptions = kernels.symbols_of(values)
    for found, expected in zip((symbols, exceptions), streams.symbols_of(values), strict=True):
        same(found, expected)
    for implementation in (kernels, streams):
        same(implementation.values_of(symbols, exceptions.view(np.uint8), values.itemsize), values)


@every_width
@pytest.mark.parametrize("off", [-1, 1])
def test_other_numbers_of_exceptions_are_refused(width: int, off: int) -> None:
    symbols = octets(*[0, 255] * 20)
    for size in (20 * width + off, (20 + off) * width):
        if size == 20 * width:
            continue
        for implementation in (kernels, streams):
            with pytest.raises(PayloadError, match="escapes"):
                implementation.values_of(symbols, np.zeros(size, np.uint8), width)


# ---------------------------------------------------------------------- Huffman

STREAMS = {
    "two bytes": octets(*[1, 200] * 500),
    "two bytes, one of them once": np.append(np.zeros(3000, np.uint8), octets(9)),
    "steps": np.random.default_rng(1).geometric(0.5, 20_011).astype(np.uint8) - np.uint8(1),
    "gaps": np.minimum(np.random.default_rng(2).geometric(0.01, 50_000), 255).astype(np.uint8),
    "nearly flat": np.random.default_rng(3).binomial(255, 0.5, 4096).astype(np.uint8),
}
# Weights that grow as Fibonacci's numbers ask for longer codes than there are.
fibonacci = [1, 1]
while len(fibonacci) < 22:
    fibonacci.append(fibonacci[-1] + fibonacci[-2])
STREAMS["Fibonacci"] = np.random.default_rng(4).permutation(np.repeat(np.arange(22, dtype=np.uint8), fibonacci))
every_stream = pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in STREAMS.items()])


def packing_agrees(data: Octets) -> None:
    packed = kernels.pack(data)
    same(packed, streams.pack(data))
    if len(packed):
        for implementation in (kernels, streams):
            same(implementation.unpack(packed, len(data)), data)


@every_stream
def test_packed_streams_agree_and_come_back(data: Octets) -> None:
    assert len(kernels.pack(data)) > 0
    packing_agrees(data)


@pytest.mark.parametrize("n", [*range(60, 90), 255, 256, 257, 271, 272, 273, 274, 275, 287, 288, 1000])
def test_streams_of_every_remainder_come_back(n: int) -> None:
    packing_agrees((np.random.default_rng(n).geometric(0.4, n) - 1).astype(np.uint8))


@pytest.mark.parametrize("mean", [2, 10, 30, 50, 60, 70, 80, 100, 140, 200, 300])
def test_long_streams_of_codes_of_any_mean_length_agree(mean: int) -> None:
    """Strings of several codes are as long as fits a word, and longer, behind any number of bits left over."""
    packing_agrees((np.random.default_rng(mean).geometric(1 / mean, 40_000) % 256).astype(np.uint8))


@examples
@given(st.integers(0, 2**32), st.integers(1, 256), st.integers(0, 3000), st.floats(0.2, 4))
@example(0, 256, 3000, 0.2)
def test_streams_of_any_shape_agree(seed: int, letters: int, n: int, skew: float) -> None:
    random = np.random.default_rng(seed)
    weights = random.random(letters) ** (skew * 4) + 1e-9
    packing_agrees(random.choice(letters, n, p=weights / weights.sum()).astype(np.uint8))


@pytest.mark.parametrize("data", [octets(), octets(7), octets(*[7] * 999), random_bits(1, 9999, 1)], ids=len)
def test_streams_that_a_code_does_not_shorten_are_not_packed(data: Octets) -> None:
    assert len(kernels.pack(data)) == len(streams.pack(data)) == 0


@every_stream
def test_what_is_packed_saves_a_fiftieth_and_is_near_the_entropy(data: Octets) -> None:
    counts = np.bincount(data)
    shares = counts[counts > 0] / len(data)
    entropy_bytes = -(shares * np.log2(shares)).sum() * len(data) / 8
    packed = len(kernels.pack(data))
    assert entropy_bytes < packed < 0.98 * len(data)
    assert packed < max(1.06 * entropy_bytes, len(data) / 8) + 160  # no code is shorter than a bit


def small() -> tuple[Octets, Octets]:
    data = STREAMS["steps"][:700]
    return data, kernels.pack(data)


def test_every_truncated_packed_stream_is_refused() -> None:
    data, packed = small()
    for size in range(len(packed)):
        assert agree(lambda implementation, size=size: implementation.unpack(packed[:size].copy(), len(data))) is None


def test_a_packed_stream_of_another_size_is_refused() -> None:
    data, packed = small()
    for size in (0, 1, len(data) - 40, len(data) + 40, 8 * len(packed), 1 << 32, 1 << 40):
        with pytest.raises(PayloadError):
            kernels.unpack(packed, size)
    for trailing in (0, 1):
        with pytest.raises(PayloadError):
            kernels.unpack(np.append(packed, np.uint8(trailing)), len(data))


def test_every_flipped_bit_of_a_packed_stream_is_read_or_refused_alike() -> None:
    data, packed = small()
    for at in range(len(packed)):
        for bit in range(0, 8, 1 if at < 40 else 3):
            flipped = packed.copy()
            flipped[at] ^= np.uint8(1 << bit)
            agree(lambda implementation, flipped=flipped: implementation.unpack(flipped, len(data)))


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 600))
def test_any_bytes_are_unpacked_or_refused_alike(junk: bytes, size: int) -> None:
    agree(lambda implementation: implementation.unpack(np.frombuffer(junk, np.uint8), size))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_mutated_packed_stream_is_read_or_refused_alike(data: st.DataObject) -> None:
    stream, packed = small()
    mutated = bytearray(packed.tobytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(mutated)) | st.integers(0, 30))
        mutated[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    agree(lambda implementation: implementation.unpack(np.frombuffer(bytes(mutated), np.uint8), len(stream)))


def table(*nibbles: int) -> Octets:
    padded = [*nibbles, *[0] * (len(nibbles) % 2)]
    return octets(*(low | high << 4 for low, high in zip(padded[::2], padded[1::2], strict=True)))


ZEROS = [15, 15] * 14  # 252 bytes that do not occur


@pytest.mark.parametrize(
    ("nibbles", "why"),
    [
        pytest.param([1, 1, 1, 0, *ZEROS], "no complete code", id="too many codes"),
        pytest.param([1, 2, 0, 0, *ZEROS], "no complete code", id="too few codes"),
        pytest.param([1, 0, 0, 0, *ZEROS], "no complete code", id="a single code"),
        pytest.param([0, 0, 0, 0, *ZEROS], "no complete code", id="no code"),
        pytest.param([13, 0, 0, 0, *ZEROS], "a code of 13 bits", id="a code that is too long"),
        pytest.param([1, 1, 0, 0, 0, *ZEROS], "more than 256 lengths", id="one length too many"),
        pytest.param([1, 1, 0, 0, *ZEROS[:-2]], "within its table", id="an unfinished table"),
    ],
)
def test_tables_that_are_no_code_are_refused(nibbles: list[int], why: str) -> None:
    packed = table(*nibbles)
    if "within" not in why:
        packed = np.concatenate([packed, octets(*[1, 0, 0, 0] * 3, 0, 0, 0, 0)])
    for implementation in (kernels, streams):
        with pytest.raises(PayloadError, match=why):
            implementation.unpack(packed, 8)


def test_a_code_of_one_bit_is_read_as_the_format_says() -> None:
    packed = np.concatenate([table(1, 1, 0, 0, *ZEROS), octets(*[1, 0, 0, 0] * 3), octets(0b01, 0b10, 0b11, 0b00)])
    for implementation in (kernels, streams):
        same(implementation.unpack(packed, 8), octets(1, 0, 1, 0, 0, 1, 1, 0))


def test_bits_behind_the_last_code_are_refused() -> None:
    packed = np.concatenate([table(1, 1, 0, 0, *ZEROS), octets(*[1, 0, 0, 0] * 3), octets(0b01, 0b10, 0b11, 0b100)])
    for implementation in (kernels, streams):
        with pytest.raises(PayloadError, match="zero bits"):
            implementation.unpack(packed, 8)


# ---------------------------------------------------------------------- together


@pytest.mark.parametrize("kind", [FAST, GAPS], ids=["fast", "gaps"])
def test_a_build_without_kernels_writes_and_reads_the_same_bodies(kind: Gaps) -> None:
    random = np.random.default_rng(5)
    positions = np.flatnonzero(random.random(30_000) < 0.02).astype(np.uint32)
    steps = random.geometric(0.8, len(positions)) * random.choice([-1, 1], len(positions))
    for change in (
        Change(Operation.STEP, positions, steps.astype(np.int16).view(np.uint16)),
        Change(Operation.OVERWRITE, None, random.binomial(60_000, 0.5, 3000).astype(np.uint16)),
    ):
        body = kind.encode(change, 30_000)
        numel = 30_000 if change.positions is not None else 3000
        with using(checked):
            assert kind.encode(change, 30_000) == body
            found = kind.decode(body, operation=change.operation, changed=len(change.values), numel=numel, width=2)
        same(found.values, change.values)
        if change.positions is not None and found.positions is not None:
            same(found.positions, change.positions)


# ---------------------------------------------------------------------- arguments


def test_arrays_that_are_not_what_a_kernel_takes_are_refused() -> None:
    with pytest.raises(LayoutError):
        kernels.gaps_of(np.array([1, 2], np.uint64))  # type: ignore[arg-type]
    with pytest.raises(PayloadError):
        kernels.unpack(np.zeros((2, 2), np.uint8), 4)
    with pytest.raises(PayloadError):
        kernels.values_of(octets(1), octets(), 3)
    with pytest.raises(PayloadError):
        kernels.positions_of(octets(0), 1, 1 << 33)


# ---------------------------------------------------------------------- planes


@every_width
@pytest.mark.parametrize("N", [0, 1, 31, 4095, 4096, 4097, 10_000])
def test_planes_agree_and_come_back(N: int, width: int) -> None:
    values = random_bits(0, N, width)
    planes = kernels.planes_of(values)
    same(planes, streams.planes_of(values))
    for implementation in (kernels, streams):
        same(implementation.of_planes(list(planes)), values)


@pytest.mark.parametrize("planes", [[3, 4], [3, 3, 3], []], ids=str)
def test_planes_that_make_no_elements_are_refused(planes: list[int]) -> None:
    with pytest.raises(ValueError, match=r"elements"):
        _native.of_planes([np.zeros(size, np.uint8) for size in planes])
