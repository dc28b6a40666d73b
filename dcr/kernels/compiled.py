"""The compiled kernels, behind the signatures that all kernels have; what they refuse is an error of dcr's.

Each function is what `dcr.kernels.verbs.Kernels` says of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

from dcr import _native
from dcr.errors import BaseMismatch, DcrError, LayoutError, PayloadError
from dcr.kernels.reference import NONE
from dcr.kernels.streams import Octets
from dcr.layout.views import Bits, Lanes, Positions, Runs, Table

T = TypeVar("T")
Given = ParamSpec("Given")


def _refuses(error: type[DcrError]) -> Callable[[Callable[Given, T]], Callable[Given, T]]:
    """A kernel whose ValueError is an error of this type."""

    def of(kernel: Callable[Given, T]) -> Callable[Given, T]:
        @wraps(kernel)
        def call(*args: Given.args, **named: Given.kwargs) -> T:
            try:
                return kernel(*args, **named)
            except ValueError as refused:
                raise error(str(refused)) from None

        return call

    return of


@_refuses(LayoutError)
def read(table: Table, kind: int = NONE) -> Bits:
    return _native.read(table.storages, table.rows, kind)


@_refuses(LayoutError)
def compare(table: Table, base: Bits, kind: int = NONE) -> tuple[Positions, Bits]:
    return _native.compare(table.storages, table.rows, base, kind)


@_refuses(LayoutError)
def capture(table: Table, keys: Lanes, base: Bits, kind: int = NONE) -> tuple[Positions, Bits, Bits, Lanes, Lanes]:
    return _native.capture(table.storages, table.rows, keys, base, kind)


@_refuses(LayoutError)
def gather(table: Table, positions: Positions) -> Bits:
    return _native.gather(table.storages, table.rows, positions)


@_refuses(LayoutError)
def prepare(
    table: Table, keys: Lanes, positions: Positions, values: Bits, operation: int
) -> tuple[Bits, Bits, Lanes, Lanes]:
    return _native.prepare(table.storages, table.rows, keys, positions, values, operation)


@_refuses(LayoutError)
def scatter(table: Table, positions: Positions, bits: Bits) -> int:
    return _native.scatter(table.storages, table.rows, positions, bits)


@_refuses(LayoutError)
def digest(table: Table, keys: Lanes, kind: int = NONE) -> Lanes:
    return _native.digest(table.storages, table.rows, keys, kind)


@_refuses(LayoutError)
def digest_at(table: Table, keys: Lanes, positions: Positions, bits: Bits) -> Lanes:
    return _native.digest_at(table.storages, table.rows, keys, positions, bits)


@_refuses(LayoutError)
def check_ascending(positions: Positions, numel: int) -> None:
    _native.check_ascending(positions, numel)


@_refuses(LayoutError)
def select(positions: Positions, runs: Runs) -> tuple[Positions, Positions]:
    return _native.select(positions, runs)


@_refuses(LayoutError)
def gaps_of(positions: Positions) -> Octets:
    return _native.gaps_of(positions)


@_refuses(PayloadError)
def positions_of(gaps: Octets, changed: int, numel: int) -> Positions:
    return _native.positions_of(gaps, changed, numel)


def symbols_of(values: Bits) -> tuple[Octets, Bits]:
    return _native.symbols_of(values)


@_refuses(PayloadError)
def values_of(symbols: Octets, exceptions: Octets, width: int) -> Bits:
    return _native.values_of(symbols, exceptions, width)


def planes_of(values: Bits) -> Octets:
    return _native.planes_of(values).reshape(values.itemsize, -1)


def of_planes(planes: Sequence[Octets]) -> Bits:
    return _native.of_planes(list(planes))


def pack(data: Octets) -> Octets:
    return _native.pack(data)


@_refuses(PayloadError)
def unpack(packed: Octets, size: int) -> Octets:
    return _native.unpack(packed, size)


def blake3(data: bytes | memoryview) -> bytes:
    return _native.blake3(data)


@_refuses(LayoutError)
def split(base: Bits, cuts: Octets, positions: Positions, values: Bits) -> tuple[Positions, Bits, list[int]]:
    return _native.split(base, cuts, positions, values)


@_refuses(BaseMismatch)
def merge(base: Bits, cuts: Octets, counts: Sequence[int], ranks: Positions, values: Bits) -> tuple[Positions, Bits]:
    return _native.merge(base, cuts, counts, ranks, values)
