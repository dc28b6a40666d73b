"""What one stage of a pipeline does, item by item: counted for its statistics, told to an observer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import anyio

from dcr.events import StageCompleted, StageFailed, StageStarted, StageWorked
from dcr.events.observers import Observer, StageStatistics, ignore, tell


@dataclass(slots=True)
class _Work:
    """One item in one worker's hands. Times are seconds."""

    item: Any
    wait_s: float
    began_s: float
    blocked_s: float = 0.0


class Meter:
    """Counts what one stage does, item by item, and tells an observer."""

    def __init__(self, name: str, workers: int, version: int | None, observe: Observer) -> None:
        self.name = name
        self.workers = workers
        self.items = 0
        self.nbytes = 0
        self.blocked_in_s = 0.0
        self.blocked_out_s = 0.0
        self.started_s = time.monotonic()
        self.ended_s = self.started_s
        self._version = version
        self._observe = observe
        self._in_hand: dict[int, _Work] = {}  # by the task that works on it

    def asked(self) -> None:
        """A worker asks for its next item: it is done with the one before."""
        work = self._in_hand.pop(anyio.get_current_task().id, None)
        if work is not None and self._observe is not ignore:
            self._observe(self._worked(work))

    def took(self, item: Any, wait_s: float) -> None:
        """A worker has got an item, after waiting for it."""
        now_s = time.monotonic()
        self.items += 1
        self.nbytes += getattr(item, "nbytes", 0)
        self._in_hand[anyio.get_current_task().id] = _Work(item, wait_s, now_s)

    def blocked(self, blocked_s: float) -> None:
        """A worker could not go on."""
        self.blocked_out_s += blocked_s
        work = self._in_hand.get(anyio.get_current_task().id)
        if work is not None:
            work.blocked_s += blocked_s

    def started(self) -> None:
        """The stage begins to take items."""
        self.started_s = time.monotonic()
        tell(self._observe, StageStarted, self.name, self._version, None, self.workers)

    def ended(self) -> None:
        """The stage has ended; so has every item that was still in hand."""
        self.ended_s = time.monotonic()
        if self._observe is not ignore:
            for work in self._in_hand.values():
                self._observe(self._worked(work))
        self._in_hand.clear()

    def completed(self) -> None:
        """The stage has ended without an error."""
        if self._observe is not ignore:
            sums = self.statistics()
            self._observe(
                StageCompleted(
                    self.ended_s,
                    self.name,
                    self._version,
                    None,
                    workers=self.workers,
                    items=sums.items,
                    taken_bytes=sums.nbytes,
                    busy_s=sums.busy_s,
                    blocked_in_s=sums.blocked_in_s,
                    blocked_out_s=sums.blocked_out_s,
                    duration_s=self.ended_s - self.started_s,
                )
            )

    def failed(self, error: Exception) -> None:
        """The stage has ended with an error."""
        tell(
            self._observe,
            StageFailed,
            self.name,
            self._version,
            None,
            workers=self.workers,
            error=type(error).__name__,
            reason=str(error),
            duration_s=self.ended_s - self.started_s,
        )

    def _worked(self, work: _Work) -> StageWorked:
        now_s, item = time.monotonic(), work.item
        return StageWorked(
            now_s,
            self.name,
            self._version,
            None,  # the member's end says which it is
            frame=item if isinstance(item, int) else getattr(item, "number", None),
            item_bytes=getattr(item, "nbytes", None),
            wait_s=work.wait_s,
            work_s=now_s - work.began_s - work.blocked_s,
            blocked_s=work.blocked_s,
        )

    def statistics(self) -> StageStatistics:
        lifetime_s = (self.ended_s - self.started_s) * self.workers
        busy_s = max(0.0, lifetime_s - self.blocked_in_s - self.blocked_out_s)
        return StageStatistics(
            self.name, self.workers, self.items, self.nbytes, busy_s, self.blocked_in_s, self.blocked_out_s
        )
