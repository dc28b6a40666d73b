"""Peak memory of a publish, on a model of a gigabyte, measured by the kernel in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MiB = 1 << 20
BASELINE, BUDGET = 1024 * MiB, 96 * MiB
PUBLISH = """
import json, sys
from pathlib import Path

import anyio
import numpy as np
import torch

import dcr
from dcr.transports.local import LocalTransport

MiB = 1 << 20
ELEMS, TENSORS, BUDGET = 64 * MiB, 8, 96 * MiB  # 8 tensors of 64 Mi bf16 elements: 1 GiB


def peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def reset() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tile = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 16, MiB, np.uint16)).view(torch.bfloat16)
        for index in range(TENSORS):
            self.register_parameter(f"w{index}", torch.nn.Parameter(tile.repeat(ELEMS // MiB), requires_grad=False))


async def main() -> None:
    model = Model()
    options = dict(transport=LocalTransport(fsync=False), budget=dcr.ByteBudget(BUDGET), codec=sys.argv[2])
    async with dcr.publisher(sys.argv[1], source=dcr.source(model), **options) as publisher:
        start, rows = reset(), []
        for version, step in enumerate((None, 100, 20), start=1):
            for weight in model.parameters() if step else ():
                weight.view(torch.int16)[version::step] ^= 5
            reset()
            report = await (await publisher.publish(version)).committed()
            rows.append({"changed": report.changed, "anchor": report.is_anchor, "bytes": peak() - start})
    print(json.dumps(rows))


anyio.run(main)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("codec", ["gaps"])
def test_peak_memory_is_within_baseline_budget_and_changed_set(tmp_path: Path, codec: str) -> None:
    script = tmp_path / "publish.py"
    script.write_text(PUBLISH)
    command = [sys.executable, "-P", str(script), f"local://{tmp_path}/run", codec]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ran.returncode == 0, ran.stderr
    anchor, *deltas = json.loads(ran.stdout)
    assert anchor["anchor"]
    assert anchor["bytes"] <= BASELINE + BUDGET + 64 * MiB
    for delta in deltas:
        assert delta["changed"] > 5_000_000
        assert delta["bytes"] <= BASELINE + BUDGET + 12 * delta["changed"] + 64 * MiB
