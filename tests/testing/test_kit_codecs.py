"""The kit for codecs: over the built-in ones, and over ones that are wrong, each of which some test of it notices."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from support.bent import kit_tests

from dcr.codecs.codec import CLASSES, FAST, GAPS, RAW
from dcr.codecs.patch import Change, Operation
from dcr.errors import PayloadError
from dcr.seams import Codec
from dcr.testing import CodecTests


class TestRaw(CodecTests):
    codec = RAW


class TestFast(CodecTests):
    codec = FAST


class TestClasses(CodecTests):
    codec = CLASSES


class TestGaps(CodecTests):
    codec = GAPS


@dataclass
class Wrong:
    """The codec raw, bent: before encoding, after it, after decoding, or altogether."""

    name: Any = "raw"
    needs_base: Any = False
    before: Callable[[Change], Change] = lambda change: change
    body: Callable[[bytes], bytes] = lambda body: body
    after: Callable[[Change], Change] = lambda change: change
    decoder: Callable[..., Change] = RAW.decode
    codec: Codec = field(default=RAW)

    def encode(self, change: Change, numel: int) -> bytes:
        return self.body(self.codec.encode(self.before(change), numel))

    def decode(self, body: bytes, *, operation: Operation, changed: int, numel: int, width: int) -> Change:
        return self.after(self.decoder(body, operation=operation, changed=changed, numel=numel, width=width))


def _values(bend: Callable[[Any], Any], only_whole: bool = False) -> Callable[[Change], Change]:
    """A change of values, of all changes or of whole frames."""

    def bent(change: Change) -> Change:
        if only_whole and change.positions is not None:
            return change
        return Change(change.operation, change.positions, np.asarray(bend(change.values), change.values.dtype))

    return bent


def _canonical_nans(values: Any) -> Any:
    exponent = {4: 0x7F800000, 8: 0x7FF0000000000000}.get(values.itemsize)
    if exponent is None:
        return values
    magnitude = values & values.dtype.type((1 << 8 * values.itemsize - 1) - 1)
    return np.where(magnitude > exponent, values.dtype.type(exponent + 1), values)


def _no_negative_zero(values: Any) -> Any:
    return np.where(values == 1 << 8 * values.itemsize - 1, values.dtype.type(0), values)


def _short_gaps(limit: int) -> Callable[[Change], Change]:
    """Gaps between positions are kept modulo a limit."""

    def bend(change: Change) -> Change:
        if change.positions is None or not len(change.positions):
            return change
        gaps = np.diff(change.positions.astype(np.int64), prepend=-1)
        gaps = np.where(gaps >= limit, (gaps - 1) % (limit - 1) + 1, gaps)
        return Change(change.operation, (np.cumsum(gaps) - 1).astype(np.uint32), change.values)

    return bend


def _sorted_out(change: Change) -> Change:
    """A patch that changes everything is taken for a whole frame."""
    if change.positions is not None and len(change.positions) == 1000:
        return Change(change.operation, None, change.values)
    return change


def _scribbling(change: Change) -> Change:
    change.values[:] = change.values ^ change.values.dtype.type(0)
    if len(change.values):
        change.values[0] ^= change.values.dtype.type(1)
    return change


def _counted() -> Callable[[bytes], bytes]:
    count = itertools.count()
    return lambda body: body + bytes([next(count) % 256])


def _uncounted(body: bytes, **header: Any) -> Change:
    return RAW.decode(body[:-1], **header)


class Shared:
    """Keeps its work in a place that all threads share."""

    name, needs_base, decode = "raw", False, staticmethod(RAW.decode)

    def encode(self, change: Change, numel: int) -> bytes:
        self.change = change
        time.sleep(0.002)
        return RAW.encode(self.change, numel)


def _padded(extra: int, *, per: int = 0) -> Wrong:
    """A codec that adds bytes: so many, and one for every so many."""

    def body(straight: bytes) -> bytes:
        more = extra + (len(straight) // per if per else 0)
        return straight + bytes(more) + more.to_bytes(4, "little")

    def decoder(straight: bytes, **header: Any) -> Change:
        return RAW.decode(straight[: -4 - int.from_bytes(straight[-4:], "little")], **header)

    return Wrong(body=body, decoder=decoder)


def _letting_through(body: bytes, **header: Any) -> Change:
    """A decoder that lets an error through that is none of dcr's."""
    try:
        return RAW.decode(body, **header)
    except PayloadError as error:
        raise ValueError(str(error)) from None


