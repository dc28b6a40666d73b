"""Apply: what a refit costs an engine, beside the two ways in which engines take weights today.

    refit        prepare (beside generation) and install (the pause), of changes that are decoded already
    masked       one dense scratch tensor for each changed one, NaN where nothing changed, pushed through the engine's
                 loader: what vLLM's `load_checkpoint_weight_patches` does with its defaults, restated here
    dense        the whole checkpoint from local memory: `load_state_dict`

The engine fuses q, k, v and gate, up as vLLM does, and its own loader has been recorded. Each round times all of them
on the same change; ratios are taken within a round, and the table shows medians. With --json FILE writes rows {metric,
workload, density, variant, threads, value, unit}.

The path that users take is measured besides: members of several ranks behind sockets (benchmarks/members.py), and, with
--vllm CHECKPOINT, real vLLM engines (benchmarks/engines.py); both also run by themselves.

    python benchmarks/apply.py [--mib 1024] [--rounds 9] [--experts 20000] [--members 300 600 ...] [--vllm CHECKPOINT]
                               [--json FILE]

Bytes moved, for K changed elements of b bytes in N: refit reads a cache line and 4 + b bytes and writes a line for each
change, twice (old bits, then the scatter); masked writes and reads N b several times over; dense reads and writes N b.
The roofline of a dense load is memcpy; below a change in every line, refit is bound by cache misses.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import members
import msgspec
import numpy as np
import torch

from dcr.codecs.patch import Change, Operation
from dcr.layout import frames
from dcr.layout.boxes import whole
from dcr.layout.frames import Layout, Shard
from dcr.layout.schema import Schema, TensorSpec
from dcr.loaders.module import ModuleLoader
from dcr.loaders.native import NativeLoader
from dcr.memory.ready import Ready

HIDDEN, INNER, HEADS = 2048, 5504, 512  # of a layer: model width, feed-forward width, width of keys and values
STACKED = {
    "q": ("qkv", 0),
    "k": ("qkv", HIDDEN),
    "v": ("qkv", HIDDEN + HEADS),
    "gate": ("gate_up", 0),
    "up": ("gate_up", INNER),
}
SHAPES = {
    "q": (HIDDEN, HIDDEN),
    "k": (HEADS, HIDDEN),
    "v": (HEADS, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "norm": (HIDDEN,),
}
DENSITIES = (0.003, 0.01, 0.03)


def parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)


class Layer(torch.nn.Module):
    """One decoder layer's weights, fused."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.gate_up = parameter(HIDDEN + 2 * HEADS, HIDDEN), parameter(2 * INNER, HIDDEN)
        self.o, self.down, self.norm = parameter(HIDDEN, HIDDEN), parameter(HIDDEN, INNER), parameter(HIDDEN)


class Model(torch.nn.Module):
    """Layers, and a loader of checkpoint tensors as vLLM's are."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer() for _ in range(layers)])

    def load_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            _, layer, part = name.split(".")
            target, first = STACKED.get(part, (part, 0))
            held = self.layers[int(layer)].get_parameter(target).data
            held.narrow(0, first, len(tensor)).copy_(tensor)
        return {name for name, _ in weights}


class Engine:
    """See `dcr.loaders.engine.Adapter`."""

    replaces = False

    def __init__(self, layers: int) -> None:
        self.module = Model(layers)

    def load(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.module.load_weights(pairs)

    def settle(self, modules: Set[str]) -> None:
        """Nothing is made of weights here."""

    def fingerprint(self) -> bytes:
        return b"benchmark"


def layout_of(specs: Sequence[TensorSpec]) -> Layout:
    schema = Schema(tuple(specs))
    strides = [torch.empty(spec.shape, device="meta").stride() for spec in specs]
    shards = [
        Shard(t, t, whole(spec.shape, stride)) for t, (spec, stride) in enumerate(zip(specs, strides, strict=True))
    ]
    return Layout(schema, tuple(one.spec for one in frames.plan(schema, shards)))


Changes = list[tuple[int, Change]]


def changes_of(layout: Layout, density: float, seed: int) -> Changes:
    """A step of one unit in the last place at random elements of every frame."""
    rng = np.random.default_rng(seed)
    found: Changes = []
    for frame in layout.frames:
        gaps = rng.integers(1, int(2 / density), int(frame.numel * density) + 1)
        positions = np.cumsum(gaps)
        positions = positions[positions < frame.numel].astype(np.uint32)
        values = rng.choice(np.array([1, 0xFFFF], np.uint16), len(positions))
        found.append((frame.index, Change(Operation.STEP, positions, values)))
    return found


Patch = tuple[str, tuple[int, ...], torch.Tensor, torch.Tensor]


def patches_of(layout: Layout, readies: Sequence[Ready]) -> list[Patch]:
    """The same change as (name, shape, values, indices), one of each tensor."""
    parts: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for ready in readies:
        write, first = ready.writes[0], 0
        for region in layout.frames[ready.frame].spec.regions:
            for start, length in region.runs().tolist():
                low, high = np.searchsorted(write.positions, [first, first + length])
                index = write.positions[low:high].astype(np.int64) - first + start
                parts.setdefault(region.tensor, []).append((index, write.bits[low:high]))
                first += length
    found = []
    for tensor, pieces in parts.items():
        spec = layout.schema.tensors[tensor]
        index, bits = (np.concatenate(column) for column in zip(*pieces, strict=True))
        values = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        found.append((spec.name, spec.shape, values, torch.from_numpy(index)))
    return found


def load_masked(model: Model, patches: Sequence[Patch], chunk_bytes: int = 512 << 20) -> None:
    """vLLM 0.33's `load_checkpoint_weight_patches`: its checks, its scratch tensors, its masked copy, its chunks."""
    checks = []
    for _, shape, values, indices in patches:
        ordered = torch.sort(indices).values
        outside = torch.logical_or(indices < 0, indices >= int(np.prod(shape))).any()
        checks += [torch.isnan(values).any(), outside, (ordered[1:] == ordered[:-1]).any()]
    if torch.stack(checks).any().item():
        raise ValueError("the patches hold NaN, leave their tensors, or name an element twice")
    chunk: list[tuple[str, torch.Tensor]] = []
    held_bytes = 0
    for name, shape, values, indices in patches:
        numel = int(np.prod(shape))
        if chunk and held_bytes + 2 * numel > chunk_bytes:
            _load_where_not_nan(model, chunk)
            chunk, held_bytes = [], 0
        flat = torch.full((numel,), float("nan"), dtype=values.dtype)
        flat.index_copy_(0, indices, values)
        chunk.append((name, flat.view(shape)))
        held_bytes += 2 * numel
    _load_where_not_nan(model, chunk)


