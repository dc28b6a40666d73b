"""What a link does in threads: one thing after another, and nothing found is lost."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread

from dcr.errors import IncompleteError
from dcr.wire import Message


class Desk:
    """What a link does in threads, one thing after another, and what it has found and not handed out.

    A thread goes on when its waiter is cancelled by `task.cancel()`: what it finds is kept for the next one.
    """

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._lock = threading.Lock()
        self._found: deque[Message] = deque()
        self._closed = False

    async def send(self, send: Callable[[], None]) -> None:
        await anyio.to_thread.run_sync(self._alone, send)

    async def receive(self, look: Callable[[], Message | None]) -> Message:
        """The next message; looks again every poll_s."""
        while not self._found:
            if self._closed:
                raise IncompleteError("the link is closed: nothing more comes over it, open another")
            await anyio.to_thread.run_sync(self._alone, partial(self._look, look))
            if not self._found:
                await anyio.sleep(self._poll_s)
        return self._found.popleft()

    def close(self) -> None:
        self._closed = True

    def _alone(self, work: Callable[[], None]) -> None:
        with self._lock:
            work()

    def _look(self, look: Callable[[], Message | None]) -> None:
        if not self._found and (message := look()) is not None:
            self._found.append(message)
