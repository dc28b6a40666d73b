"""Codecs: a change of one frame to bytes and back. Pure; every size is checked before it is allocated.

    N  elements of a frame      K  changed elements      n  bytes of a stream

Layout of a body (all integers little-endian, as on every machine that dcr runs on; docs/format.md has an example):

    format   1 byte   one of RAW_SPARSE, RAW_DENSE, GAPS_SPARSE, PLANES_DENSE, CLASS_SPARSE
    streams  each:    encoding 1 byte (STORED, ZSTD, HUFFMAN), raw size 4 bytes, encoded size 4 bytes, the bytes

    RAW_SPARSE    positions uint32 [K], values [K]
    RAW_DENSE     values [N]
    GAPS_SPARSE   gaps, symbols, exceptions:
                  gap      distance to the previous position less 1 (the first one counts from -1); a byte, with
                           255 meaning "255 further, and another byte follows"
                  symbol   zigzag(value) - 1 in a byte for values read as signed steps; 255 and above is the byte 255
                           and the value itself, at full width, in the exceptions
    PLANES_DENSE  one stream per byte of the element width, lowest first
    CLASS_SPARSE  three cuts of a byte each, before the streams; then for each of four classes the streams of
                  GAPS_SPARSE, positions being numbers within the class: see dcr.kernels.exponents

The number of changed elements K, the operation and the element width travel in the chunk's header.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from dcr import kernels
from dcr.codecs.patch import Change, Operation
from dcr.errors import BaseMismatch, LayoutError, PayloadError
from dcr.kernels import exponents
from dcr.kernels.streams import ESCAPE, Octets
from dcr.layout.views import UNSIGNED, Bits, Positions

RAW_SPARSE, RAW_DENSE, GAPS_SPARSE, PLANES_DENSE, CLASS_SPARSE = range(5)
STORED, ZSTD, HUFFMAN = range(3)
SHORT = 32  # bytes: no encoding is tried for streams below it
SAMPLED = 4096  # bytes at least, of a stream in which matches are looked for
FEW_EXCEPTIONS = 100  # bytes of the other streams for each: coding such exceptions takes time and saves next to nothing
FEW = 4096  # changes: below it, what describes four classes may cost more than they save
_STREAM = struct.Struct("<BII")
_Stream = tuple[bytes, memoryview]  # its encoding and sizes, and its bytes


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
    """Byte gaps and step symbols as separate streams; a change that is larger so than raw stays raw.

    entropy: whether each stream is coded by whatever makes it smallest, or stored as it is.
    """

    name: str
    entropy: bool
    needs_base: bool = False

    def encode(self, change: Change, numel: int) -> bytes:
        """See `dcr.seams.Codec.encode`.

        Raises:
            LayoutError: positions do not ascend strictly.
        """
        if change.positions is None:
            if not self.entropy:
                return RAW.encode(change, numel)
            return _join(
                PLANES_DENSE, [_smallest(plane, structured=True) for plane in kernels.planes_of(change.values)]
            )
        coded = _stored if not self.entropy else _smallest
        body = _join(GAPS_SPARSE, _sparse(change.positions, change.values, coded))
        if len(body) > raw_sparse_bytes(change):
            return RAW.encode(change, numel)
        return body

    def decode(self, body: bytes, *, operation: Operation, changed: int, numel: int, width: int) -> Change:
        """See `decode`."""
        return decode(body, operation=operation, changed=changed, numel=numel, width=width)


@dataclass(frozen=True, slots=True)
class Classes:
    """The streams of `Gaps` for each of four classes of elements, told apart by their old bits."""

    name: str = "classes"
    needs_base: bool = True

    def encode(self, change: Change, numel: int, *, base: Bits) -> bytes:
        """Bytes of a change of a frame whose old bits are base [N]; a dense one, or a tiny one, may do without them.

        Raises:
            LayoutError: positions do not ascend strictly.
        """
        if change.positions is None:
            return BALANCED.encode(change, numel)
        cuts = exponents.cuts_of(base, change.positions)
        ranks, values, counts = kernels.split(base, cuts, change.positions, change.values)
        ends = np.cumsum(counts)[:-1]
        parts = zip(np.split(ranks, ends), np.split(values, ends), strict=True)
        streams = [stream for part in parts for stream in _sparse(*part, _smallest)]
        body = _join(CLASS_SPARSE, streams, cuts.tobytes())
        if len(ranks) < FEW or len(body) > raw_sparse_bytes(change):
            return min(body, BALANCED.encode(change, numel), key=len)
        return body

    def decode(self, body: bytes, *, operation: Operation, changed: int, numel: int, width: int, base: Bits) -> Change:
        """See `decode`; base: the frame's old bits [N].

        Raises:
            BaseMismatch: the body does not describe a change of these old bits.
        """
        if body[:1] != bytes([CLASS_SPARSE]):
            return decode(body, operation=operation, changed=changed, numel=numel, width=width)
        if base.shape != (numel,) or base.itemsize != width:
            raise BaseMismatch(f"old bits {base.dtype} {base.shape} for a frame of {numel} elements of {width} bytes")
        _require_count(changed, numel)
        return _merged(body, operation, changed, base)


RAW = Raw()
FAST = Gaps("fast", entropy=False)
GAPS = BALANCED = Gaps("gaps", entropy=True)  # chunks carry the older name: every reader finds that one
SMALL = CLASSES = Classes()
_NAMED: dict[str, Raw | Gaps | Classes] = {codec.name: codec for codec in (RAW, FAST, GAPS, CLASSES)}


def named(name: str) -> Raw | Gaps | Classes:
    """One of the codecs here by the name that chunks carry."""
    return _NAMED[name]


def decode(body: bytes, *, operation: Operation, changed: int, numel: int, width: int) -> Change:
    """The change that a body describes.

    changed: K of the chunk's header; numel: elements of the frame; width: bytes per element.

    Raises:
        PayloadError: the body is not what its header says: a stream is short, long or of another size, a position
            leaves the frame, or the bytes do not decode.
    """
    if not body:
        raise PayloadError("an empty body")
    _require_count(changed, numel)
    dtype = UNSIGNED[width]
    match body[0]:
        case 0:
            octets, raw_values = _split(body, [_exactly(4 * changed), _exactly(width * changed)])
            return Change(operation, _ascending(octets.view(np.uint32), numel), raw_values.view(dtype))
        case 1:
            (raw_values,) = _split(body, [_exactly(width * numel)])
            return _dense(operation, changed, numel, raw_values.view(dtype))
        case 2:
            sizes = [
                range(changed, changed + numel // ESCAPE + 1),
                _exactly(changed),
                range(0, width * changed + 1, width),
            ]
            gaps, symbols, exceptions = _split(body, sizes)
            positions = kernels.positions_of(gaps, changed, numel)
            return Change(operation, positions, kernels.values_of(symbols, exceptions, width))
        case 3:
            planes = _split(body, [_exactly(numel)] * width)
            return _dense(operation, changed, numel, kernels.of_planes(planes))
        case other:
            raise PayloadError(f"unknown body format {other}; without the old bits this reader knows 0 to 3")


def raw_sparse_bytes(change: Change) -> int:
    """The size of a sparse change's raw body; no other is larger."""
    positions = 0 if change.positions is None else change.positions.nbytes
    return 1 + 2 * _STREAM.size + positions + change.values.nbytes


