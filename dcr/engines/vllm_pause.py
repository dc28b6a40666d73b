"""An `AsyncLLM` held still while it is written, beside others who pause, resume, put to sleep and wake it.

vLLM does not count who pauses: one resume ends every pause. So while an engine is held, what others ask of it comes
here first: their calls are theirs, and the engine is left as they want it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

from dcr.errors import StateError


class Pause:
    """Pauses an engine from `begin` to `end`; what it was before, or what others asked for meanwhile, it is then.

    While it is held, a pause by others is made at once and lasts; a resume by others takes effect at the end; a sleep
    or a wake-up waits for the end. An engine without `pause_generation` (an `LLM`) runs only while it is called: there
    is nothing to hold.

    Raises:
        StateError: by a sleep or a wake-up of others that would have to wait for more than timeout_s.
    """

    def __init__(self, engine: Any, *, mode: str, timeout_s: float) -> None:
        self._engine = engine
        self._mode = mode
        self._timeout_s = timeout_s
        self._own: dict[str, Any] = {}  # the engine's own methods, while others are in their place
        self._wanted_paused: bool | None = None  # what others asked for while the engine was held
        self._ended = anyio.Event()

    @property
    def possible(self) -> bool:
        """The engine runs beside its callers, so that it can be paused."""
        return hasattr(self._engine, "pause_generation")

    async def begin(self) -> None:
        """Hold the engine still, if it is not held already."""
        if not self.possible or self._own:
            return
        self._interpose()
        try:
            if not await self._engine.is_paused():
                self._wanted_paused = False if self._wanted_paused is None else self._wanted_paused
                await self._own["pause_generation"](mode=self._mode, clear_cache=False)
        except BaseException:
            with anyio.move_on_after(self._timeout_s, shield=True):
                await self.end()
            raise

    async def end(self, *, resume: bool = True) -> None:
        """Let go of the engine: it runs if it ran before, or if somebody has resumed it since.

        resume: False leaves it paused.
        """
        if not self._own:
            return
        for name in self._own:
            delattr(self._engine, name)
        self._own.clear()
        self._ended.set()
        if resume and self._wanted_paused is False:
            await self._engine.resume_generation()

    def _interpose(self) -> None:
        self._wanted_paused = None
        self._ended = anyio.Event()
        theirs: dict[str, Callable[..., Any]] = {
            "pause_generation": self._pause_of_others,
            "resume_generation": self._resume_of_others,
            "sleep": self._later("sleep"),
            "wake_up": self._later("wake_up"),
        }
        for name, method in theirs.items():
            self._own[name] = getattr(self._engine, name)
            setattr(self._engine, name, method)

    async def _pause_of_others(self, **how: Any) -> None:
        self._wanted_paused = True
        await self._own["pause_generation"](**how)

    async def _resume_of_others(self) -> None:
        self._wanted_paused = False

    def _later(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **named: Any) -> Any:
            with anyio.move_on_after(self._timeout_s):
                await self._ended.wait()
                return await getattr(self._engine, name)(*args, **named)
            raise StateError(
                f"{name} waited {self._timeout_s:g} s for the end of an install; if this engine is poisoned, install "
                "the version that is offered next, and then call it again"
            )

        return call
