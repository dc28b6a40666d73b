"""Overlaps: what two boxes with a common canonical side have in common, as boxes from one storage to the other.

A box's canonical side is a lattice with a stride per dimension. To find an element of box A in box B is to divide its
canonical index by B's strides, greatest first. That is affine where A's strides are multiples of the divisor, or where
A stays within one multiple of it; `_cells` cuts A until one of the two holds everywhere, so that the parts are boxes.
The usual pairs (slices, splits and permutations of one row-major tensor) need no cut, or a head, a body and a tail.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dcr.errors import LayoutError
from dcr.layout.boxes import Box, Dim, is_injective


class _Axis(NamedTuple):
    """Extent, and the strides in A's numbering, A's storage, what is left of the canonical index, B's storage."""

    n: int
    number: int
    here: int
    there: int
    home: int


class _Part(NamedTuple):
    """Some elements of A: the first one's number, place, canonical index left to divide, and place in B."""

    number: int
    here: int
    there: int
    home: int
    axes: tuple[_Axis, ...]
    owner: int = 0

    @property
    def last(self) -> int:
        """The highest number in it, once its numbers ascend."""
        return self.number + sum((axis.n - 1) * axis.number for axis in self.axes)


def intersect(a: Box, b: Box) -> list[Box]:
    """The elements that two boxes share canonically, as boxes from a's storage to b's, in a's numbering order.

    Elements of a that are not in b are left out.

    Raises:
        LayoutError: b's canonical side is not injective, so an element could be in two places.
    """
    return [box for _, box in locate(a, [b])]


def compose(first: Box, then: Box) -> list[Box]:
    """From first's storage through what it maps to, read as then's storage, to where `then` maps that.

    In the numbering order of `first`; elements that `then` does not map are left out.

    Raises:
        LayoutError: two elements of `then` lie in one place of its storage.
    """
    return intersect(first, then.inverted())


def locate(a: Box, homes: Sequence[Box]) -> list[tuple[int, Box]]:
    """Where the elements of a box lie in several storages: (index into homes, box from a's storage to that home's).

    One after another the boxes hold a's elements in its numbering order; elements without a home are left out. For the
    numbers of those that have one, pass `numbered(a)`.

    Raises:
        LayoutError: a home's canonical side is not injective, or an element is in two homes.
    """
    parts: list[_Part] = []
    low, high = a.there_bounds
    for index, home in enumerate(homes):
        first, last = home.there_bounds
        if max(low, first) <= min(high, last):
            parts += _divide(_straight(a, home, index), _divisors(home))
    return [(part.owner, _box(part)) for part in _ordered([_ascending(part) for part in parts])]


def numbered(box: Box) -> Box:
    """The same canonical elements in the same order; the storage side is the element's number."""
    dims, size = [], 1
    for dim in reversed(box.dims):
        dims.append(Dim(dim.n, size, dim.there))
        size *= dim.n
    return Box(0, box.there0, tuple(reversed(dims)))


def row_runs(box: Box) -> Iterator[Box]:
    """A box as runs that are dense on both sides (stride 1), in numbering order: what a plain copy can move."""
    dims = box.simplified().dims
    if not box.numel or not dims or (len(dims) == 1 and dims[0][1:] == (1, 1)):
        if box.numel:
            yield Box(box.here0, box.there0, dims)
        return
    outer, inner = dims[0], dims[1:]
    for i in range(outer.n):
        yield from row_runs(Box(box.here0 + i * outer.here, box.there0 + i * outer.there, inner))


def _divisors(b: Box) -> list[Dim]:
    """B's dimensions by canonical stride, greatest first; none of them negative."""
    dims = [Dim(dim.n, dim.here if dim.there > 0 else -dim.here, abs(dim.there)) for dim in b.dims if dim.n > 1]
    if not is_injective([(dim.n, dim.there) for dim in dims]):
        raise LayoutError(f"{b} meets itself in canonical coordinates; a home needs strides that nest")
    return sorted(dims, key=lambda dim: -dim.there) or [Dim(1, 0, 1)]


