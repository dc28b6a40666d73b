"""Opening and closing an end: its contexts are entered and left in one task, and its user only waits for that."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import anyio

from dcr.errors import StateError

T = TypeVar("T")


class Contexts:
    """Contexts entered one after another, and left in reverse.

    Not contextlib.AsyncExitStack: where two task groups in it pass one cancellation on, it makes that exception its own
    context, and whoever walks the context never comes to an end.
    """

    def __init__(self) -> None:
        self._leave: list[Callable[[BaseException | None], Awaitable[object]]] = []

    async def enter(self, context: AbstractAsyncContextManager[T]) -> T:
        """Enter a context; what it gives."""
        value = await context.__aenter__()
        self._leave.append(lambda error: context.__aexit__(*_details(error)))
        return value

    def call(self, last: Callable[[], object]) -> None:
        """Call this on the way out."""

        async def leave(_: BaseException | None) -> None:
            last()

        self._leave.append(leave)

    async def close(self, error: BaseException | None) -> None:
        """Leave all contexts; the exception that is on its way (None if none is) goes on as it is.

        A cancellation is shown to the contexts, since they must know of it; any other error is not, since task groups
        would wrap it.

        Raises: what the last context to raise raised, if it is not that exception.
        """
        shown = error if isinstance(error, anyio.get_cancelled_exc_class()) else None
        raised: BaseException | None = None
        while self._leave:
            leave = self._leave.pop()
            try:
                await leave(raised or shown)
            except BaseException as new:
                raised = new
        if raised is not None and raised is not error:
            raise raised


def _details(error: BaseException | None) -> tuple[Any, Any, Any]:
    return (None, None, None) if error is None else (type(error), error, error.__traceback__)


class Life:
    """The life of an end, from its opening to its close, in a task of its own.

    A task group can only be left by the task that entered it. The users of an end need not keep to one task: each
    method of an actor, fixture or callback may run in another.

    kind: what the end is called in errors. enter: enters the end's contexts, and starts what works in them.
    """

    def __init__(self, kind: str, enter: Callable[[Contexts], Awaitable[None]]) -> None:
        self._kind = kind
        self._enter = enter
        self._task: asyncio.Task[None] | None = None
        self._pid: int | None = None  # of the process that opened it
        self._opened, self._leaving, self._ended = anyio.Event(), anyio.Event(), anyio.Event()
        self._error: Exception | None = None
        self._raised = False

    async def open(self) -> None:
        """Enter the contexts; a cancellation leaves those that have been entered, and then goes on.

        Raises: what entering them raised, as it is.
            StateError: the end was opened before, or there is no event loop of asyncio.
        """
        self.require_here()
        if self._task is not None or self._leaving.is_set():
            raise StateError(f"this {self._kind} was opened before, and can be opened once: make a new one")
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise StateError(
                f"a {self._kind} lives on an event loop of asyncio (or uvloop), and none runs here: "
                f"use asyncio.run or anyio.run, or take dcr.blocking.{self._kind}"
            ) from None
        self._pid, scope = os.getpid(), anyio.CancelScope()
        self._task = loop.create_task(self._live(scope), name=f"dcr.{self._kind}")
        try:
            await self._opened.wait()
        except BaseException:
            scope.cancel()
            await outwait(self._ended)
            raise
        self.raise_error()

    async def close(self) -> None:
        """Leave the contexts, if they were entered; a cancellation goes on once they have been left.

        Raises: why the end's tasks have ended, if it is an error that has not been raised yet.
            StateError: the end is another process's, and was left alone.
        """
        self.require_here()
        self._leaving.set()
        if self._task is not None:
            await outwait(self._ended)
            self.raise_error()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set() and not self._leaving.is_set() and not self._ended.is_set()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that opened the end, and no fork of it."""
        return is_process(self._pid)

    def require_here(self) -> None:
        """Refuse to be used in a fork; raises as `require_process`."""
        require_process(self._kind, self._pid)

    def require_open(self) -> None:
        """The end can be used.

        Raises:
            StateError: it has not been opened, or not in this process, or it was closed, or has ended with an error.
        """
        self.require_here()
        if self._error is not None:
            self._raised = True
            raise StateError(f"this {self._kind} has ended: {self._error!r}; make a new one") from self._error
        if self._leaving.is_set() or self._ended.is_set():
            raise StateError(f"this {self._kind} was closed: make a new one")
        if not self._opened.is_set():
            raise StateError(f"this {self._kind} is not open: use it within `async with`, or await its open() first")

    def raise_error(self) -> None:
        """Raise why the end's tasks have ended, if it is an error; once."""
        if self._error is not None and not self._raised:
            self._raised = True
            raise self._error

    async def _live(self, scope: anyio.CancelScope) -> None:
        try:
            with scope:
                await self._stay()
        except Exception as error:
            self._error = error
        finally:
            self._ended.set()
            self._opened.set()  # nobody waits for an opening that failed

    async def _stay(self) -> None:
        contexts, raised = Contexts(), None
        try:
            await self._enter(contexts)
            self._opened.set()
            await self._leaving.wait()
        except BaseException as error:
            raised = error
        if self.is_here:  # what a fork would leave is still in use
            await contexts.close(raised)
        if raised is not None:
            raise raised


def is_process(pid: int | None) -> bool:
    """Whether this process has this id; None is every one's."""
    return pid is None or pid == os.getpid()


def require_process(kind: str, pid: int | None) -> None:
    """Refuse an end in a fork, which has no threads or tasks of its parent: a wait for them would not end.

    Raises:
        StateError: the end was opened in another process; names both.
    """
    if not is_process(pid):
        raise StateError(
            f"this {kind} belongs to process {pid}, and this is process {os.getpid()}, forked from it without its "
            f"threads: make a {kind} in this process, or start it by 'spawn'"
        )


async def outwait(event: anyio.Event) -> None:
    """Wait for an event, whatever cancels the wait; then a cancellation goes on.

    A shield alone would not hold back `task.cancel()`.
    """
    cancelled: BaseException | None = None
    while not event.is_set():
        try:
            with anyio.CancelScope(shield=True):
                await event.wait()
        except anyio.get_cancelled_exc_class() as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
