"""What a link does beside its callers: work of its own, which no cancelled caller interrupts, and an inbox."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

from dcr.closing import outwait
from dcr.errors import IncompleteError
from dcr.protocol.wire import Message

T = TypeVar("T")

CLOSED = "the link is closed: nothing more comes over it, open another"
CLOSING_S = 5.0  # how long a link may take to say that it closes


class Desk:
    """A task group that lives as long as its link, and messages that were found and not handed out.

    What `do` is given runs in a task of the group: a put that its caller no longer waits for is whole before the next
    one begins, and a cancelled `receive` has taken nothing.
    """

    def __init__(self) -> None:
        self._found: deque[Message | Exception] = deque()
        self._news = anyio.Event()
        self._room = anyio.Event()
        self._leaving, self._ended = anyio.Event(), anyio.Event()
        self.closed = False

    async def open(self, *loops: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start to work.

        The task group lives in a task of its own: a link may be closed by another task, and in another order, than
        links and groups beside it were opened.
        """
        opened = anyio.Event()
        self._task = asyncio.get_running_loop().create_task(self._live(opened, loops), name="dcr.link")
        await outwait(opened)

    async def _live(self, opened: anyio.Event, loops: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        try:
            async with anyio.create_task_group() as self._group:
                for loop in loops:
                    self._group.start_soon(loop)
                opened.set()
                await self._leaving.wait()
                self._group.cancel_scope.cancel()
        finally:
            self._ended.set()

    async def close(self) -> None:
        """End all that runs."""
        self.closed = True
        self._news.set()
        self._leaving.set()
        await outwait(self._ended)

    async def do(self, work: Callable[[], Awaitable[T]]) -> T:
        """Have work done; whoever waits for it may be cancelled, the work is not."""
        done, result, failure = anyio.Event(), list[T](), list[Exception]()

        async def run() -> None:
            try:
                result.append(await work())
            except Exception as error:
                failure.append(error)
            finally:
                done.set()

        if self.closed:
            raise IncompleteError(CLOSED)
        self._group.start_soon(run)
        await done.wait()
        if failure:
            raise failure[0]
        if not result:
            raise IncompleteError(CLOSED)
        return result[0]

    def spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have work done that nobody waits for, and that raises nothing."""
        self._group.start_soon(work)

    def put(self, *found: Message | Exception) -> None:
        """Hand messages, or what went wrong, to `receive`."""
        self._found.extend(found)
        self._news.set()

    async def room(self) -> None:
        """Wait until everything was handed out."""
        while self._found:
            self._room = anyio.Event()
            await self._room.wait()

    async def receive(self) -> Message:
        """The next message."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        while not self._found:
            if self.closed:
                raise IncompleteError(CLOSED)
            self._news = anyio.Event()
            await self._news.wait()
        found = self._found.popleft()
        if not self._found:
            self._room.set()
        if isinstance(found, Exception):
            raise found
        return found


class Pace:
    """Waits for news: until a hint of change, or a pause that grows from poll_s to idle_s while nothing is open."""

    def __init__(self, poll_s: float | None, idle_s: float) -> None:
        self._poll_s = poll_s
        self._idle_s = idle_s
        self.pause_s = poll_s or 0.0

    async def wait(self, hint: anyio.Event | None, *, busy: bool) -> None:
        """hint: from before the last look. poll_s None: the hint alone says when."""
        if self._poll_s is None:
            assert hint is not None, "objects that are not polled say when they change"
            await hint.wait()
            return
        self.pause_s = self._poll_s if busy else min(1.5 * self.pause_s, self._idle_s)
        with anyio.move_on_after(self.pause_s):
            await (hint.wait() if hint is not None else anyio.sleep_forever())
