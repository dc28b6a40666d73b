"""Codecs: a change of one frame to bytes and back. Pure; every size is checked before it is allocated.

Layout of a body (all integers little-endian, as on every machine that dcr runs on):

    format   1 byte   one of RAW_SPARSE, RAW_DENSE, GAPS_SPARSE, PLANES_DENSE
    streams  each:    encoding 1 byte (0 stored, 1 zstd), raw size 4 bytes, encoded size 4 bytes, the bytes

    RAW_SPARSE    positions uint32 [K], values [K]
    RAW_DENSE     values [N]
    GAPS_SPARSE   gaps, symbols, exceptions:
                  gap      distance to the previous position less 1 (the first one counts from -1); a byte, with
                           255 meaning "255 further, and another byte follows"
                  symbol   zigzag(value) - 1 in a byte for values read as signed steps; 255 and above is the byte 255
                           and the value itself, at full width, in the exceptions
    PLANES_DENSE  one stream per byte of the element width, lowest first

The number of changed elements K, the operation and the element width travel in the chunk's header.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from dcr.errors import PayloadError
from dcr.patch import Change, Operation
from dcr.views import UNSIGNED, Bits, Positions

RAW_SPARSE, RAW_DENSE, GAPS_SPARSE, PLANES_DENSE = range(4)
STORED, ZSTD = range(2)
ESCAPE = 255
_STREAM = struct.Struct("<BII")


@dataclass(frozen=True, slots=True)
class Raw:
    """Positions and values as they are: the fastest to make, 4 bytes + width per change."""

    name: str = "raw"
    needs_base: bool = False

    def encode(self, change: Change, numel: int) -> bytes:
        """See `dcr.seams.Codec.encode`."""
        del numel
        if change.positions is None:
            return _join(RAW_DENSE, [_stored(change.values)])
        return _join(RAW_SPARSE, [_stored(change.positions), _stored(change.values)])

    def decode(self, body: bytes, *, operation: Operation, changed: int, numel: int, width: int) -> Change:
        """See `decode`."""
        return decode(body, operation=operation, changed=changed, numel=numel, width=width)


@dataclass(frozen=True, slots=True)
class Gaps:
    """Byte gaps and step symbols as separate streams, each coded by zstd where that is smaller."""

    name: str = "gaps"
    needs_base: bool = False
    level: int = 1

    def encode(self, change: Change, numel: int) -> bytes:
        """See `dcr.seams.Codec.encode`."""
        del numel
        if change.positions is None:
            return _join(PLANES_DENSE, [self._packed(plane) for plane in _planes(change.values)])
        gaps, (symbols, exceptions) = gaps_of(change.positions), symbols_of(change.values)
        return _join(GAPS_SPARSE, [self._packed(gaps), self._packed(symbols), self._packed(exceptions.view(np.uint8))])

    def decode(self, body: bytes, *, operation: Operation, changed: int, numel: int, width: int) -> Change:
        """See `decode`."""
        return decode(body, operation=operation, changed=changed, numel=numel, width=width)

    def _packed(self, raw: NDArray[Any]) -> bytes:
        """One stream: zstd with small hash tables and long matches, which suits bytes without structure."""
        parameters = zstandard.ZstdCompressionParameters.from_level(
            self.level, strategy=zstandard.STRATEGY_FAST, hash_log=6, min_match=7, window_log=17, source_size=raw.nbytes
        )
        packed = zstandard.ZstdCompressor(compression_params=parameters).compress(raw.tobytes())
        if len(packed) >= raw.nbytes:
            return _stored(raw)
        return _STREAM.pack(ZSTD, raw.nbytes, len(packed)) + packed


RAW = Raw()
GAPS = Gaps()


def decode(body: bytes, *, operation: Operation, changed: int, numel: int, width: int) -> Change:
    """The change that a body describes.

    changed: K of the chunk's header; numel: elements of the frame; width: bytes per element.

    Raises:
        PayloadError: the body is not what its header says: a stream is short, long or of another size, a position
            leaves the frame, or the bytes do not decode.
    """
    if not body:
        raise PayloadError("an empty body")
    if changed > numel:
        raise PayloadError(f"{changed} changes in a frame of {numel} elements")
    dtype = UNSIGNED[width]
    match body[0]:
        case 0:
            raw_positions, raw_values = _split(body, [_exactly(4 * changed), _exactly(width * changed)])
            positions = np.frombuffer(raw_positions, np.uint32)
            values = np.frombuffer(raw_values, dtype)
        case 1:
            (raw_values,) = _split(body, [_exactly(width * numel)])
            return _dense(operation, changed, numel, np.frombuffer(raw_values, dtype))
        case 2:
            sizes = [
                range(changed, changed + numel // ESCAPE + 2),
                _exactly(changed),
                range(0, width * changed + 1, width),
            ]
            raw_gaps, raw_symbols, raw_exceptions = _split(body, sizes)
            positions = positions_of(np.frombuffer(raw_gaps, np.uint8), changed)
            values = values_of(
                np.frombuffer(raw_symbols, np.uint8), np.frombuffer(raw_exceptions, np.uint8), width, changed
            )
        case 3:
            planes = [np.frombuffer(plane, np.uint8) for plane in _split(body, [_exactly(numel)] * width)]
            return _dense(operation, changed, numel, np.stack(planes, axis=1).reshape(-1).view(dtype))
        case other:
            raise PayloadError(f"unknown body format {other}; this reader knows 0 to 3")
    if len(positions) != changed or len(values) != changed:
        raise PayloadError(f"{len(positions)} positions and {len(values)} values for {changed} changes")
    if changed and (int(positions[-1]) >= numel or (positions[1:] <= positions[:-1]).any()):
        raise PayloadError(f"positions are not ascending within a frame of {numel} elements")
    return Change(operation, positions, values)


def gaps_of(positions: Positions) -> NDArray[np.uint8]:
    """Byte gaps of ascending positions [K]: K bytes and one more for every full 255 of a gap."""
    gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1
    escapes, last = np.divmod(gaps, ESCAPE)
    ends = np.cumsum(escapes + 1) - 1
    stream = np.full(int(ends[-1]) + 1 if len(ends) else 0, ESCAPE, np.uint8)
    stream[ends] = last
    return stream


def positions_of(gaps: NDArray[np.uint8], changed: int) -> Positions:
    """The inverse of `gaps_of`.

    Raises:
        PayloadError: the stream does not hold `changed` gaps, ends within one, or goes beyond 2^32.
    """
    is_last = gaps != ESCAPE
    if np.count_nonzero(is_last) != changed or (len(gaps) and not is_last[-1]):
        raise PayloadError(f"the gap stream does not hold {changed} gaps")
    reached = np.cumsum(gaps.astype(np.int64) + is_last)
    if len(reached) and reached[-1] > 1 << 32:
        raise PayloadError("the gap stream leaves the frame")
    positions: Positions = (reached[is_last] - 1).astype(np.uint32)
    return positions


def symbols_of(values: Bits) -> tuple[NDArray[np.uint8], Bits]:
    """Step symbols [K] in a byte each, and the values that need an escape."""
    width = values.dtype.itemsize
    one, top = values.dtype.type(1), values.dtype.type(8 * width - 1)
    sign = np.zeros_like(values) - (values >> top)
    zigzag = ((values << one) ^ sign) - one  # a zero value wraps round to the top and is escaped
    escaped = zigzag >= ESCAPE
    return np.where(escaped, ESCAPE, zigzag).astype(np.uint8), values[escaped]


def values_of(symbols: NDArray[np.uint8], exceptions: NDArray[np.uint8], width: int, changed: int) -> Bits:
    """The inverse of `symbols_of`.

    Raises:
        PayloadError: the number of symbols or exceptions is not the one needed.
    """
    escaped = symbols == ESCAPE
    if len(symbols) != changed or np.count_nonzero(escaped) * width != len(exceptions):
        raise PayloadError(f"the symbol stream does not hold {changed} values, or its exceptions do not fit")
    unsigned = UNSIGNED[width]
    zigzag = symbols.astype(unsigned) + unsigned.type(1)
    values: Bits = (zigzag >> unsigned.type(1)) ^ (np.zeros_like(zigzag) - (zigzag & unsigned.type(1)))
    values[escaped] = exceptions.view(unsigned)
    return values


def worst_case_bytes(numel: int, width: int) -> int:
    """No encoded body of a frame is larger than this."""
    return numel * (width + 4) + 16 * (width + 4)


def _dense(operation: Operation, changed: int, numel: int, values: Bits) -> Change:
    if changed != numel or operation is not Operation.OVERWRITE:
        raise PayloadError("a dense body must overwrite all elements of its frame")
    return Change(operation, None, values)


def _planes(values: Bits) -> list[NDArray[np.uint8]]:
    octets = values.view(np.uint8).reshape(len(values), values.itemsize)
    return [np.ascontiguousarray(octets[:, plane]) for plane in range(octets.shape[1])]


def _stored(raw: NDArray[Any]) -> bytes:
    return _STREAM.pack(STORED, raw.nbytes, raw.nbytes) + raw.tobytes()


def _join(kind: int, streams: Sequence[bytes]) -> bytes:
    return b"".join([bytes([kind]), *streams])


def _exactly(nbytes: int) -> range:
    return range(nbytes, nbytes + 1)


def _split(body: bytes, sizes: Sequence[range]) -> list[bytes]:
    """The raw streams of a body; `sizes` are those that each may have, in bytes.

    Raises:
        PayloadError: a stream has another size, the body ends early, or something is left over.
    """
    at, streams = 1, []
    for index, allowed in enumerate(sizes):
        if at + _STREAM.size > len(body):
            raise PayloadError(f"the body ends before stream {index}")
        encoding, raw_size, size = _STREAM.unpack_from(body, at)
        at += _STREAM.size
        if raw_size not in allowed or at + size > len(body):
            raise PayloadError(f"stream {index} declares {raw_size} bytes, {size} encoded; expected one of {allowed}")
        streams.append(_unpacked(encoding, body[at : at + size], raw_size, index))
        at += size
    if at != len(body):
        raise PayloadError(f"{len(body) - at} bytes follow the last stream")
    return streams


def _unpacked(encoding: int, data: bytes, raw_size: int, index: int) -> bytes:
    """One stream, decoded. What a zstd frame says of its size is compared before anything is allocated."""
    if encoding == ZSTD:
        try:
            if zstandard.frame_content_size(data) != raw_size:
                raise PayloadError(f"stream {index}: its zstd frame does not say {raw_size} bytes, as it should")
            data = zstandard.ZstdDecompressor().decompress(data, max_output_size=raw_size, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise PayloadError(f"stream {index} does not decompress: {error}") from error
    elif encoding != STORED:
        raise PayloadError(f"stream {index}: unknown encoding {encoding}")
    if len(data) != raw_size:
        raise PayloadError(f"stream {index} has {len(data)} bytes, {raw_size} declared")
    return data
