"""The codec's kernels in numpy: gap and symbol streams, and a Huffman coder. The definition, byte for byte.

    N  elements of a frame      K  changed elements      n  bytes of a stream

docs/format.md describes the same bytes for whoever writes a reader of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from dcr.errors import LayoutError, PayloadError
from dcr.layout.views import UNSIGNED, Bits, Positions

Octets = NDArray[np.uint8]

ESCAPE = 255
LANES = 4  # bit streams of a packed stream
LONGEST = 12  # bits of the longest code
REPEAT, FEWEST, MOST = 15, 3, 18  # in a table: a nibble that repeats the previous length, and how often it can


def gaps_of(positions: Positions) -> Octets:
    """Byte gaps of ascending positions [K]: K bytes and one more for every full 255 of a gap."""
    gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1
    if (gaps < 0).any() or (len(positions) and positions[-1] == 0xFFFFFFFF):
        raise LayoutError("positions must ascend strictly and lie below 2^32 - 1")
    escapes, last = np.divmod(gaps, ESCAPE)
    ends = np.cumsum(escapes + 1) - 1
    stream = np.full(int(ends[-1]) + 1 if len(ends) else 0, ESCAPE, np.uint8)
    stream[ends] = last
    return stream


def positions_of(gaps: Octets, changed: int, numel: int) -> Positions:
    """The inverse of `gaps_of`: positions [K], ascending, below N.

    Raises:
        PayloadError: the stream does not hold `changed` gaps, ends within one, or leaves the frame.
    """
    is_last = gaps != ESCAPE
    reached = np.cumsum(gaps.astype(np.int64) + is_last)
    if len(reached) and reached[-1] > min(numel, 1 << 32):
        raise PayloadError(f"the gap stream leaves the frame of {numel} elements")
    if np.count_nonzero(is_last) != changed or (len(gaps) and not is_last[-1]):
        raise PayloadError(f"the gap stream does not hold {changed} gaps")
    positions: Positions = (reached[is_last] - 1).astype(np.uint32)
    return positions


def symbols_of(values: Bits) -> tuple[Octets, Bits]:
    """Step symbols [K] in a byte each, and the values that need an escape."""
    width = values.dtype.itemsize
    one, top = values.dtype.type(1), values.dtype.type(8 * width - 1)
    sign = np.zeros_like(values) - (values >> top)
    zigzag = ((values << one) ^ sign) - one  # a zero value wraps round to the top and is escaped
    escaped = zigzag >= ESCAPE
    return np.where(escaped, ESCAPE, zigzag).astype(np.uint8), values[escaped]


def values_of(symbols: Octets, exceptions: Octets, width: int) -> Bits:
    """The inverse of `symbols_of`; exceptions are the bytes of the escaped values.

    Raises:
        PayloadError: there are more or fewer exceptions than escapes.
    """
    escaped = symbols == ESCAPE
    if np.count_nonzero(escaped) * width != len(exceptions):
        raise PayloadError(
            f"the symbol stream has {np.count_nonzero(escaped)} escapes, but {len(exceptions)} bytes of exceptions"
        )
    unsigned = UNSIGNED[width]
    zigzag = symbols.astype(unsigned) + unsigned.type(1)
    values: Bits = (zigzag >> unsigned.type(1)) ^ (np.zeros_like(zigzag) - (zigzag & unsigned.type(1)))
    values[escaped] = np.frombuffer(exceptions.tobytes(), unsigned)
    return values


def planes_of(values: Bits) -> Octets:
    """The bytes of elements [N] by significance: octets [width, N], lowest first."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(len(values), values.itemsize).T)


def of_planes(planes: Sequence[Octets]) -> Bits:
    """The inverse of `planes_of`; each plane is an array of its own, [N]."""
    values: Bits = np.stack(planes, axis=1).reshape(-1).view(UNSIGNED[len(planes)])
    return values


def pack(data: Octets) -> Octets:
    """A stream [n], Huffman-coded; nothing where that saves less than a fiftieth of it.

    Byte i goes to bit stream i modulo 4, lowest bit first.
    """
    nothing = np.zeros(0, np.uint8)
    lengths = _lengths_of(np.bincount(data, minlength=256).tolist())
    if not any(lengths):
        return nothing
    codes = _codes_of(lengths)
    streams = [_bits_of(data[lane::LANES], codes, lengths) for lane in range(LANES)]
    sizes = np.array([len(stream) for stream in streams[:-1]], "<u4").view(np.uint8)
    packed = np.concatenate([_table_of(lengths), sizes, *streams])
    return packed if len(packed) + len(data) // 50 < len(data) else nothing


def unpack(packed: Octets, size: int) -> Octets:
    """The inverse of `pack`: a stream [size].

    Raises:
        PayloadError: the bytes are not a complete code and four bit streams that end with the last symbol; nothing is
            allocated that they cannot hold.
    """
    lengths, at = _read_table(packed)
    if sum(1 << LONGEST - length for length in lengths if length) != 1 << LONGEST:
        raise PayloadError("a Huffman-coded stream has a table that is no complete code")
    start = at + 4 * (LANES - 1)
    if start > len(packed):
        raise PayloadError("a Huffman-coded stream ends within its sizes")
    sizes = packed[at:start].view("<u4").tolist()
    ends = [start + sum(sizes[: lane + 1]) for lane in range(LANES - 1)] + [len(packed)]
    starts = [start, *ends[:-1]]
    counts = [len(range(lane, size, LANES)) for lane in range(LANES)]
    for first, end, count in zip(starts, ends, counts, strict=True):
        if first > end or end > len(packed) or count > 8 * (end - first):
            raise PayloadError(f"a Huffman-coded stream has bit streams of {sizes} bytes for {size} symbols")
    entries = _entries_of(lengths)
    data = np.zeros(size, np.uint8)
    for lane in range(LANES):
        data[lane::LANES] = _symbols_in(packed[starts[lane] : ends[lane]].tobytes(), entries, counts[lane])
    return data