def _load_where_not_nan(model: Model, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
    plain = torch.Tensor.copy_

    def copy_where(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # noqa: ARG001
        return torch.where(torch.isnan(source), destination, source, out=destination)

    torch.Tensor.copy_ = copy_where  # type: ignore[assignment, method-assign]
    try:
        model.load_weights(weights)
    finally:
        torch.Tensor.copy_ = plain  # type: ignore[method-assign]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of processor time (what else runs on the machine does not count), and the result."""
    before_s = time.process_time()
    result = work()
    return time.process_time() - before_s, result


def install(loader: Any, weights: Any, readies: Sequence[Ready]) -> None:
    for ready in readies:
        weights.install(ready)
    loader.finalize()


def undo(loader: Any, weights: Any, readies: Sequence[Ready]) -> None:
    for ready in reversed(readies):
        weights.undo(ready)
    loader.finalize()


def bits_of(model: torch.nn.Module) -> Iterator[np.ndarray]:
    for tensor in model.parameters():
        yield tensor.data.view(torch.int16).numpy()


class Bench:
    """An engine of so many MiB, recorded, and a dense copy of its weights."""

    def __init__(self, mib: int) -> None:
        layer_bytes = 2 * sum(int(np.prod(shape)) for shape in SHAPES.values())
        layers = max(1, -(-(mib << 20) // layer_bytes))
        self.engine = Engine(layers)
        self.nbytes = layers * layer_bytes
        specs = [
            TensorSpec(f"layers.{layer}.{part}", "bfloat16", shape)
            for layer in range(layers)
            for part, shape in SHAPES.items()
        ]
        rng = np.random.default_rng(0)
        noise = torch.from_numpy(rng.normal(0, 0.02, 1 << 20).astype(np.float32)).to(torch.bfloat16)
        for tensor in self.engine.module.parameters():
            flat = tensor.data.view(-1)
            flat.copy_(noise.repeat(-(-len(flat) // len(noise)))[: len(flat)])
        self.state = {name: tensor.clone() for name, tensor in self.engine.module.state_dict().items()}
        self.layout = layout_of(specs)
        self.loader = NativeLoader(self.engine)
        self.bind_s, self.weights = timed(lambda: self.loader.bind(self.layout))

    def round(self, density: float, seed: int) -> dict[str, float]:
        """Seconds of each way to bring one change in; the engine holds the same weights before and after."""
        changes = changes_of(self.layout, density, seed)
        prepare_s, readies = timed(lambda: [self.weights.prepare(*one) for one in changes])
        install_s, _ = timed(lambda: install(self.loader, self.weights, readies))
        undo(self.loader, self.weights, readies)
        patches = patches_of(self.layout, readies)
        masked_s, _ = (
            timed(lambda: load_masked(self.engine.module, patches)) if density <= 0.01 else (float("nan"), None)
        )
        dense_s, _ = timed(lambda: self.engine.module.load_state_dict(self.state))
        changed = sum(len(change.values) for _, change in changes)
        return {
            "prepare_s": prepare_s,
            "install_s": install_s,
            "refit_speedup_vs_masked_scratch": masked_s / (prepare_s + install_s),
            "install_speedup_vs_dense_load": dense_s / install_s,
            "refit_speedup_vs_dense_load": dense_s / (prepare_s + install_s),
            "pause_s_per_gb": install_s / self.nbytes * 1e9,
            "refit_ns_per_changed_element": (prepare_s + install_s) / changed * 1e9,
        }

    def require_same_result(self) -> None:
        """All three ways leave the same bits, or the comparison means nothing."""
        changes = changes_of(self.layout, 0.01, 99)
        readies = [self.weights.prepare(*one) for one in changes]
        install(self.loader, self.weights, readies)
        ours = [tensor.copy() for tensor in bits_of(self.engine.module)]
        undo(self.loader, self.weights, readies)
        load_masked(self.engine.module, patches_of(self.layout, readies))
        theirs = list(bits_of(self.engine.module))
        if not all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True)):
            raise RuntimeError("a refit and the masked load leave different weights")
        self.engine.module.load_state_dict(self.state)


def experts(count: int, rounds: int) -> dict[str, float]:
    """Many tiny tensors: seconds to bind them, and for a refit of 1 %."""
    model = torch.nn.Module()
    for number in range(count):
        model.register_parameter(f"w{number}", parameter(32, 64))
    layout = layout_of([TensorSpec(f"w{number}", "bfloat16", (32, 64)) for number in range(count)])
    loader = ModuleLoader(model)
    bind_s, weights = timed(lambda: loader.bind(layout))
    found = []
    for number in range(rounds):
        changes = changes_of(layout, 0.01, number)
        prepare_s, readies = timed(lambda changes=changes: [weights.prepare(*one) for one in changes])  # type: ignore[misc]
        found.append(prepare_s + timed(lambda readies=readies: install(loader, weights, readies))[0])  # type: ignore[misc]
    return {"tiny_tensors_bind_s": bind_s, "tiny_tensors_refit_s": statistics.median(found)}


def crossover(speedups: dict[float, float]) -> float:
    """The density at which a refit costs what a dense load does, by interpolation in logarithms; NaN if beyond."""
    pairs = sorted(speedups.items())
    for (low, fast), (high, slow) in itertools.pairwise(pairs):
        if fast >= 1 > slow:
            share = np.log(fast) / (np.log(fast) - np.log(slow))
            return float(np.exp(np.log(low) + share * (np.log(high) - np.log(low))))
    return float("nan")


def unit_of(metric: str) -> str:
    return "ns" if "_ns_" in metric else "s/GB" if metric.endswith("per_gb") else "s" if metric.endswith("_s") else "1"


def shown(metric: str, density: float | None, value: float) -> dict[str, Any]:
    """One row, printed at once."""
    where = "" if density is None else f"{density:.2%}"
    print(f"{metric:<36} {where:>8} {value:>12.4f} {unit_of(metric)}", flush=True)
    return {"metric": metric, "density": density, "value": value, "unit": unit_of(metric)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the model in MiB of bf16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--experts", type=int, default=20_000, help="how many tiny tensors")
    parser.add_argument("--members", type=int, nargs="*", default=members.SIZES, help="tensors of members, or none")
    parser.add_argument("--vllm", type=Path, help="a checkpoint of an engine, where vLLM is installed")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(asked.mib)
    bench.require_same_result()
    gc.disable()
    print(f"{bench.nbytes / 1e9:.2f} GB of bf16, one thread, medians of {asked.rounds} rounds")
    rows = [shown("bind_and_record_s", None, bench.bind_s)]
    speedups: dict[float, float] = {}
    for density in DENSITIES:
        found = [bench.round(density, seed) for seed in range(asked.rounds)]
        medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
        speedups[density] = medians["refit_speedup_vs_dense_load"]
        rows += [shown(metric, density, value) for metric, value in medians.items() if value == value]
    rows.append(shown("crossover_density", None, crossover(speedups)))
    del bench
    gc.collect()
    rows += [shown(metric, 0.01, value) for metric, value in experts(asked.experts, asked.rounds).items()]
    rows = [row | {"workload": "uniform-ulp", "variant": "fused", "threads": 1} for row in rows]
    gc.enable()
    rows += members.rows_of(asked.members, members.WORLDS, asked.rounds)
    if asked.vllm:
        import engines

        rows += engines.rows_of(asked.vllm, engines.LAYERS, asked.rounds)
    if asked.json:
        asked.json.write_bytes(msgspec.json.encode(rows))


if __name__ == "__main__":
    main()
