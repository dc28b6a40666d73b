"""Checkpoint directories of safetensors files: made, read, updated, and left half-way by a process that dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dcr.codecs.patch import Change, Operation
from dcr.layout.schema import WIDTHS
from dcr.loaders.checkpoint import INDEX, SINGLE
from dcr.loaders.safetensors import SafetensorsLoader
from dcr.memory.ready import Ready
from dcr.testing.conformance.bench import layout_of
from dcr.testing.loaders import Weight

TORCH = {dtype: getattr(torch, dtype) for dtype in WIDTHS}


def tensor_of(weight: Weight) -> torch.Tensor:
    flat = torch.from_numpy(weight.bits.reshape(-1).view(np.uint8).copy())
    return flat.view(TORCH[weight.dtype]).reshape(weight.bits.shape)


def save(folder: Path, weights: Mapping[str, Weight], shards: int) -> None:
    """A checkpoint, written by the safetensors package, as transformers lays it out."""
    folder.mkdir(exist_ok=True)
    tensors = {name: tensor_of(weight) for name, weight in weights.items()}
    if shards == 1:
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        return
    names = list(tensors)
    where = {name: f"model-{1 + n % shards:05d}-of-{shards:05d}.safetensors" for n, name in enumerate(names)}
    for file in set(where.values()):
        save_file(
            {name: tensors[name] for name in names if where[name] == file}, folder / file, metadata={"format": "pt"}
        )
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": where}))


def load(folder: Path) -> dict[str, bytes]:
    """A checkpoint's tensors, read as transformers reads them: by its index, and by the safetensors package."""
    index = folder / INDEX
    where = json.loads(index.read_text())["weight_map"] if index.exists() else None
    found = {}
    for file in sorted(set(where.values())) if where else [SINGLE]:
        with safe_open(folder / file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if where is None or where[name] == file:
                    found[name] = opened.get_tensor(name).reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


WEIGHTS = {
    f"w{n}": Weight("bfloat16", np.arange(n * 100, n * 100 + 40, dtype=np.uint16).reshape(5, 8)) for n in range(4)
}


def bound(folder: Path, **options: Any) -> SafetensorsLoader:
    loader = SafetensorsLoader(folder, fsync=False, **options)
    loader.bind(layout_of(WEIGHTS, frame_elems=50))
    return loader


def new_version(loader: SafetensorsLoader, step: int) -> list[Ready]:
    """The first, the last, and some elements between, of every frame, moved by a step."""
    layout = layout_of(WEIGHTS, frame_elems=50)
    readies = []
    for frame in layout.frames:
        positions = np.unique(np.array([0, 3, frame.numel - 1], np.uint32))
        change = Change(Operation.STEP, positions, np.full(len(positions), step, np.uint16))
        readies.append(loader.prepare(frame.index, change))
    return readies


def install(loader: SafetensorsLoader, readies: list[Ready]) -> None:
    for ready in readies:
        loader.install(ready)
    loader.finalize()


def install_and_die(folder: Path, frames: int) -> None:
    loader = bound(folder)
    readies = new_version(loader, 1)
    for ready in readies[:frames]:
        loader.install(ready)
    os.kill(os.getpid(), signal.SIGKILL)


def own(folder: Path, talk: Connection, frames: int) -> None:
    """Bind a directory and install some frames, out of which nothing is made; then hold it until told otherwise."""
    loader = bound(folder)
    for ready in new_version(loader, 1)[:frames]:
        loader.install(ready)
    talk.send(os.getpid())
    talk.recv()
    loader.release()


def write_all(folder: Path, weights: dict[str, Weight], value: int, talk: Connection) -> None:
    loader, layout = SafetensorsLoader(folder, fsync=False), layout_of(weights)
    loader.bind(layout)
    for frame in layout.frames:
        change = Change(Operation.OVERWRITE, None, np.full(frame.numel, value, np.uint32))
        loader.install(loader.prepare(frame.index, change))
    talk.send("installed")
    talk.recv()
    loader.finalize()
