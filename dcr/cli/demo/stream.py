"""What the demo's processes tell the parent: their events, one JSON line each on the child's standard output.

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
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import msgspec

from dcr.events import Event, UserWorkCompleted, UserWorkFailed, UserWorkStarted

Span: TypeAlias = tuple[float, float]
"""Start and end in seconds of the monotonic clock."""

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


@contextlib.contextmanager
def working(
    emit: Callable[[Event], None], work: str, *, version: int | None = None, member: str | None = None
) -> Iterator[None]:
    """Emit that the `with` block begins, and how it ends; nothing more where it is cancelled."""
    began_s = time.monotonic()
    emit(UserWorkStarted(began_s, work, version, member))
    try:
        yield
    except Exception as error:
        now_s, kind = time.monotonic(), type(error).__name__
        emit(UserWorkFailed(now_s, work, version, member, kind, str(error), now_s - began_s))
        raise
    now_s = time.monotonic()
    emit(UserWorkCompleted(now_s, work, version, member, now_s - began_s))


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


def overlap_s(window: Span, spans: Iterable[Span]) -> float:
    """Seconds of `window` that `spans` (which don't overlap one another) cover."""
    return sum(max(0.0, min(window[1], end) - max(window[0], start)) for start, end in spans)
