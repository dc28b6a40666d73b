"""Twenty thousand small tensors: what a publish of an unchanged model costs beside merely reading it.

A model of so many expert matrices of bf16, each in memory of its own, is planned, published as an anchor, and published
again and again without a change. In the same rounds the weights and the baseline are read with numpy (a sum of 64-bit
words, tensor by tensor for the weights, frame by frame for the baseline): the roofline of a compare.

    python benchmarks/experts.py [--tensors 5000 10000 20000] [--elements 16384] [--rounds 9] [--json FILE]

Prints a table; --json writes rows {metric, workload, density, variant, threads, value, unit}; variant is the number of
tensors. Bytes moved for N weights: a compare and the roofline both read 4 N. `plan_us_per_tensor` (shard map to frames
and layout, and the proof that each element is owned once) does not grow with the number of tensors if it is linear.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec
import numpy as np

import dcr
from dcr.layout import coverage
from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import Layout, Shard, plan
from dcr.layout.schema import Schema, TensorSpec
from dcr.layout.views import Bits
from dcr.seams import Residual
from dcr.testing.memory import MemoryTransport


class Experts:
    """A source of equal matrices, each in a storage of its own."""

    residual: Sequence[Residual] = ()

    def __init__(self, tensors: int, elements: int) -> None:
        names = (f"model.layers.{n // 512}.mlp.experts.{n % 512}.weight" for n in range(tensors))
        self.schema = Schema(tuple(TensorSpec(name, "bfloat16", (elements // 64, 64)) for name in names))
        tile = np.random.default_rng(0).integers(0, 1 << 16, elements, np.uint16)
        self._storages: list[Bits] = [tile ^ np.uint16(n & 0xFFFF) for n in range(tensors)]
        box = Box(0, 0, (Dim(elements, 1, 1),))
        self.shards = [Shard(number, number, box) for number in range(tensors)]

    def storages(self) -> Sequence[Bits]:
        return self._storages


def planned_s(source: Experts) -> float:
    """Seconds from a shard map to a layout, with the proof."""
    before_s = time.perf_counter()
    Layout(source.schema, tuple(frame.spec for frame in plan(source.schema, source.shards)))
    owned = coverage.tally(source.schema, [(shard.tensor, shard.box) for shard in source.shards])
    coverage.require_covered(source.schema, owned)
    return time.perf_counter() - before_s


def read_s(arrays: Sequence[Bits]) -> float:
    """Seconds to read some arrays once."""
    before_s = time.perf_counter()
    for array in arrays:
        array.view(np.uint64).sum()
    return time.perf_counter() - before_s


async def measure(tensors: int, elements: int, rounds: int) -> dict[str, float]:
    """Medians over rounds; ratios are taken within a round."""
    source = Experts(tensors, elements)
    planned = statistics.median(planned_s(source) for _ in range(3))
    published: list[float] = []
    captured: list[float] = []
    read: list[float] = []
    chunks = 0
    async with dcr.publisher("memory:///run", source=source, transport=MemoryTransport()) as publisher:
        await (await publisher.publish()).committed()
        frames = [bits.copy() for bits in source.storages()]  # as many bytes as the baseline, read beside the weights
        for _ in range(rounds + 1):
            before_s = time.perf_counter()
            report = await (await publisher.publish()).committed()
            published.append(time.perf_counter() - before_s)
            captured.append(report.captured_s)
            read.append(read_s(source.storages()) + read_s(frames))
            chunks += report.chunks
    ratios = [one / other for one, other in zip(published[1:], read[1:], strict=True)]
    return {
        "plan_s": planned,
        "plan_us_per_tensor": 1e6 * planned / tensors,
        "read_s": statistics.median(read[1:]),
        "captured_unchanged_s": statistics.median(captured[1:]),
        "publish_unchanged_s": statistics.median(published[1:]),
        "publish_unchanged_over_read": statistics.median(ratios),
        "chunks": chunks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[5000, 10000, 20000])
    parser.add_argument("--elements", type=int, default=16384, help="of each tensor; a multiple of 64")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    tables = {count: anyio.run(measure, count, asked.elements, asked.rounds) for count in asked.tensors}
    print(f"tensors of {asked.elements} bf16 elements, nothing changed, medians of {asked.rounds}")
    print(f"{'tensors':<32}" + "".join(f"{count:>12}" for count in tables))
    for name in next(iter(tables.values())):
        print(f"{name:<32}" + "".join(f"{table[name]:>12.4f}" for table in tables.values()))
    if asked.json:
        rows = [
            {
                "metric": name,
                "workload": "experts",
                "density": 0.0,
                "variant": str(count),
                "threads": 1,
                "value": value,
                "unit": "s" if name.endswith("_s") else "us" if "_us_" in name else "1",
            }
            for count, table in tables.items()
            for name, value in table.items()
        ]
        asked.json.write_bytes(msgspec.json.encode(rows))


if __name__ == "__main__":
    main()
