"""Entering and leaving an end that owns tasks: its work is done in those tasks, its user only waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskGroup

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


async def started(group: TaskGroup, start: Callable[[], Awaitable[None]]) -> None:
    """Run `start` in a task of the group and wait for it.

    A user who is cancelled by `task.cancel()` would leave work in a thread behind; a task of the group waits for it.

    Raises: what `start` raised, as it is.
    """
    ended, errors = anyio.Event(), list[Exception]()

    async def run() -> None:
        try:
            await start()
        except Exception as error:
            errors.append(error)
        ended.set()

    group.start_soon(run)
    await ended.wait()
    if errors:
        raise errors[0]
