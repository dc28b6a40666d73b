"""The member's side of a vLLM engine: what it asks of the engine, in which order, whatever becomes of an install.

The engine here has vLLM's control surface and toy ranks; tests/engines has the real one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.refits import FAST, publish
from support.tensor_parallel import WatchedRank, fill, parts, touched, toys, trainer_of, values

import dcr
from dcr.engines import workers
from dcr.engines.vllm import VllmLoader
from dcr.engines.vllm_pause import Pause
from dcr.errors import BaseMismatch, Poisoned, RankError, ReadBackError, StateError
from dcr.loaders.session import Guarded, Session

INSTALLED = ["pause", "start_weight_update", "finish_weight_update", "prefix", "mm", "encoder", "label 2", "resume"]


def config(replicas: int = 1) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=replicas))


class Behind:
    """A rank behind a session, as `dcr.engines.vllm_worker.VllmRank` is."""

    def __init__(self, rank: WatchedRank, session: Session) -> None:
        self.fingerprint, self.mark, self.require_awake = rank.fingerprint, rank.mark, rank.require_awake
        self._rank, self._session = rank, session

    def bind(self, layout: Any) -> Any:
        return Guarded(self._rank.bind(layout), self._session)

    def finalize(self) -> None:
        self._session.finalize(self._rank.finalize)


class Worker:
    """What `dcr.engines.vllm_worker.Transfer` is in a worker of vLLM."""

    def __init__(self, rank: WatchedRank) -> None:
        self.rank = rank
        self.model = torch.nn.Linear(1, 1)
        self.session = Session(self.model)
        self.behind = Behind(rank, self.session)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        connection = workers.connect(init_info["address"])
        told = {"key": bytes.fromhex(init_info["key"]), "rank": self.rank.rank, "world": self.rank.world}
        threading.Thread(target=workers.serve, args=(connection, self.behind), kwargs=told, daemon=True).start()

    def start_weight_update(self) -> None:
        self.session.open()

    def finish_weight_update(self) -> None:
        self.session.close()

    def serves(self) -> bool:
        try:
            self.model(torch.zeros(1, 1))
        except Poisoned:
            return False
        return True


class Engine:
    """Calls come as to an `AsyncLLM`; they are noted."""

    def __init__(self, ranks: list[WatchedRank]) -> None:
        self.workers = [Worker(rank) for rank in ranks]
        self.vllm_config = config()
        self.calls: list[str] = []
        self.paused = False
        self.flushes = True

    async def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        self.calls.append(method)
        return [getattr(worker, method)(**kwargs) for worker in self.workers]

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("wait", False)
        self.calls.append("pause")
        self.paused = True

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def sleep(self, level: int = 1) -> None:
        self.calls.append("sleep")
        self.paused = True
        for worker in self.workers:
            worker.rank.writes += 1
            worker.rank.sleeps = True

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        self.calls.append("wake_up")
        self.paused = False
        for worker in self.workers:
            worker.rank.writes += 1
            worker.rank.sleeps = False
        return True

    async def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        assert reset_running_requests
        assert reset_connector
        self.calls.append("prefix")
        return self.flushes

    async def reset_mm_cache(self) -> None:
        self.calls.append("mm")

    async def reset_encoder_cache(self) -> None:
        self.calls.append("encoder")

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(f"label {version}")

    @property
    def serves(self) -> bool:
        return not self.paused and all(worker.serves() for worker in self.workers)


class Offline:
    """Calls come as to an `LLM`: they are answered at once, and nothing is paused."""

    def __init__(self, ranks: list[WatchedRank]) -> None:
        self.workers = [Worker(rank) for rank in ranks]
        self.vllm_config = config()
        self.calls: list[str] = []
        self.llm_engine = self

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> list[Any]:
        self.calls.append(method)
        return [getattr(worker, method)(**kwargs) for worker in self.workers]

    def reset_prefix_cache(self, *, reset_running_requests: bool, reset_connector: bool) -> bool:
        self.calls.append("prefix")
        return reset_running_requests and reset_connector

    def reset_mm_cache(self) -> None:
        self.calls.append("mm")

    def reset_encoder_cache(self) -> None:
        self.calls.append("encoder")

    def set_weight_version(self, version: str) -> None:
        self.calls.append(f"label {version}")


class Run:
    """A trainer at version 1, and an engine that has loaded it."""

    def __init__(self, folder: Path) -> None:
        self.url = f"local://{folder}"
        self.weights = values(1)
        self.trainer = trainer_of(self.weights)
        self.ranks = [WatchedRank(rank, 2) for rank in range(2)]
        for rank, loaded in zip(self.ranks, toys(2, self.weights), strict=True):
            rank.memories = loaded.memories

    def publisher(self) -> dcr.Publisher:
        return dcr.publisher(self.url, source=dcr.source(self.trainer), transport=FAST, frame_elems=33)

    def subscriber(self, loader: VllmLoader) -> dcr.Subscriber:
        return dcr.subscriber(self.url, loader=loader, member="m", transport=FAST)

    async def next(self, publisher: dcr.Publisher, versions: dcr.Subscriber, number: int = 2) -> dcr.Version:
        self.weights = touched(self.weights, number)
        fill(self.trainer, self.weights)
        await publisher.publish(number)
        return await anext(versions)

    @property
    def installed(self) -> bool:
        return parts(self.ranks) == parts(toys(2, self.weights))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


async def test_the_engine_is_paused_while_its_loader_is_tried_out_and_goes_on(run: Run) -> None:
    engine = Engine(run.ranks)
    async with run.publisher() as publisher, VllmLoader(engine, pause="wait") as loader:
        await publish(publisher, 1)
        async with run.subscriber(loader) as versions:
            assert versions.version == 1
    assert engine.calls == ["init_weight_transfer_engine", "pause", "resume", "label 1"]


async def test_an_install_comes_between_pause_and_flush_and_then_the_version_is_shown(run: Run) -> None:
    engine = Engine(run.ranks)
    async with run.publisher() as publisher, VllmLoader(engine, pause="wait") as loader:
        await publish(publisher, 1)
        async with run.subscriber(loader) as versions:
            await publisher.joined(1)
            version = await run.next(publisher, versions)
            engine.calls.clear()
            async with loader.updating(version):
                assert not engine.serves
                await version.install()
            assert engine.calls == INSTALLED
            assert run.installed
            assert engine.serves


async def test_an_offline_engine_is_not_paused(run: Run) -> None:
    engine = Offline(run.ranks)
    async with run.publisher() as publisher, VllmLoader(engine) as loader:
        await publish(publisher, 1)
        async with run.subscriber(loader) as versions:
            await publisher.joined(1)
            version = await run.next(publisher, versions)
            engine.calls.clear()
            async with loader.updating(version):
                await version.install()
            assert engine.calls == [call for call in INSTALLED if call not in ("pause", "resume")]
            assert run.installed


async def test_nothing_is_written_outside_of_an_update(run: Run) -> None:
    engine = Engine(run.ranks)
    async with run.publisher() as publisher, VllmLoader(engine, pause="wait") as loader:
        await publish(publisher, 1)
        async with run.subscriber(loader) as versions:
            await publisher.joined(1)
            before = parts(run.ranks)
            version = await run.next(publisher, versions)
            with pytest.raises(StateError, match="no weight update session is open"):
                await version.install()
            assert parts(run.ranks) == before
            assert versions.may_serve
            async with loader.updating(version):
                await version.install()
            assert run.installed


async def test_an_engine_whose_install_was_undone_goes_on_as_before(run: Run) -> None:
    engine = Engine(run.ranks)
    async with run.publisher() as publisher, VllmLoader(engine, pause="wait") as loader:
        await publish(publisher, 1)
        async with run.subscriber(loader) as versions:
            await publisher.joined(1)
            before = parts(run.ranks)
            version = await run.next(publisher, versions)
            run.ranks[1].fail_at = run.ranks[1].installs + 1
            engine.calls.clear()
            with pytest.raises(ReadBackError):
                async with loader.updating(version):
                    await version.install()
            assert engine.calls == ["pause", "start_weight_update", "finish_weight_update", "label 1", "resume"]
            assert parts(run.ranks) == before
            assert engine.serves
            async with loader.updating(version):
                await version.install()
            assert run.installed


async def test_a_poisoned_engine_stays_paused_until_it_is_seeded(run: Run) -> None:
    engine = Engine(run.ranks)
    async with run.publisher() as publisher, VllmLoader(engine, pause="wait") as loader:
        await publish(publisher, 1)
        async with run.subscriber(loader) as versions:
            await publisher.joined(1)
            version = await run.next(publisher, versions)
            run.ranks[1].fail_at, run.ranks[1].undo_fails = run.ranks[1].installs + 1, True
            engine.calls.clear()
            with pytest.raises(Poisoned):
                async with loader.updating(version):
                    await version.install()
            assert engine.calls == ["pause", "start_weight_update"]
            assert not any(worker.serves() for worker in engine.workers)
            seed = await anext(versions)
            assert seed.kind == "seed"
            async with loader.updating(seed):
                await seed.install()
            assert engine.calls == INSTALLED
            assert run.installed
            assert engine.serves


async def test_an_engine_that_does_not_flush_does_not_go_on(run: Run) -> None:
    engine = Engine(run.ranks)
    engine.flushes = False
    async with run.publisher() as publisher, VllmLoader(engine, pause="wait") as loader:
        await publish(publisher, 1)
        async with run.subscriber(loader) as versions:
            await publisher.joined(1)
            version = await run.next(publisher, versions)
            with pytest.raises(StateError, match="prefix cache"):
                async with loader.updating(version):
                    await version.install()
            assert "label 2" not in engine.calls
            assert engine.paused
            await engine.resume_generation()
            assert not engine.paused


async def test_an_engine_that_refuses_a_session_goes_on(run: Run) -> None:
    engine = Engine(run.ranks)
    async with run.publisher() as publisher, VllmLoader(engine, pause="wait") as loader:
        await publish(publisher, 1)
        async with run.subscriber(loader) as versions:
            await publisher.joined(1)
            version = await run.next(publisher, versions)

            def refuse() -> None:
                raise RuntimeError("a weight update is already active")

            engine.workers[0].start_weight_update = refuse
            with pytest.raises(RuntimeError, match="already active"):
                async with loader.updating(version):
                    await version.install()
            assert engine.serves


async def test_workers_on_other_hosts_connect_by_tcp(run: Run) -> None:
    engine = Engine(run.ranks)
    async with run.publisher() as publisher, VllmLoader(engine, pause="wait", host="127.0.0.1") as loader:
        await publish(publisher, 1)
        async with run.subscriber(loader) as versions:
            assert versions.version == 1


async def test_workers_that_do_not_connect_are_missed(run: Run) -> None:
    engine = Engine(run.ranks)
    engine.workers[1].rank.world = 3
    with pytest.raises(RankError, match="rank 1 of 3"):
        async with VllmLoader(engine, pause="wait"):
            pass


async def test_an_engine_of_several_replicas_is_refused_before_anything_is_asked_of_it(run: Run) -> None:
    engine = Engine(run.ranks)
    engine.vllm_config = config(replicas=2)
    with pytest.raises(StateError, match="data_parallel_size=2"):
        await VllmLoader(engine).__aenter__()
    assert engine.calls == []


async def test_a_loader_that_was_not_entered_says_so(run: Run) -> None:
    with pytest.raises(StateError, match="async with"):
        VllmLoader(Engine(run.ranks)).fingerprint()


# ------------------------------------------------------------------ others pause, resume, and put it to sleep


@asynccontextmanager
async def offered(run: Run) -> AsyncIterator[SimpleNamespace]:
    """An engine at version 1, whose member has been offered version 2."""
    engine = Engine(run.ranks)
    async with run.publisher() as publisher, VllmLoader(engine, pause="wait") as loader:
        await publish(publisher, 1)
        async with run.subscriber(loader) as versions:
            await publisher.joined(1)
            version = await run.next(publisher, versions)
            engine.calls.clear()
            yield SimpleNamespace(engine=engine, loader=loader, versions=versions, version=version)


async def test_an_engine_that_was_paused_stays_paused(run: Run) -> None:
    async with offered(run) as at:
        engine = at.engine
        engine.paused = True
        async with at.loader.updating(at.version):
            await at.version.install()
        assert engine.calls == [call for call in INSTALLED if call not in ("pause", "resume")]
        assert engine.paused
        assert run.installed


async def test_an_engine_that_was_paused_stays_paused_while_its_loader_is_tried_out(run: Run) -> None:
    engine = Engine(run.ranks)
    engine.paused = True
    async with run.publisher() as publisher, VllmLoader(engine, pause="wait") as loader:
        await publish(publisher, 1)
        async with run.subscriber(loader) as versions:
            assert versions.version == 1
    assert engine.calls == ["init_weight_transfer_engine", "label 1"]


async def test_an_engine_that_others_pause_during_an_install_stays_paused(run: Run) -> None:
    async with offered(run) as at:
        async with at.loader.updating(at.version):
            await at.engine.pause_generation(mode="wait", clear_cache=False)
            await at.version.install()
        assert at.engine.paused


async def test_an_engine_that_others_resume_during_an_install_goes_on_at_its_end(run: Run) -> None:
    async with offered(run) as at:
        at.engine.paused = True
        async with at.loader.updating(at.version):
            await at.engine.resume_generation()
            assert at.engine.paused
            await at.version.install()
        assert at.engine.serves


async def test_an_engine_that_others_put_to_sleep_during_an_install_sleeps_behind_it(run: Run) -> None:
    async with offered(run) as at:
        async with asyncio.TaskGroup() as tasks, at.loader.updating(at.version):
            tasks.create_task(at.engine.sleep())
            await asyncio.sleep(0)  # the task has begun
            await at.version.install()
        assert at.engine.calls == [*INSTALLED, "sleep"]
        assert run.installed


async def test_a_sleep_that_waits_for_a_poisoned_engine_says_so(run: Run) -> None:
    engine = Engine(run.ranks)
    engine.paused = True
    pause = Pause(engine, mode="wait", timeout_s=0)
    await pause.begin()
    with pytest.raises(StateError, match="sleep waited 0 s for the end of an install"):
        await engine.sleep()
    await pause.end()
    await engine.sleep()
    assert engine.calls == ["sleep"]


async def test_an_engine_that_sleeps_is_not_touched_and_takes_the_version_once_it_is_awake(run: Run) -> None:
    async with offered(run) as at:
        engine, before = at.engine, parts(run.ranks)
        await engine.sleep()
        with pytest.raises(StateError, match="sleeps"):
            async with at.loader.updating(at.version):
                await at.version.install()
        assert engine.calls == ["sleep"]
        assert engine.paused
        assert parts(run.ranks) == before
        await engine.wake_up()
        async with at.loader.updating(at.version):
            await at.version.install()
        assert engine.calls == ["sleep", "wake_up", *INSTALLED]
        assert run.installed


async def test_an_engine_that_lost_its_weights_in_its_sleep_is_seeded(run: Run) -> None:
    async with offered(run) as at:
        await at.engine.sleep(level=2)
        for memory in run.ranks[0].memories.values():
            memory[3:-2] = 0
        await at.engine.wake_up()
        with pytest.raises(BaseMismatch, match="something other than dcr has written"):
            async with at.loader.updating(at.version):
                await at.version.install()
        seed = await anext(at.versions)
        assert (seed.number, seed.kind) == (2, "seed")
        async with at.loader.updating(seed):
            await seed.install()
        assert run.installed
        assert at.engine.serves


async def test_an_engine_that_sleeps_is_not_tried_out(run: Run) -> None:
    engine = Engine(run.ranks)
    await engine.sleep()
    async with run.publisher() as publisher, VllmLoader(engine, pause="wait") as loader:
        await publish(publisher, 1)
        with pytest.raises(StateError, match="sleeps"):
            async with run.subscriber(loader):
                pass
    assert engine.calls == ["sleep", "init_weight_transfer_engine"]


async def test_a_seed_shows_its_version(run: Run) -> None:
    for memory in run.ranks[0].memories.values():
        memory[3:-2] ^= 1
    engine = Engine(run.ranks)
    async with run.publisher() as publisher, VllmLoader(engine, pause="wait") as loader:
        await publish(publisher, 1)
        async with run.subscriber(loader) as versions:
            assert engine.calls[-1] == "resume"
            seed = await anext(versions)
            async with loader.updating(seed):
                await seed.install()
    assert engine.calls[-2:] == ["label 1", "resume"]
