"""The weights of the ends in a simulated machine: a trainer's module, and engines of one rank or of several."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch
from support.refits import Weights
from support.tensor_parallel import ToyRank

from dcr.engines.ranks import Ranks
from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import Region
from dcr.layout.schema import TensorSpec
from dcr.loaders.module import ModuleLoader
from dcr.sources.module import ModuleSource
from simulation.history import Memory, Octets

# Few patterns, so that values often come back: zeros, -0.0, a NaN payload, a denormal, by their low and high bytes.
OCTETS = np.array([0x00, 0x80, 0x7F, 0x01], np.uint8)


def model(octets: Octets | None = None, *, tied: bool) -> Weights:
    """Three frames of 16 elements: bf16 and fp32; two names of one tensor, tied at the trainer, apart at engines."""
    embed = torch.zeros(4, dtype=torch.bfloat16)
    tensors = {
        "embed": embed,
        "w": torch.zeros((5, 5), dtype=torch.bfloat16),
        "z": torch.zeros(7),
        "head": embed if tied else torch.zeros_like(embed),
    }
    module = Weights(tensors)
    if tied:
        module._parameters["head"] = module._parameters["embed"]
    if octets is not None:
        Memory.of(module).write(octets)
    return module


def random_octets(rng: np.random.Generator) -> Octets:
    """All bytes of a model, both names of the tied tensor alike."""
    memory = Memory.of(model(tied=True))
    memory.write(OCTETS[rng.integers(0, len(OCTETS), len(memory.read()))])
    return memory.read()


def halves(spec: TensorSpec, rank: int, world: int) -> list[Region]:
    """Of embed every rank holds all, of the others its share."""
    if spec.name == "embed":
        return [Region(0, 0, ((spec.numel, 1),))]
    low, high = rank * spec.numel // world, (rank + 1) * spec.numel // world
    return [Region(0, low, ((high - low, 1),))]


class Share:
    """The source of one trainer rank: its share of a module; of embed the first rank owns all."""

    residual = ()

    def __init__(self, module: Weights, rank: int, world: int) -> None:
        whole = ModuleSource(module)
        self.schema, self.storages = whole.schema, whole.storages
        self.shards = []
        for shard in whole.shards:
            spec = self.schema.tensors[shard.tensor]
            for region in halves(spec, rank, world):
                ((count, _),) = region.dims
                if count and (spec.name != "embed" or rank == 0):
                    box = Box(shard.box.here0 + region.there0, region.there0, (Dim(count, 1, 1),))
                    self.shards.append(msgspec.structs.replace(shard, box=box))


class Whole:
    """The weights of an engine in one process: a module."""

    def __init__(self) -> None:
        self._module = model(tied=False)

    def memory(self) -> Memory:
        return Memory.of(self._module)

    def loader(self) -> ModuleLoader:
        return ModuleLoader(self._module)

    def breaks(self, how: Any) -> bool:
        """Whether it fails of itself now."""
        return False

    def move(self) -> None:
        """Give a weight another storage."""
        self._module._parameters["z"] = torch.nn.Parameter(self._module.z.detach().clone(), requires_grad=False)


class Split:
    """The weights of an engine of several ranks; the last one's copy of embed stands for head."""

    def __init__(self, world: int) -> None:
        specs = ModuleSource(model(tied=True)).schema.tensors
        zeros = {spec.name: np.zeros(spec.numel, f"u{spec.width}") for spec in specs}
        self._ranks = [ToyRank(rank, world, split=halves) for rank in range(world)]
        for rank in self._ranks:
            rank.fill(specs, zeros)
        self._loader = Ranks(self._ranks)

    def memory(self) -> Memory:
        views = {
            name: [rank.memories[name][3:-2].view(np.uint8) for rank in self._ranks] for name in ("embed", "w", "z")
        }
        return Memory({"head": views["embed"][-1:], **views, "embed": views["embed"][:1]})

    def loader(self) -> Ranks:
        return self._loader

    def breaks(self, how: Any) -> bool:
        """Let one rank fail at the next frame that it writes, if it is told to; the others will have written."""
        if how.rank is None:
            return False
        rank = self._ranks[how.rank % len(self._ranks)]
        rank.fail_at, rank.undo_fails = rank.installs, how.and_then == "undo"
        return True

    def move(self) -> None:
        """Give a weight another storage."""
        memories = self._ranks[-1].memories
        memories["z"] = memories["z"].copy()
