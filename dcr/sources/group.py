"""The ranks of a publisher as a process group of torch.distributed."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import numpy as np
import torch
import torch.distributed as dist

from dcr.errors import LocalError
from dcr.layout.views import Lanes

SHORTEST_S, LONGEST_S = 0.0001, 0.005


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
        self._device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def world(self) -> int:
        return dist.get_world_size(self._group)

    async def gather(self, data: bytes) -> list[bytes]:
        """See `dcr.seams.Group.gather`: the sizes, and then all of one size."""
        sizes = await self._all(torch.tensor([len(data)], dtype=torch.int64, device="cpu"))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: len(data)] = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
        everything = await self._all(padded)
        return [one[: int(size)].numpy().tobytes() for one, size in zip(everything, sizes, strict=True)]

    async def add(self, lanes: Lanes) -> Lanes:
        """See `dcr.seams.Group.add`; two's complement wraps as uint64 does."""
        total = torch.from_numpy(lanes.view(np.int64).copy()).to(self._device)
        await _ended(dist.all_reduce(total, group=self._group, async_op=True))
        return total.cpu().numpy().view(np.uint64)

    async def _all(self, mine: torch.Tensor) -> list[torch.Tensor]:
        mine = mine.to(self._device)
        everyones = [torch.empty_like(mine) for _ in range(self.world)]
        await _ended(dist.all_gather(everyones, mine, group=self._group, async_op=True))
        return [one.cpu() for one in everyones]


async def _ended(work: dist.Work) -> None:
    """Wait without a thread, which could not be cancelled."""
    pause_s = SHORTEST_S
    await anyio.lowlevel.checkpoint()
    while not work.is_completed():
        await anyio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_S)
    work.wait()
