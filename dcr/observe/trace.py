"""A trace of events that Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev) show: a row per stage and worker.

Format: the JSON array form of the Trace Event Format; "X" events have a begin and a duration, "i" are moments, in
microseconds of time.monotonic(). Traces of several processes on one host may be shown together.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from dcr.events import (
    AnchorCompleted,
    AnchorFailed,
    AnchorStarted,
    CaptureCompleted,
    CaptureFailed,
    CaptureStarted,
    Event,
    InstallCompleted,
    InstallFailed,
    InstallStarted,
    MemberEvent,
    MessageIgnored,
    PipelineEvent,
    PrepareCompleted,
    PrepareFailed,
    PrepareStarted,
    PruneCompleted,
    PruneFailed,
    PruneStarted,
    PublishCompleted,
    PublishFailed,
    PublishStarted,
    SeedFetchCompleted,
    SeedFetchFailed,
    SeedFetchStarted,
    StageCompleted,
    StageStarted,
    StageWorked,
    UserEvent,
    UserWorkCompleted,
    UserWorkFailed,
    UserWorkStarted,
)


class Trace:
    """An observer that keeps events in memory (about 200 bytes each) and writes them when its context is left."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self._events.append(event)

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.write()

    def write(self) -> None:
        """Write all events so far; the file is complete whenever it is there."""
        drawing = _Drawing()
        for event in self._events:
            drawing.add(event)
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(msgspec.json.encode(drawing.names() + drawing.shapes))
        temporary.replace(self._path)


class _Drawing:
    """Events as the shapes of a trace, and the rows that they stand in."""

    def __init__(self) -> None:
        self.shapes: list[dict[str, Any]] = []
        self._rows: dict[tuple[str, int], int] = {}
        self._busy_until: dict[str, list[float]] = {}

    def names(self) -> list[dict[str, Any]]:
        """Shapes that give each row its name."""
        return [
            {"ph": "M", "name": "thread_name", "pid": os.getpid(), "tid": row, "args": {"name": f"{actor} {lane}"}}
            for (actor, lane), row in self._rows.items()
        ]

    def add(self, event: Event) -> None:
        """Draw one event: a span for what has ended, nothing for what has started, a mark for everything else."""
        match event:
            case StageWorked():
                self._span(event, event.stage, event.work_s + event.blocked_s)
            case PublishCompleted() | PublishFailed():
                self._span(event, "publish", event.duration_s)
            case CaptureCompleted() | CaptureFailed():
                self._span(event, "capture", event.duration_s)
            case AnchorCompleted() | AnchorFailed():
                self._span(event, "anchor", event.duration_s)
            case PruneCompleted() | PruneFailed():
                self._span(event, "prune", event.duration_s)
            case PrepareCompleted() | PrepareFailed():
                self._span(event, "prepare version", event.duration_s)
            case SeedFetchCompleted() | SeedFetchFailed():
                self._span(event, "fetch seed", event.duration_s)
            case InstallCompleted() | InstallFailed():
                self._span(event, "install", event.duration_s)
            case UserWorkCompleted() | UserWorkFailed():
                self._span(event, event.work, event.duration_s)
            case PublishStarted() | CaptureStarted() | AnchorStarted() | PruneStarted() | PrepareStarted():
                pass  # a span is drawn when it has ended
            case SeedFetchStarted() | InstallStarted() | UserWorkStarted() | StageStarted() | StageCompleted():
                pass
            case _:
                self._moment(event)

    def _span(self, event: Event, category: str, length_s: float) -> None:
        """Draw what has ended; work on one item includes the time it was blocked at its end."""
        began_s, actor = event.at_s - length_s, f"{_actor(event)} {category}"
        row = self._row(actor, self._lane(actor, began_s, event.at_s))
        shape = {"ph": "X", "cat": category, "ts": 1e6 * began_s, "dur": 1e6 * length_s}
        self.shapes.append(
            {"name": _label(event), "pid": os.getpid(), "tid": row, "args": msgspec.to_builtins(event), **shape}
        )

    def _moment(self, event: Event) -> None:
        row = self._row(_actor(event), 0)
        shape = {"ph": "i", "s": "p", "cat": "version", "ts": 1e6 * event.at_s}
        self.shapes.append(
            {"name": _label(event), "pid": os.getpid(), "tid": row, "args": msgspec.to_builtins(event), **shape}
        )

    def _lane(self, actor: str, began_s: float, ended_s: float) -> int:
        """The first of the actor's lanes that is free: workers work at the same time, spans of a row must not."""
        lanes = self._busy_until.setdefault(actor, [])
        for lane, until_s in enumerate(lanes):
            if until_s <= began_s:
                lanes[lane] = ended_s
                return lane
        lanes.append(ended_s)
        return len(lanes) - 1

    def _row(self, actor: str, lane: int) -> int:
        return self._rows.setdefault((actor, lane), len(self._rows) + 1)


def _actor(event: Event) -> str:
    """Whose row an event stands in; what a publisher hears of its members stands in its own."""
    if isinstance(event, UserEvent):
        return event.member or "program"
    if isinstance(event, PipelineEvent | MemberEvent | MessageIgnored):
        return event.member or "publisher"
    return "publisher"


def _label(event: Event) -> str:
    version = getattr(event, "version", None)
    words = [] if version is None else [f"v{version}"]
    if not isinstance(event, StageWorked):
        words.append(event.name)
    elif event.frame is not None:
        words.append(f"frame {event.frame}")
    return " ".join(words)
