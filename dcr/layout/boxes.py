"""Boxes: affine maps between a strided region of a storage and a strided region of a canonical tensor.

A box has two sides, *here* (a storage) and *there* (canonical coordinates, flat row-major element index):

    here  = here0  + sum_d i_d * dims[d].here
    there = there0 + sum_d i_d * dims[d].there        for 0 <= i_d < dims[d].n

Its elements are numbered row-major over `dims` (the last dimension runs fastest). All offsets and strides are
in elements and are 64-bit. A 0-d box has no dims and one element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dcr.errors import LayoutError

MAX_DIMS = 6


class Dim(NamedTuple):
    """One dimension of a box: extent, and the stride on either side, in elements."""

    n: int
    here: int
    there: int


class Box(NamedTuple):
    """An affine map between two strided regions of equal shape; see the module's text."""

    here0: int
    there0: int
    dims: tuple[Dim, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(dim.n for dim in self.dims)

    @property
    def here_bounds(self) -> tuple[int, int]:
        """Lowest and highest element touched in the storage (inclusive); an empty box gives (0, -1)."""
        return _bounds(self.here0, [(dim.n, dim.here) for dim in self.dims])

    @property
    def there_bounds(self) -> tuple[int, int]:
        """Lowest and highest canonical element touched (inclusive); an empty box gives (0, -1)."""
        return _bounds(self.there0, [(dim.n, dim.there) for dim in self.dims])

    def inverted(self) -> Box:
        """The same map with its two sides swapped."""
        return Box(self.there0, self.here0, tuple(Dim(dim.n, dim.there, dim.here) for dim in self.dims))

    def simplified(self) -> Box:
        """The same map and numbering with as few dimensions as possible."""
        dims: list[Dim] = []
        for dim in self.dims:
            if dim.n == 1:
                continue
            if dims and dims[-1].here == dim.here * dim.n and dims[-1].there == dim.there * dim.n:
                dims[-1] = Dim(dims[-1].n * dim.n, dim.here, dim.there)
            else:
                dims.append(dim)
        return Box(self.here0, self.there0, tuple(dims))

    def run(self, start: int, count: int) -> Iterator[Box]:
        """Boxes that hold elements [start, start + count) of this one, in its own numbering order.

        A run of a d-dimensional box is at most 2 d - 1 boxes: a head, a body and a tail.

        Raises:
            LayoutError: the run leaves the box.
        """
        if start < 0 or count < 0 or start + count > self.numel:
            raise LayoutError(f"run [{start}, {start + count}) leaves a box of {self.numel} elements")
        if count:
            yield from _run(self, start, count)


def whole(shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> Box:
    """The box of a whole tensor: storage strides here, row-major canonical strides there.

    shape, strides: equal length, in elements; offset: the tensor's first element in its storage.
    """
    dims: list[Dim] = []
    there = 1
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        dims.append(Dim(n, stride, there))
        there *= n
    return Box(offset, 0, tuple(reversed(dims))).simplified()


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor, in elements."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def is_injective(sizes_strides: Sequence[tuple[int, int]]) -> bool:
    """True if no two index tuples can meet: each stride exceeds the span of all smaller ones.

    The test is sufficient, and exact for every layout that torch makes by slicing and permuting.
    """
    span = 0
    for n, stride in sorted(((n, abs(s)) for n, s in sizes_strides if n > 1), key=lambda pair: pair[1]):
        if stride <= span:
            return False
        span += (n - 1) * stride
    return True


def _bounds(first: int, dims: list[tuple[int, int]]) -> tuple[int, int]:
    if any(n == 0 for n, _ in dims):
        return 0, -1
    low = first + sum(min(0, (n - 1) * stride) for n, stride in dims)
    high = first + sum(max(0, (n - 1) * stride) for n, stride in dims)
    return low, high


def _run(box: Box, start: int, count: int) -> Iterator[Box]:
    if start == 0 and count == box.numel:
        yield box.simplified()
        return
    outer, inner = box.dims[0], box.dims[1:]
    size = math.prod(dim.n for dim in inner)
    row, within = divmod(start, size)
    if within or count < size:
        taken = min(count, size - within)
        yield from _run(_row(box, row), within, taken)
        row, count = row + 1, count - taken
    rows, rest = divmod(count, size)
    if rows:
        first = _row(box, row)
        yield Box(first.here0, first.there0, (Dim(rows, outer.here, outer.there), *inner)).simplified()
    if rest:
        yield from _run(_row(box, row + rows), 0, rest)


def _row(box: Box, row: int) -> Box:
    """The box of one index of the outermost dimension."""
    outer = box.dims[0]
    return Box(box.here0 + row * outer.here, box.there0 + row * outer.there, box.dims[1:])
