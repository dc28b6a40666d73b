"""The ranks that hold one model together, and the little that they tell each other when a map is made."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray


class Peers:
    """The ranks of a process group (gloo or nccl); without one, this process alone. Calls are collective.

    group: None means the default group where torch.distributed is initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        together = group is not None or (dist.is_available() and dist.is_initialized())
        self._group = group
        self.rank = dist.get_rank(group) if together else 0
        self.size = dist.get_world_size(group) if together else 1
        gpu = together and dist.get_backend(group) == "nccl"
        self._device = torch.device("cuda" if gpu else "cpu")

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank."""
        if self.size == 1:
            return [data]
        sizes = self._gathered(torch.tensor([len(data)], device="cpu")).reshape(-1).tolist()
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        return [row[:size].tobytes() for row, size in zip(self._gathered(padded), sizes, strict=True)]

    def sum(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The sum over all ranks."""
        if self.size == 1:
            return counts
        total = torch.from_numpy(np.ascontiguousarray(counts)).to(self._device, copy=True)
        dist.all_reduce(total, group=self._group)
        found: NDArray[np.int64] = total.cpu().numpy()
        return found

    def _gathered(self, mine: torch.Tensor) -> NDArray[np.generic]:
        out = torch.empty((self.size, *mine.shape), dtype=mine.dtype, device=self._device)
        dist.all_gather(list(out.unbind()), mine.to(self._device), group=self._group)
        found: NDArray[np.generic] = out.cpu().numpy()
        return found
