"""The state digest: per tensor, two 64-bit lanes of a sum over its elements.

Being a sum, it splits over ranks and frames, and a change of K elements updates it in O(K): subtract the sums of
the old bits, add those of the new. It finds mistakes, not forgers: it is not a MAC.
Mixing: `dcr.kernels.reference.mix`.
"""

from __future__ import annotations

import hashlib

import numpy as np

from dcr.errors import DigestMismatch
from dcr.layout.schema import Schema
from dcr.layout.views import Lanes


def zero(tensors: int) -> Lanes:
    """The digest [T, 2] of tensors without elements."""
    return np.zeros((tensors, 2), np.uint64)


def root(lanes: Lanes) -> bytes:
    """One 32-byte name for the digests [T, 2] of all tensors."""
    return hashlib.blake2b(pack(lanes), digest_size=32).digest()


def pack(lanes: Lanes) -> bytes:
    """Digests as little-endian bytes, 16 per tensor."""
    return lanes.astype("<u8").tobytes()


def unpack(data: bytes | memoryview) -> Lanes:
    """The inverse of `pack`."""
    return np.frombuffer(data, "<u8").reshape(-1, 2).astype(np.uint64)


def total(lanes: Lanes) -> bytes:
    """The two lanes summed over tensors, as 16 bytes."""
    return pack(lanes.sum(axis=0, dtype=np.uint64, keepdims=True))


def equal(found: Lanes, expected: Lanes) -> bool:
    """Whether all tensors have the digests [T, 2] that are expected."""
    return bool((found == expected).all())


def require_equal(found: Lanes, expected: Lanes, schema: Schema, what: str) -> None:
    """Compare digests tensor by tensor.

    Raises:
        DigestMismatch: names the tensors that differ.
    """
    differing = np.flatnonzero((found != expected).any(axis=1))
    if len(differing):
        names = ", ".join(schema.tensors[index].name for index in differing[:5])
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise DigestMismatch(f"{what}: {len(differing)} of {len(schema.tensors)} tensors differ: {names}{more}")
