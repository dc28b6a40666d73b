"""Kernels and codecs: speed as a share of memcpy, and payload beside the entropy of the change.

What is measured is what a publisher and a member run: `Construct.patch` and `Compress.encode` (compare, digest, steps,
codec, digest of the body), then `decode` and `Placement.prepare` (gather of old bits, absolute bits, digests), then
`Placement.install` (scatter and read back: the pause). Rivals in plain torch and numpy are in rivals.py, workloads and
their seeds in workloads.py, entropies in limits.py.

    python benchmarks/codec.py [--workload NAME ...] [--density D ...] [--part PART ...] [--threads N ...]
        [--rounds 9] [--scale 1] [--cache DIR] [--json FILE] [--plot FILE.svg]

Prints a table with the targets that are set for `llm`; --json writes rows {metric, workload, density, variant, threads,
value, unit}. Each ratio is taken within a round; a value is the median over rounds. A share of memcpy is the time of a
memcpy of the weights over the time of the work; times are the processor's with one thread, the clock's with more.

Bytes moved and rooflines, for N weights of 2 bytes, K of them changed: memcpy reads 2 N and writes 2 N. Compare reads
4 N and writes 6 K; `read_share_of_memcpy` is what merely reading those 4 N takes here, measured in the same rounds with
numpy: the roofline of compare and, with the codec's own work added, of encode. Prepare reads 6 K, a cache line (64
bytes) per line that holds a change, and writes 8 K; install reads 6 K, and reads and writes such a line.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import limits
import msgspec
import numpy as np
import rivals
import torch
import workloads
from workloads import Words, Workload

from dcr import _native, kernels, plugins
from dcr.codecs.patch import Operation
from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import Layout, Shard, plan
from dcr.layout.schema import Schema, TensorSpec
from dcr.layout.views import Bits
from dcr.memory.baseline import Baseline
from dcr.memory.placement import Place, Placement
from dcr.memory.ready import Ready
from dcr.pipeline.budget import ByteBudget
from dcr.protocol.wire import Chunk, Identity
from dcr.seams import Codec
from dcr.stages.compress import Compress, decode
from dcr.stages.construct import Construct, source_table

T = TypeVar("T")
Seconds = dict[str, float]
STEP = Identity("benchmark", 1, 2, 1)
VARIANTS = ("fast", "balanced", "small")
PARTS = ("payload", "compare", "encode", "rivals", "apply", "fp32", "strided")
COLUMNS = 2048  # of the row-parallel slice

# (metric, variant) -> per density the target on `llm`; most are floors, CEILINGS are not.
TARGETS: dict[tuple[str, str, int], dict[float, float]] = {
    (metric, variant, threads): dict(zip(densities, values, strict=True))
    for metric, variant, threads, densities, values in [
        ("compare_share_of_memcpy", "", 1, workloads.DENSITIES, (0.70, 0.70, 0.62, 0.60)),
        ("encode_share_of_memcpy", "balanced", 1, workloads.DENSITIES, (0.50, 0.46, 0.35, 0.30)),
        ("bytes_per_change", "balanced", 1, workloads.DENSITIES, (1.53, 1.30, 1.11, 1.03)),
        ("bytes_per_change", "small", 1, workloads.DENSITIES, (1.20, 1.00, 0.90, 0.84)),
        ("bytes_over_limit", "small", 1, workloads.DENSITIES, (1.20, 1.15, 1.15, 1.15)),
        ("encode_speedup_vs_gap16_xor_zstd", "balanced", 1, workloads.DENSITIES, (8, 8, 8, 8)),
        ("prepare_vs_index_put", "balanced", 1, workloads.DENSITIES, (1.1, 1.1, 1.5, 1.75)),
        ("install_vs_index_put", "balanced", 1, workloads.DENSITIES, (0.85, 0.85, 0.95, 1.1)),
        ("scaling_vs_memcpy", "balanced", 2, workloads.DENSITIES, (0.85, 0.85, 0.85, 0.85)),
        ("fp32_compare_share_of_memcpy", "", 1, workloads.DENSITIES, (1.1, 1.1, 1.1, 1.1)),
        ("strided_over_contiguous", "apply", 1, (0.01, 0.03), (1.75, 1.75)),
    ]
}
CEILINGS = {
    "bytes_per_change",
    "bytes_over_limit",
    "prepare_vs_index_put",
    "install_vs_index_put",
    "strided_over_contiguous",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One number of the table."""

    metric: str
    workload: str
    density: float
    variant: str
    threads: int
    value: float
    unit: str


