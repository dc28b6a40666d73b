"""Real vLLM engines: what a pause costs beside the engine's own reload of the same checkpoint, in the same run.

An `AsyncLLM` of one rank, with its engine core and worker in processes of their own, follows a trainer in this process.
Every process counts: processor time of this one and all its descendants, while nothing is published. Both sides are
taken between the engine's own pause and resume, and these are printed apart. So is what the main threads of vLLM's
processes take during an install: dcr's work is done in this process and in a thread of each worker, while those threads
wait for vLLM's messages, and spin for a second after each. A reload is done by them.

    install     `Version.install` of a version that changed so many elements
    seed        the same of a stored version, for an engine of whose elements so many differ: as in an install, and all
    reload      vLLM's `reload_weights` of the whole checkpoint, which lies in the page cache

    python benchmarks/engines.py CHECKPOINT [--rounds 5] [--layers 300 600] [--json FILE]

`pause_over_dense_reload` is install over reload, `seed_over_dense_reload` seed over reload. `pause_ratio_2n` compares
small engines of N and 2 N layers. Bytes moved: an install as in benchmarks/members.py; a reload reads the file, and
writes all of it; a seed reads that much from the run's store and sends it over a socket.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import torch
from members import Processes, Row
from safetensors.torch import load_file

import dcr

DENSITIES = (0.002, 0.013)
LAYERS = (300, 600)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
}
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "worker_extension_cls": "dcr.engines.vllm_cpu.Canonical",
    "weight_transfer_config": {"backend": "dcr"},
}


class Trainer(torch.nn.Module):
    """The tensors of a checkpoint, as parameters under their own names."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        for name, tensor in load_file(checkpoint / "model.safetensors").items():
            module: torch.nn.Module = self
            *path, leaf = name.split(".")
            for step in path:
                if step not in module._modules:
                    module.add_module(step, torch.nn.Module())
                module = module.get_submodule(step)
            module.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))

    def step(self, seed: int, density: float) -> None:
        """Flip the lowest bit of so many elements of every tensor."""
        rng = np.random.default_rng(seed)
        for tensor in self.parameters():
            words = tensor.data.view(torch.int16).view(-1).numpy()
            count = max(1, round(len(words) * density))
            at = slice(None) if density == 1 else rng.choice(len(words), count, replace=False)
            words[at] ^= 1


def descendants(pid: int) -> Iterator[int]:
    """A process, and those that it started, and so on."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # it has ended meanwhile
            for child in (thread / "children").read_text().split():
                yield from descendants(int(child))


class MainThreads:
    """The processor time of the main threads of some processes, together, in seconds."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._clocks = [Path(f"/proc/{pid}/task/{pid}/schedstat") for pid in pids]

    def now_s(self) -> float:
        return sum(int(clock.read_text().split()[0]) for clock in self._clocks) / 1e9


class Laps:
    """Processor time and wall time of what was done, in seconds, by name."""

    def __init__(self) -> None:
        own, *others = descendants(os.getpid())
        self._used, self._polling = Processes([own, *others]), MainThreads(others)
        self.spent_s: dict[str, list[float]] = defaultdict(list)
        self.begin()

    def begin(self) -> None:
        self._last = self._now()

    def lap(self, name: str, *, polls: bool = False) -> None:
        """End a lap. polls: the engine's main threads had nothing to do in it, and what they took is told apart."""
        used_s, polling_s, wall_s = (now - last for now, last in zip(self._now(), self._last, strict=True))
        self.spent_s[f"{name}_s"].append(used_s - polling_s * polls)
        self.spent_s[f"{name}_wall_s"].append(wall_s)
        if polls:
            self.spent_s["engine_polling_s"].append(polling_s)
        self.begin()

    def _now(self) -> tuple[float, float, float]:
        return self._used.now_s(), self._polling.now_s(), time.perf_counter()

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.spent_s.items()}


@asynccontextmanager
async def running(checkpoint: Path) -> AsyncIterator[Any]:
    os.environ.update(ENVIRONMENT)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(checkpoint), **SETTINGS))
    try:
        yield engine
    finally:
        engine.shutdown()


