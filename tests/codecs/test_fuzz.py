"""The corpus of tests/fuzz is what the encoders write today, and mutations of it are read or refused alike.

`tests/native/run.sh` does the same with sanitizers, without Python, and for as long as one likes.
"""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest

from dcr import kernels
from dcr.errors import BaseMismatch, LayoutError, PayloadError
from dcr.kernels import exponents, streams
from dcr.kernels.streams import Octets
from dcr.layout.views import UNSIGNED

FUZZ = Path(__file__).parents[1] / "fuzz"
CORPUS = {path.name: path.read_bytes() for path in sorted((FUZZ / "corpus").iterdir())}


def test_the_corpus_is_what_the_encoders_write() -> None:
    spec = importlib.util.spec_from_file_location("make_corpus", FUZZ / "make_corpus.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.inputs() == CORPUS


def decode(implementation: object, data: bytes) -> np.ndarray | None:
    """One input of the corpus, decoded as decoders.cpp does; None where it is refused."""
    if len(data) < 9:
        return None
    decoder, first, second = struct.unpack_from("<BII", data)
    stream: Octets = np.frombuffer(data, np.uint8, offset=9)
    first = min(first, 1 << 20)
    try:
        match decoder % 4:
            case 0:
                return implementation.positions_of(stream, first, second)  # type: ignore[attr-defined]
            case 1:
                return implementation.values_of(stream[:first], stream[first:], 1 << (second & 3))  # type: ignore[attr-defined]
            case 2:
                return implementation.unpack(stream, first)  # type: ignore[attr-defined]
            case _:
                return merge(exponents if implementation is streams else kernels, stream, first, 1 << (second & 3))
    except (PayloadError, BaseMismatch, LayoutError):
        return None


def merge(implementation: object, stream: Octets, K: int, width: int) -> np.ndarray | None:
    """Cuts, counts of all classes but the last, numbers within classes, old bits."""
    if len(stream) < 6 or (len(stream) - 6) // 4 < K:
        return None
    counts: list[int] = []
    for count in stream[3:6].tolist():
        counts.append(min(count, K - sum(counts)))
    counts.append(K - sum(counts))
    ranks = np.frombuffer(stream[6 : 6 + 4 * K].tobytes(), np.uint32)
    octets = stream[6 + 4 * K :]
    base = np.frombuffer(octets.tobytes(), UNSIGNED[width], len(octets) // width)
    values = np.zeros(K, UNSIGNED[width])
    positions, _ = implementation.merge(base, stream[:3], counts, ranks, values)  # type: ignore[attr-defined]
    return positions


@pytest.mark.parametrize("name", CORPUS)
def test_every_input_of_the_corpus_is_accepted(name: str) -> None:
    for implementation in (kernels, streams):
        assert decode(implementation, CORPUS[name]) is not None


@pytest.mark.parametrize("name", CORPUS)
def test_mutations_of_an_input_are_read_or_refused_alike(name: str) -> None:
    random = np.random.default_rng(list(name.encode()))
    for _ in range(120):
        data = bytearray(CORPUS[name])
        for _ in range(random.integers(1, 4)):
            at = int(random.integers(0, min(len(data), 64) if random.random() < 0.5 else len(data)))
            match random.integers(0, 4):
                case 0:
                    data[at] ^= 1 << int(random.integers(0, 8))
                case 1:
                    data[at] = int(random.choice([0, 255, int(random.integers(0, 256))]))
                case 2:
                    data[at:at] = random.bytes(int(random.integers(0, 9)))
                case _:
                    del data[at : at + int(random.integers(0, 9))]
            data += b"\0" * (not data)
        found, expected = decode(kernels, bytes(data)), decode(streams, bytes(data))
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            np.testing.assert_array_equal(found, expected)
