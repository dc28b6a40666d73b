"""Members as users have them: ranks in processes of their own, behind sockets, that follow a run; and what each costs.

Every process of a member counts: its own, and each rank's worker. Processor time is read from the clocks of processes,
so that what else runs on the machine does not count. The trainer is a process apart, and so is its time.

A model of N tensors of `SHAPE` in bf16; each version changes `CHANGED` elements of every tensor. Two ranks hold half of
the rows of each. `pause_ratio_2n` is a pause (`Version.install`) at 2 N tensors over one at N: at most 2 where a pause
costs what it touches. Bytes moved by a pause: 2 (4 + 2) per changed element, and the cache line of each, both ways;
besides a round trip to each rank, and a look at where its N tensors lie. Most of what this takes is recording the
engine's loader, once: 40 s of processor time for a rank of 20,000 tensors.

    python benchmarks/members.py [--tensors 300 600 5000 10000 20000] [--ranks 1 2] [--rounds 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import torch

import dcr
from dcr.engines import workers
from dcr.engines.ranks import Ranks
from dcr.loaders.native import NativeLoader

SHAPE = (64, 32)
EXPERTS = 512
CHANGED = 8
SIZES, WORLDS = (300, 600, 5000, 10000, 20000), (1, 2)
KEY = b"benchmark"


class Processes:
    """The processor time of some processes of this user, together, in seconds."""

    def __init__(self, pids: Sequence[int]) -> None:
        clock, libc = ctypes.c_int(), ctypes.CDLL(None)
        self._clocks: list[int] = []
        for pid in pids:
            if error := libc.clock_getcpuclockid(pid, ctypes.byref(clock)):
                raise OSError(error, f"process {pid} has no clock")
            self._clocks.append(clock.value)

    def now_s(self) -> float:
        return sum(time.clock_gettime(clock) for clock in self._clocks)


class Rows:
    """An engine rank that holds some rows of every tensor; see `dcr.loaders.engine.Adapter`."""

    replaces = False

    def __init__(self, tensors: int, rank: int, world: int) -> None:
        height = SHAPE[0] // world
        self._rows = slice(rank * height, (rank + 1) * height)
        self.module = model_of(tensors, (height, SHAPE[1]))
        self._parameters = dict(self.module.named_parameters())

    def load(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            self._parameters[name].data.copy_(tensor[self._rows])

    def settle(self, modules: Set[str]) -> None:
        """Nothing is made of weights here."""

    def fingerprint(self) -> bytes:
        return b"benchmark"


def model_of(tensors: int, shape: Sequence[int]) -> torch.nn.Module:
    """Layers of up to `EXPERTS` matrices."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Module() for _ in range(-(-tensors // EXPERTS))])
    for number in range(tensors):
        weight = torch.zeros(tuple(shape), dtype=torch.bfloat16)
        layer, expert = divmod(number, EXPERTS)
        model.layers[layer].register_parameter(f"w{expert}", torch.nn.Parameter(weight, requires_grad=False))
    return model


def serve_rank(address: str, tensors: int, rank: int, world: int) -> None:
    """A worker process: one rank, and its server."""
    torch.set_num_threads(1)
    loader = NativeLoader(Rows(tensors, rank, world), partial=True)
    with workers.connect(address) as connection:
        workers.serve(connection, loader, key=KEY, rank=rank, world=world)


def train(url: str, tensors: int, orders: Connection) -> None:
    """The trainer's process: publishes a version for each order, and answers with what that took."""
    torch.set_num_threads(1)
    anyio.run(_train, url, model_of(tensors, SHAPE), orders)


async def _train(url: str, model: torch.nn.Module, orders: Connection) -> None:
    rng = np.random.default_rng(0)
    weights = [tensor.data.view(torch.int16).view(-1).numpy() for tensor in model.parameters()]
    async with dcr.publisher(url, source=dcr.source(model)) as publisher:
        while await anyio.to_thread.run_sync(orders.recv):
            for words in weights:
                words[rng.choice(len(words), CHANGED, replace=False)] ^= 1
            before_s = time.process_time()
            await (await publisher.publish()).committed()
            orders.send(time.process_time() - before_s)