class Ends:
    """A trainer and an engine of one model, both at the old weights.

    rows_apart: elements from one row of an engine's storage to the next, for tensors of COLUMNS columns.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], old: Sequence[Words], rows_apart: int | None = None) -> None:
        self.schema = Schema(tuple(TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items()))
        boxes = [Box(0, 0, (Dim(len(one), 1, 1),)) for one in old]
        self.plan = plan(self.schema, [Shard(index, index, box) for index, box in enumerate(boxes)])
        self.layout = Layout(self.schema, tuple(one.spec for one in self.plan))
        self.baseline = Baseline(self.layout)
        frames = [kernels.read(source_table(one, old)) for one in self.plan]
        self.baseline.adopt(dict(enumerate(frames)), STEP, self.baseline.lanes)
        self.engine: list[Words] = [one.copy() for one in old]
        if rows_apart:
            wide = [np.zeros((len(one) // COLUMNS, rows_apart), np.uint16) for one in old]
            for storage, one in zip(wide, old, strict=True):
                storage[:, :COLUMNS] = one.reshape(-1, COLUMNS)
            self.engine = [storage.reshape(-1) for storage in wide]
            rows = [Dim(len(one) // COLUMNS, rows_apart, COLUMNS) for one in old]
            boxes = [Box(0, 0, (row, Dim(COLUMNS, 1, 1))) for row in rows]
        places = [Place(index, index, box) for index, box in enumerate(boxes)]
        self.placement = Placement(self.layout, self.engine, places)

    @property
    def frames(self) -> range:
        return range(len(self.plan))

    def compare(self, now: Sequence[Bits], frame: int, kind: int = kernels.NONE) -> None:
        """Compare and compact one frame."""
        base = self.baseline.base(frame)
        assert base is not None
        kernels.compare(source_table(self.plan[frame], now), base, kind)

    def encoder(self, now: Sequence[Bits], codec: Codec) -> Callable[[int], tuple[Chunk, bytes] | None]:
        """What makes a chunk of one frame."""
        construct = Construct(self.baseline, self.plan, now)
        compress = Compress(STEP, codec, Operation.STEP, ByteBudget(1 << 30), reads_base=True)

        def encode(frame: int) -> tuple[Chunk, bytes] | None:
            patch = construct.patch(frame)
            return None if patch is None else compress.encode(patch)

        return encode

    def prepare(self, codec: Codec, message: tuple[Chunk, bytes]) -> Ready:
        """Decode and prepare one frame."""
        chunk, body = message
        unpacked = decode(chunk, body, self.layout, lambda _: codec, self.placement.read)
        return self.placement.prepare(chunk.frame, unpacked.change)


class Workers:
    """Runs a function over items, on so many threads; remembers how long each kind of work took in a round."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._pool = ThreadPoolExecutor(threads)

    def time(self, name: str, work: Callable[[Any], T], items: Iterable[Any]) -> list[T]:
        """The results, in order."""
        before_s = self.now_s()
        found = [work(item) for item in items] if self.threads == 1 else list(self._pool.map(work, items))
        self.seconds[name].append(self.now_s() - before_s)
        return found

    def now_s(self) -> float:
        """With one thread the processor's time, so that what else runs on the machine counts less; else the clock's."""
        return time.thread_time() if self.threads == 1 else time.perf_counter()

    def take(self) -> Seconds:
        """Seconds of this round per name, the mean where something was measured more than once."""
        taken = {name: statistics.mean(values) for name, values in self.seconds.items()}
        self.seconds.clear()
        return taken


