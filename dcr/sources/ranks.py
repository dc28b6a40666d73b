"""The ranks that hold one model together, over torch.distributed: whatever they tell each other is begun here.

`Peers` waits in its thread, while a map is made; `TorchGroup` in an event loop, beside training.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.lowlevel
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dcr.errors import LocalError
from dcr.layout.views import Lanes

SHORTEST_S, LONGEST_S = 0.0001, 0.005


class Peers:
    """The ranks of a process group (gloo or nccl); without one, this process alone. Calls are collective.

    group: None means the default group where torch.distributed is initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        together = group is not None or (dist.is_available() and dist.is_initialized())
        self._group = group
        self.rank = dist.get_rank(group) if together else 0
        self.size = dist.get_world_size(group) if together else 1
        self._device = _device_of(group) if together else torch.device("cpu")

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank."""
        if self.size == 1:
            return [data]
        sizes = [int(size) for size in self._all(torch.tensor([len(data)], device="cpu"))]
        return _cut(self._all(_padded(data, max(sizes))), sizes)

    def sum(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sum over all ranks."""
        if self.size == 1:
            return counts
        total, work = _begin_sum(counts, self._group, self._device)
        work.wait()
        found: NDArray[np.int64] = total.cpu().numpy()
        return found

    def _all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        everyones, work = _begin_gather(mine, self.size, self._group, self._device)
        work.wait()
        return [rank.cpu() for rank in everyones]


class TorchGroup:
    """A `dcr.seams.Group` over a process group, gloo or nccl. How long a rank is waited for is the group's time-out.

    The group must be the publisher's own: it meets beside training, whose collectives would be mixed up with its own.

    Raises:
        LocalError: this process is not in the group, or it is the default group, which training uses.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if group is dist.group.WORLD:
            raise LocalError(
                "a publisher meets beside training: give it a group of its own, torch.distributed.new_group()"
            )
        if not isinstance(group, dist.ProcessGroup):
            raise LocalError(f"expected a process group that this process is in, found {group!r}")
        self._group = group
        self._device = _device_of(group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def world(self) -> int:
        return dist.get_world_size(self._group)

    async def gather(self, data: bytes) -> list[bytes]:
        """See `dcr.seams.Group.gather`: the sizes, and then all of one size."""
        sizes = [int(size) for size in await self._all(torch.tensor([len(data)], dtype=torch.int64, device="cpu"))]
        return _cut(await self._all(_padded(data, max(sizes))), sizes)

    async def add(self, lanes: Lanes) -> Lanes:
        """See `dcr.seams.Group.add`; two's complement wraps as uint64 does."""
        total, work = _begin_sum(lanes.view(np.int64), self._group, self._device)
        await _ended(work)
        return total.cpu().numpy().view(np.uint64)

    async def _all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        everyones, work = _begin_gather(mine, self.world, self._group, self._device)
        await _ended(work)
        return [rank.cpu() for rank in everyones]


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _begin_gather(
    mine: torch.Tensor, world: int, group: dist.ProcessGroup | None, device: torch.device
) -> tuple[list[torch.Tensor], dist.Work]:
    """Begin to gather equally long tensors: where every rank's will be, and what to wait for."""
    mine = mine.to(device)
    everyones = [torch.empty_like(mine) for _ in range(world)]
    return everyones, dist.all_gather(everyones, mine, group=group, async_op=True)


def _begin_sum(
    numbers: NDArray[np.int64], group: dist.ProcessGroup | None, device: torch.device
) -> tuple[torch.Tensor, dist.Work]:
    """Begin to sum over all ranks: where the sum will be, and what to wait for."""
    total = torch.from_numpy(np.ascontiguousarray(numbers).copy()).to(device)
    return total, dist.all_reduce(total, group=group, async_op=True)


def _padded(data: bytes, size: int) -> torch.Tensor:
    """Bytes as a tensor of at least that size: there are backends that gather nothing of no size."""
    padded = torch.zeros(max(size, 1), dtype=torch.uint8, device="cpu")
    padded[: len(data)] = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
    return padded


def _cut(rows: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[bytes]:
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


async def _ended(work: dist.Work) -> None:
    """Wait without a thread, which could not be cancelled."""
    pause_s = SHORTEST_S
    await anyio.lowlevel.checkpoint()
    while not work.is_completed():
        await anyio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_S)
    work.wait()