def worst_case_bytes(numel: int, width: int) -> int:
    """No encoded body of a frame is larger than this."""
    return numel * (width + 4) + 16 * (width + 4)


def _require_count(changed: int, numel: int) -> None:
    if not 0 <= changed <= numel < 1 << 32:
        raise PayloadError(f"{changed} changes in a frame of {numel} elements")


def _merged(body: bytes, operation: Operation, changed: int, base: Bits) -> Change:
    """A change that was split by class, whole again."""
    numel, width = len(base), base.itemsize
    cuts = np.frombuffer(body, np.uint8, exponents.CUTS, 1) if len(body) > exponents.CUTS else None
    if cuts is None or (cuts[1:] < cuts[:-1]).any():
        raise PayloadError("a body by class does not begin with ascending cuts")
    sizes = [range(changed + numel // ESCAPE + 1), range(changed + 1), range(0, width * changed + 1, width)]
    streams = _find(body, sizes * exponents.CLASSES, 1 + exponents.CUTS)
    counts = [raw_size for _, _, raw_size in streams[1::3]]
    if sum(counts) != changed or sum(raw_size for _, _, raw_size in streams[::3]) > changed + numel // ESCAPE:
        raise PayloadError(f"a body by class has {counts} changes in its classes, {changed} are declared")
    raw = _unpack(streams)
    ranks = [kernels.positions_of(raw[3 * at], count, numel) for at, count in enumerate(counts)]
    values = [kernels.values_of(raw[3 * at + 1], raw[3 * at + 2], width) for at in range(exponents.CLASSES)]
    return Change(operation, *kernels.merge(base, cuts, counts, np.concatenate(ranks), np.concatenate(values)))


def _dense(operation: Operation, changed: int, numel: int, values: Bits) -> Change:
    if changed != numel or operation is not Operation.OVERWRITE:
        raise PayloadError("a dense body must overwrite all elements of its frame")
    return Change(operation, None, values)


def _ascending(positions: Positions, numel: int) -> Positions:
    try:
        kernels.check_ascending(positions, numel)
    except LayoutError as error:
        raise PayloadError(f"positions are not ascending within a frame of {numel} elements: {error}") from None
    return positions


def _sparse(positions: Positions, values: Bits, coded: Callable[[Octets], _Stream]) -> list[_Stream]:
    """The gap, symbol and exception streams of a change; exceptions that hardly count are stored."""
    gaps, (symbols, exceptions) = kernels.gaps_of(positions), kernels.symbols_of(values)
    few = FEW_EXCEPTIONS * exceptions.nbytes < gaps.nbytes + symbols.nbytes
    return [coded(gaps), coded(symbols), (_stored if few else coded)(exceptions.view(np.uint8))]


def _stored(raw: NDArray[Any]) -> _Stream:
    return _STREAM.pack(STORED, raw.nbytes, raw.nbytes), raw.view(np.uint8).data


def _smallest(raw: Octets, *, structured: bool = False) -> _Stream:
    """One stream [n] in the encoding that makes it smallest.

    zstd is measured only where its matches can beat single bytes' codes: see `_may_match`.
    """
    if raw.nbytes < SHORT:
        return _stored(raw)
    packed, encoding = kernels.pack(raw).data, HUFFMAN
    if _may_match(raw, len(packed) or raw.nbytes, structured):
        matched = _zstd(raw)
        if not packed or len(matched) < len(packed):
            packed, encoding = memoryview(matched), ZSTD
    elif not packed:
        return _stored(raw)
    if len(packed) >= raw.nbytes:
        return _stored(raw)
    return _STREAM.pack(encoding, raw.nbytes, len(packed)), packed


def _may_match(raw: Octets, coded: int, structured: bool) -> bool:
    """Whether zstd may do better than `coded` bytes.

    It may where no code saves anything, where some byte comes in long runs (codes are as short as 1.5 bits, a sample is
    nearly all one byte), and where the stream may be structured. There a sixteenth of it in the middle tells. Nothing
    is tried where there is little to save.
    """
    if raw.nbytes < 8 * SHORT:
        return False
    runs = 16 * coded < 3 * raw.nbytes and bool(
        np.bincount(_middle(raw, SAMPLED // 4)).max() * 10 > 9 * min(raw.nbytes, SAMPLED // 4)
    )
    if coded < raw.nbytes and not runs and not structured:
        return False
    size = max(raw.nbytes // 16, SAMPLED)
    return size >= raw.nbytes or len(_zstd(_middle(raw, size))) * raw.nbytes < coded * size


def _middle(raw: Octets, size: int) -> Octets:
    start = max(0, raw.nbytes - size) // 2
    return raw[start : start + size]


def _zstd(raw: Octets) -> bytes:
    """Small hash tables and long matches: short ones are what the Huffman coder is for."""
    parameters = zstandard.ZstdCompressionParameters.from_level(
        1, strategy=zstandard.STRATEGY_FAST, hash_log=6, min_match=7, window_log=17, source_size=raw.nbytes
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compress(raw.data)


def _join(kind: int, streams: Sequence[_Stream], before: bytes = b"") -> bytes:
    parts: Iterator[bytes | memoryview] = chain.from_iterable(streams)
    return b"".join([bytes([kind]), before, *parts])


def _exactly(nbytes: int) -> range:
    return range(nbytes, nbytes + 1)


def _split(body: bytes, sizes: Sequence[range]) -> list[Octets]:
    """The raw streams of a body; `sizes` are those that each may have, in bytes. Raises as `_find`."""
    return _unpack(_find(body, sizes, 1))


def _find(body: bytes, sizes: Sequence[range], at: int) -> list[tuple[int, Octets, int]]:
    """The streams from byte `at` on: encoding, encoded bytes, raw size.

    Raises:
        PayloadError: a stream has another size, the body ends early, or something is left over.
    """
    found = []
    for index, allowed in enumerate(sizes):
        if at + _STREAM.size > len(body):
            raise PayloadError(f"the body ends before stream {index}")
        encoding, raw_size, size = _STREAM.unpack_from(body, at)
        at += _STREAM.size
        if raw_size not in allowed or at + size > len(body):
            raise PayloadError(f"stream {index} declares {raw_size} bytes, {size} encoded; expected one of {allowed}")
        found.append((encoding, np.frombuffer(body, np.uint8, size, at), raw_size))
        at += size
    if at != len(body):
        raise PayloadError(f"{len(body) - at} bytes follow the last stream")
    return found


def _unpack(streams: Sequence[tuple[int, Octets, int]]) -> list[Octets]:
    return [_unpacked(encoding, data, raw_size, index) for index, (encoding, data, raw_size) in enumerate(streams)]


def _unpacked(encoding: int, data: Octets, raw_size: int, index: int) -> Octets:
    """One stream, decoded. What a zstd frame says of its size is compared before anything is allocated."""
    match encoding:
        case 0:
            raw = np.frombuffer(data.tobytes(), np.uint8)  # a copy, aligned for elements of any width
        case 1:
            raw = np.frombuffer(_unzstd(data, raw_size, index), np.uint8)
        case 2:
            raw = kernels.unpack(data, raw_size)
        case other:
            raise PayloadError(f"stream {index}: unknown encoding {other}; this reader knows 0 to 2")
    if len(raw) != raw_size:
        raise PayloadError(f"stream {index} has {len(raw)} bytes, {raw_size} declared")
    return raw


def _unzstd(data: Octets, raw_size: int, index: int) -> bytes:
    try:
        if zstandard.frame_content_size(data.data) != raw_size:
            raise PayloadError(f"stream {index}: its zstd frame does not say {raw_size} bytes, as it should")
        return zstandard.ZstdDecompressor().decompress(data.data, max_output_size=raw_size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadError(f"stream {index} does not decompress: {error}") from error
