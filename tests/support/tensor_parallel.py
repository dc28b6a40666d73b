"""A toy engine of several ranks for tests: it keeps checkpoint tensors as tensor-parallel engines do.

Written by index arrays, element by element, so that it shares nothing with the placements that dcr computes.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dcr.codecs.patch import Change
from dcr.engines import workers
from dcr.errors import ReadBackError, SchemaError, StateError
from dcr.kernels import reference
from dcr.layout.frames import Frame, Layout, Region
from dcr.layout.schema import Schema, TensorSpec, keys
from dcr.layout.views import Lanes, box_of
from dcr.memory.ready import Ready, Write
from support.refits import Weights, random_bits, set_bits

SPECS = (
    TensorSpec("a_rows", "bfloat16", (10, 6)),
    TensorSpec("b_columns", "bfloat16", (8, 12)),
    TensorSpec("c_heads", "bfloat16", (2, 9)),
    TensorSpec("d_norm", "bfloat16", (3, 5)),
    TensorSpec("e_expert", "bfloat16", (4, 4)),
    TensorSpec("f_rows", "float32", (1, 8)),
    TensorSpec("g_norm", "float32", (7,)),
)
SCHEMA = Schema(SPECS)
Split = Callable[[TensorSpec, int, int], list[Region]]


def split(spec: TensorSpec, rank: int, world: int) -> list[Region]:
    """What a rank holds of a tensor, by the ending of its name: rows, columns, key-value heads, or all of it."""
    shape = spec.shape
    if spec.name.endswith("rows"):
        low, high = rank * shape[0] // world, (rank + 1) * shape[0] // world
        return [Region(0, low * shape[1], ((high - low, shape[1]), (shape[1], 1)))] if high > low else []
    if spec.name.endswith("columns"):
        width = shape[1] // world
        return [Region(0, rank * width, ((shape[0], shape[1]), (width, 1)))]
    if spec.name.endswith("heads"):  # fewer heads than ranks: neighbours hold the same one
        heads = shape[0]
        return [Region(0, rank * heads // world * shape[1], ((shape[1], 1),))]
    if spec.name.endswith("expert"):
        return [Region(0, 0, ((spec.numel, 1),))] if rank == 1 else []
    dims = ((spec.numel, 1),) if rank % 2 else tuple((n, int(np.prod(shape[d + 1 :]))) for d, n in enumerate(shape))
    return [Region(0, 0, dims)]  # the whole, cut into dimensions one way or the other


def elements(region: Region) -> np.ndarray:
    """The canonical indices of a region, in its numbering."""
    return np.concatenate([np.arange(start, start + count) for start, count in region.runs()])


@dataclass(slots=True, eq=False)
class Held:
    """One part: its region, canonical indices, and where in memory each element lies."""

    region: Region
    there: np.ndarray
    here: np.ndarray
    memory: np.ndarray


class ToyRank:
    """One rank. Memory has a pad before, between and after parts, which nobody may touch.

    fail_at: the n-th frame that is installed fails after it was written; negative: none does. split: what a rank holds
    of a tensor.
    """

    def __init__(self, rank: int, world: int, *, seed: int = 0, split: Split = split) -> None:
        self.rank, self.world = rank, world
        self.split = split
        self.rng = np.random.default_rng((seed, rank))
        self.held: list[Held] = []
        self.memories: dict[str, np.ndarray] = {}
        self.fail_at = -1
        self.undo_fails = False
        self.installs = 0

    def fill(self, specs: Sequence[TensorSpec], weights: dict[str, np.ndarray]) -> None:
        """The engine's own loader."""
        for spec in specs:
            for region in self.split(spec, self.rank, self.world):
                count = len(elements(region))
                memory = self.rng.integers(0, 1 << 8 * spec.width, count + 5, f"u{spec.width}", endpoint=False)
                memory[3 : 3 + count] = weights[spec.name].reshape(-1)[elements(region)]
                self.memories[spec.name] = memory

    def bind(self, layout: Layout) -> ToyRank:
        """Bind it; it is its own weights."""
        self.layout = layout
        self.held = []
        for tensor, spec in enumerate(layout.schema.tensors):
            for region in self.split(spec, self.rank, self.world):
                if spec.name not in self.memories:
                    raise SchemaError(f"{spec.name} is published and has no place here")
                there = elements(region)
                held = Region(tensor, region.there0, region.dims)
                self.held.append(Held(held, there, 3 + np.arange(len(there)), self.memories[spec.name]))
        return self

    @property
    def parts(self) -> list[Region]:
        return [held.region for held in self.held]

    def fingerprint(self) -> bytes:
        return repr([memory.ctypes.data for memory in self.memories.values()]).encode()

    def prepare(self, frame: int, change: Change) -> Ready:
        tensor, there = self._canonical(frame)
        positions = np.arange(len(tensor), dtype=np.uint32) if change.positions is None else change.positions
        writes, old_sums, new_sums, parts = [], [], [], []
        for number, held in enumerate(self.held):
            if held.region.tensor not in self.layout.frames[frame].tensors:
                continue
            order = np.argsort(held.there)
            spot = np.searchsorted(held.there[order], there[positions]).clip(max=len(order) - 1)
            here = order[spot]
            mine = (tensor[positions] == held.region.tensor) & (held.there[here] == there[positions])
            at = held.here[here[mine]].astype(np.uint32)
            old = held.memory[at].copy()
            new = reference.resolve(change.values[mine], old, change.operation)
            differ = old != new if change.positions is None else slice(None)  # of what is whole, what has to be written
            writes.append(Write(number, at[differ], new[differ], old[differ]))
            parts.append(number)
            old_sums.append(self._sum(held.region.tensor, there[positions][mine], old))
            new_sums.append(self._sum(held.region.tensor, there[positions][mine], new))
        lanes = [np.array(sums, np.uint64).reshape(-1, 2) for sums in (old_sums, new_sums)]
        return Ready(frame, tuple(writes), *lanes, True, tuple(parts))

    def install(self, ready: Ready) -> None:
        for write in ready.writes:
            self.held[write.home].memory[write.positions] = write.bits
        self.installs += 1
        if self.installs == self.fail_at + 1:
            raise ReadBackError("a test says that memory did not keep its bits")

    def undo(self, ready: Ready) -> None:
        if self.undo_fails:
            self.undo_fails = False
            raise ReadBackError("a test says that the undo failed")
        for write in ready.writes:
            self.held[write.home].memory[write.positions] = write.old

    def finalize(self) -> None:
        """Nothing here is made of the weights."""

    def digest(self) -> Lanes:
        sums = [self._sum(h.region.tensor, h.there, h.memory[h.here]) for h in self.held]
        return np.array(sums, np.uint64).reshape(-1, 2)

    def raw(self) -> dict[str, bytes]:
        """All memory, pads included."""
        return {name: memory.tobytes() for name, memory in self.memories.items()}

    def _canonical(self, frame: int) -> tuple[np.ndarray, np.ndarray]:
        """Tensor and canonical index of each of a frame's elements."""
        bound = self.layout.frames[frame]
        tensors, theres = [], []
        for region in bound.spec.regions:
            theres.append(elements(region))
            tensors.append(np.full(len(theres[-1]), region.tensor))
        assert sum(box_of(row).numel for row in bound.rows) == sum(map(len, theres))
        return np.concatenate(tensors), np.concatenate(theres)

    def _sum(self, tensor: int, there: np.ndarray, bits: np.ndarray) -> np.ndarray:
        (key,) = keys(self.layout.schema.tensors[tensor : tensor + 1])
        return reference.mix(key, there.astype(np.uint64), bits.astype(np.uint64))


