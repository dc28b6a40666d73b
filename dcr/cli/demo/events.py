"""What the demo's processes tell the parent: one JSON line per event on the child's standard output.

Rule of this file: data only. Times are seconds of the system's monotonic clock, which all processes of one
machine share, so spans that were measured in different processes may be intersected.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec

Span: TypeAlias = tuple[float, float]
"""Start and end in seconds of the monotonic clock."""


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A process has built its model and is about to join the run."""

    member: str
    elements: int


class StageTime(msgspec.Struct, frozen=True):
    """What one stage of a refit took, in seconds: working, waiting for input, waiting for room downstream."""

    busy_s: float
    blocked_in_s: float
    blocked_out_s: float
    items: int


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """The trainer took one optimizer step: the bits that `version` will name."""

    version: int
    reward: float
    ratio: float
    clipped: float
    samples: int
    stale: int
    computing: tuple[Span, ...]


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """A version was shipped, prepared by its members, and committed.

    shipping: from the call of `publish` to the commit. captured_s: from its start until the weights had been read.
    """

    version: int
    density: float
    changed: int
    wire_bytes: int
    dense_bytes: int
    sent_again_bytes: int
    stages: dict[str, StageTime]
    bottleneck: str
    captured_s: float
    shipping: Span
    computing: tuple[Span, ...]


class Installed(msgspec.Struct, frozen=True, tag="installed"):
    """A rollout runs on a version now. `pause_s` is how long no decode step could run.

    `waited_s` is the time it took to finish the decode step that was under way before that; `generating` holds one
    span for each decode step since the last of these events.
    """

    member: str
    version: int
    pause_s: float
    waited_s: float
    generating: tuple[Span, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A receiver would not take something that came over its link, and said why."""

    member: str
    reason: str


class Noted(msgspec.Struct, frozen=True, tag="noted"):
    """A line for the reader that is not a result, such as a fault that was put in on purpose."""

    member: str
    text: str


class Dumped(msgspec.Struct, frozen=True, tag="dumped"):
    """A process has written the bits it holds of `version` to `folder`, for the audit."""

    member: str
    version: int
    folder: str
    samples: int


Event: TypeAlias = Started | Stepped | Committed | Installed | Refused | Noted | Dumped

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def decode(line: bytes) -> Event:
    """One event from one line. Raises `msgspec.DecodeError` for anything else."""
    return _decoder.decode(line)


class Emitter:
    """Writes events to the standard output of this process, which it takes for itself: stray prints go to stderr."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._out.write(msgspec.json.encode(event) + b"\n")
            self._out.flush()


def obey_parent() -> None:
    """End this process when the parent does, whose pipe its standard input is; say what it is doing when asked to.

    SIGUSR1 asks: the stack of every thread goes to stderr.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(3)

    threading.Thread(target=watch, name="obey-parent", daemon=True).start()


class SpanLog:
    """Spans of work that never overlap one another, measured where the work is started."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._since: float | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Everything in the `with` block is one span."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._spans.append((self._since, time.monotonic()))
            self._since = None

    def take(self) -> tuple[Span, ...]:
        """The spans since the last call, with what is running now up to this moment."""
        spans, self._spans = self._spans, []
        if self._since is not None:
            now = time.monotonic()
            spans.append((self._since, now))
            self._since = now
        return tuple(spans)


def overlap_s(window: Span, spans: Iterable[Span]) -> float:
    """Seconds of `window` that `spans` (which don't overlap one another) cover."""
    return sum(max(0.0, min(window[1], end) - max(window[0], start)) for start, end in spans)
