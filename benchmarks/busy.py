"""A training loop beside a member that takes long to install: python benchmarks/busy.py [--json FILE]

    loop_over_step    median seconds of a turn of the loop / seconds of its step, per `when_busy`
    published         versions that the loop has published, of so many steps

Ends are of this process, over a directory; the step and the installation are sleeps, so the rest is what dcr adds.
Roofline: 1. With "wait" a turn takes as long as the installation once two versions are under way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal

import anyio
import torch

import dcr
from dcr.transports.local import LocalTransport

TRANSPORT = LocalTransport(fsync=False)


async def measure(mode: Literal["wait", "skip"], steps: int, step_s: float, install_s: float) -> tuple[float, int]:
    """Median seconds of a turn, and versions published; the member ends with the trainer's bits, or it raises."""
    trainer, engine = (torch.nn.Linear(1000, 1000, bias=False).bfloat16() for _ in range(2))
    turns, published = list[float](), 0
    with tempfile.TemporaryDirectory() as folder:
        url = f"local://{folder}"

        async def member() -> None:
            loader = dcr.loader("module", engine)
            async with dcr.subscriber(url, loader=loader, member="slow", transport=TRANSPORT) as versions:
                async for version in versions:
                    await anyio.sleep(install_s if version.number > 1 else 0)
                    await version.install()

        async with anyio.create_task_group() as group:
            group.start_soon(member)
            source = dcr.source(trainer)
            async with dcr.publisher(url, source=source, transport=TRANSPORT, when_busy=mode) as publisher:
                await publisher.joined(1)
                await (await publisher.publish(1)).installed()
                for step in range(2, steps + 2):
                    began_s = time.monotonic()
                    await anyio.sleep(step_s)
                    await publisher.captured()
                    trainer.weight.data.view(torch.int16)[step % 7 :: 50] += 1
                    published += not (await publisher.publish(step)).skipped
                    turns.append(time.monotonic() - began_s)
                await (await publisher.publish(steps + 2, when_busy="wait")).installed()
            group.cancel_scope.cancel()
    if not torch.equal(trainer.weight.view(torch.int16), engine.weight.view(torch.int16)):
        raise AssertionError("the member does not hold the trainer's bits")
    return statistics.median(turns), published


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--install-s", type=float, default=5.0)
    parser.add_argument("--modes", nargs="+", choices=["wait", "skip"], default=["skip"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for mode in given.modes:
        turn_s, published = anyio.run(measure, mode, given.steps, given.step_s, given.install_s)
        print(f"{mode:5} a turn {turn_s:.3f} s, {turn_s / given.step_s:.2f} of its step; {published} published")
        common = {"workload": f"install {given.install_s:g} s", "density": 0.02, "variant": mode, "threads": 1}
        rows.append({"metric": "loop_over_step", **common, "value": turn_s / given.step_s, "unit": "ratio"})
        rows.append({"metric": "published", **common, "value": published, "unit": f"of {given.steps} steps"})
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
