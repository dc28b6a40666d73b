"""Real vLLM engines that others pause, put to sleep and reload, and what their outputs say of versions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

from live import FAST, PROMPTS, Engine, running
from models import Trainer, make_checkpoint

import dcr
from dcr.engines.vllm import VllmLoader
from dcr.errors import BaseMismatch, SchemaError, StateError, StorageRebound
from dcr.layout.frames import Layout
from dcr.layout.schema import Schema

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

KINDS = [
    pytest.param(True, 1, id="LLM"),
    pytest.param(False, 1, id="AsyncLLM"),
    pytest.param(False, 2, id="AsyncLLM-2"),
]


@dataclass
class Following:
    """An engine that holds version 1; its trainer has published nothing else yet."""

    engine: Engine
    trainer: Trainer
    publisher: dcr.Publisher
    loader: VllmLoader
    versions: dcr.Subscriber
    folder: Path

    async def next(self, number: int) -> dcr.Version:
        self.trainer.step(seed=number)
        await self.publisher.publish(number)
        return await anext(self.versions)

    async def install(self, version: dcr.Version) -> None:
        async with self.loader.updating(version):
            await version.install()

    async def ask(self, method: str, *args: Any, **named: Any) -> Any:
        """What the engine answers, whether at once or later."""
        answer = getattr(self.engine.engine, method)(*args, **named)
        return await answer if hasattr(answer, "__await__") else answer

    async def equal(self) -> bool:
        """Every byte is what vLLM's own loader makes of the trainer's weights."""
        saved = self.trainer.save(self.folder / "saved")
        return [seen["differing"] for seen in await self.engine.ask("differing", str(saved))] == [[]] * len(
            await self.engine.ask("digests")
        )


@asynccontextmanager
async def following(
    checkpoint: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_process: bool,
    ranks: int,
    *,
    waive: Sequence[str] = (),
    **settings: Any,
) -> AsyncIterator[Following]:
    trainer = Trainer(checkpoint)
    url = f"local://{folder / 'run'}"
    async with (
        running(checkpoint, ranks, monkeypatch, in_process=in_process, **settings) as engine,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
        dcr.loader(engine.engine, kind="vllm", waive=waive) as loader,
    ):
        await (await publisher.publish(1)).committed()
        async with dcr.subscriber(url, loader=loader, member="vllm", transport=FAST) as versions:
            await publisher.joined(1)
            yield Following(engine, trainer, publisher, loader, versions, folder)


@pytest.mark.parametrize(("in_process", "ranks"), KINDS)
async def test_an_engine_that_sleeps_takes_a_version_once_it_is_awake_and_one_that_was_reloaded_is_seeded(
    in_process: bool, ranks: int, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint("llama", checkpoints / "llama")
    async with following(checkpoint, tmp_path, monkeypatch, in_process, ranks) as at:
        assert await at.engine.version() == "1", "what is recognised is shown"
        version = await at.next(2)
        before = await at.engine.ask("digests")
        await at.ask("sleep", level=1)
        with pytest.raises(StateError, match="sleeps"):
            await at.install(version)
        assert await at.engine.ask("digests") == before
        assert await at.engine.version() == "1"
        await at.ask("wake_up")
        await at.install(version)
        assert await at.equal()
        assert await at.engine.version() == "2"

        version = await at.next(3)
        await at.ask("sleep", level=2)
        await at.ask("wake_up")
        await at.ask("collective_rpc", "reload_weights")
        with pytest.raises(BaseMismatch, match="something other than dcr has written"):
            await at.install(version)
        seed = await anext(at.versions)
        assert (seed.number, seed.kind) == (3, "seed")
        await at.install(seed)
        assert await at.equal()
        assert await at.engine.version() == "3"
        assert [len(tokens) for tokens in await at.engine.tokens()] == [8, 8]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_engine_that_was_paused_stays_paused_through_an_install(
    ranks: int, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint("llama", checkpoints / "llama")
    async with following(checkpoint, tmp_path, monkeypatch, False, ranks) as at:
        await at.ask("pause_generation", mode="keep", clear_cache=False)
        await at.install(await at.next(2))
        assert await at.ask("is_paused")
        assert await at.equal()
        await at.ask("resume_generation")
        await at.install(await at.next(3))
        assert not await at.ask("is_paused")
        assert len(await at.engine.answer(PROMPTS[0], 4)) == 4


async def test_a_draft_model_is_refused_by_name_unless_it_is_waived(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint("llama", checkpoints / "llama")
    drafts = {"model": str(checkpoint), "method": "draft_model", "num_speculative_tokens": 2}
    refused, waived = tmp_path / "refused", tmp_path / "waived"
    with pytest.raises(SchemaError, match=r"draft\.model\.\S+ and \d+ other weights of the LlamaForCausalLM"):
        async with following(checkpoint, refused, monkeypatch, True, 1, speculative_config=drafts):
            pass
    settings = {"speculative_config": drafts, "waive": ["draft.*"]}
    async with following(checkpoint, waived, monkeypatch, True, 1, **settings) as at:
        await at.install(await at.next(2))
        assert await at.equal()
        assert await at.engine.version() == "2"


@pytest.mark.matrix
async def test_a_map_of_experts_that_changed_is_noticed_before_an_install(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint("qwen3_moe", checkpoints / "qwen3_moe")
    async with following(checkpoint, tmp_path, monkeypatch, False, 2, enable_expert_parallel=True) as at:
        version = await at.next(2)
        await at.engine.ask("move_experts")
        before = await at.engine.ask("digests")
        with pytest.raises(StorageRebound):
            await at.install(version)
        assert await at.engine.ask("digests") == before
        assert not at.versions.may_serve


def test_expert_load_balancing_is_refused_by_name() -> None:
    """By what the configuration says: vLLM does not balance experts on a CPU."""
    from dcr.engines.vllm_worker import VllmRank
    from dcr.loaders.session import Session

    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=True))
    watch: Any = SimpleNamespace(require_awake=lambda: None)
    rank = VllmRank(SimpleNamespace(), config, watch, Session(torch.nn.Module()), waive=())
    with pytest.raises(StateError, match="enable_eplb"):
        rank.bind(Layout(Schema(()), ()))


def test_a_worker_sleeps_until_its_weights_are_awake_and_every_call_that_may_write_them_changes_its_mark() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    from dcr.engines.vllm_watch import Watch

    class Worker(WorkerBase):
        def __init__(self, config: Any) -> None:
            self.vllm_config = config

        def sleep(self, level: int = 1) -> None: ...

        def wake_up(self, tags: list[str] | None = None) -> None: ...

        def reload_weights(self) -> None: ...

        def reset_weights(self) -> None: ...

    class Model(torch.nn.Module):
        def load_weights(self, weights: Any) -> set[str]:
            return {"a"}

    config, model = SimpleNamespace(), Model()
    workers = [Worker(SimpleNamespace()), Worker(config)]
    watch = Watch(config, model)
    assert watch.worker is workers[1]
    marks = [watch.mark]
    for write in (
        lambda: watch.worker.sleep(level=2),
        lambda: watch.worker.wake_up(["kv_cache"]),
        lambda: watch.worker.reload_weights(),
        lambda: watch.worker.reset_weights(),
        lambda: model.load_weights([]),
    ):
        write()
        marks.append(watch.mark)
        with pytest.raises(StateError, match="the engine sleeps"):
            watch.require_awake()
    watch.worker.wake_up(tags=["weights"])
    watch.require_awake()
    assert len({*marks, watch.mark}) == 7
    with pytest.raises(StateError, match="worker was not found"):
        Watch(SimpleNamespace(), model)
