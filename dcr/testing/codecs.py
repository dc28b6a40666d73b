"""The kit for codecs: subclass `CodecTests`, say which codec, and pytest collects the tests.

    N  elements of a frame      K  changed elements

A change that comes back must be the same operation at the same positions with the same bits; what does not decode must
be refused as a `PayloadError`, whatever the bytes are, before anything large is allocated.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dcr import plugins
from dcr.codecs import codec as codecs
from dcr.codecs.patch import Change, Operation
from dcr.errors import BaseMismatch, PayloadError
from dcr.layout.views import UNSIGNED, Bits
from dcr.seams import BasedCodec, Codec
from dcr.stages.compress import is_based
from dcr.testing.changes import describe, old_bits, random_bits, scattered, sparse, special_patterns, whole

WIDTHS = sorted(UNSIGNED)
MiB = 1 << 20
OPERATIONS = pytest.mark.parametrize("operation", list(Operation), ids=lambda operation: operation.name.lower())
ALL_WIDTHS = pytest.mark.parametrize("width", WIDTHS)


class CodecTests:
    """Everything that a codec has to hold.

    codec: the value under test. registered: receivers find codecs by name, so it has to be installed under its own;
    False for one that is always passed as a value.
    """

    codec: Codec | BasedCodec
    registered: bool = True

    # ------------------------------------------------------------------ what it says of itself

    def test_it_has_a_name(self) -> None:
        assert isinstance(self.codec.name, str)
        assert self.codec.name, "chunks carry the codec's name: it must not be empty"

    def test_it_says_whether_it_needs_the_base(self) -> None:
        assert self.codec.needs_base is True or self.codec.needs_base is False

    def test_a_receiver_finds_it_by_the_name_that_chunks_carry(self) -> None:
        if not self.registered:
            pytest.skip("it is passed as a value")
        found = plugins.load("dcr.codecs", self.codec.name)
        assert type(found) is type(self.codec), f"{self.codec.name!r} is the name of {found!r}"

    # ------------------------------------------------------------------ round trips

    @ALL_WIDTHS
    @OPERATIONS
    def test_scattered_changes_come_back(self, operation: Operation, width: int) -> None:
        for seed in range(8):
            self._require_back(scattered(operation, width, 1000, share=(seed + 1) / 10, seed=seed), 1000)

    @ALL_WIDTHS
    @OPERATIONS
    def test_nothing_changed_comes_back(self, operation: Operation, width: int) -> None:
        self._require_back(sparse(operation, width, [], []), 1000)

    @ALL_WIDTHS
    @OPERATIONS
    def test_one_change_comes_back_wherever_it_is(self, operation: Operation, width: int) -> None:
        for position in (0, 1, 500, 998, 999):
            self._require_back(sparse(operation, width, [position], [position % 7 + 1]), 1000)

    @ALL_WIDTHS
    @OPERATIONS
    def test_every_element_changed_comes_back(self, operation: Operation, width: int) -> None:
        self._require_back(sparse(operation, width, range(1000), random_bits(width, 1000)), 1000)

    @ALL_WIDTHS
    def test_a_whole_frame_comes_back(self, width: int) -> None:
        for numel in (1, 2, 255, 1000):
            self._require_back(whole(random_bits(width, numel)), numel)

    @ALL_WIDTHS
    def test_a_whole_frame_of_one_value_comes_back(self, width: int) -> None:
        for value in (0, 1, (1 << 8 * width) - 1):
            self._require_back(whole(np.full(1000, value, UNSIGNED[width])), 1000)

    @ALL_WIDTHS
    def test_an_empty_frame_comes_back(self, width: int) -> None:
        self._require_back(whole(np.zeros(0, UNSIGNED[width])), 0)

    @ALL_WIDTHS
    @OPERATIONS
    def test_no_change_of_an_empty_frame_comes_back(self, operation: Operation, width: int) -> None:
        self._require_back(sparse(operation, width, [], []), 0)

    @OPERATIONS
    def test_every_pattern_of_one_byte_comes_back(self, operation: Operation) -> None:
        self._require_back(sparse(operation, 1, range(0, 512, 2), range(256)), 512)

    @OPERATIONS
    def test_every_pattern_of_two_bytes_comes_back(self, operation: Operation) -> None:
        """All of bfloat16 and float16: zeros of both signs, denormals, infinities, every payload of a NaN."""
        self._require_back(sparse(operation, 2, range(0, 1 << 17, 2), range(1 << 16)), 1 << 17)

    @OPERATIONS
    @pytest.mark.parametrize("width", [4, 8])
    def test_special_patterns_come_back(self, operation: Operation, width: int) -> None:
        values = np.array(special_patterns(width), UNSIGNED[width])
        self._require_back(sparse(operation, width, range(len(values)), values), len(values))

    @ALL_WIDTHS
    @OPERATIONS
    def test_values_around_every_power_of_two_come_back(self, operation: Operation, width: int) -> None:
        powers = [sign << bit for bit in range(8 * width) for sign in (1, -1)]
        near = sorted({(power + off) % (1 << 8 * width) for power in powers for off in (-1, 0, 1)})
        self._require_back(sparse(operation, width, range(len(near)), near), len(near))

    @ALL_WIDTHS
    def test_gaps_of_every_length_come_back(self, width: int) -> None:
        positions = np.cumsum(np.concatenate([np.arange(1, 800), [1, 65_535, 65_536, 65_537]])) - 1
        numel = int(positions[-1]) + 1
        self._require_back(sparse(Operation.STEP, width, positions, random_bits(width, len(positions))), numel)

    @ALL_WIDTHS
    def test_changes_far_apart_come_back(self, width: int) -> None:
        half, numel = 1 << 23, 1 << 24
        self._require_back(sparse(Operation.XOR, width, [0, half - 1, half, numel - 1], [1, 2, 3, 4]), numel)

    @ALL_WIDTHS
    def test_gaps_that_meet_the_end_of_a_byte_come_back(self, width: int) -> None:
        for gap in (254, 255, 256, 257, 509, 510, 511, 512):
            positions = list(range(0, 20 * gap, gap))
            self._require_back(sparse(Operation.STEP, width, positions, range(1, 21)), positions[-1] + 1)

    # ------------------------------------------------------------------ pure

    @OPERATIONS
    def test_the_same_change_gives_the_same_bytes(self, operation: Operation) -> None:
        change = scattered(operation, 2, 5000, share=0.1)
        first = self._encode(change, 5000)
        self._encode(whole(random_bits(2, 300)), 300)
        assert self._encode(change, 5000) == first, "the same change gave other bytes the second time"

    def test_threads_may_share_it(self) -> None:
        changes = [scattered(Operation.STEP, 2, 5000, share=0.1, seed=seed) for seed in range(8)]
        alone = [self._encode(change, 5000) for change in changes]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda change: self._encode(change, 5000), changes * 4))
        assert together == alone * 4, "a change gave other bytes while other threads used the codec"

    @OPERATIONS
    def test_a_change_is_not_touched(self, operation: Operation) -> None:
        change = scattered(operation, 2, 1000, share=0.3)
        before = describe(change)
        self._encode(change, 1000)
        assert describe(change) == before, "encoding changed the arrays that it was given"

    def test_arrays_that_may_not_be_written_are_read(self) -> None:
        for change in (scattered(Operation.STEP, 2, 1000, share=0.3), whole(random_bits(2, 1000))):
            change.values.flags.writeable = False
            if change.positions is not None:
                change.positions.flags.writeable = False
            self._encode(change, 1000)

    # ------------------------------------------------------------------ size

    @ALL_WIDTHS
    @OPERATIONS
    def test_a_body_never_outgrows_the_lease_on_it(self, operation: Operation, width: int) -> None:
        for numel in (0, 1, 10, 1000):
            for share in (0.0, 0.5, 1.0):
                self._require_small(scattered(operation, width, numel, share=share), numel, width)

    @ALL_WIDTHS
    def test_a_whole_frame_never_outgrows_the_lease_on_it(self, width: int) -> None:
        for numel in (0, 1, 10, 1000):
            self._require_small(whole(random_bits(width, numel)), numel, width)

    @ALL_WIDTHS
    def test_a_large_frame_never_outgrows_the_lease_on_it(self, width: int) -> None:
        """What a codec adds for every so many bytes shows here."""
        numel = 1 << 17
        values = random_bits(width, numel)
        self._require_small(whole(values), numel, width)
        self._require_small(sparse(Operation.XOR, width, np.arange(numel), values), numel, width)

    @ALL_WIDTHS
    def test_changes_far_apart_do_not_outgrow_the_lease_on_them(self, width: int) -> None:
        numel = 1 << 20
        self._require_small(sparse(Operation.XOR, width, [0, numel - 1], [1, 1 << 7]), numel, width)

    # ------------------------------------------------------------------ bytes that are not what they should be

    @ALL_WIDTHS
    def test_a_flipped_bit_is_refused_or_stays_within_bounds(self, width: int) -> None:
        for change, body in self._bodies(width):
            for bit in picked(8 * len(body), 300):
                octets = bytearray(body)
                octets[bit // 8] ^= 1 << bit % 8
                self._require_bounded(bytes(octets), change, width)

    @ALL_WIDTHS
    def test_a_body_cut_short_is_refused_or_stays_within_bounds(self, width: int) -> None:
        for change, body in self._bodies(width):
            for size in picked(len(body), 100):
                self._require_bounded(body[:size], change, width)

    @ALL_WIDTHS
    def test_bytes_behind_a_body_are_refused_or_stay_within_bounds(self, width: int) -> None:
        for change, body in self._bodies(width):
            for more in (b"\0", b"\xff" * 7, body):
                self._require_bounded(body + more, change, width)

    @ALL_WIDTHS
    def test_an_empty_body_is_refused_where_something_changed(self, width: int) -> None:
        with pytest.raises(self._refusals):
            self._decode(b"", operation=Operation.STEP, changed=3, numel=100, width=width)

    @ALL_WIDTHS
    def test_random_bytes_are_refused_or_stay_within_bounds(self, width: int) -> None:
        change = scattered(Operation.STEP, width, 100, share=0.3)
        for seed in range(200):
            rng = np.random.default_rng(seed)
            self._require_bounded(rng.bytes(int(rng.integers(0, 200))), change, width, numel=100)

    @ALL_WIDTHS
    def test_a_header_with_another_count_is_refused(self, width: int) -> None:
        for change, body in self._bodies(width):
            for changed in (0, len(change.values) - 1, len(change.values) + 1, 1000, 1 << 31):
                if changed != len(change.values):
                    with pytest.raises(self._refusals):
                        self._decode(body, operation=change.operation, changed=changed, numel=1000, width=width)

    @ALL_WIDTHS
    def test_a_header_with_a_smaller_frame_is_refused(self, width: int) -> None:
        for change, body in self._bodies(width):
            last = 999 if change.positions is None else int(change.positions[-1])
            for numel in (0, 1, last):
                with pytest.raises(self._refusals):
                    self._decode(body, operation=change.operation, changed=len(change.values), numel=numel, width=width)

    @ALL_WIDTHS
    def test_a_header_with_another_width_is_refused_or_stays_within_bounds(self, width: int) -> None:
        for change, body in self._bodies(width):
            for other in WIDTHS:
                self._require_bounded(body, change, other)

    @ALL_WIDTHS
    def test_sizes_in_a_body_are_checked_before_they_are_allocated(self, width: int) -> None:
        limit = 16 * codecs.worst_case_bytes(1000, width) + MiB
        for change, body in self._bodies(width):
            for at in range(min(len(body), 48)):
                for huge in (b"\xff\xff\xff\x7f", b"\x7f\xff\xff\xff", b"\0\0\0\x20"):
                    found = self._peak(body[:at] + huge + body[at + 4 :], change, width)
                    assert found <= limit, f"a body of {len(body)} bytes made it allocate {found} bytes"

    # ------------------------------------------------------------------

    @property
    def _refusals(self) -> tuple[type[Exception], ...]:
        """What a body that does not decode may raise."""
        return (PayloadError, BaseMismatch) if is_based(self.codec) else (PayloadError,)

    def _encode(self, change: Change, numel: int) -> bytes:
        if is_based(self.codec):
            return self.codec.encode(change, numel, base=old_bits(change.values.itemsize, numel))
        return self.codec.encode(change, numel)

    def _decode(self, body: bytes, *, operation: Operation, changed: int, numel: int, width: int) -> Change:
        header: Any = {"operation": operation, "changed": changed, "numel": numel, "width": width}
        if is_based(self.codec):
            return self.codec.decode(body, **header, base=old_bits(width, numel))
        return self.codec.decode(body, **header)

    def _require_back(self, change: Change, numel: int) -> None:
        width = change.values.itemsize
        body = self._encode(change, numel)
        assert isinstance(body, bytes), f"a body is bytes, not {type(body).__name__}"
        header: Any = {"operation": change.operation, "changed": len(change.values), "numel": numel, "width": width}
        try:
            found = self._decode(body, **header)
        except self._refusals as error:
            raise AssertionError(f"it refuses what it has encoded itself: {error}") from error
        assert found.operation == change.operation, f"{change.operation!r} came back as {found.operation!r}"
        _require_equal("positions", found.positions, change.positions)
        _require_equal("values", found.values, change.values)

    def _require_small(self, change: Change, numel: int, width: int) -> None:
        size, limit = len(self._encode(change, numel)), codecs.worst_case_bytes(numel, width)
        assert size <= limit, f"{size} bytes for {len(change.values)} of {numel} elements; the lease holds {limit}"

    def _require_bounded(self, body: bytes, change: Change, width: int, numel: int = 1000) -> None:
        """It is refused, or as many changes as the header says come out, ascending, within the frame."""
        changed = len(change.values)
        try:
            found = self._decode(body, operation=change.operation, changed=changed, numel=numel, width=width)
        except self._refusals:
            return
        assert found.operation == change.operation
        assert found.values.dtype == UNSIGNED[width]
        assert found.values.shape == (numel if found.positions is None else changed,)
        if found.positions is None:
            assert changed == numel, f"a whole frame of {numel} elements came out of a chunk that says {changed}"
            return
        assert found.positions.dtype == np.uint32
        assert found.positions.shape == (changed,)
        ascending = (found.positions[1:] > found.positions[:-1]).all() and (found.positions < numel).all()
        assert ascending, f"positions came out that do not ascend within the frame: {found.positions}"

    def _peak(self, body: bytes, change: Change, width: int) -> int:
        """Bytes that a body, refused or not, makes it allocate."""
        tracemalloc.start()
        try:
            self._require_bounded(body, change, width)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    def _bodies(self, width: int) -> Iterator[tuple[Change, bytes]]:
        """Bodies of every kind, all of frames of 1000 elements."""
        for change in (
            scattered(Operation.STEP, width, 1000, share=0.02),
            scattered(Operation.XOR, width, 1000, share=0.5),
            sparse(Operation.OVERWRITE, width, range(0, 1000, 4), [0] * 250),
            whole(np.arange(1000).astype(UNSIGNED[width])),
        ):
            yield change, self._encode(change, 1000)


def picked(count: int, at_most: int) -> list[int]:
    """All of range(count), or about so many of it: the first third and the last of them together, the rest spread."""
    if count <= at_most:
        return list(range(count))
    third = at_most // 3
    return sorted({*range(third), *range(0, count, -(-count // third)), *range(count - third, count)})


def _require_equal(what: str, found: Bits | None, expected: Bits | None) -> None:
    if expected is None or found is None:
        assert found is expected, f"{what}: expected {expected}, found {found}"
        return
    assert found.dtype == expected.dtype, f"{what} came back as {found.dtype}, not as {expected.dtype}"
    assert found.shape == expected.shape, f"{len(found)} {what} came back, not {len(expected)}"
    differing = np.flatnonzero(found != expected)
    assert not len(differing), (
        f"{len(differing)} of {len(expected)} {what} differ, first number {differing[0]}: "
        f"expected {expected[differing[0]]:#x}, found {found[differing[0]]:#x}"
    )
