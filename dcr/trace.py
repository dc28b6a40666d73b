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

from dcr.observe import Event


class Trace:
    """An observer that keeps events in memory (about 200 bytes each) and writes them when its context is left."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._events: list[dict[str, Any]] = []
        self._rows: dict[tuple[str, int], int] = {}
        self._busy_until: dict[str, list[float]] = {}

    def __call__(self, event: Event) -> None:
        self._events.append(self._moment(event) if event.work_s is None else self._span(event, event.work_s))

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.write()

    def write(self) -> None:
        """Write all events so far; the file is complete whenever it is there."""
        names = [
            {"ph": "M", "name": "thread_name", "pid": os.getpid(), "tid": row, "args": {"name": f"{actor} {lane}"}}
            for (actor, lane), row in self._rows.items()
        ]
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        temporary.write_bytes(msgspec.json.encode(names + self._events))
        temporary.replace(self._path)

    def _span(self, event: Event, work_s: float) -> dict[str, Any]:
        """Work on one item, the time it was blocked at its end included and told."""
        length_s = work_s + (event.blocked_s or 0.0)
        began_s = event.at_s - length_s
        actor = f"{event.member or 'publisher'} {event.stage}"
        lane = self._lane(actor, began_s, event.at_s)
        name = f"v{event.version} frame {event.frame}" if event.frame is not None else f"v{event.version}"
        return {
            "ph": "X",
            "name": name,
            "cat": event.stage,
            "pid": os.getpid(),
            "tid": self._row(actor, lane),
            "ts": 1e6 * began_s,
            "dur": 1e6 * length_s,
            "args": {"wait_s": event.wait_s, "work_s": work_s, "blocked_s": event.blocked_s, "nbytes": event.nbytes},
        }

    def _moment(self, event: Event) -> dict[str, Any]:
        return {
            "ph": "i",
            "s": "p",
            "name": f"v{event.version} {event.name}" if event.version is not None else event.name,
            "cat": "version",
            "pid": os.getpid(),
            "tid": self._row(event.member or "publisher", 0),
            "ts": 1e6 * event.at_s,
            "args": {"frame": event.frame, "detail": event.detail, "nbytes": event.nbytes},
        }

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