class Bench:
    """One workload at one density; a round measures everything that was asked for, once.

    wants: whether one of PARTS is to be measured.
    """

    def __init__(self, workload: Workload, density: float, ends: Ends, wants: Callable[[str], bool]) -> None:
        self.workload, self.density, self.ends, self.wants = workload, density, ends, wants
        self.old, self.new = workload.old, workload.new[density]
        self.changed = workload.changed(density)
        self.codecs = {name: plugins.load("dcr.codecs", name) for name in VARIANTS if has_codec(name)}
        self.messages = {
            name: [made for frame in ends.frames if (made := ends.encoder(self.new, codec)(frame))]
            for name, codec in self.codecs.items()
        }
        self._copy = np.zeros(max(map(len, self.old)), np.uint16)
        self._changes = [
            (torch.from_numpy(np.flatnonzero(a != b)), torch.from_numpy(b[a != b].view(np.int16)))
            for a, b in zip(self.old, self.new, strict=True)
        ]

    # ------------------------------------------------------------------ payload

    def payload(self) -> Iterator[Row]:
        """Sizes; nothing is timed."""
        without = limits.bytes_without(self.old, self.new)
        given_old = limits.bytes_given_old(self.old, self.new)
        yield self._row("changed_share", "", 1, self.changed / self.workload.numel, "1")
        yield self._row("bytes_per_change", "limit", 1, without / self.changed, "B")
        yield self._row("bytes_per_change", "limit given old", 1, given_old / self.changed, "B")
        sizes = {name: sum(len(body) for _, body in made) for name, made in self.messages.items()}
        sizes |= {
            name: sum(len(encode(a, b)) for a, b in zip(self.old, self.new, strict=True))
            for name, encode in rivals.ENCODERS.items()
        }
        for name, size in sizes.items():
            yield self._row("bytes_per_change", name, 1, size / self.changed, "B")
            yield self._row("percent_of_dense", name, 1, 100 * size / self.workload.nbytes, "%")
            yield self._row("bytes_over_limit", name, 1, size / given_old, "1")

    # ------------------------------------------------------------------ speed

    def round(self, workers: Workers) -> Seconds:
        """Seconds of each kind of work."""
        self._memcpy(workers)
        if self.wants("compare"):
            workers.time("read", np.max, [part.view(np.uint64) for part in parts([*self.old, *self.new], workers)])
            workers.time("compare", partial(self.ends.compare, self.new), self.ends.frames)
        if self.wants("encode"):
            for name, codec in self.codecs.items():
                workers.time(f"encode {name}", self.ends.encoder(self.new, codec), self.ends.frames)
        self._memcpy(workers)
        if self.wants("rivals") and workers.threads == 1:
            pairs = list(zip(self.old, self.new, strict=True))
            for name, encode in rivals.ENCODERS.items():
                workers.time(f"encode {name}", lambda pair, encode=encode: encode(*pair), pairs)
        if self.wants("apply"):
            self._apply(workers)
        self._memcpy(workers)
        return workers.take()

    def _memcpy(self, workers: Workers) -> None:
        workers.time("memcpy", lambda part: np.copyto(self._copy[: len(part)], part), parts(self.new, workers))

    def _apply(self, workers: Workers) -> None:
        placement = self.ends.placement
        for name, codec in self.codecs.items():
            readies = workers.time(f"prepare {name}", partial(self.ends.prepare, codec), self.messages[name])
            if name == "balanced":
                workers.time("install", placement.install, readies)
                for ready in readies:
                    placement.undo(ready)
        torch.set_num_threads(workers.threads)
        for name, apply in rivals.APPLIERS.items():
            targets = [torch.from_numpy(one.view(np.int16)) for one in self.ends.engine]
            before_s = workers.now_s()
            for target, (index, values) in zip(targets, self._changes, strict=True):
                apply(target, index, values)
            workers.seconds[name].append(workers.now_s() - before_s)
            for target, old, (index, _) in zip(targets, self.old, self._changes, strict=True):
                target[index] = torch.from_numpy(old.view(np.int16))[index]
        torch.set_num_threads(1)

    def speed(self, rounds: Sequence[Seconds], threads: int) -> Iterator[Row]:
        """Ratios within rounds, medians over them."""
        row, per_change = partial(self._median, rounds, threads), 1e9 / self.changed
        yield row("memcpy_rate", "", lambda s: self.workload.nbytes / s["memcpy"] / 1e9, "GB/s")
        yield row("read_share_of_memcpy", "", lambda s: s["memcpy"] / s["read"], "1")
        yield row("compare_share_of_memcpy", "", lambda s: s["memcpy"] / s["compare"], "1")
        for name in [*self.codecs, *rivals.ENCODERS]:
            yield row("encode_share_of_memcpy", name, lambda s, name=name: s["memcpy"] / s[f"encode {name}"], "1")
            yield row(
                "encode_speedup_vs_gap16_xor_zstd",
                name,
                lambda s, name=name: s["encode gap16-xor-zstd"] / s[f"encode {name}"],
                "1",
            )
            yield row("prepare_per_change", name, lambda s, name=name: s[f"prepare {name}"] * per_change, "ns")
            yield row("prepare_vs_index_put", name, lambda s, name=name: s[f"prepare {name}"] / s["index_put"], "1")
        yield row("install_per_change", "balanced", lambda s: s["install"] * per_change, "ns")
        yield row("install_vs_index_put", "balanced", lambda s: s["install"] / s["index_put"], "1")
        for name in rivals.APPLIERS:
            yield row("install_per_change", name, lambda s, name=name: s[name] * per_change, "ns")

    def scaling(self, one: Sequence[Seconds], two: Sequence[Seconds]) -> Iterator[Row]:
        """How much faster two threads are, over how much faster memcpy is with two."""
        pairs = [{"one": a, "two": b} for a, b in zip(one, two, strict=True)]
        kinds = {"": "compare", **{name: f"encode {name}" for name in self.codecs}}
        for variant, work in kinds.items():
            yield self._median(
                pairs,
                2,
                "scaling_vs_memcpy",
                variant or "compare",
                lambda p, work=work: p["one"][work] / p["two"][work] / (p["one"]["memcpy"] / p["two"]["memcpy"]),
                "1",
            )

    def _median(
        self, rounds: Sequence[Any], threads: int, metric: str, variant: str, ratio: Callable[[Any], float], unit: str
    ) -> Row:
        try:
            value = statistics.median(ratio(seconds) for seconds in rounds)
        except KeyError:  # not asked for
            value = float("nan")
        return self._row(metric, variant, threads, value, unit)

    def _row(self, metric: str, variant: str, threads: int, value: float, unit: str) -> Row:
        return Row(metric, self.workload.name, self.density, variant, threads, value, unit)


