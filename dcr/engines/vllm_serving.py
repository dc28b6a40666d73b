"""An engine of vLLM beside its weights: paused and resumed, its caches flushed, and the version that it shows."""

from __future__ import annotations

import inspect
from typing import Any

from dcr.engines.vllm_pause import Pause
from dcr.errors import StateError


class VllmServing:
    """See `dcr.seams.Engine`; pauses nest, and an engine that somebody else has paused stays paused.

    mode: what a pause does to requests that run; see `dcr.engines.vllm.VllmLoader`.
    """

    def __init__(self, engine: Any, *, mode: str, timeout_s: float) -> None:
        self.core = getattr(engine, "llm_engine", engine)
        self._pause = Pause(engine, mode=mode, timeout_s=timeout_s)
        self._pauses = 0
        self._unshown: str | None = None

    async def pause(self) -> None:
        """See `dcr.seams.Engine.pause`."""
        if not self._pauses:
            await self._pause.begin()
        self._pauses += 1

    async def resume(self) -> None:
        """See `dcr.seams.Engine.resume`."""
        self._pauses = max(0, self._pauses - 1)  # 0 before, if it was let go meanwhile
        if not self._pauses:
            await self._show()
            await self._pause.end()

    async def let_go(self) -> None:
        """End all pauses and leave the engine as it is: paused, if it still is."""
        self._pauses = 0
        await self._pause.end(resume=False)

    async def flush(self) -> None:
        """See `dcr.seams.Engine.flush`.

        Raises:
            StateError: vLLM did not reset its prefix cache.
        """
        if not await answer(self.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)):
            raise StateError("vLLM did not reset its prefix cache: it stays paused; resume it if old KV is accepted")
        await answer(self.core.reset_mm_cache())
        await answer(self.core.reset_encoder_cache())

    async def label(self, version: int) -> None:
        """See `dcr.seams.Engine.label`: the weight version that vLLM notes beside every token."""
        self._unshown = str(version)
        if not self._pauses:
            await self._show()

    async def _show(self) -> None:
        if self._unshown is not None:
            name = "update_weight_version" if self._pause.possible else "set_weight_version"
            await answer(getattr(self.core, name)(self._unshown))
            self._unshown = None


async def answer(value: Any) -> Any:
    """What `AsyncLLM` answers later, and `LLM` at once."""
    return await value if inspect.isawaitable(value) else value