def _making_up(body: bytes, *, operation: Operation, changed: int, numel: int, width: int) -> Change:
    """A decoder that returns positions that do not ascend, where a body does not decode."""
    try:
        return RAW.decode(body, operation=operation, changed=changed, numel=numel, width=width)
    except PayloadError:
        return Change(operation, np.zeros(changed, np.uint32), np.zeros(changed, f"u{width}"))


def _forgiving(body: bytes, *, operation: Operation, changed: int, numel: int, width: int) -> Change:
    """A decoder that makes something up where a body does not decode."""
    try:
        return RAW.decode(body, operation=operation, changed=changed, numel=numel, width=width)
    except PayloadError:
        return Change(operation, np.arange(changed, dtype=np.uint32), np.zeros(changed, f"u{width}"))


def _generous(body: bytes, *, operation: Operation, changed: int, numel: int, width: int) -> Change:
    """A decoder that believes in sizes."""
    if len(body) > 6:
        np.ones(min(int.from_bytes(body[2:6], "little"), 1 << 28), np.uint8)
    return RAW.decode(body, operation=operation, changed=changed, numel=numel, width=width)


def _next_operation(change: Change) -> Change:
    return Change(Operation((change.operation + 1) % 3), change.positions, change.values)


def _one_of_each(values: Any) -> Any:
    return np.unique(values) if len(np.unique(values)) == 1 else values


def _whole_if_empty(change: Change) -> Change:
    return change if len(change.values) else Change(change.operation, None, change.values)


def _one_further(change: Change) -> Change:
    if change.positions is None or len(change.positions) != 1:
        return change
    return Change(change.operation, change.positions + np.uint32(1), change.values)


def _not_empty(change: Change) -> Change:
    assert len(change.values)
    return change


OPERATIONS = [(operation,) for operation in Operation]
WIDTHS = [(width,) for width in (1, 2, 4, 8)]
BOTH = [(*operation, *width) for operation in OPERATIONS for width in WIDTHS]

