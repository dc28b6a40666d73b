"""Overlap: how close the wall time of a publish comes to that of its longest stage.

The link is slowed until transfer takes as long as construct, which leaves the most to gain. The same stages, run one
after another, stand beside it. Prints a table; with --json FILE writes rows {metric, workload, density, variant,
threads, value, unit}, with --trace FILE a trace of the last overlapped round for chrome://tracing or ui.perfetto.dev.

    python benchmarks/pipeline.py [--mib 512] [--density 0.01] [--rounds 9] [--json FILE] [--trace FILE]

Bytes moved: construct reads 2 + 2 bytes per element; compress reads 6 and writes about 1.3 per changed one. The
roofline of `wall_over_longest_stage` is 1 + 2 / frames: the first frame is constructed and the last one sent alone.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import torch

import dcr
from dcr.codecs.codec import GAPS
from dcr.codecs.patch import Operation, Patch
from dcr.events import Event, StageWorked
from dcr.events.observers import Observer, Summary, ignore
from dcr.layout.frames import Layout, SourceFrame, plan
from dcr.layout.views import Bits
from dcr.memory.baseline import Baseline
from dcr.observe.trace import Trace
from dcr.protocol.wire import Identity
from dcr.stages.compress import Compress, Parcel
from dcr.stages.construct import Construct

STEP = Identity("benchmark", 1, 2, 1)


class SlowLink:
    """A transfer that takes so many seconds a chunk, and no processor."""

    name = "transfer"
    workers = 1

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    async def run(self, inbox: dcr.Inbox[Parcel], outbox: dcr.Outbox[int]) -> None:  # noqa: ARG002
        async for parcel in inbox:
            with parcel.lease:
                await anyio.sleep(self.delay_s)


class Trainer:
    """A model after one step, and the baseline before it."""

    def __init__(self, mib: int, density: float) -> None:
        rng = np.random.default_rng(0)
        elems = mib << 19
        weights = torch.from_numpy(rng.normal(0, 0.02, 1 << 20).astype(np.float32)).to(torch.bfloat16)
        module = torch.nn.Module()
        module.register_parameter(
            "w", torch.nn.Parameter(weights.repeat(-(-elems // len(weights)))[:elems], requires_grad=False)
        )
        self.source = dcr.source(module)
        self.plan: list[SourceFrame] = plan(self.source.schema, self.source.shards)
        self.layout = Layout(self.source.schema, tuple(one.spec for one in self.plan))
        self.storages: list[Bits] = list(self.source.storages())
        self.baseline = Baseline(self.layout)
        frames = [self.storages[0][start : start + (1 << 22)].copy() for start in range(0, elems, 1 << 22)]
        self.baseline.adopt(dict(enumerate(frames)), STEP, self.baseline.lanes)
        index = np.flatnonzero(rng.random(1 << 22) < density)
        for start in range(0, elems - (1 << 22) + 1, 1 << 22):
            self.storages[0][start + index] += rng.choice(np.array([1, 0xFFFF], np.uint16), len(index))

    def stages(self, delay_s: float) -> tuple[Construct, Compress, SlowLink]:
        """Fresh stages; the overlay of the round before is dropped."""
        self.baseline.drop()
        construct = Construct(self.baseline, self.plan, self.storages)
        return construct, Compress(STEP, GAPS, Operation.STEP, dcr.ByteBudget(256 * dcr.MiB)), SlowLink(delay_s)


async def overlapped(trainer: Trainer, delay_s: float, observe: Observer = ignore) -> Summary:
    """All three stages at once."""
    pipeline = dcr.Pipeline(*trainer.stages(delay_s))
    return await pipeline.run(range(len(trainer.plan)), version=2, observe=observe)


async def one_after_another(trainer: Trainer, delay_s: float) -> float:
    """The same three stages, each when the one before has ended; seconds."""
    construct, compress, link = trainer.stages(delay_s)
    before_s = time.perf_counter()
    patches: list[Patch] = []
    await dcr.Pipeline(construct).run(range(len(trainer.plan)), into=patches.append)
    parcels: list[Parcel] = []
    await dcr.Pipeline(compress).run(patches, into=parcels.append)
    await dcr.Pipeline(link).run(parcels)
    return time.perf_counter() - before_s


def busy_s(summary: Summary) -> dict[str, float]:
    """Seconds per stage and worker."""
    return {stage.name: stage.busy_s / stage.workers for stage in summary.stages}


async def measure(trainer: Trainer, rounds: int, trace: Path | None) -> dict[str, float]:
    """Medians over rounds; the link's delay is set anew in each round, since the machine's speed drifts."""
    found: dict[str, list[float]] = {}
    overlap = 0
    for number in range(rounds):
        alone = busy_s(await overlapped(trainer, 0.0))
        delay_s = alone["construct"] / len(trainer.plan)
        observe: Any = Trace(trace) if trace and number == rounds - 1 else None
        events: list[Event] = []
        summary = await overlapped(trainer, delay_s, _both(events.append, observe))
        if observe is not None:
            observe.write()
        serial_s = await one_after_another(trainer, delay_s)
        longest_s = max(busy_s(summary).values())
        row = {f"{name}_s": value for name, value in busy_s(summary).items()}
        row |= {
            "wall_s": summary.wall_s,
            "serial_s": serial_s,
            "wall_over_longest_stage": summary.wall_s / longest_s,
            "serial_over_longest_stage": serial_s / longest_s,
            "serial_over_wall": serial_s / summary.wall_s,
        }
        for name, value in row.items():
            found.setdefault(name, []).append(value)
        overlap += constructed_within_transfer(events)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return medians | {"frames_constructed_within_the_transfer_before": overlap / rounds}


def constructed_within_transfer(events: list[Event]) -> int:
    """How many frames N + 1 were being constructed while frame N, or one before it, was being sent."""
    spans = {
        (event.stage, event.frame): (event.at_s - event.work_s - event.blocked_s, event.at_s)
        for event in events
        if isinstance(event, StageWorked)
    }
    sent = [span for (stage, _), span in spans.items() if stage == "transfer"]
    made = [span for (stage, frame), span in spans.items() if stage == "construct" and frame]
    return sum(any(begin < until and start < end for start, until in sent) for begin, end in made)


def _both(one: Observer, other: Observer | None) -> Observer:
    def observe(event: Event) -> None:
        one(event)
        if other is not None:
            other(event)

    return observe


def main(run: Callable[..., Awaitable[dict[str, float]]] = measure) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="size of the model in MiB of bf16")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path)
    asked = parser.parse_args()
    trainer = Trainer(asked.mib, asked.density)
    medians = anyio.run(run, trainer, asked.rounds, asked.trace)
    units = {name: "s" if name.endswith("_s") else "frames" if name.startswith("frames") else "1" for name in medians}
    print(f"{asked.mib} MiB of bf16, density {asked.density}, {len(trainer.plan)} frames, medians of {asked.rounds}")
    for name, value in medians.items():
        print(f"{name:<48} {value:>10.4f} {units[name]}")
    print(f"roofline of wall_over_longest_stage: {1 + 2 / len(trainer.plan):.4f}")
    if asked.json:
        rows = [
            {
                "metric": name,
                "workload": "uniform-ulp",
                "density": asked.density,
                "variant": "gaps",
                "threads": 1,
                "value": value,
                "unit": units[name],
            }
            for name, value in medians.items()
        ]
        asked.json.write_bytes(msgspec.json.encode(rows))


if __name__ == "__main__":
    main()
