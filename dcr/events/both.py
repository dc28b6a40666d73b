"""Events of both ends: a pipeline's stages, and messages that cannot be understood."""

from __future__ import annotations

from typing import TypeAlias

from dcr.events.moment import Moment


class StageStarted(Moment, frozen=True):
    """A stage of a pipeline begins to take items."""

    stage: str
    version: int | None
    member: str | None
    workers: int


class StageWorked(Moment, frozen=True):
    """A stage has worked on one item; it waited for it before, and was blocked by the next stage or the budget."""

    stage: str
    version: int | None
    member: str | None
    frame: int | None
    item_bytes: int | None
    wait_s: float
    work_s: float
    blocked_s: float


class StageCompleted(Moment, frozen=True):
    """A stage has taken and sent all of its items. Its times but duration_s are summed over its workers."""

    stage: str
    version: int | None
    member: str | None
    workers: int
    items: int
    taken_bytes: int
    busy_s: float
    blocked_in_s: float
    blocked_out_s: float
    duration_s: float


class StageFailed(Moment, frozen=True):
    """A stage ended with an error, which ends the pipeline."""

    stage: str
    version: int | None
    member: str | None
    workers: int
    error: str
    reason: str
    duration_s: float


class MessageIgnored(Moment, frozen=True):
    """A message that cannot be understood came over the link; member: of the end that ignores it, None: a publisher."""

    member: str | None
    error: str
    reason: str


PipelineEvent: TypeAlias = StageStarted | StageWorked | StageCompleted | StageFailed