BREAKS: list[tuple[str, list[Any], Callable[[], Any]]] = [
    ("it_has_a_name", [()], lambda: Wrong(name="")),
    ("it_says_whether_it_needs_the_base", [()], lambda: Wrong(needs_base=None)),
    ("a_receiver_finds_it_by_the_name_that_chunks_carry", [()], lambda: Wrong(name="gaps")),
    #
    ("scattered_changes_come_back", BOTH, lambda: Wrong(before=_values(lambda values: values >> 1))),
    ("scattered_changes_come_back", BOTH, lambda: Wrong(after=_next_operation)),
    ("nothing_changed_comes_back", BOTH, lambda: Wrong(after=_whole_if_empty)),
    ("one_change_comes_back_wherever_it_is", BOTH, lambda: Wrong(after=_one_further)),
    ("every_element_changed_comes_back", BOTH, lambda: Wrong(after=_sorted_out)),
    ("a_whole_frame_comes_back", WIDTHS, lambda: Wrong(after=_values(lambda values: values[::-1], only_whole=True))),
    ("a_whole_frame_of_one_value_comes_back", WIDTHS, lambda: Wrong(before=_values(_one_of_each, only_whole=True))),
    ("an_empty_frame_comes_back", WIDTHS, lambda: Wrong(before=_not_empty)),
    ("no_change_of_an_empty_frame_comes_back", BOTH, lambda: Wrong(after=_whole_if_empty)),
    ("every_pattern_of_one_byte_comes_back", OPERATIONS, lambda: Wrong(before=_values(lambda values: values & 0x7F))),
    ("every_pattern_of_two_bytes_comes_back", OPERATIONS, lambda: Wrong(before=_values(_no_negative_zero))),
    ("special_patterns_come_back", BOTH[2::4] + BOTH[3::4], lambda: Wrong(before=_values(_canonical_nans))),
    ("values_around_every_power_of_two_come_back", BOTH, lambda: Wrong(before=_values(_no_negative_zero))),
    ("gaps_of_every_length_come_back", WIDTHS, lambda: Wrong(before=_short_gaps(1 << 16))),
    ("changes_far_apart_come_back", WIDTHS, lambda: Wrong(before=_short_gaps(1 << 22))),
    ("gaps_that_meet_the_end_of_a_byte_come_back", WIDTHS, lambda: Wrong(before=_short_gaps(256))),
    #
    ("the_same_change_gives_the_same_bytes", OPERATIONS, lambda: Wrong(body=_counted(), decoder=_uncounted)),
    ("threads_may_share_it", [()], Shared),
    ("a_change_is_not_touched", OPERATIONS, lambda: Wrong(before=_scribbling)),
    ("arrays_that_may_not_be_written_are_read", [()], lambda: Wrong(before=_scribbling)),
    #
    ("a_body_never_outgrows_the_lease_on_it", BOTH, lambda: _padded(500)),
    ("a_whole_frame_never_outgrows_the_lease_on_it", WIDTHS, lambda: _padded(500)),
    ("a_large_frame_never_outgrows_the_lease_on_it", WIDTHS, lambda: _padded(0, per=999)),
    ("changes_far_apart_do_not_outgrow_the_lease_on_them", WIDTHS, lambda: _padded(1 << 24)),
    #
    ("a_flipped_bit_is_refused_or_stays_within_bounds", WIDTHS, lambda: Wrong(decoder=_making_up)),
    ("a_body_cut_short_is_refused_or_stays_within_bounds", WIDTHS, lambda: Wrong(decoder=_letting_through)),
    ("bytes_behind_a_body_are_refused_or_stay_within_bounds", WIDTHS, lambda: Wrong(decoder=_letting_through)),
    ("an_empty_body_is_refused_where_something_changed", WIDTHS, lambda: Wrong(decoder=_forgiving)),
    ("random_bytes_are_refused_or_stay_within_bounds", WIDTHS, lambda: Wrong(decoder=_making_up)),
    ("a_header_with_another_count_is_refused", WIDTHS, lambda: Wrong(decoder=_forgiving)),
    ("a_header_with_a_smaller_frame_is_refused", WIDTHS, lambda: Wrong(decoder=_forgiving)),
    ("a_header_with_another_width_is_refused_or_stays_within_bounds", WIDTHS, lambda: Wrong(decoder=_letting_through)),
    ("sizes_in_a_body_are_checked_before_they_are_allocated", WIDTHS, lambda: Wrong(decoder=_generous)),
]
EACH = [pytest.param(test, one, wrong, id=f"{test}{one}") for test, args, wrong in BREAKS for one in args]


@pytest.mark.parametrize(("test", "args", "wrong"), EACH)
def test_the_kit_notices(test: str, args: tuple[Any, ...], wrong: Callable[[], Any]) -> None:
    kit = CodecTests()
    kit.codec = wrong()
    with pytest.raises((AssertionError, pytest.fail.Exception, ValueError)):
        getattr(kit, f"test_{test}")(*args)


def test_every_test_of_the_kit_can_fail() -> None:
    assert kit_tests(CodecTests) - {f"test_{name}" for name, *_ in BREAKS} == set()


def test_a_codec_that_is_passed_as_a_value_need_not_be_installed() -> None:
    kit = CodecTests()
    kit.codec, kit.registered = Wrong(name="nowhere"), False
    with pytest.raises(pytest.skip.Exception):
        kit.test_a_receiver_finds_it_by_the_name_that_chunks_carry()
