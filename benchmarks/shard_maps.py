"""Construct on sharded ranks: compare each shard where it lies, or gather the model first and compare that.

A model of bf16 matrices is sharded by FSDP2 over 1, 2 and 4 processes (gloo). In each round every rank does both:

    direct   compares what it owns of every parameter with a baseline of just that
    gather   makes each parameter whole (`full_tensor()`, on every rank, as weight syncs do); then the whole tensors are
             compared with a whole baseline: all of them on the first rank ("first"), or each rank its share ("shared")

Both compare with the same kernels (`Construct.patch`: positions, bits, digests), tensor by tensor, one thread a rank. A
time is that of the slowest rank, per 10^9 bytes of the whole model; a ratio is taken within a round; a value is the
median over rounds. `construct_speedup_vs_gather` is the faster of the two gathers over direct.

    python benchmarks/shard_maps.py [--mib 256] [--matrices 32] [--density 0.01] [--ranks 1 2 4] [--rounds 9]
        [--json FILE]

Prints a table; --json writes rows {metric, workload, density, variant, threads, value, unit}; threads is the number of
ranks. Bytes moved for N weights over R ranks: direct reads 4 N / R on each, and gathers nothing; gather receives and
writes 2 N (R - 1) / R on each rank, and then reads 4 N or 4 N / R. `memcpy_s_per_gb` is the roofline: that of 2 N / R
weights on each rank, which reads 2 N / R and writes as much.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import Layout, Shard, SourceFrame, plan
from dcr.layout.schema import Schema, TensorSpec
from dcr.layout.views import Bits
from dcr.memory.baseline import Baseline
from dcr.probing.bits import bits_of
from dcr.protocol.wire import Identity
from dcr.sources import dtensor
from dcr.stages.construct import Construct

STEP = Identity("benchmark", 1, 2, 1)
COLUMNS = 2048


class Side:
    """Frames over some storages, and a baseline that differs from them at some elements."""

    def __init__(self, schema: Schema, shards: Sequence[Shard], storages: Sequence[Bits], density: float) -> None:
        self.plan: list[SourceFrame] = plan(schema, shards)
        layout = Layout(schema, tuple(frame.spec for frame in self.plan))
        self.baseline = Baseline(layout)
        construct = Construct(self.baseline, self.plan, storages)
        rng, frames = np.random.default_rng(0), {}
        for number, frame in enumerate(layout.frames):
            patch = construct.patch(number)
            assert patch is not None
            frames[number] = patch.bits
            frames[number][rng.random(frame.numel) < density] ^= 1
        self.baseline.adopt(frames, STEP, self.baseline.lanes)

    def compare(self, storages: Sequence[Bits]) -> int:
        """Every frame's patch; elements that changed."""
        construct = Construct(self.baseline, self.plan, storages)
        patches = (construct.patch(number) for number in range(len(self.plan)))
        return sum(patch.changed for patch in patches if patch is not None)


class Rank:
    """A sharded model on one rank, and what its ways of construct need."""

    def __init__(self, mib: int, matrices: int, density: float) -> None:
        self.rank, self.world, self.density = dist.get_rank(), dist.get_world_size(), density
        shape = (mib << 20) // (2 * COLUMNS * matrices), COLUMNS
        torch.manual_seed(0)
        self.net = torch.nn.ModuleList(
            torch.nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16) for _ in range(matrices)
        )
        mesh = init_device_mesh("cpu", (self.world,))
        for layer in self.net:
            fully_shard(layer, mesh=mesh)
        self.source = dtensor.source(self.net)
        self.own = Side(self.source.schema, self.source.shards, self.source.storages(), density)
        self.whole: list[Side | None] = []
        for number, layer in enumerate(self.net):
            bits = bits_of(layer.weight.full_tensor())
            schema = Schema((TensorSpec(f"{number}.weight", "bfloat16", shape),))
            shard = Shard(0, 0, Box(0, 0, (Dim(len(bits), 1, 1),)))
            mine = self.rank == 0 or number % self.world == self.rank
            self.whole.append(Side(schema, [shard], [bits], density) if mine else None)

    def direct(self) -> int:
        return self.own.compare(self.source.storages())

    def first(self) -> int:
        return self._gather(lambda _: self.rank == 0)

    def shared(self) -> int:
        return self._gather(lambda number: number % self.world == self.rank)

    def memcpy(self) -> int:
        for storage in self.source.storages():
            storage.copy()
        return 0

    def _gather(self, is_mine: Callable[[int], bool]) -> int:
        changed = 0
        for number, (layer, side) in enumerate(zip(self.net, self.whole, strict=True)):
            full = layer.weight.full_tensor()
            if side is not None and is_mine(number):
                changed += side.compare([bits_of(full)])
        return changed


