"""The proof that every canonical element is owned exactly once over all ranks.

Per tensor: how many elements are owned, and at two points x the sum of x^i over the canonical indices i of them, modulo
the prime 2^61 - 1. A box's sum is a product of geometric series, so the proof costs what the boxes cost, never what
the elements do. Elements owned twice or not at all make two different polynomials of degree N, which agree at a random
point with probability N / 2^61.

    T  tensors of a schema      B  boxes
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dcr.errors import LayoutError
from dcr.layout.boxes import Box, Dim
from dcr.layout.schema import Schema

PRIME = (1 << 61) - 1
LOW = (1 << 32) - 1

# int64 [T, 5]: elements; then, for each point, the low and the high 32 bits of the sum. Tallies add up as integers.
Tally = NDArray[np.int64]


def tally(schema: Schema, boxes: Iterable[tuple[int, Box]], whole: Iterable[int] = ()) -> Tally:
    """What one rank owns: (tensor, box) pairs, and tensors that it owns as a whole.

    Add the tallies of all ranks (one all-reduce of int64, for up to 2^31 ranks), and pass the sum to `require_covered`.
    """
    points = [_Point(x) for x in _points(schema)]
    sums = [[0, 0, 0] for _ in schema.tensors]
    for tensor, box in (*boxes, *((tensor, _all_of(schema, tensor)) for tensor in whole)):
        row = sums[tensor]
        row[0] += box.numel
        for lane, point in enumerate(points, start=1):
            row[lane] = (row[lane] + point.sum(box)) % PRIME
    return np.array(
        [(count, one & LOW, one >> 32, two & LOW, two >> 32) for count, one, two in sums], np.int64
    ).reshape(-1, 5)


def uncovered(schema: Schema, total: Tally) -> list[int]:
    """The tensors of which an element is owned twice or not at all, given the sum of all ranks' tallies."""
    expected = tally(schema, (), range(len(schema.tensors)))
    return [
        tensor
        for tensor, (found, wanted) in enumerate(zip(total.tolist(), expected.tolist(), strict=True))
        if (found[0], _sum(found[1:3]), _sum(found[3:])) != (wanted[0], _sum(wanted[1:3]), _sum(wanted[3:]))
    ]


def require_covered(schema: Schema, total: Tally) -> None:
    """Check the sum of all ranks' tallies.

    Raises:
        LayoutError: an element is owned twice or not at all; names the tensors.
    """
    bad = uncovered(schema, total)
    if bad:
        shown = ", ".join(
            f"{schema.tensors[t].name} ({total[t, 0]} of {schema.tensors[t].numel} elements)" for t in bad[:5]
        )
        raise LayoutError(
            f"{len(bad)} of {len(schema.tensors)} tensors are not owned exactly once over all ranks: {shown}"
        )


class _Point:
    """Sums of powers of one x; series are kept, since the boxes of a model have few different dimensions."""

    def __init__(self, x: int) -> None:
        self._x = x
        self._series: dict[tuple[int, int], int] = {}

    def sum(self, box: Box) -> int:
        total = pow(self._x, box.there0, PRIME)
        for n, _, stride in box.dims:
            series = self._series.get((n, stride))
            if series is None:
                series = self._series[n, stride] = _geometric(pow(self._x, stride, PRIME), n)
            total = total * series % PRIME
        return total


def _geometric(ratio: int, n: int) -> int:
    """1 + ratio + ... + ratio^(n-1)."""
    if ratio == 1:
        return n % PRIME
    return (pow(ratio, n, PRIME) - 1) * pow(ratio - 1, -1, PRIME) % PRIME


def _points(schema: Schema) -> Sequence[int]:
    """Two points that everybody with this schema draws alike."""
    drawn = hashlib.blake2b(schema.digest, digest_size=16, person=b"coverage").digest()
    return [2 + int.from_bytes(drawn[i : i + 8], "little") % (PRIME - 3) for i in (0, 8)]


def _all_of(schema: Schema, tensor: int) -> Box:
    return Box(0, 0, (Dim(schema.tensors[tensor].numel, 1, 1),))


def _sum(halves: Sequence[int]) -> int:
    return (halves[0] + (halves[1] << 32)) % PRIME
