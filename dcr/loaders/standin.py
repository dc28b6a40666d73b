"""Stand-ins: scratch memory under all tensors of a model while its loader is tried out.

Live bytes and pointers stay as they are: each tensor's `data` is pointed elsewhere, with the same shape, strides and
offset, and tensors that share memory share it here too. Large stand-ins begin as pages of zeros that cost no memory
until they are written, small ones as copies, so that a loader finds its tables (an expert map, say) as they are.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import TracebackType

import numpy as np
import torch

from dcr.loaders.engine import Memory, Octets, Slot, memories_of
from dcr.sources.bits import words

SMALL_BYTES = 1 << 20
PAGE = mmap.PAGESIZE
NORESERVE = 0x4000 if sys.platform == "linux" else 0  # memory that is never written need not exist


@dataclass(frozen=True, slots=True, eq=False)
class StandIn:
    """The scratch memory of one storage; start: its place in the arena, in bytes."""

    memory: Memory
    scratch: Octets
    base: torch.Tensor
    start: int

    @property
    def small(self) -> bool:
        return len(self.scratch) <= SMALL_BYTES

    def begin(self) -> None:
        """What is small begins as a copy; the rest has only zeros as long as it is not written."""
        if self.small:
            self.scratch[:] = self.memory.live

    def scratched(self) -> bool:
        """True if it has been written although nothing should have written it."""
        if self.small:
            return not np.array_equal(self.scratch, self.memory.live)
        whole = len(self.scratch) // 8 * 8
        return bool(self.scratch[:whole].view(np.uint64).max(initial=0) or self.scratch[whole:].any())


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
        self._stand_ins, self._arena = _stand_ins(self.memories)
        self.index = {one.base.untyped_storage().data_ptr(): i for i, one in enumerate(self._stand_ins)}
        self._of_slot = {id(slot): i for i, memory in enumerate(self.memories) for slot in memory.slots}
        self._data: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __enter__(self) -> StandIns:
        seen: dict[int, torch.Tensor] = {}
        try:
            for slot in self._slots:
                if id(slot.tensor) not in seen:
                    seen[id(slot.tensor)] = slot.tensor
                    self._swap(slot)
        except BaseException:
            self._restore()
            raise
        for one in self._stand_ins:
            one.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore()

    def reset(self, memories: Iterable[int]) -> None:
        """Stand-ins as they were at first."""
        for index in memories:
            one = self._stand_ins[index]
            one.begin()
            if not one.small and one.scratched():  # otherwise its pages stay: to look at them again is cheap
                self._arena.madvise(mmap.MADV_DONTNEED, one.start, -(-len(one.scratch) // PAGE) * PAGE)

    def scratch(self, index: int) -> Octets:
        """The bytes of one stand-in."""
        return self._stand_ins[index].scratch

    def scratched(self, index: int) -> bool:
        """True if a stand-in is not as it was at first."""
        return self._stand_ins[index].scratched()

    def bring_home(self) -> list[Rebound]:
        """Slots whose tensors were replaced: their contents are copied into the stand-in, which they then use again."""
        found: list[Rebound] = []
        for slot, stand_in in self._by_slot():
            now = slot.now()
            if now is slot.tensor and now.data_ptr() == stand_in.data_ptr() and now.stride() == stand_in.stride():
                continue
            fits = isinstance(now, torch.Tensor) and now.shape == stand_in.shape and now.dtype == stand_in.dtype
            found.append(Rebound(slot, fits))
            if fits:
                words(stand_in).copy_(words(now))
        for rebound in found:
            rebound.slot.put(rebound.slot.tensor)
        for tensor, _, stand_in in self._data if found else ():
            tensor.data = stand_in
        return found

    def memory_of(self, slot: Slot) -> int:
        return self._of_slot[id(slot)]

    def _by_slot(self) -> Iterable[tuple[Slot, torch.Tensor]]:
        by_tensor = {id(tensor): stand_in for tensor, _, stand_in in self._data}
        return [(slot, by_tensor[id(slot.tensor)]) for slot in self._slots]

    def _swap(self, slot: Slot) -> None:
        tensor, base = slot.tensor, self._stand_ins[self.memory_of(slot)].base
        live = tensor.data
        stand_in = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
            base.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        tensor.data = stand_in
        self._data.append((tensor, live, stand_in))

    def _restore(self) -> None:
        for slot in self._slots:
            if slot.now() is not slot.tensor:
                slot.put(slot.tensor)
        for tensor, live, _ in self._data:
            tensor.data = live
        self._data.clear()


def _stand_ins(memories: Sequence[Memory]) -> tuple[list[StandIn], mmap.mmap]:
    """One stand-in for each storage, and the arena in which they lie."""
    starts = [0, *accumulate(-(-len(memory.live) // PAGE) * PAGE for memory in memories)]
    arena = mmap.mmap(-1, max(starts[-1], PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    found = []
    for memory, start in zip(memories, starts, strict=False):
        base = torch.frombuffer(arena, dtype=torch.uint8, count=len(memory.live), offset=start)
        found.append(StandIn(memory, base.numpy(), base, start))
    return found, arena
