"""The queues between stages: where a stage takes its items from, and where it sends them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from dcr.errors import StateError
from dcr.pipeline.meter import Meter

Taken = TypeVar("Taken", covariant=True)
Sent = TypeVar("Sent", contravariant=True)


class Inbox(Generic[Taken]):
    """The items that a stage takes; iterate over it, from several tasks if you like."""

    def __init__(self, stream: MemoryObjectReceiveStream[Taken], meter: Meter) -> None:
        self._stream = stream
        self._meter = meter

    def __aiter__(self) -> Inbox[Taken]:
        return self

    async def __anext__(self) -> Taken:
        self._meter.asked()
        before_s = time.monotonic()
        try:
            item = await self._stream.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None
        finally:
            wait_s = time.monotonic() - before_s
            self._meter.blocked_in_s += wait_s
        self._meter.took(item, wait_s)
        return item

    def close(self) -> int:
        """Take no more: whoever sends to it is told, and what still waits is given up. How many items that were."""
        left = 0
        while True:
            try:
                discard(self._stream.receive_nowait())
            except (anyio.WouldBlock, anyio.EndOfStream, anyio.ClosedResourceError):
                break
            left += 1
        self._stream.close()
        return left


class Outbox(Generic[Sent]):
    """Where a stage sends its items; `send` waits while the queue is full."""

    def __init__(
        self, stream: MemoryObjectSendStream[Sent] | None, sink: Callable[[Sent], None] | None, meter: Meter
    ) -> None:
        self._stream = stream
        self._sink = sink
        self._meter = meter

    async def send(self, item: Sent) -> None:
        """Hand an item on.

        Raises:
            StateError: the next stage returned although there was more to come.
        """
        if self._stream is None:
            self._end(item)
            return
        with self.waiting():
            try:
                await self._stream.send(item)
            except anyio.get_cancelled_exc_class():
                discard(item)
                raise
            except anyio.BrokenResourceError:
                discard(item)
                raise StateError(
                    f"the stage after {self._meter.name!r} returned before its inbox was exhausted; "
                    "read the inbox to its end"
                ) from None

    def close(self) -> None:
        """Send no more: the next stage's inbox ends."""
        if self._stream is not None:
            self._stream.close()

    def _end(self, item: Sent) -> None:
        if self._sink is None:
            discard(item)
        else:
            self._sink(item)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent in here counts as blocked on output, such as waiting for a lease."""
        before_s = time.monotonic()
        try:
            yield
        finally:
            self._meter.blocked(time.monotonic() - before_s)


def discard(item: object) -> None:
    """An item goes no further: if it holds something (`release`), give it back."""
    release = getattr(item, "release", None)
    if release is not None:
        release()
