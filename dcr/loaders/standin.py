"""Stand-ins: scratch memory under all tensors of a model while its loader is tried out.

Live bytes and pointers stay as they are: each tensor's `data` is pointed elsewhere, with the same shape, strides and
offset, and tensors that share memory share it here too. Large stand-ins begin as pages of zeros that cost no memory
until they are written, small ones as copies, so that a loader finds its tables (an expert map, say) as they are.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from dcr.loaders.engine import Memory, Octets, Slot, memories_of
from dcr.loaders.probe import prefill, random_octets
from dcr.probing.bits import words

SMALL_BYTES = 1 << 20
PAGE = mmap.PAGESIZE
NOISE = 303  # the seed of random bits that stand-ins begin as
NORESERVE = 0x4000 if sys.platform == "linux" else 0  # memory that is never written need not exist


@dataclass(frozen=True, slots=True, eq=False)
class StandIn:
    """The scratch memory of one storage.

    pages, start: the mapping that it lies in, and its place there in bytes. origin: what it begins as; None for zeros.
    copied: it is written when it begins, otherwise its pages come from the mapping.
    """

    memory: Memory
    scratch: Octets
    base: torch.Tensor
    pages: mmap.mmap
    start: int
    origin: Octets | None
    copied: bool

    @staticmethod
    def over(memory: Memory, pages: mmap.mmap, start: int, origin: Octets | None, *, copied: bool) -> StandIn:
        """A stand-in that lies at a place of a mapping."""
        base = torch.frombuffer(pages, dtype=torch.uint8, count=len(memory.live), offset=start)
        return StandIn(memory, base.numpy(), base, pages, start, origin, copied)

    @property
    def address(self) -> int:
        return self.base.untyped_storage().data_ptr()

    def begin(self) -> None:
        """Write what it begins as, where its pages are not so already."""
        if self.copied and self.origin is not None:
            self.scratch[:] = self.origin

    def reset(self) -> None:
        """Make it as it was at first."""
        self.begin()
        if not self.copied:
            self.pages.madvise(mmap.MADV_DONTNEED, self.start, -(-len(self.scratch) // PAGE) * PAGE)

    def scratched(self) -> bool:
        """True if it has been written although nothing should have written it."""
        if self.origin is not None:
            return not np.array_equal(self.scratch, self.origin)
        return any(self.scratch[start:stop].any() for start, stop in _touched(self.address, len(self.scratch)))


@dataclass(slots=True, eq=False)
class _Swap:
    """A tensor of the model, the data that it had, and those that it has meanwhile, with where and how they lie."""

    tensor: torch.Tensor
    memory: int
    live: torch.Tensor
    stand_in: torch.Tensor
    address: int = 0
    stride: tuple[int, ...] = ()

    def to(self, one: StandIn) -> None:
        """Let the tensor lie in a stand-in."""
        live = self.live
        self.stand_in = torch.empty(0, dtype=live.dtype, device="cpu").set_(
            one.base.untyped_storage(), live.storage_offset(), live.shape, live.stride()
        )
        self.tensor.data = self.stand_in
        self.address, self.stride = self.stand_in.data_ptr(), self.stand_in.stride()

    def is_left(self, slot: Slot) -> bool:
        """True if a slot holds the tensor still, and that lies where it was put."""
        tensor = self.tensor
        try:
            return (
                slot.holder[slot.key] is tensor
                and tensor.layout is torch.strided
                and not tensor.is_nested
                and tensor.data_ptr() == self.address
                and tensor.stride() == self.stride
            )
        except (KeyError, IndexError):
            return False


@dataclass(frozen=True, slots=True)
class Rebound:
    """A slot whose tensor no longer lies where it should: brought home, or not if its shape or dtype is another."""

    slot: Slot
    fits: bool


class StandIns:
    """A context: within it every slot's tensor lies in scratch memory; afterwards all is as before.

    Raises:
        SchemaError: tensors of different widths share memory; names them.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = list(slots)
        self.memories = memories_of(self._slots)
        self._usual = _stand_ins(self.memories)
        self._stand_ins = list(self._usual)
        self._index = {one.address: i for i, one in enumerate(self._stand_ins)}
        self._of_slot = {id(slot): i for i, memory in enumerate(self.memories) for slot in memory.slots}
        self._swaps: dict[int, _Swap] = {}
        self._placed: list[tuple[Slot, _Swap]] = []

    def __enter__(self) -> StandIns:
        try:
            for slot in self._slots:
                if id(slot.tensor) not in self._swaps:
                    live, number = slot.tensor.data, self.memory_of(slot)
                    swap = self._swaps[id(slot.tensor)] = _Swap(slot.tensor, number, live, live)
                    swap.to(self._stand_ins[number])
        except BaseException:
            self._restore()
            raise
        self._placed = [(slot, self._swaps[id(slot.tensor)]) for slot in self._slots]
        for one in self._stand_ins:
            one.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    @property
    def index(self) -> dict[int, int]:
        """The number of each memory by the address of its stand-in."""
        return self._index

    def stage(self, noisy: Collection[int] = ()) -> None:
        """Let the stand-ins of some memories begin as random bits from now on, and all others as usual.

        What is large shares the pages of one file of random bits, as long as they are not written.
        """
        large = [i for i in noisy if not (self._usual[i].copied or self.memories[i].dtype is torch.bool)]
        numbers = [i for i, one in enumerate(self._stand_ins) if i in noisy or one is not self._usual[i]]
        with _noise(max((len(self.memories[i].live) for i in large), default=0)) as file:
            for index in numbers:
                usual, memory = self._usual[index], self.memories[index]
                if index in large:
                    stand_in = _noisy(memory, file)
                elif index in noisy:
                    stand_in = replace(usual, origin=prefill(memory, NOISE, index), copied=True)
                else:
                    stand_in = usual
                del self._index[self._stand_ins[index].address]
                self._stand_ins[index] = stand_in
                self._index[stand_in.address] = index
                stand_in.begin()
        for swap in self._swaps.values():
            if swap.memory in numbers:
                swap.to(self._stand_ins[swap.memory])

    def keep(self, memories: Iterable[int]) -> set[int]:
        """Let stand-ins begin as copies from now on, since a loader reads them; those that did not already."""
        kept = {index for index in memories if not self._stand_ins[index].copied}
        for index in kept:
            self._usual[index] = replace(self._usual[index], origin=self.memories[index].live, copied=True)
            self._stand_ins[index] = self._usual[index]
            self._stand_ins[index].begin()
        return kept

    def reset(self, memories: Iterable[int]) -> None:
        """Stand-ins as they were at first."""
        for index in memories:
            self._stand_ins[index].reset()

    def scratch(self, index: int) -> Octets:
        """The bytes of one stand-in."""
        return self._stand_ins[index].scratch

    def scratched(self, index: int) -> bool:
        """True if a stand-in is not as it was at first."""
        return self._stand_ins[index].scratched()

    def bring_home(self) -> list[Rebound]:
        """Slots whose tensors were replaced: their contents are copied into the stand-in, which they then use again."""
        rebound: list[Rebound] = []
        for slot in self._strayed():
            now, stand_in = slot.now(), self._swaps[id(slot.tensor)].stand_in
            fits = _fits(now, stand_in)
            rebound.append(Rebound(slot, fits))
            if fits:
                words(stand_in).copy_(words(now))
        for replaced in rebound:
            replaced.slot.put(replaced.slot.tensor)
        for swap in self._swaps.values() if rebound else ():
            swap.tensor.data = swap.stand_in
        return rebound

    def _strayed(self) -> list[Slot]:
        """Slots that hold another tensor than before, or one that lies elsewhere.

        All are looked at after each load, so the code of a tensor's class is not run: vLLM's takes longer than this.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return [slot for slot, swap in self._placed if not swap.is_left(slot)]

    def memory_of(self, slot: Slot) -> int:
        return self._of_slot[id(slot)]

    def _restore(self) -> None:
        for slot in self._slots:
            if slot.now() is not slot.tensor:
                slot.put(slot.tensor)
        for swap in self._swaps.values():
            swap.tensor.data = swap.live
        self._swaps.clear()


def _fits(now: object, stand_in: torch.Tensor) -> bool:
    """True if what a slot holds now can be copied to where its tensor lies."""
    if not isinstance(now, torch.Tensor) or now.is_nested or now.layout != torch.strided or now.device.type != "cpu":
        return False
    overlaps = any(n > 1 and stride == 0 for n, stride in zip(stand_in.shape, stand_in.stride(), strict=True))
    return now.shape == stand_in.shape and now.dtype == stand_in.dtype and not overlaps


def _stand_ins(memories: Sequence[Memory]) -> list[StandIn]:
    """One stand-in for each storage, all in one arena."""
    starts = [0, *accumulate(-(-len(memory.live) // PAGE) * PAGE for memory in memories)]
    arena = mmap.mmap(-1, max(starts[-1], PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    stand_ins = []
    for memory, start in zip(memories, starts, strict=False):
        small = len(memory.live) <= SMALL_BYTES
        stand_ins.append(StandIn.over(memory, arena, start, memory.live if small else None, copied=small))
    return stand_ins


def _touched(address: int, size_bytes: int) -> list[tuple[int, int]]:
    """Ranges of a page-aligned mapping of zeros outside of which nothing can have been written.

    The system says which pages exist: a cache of 40 GB that no load writes is not read through for every unit.
    """
    try:
        with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
            entries = np.frombuffer(os.pread(file.fileno(), 8 * -(-size_bytes // PAGE), address // PAGE * 8), np.uint64)
    except OSError:  # another system
        return [(0, size_bytes)]
    exists = np.concatenate([[False], entries >> np.uint64(62) != 0, [False]])  # in memory, or swapped out
    edges = np.flatnonzero(exists[1:] != exists[:-1]) * PAGE
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


@contextmanager
def _noise(size_bytes: int) -> Iterator[int]:
    """A file of random bits."""
    with tempfile.TemporaryFile() as named:
        file = os.memfd_create("noise") if hasattr(os, "memfd_create") else os.dup(named.fileno())
        try:
            for start in range(0, size_bytes, PAGE << 8):
                os.write(file, random_octets(min(size_bytes - start, PAGE << 8), NOISE, start).data)
            yield file
        finally:
            os.close(file)


def _noisy(memory: Memory, file: int) -> StandIn:
    """A stand-in over private pages of a file of random bits."""
    size = max(len(memory.live), 1)
    pages = mmap.mmap(file, size, flags=mmap.MAP_PRIVATE | NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    origin = np.frombuffer(mmap.mmap(file, size, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED), np.uint8)
    return StandIn.over(memory, pages, 0, origin, copied=False)
