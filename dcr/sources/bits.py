"""Tensors as bits: stand-ins of random bits, and whether an exported tensor is what a map says.

N  elements of a tensor      W  bytes per element
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dcr import kernels, reference
from dcr.boxes import Box
from dcr.errors import LayoutError
from dcr.schema import WIDTHS
from dcr.views import UNSIGNED, Bits, Table, rows_of

# Exponent bits of the floating dtypes. All of them set means infinity or NaN, which arithmetic may not keep as it is.
EXPONENTS = {
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float32": 0x7F800000,
    "float64": 0x7FF0 << 48,
    "float8_e4m3fn": 0x78,
    "float8_e5m2": 0x7C,
}


def dtype_of(tensor: torch.Tensor) -> str:
    """A dtype's name in a schema."""
    return str(tensor.dtype).removeprefix("torch.")


def bits_of(tensor: torch.Tensor) -> Bits:
    """The elements of a dense tensor, row-major, as unsigned integers [N]; shares memory where it can."""
    plain = tensor.detach().cpu().contiguous().reshape(-1)
    octets: NDArray[np.uint8] = plain.view(torch.uint8).numpy()
    bits: Bits = octets.view(UNSIGNED[tensor.element_size()])
    return bits


def tensor_of(bits: Bits, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `bits_of`; shares memory."""
    return torch.from_numpy(bits.view(np.uint8)).view(getattr(torch, dtype)).reshape(tuple(shape))


def random_bits(numel: int, dtype: str, seed: Sequence[int]) -> Bits:
    """Random bit patterns [N] of a dtype that are finite: every sign and exponent, zeros and denormals among them."""
    width = WIDTHS[dtype]
    octets = np.frombuffer(np.random.default_rng(list(seed)).bytes(numel * width), np.uint8)
    if dtype == "bool":
        return octets & np.uint8(1)
    bits = octets.view(UNSIGNED[width])
    if dtype not in EXPONENTS:
        return bits.copy()
    exponent = bits.dtype.type(EXPONENTS[dtype])
    lowest = bits.dtype.type(EXPONENTS[dtype] & -EXPONENTS[dtype])
    return np.where(bits & exponent == exponent, bits ^ lowest, bits)


def wrong_bytes(memory: Bits, canonical: Bits, boxes: Sequence[Box], kind: int = reference.NONE) -> int:
    """How many bytes of an exported tensor differ from what boxes from some memory to it predict.

    Raises:
        LayoutError: a box leaves one of the two.
    """
    if kind == reference.NONE and len(boxes) == 1 and len(boxes[0].dims) == 1 and boxes[0].dims[0][1:] == (1, 1):
        here, there, n = boxes[0].here0, boxes[0].there0, boxes[0].numel
        expected, found = memory[here : here + n], canonical[there : there + n]
        if min(len(expected), len(found)) < n:
            raise LayoutError(f"{boxes[0]} leaves {len(memory)} elements of memory or {len(canonical)} canonical ones")
    else:
        expected = kernels.read(Table((memory,), rows_of([(0, 0, box) for box in boxes])), kind)
        found = kernels.read(Table((canonical,), rows_of([(0, 0, box.inverted()) for box in boxes])))
    if expected.dtype != found.dtype:
        return found.nbytes
    return int(np.count_nonzero(expected.view(np.uint8) != found.view(np.uint8)))
