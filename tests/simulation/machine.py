"""A simulated machine: a clock that jumps to the next timer, and threads that run on the loop, a little later.

Nothing waits in real time and nothing depends on it: the same test with the same seed does the same every time, and a
time-out of a minute costs nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
import uuid
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

import anyio
import anyio.lowlevel
import anyio.to_thread

TICK_S = 1e-4  # a delay is a few of these


class Stuck(Exception):
    """Every task waits for another one, and no timer runs: nothing will ever happen."""


class _Clock(selectors.BaseSelector):
    """Where a loop would wait for files, of which there are none here, it moves the clock."""

    def __init__(self, each_round: Callable[[], None]) -> None:
        self.now_s = 0.0
        self._each_round = each_round

    def select(self, timeout: float | None = None) -> list[Any]:
        self._each_round()
        if timeout is None:
            raise Stuck("no task can go on, and no timer runs")
        self.now_s += max(0.0, timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any:
        return None

    def unregister(self, fileobj: Any) -> Any:
        return None

    def get_map(self) -> Any:
        return {}


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, clock: _Clock) -> None:
        super().__init__(clock)
        self._simulated = clock

    def time(self) -> float:
        return self._simulated.now_s


def run(main: Callable[[], Awaitable[Any]], *, seed: int, each_round: Callable[[], None]) -> Any:
    """Run a coroutine function on a simulated machine.

    seed: of the delays of threads; 0: no delay. each_round: called between any two rounds of the event loop.

    Raises:
        Stuck: a deadlock.
    """
    delays, numbers = random.Random(seed), itertools.count()

    async def in_thread(
        function: Callable[..., Any], *args: Any, limiter: anyio.CapacityLimiter | None = None, **_: Any
    ) -> Any:
        """As `anyio.to_thread.run_sync`: a cancellation waits until the function has run."""
        await anyio.lowlevel.checkpoint()
        if limiter is not None:
            await limiter.acquire()
        try:
            with anyio.CancelScope(shield=True):
                await pause(delays if seed else None)
            return function(*args)
        finally:
            if limiter is not None:
                limiter.release()

    with (
        mock.patch.object(anyio.to_thread, "run_sync", in_thread),
        mock.patch.object(uuid, "uuid4", lambda: uuid.UUID(int=next(numbers))),  # noqa: PT008 - a new one each time
    ):
        options = {"loop_factory": lambda: _Loop(_Clock(each_round))}
        return anyio.run(main, backend_options=options)


async def pause(delays: random.Random | None) -> None:
    """Let others go first: for a moment, or a little longer."""
    ticks = delays.choice((0, 0, 0, 1, 2, 7)) if delays else 0
    if ticks:
        await anyio.sleep(ticks * TICK_S)
    else:
        await anyio.lowlevel.checkpoint()
