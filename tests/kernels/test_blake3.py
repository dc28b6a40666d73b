"""BLAKE3: its published test vectors, and the compiled hash equal to the numpy one, at every level."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from dcr import kernels
from dcr.kernels import hashing as blake3

_native = pytest.importorskip("dcr._native", reason="built without the compiled kernels")

# Of the input 0, 1, 2, ..., 250, 0, 1, ...: BLAKE3's test_vectors.json, by bytes of input.
VECTORS = {
    0: "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
    1: "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
    1024: "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
    1025: "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
    2048: "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a",
    31744: "62b6960e1a44bcc1eb1a611a8d6235b6b4b78f32e7abc4fb4c6cdcce94895c47",
    102400: "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
}


@pytest.fixture(params=_native.features()["levels"], autouse=True, scope="module")
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    yield _native.use_level(request.param)
    _native.use_level(_native.features()["levels"][-1])


@pytest.mark.parametrize("n", VECTORS)
def test_published_vectors(n: int) -> None:
    data = (np.arange(n) % 251).astype(np.uint8).tobytes()
    assert kernels.blake3(data).hex() == blake3.blake3(data).hex() == VECTORS[n]


@pytest.mark.parametrize("n", [2, 63, 64, 65, 127, 128, 1023, 1026, 2047, 2049, 3072, 3073, 4096, 5120, 16384, 17408])
def test_sizes_around_blocks_and_pieces_agree(n: int) -> None:
    data = np.random.default_rng(n).bytes(n)
    assert kernels.blake3(data) == blake3.blake3(data)


@pytest.mark.parametrize("pieces", [*range(1, 36), 63, 64, 65, 255, 257])
def test_trees_of_any_shape_agree(pieces: int) -> None:
    data = np.random.default_rng(pieces).bytes(1024 * pieces + 7)
    assert kernels.blake3(data) == blake3.blake3(data)
    assert kernels.blake3(data[:-7]) == blake3.blake3(data[:-7])


def test_every_byte_counts() -> None:
    data = bytearray(np.random.default_rng(0).bytes(20_000))
    whole = kernels.blake3(bytes(data))
    for at in range(0, len(data), 997):
        data[at] ^= 1
        assert kernels.blake3(bytes(data)) != whole
        data[at] ^= 1


def test_what_is_not_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="data"):
        kernels.blake3(np.zeros((2, 2), np.uint8))  # type: ignore[arg-type]
