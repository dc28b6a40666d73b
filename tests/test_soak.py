"""Two hundred refits in a row: memory and open handles of both ends stay where they are."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from support.refits import FAST, Rollout, Weights, empty_like, publish, require_equal, running, state

import dcr

REFITS, WARM, EVERY, ELEMS = 200, 50, 5, 1 << 20
PATCH_BYTES = 6 * (ELEMS // 100)  # what one version would leave behind, if it left its patch


def resident() -> int:
    """Bytes of memory in use by this process."""
    gc.collect()
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.timeout(300)
async def test_memory_and_handles_stay_flat(tmp_path: Path) -> None:
    trainer = Weights({"w": torch.zeros(ELEMS, dtype=torch.bfloat16)})
    rollout = Rollout(empty_like(trainer))
    memory: list[int] = []
    files: list[int] = []
    async with (
        running(tmp_path, [rollout]) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST, frame_elems=ELEMS // 4) as publisher,
    ):
        await publisher.joined(1)
        for version in range(REFITS):
            trainer.w.view(torch.int16)[version % 100 :: 100] += 1
            await publish(publisher, version)
            await rollout.reached(version)
            rollout.events.clear()
            if version % EVERY == 0:
                memory.append(resident())
                files.append(handles())
        require_equal(rollout.module, state(trainer))
    warm = WARM // EVERY
    slope = np.polyfit(np.arange(WARM, REFITS, EVERY), memory[warm:], 1)[0]
    assert slope < PATCH_BYTES / 10, f"{slope:.0f} bytes a refit"
    assert np.median(files[-warm:]) <= np.median(files[:warm])  # one that is open in this very moment does not count
