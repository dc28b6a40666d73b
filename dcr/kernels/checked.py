"""The kernels without a compiler: the numpy references, with the checks that the compiled ones make.

Each function is what `dcr.kernels.verbs.Kernels` says of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcr.errors import LayoutError
from dcr.kernels import exponents, reference, streams
from dcr.kernels.hashing import blake3 as numpy_blake3
from dcr.kernels.reference import NONE, OVERWRITE, STEP, TARGET_WIDTH, XOR
from dcr.kernels.streams import Octets
from dcr.layout.views import Bits, Lanes, Positions, Runs, Table


def read(table: Table, kind: int = NONE) -> Bits:
    return reference.read(table, kind)


def compare(table: Table, base: Bits, kind: int = NONE) -> tuple[Positions, Bits]:
    return reference.compare(table, _of_size("base", base, table.numel, TARGET_WIDTH[kind] or table.width), kind)


def capture(table: Table, keys: Lanes, base: Bits, kind: int = NONE) -> tuple[Positions, Bits, Bits, Lanes, Lanes]:
    base = _of_size("base", base, table.numel, TARGET_WIDTH[kind] or table.width)
    return reference.capture(table, keys, base, kind)


def gather(table: Table, positions: Positions) -> Bits:
    return reference.gather(table, _ascending(positions, table.numel))


def prepare(
    table: Table, keys: Lanes, positions: Positions, values: Bits, operation: int
) -> tuple[Bits, Bits, Lanes, Lanes]:
    values = _of_size("values", values, len(positions), table.width)
    return reference.prepare(table, keys, _ascending(positions, table.numel), values, _known(operation))


def scatter(table: Table, positions: Positions, bits: Bits) -> int:
    bits = _of_size("bits", bits, len(positions), table.width)
    return reference.scatter(table, _ascending(positions, table.numel), bits)


def digest(table: Table, keys: Lanes, kind: int = NONE) -> Lanes:
    return reference.digest(table, keys, kind)


def digest_at(table: Table, keys: Lanes, positions: Positions, bits: Bits) -> Lanes:
    positions = _ascending(positions, table.numel)
    return reference.digest_at(table, keys, positions, _of_size("bits", bits, len(positions), bits.itemsize))


def check_ascending(positions: Positions, numel: int) -> None:
    _ascending(positions, numel)
    return


def select(positions: Positions, runs: Runs) -> tuple[Positions, Positions]:
    return reference.select(_ascending(positions, (1 << 32) - 1), _disjoint(runs))


def gaps_of(positions: Positions) -> Octets:
    return streams.gaps_of(positions)


def positions_of(gaps: Octets, changed: int, numel: int) -> Positions:
    return streams.positions_of(gaps, changed, numel)


def symbols_of(values: Bits) -> tuple[Octets, Bits]:
    return streams.symbols_of(values)


def values_of(symbols: Octets, exceptions: Octets, width: int) -> Bits:
    return streams.values_of(symbols, exceptions, width)


def planes_of(values: Bits) -> Octets:
    return streams.planes_of(values)


def of_planes(planes: Sequence[Octets]) -> Bits:
    return streams.of_planes(planes)


def pack(data: Octets) -> Octets:
    return streams.pack(data)


def unpack(packed: Octets, size: int) -> Octets:
    return streams.unpack(packed, size)


def blake3(data: bytes | memoryview) -> bytes:
    return numpy_blake3(data)


def split(base: Bits, cuts: Octets, positions: Positions, values: Bits) -> tuple[Positions, Bits, list[int]]:
    return exponents.split(base, cuts, positions, values)


def merge(base: Bits, cuts: Octets, counts: Sequence[int], ranks: Positions, values: Bits) -> tuple[Positions, Bits]:
    return exponents.merge(base, cuts, counts, ranks, values)


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
