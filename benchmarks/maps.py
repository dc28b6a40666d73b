"""Making a source for many small tensors: seconds, and seconds per tensor, at growing numbers of them.

    probe     an exporter that splits each tensor in two; maps found in digits, certified twice
    dtensor   DTensors on a mesh of one rank; certified once per layout
    zero      flat partitions

    python benchmarks/maps.py [--tensors 5000 10000 20000] [--rounds 3] [--json FILE]

One thread of one process; a value is the median over rounds of processor time, and `linear` the time per tensor at
the greatest number over that at the smallest (1 is linear). --json writes rows {metric, workload, density, variant,
threads, value, unit}. Few bytes move: the cost is Python's, per tensor.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcr.sources import dtensor, probe, zero
from dcr.sources.zero import Partition

ROWS, COLS = 16, 16


def small(count: int, rows: int) -> dict[str, torch.Tensor]:
    return {f"experts.{i}.fc1": torch.zeros(rows, COLS, dtype=torch.bfloat16) for i in range(count)}


def probed(count: int) -> Callable[[], object]:
    tensors = small(count // 2, 2 * ROWS)

    def export(given: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in given.items():
            yield from zip((name + ".gate", name + ".up"), tensor.chunk(2), strict=True)

    return lambda: probe.source(tensors, export=export)


def meshed(count: int) -> Callable[[], object]:
    mesh = init_device_mesh("cpu", (1,))
    module = nn.ParameterDict()
    for name, tensor in small(count, ROWS).items():
        module[name.replace(".", "_")] = nn.Parameter(DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False))
    return lambda: dtensor.source(module)


def partitioned(count: int) -> Callable[[], object]:
    parts = {name: Partition(tensor.view(-1), (ROWS, COLS), 0) for name, tensor in small(count, ROWS).items()}
    return lambda: zero.source(parts)


VARIANTS = {"probe": probed, "dtensor": meshed, "zero": partitioned}


def seconds(make: Callable[[], object]) -> float:
    start = time.process_time()
    make()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, nargs="+", default=[5000, 10000, 20000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []

    def row(metric: str, variant: str, count: int, value: float, unit: str) -> None:
        workload = f"{count} tensors of {ROWS} x {COLS} bf16"
        rows.append(
            {"metric": metric, "workload": workload, "density": None, "variant": variant, "threads": 1}
            | {"value": value, "unit": unit}
        )

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(str(Path(folder) / "store"), 1), rank=0, world_size=1)
        print(f"{'source':10}" + "".join(f"{count:>12}" for count in arguments.tensors) + f"{'linear':>9}")
        for variant, made in VARIANTS.items():
            found = []
            for count in arguments.tensors:
                make = made(count)
                found.append(statistics.median(seconds(make) for _ in range(arguments.rounds)))
                row("map_building_s", variant, count, found[-1], "s")
            least, most = min(arguments.tensors), max(arguments.tensors)
            linear = found[arguments.tensors.index(most)] / most / (found[arguments.tensors.index(least)] / least)
            row("map_building_linear", variant, most, linear, "ratio")
            print(f"{variant:10}" + "".join(f"{value:10.2f} s" for value in found) + f"{linear:9.2f}")
        dist.destroy_process_group()
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.encode(rows))


if __name__ == "__main__":
    main()
