"""Observers of events (`dcr.events`), and statistics of a pipeline's stages.

An observer is a plain callable that takes an `Event`. It runs on the event loop, so it must return at once; what it
raises is the caller's bug and reaches the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

from dcr.events import Event

Fields = ParamSpec("Fields")


Observer = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The observer that does nothing."""


def tell(
    observe: Observer, kind: Callable[Concatenate[float, Fields], Event], *args: Fields.args, **fields: Fields.kwargs
) -> None:
    """Tell an observer of an event that happens now; no event is made where nobody listens."""
    if observe is not ignore:
        observe(kind(time.monotonic(), *args, **fields))


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
