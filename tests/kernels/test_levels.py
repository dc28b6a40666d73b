"""Whichever instructions the kernels use, the same bytes travel and the same bits arrive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from support.refits import (
    FAST,
    Rollout,
    Weights,
    empty_like,
    publish,
    random_bits,
    require_equal,
    running,
    set_bits,
    state,
)

import dcr
from dcr import _native
from dcr.codecs import codec
from dcr.codecs.patch import Change, Operation
from dcr.layout.views import UNSIGNED

LEVELS = _native.features()["levels"]
DTYPES = ("bfloat16", "uint8", "float32", "int64")
N = 100_003


@pytest.fixture(autouse=True)
def level_of_before() -> Iterator[None]:
    before = _native.features()["level"]
    yield
    _native.use_level(before)


def change_of(width: int, share: float) -> tuple[Change, np.ndarray]:
    """Small steps, some large ones; and the old bits of the frame."""
    rng = np.random.default_rng(width)
    positions = np.flatnonzero(rng.random(N) < share).astype(np.uint32)
    steps = rng.integers(1, 4, len(positions)).astype(UNSIGNED[width])
    steps[::50] = rng.integers(1, 200, len(steps[::50]))
    base = rng.integers(0, 1 << 8 * width, N, UNSIGNED[width], endpoint=False)
    return Change(Operation.STEP, positions, np.where(rng.random(len(steps)) < 0.5, steps, -steps)), base


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.001, 0.03, 0.9])
@pytest.mark.parametrize("name", ["raw", "fast", "balanced", "small"])
def test_every_level_writes_the_same_bytes_and_reads_them(name: str, share: float, width: int) -> None:
    coder = {"raw": codec.RAW, "fast": codec.FAST, "balanced": codec.BALANCED, "small": codec.SMALL}[name]
    change, base = change_of(width, share)
    old = {"base": base} if coder.needs_base else {}
    bodies = set()
    for level in LEVELS:
        _native.use_level(level)
        bodies.add(body := coder.encode(change, N, **old))
        decoded = coder.decode(
            body, operation=change.operation, changed=len(change.values), numel=N, width=width, **old
        )
        np.testing.assert_array_equal(decoded.positions, change.positions)
        np.testing.assert_array_equal(decoded.values, change.values)
    assert len(bodies) == 1


async def test_versions_made_at_every_level_follow_each_other(tmp_path: Path) -> None:
    """Digests of one level are compared with those of another: each version starts from what the last level left."""
    rng = np.random.default_rng(1)
    trainer = Weights({f"of {dtype}": torch.zeros(60, 401, dtype=getattr(torch, dtype)).t() for dtype in DTYPES})
    rollout = Rollout(empty_like(trainer))
    async with (
        running(tmp_path, [rollout]) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
    ):
        await publisher.joined(1)
        for version, level in enumerate(2 * [*LEVELS, *reversed(LEVELS)], start=1):
            _native.use_level(level)
            for name, tensor in trainer.state_dict().items():
                index = np.flatnonzero(rng.random(tensor.numel()) < 0.03)
                set_bits(tensor, index, random_bits(rng, len(index), name.removeprefix("of ")))
            await publish(publisher, version)
            await rollout.reached(version)
            require_equal(rollout.module, state(trainer))
