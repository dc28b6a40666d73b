"""The kernels in use: compiled ones, or the numpy reference where dcr was deliberately built without.

    B  rows of a table      N  elements of a table      K  changed elements      T  tensors      n  bytes of a stream

Each of the first group takes a table, so any number of tensors is one call, and makes one pass over memory;
`dcr.kernels.reference` defines what it computes. The second group codes streams, and `dcr.kernels.streams`,
`dcr.kernels.exponents` and `dcr.kernels.hashing` define it. The compiled ones
release the GIL, check every row and position again, and raise before anything is written. Which implementation runs is
decided by the build and never falls back: a compiled module that does not load is an error. No environment variable is
read.

Bytes moved, with b bytes per stored element and c after the value map:

    read       N (b + c)                  gather     K (4 + b), and each cache line touched
    compare    N (b + c) + 2 K (4 + 2 c)  scatter    2 K (4 + b), and each cache line touched, both ways
    capture    as compare + K (4 + 2 c)
    digest     N b                        digest_at  K (4 + c)
    select     K 4 + K' 12              prepare    K (4 + 3 b), and each cache line touched

    gaps_of, positions_of    5 K          pack       2 n read, what it gives written
    symbols_of, values_of    K (1 + c)    unpack     what it takes + n
    split, merge             N c + 2 K (4 + c)
    planes_of, of_planes     2 N c                blake3     n
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from dcr.errors import BaseMismatch, LayoutError, PayloadError
from dcr.kernels import exponents, reference, streams
from dcr.kernels.hashing import blake3 as numpy_blake3
from dcr.kernels.reference import F32_BF16, F32_F16, NONE, OVERWRITE, SOURCE_WIDTH, STEP, TARGET_WIDTH, XOR
from dcr.kernels.streams import Octets
from dcr.layout.views import Bits, Lanes, Positions, Runs, Table

__all__ = [
    "F32_BF16",
    "F32_F16",
    "IMPLEMENTATION",
    "NONE",
    "OVERWRITE",
    "SOURCE_WIDTH",
    "STEP",
    "TARGET_WIDTH",
    "XOR",
    "capture",
    "check_ascending",
    "compare",
    "describe",
    "digest",
    "digest_at",
    "gaps_of",
    "gather",
    "merge",
    "of_planes",
    "pack",
    "planes_of",
    "positions_of",
    "prepare",
    "read",
    "scatter",
    "select",
    "split",
    "symbols_of",
    "unpack",
    "values_of",
]

try:
    from dcr._build import NATIVE
except ModuleNotFoundError as error:
    raise ImportError(
        "dcr has not been built in this checkout: run `pip install .` (or `pip install --no-build-isolation -e .`), "
        "or follow the comment at the top of CMakeLists.txt; `-C cmake.define.DCR_NATIVE=OFF` does without a compiler"
    ) from error

if NATIVE:
    from dcr import _native

IMPLEMENTATION: Final = "compiled" if NATIVE else "reference"


def describe() -> dict[str, str]:
    """Which implementation is in use, at which instruction set level, and why."""
    if not NATIVE:
        return {"implementation": IMPLEMENTATION, "level": "numpy", "reason": "dcr was built with DCR_NATIVE=OFF"}
    found = _native.features()
    reason = f"of {', '.join(found['levels'])} on this machine; built by {found['compiler']}"
    return {"implementation": IMPLEMENTATION, "level": found["level"], "reason": reason}


def read(table: Table, kind: int = NONE) -> Bits:
    """The table's elements, dense, in numbering order: bits [N], after the value map.

    Raises:
        LayoutError: the table's rows do not fit its storages, or `kind` does not fit their width.
    """
    if not NATIVE:
        return reference.read(table, kind)
    try:
        return _native.read(table.storages, table.rows, kind)
    except ValueError as error:
        raise LayoutError(str(error)) from None


def compare(table: Table, base: Bits, kind: int = NONE) -> tuple[Positions, Bits]:
    """Positions [K] at which the table (after the value map) differs from base [N], and its new bits [K] there.

    Besides the result it allocates as much again, in blocks, and never anything of size N.

    Raises:
        LayoutError: as for `read`, or `base` is not N contiguous elements of the width after the value map.
    """
    if not NATIVE:
        return reference.compare(table, _of_size("base", base, table.numel, TARGET_WIDTH[kind] or table.width), kind)
    try:
        return _native.compare(table.storages, table.rows, base, kind)
    except ValueError as error:
        raise LayoutError(str(error)) from None


def capture(table: Table, keys: Lanes, base: Bits, kind: int = NONE) -> tuple[Positions, Bits, Bits, Lanes, Lanes]:
    """What differs from base [N]: positions [K], new and old bits [K], and the digest sums [T, 2] of new and old.

    The keys [T, 2] are indexed by column TENSOR. It allocates what `compare` does.

    Raises:
        LayoutError: as for `compare`, or a row names a tensor that has no key.
    """
    if not NATIVE:
        base = _of_size("base", base, table.numel, TARGET_WIDTH[kind] or table.width)
        return reference.capture(table, keys, base, kind)
    try:
        return _native.capture(table.storages, table.rows, keys, base, kind)
    except ValueError as error:
        raise LayoutError(str(error)) from None


def gather(table: Table, positions: Positions) -> Bits:
    """The bits [K] at the given positions.

    Raises:
        LayoutError: as for `read`, or positions do not ascend strictly, or leave the table.
    """
    if not NATIVE:
        return reference.gather(table, _ascending(positions, table.numel))
    try:
        return _native.gather(table.storages, table.rows, positions)
    except ValueError as error:
        raise LayoutError(str(error)) from None


def prepare(
    table: Table, keys: Lanes, positions: Positions, values: Bits, operation: int
) -> tuple[Bits, Bits, Lanes, Lanes]:
    """What values [K] make of the bits at the given positions, before anything is written.

    operation: OVERWRITE, XOR or STEP. Returns the new and the old bits [K], and the digest sums [T, 2] of either; keys
    [T, 2] are indexed by column TENSOR.

    Raises:
        LayoutError: as for `gather`, or `values` differ in number or width, a row names a tensor that has no key, or
            there is no such operation.
    """
    if not NATIVE:
        values = _of_size("values", values, len(positions), table.width)
        return reference.prepare(table, keys, _ascending(positions, table.numel), values, _known(operation))
    try:
        return _native.prepare(table.storages, table.rows, keys, positions, values, operation)
    except ValueError as error:
        raise LayoutError(str(error)) from None


def scatter(table: Table, positions: Positions, bits: Bits) -> int:
    """Write bits [K] at the given positions, read them back; the number of positions that do not hold their bits.

    Reading starts when all is written, so boxes that claim one element are noticed.

    Raises:
        LayoutError: as for `gather`, or `bits` differ in number or width, or a storage with rows is read-only.
            Nothing has been written.
    """
    if not NATIVE:
        bits = _of_size("bits", bits, len(positions), table.width)
        return reference.scatter(table, _ascending(positions, table.numel), bits)
    try:
        return _native.scatter(table.storages, table.rows, positions, bits)
    except ValueError as error:
        raise LayoutError(str(error)) from None


def digest(table: Table, keys: Lanes, kind: int = NONE) -> Lanes:
    """Digest sums [T, 2] over all elements of a table; keys [T, 2] are indexed by column TENSOR.

    Raises:
        LayoutError: as for `read`, or a row names a tensor that has no key.
    """
    if not NATIVE:
        return reference.digest(table, keys, kind)
    try:
        return _native.digest(table.storages, table.rows, keys, kind)
    except ValueError as error:
        raise LayoutError(str(error)) from None


def digest_at(table: Table, keys: Lanes, positions: Positions, bits: Bits) -> Lanes:
    """Digest sums [T, 2] over given positions [K], as if they held bits [K], of any width; no storage is read.

    Raises:
        LayoutError: as for `gather`, or a row names a tensor that has no key.
    """
    if not NATIVE:
        positions = _ascending(positions, table.numel)
        return reference.digest_at(table, keys, positions, _of_size("bits", bits, len(positions), bits.itemsize))
    try:
        return _native.digest_at(table.storages, table.rows, keys, positions, bits)
    except ValueError as error:
        raise LayoutError(str(error)) from None


def check_ascending(positions: Positions, numel: int) -> None:
    """Check positions [K].

    Raises:
        LayoutError: they do not ascend strictly, or leave a frame of N elements.
    """
    if not NATIVE:
        _ascending(positions, numel)
        return
    try:
        _native.check_ascending(positions, numel)
    except ValueError as error:
        raise LayoutError(str(error)) from None


def select(positions: Positions, runs: Runs) -> tuple[Positions, Positions]:
    """Those positions [K] that lie in runs [R, 2] of (start, count): their indices [K'], and their numbers [K'] counted
    over the runs one after another.

    Raises:
        LayoutError: positions do not ascend strictly, or runs do not ascend, overlap, or hold 2^32 elements or more.
    """
    if not NATIVE:
        return reference.select(_ascending(positions, (1 << 32) - 1), _disjoint(runs))
    try:
        return _native.select(positions, runs)
    except ValueError as error:
        raise LayoutError(str(error)) from None


def gaps_of(positions: Positions) -> Octets:
    """Byte gaps of ascending positions [K]: K bytes and one more for every full 255 of a gap.

    Raises:
        LayoutError: positions do not ascend strictly.
    """
    if not NATIVE:
        return streams.gaps_of(positions)
    try:
        return _native.gaps_of(positions)
    except ValueError as error:
        raise LayoutError(str(error)) from None


def positions_of(gaps: Octets, changed: int, numel: int) -> Positions:
    """The inverse of `gaps_of`: positions [K], ascending, below N.

    Raises:
        PayloadError: the stream does not hold `changed` gaps, ends within one, or leaves the frame.
    """
    if not NATIVE:
        return streams.positions_of(gaps, changed, numel)
    try:
        return _native.positions_of(gaps, changed, numel)
    except ValueError as error:
        raise PayloadError(str(error)) from None


def symbols_of(values: Bits) -> tuple[Octets, Bits]:
    """Step symbols [K] in a byte each, and the values that need an escape."""
    return _native.symbols_of(values) if NATIVE else streams.symbols_of(values)


def values_of(symbols: Octets, exceptions: Octets, width: int) -> Bits:
    """The inverse of `symbols_of`: values [K]; exceptions are the bytes of the escaped ones.

    Raises:
        PayloadError: there are more or fewer exceptions than escapes.
    """
    if not NATIVE:
        return streams.values_of(symbols, exceptions, width)
    try:
        return _native.values_of(symbols, exceptions, width)
    except ValueError as error:
        raise PayloadError(str(error)) from None


def planes_of(values: Bits) -> Octets:
    """The bytes of elements [N] by significance: octets [width, N], lowest first."""
    return _native.planes_of(values).reshape(values.itemsize, -1) if NATIVE else streams.planes_of(values)


def of_planes(planes: Sequence[Octets]) -> Bits:
    """The inverse of `planes_of`: elements [N] of as many bytes as there are planes [N]."""
    return _native.of_planes(list(planes)) if NATIVE else streams.of_planes(planes)


def pack(data: Octets) -> Octets:
    """A stream [n], Huffman-coded; nothing where that saves less than a fiftieth of it."""
    return _native.pack(data) if NATIVE else streams.pack(data)


def unpack(packed: Octets, size: int) -> Octets:
    """The inverse of `pack`: a stream [size].

    Raises:
        PayloadError: the bytes are not a complete code and four bit streams that end with the last symbol; nothing is
            allocated that they cannot hold.
    """
    if not NATIVE:
        return streams.unpack(packed, size)
    try:
        return _native.unpack(packed, size)
    except ValueError as error:
        raise PayloadError(str(error)) from None


def blake3(data: bytes | memoryview) -> bytes:
    """The BLAKE3 hash (32 bytes) of bytes [n]."""
    return _native.blake3(data) if NATIVE else numpy_blake3(data)


def split(base: Bits, cuts: Octets, positions: Positions, values: Bits) -> tuple[Positions, Bits, list[int]]:
    """A change [K] by class of its old bits [N]: numbers within the class, values, and how many there are of each.

    Raises:
        LayoutError: positions do not ascend strictly, or leave the frame, or cuts do not ascend.
    """
    if not NATIVE:
        return exponents.split(base, cuts, positions, values)
    try:
        return _native.split(base, cuts, positions, values)
    except ValueError as error:
        raise LayoutError(str(error)) from None


def merge(base: Bits, cuts: Octets, counts: Sequence[int], ranks: Positions, values: Bits) -> tuple[Positions, Bits]:
    """The inverse of `split`: positions [K], ascending, and values [K].

    Raises:
        BaseMismatch: base has no such elements.
    """
    if not NATIVE:
        return exponents.merge(base, cuts, counts, ranks, values)
    try:
        return _native.merge(base, cuts, counts, ranks, values)
    except ValueError as error:
        raise BaseMismatch(str(error)) from None


def _ascending(positions: Positions, numel: int) -> Positions:
    if len(positions) and (positions[-1] >= numel or not np.all(positions[1:] > positions[:-1])):
        raise LayoutError(f"positions must ascend strictly and lie below {numel}")
    return positions


def _known(operation: int) -> int:
    if operation not in (OVERWRITE, XOR, STEP):
        raise LayoutError(f"no operation {operation}")
    return operation


def _disjoint(runs: Runs) -> Runs:
    ends = runs.sum(axis=1)
    if (runs < 0).any() or (runs[1:, 0] < ends[:-1]).any() or (runs > 0xFFFFFFFF).any() or runs[:, 1].sum() >= 1 << 32:
        raise LayoutError("runs must ascend, without overlap, and hold fewer than 2^32 elements")
    return runs


def _of_size(name: str, bits: Bits, size: int, width: int) -> Bits:
    if bits.shape != (size,) or bits.itemsize != width:
        raise LayoutError(f"{name}: expected {size} elements of {width} bytes, found {bits.dtype} {bits.shape}")
    return bits