def fp32(bench: Bench, rounds: int) -> Iterator[Row]:
    """Masters in fp32 against a bf16 baseline: 6 bytes read per element, where memcpy reads 2."""
    rng = np.random.default_rng(0)
    masters = [near(words, rng) for words in bench.new]
    workers, ratios = Workers(1), []
    for _ in range(rounds):
        bench._memcpy(workers)
        workers.time("compare", partial(bench.ends.compare, masters, kind=kernels.F32_BF16), bench.ends.frames)
        bench._memcpy(workers)
        taken = workers.take()
        ratios.append(3 * taken["memcpy"] / taken["compare"])
    yield bench._row("fp32_compare_share_of_memcpy", "", 1, statistics.median(ratios), "1")


def strided(bench: Bench, rounds: int) -> Iterator[Row]:
    """A row-parallel slice, COLUMNS of twice as many per row, beside as many elements in one run."""
    rows = [len(one) // COLUMNS * COLUMNS for one in bench.old]
    old = [one[:size] for one, size in zip(bench.old, rows, strict=True) if size]
    new = [one[:size] for one, size in zip(bench.new, rows, strict=True) if size]
    shapes = {str(index): (len(one) // COLUMNS, COLUMNS) for index, one in enumerate(old)}
    kinds = {"contiguous": Ends(shapes, old), "strided": Ends(shapes, old, rows_apart=2 * COLUMNS)}
    codec = plugins.load("dcr.codecs", "balanced")
    encode = kinds["contiguous"].encoder(new, codec)
    messages = [made for frame in kinds["contiguous"].frames if (made := encode(frame))]
    workers, taken = Workers(1), []
    for _ in range(rounds):
        for kind, ends in kinds.items():
            readies = workers.time(f"prepare {kind}", partial(ends.prepare, codec), messages)
            workers.time(f"install {kind}", ends.placement.install, readies)
            for ready in readies:
                ends.placement.undo(ready)
        taken.append(workers.take())
    for seconds in taken:
        for kind in kinds:
            seconds[f"apply {kind}"] = seconds[f"prepare {kind}"] + seconds[f"install {kind}"]
    for work in ("prepare", "install", "apply"):
        value = statistics.median(seconds[f"{work} strided"] / seconds[f"{work} contiguous"] for seconds in taken)
        yield bench._row("strided_over_contiguous", work, 1, value, "1")


def near(bits: Words, rng: np.random.Generator) -> Bits:
    """fp32 values that round to these bf16 bits."""
    wide = bits.astype(np.uint32) << np.uint32(16)
    wide += np.resize(rng.integers(0, 0x7FFF, 1 << 20, np.uint32), len(bits))
    return wide


def parts(arrays: Sequence[Words], workers: Workers) -> list[Words]:
    """The arrays, cut so that threads have equally much to do; whole words of 8 bytes, but for a few elements."""
    cut = [part for one in arrays for part in np.array_split(one[: len(one) // 8 * 8].reshape(-1, 4), workers.threads)]
    return [part.reshape(-1) for part in cut]


def has_codec(name: str) -> bool:
    """Whether a variant is installed."""
    return name in {plugin.name for plugin in plugins.installed("dcr.codecs")}


# ---------------------------------------------------------------------- all of it


def measure(workload: Workload, asked: argparse.Namespace) -> Iterator[Row]:
    """All rows of one workload."""
    wants: Callable[[str], bool] = asked.part.__contains__
    ends = Ends(workload.shapes, workload.old)
    for density in asked.density:
        bench = Bench(workload, density, ends, wants)
        if wants("payload"):
            yield from bench.payload()
        teams = {threads: Workers(threads) for threads in asked.threads}
        taken: dict[int, list[Seconds]] = defaultdict(list)
        for _ in range(asked.rounds):
            for threads, workers in teams.items():
                taken[threads].append(bench.round(workers))
        for threads, rounds in taken.items():
            yield from bench.speed(rounds, threads)
        if {1, 2} <= set(taken):
            yield from bench.scaling(taken[1], taken[2])
        if workload.name == "llm" and wants("fp32"):
            yield from fp32(bench, asked.rounds)
        if workload.name == "llm" and wants("strided") and density in (0.01, 0.03):
            yield from strided(bench, asked.rounds)


def verdict(row: Row) -> str:
    """The target beside a value, and whether it is met."""
    target = TARGETS.get((row.metric, row.variant, row.threads), {}).get(row.density) if row.workload == "llm" else None
    if target is None:
        return ""
    met = row.value <= target if row.metric in CEILINGS else row.value >= target
    return f"{'<=' if row.metric in CEILINGS else '>='}{target:g} {'met' if met else 'SHORT'}"


def table(rows: Sequence[Row], densities: Sequence[float]) -> str:
    """Lines of metric, variant and threads; a column per density."""
    lines: dict[tuple[str, str, str, int], dict[float, Row]] = defaultdict(dict)
    for row in rows:
        if row.value == row.value:
            lines[row.workload, row.metric, row.variant, row.threads][row.density] = row
    out: list[str] = []
    for name in dict.fromkeys(workload for workload, *_ in lines):
        labels = [f"{100 * density:g} %" for density in densities]
        out.append(f"\n{'metric':<34}{'variant':<16}{'threads':<8}" + "".join(f"{label:<20}" for label in labels))
        for (workload, metric, variant, threads), cells in lines.items():
            if workload == name:
                found = [cells.get(density) for density in densities]
                texts = [f"{cell.value:.4g} {verdict(cell)}" if cell else "" for cell in found]
                unit = next(cell.unit for cell in found if cell).replace("1", "")
                out.append(f"{metric:<34}{variant:<16}{threads:<2}{unit:<6}" + "".join(f"{text:<20}" for text in texts))
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=workloads.BUILDERS, default=list(workloads.BUILDERS))
    parser.add_argument("--density", nargs="+", type=float, default=list(workloads.DENSITIES))
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--scale", type=float, default=1.0, help="of the workloads' rows; 1 makes 503 MB of llm")
    parser.add_argument("--cache", type=Path, help="keep the workloads in this directory")
    parser.add_argument("--level", help="the kernels' instruction set: avx512, avx2 or portable")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="payload and rate over density, as SVG")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.level:
        _native.use_level(asked.level)
    print(", ".join(f"{key} {value}" for key, value in kernels.describe().items()))
    rows: list[Row] = []
    for name in asked.workload:
        workload = workloads.build(name, asked.density, asked.scale, asked.cache)
        found = list(measure(workload, asked))
        print(f"\n{name}: {workload.numel / 1e6:.1f} M weights, {workload.nbytes / 1e6:.0f} MB", end="")
        print(table(found, asked.density), flush=True)
        rows += found
    if asked.json:
        asked.json.write_bytes(msgspec.json.encode([row for row in rows if row.value == row.value]))
    if asked.plot:
        import plots

        asked.plot.write_text(plots.draw(rows))


if __name__ == "__main__":
    main()
