"""Leaving an end that owns tasks, with whatever exception is on its way."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import TracebackType

import anyio


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
