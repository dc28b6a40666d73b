"""Boxes element by element, and tensors cut into pieces, for tests."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from dcr.layout.boxes import Box, Dim, whole


def expand(box: Box) -> NDArray[np.int64]:
    """Pairs (here, there) [N, 2] in numbering order."""
    pairs = np.array([[box.here0, box.there0]], np.int64)
    for dim in box.dims:
        steps = np.outer(np.arange(dim.n), [dim.here, dim.there])
        pairs = (pairs[:, None] + steps).reshape(-1, 2)
    return pairs


def joined(pieces: list[Box]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros((0, 2), np.int64), *map(expand, pieces)])


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Box, list[Box]]:
    """A box over a 3-d tensor, and the tensor cut into pieces along two of its dimensions, each a storage."""
    shape = draw(st.tuples(*[st.integers(1, 6)] * 3))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape[:2]] + [[0, shape[2]]]
    strides = (shape[1] * shape[2], shape[2], 1)
    pieces = [
        Box(
            draw(st.integers(0, 9)),
            i * strides[0] + j * strides[1],
            tuple(Dim(n, 1, s) for n, s in zip((p - i, q - j, shape[2]), strides, strict=True)),
        )
        for i, p in zip(cuts[0], cuts[0][1:], strict=False)
        for j, q in zip(cuts[1], cuts[1][1:], strict=False)
    ]
    start = draw(st.integers(0, math.prod(shape) - 1))
    region = next(whole(shape, strides).run(start, draw(st.integers(1, math.prod(shape) - start))))
    order = draw(st.permutations(region.dims))
    return Box(region.here0, region.there0, tuple(order)), pieces
