"""The byte budget: how much memory may be in flight, and the leases that items hold on it.

One lease per item, taken at its birth at its worst case, shrunk when its size is known, given back when it has left.
There is no way to grow a lease: an item that could ask for more while it holds some could wait for itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from numbers import Integral
from types import TracebackType

import anyio

from dcr.errors import BudgetError, StateError
from dcr.seams.required import instance, judge

GiB = 1 << 30
MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class BudgetStatistics:
    """limit, leased and peak in bytes; waiters: leases that are asked for and not granted yet."""

    limit: int
    leased: int
    peak: int
    waiters: int


class ByteBudget:
    """At most `limit` bytes leased at a time; leases are granted in the order they were asked for."""

    def __init__(self, limit: int) -> None:
        judge(limit=(limit, instance(Integral, "256 * dcr.MiB")))
        if limit <= 0:
            raise BudgetError(f"a byte budget must be positive, got {limit}")
        self.limit = limit
        self._leased = 0
        self._peak = 0
        self._waiters: deque[tuple[int, anyio.Event]] = deque()

    async def lease(self, nbytes: int) -> Lease:
        """Wait until nbytes are free, then hold them.

        Raises:
            BudgetError: the budget is smaller than nbytes, so it could never be granted; or nbytes is negative.
        """
        if nbytes < 0:
            raise BudgetError(f"a lease must not be negative, got {nbytes} bytes")
        if nbytes > self.limit:
            raise BudgetError(f"a lease of {nbytes} bytes exceeds the budget of {self.limit}; raise the budget")
        if self._waiters or self._leased + nbytes > self.limit:
            await self._wait(nbytes)
        else:
            self._take(nbytes)
        return Lease(self, nbytes)

    def statistics(self) -> BudgetStatistics:
        return BudgetStatistics(self.limit, self._leased, self._peak, len(self._waiters))

    async def _wait(self, nbytes: int) -> None:
        granted = anyio.Event()
        entry = (nbytes, granted)
        self._waiters.append(entry)
        try:
            await granted.wait()
        except BaseException:
            if granted.is_set():  # granted and cancelled at the same moment
                self._give_back(nbytes)
            else:
                self._waiters.remove(entry)
                self._grant()
            raise

    def _take(self, nbytes: int) -> None:
        self._leased += nbytes
        self._peak = max(self._peak, self._leased)

    def _give_back(self, nbytes: int) -> None:
        self._leased -= nbytes
        self._grant()

    def _grant(self) -> None:
        while self._waiters and self._leased + self._waiters[0][0] <= self.limit:
            nbytes, granted = self._waiters.popleft()
            self._take(nbytes)
            granted.set()


class Lease:
    """Bytes held on a budget until `release`; usable as a context manager."""

    def __init__(self, budget: ByteBudget, nbytes: int) -> None:
        self._budget = budget
        self.nbytes = nbytes

    def shrink(self, nbytes: int) -> None:
        """Keep only nbytes of it.

        Raises:
            StateError: nbytes is more than is held, or negative.
        """
        if not 0 <= nbytes <= self.nbytes:
            raise StateError(f"a lease of {self.nbytes} bytes cannot grow to {nbytes}: take the worst case at birth")
        freed, self.nbytes = self.nbytes - nbytes, nbytes
        self._budget._give_back(freed)

    def release(self) -> None:
        """Give all of it back; a second call does nothing."""
        self.shrink(0)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()
