"""Residual groups: tensors that only their own export can make."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcr import kernels
from dcr.layout.boxes import Box, Dim
from dcr.layout.views import Bits, Lanes, Table, rows_of
from dcr.protocol import digest

# One key for all inputs: their order tells them apart.
KEYS: Lanes = digest.unpack(hashlib.blake2b(b"residual input", digest_size=16).digest())
SLICE_ELEMS = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class ResidualGroup:
    """One `dcr.seams.Residual`: what it reads, and how it is made.

    inputs: the live memory that the export reads, as flat unsigned arrays. export: makes the canonical bits, of what
    this rank makes.
    """

    tensors: tuple[int, ...]
    reason: str
    owned: bool
    inputs: Callable[[], Sequence[Bits]]
    export: Callable[[], Sequence[Bits | None] | None]

    def fingerprint(self) -> bytes:
        """See `dcr.seams.Residual.fingerprint`; one pass over the inputs."""
        return fingerprint(self.inputs())

    def convert(self) -> Sequence[Bits | None] | None:
        """See `dcr.seams.Residual.convert`."""
        return self.export()


def fingerprint(inputs: Sequence[Bits]) -> bytes:
    """The state digest of some memory: it tells that bits changed, not which."""
    parts = [
        digest.pack(kernels.digest(_table(bits[start : start + SLICE_ELEMS]), KEYS))
        for bits in inputs
        for start in range(0, len(bits), SLICE_ELEMS)
    ]
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def _table(bits: Bits) -> Table:
    return Table((bits,), rows_of([(0, 0, Box(0, 0, (Dim(len(bits), 1, 1),)))]))
