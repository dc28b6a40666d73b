"""Bit patterns to push through a loader: digits that say where an element came from, and random ones that prove it.

    N  elements of a unit of tensors

An element's number is its tensor's first number plus its row-major index. It is written in a base whose digits every
dtype at hand holds exactly, also after a cast between floating types: small integers, or where that is enough, many
normal numbers of a 16-bit float. One load carries one digit, and a last one the complement of the first digit. No
constant satisfies both, so a constant is never taken for an element.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dcr.layout.schema import TensorSpec
from dcr.layout.views import UNSIGNED, Bits
from dcr.loaders.engine import Memory, Octets
from dcr.probing.bits import SYMBOLIC, bits_of, name_of, tame

# Non-negative integers below this are exact.
BASES = {
    "bool": 2,
    "uint8": 128,
    "int8": 128,
    "float8_e4m3fn": 16,
    "float8_e5m2": 8,
    "float8_e4m3fnuz": 16,
    "float8_e5m2fnuz": 8,
    **dict.fromkeys(SYMBOLIC, 128),
}
BASE = 256
# Normal numbers of consecutive bit patterns, from this one on: these dtypes hold them exactly, in equal steps of bits.
WIDE = {"bfloat16": 0x1800, "float16": 0x1000}
WIDER = frozenset({"float32", "float64"})
WIDE_BASE = 1 << 14
BLOCK = 1 << 15  # elements that are worked on at a time: they stay in cache


@dataclass(frozen=True, slots=True)
class Numbering:
    """The elements of some tensors, numbered one after another.

    stored: dtypes of the memory that they go to. firsts: each tensor's first number, and the count of all. shift: bits
    of a digit.
    """

    specs: tuple[TensorSpec, ...]
    stored: frozenset[torch.dtype]
    firsts: list[int] = field(init=False)
    shift: int = field(init=False)
    _values: torch.Tensor = field(init=False)
    _codes: dict[torch.dtype, _Code] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        values = _values({dtype_of(spec) for spec in self.specs}, self.stored)
        object.__setattr__(self, "firsts", [0, *accumulate(spec.numel for spec in self.specs)])
        object.__setattr__(self, "shift", len(values).bit_length() - 1)
        object.__setattr__(self, "_values", values)

    @property
    def numel(self) -> int:
        return self.firsts[-1]

    @property
    def digits(self) -> int:
        """How many digits a number has.

        An even number of bits: a bool that no load writes has the same bit in the first and the last pass then, and is
        no number.
        """
        digits = max(1, -(-(self.numel - 1).bit_length() // self.shift))
        return digits + digits % 2 if self.shift == 1 else digits

    @property
    def passes(self) -> int:
        """How many loads it takes to read all numbers: one for each digit, and one for the complement."""
        return self.digits + 1

    def tensor(self, index: int, number: int) -> torch.Tensor:
        """What to load for one tensor in one pass."""
        spec, first = self.specs[index], self.firsts[index]
        code, bits = self._code(dtype_of(spec)), np.empty(spec.numel, UNSIGNED[spec.width])
        word: Any = np.uint64 if self.numel >> 32 else np.uint32
        count = np.arange(min(spec.numel, BLOCK), dtype=word)
        for start in range(0, spec.numel, BLOCK):
            block = bits[start : start + BLOCK]
            digits = count[: len(block)] + word(first + start)
            digits >>= word(self.shift * (number % self.digits))
            digits &= word((1 << self.shift) - 1)
            block[:] = code.write(digits, complement=number == self.digits)
        return torch_of(bits, dtype_of(spec)).reshape(spec.shape)

    def read(self, pictures: Sequence[Bits], dtype: torch.dtype) -> NDArray[np.int64]:
        """The numbers [elements] in pictures of a memory, one for each pass; -1 where there is none."""
        numbers, code = np.empty(len(pictures[0]), np.int64), self._code(dtype)
        for start in range(0, len(numbers), BLOCK):
            block = slice(start, start + BLOCK)
            first, valid = code.read(pictures[0][block])
            last, found = code.read(pictures[-1][block])
            valid &= found
            valid &= first + last == (1 << self.shift) - 1
            number = first.astype(np.int64)
            for place, picture in enumerate(pictures[1:-1], start=1):
                digit, found = code.read(picture[block])
                valid &= found
                number |= digit.astype(np.int64) << (self.shift * place)
            valid &= number < self.numel
            number[~valid] = -1
            numbers[block] = number
        return numbers

    def _code(self, dtype: torch.dtype) -> _Code:
        if dtype not in self._codes:
            self._codes[dtype] = _Code.of(self._values, dtype)
        return self._codes[dtype]


@dataclass(frozen=True, slots=True, eq=False)
class _Code:
    """How a dtype writes digits.

    patterns: bits [base]. step: from each to the next, a power of two; 0 if they differ. digit_of: where they do, and
    a pattern has at most 16 bits, the digit of each pattern, or -1.
    """

    patterns: Bits
    step: int
    digit_of: NDArray[np.int16]

    @staticmethod
    def of(values: torch.Tensor, dtype: torch.dtype) -> _Code:
        patterns = _patterns(values, dtype)
        steps = np.unique(np.diff(patterns)).tolist()
        if len(steps) == 1 and steps[0].bit_count() == 1:
            return _Code(patterns, steps[0], np.empty(0, np.int16))
        digit_of = np.full(1 << 8 * patterns.itemsize if patterns.itemsize <= 2 else 0, -1, np.int16)
        if len(digit_of):
            digit_of[patterns] = np.arange(len(patterns))
        return _Code(patterns, 0, digit_of)

    def write(self, digits: NDArray[Any], *, complement: bool) -> Bits:
        if self.step:
            above = digits.astype(self.patterns.dtype)
            above *= self.patterns.dtype.type(self.step)
            bits: Bits = self.patterns[-1] - above if complement else self.patterns[0] + above
        else:
            bits = (self.patterns[::-1] if complement else self.patterns)[digits]
        return bits

    def read(self, bits: Bits) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """The digits that some bits are, and where they are any."""
        if self.step:
            above = bits - self.patterns[0]
            digits = above >> bits.dtype.type(self.step.bit_length() - 1)
            valid = digits < len(self.patterns)
            if self.step > 1:
                valid &= (above & bits.dtype.type(self.step - 1)) == 0
            return digits, valid
        if len(self.digit_of):
            found = self.digit_of[bits]
            return found, found >= 0
        order = np.argsort(self.patterns)
        at = np.searchsorted(self.patterns[order], bits).clip(max=len(order) - 1)
        return order[at], self.patterns[order][at] == bits


def _values(sources: Collection[torch.dtype], stored: Collection[torch.dtype]) -> torch.Tensor:
    """Numbers that sources, and floating memory, hold exactly: a power of two of them."""
    names = {name_of(dtype) for dtype in (*sources, *stored)}
    for carrier, first in WIDE.items():
        if names <= {carrier, *WIDER}:
            return torch_of(np.arange(first, first + WIDE_BASE, dtype=np.uint16), getattr(torch, carrier))
    holding = {*sources, *(dtype for dtype in stored if dtype.is_floating_point)}
    return torch.arange(min(BASES.get(name_of(dtype), BASE) for dtype in holding), device="cpu")


def _patterns(values: torch.Tensor, dtype: torch.dtype) -> Bits:
    """The words that stand for some numbers in a dtype; those that cannot count take the patterns themselves."""
    if dtype is torch.complex128:
        return bits_of(values.to(torch.float64))  # each of its words by itself
    if name_of(dtype) in SYMBOLIC:
        return np.arange(len(values)).astype(UNSIGNED[dtype.itemsize])
    return bits_of(values.to(dtype))


def dtype_of(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def random_tensor(spec: TensorSpec, seed: int, index: int) -> torch.Tensor:
    """Any finite bit pattern, over the full range of exponents; the same for the same seed and index."""
    bits = random_octets(spec.numel * spec.width, seed, index).view(UNSIGNED[spec.width])
    tame(bits, spec.dtype)
    return torch_of(bits, dtype_of(spec)).reshape(spec.shape)


def prefill(memory: Memory, seed: int, index: int) -> Octets:
    """What a memory is filled with before random bits are loaded."""
    octets = random_octets(len(memory.live), seed, index)
    if memory.dtype is torch.bool:
        octets &= np.uint8(1)
    return octets


def blank(memory: Memory, number: int) -> int:
    """The byte that fills a memory before numbers are loaded: no digit, and other bits in every second pass."""
    return number % 2 if memory.dtype is torch.bool else (0xA5, 0x5A)[number % 2]


def torch_of(bits: Bits, dtype: torch.dtype) -> torch.Tensor:
    """Bits [n] as a flat tensor, over the same memory if that may be written."""
    return torch.from_numpy((bits if bits.flags.writeable else bits.copy()).view(np.uint8)).view(dtype)


def random_octets(size: int, seed: int, index: int) -> Octets:
    generator = np.random.Generator(np.random.SFC64((seed, index)))
    return generator.integers(0, 1 << 64, -(-size // 8), np.uint64, endpoint=False).view(np.uint8)[:size]
