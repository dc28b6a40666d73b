"""The engine beside a member's weights, where its loader gives it: paused while they are bound, and labelled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from dcr.seams import Loader, Serving

RESUME_S = 600.0


@asynccontextmanager
async def paused(loader: Loader) -> AsyncIterator[None]:
    """Within, the engine generates nothing; one that is not given is not paused."""
    if not isinstance(loader, Serving):
        yield
        return
    await loader.engine.pause()
    try:
        yield
    finally:
        with anyio.move_on_after(RESUME_S, shield=True):
            await loader.engine.resume()


async def label(loader: Loader, version: int) -> None:
    """Have the engine show the version that it holds, if it is given."""
    if isinstance(loader, Serving):
        await loader.engine.label(version)
