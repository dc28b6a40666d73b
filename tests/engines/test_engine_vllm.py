"""Real vLLM engines follow a trainer: after each refit every byte is what vLLM's own loader makes of its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

from live import FAST, PROMPTS, running
from models import FAMILIES, Trainer, make_checkpoint

import dcr
from dcr.errors import Poisoned, ReadBackError, SchemaError

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

REFITS = 5


def moved(before: list[dict[str, int]], after: list[dict[str, int]]) -> list[str]:
    """Tensors of any rank that do not lie where they lay; vLLM itself may move a rotary cache at its first request."""
    pairs = [(name, at, new[name]) for old, new in zip(before, after, strict=True) for name, at in old.items()]
    return sorted({name for name, then, now in pairs if then != now and "cos_sin_cache" not in name})


def cases() -> list[Any]:
    """Families by ranks; those that every change is checked with come without the mark `matrix`."""
    every = [(family, ranks) for ranks in (1, 2) for family in FAMILIES]
    first = [("llama", 2), ("qwen3_moe", 2), *((family, 1) for family in FAMILIES)]
    return [pytest.param(*case, marks=[] if case in first else [pytest.mark.matrix]) for case in every]


@pytest.mark.parametrize(("family", "ranks"), cases())
async def test_every_byte_is_what_the_engines_own_loader_makes_of_the_checkpoint(
    family: str, ranks: int, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await follow(make_checkpoint(family, checkpoints / family), ranks, tmp_path, monkeypatch, share=0.02)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 3])
async def test_real_weights_follow_too(
    ranks: int, real_weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of SmolLM2-135M; over three ranks, since two cannot share its nine heads."""
    await follow(real_weights, ranks, tmp_path, monkeypatch, share=0.004)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "spread", [{"enable_expert_parallel": True}, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}], ids=str
)
async def test_experts_and_layers_may_be_spread_over_ranks(
    spread: dict[str, Any], checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes only: vLLM 0.32 on a CPU holds such engines, and dies when they generate."""
    checkpoint = make_checkpoint("qwen3_moe", checkpoints / "qwen3_moe")
    await follow(checkpoint, 2, tmp_path, monkeypatch, share=0.02, speaks=False, **spread)


async def follow(
    checkpoint: Path,
    ranks: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    share: float,
    speaks: bool = True,
    **settings: Any,
) -> None:
    """An engine follows some refits, and is compared byte by byte after each; if it speaks, by its tokens too."""
    trainer = Trainer(checkpoint)
    url = f"local://{folder / 'run'}"
    async with running(checkpoint, ranks, monkeypatch, **settings) as engine:
        said: list[list[list[int]]] = []
        pointers = await engine.ask("pointers")
        async with (
            dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
            dcr.loader(engine.engine, kind="vllm") as loader,
        ):
            await (await publisher.publish(1)).committed()
            async with dcr.subscriber(url, loader=loader, member="vllm", transport=FAST) as versions:
                assert versions.version == 1, "what vLLM loaded is what the trainer holds"
                await publisher.joined(1)
                for number in range(2, REFITS + 2):
                    trainer.step(seed=number, share=share)
                    saved = trainer.save(folder / f"checkpoint-{number % 2}")
                    await publisher.publish(number)
                    version = await anext(versions)
                    assert (version.number, version.kind) == (number, "delta")
                    async with loader.updating(version):
                        await version.install()
                    for found in await engine.ask("differing", str(saved)):
                        assert len(found["compared"]) > 10
                        assert found["differing"] == []
                    assert moved(pointers, await engine.ask("pointers")) == []
                    assert await engine.version() == str(number)
                    if speaks:
                        said.append(await engine.tokens())
        digests = await engine.ask("digests")
    assert len({str(one) for one in said}) > 1 or not speaks, "refits changed what it generates"
    async with running(saved, ranks, monkeypatch, **settings) as fresh:
        if speaks:
            assert await fresh.tokens() == said[-1]
        assert await fresh.ask("digests") == digests


async def test_an_install_that_breaks_on_one_of_two_ranks_is_undone_and_one_that_is_killed_never_serves(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint("llama", checkpoints / "llama")
    trainer = Trainer(checkpoint)
    url = f"local://{tmp_path / 'run'}"
    async with (
        running(checkpoint, 2, monkeypatch) as engine,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST, frame_elems=1 << 15) as publisher,
        dcr.loader(engine.engine, kind="vllm") as loader,
    ):
        await (await publisher.publish(1)).committed()
        async with dcr.subscriber(url, loader=loader, member="vllm", transport=FAST) as versions:
            await publisher.joined(1)
            before = await engine.ask("digests")
            trainer.step(seed=2)
            saved = trainer.save(tmp_path / "checkpoint")
            await publisher.publish(2)
            version = await anext(versions)

            await engine.ask("break_install", 1, 3, "error")
            with pytest.raises(ReadBackError, match="rank 1"):
                async with loader.updating(version):
                    await version.install()
            assert versions.may_serve
            assert await engine.ask("digests") == before
            assert await engine.version() != "2"

            async with anyio.create_task_group() as asking:  # it goes on, and a request survives the install
                asking.start_soon(engine.answer, PROMPTS[0], 100)
                await anyio.sleep(0.2)
                async with loader.updating(version):
                    await version.install()
            assert [one["differing"] for one in await engine.ask("differing", str(saved))] == [[], []]
            assert await engine.version() == "2"

            trainer.step(seed=3)
            await publisher.publish(3)
            version = await anext(versions)
            await engine.ask("break_install", 1, 3, "kill")
            with pytest.raises(Poisoned):
                async with loader.updating(version):
                    await version.install()
            assert not versions.may_serve
            with pytest.raises(Exception):  # noqa: B017, PT011 - whichever way vLLM says that it is dead
                with anyio.fail_after(60):
                    await engine.answer(PROMPTS[0], 1)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_head_that_only_the_trainer_has_is_refused_by_name_unless_it_is_waived(
    ranks: int, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint("llama", checkpoints / "llama")
    trainer, plain = Trainer(checkpoint), Trainer(checkpoint)
    trainer.v_head = torch.nn.Linear(128, 1, dtype=torch.bfloat16)
    url = f"local://{tmp_path / 'run'}"
    async with (
        running(checkpoint, ranks, monkeypatch) as engine,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
    ):
        await (await publisher.publish(1)).committed()
        before = await engine.ask("digests")
        async with dcr.loader(engine.engine, kind="vllm") as loader:
            with pytest.raises(SchemaError, match=r"v_head\.weight"):
                async with dcr.subscriber(url, loader=loader, member="vllm", transport=FAST):
                    pass
        assert await engine.ask("digests") == before
        async with (
            dcr.loader(engine.engine, kind="vllm", waive=["v_head.*"]) as loader,
            dcr.subscriber(url, loader=loader, member="vllm", transport=FAST) as versions,
        ):
            for number in range(1, 4):
                version = await anext(versions)
                assert (version.number, version.kind) == (number, "seed" if number == 1 else "delta")
                async with loader.updating(version):
                    await version.install()
                if number < 3:
                    await publisher.joined(1)
                    trainer.step(seed=number)
                    plain.step(seed=number)  # the head comes last, so the rest changes alike
                    await publisher.publish(number + 1)
            saved = plain.save(tmp_path / "checkpoint")
            assert [one["differing"] for one in await engine.ask("differing", str(saved))] == [[]] * ranks


@pytest.mark.matrix
async def test_an_engine_that_repacked_its_weights_is_refused_by_name(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM on a CPU as it is, in processes that know nothing of this module's changes to it."""
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    checkpoint = make_checkpoint("llama", checkpoints / "llama")
    trainer = Trainer(checkpoint)
    url = f"local://{tmp_path / 'run'}"
    async with (
        running(checkpoint, 2, monkeypatch, worker_extension_cls="") as engine,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
        dcr.loader(engine.engine, kind="vllm") as loader,
    ):
        await (await publisher.publish(1)).committed()
        with pytest.raises(SchemaError, match=r"no rank holds any of them: model\.layers\.0\.mlp\.down_proj\.weight"):
            async with dcr.subscriber(url, loader=loader, member="vllm", transport=FAST):
                pass