async def measure(checkpoint: Path, densities: Sequence[float], rounds: int) -> dict[str, float]:
    """Medians of what each thing took; names of installs and seeds end with how much of the engine's bits differed."""
    trainer = Trainer(checkpoint)
    async with running(checkpoint) as engine:
        laps = Laps()
        await _reload(engine, laps, rounds)
        async with dcr.loader(engine, kind="vllm") as loader:
            trainer.step(0, densities[-1])
            async with _seeded(trainer, loader, laps, densities[-1]) as (publisher, versions):
                for number in range(rounds * len(densities)):
                    density = densities[number % len(densities)]
                    trainer.step(number + 1, density)
                    await (await publisher.publish()).committed()
                    await _install(loader, await anext(versions), laps, f"install@{density}")
            trainer.step(0, 1)
            async with _seeded(trainer, loader, laps, 1):
                pass
    return laps.medians()


@asynccontextmanager
async def _seeded(
    trainer: Trainer, loader: Any, laps: Laps, density: float
) -> AsyncIterator[tuple[dcr.Publisher, dcr.Subscriber]]:
    """A run of its own, whose first version differs so much from what the engine holds."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"local://{folder}/run"
        async with dcr.publisher(url, source=dcr.source(trainer)) as publisher:
            await (await publisher.publish()).committed()
            laps.begin()
            async with dcr.subscriber(url, loader=loader, member="vllm") as versions:
                laps.lap(f"bind@{density}")
                await _install(loader, await anext(versions), laps, f"seed@{density}")
                yield publisher, versions


async def _reload(engine: Any, laps: Laps, rounds: int) -> None:
    """vLLM's own way, of the checkpoint that it was made of; the first time brings the file to the page cache."""
    for number in range(rounds + 1):
        await engine.pause_generation(mode="keep", clear_cache=False)
        laps.begin()
        await engine.collective_rpc("reload_weights")
        if number:
            laps.lap("reload")
        await engine.resume_generation()


async def _install(loader: Any, version: dcr.Version, laps: Laps, name: str) -> None:
    laps.begin()
    async with loader.updating(version):
        laps.lap("engine_pause")
        await version.install()
        laps.lap(name, polls=True)
    laps.lap("engine_resume")


def small_checkpoint(folder: Path, layers: int) -> Path:
    """A Llama of many layers, none of which is large."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes, **heads)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def rows_of(checkpoint: Path, layers: Sequence[int], rounds: int) -> list[Row]:
    """All rows; printed as they come."""
    name = checkpoint.resolve().name
    medians = anyio.run(measure, checkpoint, DENSITIES, rounds)
    rows = [_row(metric, name, value) for metric, value in medians.items()]
    for density in DENSITIES:
        ratio = medians[f"install@{density}_s"] / medians["reload_s"]
        rows.append(_row(f"pause_over_dense_reload@{density}", name, ratio))
    for density in (DENSITIES[-1], 1):
        ratio = medians[f"seed@{density}_s"] / medians["reload_s"]
        rows.append(_row(f"seed_over_dense_reload@{density}", name, ratio))
    pauses: dict[int, float] = {}
    for count in layers:
        with tempfile.TemporaryDirectory() as folder:
            medians = anyio.run(measure, small_checkpoint(Path(folder), count), (0.004,), rounds)
        pauses[count] = medians["install@0.004_s"]
        rows += [_row(metric, f"{count} layers", value) for metric, value in medians.items()]
        if count % 2 == 0 and count // 2 in pauses:
            rows.append(_row("pause_ratio_2n", f"{count} layers", pauses[count] / pauses[count // 2]))
    return rows


def _row(metric: str, variant: str, value: float) -> Row:
    """A row; what stands behind @ is its density."""
    label, _, rest = metric.partition("@")
    density, _, unit = rest.partition("_")
    label, unit = (f"{label}_{unit}" if unit else label), "s" if metric.endswith("_s") else "1"
    print(f"{label:<32} {density:>6} {variant:>16} {value:>10.4f} {unit}", flush=True)
    return {
        "metric": label,
        "workload": "vllm",
        "density": float(density) if density else None,
        "variant": variant,
        "threads": 1,
        "value": value,
        "unit": unit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a folder with config.json and model.safetensors")
    parser.add_argument("--layers", type=int, nargs="*", default=LAYERS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = rows_of(asked.checkpoint, asked.layers, asked.rounds)
    if asked.json:
        asked.json.write_bytes(msgspec.json.encode(rows))


if __name__ == "__main__":
    main()