def in_threads(ranks: Sequence[ToyRank], folder: Path) -> list[workers.Worker]:
    """The same ranks, each behind a socket that a thread serves."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "ranks"))
        listener.listen()
        for rank in reversed(ranks):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(str(folder / "ranks"))
            told = {"key": b"key", "rank": rank.rank, "world": rank.world}
            threading.Thread(target=workers.serve, args=(connection, rank), kwargs=told, daemon=True).start()
        return workers.accept(listener, len(ranks), b"key", timeout_s=20)


def values(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {spec.name: random_bits(rng, spec.numel, spec.dtype) for spec in SPECS}


def dense(frame: Frame, weights: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([weights[SPECS[region.tensor].name][elements(region)] for region in frame.spec.regions])


def toys(world: int, weights: dict[str, np.ndarray]) -> list[ToyRank]:
    ranks = [ToyRank(rank, world) for rank in range(world)]
    for rank in ranks:
        rank.fill(SPECS, weights)
    return ranks


def parts(ranks: Sequence[ToyRank]) -> list[dict[str, bytes]]:
    return [{name: memory[3:-2].tobytes() for name, memory in rank.memories.items()} for rank in ranks]


def trainer_of(weights: dict[str, np.ndarray]) -> Weights:
    module = Weights({spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in SPECS})
    fill(module, weights)
    return module


def fill(module: Weights, weights: dict[str, np.ndarray]) -> None:
    for name, tensor in module.state_dict().items():
        set_bits(tensor, np.arange(tensor.numel()), weights[name])


def touched(weights: dict[str, np.ndarray], seed: int, *, every: int = 5) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    new = {name: array.copy() for name, array in weights.items()}
    for array in new.values():
        at = rng.integers(0, len(array), max(1, len(array) // every))
        array[at] ^= rng.integers(1, 1 << 16, len(at)).astype(array.dtype)
    return new


class WatchedRank(ToyRank):
    """A rank that sees how often others have written it, and whether it sleeps."""

    writes = 0
    sleeps = False
    scans = 0

    def mark(self) -> bytes:
        return str(self.writes).encode()

    def require_awake(self) -> None:
        if self.sleeps:
            raise StateError("the engine sleeps; wake it up")

    def digest(self) -> np.ndarray:
        self.scans += 1
        return super().digest()
