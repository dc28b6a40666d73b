"""A model whose rows are spread over ranks, for tests: each rank holds its own copy of its rows, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import torch

import dcr
from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import Shard
from dcr.layout.schema import WIDTHS, Schema, TensorSpec
from dcr.testing.ranks import MemoryGroup
from support.refits import UNSIGNED, Weights, random_bits

SHAPES = {"a": ("bfloat16", (10, 24)), "b": ("float32", (7, 5)), "c": ("bfloat16", (3,)), "d": ("int64", (1, 2))}


class Model:
    """Canonical bits by name."""

    def __init__(self, seed: int = 0, shapes: dict[str, tuple[str, tuple[int, ...]]] = SHAPES) -> None:
        self.shapes = shapes
        self.rng = np.random.default_rng(seed)
        self.bits = {
            name: random_bits(self.rng, int(np.prod(shape)), dtype).reshape(shape)
            for name, (dtype, shape) in shapes.items()
        }
        self.schema = Schema(tuple(TensorSpec(name, dtype, shape) for name, (dtype, shape) in shapes.items()))

    def step(self, count: int = 5) -> None:
        """Some bits of each tensor change."""
        for name, (dtype, _) in self.shapes.items():
            flat = self.bits[name].reshape(-1)
            where = self.rng.integers(0, flat.size, count)
            flat[where] = random_bits(self.rng, count, dtype)

    def expected(self) -> dict[str, np.ndarray]:
        """What an engine must hold."""
        return {name: bits.reshape(-1).copy() for name, bits in self.bits.items()}

    def engine(self) -> Weights:
        """A module of these tensors, all zero."""
        tensors = {}
        for name, (dtype, shape) in self.shapes.items():
            zeros = (
                torch.zeros(shape, dtype=UNSIGNED[WIDTHS[dtype]]) if WIDTHS[dtype] < 8 else torch.zeros(shape).long()
            )
            tensors[name] = zeros.view(getattr(torch, dtype))
        return Weights(tensors)


class Rows:
    """A source: a rank's rows of every tensor, as `np.array_split` spreads them."""

    residual: Sequence[Any] = ()

    def __init__(self, model: Model, rank: int, world: int) -> None:
        self.schema = model.schema
        self._model = model
        self._rows = {name: np.array_split(np.arange(bits.shape[0]), world)[rank] for name, bits in model.bits.items()}
        self._storages = [np.ascontiguousarray(bits[self._rows[name]]) for name, bits in model.bits.items()]
        self.shards = []
        for number, (bits, rows) in enumerate(zip(model.bits.values(), self._rows.values(), strict=True)):
            width = int(np.prod(bits.shape[1:]))
            if len(rows):
                box = Box(0, int(rows[0]) * width, (Dim(len(rows) * width, 1, 1),))
                self.shards.append(Shard(number, number, box))

    def take(self) -> None:
        """The optimizer's step: this rank's rows follow the model."""
        for storage, (name, bits) in zip(self._storages, self._model.bits.items(), strict=True):
            storage[...] = bits[self._rows[name]]

    def storages(self) -> list[np.ndarray]:
        return [storage.reshape(-1) for storage in self._storages]


class Trainer:
    """All ranks of a publisher in one event loop."""

    def __init__(self, model: Model, publishers: list[dcr.Publisher], sources: list[Any]) -> None:
        self.model = model
        self.publishers = publishers
        self.sources = sources

    async def publish(self, version: int | None = None) -> list[dcr.Report]:
        """The ranks take the model's bits, and publish them; each rank's report.

        Raises: the first rank's error, when all have raised one of its type.
        """
        ends = await self.attempt(version)
        errors = [end for end in ends if isinstance(end, Exception)]
        if errors:
            assert len(errors) == len(ends), ends
            assert len({type(error) for error in errors}) == 1, errors
            raise errors[0]
        return [end for end in ends if isinstance(end, dcr.Report)]

    async def attempt(self, version: int | None = None) -> list[dcr.Report | Exception]:
        """What becomes of a version of the model's bits on each rank."""
        for source in self.sources:
            source.take()
        ends: dict[int, dcr.Report | Exception] = {}

        async def one(rank: int) -> None:
            try:
                ends[rank] = await (await self.publishers[rank].publish(version)).committed()
            except Exception as error:
                ends[rank] = error

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for rank in range(len(self.publishers)):
                    tasks.start_soon(one, rank)
        return [ends[rank] for rank in sorted(ends)]


@asynccontextmanager
async def trainer(
    url: str,
    model: Model,
    world: int,
    *,
    transport: Any,
    group: MemoryGroup | None = None,
    source: Callable[[Model, int, int], Any] = Rows,
    before: dict[int, Callable[[int], None]] | None = None,
    options: dict[int, dict[str, Any]] | None = None,
    **shared: Any,
) -> AsyncIterator[Trainer]:
    """Publishers of all ranks. before, options: of single ranks."""
    group = group or MemoryGroup(world)
    sources = [source(model, rank, world) for rank in range(world)]
    publishers = [
        dcr.publisher(
            url,
            source=sources[rank],
            group=group.rank(rank, **({"before": before[rank]} if before and rank in before else {})),
            **{"transport": transport, "frame_elems": 50, **shared, **(options or {}).get(rank, {})},
        )
        for rank in range(world)
    ]
    ready, close = [anyio.Event() for _ in publishers], anyio.Event()

    async def live(rank: int) -> None:
        async with publishers[rank]:
            ready[rank].set()
            await close.wait()

    async with anyio.create_task_group() as tasks:
        for rank in range(world):
            tasks.start_soon(live, rank)
        for event in ready:
            await event.wait()
        yield Trainer(model, publishers, sources)
        close.set()