@dataclass
class Costs:
    """Seconds of processor time of a member, by what it did: medians are of versions."""

    bind_and_seed_s: float = 0.0
    publish_s: list[float] = field(default_factory=list)
    prepare_s: list[float] = field(default_factory=list)
    install_s: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        return {
            "member_bind_and_seed_s": self.bind_and_seed_s,
            "member_publish_s": statistics.median(self.publish_s),
            "member_prepare_s": statistics.median(self.prepare_s),
            "member_install_s": statistics.median(self.install_s),
        }


Row = dict[str, Any]


def rows_of(sizes: Sequence[int], worlds: Sequence[int], rounds: int) -> list[Row]:
    """Measure members of every size with every number of ranks; printed as they come."""
    rows: list[Row] = []
    for world in worlds:
        pauses: dict[int, float] = {}
        for tensors in sorted(sizes):
            medians = measure(tensors, world, rounds).medians()
            pauses[tensors] = medians["member_install_s"]
            if tensors % 2 == 0 and tensors // 2 in pauses:
                medians["pause_ratio_2n"] = pauses[tensors] / pauses[tensors // 2]
            rows += [_row(metric, tensors, world, value) for metric, value in medians.items()]
    return rows


def _row(metric: str, tensors: int, world: int, value: float) -> Row:
    variant, unit = f"{tensors} tensors, {world} rank{'s' * (world > 1)}", "s" if metric.endswith("_s") else "1"
    print(f"{metric:<36} {variant:>24} {value:>10.4f} {unit}", flush=True)
    density = CHANGED / (SHAPE[0] * SHAPE[1])
    return {
        "metric": metric,
        "workload": "members",
        "density": density,
        "variant": variant,
        "threads": 1,
        "value": value,
        "unit": unit,
    }


def measure(tensors: int, world: int, rounds: int) -> Costs:
    """A member of so many ranks follows a run; the first version seeds it."""
    return anyio.run(_measure, tensors, world, rounds)


async def _measure(tensors: int, world: int, rounds: int) -> Costs:
    costs = Costs()
    with (
        TemporaryDirectory() as folder,
        _trainer(f"local://{folder}/run", tensors) as orders,
        _ranks(tensors, world) as (ranks, pids),
    ):
        used = Processes([os.getpid(), *pids])
        costs.publish_s.append(await _publish(orders))
        before_s = used.now_s()
        async with dcr.subscriber(f"local://{folder}/run", loader=ranks, member="measured") as versions:
            if versions.version is None:
                await (await anext(versions)).install()
            costs.bind_and_seed_s = used.now_s() - before_s
            for _ in range(rounds):
                await _follow(versions, orders, used, costs)
    return costs


async def _follow(versions: dcr.Subscriber, orders: Connection, used: Processes, costs: Costs) -> None:
    """One version: published, prepared, installed."""
    before_s = used.now_s()
    orders.send(True)
    version = await anext(versions)
    prepared_s = used.now_s()
    await version.install()
    installed_s = used.now_s()
    costs.publish_s.append(await anyio.to_thread.run_sync(orders.recv))
    costs.prepare_s.append(prepared_s - before_s)
    costs.install_s.append(installed_s - prepared_s)


async def _publish(orders: Connection) -> float:
    orders.send(True)
    return await anyio.to_thread.run_sync(orders.recv)


@contextmanager
def _trainer(url: str, tensors: int) -> Iterator[Connection]:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=train, args=(url, tensors, there))
    process.start()
    try:
        yield here
        here.send(False)
        process.join()
    finally:
        process.kill()
        process.join()


@contextmanager
def _ranks(tensors: int, world: int) -> Iterator[tuple[Ranks, list[int]]]:
    """Ranks in processes of their own, and the processes' numbers."""
    spawn = multiprocessing.get_context("spawn")
    with workers.listening() as (listener, address):
        started = [spawn.Process(target=serve_rank, args=(address, tensors, rank, world)) for rank in range(world)]
        for process in started:
            process.start()
        connected = workers.accept(listener, world, KEY)
    try:
        yield Ranks(connected), [process.pid for process in started if process.pid is not None]
    finally:
        for worker in connected:
            worker.close()
        for process in started:
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=SIZES)
    parser.add_argument("--ranks", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = rows_of(asked.tensors, asked.ranks, asked.rounds)
    if asked.json:
        asked.json.write_bytes(msgspec.json.encode(rows))


if __name__ == "__main__":
    main()
