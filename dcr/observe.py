"""What happened, as values: events for observers, and statistics of a pipeline's stages.

An observer is a plain callable that takes an `Event`. It runs on the event loop, so it must return at once; what it
raises is the caller's bug and reaches the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened.

    name: what, as a verb in the past ("opened", "sealed", "prepared", "committed", "refused", "sent_again", ...).
    "worked" is said by a stage of each item: it waited wait_s for it, worked on it for work_s, and was blocked for
    blocked_s by the next stage or by the budget, all in seconds. nbytes: of the item, or of what the name says.
    pause_s: of "installed": the seconds within the installation during which weights were written.
    at_s: time.monotonic() when it happened, or when the work ended. Fields that do not apply are None.
    """

    name: str
    version: int | None = None
    member: str | None = None
    frame: int | None = None
    detail: str | None = None
    nbytes: int | None = None
    stage: str | None = None
    wait_s: float | None = None
    work_s: float | None = None
    blocked_s: float | None = None
    pause_s: float | None = None
    at_s: float = field(default_factory=time.monotonic)


Observer = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The observer that does nothing."""


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """One stage of one run. Times are seconds summed over the stage's workers; bytes are of the items it took in."""

    name: str
    workers: int
    items: int
    nbytes: int
    busy_s: float
    blocked_in_s: float
    blocked_out_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One run of a pipeline: wall time in seconds and its stages in order."""

    wall_s: float
    stages: tuple[StageStatistics, ...]

    @property
    def bottleneck(self) -> str:
        """The stage whose workers were busy for the largest share of the run."""
        return max(self.stages, key=self.utilisation).name if self.stages else ""

    def utilisation(self, stage: StageStatistics) -> float:
        """Share of the run for which the stage's workers were busy, 0 to 1."""
        return stage.busy_s / (self.wall_s * stage.workers) if self.wall_s else 0.0

    def __str__(self) -> str:
        names = [f"{stage.name} {100 * self.utilisation(stage):.0f} %" for stage in self.stages]
        marks = [" <- bottleneck" if stage.name == self.bottleneck else "" for stage in self.stages]
        return " | ".join(name + mark for name, mark in zip(names, marks, strict=True))