def _straight(a: Box, b: Box, owner: int) -> _Part:
    """All of A, its canonical strides turned positive, relative to the lowest element of B."""
    part = _Part(0, a.here0, a.there0 - b.there_bounds[0], _lowest(b), (), owner)
    axes, number = [], 1
    for dim in reversed(a.dims):
        axis = _Axis(dim.n, number, dim.here, dim.there, 0)
        number *= dim.n
        if axis.n == 1:
            continue
        if axis.there < 0:
            part, axis = _moved(part, axis, axis.n - 1), _turned(axis)
        axes.append(axis)
    return part._replace(axes=tuple(reversed(axes)))


def _lowest(b: Box) -> int:
    """Where the canonically lowest element of B lies."""
    return b.here0 + sum((dim.n - 1) * dim.here for dim in b.dims if dim.there < 0)


def _divide(part: _Part, divisors: Sequence[Dim]) -> Iterator[_Part]:
    """What of a part is in B: its canonical index divided by all of B's strides, without a rest."""
    if not divisors:
        if part.there == 0:
            yield part._replace(axes=tuple(axis for axis in part.axes if axis.there == 0))
        return
    n, home, stride = divisors[0]
    for cell in _cells(part, stride):
        for inside in _within(cell, stride, n):
            index, rest = divmod(inside.there, stride)
            yield from _divide(
                inside._replace(
                    there=rest,
                    home=inside.home + index * home,
                    axes=tuple(_absorbed(x, stride, home) for x in inside.axes),
                ),
                divisors[1:],
            )


