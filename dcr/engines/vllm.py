"""A vLLM engine, with all its workers, as the loader of one member.

This is the side of the process that made the engine (`LLM` or `AsyncLLM`); `dcr.engines.vllm_worker` is that of the
workers. vLLM itself is imported by the workers only. The engine must have been made with
`weight_transfer_config={"backend": "dcr"}`.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Literal

import anyio
import anyio.to_thread

from dcr.engines import workers
from dcr.engines.ranks import JointWeights, Ranks
from dcr.engines.vllm_serving import VllmServing, answer
from dcr.engines.workers import Worker
from dcr.errors import Poisoned, StateError
from dcr.layout.frames import Layout
from dcr.layout.schema import patterns
from dcr.subscribe.version import Version

ASLEEP_POLL_S = 0.1


def register() -> None:
    """Make the weight transfer backend "dcr" known to vLLM; its plugins are called in every process."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "dcr" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("dcr", "dcr.engines.vllm_worker", "Transfer")


class VllmLoader:
    """An async context manager, and within it a `dcr.seams.Loader` of all ranks of an engine.

    pause: what happens to requests that run when a version is installed: "keep" freezes them, and they go on with new
    weights; "wait" lets them end; "abort" ends them. An `LLM` runs nothing between two calls and is not paused. An
    engine that somebody else has paused stays paused.
    waive: patterns (as in fnmatch) of published names that this engine may not have. host: see
    `dcr.engines.workers.listening`.
    timeout_s: how long a worker may take for one answer; recording a model takes several loads of it.

    Raises:
        StateError: on entry, if the engine consists of data parallel replicas: a call would reach one of them only.
    """

    def __init__(
        self,
        engine: Any,
        *,
        pause: Literal["keep", "wait", "abort"] = "keep",
        waive: Sequence[str] = (),
        host: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.engine = VllmServing(engine, mode=pause, timeout_s=timeout_s)
        self._waive = list(patterns(waive))
        self._host = host
        self._timeout_s = timeout_s
        self._workers: list[Worker] = []
        self._ranks: Ranks | None = None
        self._updating = False

    async def __aenter__(self) -> VllmLoader:
        replicas = self.engine.core.vllm_config.parallel_config.data_parallel_size
        if replicas != 1:
            raise StateError(
                f"expected an engine of one replica, found data_parallel_size={replicas}: what is asked of its workers "
                "reaches one replica only; make an engine, and a member, of each"
            )
        key = secrets.token_bytes(32)
        with workers.listening(self._host) as (listener, address):
            info = {"address": address, "key": key.hex(), "waive": self._waive}
            told = await self._all("init_weight_transfer_engine", init_info=info)
            self._workers = await anyio.to_thread.run_sync(
                lambda: workers.accept(listener, len(told), key, answer_s=self._timeout_s)
            )
        self._ranks = Ranks(self._workers, waive=self._waive)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.close()
        self._ranks = None
        await self.engine.let_go()  # held until now only if it may hold half a version

    async def awake(self) -> None:
        """Wait until the engine's weights are awake: somebody may have put them to sleep."""
        while True:
            try:
                await anyio.to_thread.run_sync(self._bound.require_awake)
            except StateError:
                if self._ranks is None:
                    raise
                await anyio.sleep(ASLEEP_POLL_S)
            else:
                return

    @asynccontextmanager
    async def updating(self, version: Version) -> AsyncIterator[None]:
        """Within, `version.install()`: the engine is paused; afterwards caches are flushed, and it shows the version.

        If the install was undone, the engine goes on as before. If it has poisoned the member, the engine stays paused,
        and its model refuses to run, until a version has been installed.

        Raises:
            StateError: on entry, if the engine sleeps: nothing has been done; enter it again once it is awake.
        """
        if not self._updating:
            await self._begin()
        try:
            yield
        except Poisoned:
            raise
        except BaseException:
            with anyio.move_on_after(self._timeout_s, shield=True):
                await self._resume(version)
            raise
        await self._resume(version)

    # ------------------------------------------------------------------ as a loader

    def bind(self, layout: Layout) -> JointWeights:
        """See `dcr.seams.Loader.bind`."""
        return self._bound.bind(layout)

    def fingerprint(self) -> bytes:
        """See `dcr.seams.Loader.fingerprint`."""
        return self._bound.fingerprint()

    def finalize(self) -> None:
        """See `dcr.seams.Loader.finalize`."""
        self._bound.finalize()

    def mark(self) -> bytes:
        """See `dcr.seams.Watching.mark`."""
        return self._bound.mark()

    def require_awake(self) -> None:
        """See `dcr.seams.Watching.require_awake`."""
        self._bound.require_awake()

    @property
    def _bound(self) -> Ranks:
        if self._ranks is None:
            raise StateError('no worker is connected: use `async with dcr.loader(engine, kind="vllm") as loader`')
        return self._ranks

    # ------------------------------------------------------------------ the engine

    async def _begin(self) -> None:
        await anyio.to_thread.run_sync(self._bound.require_awake)
        await self.engine.pause()
        try:
            await self._all("start_weight_update")
        except BaseException:
            with anyio.move_on_after(self._timeout_s, shield=True):
                await self.engine.resume()
            raise
        self._updating = True

    async def _resume(self, version: Version) -> None:
        """End the update. What the old weights left in caches is flushed before the new number is shown."""
        await self._all("finish_weight_update")
        if version.installed:
            try:
                await self.engine.flush()
            except StateError:
                self._updating = False
                await self.engine.let_go()
                raise
        self._updating = False
        await self.engine.resume()

    async def _all(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of every worker; what each one returned."""
        answers: list[Any] = await answer(self.engine.core.collective_rpc(method, kwargs=arguments))
        return answers
