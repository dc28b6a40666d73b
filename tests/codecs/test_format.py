"""docs/format.md says what the codecs write: its examples are decoded, and written again to the byte."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dcr import kernels
from dcr.codecs import codec
from dcr.codecs.codec import BALANCED, CLASS_SPARSE, CLASSES, GAPS_SPARSE, PLANES_DENSE, RAW_DENSE, RAW_SPARSE
from dcr.codecs.patch import Change, Operation
from dcr.kernels import exponents, streams

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
STREAMS, BY_CLASS, PACKED, BODY = (bytes.fromhex(block) for block in re.findall(r"```hex\n(.*?)```", PAGE, re.DOTALL))


def assert_decodes(body: bytes, numel: int, positions: list[int], values: list[int]) -> None:
    expected = Change(Operation.STEP, np.array(positions, np.uint32), np.array(values, np.int16).view(np.uint16))
    found = codec.decode(body, operation=Operation.STEP, changed=len(positions), numel=numel, width=2)
    assert found.positions is not None
    assert found.positions.tolist() == positions
    np.testing.assert_array_equal(found.values, expected.values)
    assert BALANCED.encode(expected, numel) == body


def test_the_example_of_stored_streams_decodes() -> None:
    assert_decodes(STREAMS, 1000, [1, 2, 258, 514], [1, -1, 0x0203, 0])


@pytest.mark.parametrize("implementation", [kernels, streams], ids=["compiled", "reference"])
def test_the_example_of_a_packed_stream_decodes(implementation: object) -> None:
    data = np.array([0, 1, 0, 2] * 12, np.uint8)
    np.testing.assert_array_equal(implementation.unpack(np.frombuffer(PACKED, np.uint8), 48), data)  # type: ignore[attr-defined]
    assert implementation.pack(data).tobytes() == PACKED  # type: ignore[attr-defined]


def test_the_example_of_a_body_decodes() -> None:
    assert_decodes(BODY, 100, list(range(0, 96, 2)), [-1, 1, -1, -2] * 12)


def test_the_example_by_class_decodes() -> None:
    base = np.array([0x3C80, 0x3F80, 0x3C00, 0xBF00, 0x3800, 0xBC90, 0x3F80, 0x0001], np.uint16)
    assert exponents.grades_of(base).tolist() == [121, 127, 120, 126, 112, 121, 127, 0]
    found = CLASSES.decode(BY_CLASS, operation=Operation.STEP, changed=4, numel=8, width=2, base=base)
    assert found.positions is not None
    assert found.positions.tolist() == [0, 2, 5, 6]
    assert found.values.view(np.int16).tolist() == [1, -1, 2, 1]
    cuts = np.frombuffer(BY_CLASS, np.uint8, 3, 1)
    assert kernels.split(base, cuts, found.positions, found.values)[2] == [0, 1, 2, 1]


@pytest.mark.parametrize(
    ("name", "byte"),
    [
        ("RAW_SPARSE", RAW_SPARSE),
        ("RAW_DENSE", RAW_DENSE),
        ("GAPS_SPARSE", GAPS_SPARSE),
        ("PLANES_DENSE", PLANES_DENSE),
        ("CLASS_SPARSE", CLASS_SPARSE),
    ],
)
def test_the_page_names_each_kind_of_body(name: str, byte: int) -> None:
    assert f"| {byte} | {name} |" in PAGE
