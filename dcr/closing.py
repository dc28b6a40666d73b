"""Entering and leaving an end that owns tasks: its work is done in those tasks, its user only waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType

import anyio
from anyio.abc import TaskGroup


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


async def close(
    stack: AsyncExitStack, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
) -> None:
    """Close a stack that holds a task group; the exception that is on its way goes on as it is.

    A cancellation must be passed through the group: hidden from it, it would be raised a second time as its own
    context, and walking that context never ends. Any other error must not: the group would wrap it.
    """
    if isinstance(error, anyio.get_cancelled_exc_class()):
        await stack.__aexit__(kind, error, at)
    else:
        await stack.aclose()