def _lengths_of(counts: Sequence[int]) -> list[int]:
    """Code lengths [256] by package-merge (Larmore and Hirschberg 1990); all 0 where fewer than two bytes occur.

    At each of the 12 levels the bytes, lightest first, are merged with pairs of the level before. The 2n - 2 lightest
    at the last level are bought, with all that they are made of; each time that a byte is bought its code gets a bit
    longer. Of equal weights a byte comes before a pair, and a lower byte before a higher one.
    """
    lengths = [0] * 256
    leaves = sorted((count, byte) for byte, count in enumerate(counts) if count)
    if len(leaves) < 2:
        return lengths
    levels: list[list[tuple[int, bool]]] = []  # weight, and whether it is a pair
    merged: list[tuple[int, bool]] = []
    for _ in range(LONGEST):
        pairs = [(merged[i][0] + merged[i + 1][0], True) for i in range(0, len(merged) - 1, 2)]
        merged = sorted([*((count, False) for count, _ in leaves), *pairs])
        levels.append(merged)
    bought = 2 * len(leaves) - 2
    for level in reversed(levels):
        single = sum(not pair for _, pair in level[:bought])
        for _, byte in leaves[:single]:
            lengths[byte] += 1
        bought = 2 * (bought - single)
    return lengths


def _codes_of(lengths: Sequence[int]) -> list[int]:
    """The canonical code [256]: shorter ones first, then by byte; turned round, to be written lowest bit first."""
    codes, code = [0] * 256, 0
    for length in range(1, LONGEST + 1):
        for byte in (byte for byte in range(256) if lengths[byte] == length):
            codes[byte] = int(f"{code:0{length}b}"[::-1], 2)
            code += 1
        code <<= 1
    return codes


def _bits_of(data: Octets, codes: Sequence[int], lengths: Sequence[int]) -> Octets:
    """One bit stream."""
    length = np.array(lengths)[data]
    first = np.cumsum(length) - length
    within = np.arange(int(length.sum())) - np.repeat(first, length)
    return np.packbits((np.repeat(np.array(codes)[data], length) >> within) & 1, bitorder="little")


def _table_of(lengths: Sequence[int]) -> Octets:
    """Code lengths as nibbles, low one first, runs of a length shortened."""
    nibbles: list[int] = []
    previous, at = 0, 0
    while at < 256:
        run = 0
        while run < MOST and at + run < 256 and lengths[at + run] == previous:
            run += 1
        if run >= FEWEST:
            nibbles += [REPEAT, run - FEWEST]
            at += run
        else:
            previous = lengths[at]
            nibbles.append(previous)
            at += 1
    nibbles += [0] * (len(nibbles) % 2)
    return np.array([low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True)], np.uint8)


def _read_table(packed: Octets) -> tuple[list[int], int]:
    """The code lengths [256] that a packed stream starts with, and the bytes that they take."""
    nibbles = _nibbles(packed)
    lengths: list[int] = []
    previous, taken = 0, 0
    while len(lengths) < 256:
        nibble = next(nibbles)
        taken += 1
        if nibble == REPEAT:
            lengths += [previous] * (FEWEST + next(nibbles))
            taken += 1
        elif nibble > LONGEST:
            raise PayloadError(f"a Huffman-coded stream has a code of {nibble} bits")
        else:
            previous = nibble
            lengths.append(nibble)
    if len(lengths) > 256:
        raise PayloadError("a Huffman-coded stream has more than 256 lengths in its table")
    if taken % 2 and next(nibbles) != 0:
        raise PayloadError("a Huffman-coded stream has a table that does not end in zero bits")
    return lengths, (taken + 1) // 2


def _nibbles(packed: Octets) -> Iterator[int]:
    for byte in packed[:256].tolist():
        yield from (byte & 15, byte >> 4)
    raise PayloadError("a Huffman-coded stream ends within its table")


def _entries_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """For each value of the next 12 bits: the byte and the length of its code."""
    entries = [(0, 0)] * (1 << LONGEST)
    for byte, code in enumerate(_codes_of(lengths)):
        if lengths[byte]:
            for bits in range(code, 1 << LONGEST, 1 << lengths[byte]):
                entries[bits] = (byte, lengths[byte])
    return entries


def _symbols_in(stream: bytes, entries: Sequence[tuple[int, int]], count: int) -> Octets:
    """`count` symbols of one bit stream, which must end with the last of them."""
    symbols, at = np.zeros(count, np.uint8), 0
    for index in range(count):
        bits = int.from_bytes(stream[at >> 3 : (at >> 3) + 3], "little") >> (at & 7)
        symbols[index], length = entries[bits & ((1 << LONGEST) - 1)]
        at += length
    if (at + 7) // 8 != len(stream):
        raise PayloadError("a Huffman-coded stream does not end where its last code does")
    if at % 8 and stream[-1] >> at % 8:
        raise PayloadError("a Huffman-coded stream does not end in zero bits")
    return symbols
