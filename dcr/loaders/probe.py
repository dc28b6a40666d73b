"""Bit patterns to push through a loader: digits that say where an element came from, and random ones that prove it.

    N  elements of a unit of tensors

An element's number is its tensor's first number plus its row-major index. It is written in a base whose digits every
dtype at hand holds exactly, also after a cast between floating types; one load carries one digit, and a last one the
complement of the first digit. No constant satisfies both, so a constant is never taken for an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dcr.loaders.engine import Memory, Octets
from dcr.schema import TensorSpec
from dcr.views import UNSIGNED, Bits

# Non-negative integers below this are exact.
BASES = {"bool": 2, "uint8": 128, "int8": 128, "float8_e4m3fn": 16, "float8_e5m2": 8}
BASE = 256
BLOCK = 1 << 20  # elements that are read at a time
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
    """The elements of some tensors, numbered one after another.

    dtypes: further ones that must hold the digits. firsts: each tensor's first number, and the count of all. shift:
    bits of a digit.
    """

    specs: tuple[TensorSpec, ...]
    dtypes: frozenset[str] = frozenset()
    firsts: list[int] = field(init=False)
    shift: int = field(init=False)

    def __post_init__(self) -> None:
        bases = (BASES.get(dtype, BASE) for dtype in {*self.dtypes, *(spec.dtype for spec in self.specs)})
        object.__setattr__(self, "firsts", [0, *accumulate(spec.numel for spec in self.specs)])
        object.__setattr__(self, "shift", min(bases).bit_length() - 1)

    @property
    def numel(self) -> int:
        return self.firsts[-1]

    @property
    def digits(self) -> int:
        """How many digits a number has."""
        return max(1, -(-(self.numel - 1).bit_length() // self.shift))

    @property
    def passes(self) -> int:
        """How many loads it takes to read all numbers: one for each digit, and one for the complement."""
        return self.digits + 1

    def tensor(self, index: int, number: int) -> torch.Tensor:
        """What to load for one tensor in one pass."""
        spec, first = self.specs[index], self.firsts[index]
        digit: NDArray[Any] = np.arange(first, first + spec.numel, dtype=np.int64 if self.numel >> 31 else np.int32)
        digit >>= self.shift * (number % self.digits)
        digit &= (1 << self.shift) - 1
        patterns = bits_of(torch.arange(1 << self.shift).to(dtype_of(spec)))
        bits = (patterns if number < self.digits else patterns[::-1])[digit]
        return torch_of(bits, dtype_of(spec)).reshape(spec.shape)

    def read(self, pictures: Sequence[Bits], dtype: torch.dtype) -> NDArray[np.int64]:
        """The numbers [elements] in pictures of a memory, one for each pass; -1 where there is none."""
        numbers = np.empty(len(pictures[0]), np.int64)
        for start in range(0, len(numbers), BLOCK):
            block = slice(start, start + BLOCK)
            digits = [_digits(picture[block], dtype, 1 << self.shift) for picture in pictures]
            number = np.zeros(len(digits[0]), np.int64)
            for place in range(self.digits):
                number |= digits[place].astype(np.int64) << (self.shift * place)
            valid = (digits[0] + digits[-1] == (1 << self.shift) - 1) & (number < self.numel)
            for digit in digits:
                valid &= digit >= 0
            numbers[block] = np.where(valid, number, -1)
        return numbers


def _digits(bits: Bits, dtype: torch.dtype, base: int) -> NDArray[np.int16]:
    """The digits that some stored bits are, -1 where they are none."""
    patterns = bits_of(torch.arange(base).to(dtype))
    if bits.itemsize <= 2:
        table = np.full(1 << 8 * bits.itemsize, -1, np.int16)
        table[patterns] = np.arange(base)
        digits: NDArray[np.int16] = table[bits]
        return digits
    order = np.argsort(patterns)
    at = np.searchsorted(patterns[order], bits).clip(max=base - 1)
    return np.where(patterns[order][at] == bits, order[at], -1).astype(np.int16)


def dtype_of(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def random_tensor(spec: TensorSpec, seed: int, index: int) -> torch.Tensor:
    """Any finite bit pattern, over the full range of exponents; the same for the same seed and index."""
    bits = _random(spec.numel * spec.width, seed, index).view(UNSIGNED[spec.width])
    exponent = EXPONENTS.get(spec.dtype)
    if spec.dtype == "bool":
        bits &= np.uint8(1)
    elif exponent is not None:
        mask, lowest = bits.dtype.type(exponent), bits.dtype.type(exponent & -exponent)
        bits ^= ((bits & mask) == mask).astype(bits.dtype) * lowest
    return torch_of(bits, dtype_of(spec)).reshape(spec.shape)


def prefill(memory: Memory, seed: int, index: int) -> Octets:
    """What a memory is filled with before random bits are loaded."""
    octets = _random(len(memory.live), seed, index)
    if memory.dtype is torch.bool:
        octets &= np.uint8(1)
    return octets


def blank(memory: Memory, number: int) -> int:
    """The byte that fills a memory before numbers are loaded: no digit, and other bits in every second pass."""
    return number % 2 if memory.dtype is torch.bool else (0xA5, 0x5A)[number % 2]


def bits_of(tensor: torch.Tensor) -> Bits:
    """A tensor's elements in row-major order, as unsigned integers."""
    flat = tensor.detach().contiguous().reshape(-1)
    bits: Bits = flat.view(torch.uint8).numpy().view(UNSIGNED[tensor.element_size()])
    return bits


def torch_of(bits: Bits, dtype: torch.dtype) -> torch.Tensor:
    """Bits [n] as a flat tensor, over the same memory if that may be written."""
    return torch.from_numpy((bits if bits.flags.writeable else bits.copy()).view(np.uint8)).view(dtype)


def _random(size: int, seed: int, index: int) -> Octets:
    generator = np.random.Generator(np.random.SFC64((seed, index)))
    return generator.integers(0, 1 << 64, -(-size // 8), np.uint64, endpoint=False).view(np.uint8)[:size]
