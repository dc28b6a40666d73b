"""Stand-ins for one group of tensors: dense copies of their shapes that hold digits, or random bits, never weights.

E  elements of a group, over all ranks      N  elements of an exported tensor
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from dcr.errors import SchemaError
from dcr.layout.fit import HOLE, Index
from dcr.layout.views import Bits
from dcr.probing.bits import SYMBOLIC, counted, dtype_of, random_bits, tensor_of, words
from dcr.probing.tensors import Tied

# Some of this rank's tensors by name in, canonical names and tensors out.
Export = Callable[[Mapping[str, torch.Tensor]], Iterable[tuple[str, torch.Tensor]]]

# What an exporter expects of a tensor of some name that holds this rank's part.
Dress = Callable[[str, torch.Tensor], torch.Tensor]

# How far a dtype counts exactly, where that is less far than bfloat16.
EXACT = {
    "bool": 2,
    "int8": 128,
    "float8_e4m3fn": 16,
    "float8_e5m2": 8,
    "float8_e4m3fnuz": 16,
    "float8_e5m2fnuz": 8,
}
BASE = 256


def base_of(tensors: Iterable[Tied]) -> int:
    """The base of digits that all of some tensors' dtypes hold exactly."""
    return min((EXACT.get(one.dtype, BASE) for one in tensors), default=BASE)


@dataclass(frozen=True, slots=True, eq=False)
class StandIns:
    """One group on one rank.

    tensors: this rank's part of the group; element 0 of tensors[i] has the number first + starts[i] in the group, of
    which all ranks together have `total` elements. base: the digits' base, alike on all ranks. dress: makes of a
    tensor, by its first name, what the exporter expects (a DTensor).
    """

    number: int
    tensors: Sequence[Tied]
    export: Export
    first: int
    total: int
    base: int
    dress: Dress = lambda _, tensor: tensor
    starts: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        sizes = [one.tensor.numel() for one in self.tensors]
        object.__setattr__(self, "starts", [0, *np.cumsum(sizes, dtype=np.int64).tolist()])

    def digits(self) -> Iterator[dict[str, torch.Tensor]]:
        """The group with each element's number plus one, digit by digit, lowest first; so a constant 0 is no number."""
        numbers = np.arange(self.first + 1, self.first + self.starts[-1] + 1, dtype=np.int64)
        scale = 1
        while scale == 1 or scale <= self.total:
            digit = torch.from_numpy(numbers // scale % self.base)
            yield self._named(
                [
                    counted(digit[start : start + one.tensor.numel()], one.tensor.dtype).reshape(one.tensor.shape)
                    for one, start in zip(self.tensors, self.starts, strict=False)
                ]
            )
            scale *= self.base

    def random(self, seed: int) -> tuple[list[Bits], dict[str, torch.Tensor]]:
        """The group in random bits, as memory and as tensors over it; each rank has its own."""
        sizes: dict[str, int] = {}
        for one in self.tensors:
            sizes[one.dtype] = sizes.get(one.dtype, 0) + one.tensor.numel()
        drawn = {dtype: random_bits(size, dtype, (seed, self.first)) for dtype, size in sizes.items()}
        memory: list[Bits] = []
        for one in self.tensors:
            rest, n = drawn[one.dtype], one.tensor.numel()
            drawn[one.dtype] = rest[n:]
            memory.append(rest[:n])
        return memory, self._named(
            [tensor_of(bits, one.dtype, one.tensor.shape) for bits, one in zip(memory, self.tensors, strict=True)]
        )

    def hollow(self) -> StandIns:
        """The same group without any memory: what it needs to export the weights later."""
        emptied = [replace(one, tensor=torch.empty_like(one.tensor, device="meta")) for one in self.tensors]
        return replace(self, tensors=emptied)

    def live(self, now: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights themselves, given this rank's tensors as they are now, by name: also names that were tied."""
        return {name: self.dress(name, now[name].detach()) for one in self.tensors for name in one.names}

    def run(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Export; each canonical tensor once, plain and whole. To be called under `torch.no_grad`.

        Raises:
            SchemaError: the exporter failed, or gave a name twice.
        """
        seen: set[str] = set()
        exported = iter(self.export(tensors))
        while True:
            try:
                name, tensor = next(exported)
                tensor = tensor.detach()
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            except StopIteration:
                return
            except Exception as error:  # an exporter is somebody else's code: it may fail in any way
                some = ", ".join(one.name for one in self.tensors[:3])
                raise SchemaError(
                    f"the exporter failed on the group {some}{', ...' if len(self.tensors) > 3 else ''}: "
                    f"{type(error).__name__}: {error}; pass `groups` if it needs other tensors together"
                ) from error
            if name in seen:
                raise SchemaError(f"the exporter gave {name} twice")
            seen.add(name)
            yield name, whole

    def _named(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        dressed = [self.dress(one.name, tensor) for one, tensor in zip(self.tensors, tensors, strict=True)]
        return {name: tensor for one, tensor in zip(self.tensors, dressed, strict=True) for name in one.names}


@dataclass(slots=True)
class Numbers:
    """The numbers of one exported tensor's elements, as they come in digit by digit."""

    index: NDArray[np.int64]
    sound: bool = True

    def add(self, tensor: torch.Tensor, base: int, place: int) -> None:
        """Take the digit of base^place of each element."""
        if tensor.numel() != len(self.index) or tensor.is_complex():
            self.sound = False
            return
        plain = words(tensor) if dtype_of(tensor) in SYMBOLIC else tensor
        digit = plain.cpu().reshape(-1).to(torch.float32).numpy()
        with np.errstate(invalid="ignore"):  # what is no number becomes one that differs
            counted = digit.astype(np.int64)
        same = counted == digit
        self.sound = self.sound and bool(same.all() and counted.min(initial=0) >= 0 and counted.max(initial=0) < base)
        if self.sound:
            self.index += counted * base**place

    def within(self, first: int, count: int) -> Index:
        """Where numbers are those of `count` elements from `first` on: which of them; HOLE elsewhere. Int64 [N]."""
        own = self.index - (first + 1)
        return np.where((own >= 0) & (own < count), own, HOLE)
