"""A group of ranks in memory: several publishers of one run in one event loop. For tests of what the ranks do."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import numpy as np

from dcr.layout.views import Lanes


class MemoryGroup:
    """Ranks that meet in memory; `rank(n)` is the `dcr.seams.Group` of one of them.

    timeout_s: how long a meeting waits for the last to come.
    """

    def __init__(self, world: int, *, timeout_s: float = 5.0) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self.meetings: list[dict[int, bytes]] = []
        self._over: list[anyio.Event] = []  # all have come to it, or one never will
        self._lost: set[int] = set()

    def rank(self, number: int, *, before: Callable[[int], object] = bool) -> MemoryRank:
        """The group as one rank sees it. before: called with the number of each meeting that it comes to."""
        return MemoryRank(self, number, before)

    def lose(self, rank: int) -> None:
        """Take a rank out that has ended: meetings that it has not come to end at once, as after timeout_s."""
        self._lost.add(rank)
        for given, over in zip(self.meetings, self._over, strict=True):
            if rank not in given:
                over.set()

    async def meet(self, number: int, rank: int, data: bytes) -> list[bytes]:
        """Give `data` to a meeting; what all gave.

        Raises:
            TimeoutError: not all came.
        """
        while len(self.meetings) <= number:
            self.meetings.append({})
            self._over.append(anyio.Event())
        given = self.meetings[number]
        given[rank] = data
        if len(given) == self.world or self._lost - given.keys():
            self._over[number].set()
        with anyio.fail_after(self.timeout_s):
            await self._over[number].wait()
        if len(given) < self.world:
            raise TimeoutError(f"ranks {sorted(self._lost - given.keys())} have ended")
        return [given[one] for one in range(self.world)]


class MemoryRank:
    """One rank of a `MemoryGroup`."""

    def __init__(self, group: MemoryGroup, rank: int, before: Callable[[int], object]) -> None:
        self.rank = rank
        self.world = group.world
        self._group = group
        self._before = before
        self._next = 0

    async def gather(self, data: bytes) -> list[bytes]:
        """See `dcr.seams.Group.gather`."""
        number, self._next = self._next, self._next + 1
        self._before(number)
        return await self._group.meet(number, self.rank, data)

    async def add(self, lanes: Lanes) -> Lanes:
        """See `dcr.seams.Group.add`."""
        parts = [np.frombuffer(part, np.uint64) for part in await self.gather(lanes.tobytes())]
        total: Lanes = np.stack(parts).sum(axis=0, dtype=np.uint64).reshape(lanes.shape)
        return total
