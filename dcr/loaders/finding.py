"""What loads of numbers left in a memory: the boxes that they fit, constants, and what is neither."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dcr.errors import LayoutError
from dcr.layout.boxes import Box
from dcr.layout.fit import HOLE, fit
from dcr.layout.schema import words_of
from dcr.loaders.certify import Finding, Home
from dcr.loaders.engine import Memory, Octets
from dcr.loaders.probe import Numbering, blank
from dcr.probing.bits import name_of

# A map of more boxes than this is a table, and has to hold so many elements a box.
TABLE_BOXES = 64
TABLE_ELEMS = 16


def find(
    memory: Memory, index: int, pictures: Sequence[Octets], numbering: Numbering, tensors: Sequence[int]
) -> Finding:
    """Say what one memory holds of the numbers that were loaded; pictures of it, one for each pass."""
    bits = [memory.bits(picture) for picture in pictures]
    numbers = numbering.read(bits, memory.dtype)
    if memory.dtype is not torch.bool and (numbers >= 0).all():  # the usual case: nothing else is in there
        homes, tangled = _fitted(numbers, memory, index, numbering, tensors)
        return Finding(index, homes, np.empty(0, np.int64), bits[0][:0], 0, tangled)
    filled = [memory.bits(np.full(memory.width, blank(memory, number), np.uint8))[0] for number in (0, 1)]
    untouched, same = bits[0] == filled[0], np.ones(len(bits[0]), bool)
    for number, one in enumerate(bits[1:], start=1):
        untouched &= one == filled[number % 2]
        same &= one == bits[0]
    mapped = (numbers >= 0) & ~untouched
    constant = same & ~mapped & ~untouched
    foreign = int(np.count_nonzero(~(mapped | untouched | constant)))
    numbers[~mapped] = HOLE
    homes, tangled = _fitted(numbers, memory, index, numbering, tensors)
    constants = np.flatnonzero(constant)
    return Finding(index, homes, constants, bits[0][constants], foreign, tangled)


def _fitted(
    numbers: NDArray[np.int64], memory: Memory, index: int, numbering: Numbering, tensors: Sequence[int]
) -> tuple[tuple[Home, ...], str]:
    """The homes in one memory, and what is wrong if they are too many; numbers [elements of the memory] or HOLE."""
    shape = memory.slots[0].tensor.shape
    if shape and len(numbers) % shape[-1]:  # its storage is not made of its rows
        shape = torch.Size([len(numbers)])
    most = max(TABLE_BOXES, len(numbers) // TABLE_ELEMS)
    try:
        boxes = fit(numbers, shape, starts=numbering.firsts[:-1], most=most)
    except LayoutError as error:
        return (), str(error)
    homes = [Home(tensors[which], index, part.inverted()) for which, box in boxes for part in _injective(box)]
    words = words_of(name_of(memory.dtype))
    cut = {t for t, spec in zip(tensors, numbering.specs, strict=True) if words_of(spec.dtype) != words}
    if any(home.tensor in cut for home in homes):
        return (), f"a cast to {memory.dtype} changes how many words an element has"
    return tuple(homes), ""


def _injective(box: Box) -> Iterator[Box]:
    """A box from canonical elements, cut until none of them is in it twice: each copy is a home of its own."""
    span = 0
    for d, dim in sorted(enumerate(box.dims), key=lambda pair: abs(pair[1].here)):
        if (dim.n > 1 and abs(dim.here) <= span) or dim.here == 0:
            rest = box.dims[:d] + box.dims[d + 1 :]
            for i in range(dim.n):
                yield from _injective(Box(box.here0 + i * dim.here, box.there0 + i * dim.there, rest))
            return
        span += (dim.n - 1) * abs(dim.here)
    yield box
