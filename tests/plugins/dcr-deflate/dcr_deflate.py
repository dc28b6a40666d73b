"""A codec: positions and values through zlib, or as they are where that is smaller."""

import zlib
from dataclasses import dataclass

import numpy as np

from dcr.codecs.patch import Change, Operation
from dcr.errors import PayloadError
from dcr.layout.views import UNSIGNED

SPARSE, DENSE, DEFLATED = 1, 2, 4  # the first byte: one of the first two, and perhaps the last


@dataclass(frozen=True)
class Deflate:
    name: str = "deflate"
    needs_base: bool = False

    def encode(self, change: Change, numel: int) -> bytes:
        kind, arrays = (
            (DENSE, [change.values]) if change.positions is None else (SPARSE, [change.positions, change.values])
        )
        plain = b"".join(array.tobytes() for array in arrays)
        packed = zlib.compress(plain, 1)
        return bytes([kind | DEFLATED]) + packed if len(packed) < len(plain) else bytes([kind]) + plain

    def decode(self, body: bytes, *, operation: Operation, changed: int, numel: int, width: int) -> Change:
        kind = body[0] & ~DEFLATED if body else 0
        if kind not in (SPARSE, DENSE) or changed > numel:
            raise PayloadError(f"a body of kind {kind} with {changed} changes of {numel} elements")
        head = 4 * changed if kind == SPARSE else 0
        plain = _plain(body, head + width * changed)
        values = np.frombuffer(plain[head:], UNSIGNED[width])
        if kind == DENSE:
            if changed != numel or operation is not Operation.OVERWRITE:
                raise PayloadError("a dense body must overwrite all elements of its frame")
            return Change(operation, None, values)
        positions = np.frombuffer(plain[:head], np.uint32)
        if changed and (positions[-1] >= numel or (positions[1:] <= positions[:-1]).any()):
            raise PayloadError(f"positions do not ascend within {numel} elements")
        return Change(operation, positions, values)


CODEC = Deflate()


def _plain(body: bytes, size: int) -> bytes:
    """What follows the first byte of a body, which must be so many bytes; never makes more of it."""
    if not body[0] & DEFLATED:
        plain, whole = body[1:], True
    else:
        stream = zlib.decompressobj()
        try:
            plain = stream.decompress(body[1:], size + 1)
        except zlib.error as error:
            raise PayloadError(f"it does not inflate: {error}") from error
        whole = stream.eof and not stream.unused_data
    if len(plain) != size or not whole:
        raise PayloadError(f"expected {size} bytes of positions and values, found {len(plain)} or more")
    return plain