def measured(rank: Rank, ways: Sequence[str]) -> dict[str, float]:
    """One round: seconds of the slowest rank. All ways but memcpy find about as many changes."""
    taken, found = {}, {}
    for way in ways:
        dist.barrier()
        before_s = time.perf_counter()
        changed = getattr(rank, way)()
        elapsed = torch.tensor([time.perf_counter() - before_s, 0.0], dtype=torch.float64)
        counted = torch.tensor([changed])
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        dist.all_reduce(counted)
        taken[way], found[way] = float(elapsed[0]), int(counted)
    expected = rank.density * rank.source.schema.numel
    assert all(abs(found[way] - expected) < 0.1 * expected for way in ways if way != "memcpy"), (found, expected)
    return taken


WAYS = ("direct", "first", "shared", "memcpy")


def run(number: int, world: int, folder: str, asked: argparse.Namespace, results: Any) -> None:
    """All rounds on one rank."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(number), WORLD_SIZE=str(world), LOCAL_RANK=str(number))
    store = dist.FileStore(str(Path(folder) / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=number, world_size=world)
    rank = Rank(asked.mib, asked.matrices, asked.density)
    measured(rank, WAYS)
    rounds = [measured(rank, WAYS) for _ in range(asked.rounds)]
    if number == 0:
        results.put((rank.source.schema.nbytes, rounds))
    dist.barrier()
    dist.destroy_process_group()


def medians(nbytes: int, rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """What is reported of one number of ranks."""
    found = {f"{way}_s_per_gb": statistics.median(one[way] for one in rounds) * 1e9 / nbytes for way in WAYS}
    for name, ways in (("first", ["first"]), ("shared", ["shared"]), ("gather", ["first", "shared"])):
        ratios = [min(one[way] for way in ways) / one["direct"] for one in rounds]
        found[f"construct_speedup_vs_{name}"] = statistics.median(ratios)
    found["direct_over_memcpy"] = statistics.median(one["direct"] / one["memcpy"] for one in rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the whole model in MiB of bf16")
    parser.add_argument("--matrices", type=int, default=32)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    tables: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in asked.ranks:
            results = context.Queue()
            processes = [
                context.Process(target=run, args=(number, world, folder, asked, results)) for number in range(world)
            ]
            for process in processes:
                process.start()
            tables[world] = medians(*results.get(timeout=600))
            for process in processes:
                process.join()
    print(f"{asked.mib} MiB of bf16 in {asked.matrices} matrices, density {asked.density}, medians of {asked.rounds}")
    print(f"{'ranks':<32}" + "".join(f"{world:>12}" for world in tables))
    for name in next(iter(tables.values())):
        print(f"{name:<32}" + "".join(f"{table[name]:>12.3f}" for table in tables.values()))
    if asked.json:
        rows = [
            {
                "metric": name,
                "workload": "fsdp2",
                "density": asked.density,
                "variant": "direct",
                "threads": world,
                "value": value,
                "unit": "s/GB" if name.endswith("_gb") else "1",
            }
            for world, table in tables.items()
            for name, value in table.items()
        ]
        asked.json.write_bytes(msgspec.json.encode(rows))


if __name__ == "__main__":
    main()
