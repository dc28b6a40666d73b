"""Bit patterns to push through a loader: digits that say where an element came from, and random ones that prove it.

    N  elements of a unit of tensors

An element's number is its tensor's first number plus its row-major index. It is written in a base whose digits every
dtype at hand holds exactly, also after a cast between floating types; one load carries one digit, and a last one the
complement of the first digit. No constant satisfies both, so a constant is never taken for an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from dcr.loaders.engine import Memory, Octets
from dcr.schema import TensorSpec
from dcr.views import UNSIGNED, Bits

# Non-negative integers below this are exact.
BASES = {"bool": 2, "uint8": 128, "int8": 128, "float8_e4m3fn": 16, "float8_e5m2": 8}
BASE = 256
# The exponent bits that make a pattern infinite or no number.
EXPONENTS = {
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float32": 0x7F800000,
    "float64": 0x7FF0000000000000,
    "float8_e4m3fn": 0x7F,
    "float8_e5m2": 0x7C,
}


@dataclass(frozen=True, slots=True)
class Numbering:
    """The elements of some tensors, numbered one after another. dtypes: further ones that must hold the digits."""

    specs: tuple[TensorSpec, ...]
    dtypes: frozenset[str] = frozenset()

    @property
    def firsts(self) -> list[int]:
        return [0, *accumulate(spec.numel for spec in self.specs)]

    @property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.specs)

    @property
    def base(self) -> int:
        return min(BASES.get(dtype, BASE) for dtype in {*self.dtypes, *(spec.dtype for spec in self.specs)})

    @property
    def digits(self) -> int:
        """How many digits a number has."""
        count = 1
        while self.base**count < self.numel:
            count += 1
        return count

    @property
    def passes(self) -> int:
        """How many loads it takes to read all numbers: one for each digit, and one for the complement."""
        return self.digits + 1

    def tensor(self, index: int, number: int) -> torch.Tensor:
        """What to load for one tensor in one pass."""
        spec, first = self.specs[index], self.firsts[index]
        numbers = torch.arange(first, first + spec.numel, dtype=torch.int64)
        digit = self._digit(numbers, number)
        return digit.to(dtype_of(spec)).reshape(spec.shape)

    def read(self, pictures: Sequence[torch.Tensor]) -> torch.Tensor:
        """The numbers int64 [elements] in pictures of a memory, one for each pass; -1 where there is none."""
        number = torch.zeros(len(pictures[0]), dtype=torch.int64)
        valid = torch.ones(len(pictures[0]), dtype=torch.bool)
        first = complement = number
        for place, picture in enumerate(pictures):
            values = picture.to(torch.float64)
            digit = values.nan_to_num(-1.0, -1.0, -1.0).clamp(-1, self.base).to(torch.int64)
            valid &= (digit == values) & (digit >= 0) & (digit < self.base)
            if place == 0:
                first = digit
            if place < self.digits:
                number = number + digit * self.base**place
            else:
                complement = digit
        valid &= (first + complement == self.base - 1) & (number < self.numel)
        return torch.where(valid, number, -1)

    def _digit(self, numbers: torch.Tensor, place: int) -> torch.Tensor:
        digit: torch.Tensor = numbers // self.base ** (place % self.digits) % self.base
        return digit if place < self.digits else self.base - 1 - digit


def dtype_of(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def random_tensor(spec: TensorSpec, seed: int, index: int) -> torch.Tensor:
    """Any finite bit pattern, over the full range of exponents; the same for the same seed and index."""
    bits = _random((spec.numel * spec.width,), seed, index).view(UNSIGNED[spec.width])
    exponent = EXPONENTS.get(spec.dtype)
    if spec.dtype == "bool":
        bits &= np.uint8(1)
    elif exponent is not None:
        mask, lowest = bits.dtype.type(exponent), bits.dtype.type(exponent & -exponent)
        np.bitwise_xor(bits, lowest, out=bits, where=(bits & mask) == mask)
    return torch_of(bits, dtype_of(spec)).reshape(spec.shape)


def prefill(memory: Memory, seed: int, index: int) -> Octets:
    """What a memory is filled with before a load; seeds 2 n and 2 n + 1 differ in every bit."""
    octets = _random((len(memory.live),), seed // 2, index)
    if memory.dtype is torch.bool:
        octets &= np.uint8(1)
    elif seed % 2:
        np.invert(octets, out=octets)
    return octets


def bits_of(tensor: torch.Tensor) -> Bits:
    """A tensor's elements in row-major order, as unsigned integers."""
    flat = tensor.detach().contiguous().reshape(-1)
    bits: Bits = flat.view(torch.uint8).numpy().view(UNSIGNED[tensor.element_size()])
    return bits


def torch_of(bits: Bits, dtype: torch.dtype) -> torch.Tensor:
    """Bits [n] as a flat tensor over the same memory."""
    return torch.from_numpy(bits.view(np.uint8)).view(dtype)


def _random(shape: tuple[int, ...], seed: int, index: int) -> Octets:
    return np.random.default_rng((seed, index)).integers(0, 256, shape, np.uint8)