def _absorbed(axis: _Axis, stride: int, home: int) -> _Axis:
    """An axis of whole multiples of B's stride moves along that dimension of B; a finer one has no part in it."""
    if axis.there < stride:
        return axis
    return axis._replace(there=0, home=axis.home + axis.there // stride * home)


def _cells(part: _Part, stride: int) -> Iterator[_Part]:
    """Cut a part until each axis moves by multiples of `stride`, or the finer ones stay within one multiple."""
    for d, axis in enumerate(part.axes):
        if axis.there > stride and axis.there % stride:
            for piece in _classes(part, d, stride // math.gcd(axis.there, stride)):
                yield from _cells(piece, stride)
            return
    fine = [d for d, axis in enumerate(part.axes) if 0 < axis.there < stride]
    first = part.there % stride
    span = sum((part.axes[d].n - 1) * part.axes[d].there for d in fine)
    if first + span < stride:
        yield part
        return
    d = max(fine, key=lambda d: part.axes[d].there)
    axis = part.axes[d]
    if stride % axis.there == 0 and axis.n > stride // axis.there:
        pieces = _rows(part, d, stride // axis.there, first)
    else:
        pieces = _groups(part, d, stride, first, span - (axis.n - 1) * axis.there)
    for piece in pieces:
        yield from _cells(piece, stride)


def _classes(part: _Part, d: int, period: int) -> Iterator[_Part]:
    """Every period-th index of an axis, from each start."""
    axis = part.axes[d]
    for start in range(min(period, axis.n)):
        count = -((start - axis.n) // period)
        yield _put(_moved(part, axis, start), d, [_times(axis, period, count)])


def _rows(part: _Part, d: int, size: int, first: int) -> Iterator[_Part]:
    """An axis that runs through several rows of `size` indices: the rest of the first row, whole rows, what is left."""
    axis = part.axes[d]
    head = -(-(size * axis.there - first) // axis.there) if first >= axis.there else 0
    rows, rest = divmod(axis.n - head, size)
    if head:
        yield _slice(part, d, 0, head)
    if rows:
        yield _put(_moved(part, axis, head), d, [_times(axis, size, rows), axis._replace(n=size)])
    if rest:
        yield _slice(part, d, head + rows * size, axis.n)


def _groups(part: _Part, d: int, stride: int, first: int, rest: int) -> Iterator[_Part]:
    """Runs of an axis whose elements, with the `rest` that finer axes add, stay in one cell; single indices else."""
    axis, i = part.axes[d], 0
    while i < axis.n:
        cell = (first + i * axis.there) // stride
        end = max(i, ((cell + 1) * stride - 1 - rest - first) // axis.there) + 1
        yield _slice(part, d, i, min(end, axis.n))
        i = end


def _within(part: _Part, stride: int, n: int) -> Iterator[_Part]:
    """What of a part has its index along a dimension of B in [0, n); its coarse axes are multiples of `stride`."""
    coarse = [d for d, axis in enumerate(part.axes) if axis.there >= stride]
    low = part.there // stride
    reach = sum((part.axes[d].n - 1) * (part.axes[d].there // stride) for d in coarse)
    if low >= n or low + reach < 0:
        return
    if low >= 0 and low + reach < n:
        yield part
        return
    d = max(coarse, key=lambda d: part.axes[d].there)
    axis = part.axes[d]
    step = axis.there // stride
    others = reach - (axis.n - 1) * step
    start, stop = max(0, -((low + others) // step)), min(axis.n, (n - 1 - low) // step + 1)
    inner, outer = max(0, -(low // step)), min(axis.n, (n - 1 - others - low) // step + 1)
    if inner < outer:
        yield _slice(part, d, inner, outer)
    for i in range(start, stop):
        if not inner <= i < outer:
            yield from _within(_slice(part, d, i, i + 1), stride, n)


def _moved(part: _Part, axis: _Axis, steps: int) -> _Part:
    """The part that begins some steps further along an axis."""
    return part._replace(
        number=part.number + steps * axis.number,
        here=part.here + steps * axis.here,
        there=part.there + steps * axis.there,
        home=part.home + steps * axis.home,
    )


def _times(axis: _Axis, steps: int, n: int) -> _Axis:
    return _Axis(n, *(stride * steps for stride in axis[1:]))


def _turned(axis: _Axis) -> _Axis:
    return _times(axis, -1, axis.n)


def _put(part: _Part, d: int, axes: Iterable[_Axis]) -> _Part:
    """The part with axis d replaced; axes of one index go."""
    return part._replace(axes=part.axes[:d] + tuple(axis for axis in axes if axis.n > 1) + part.axes[d + 1 :])


def _slice(part: _Part, d: int, start: int, stop: int) -> _Part:
    axis = part.axes[d]
    return _put(_moved(part, axis, start), d, [axis._replace(n=stop - start)])


def _ascending(part: _Part) -> _Part:
    """The same part numbered as A numbers it: the last axis runs fastest, numbers ascend."""
    for d, axis in enumerate(part.axes):
        if axis.number < 0:
            part = _put(_moved(part, axis, axis.n - 1), d, [_turned(axis)])
    return part._replace(axes=tuple(sorted(part.axes, key=lambda axis: -axis.number)))


def _ordered(parts: Sequence[_Part]) -> Iterator[_Part]:
    """Parts one after another in A's numbering; those that alternate are cut at their outermost axis."""
    group: list[_Part] = []
    last = -1
    for part in sorted(parts, key=lambda part: part.number):
        if part.number > last:
            yield from _untangled(group)
            group = []
        group.append(part)
        last = max(last, part.last)
    yield from _untangled(group)


def _untangled(group: list[_Part]) -> Iterator[_Part]:
    if len(group) < 2:
        yield from group
        return
    widest = max((part.axes[0].number for part in group if part.axes), default=0)
    if not widest:
        raise LayoutError(f"element {group[0].number} of a box is in two homes ({group[0].owner}, {group[1].owner})")
    cut: list[_Part] = []
    for part in group:
        whole = not part.axes or part.axes[0].number < widest
        cut += [part] if whole else (_slice(part, 0, i, i + 1) for i in range(part.axes[0].n))
    yield from _ordered(cut)


def _box(part: _Part) -> Box:
    return Box(part.here, part.home, tuple(Dim(axis.n, axis.here, axis.home) for axis in part.axes)).simplified()
