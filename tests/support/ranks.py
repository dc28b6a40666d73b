"""Real processes with a real process group (gloo), for sources whose tensors are spread over ranks."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dcr import kernels
from dcr.layout.views import UNSIGNED, Table, rows_of
from dcr.seams import Source
from dcr.sources.ranks import Peers

TIMEOUT_S = 100


def run(size: int, target: Callable[..., Any], *args: Any) -> list[Any]:
    """What `target(*args)` returns on each of `size` ranks; a failure on one of them is raised here."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, size, folder, results, target, args), daemon=True)
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        found: dict[int, Any] = {}
        try:
            for _ in ranks:
                rank, value, trace = results.get(timeout=TIMEOUT_S)
                if trace:
                    raise AssertionError(f"rank {rank} of {size} failed:\n{trace}")
                found[rank] = value
        finally:
            for process in ranks:
                process.join(5 if len(found) == size else 0)
                process.kill()
    return [found[rank] for rank in range(size)]


def _rank(rank: int, size: int, folder: str, results: Any, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    try:
        store = dist.FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        value = target(*args)
        dist.barrier()
        dist.destroy_process_group()
        results.put((rank, value, ""))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def assembled(source: Source) -> dict[str, NDArray[np.unsignedinteger]]:
    """All ranks' shards and residual groups put together, as canonical bits by name; each element comes once."""
    peers, storages = Peers(), source.storages()
    found = {}
    parts = {tensor: bits for group in source.residual for tensor, bits in _converted(group)}
    for tensor, spec in enumerate(source.schema.tensors):
        whole = np.zeros((2, spec.numel), np.int64)
        if tensor in parts:
            whole[0], whole[1] = parts[tensor], 1
        for shard in source.shards:
            if shard.tensor == tensor:
                bits = kernels.read(Table((storages[shard.storage],), rows_of([(0, 0, shard.box)])), shard.kind)
                there = [index for box in [shard.box] for index in _canonical(box)]
                whole[0, there] += bits.astype(np.int64)
                whole[1, there] += 1
        whole = peers.sum(whole)
        assert (whole[1] == 1).all(), f"{spec.name}: elements come {sorted(set(whole[1].tolist()))} times"
        found[spec.name] = whole[0].astype(UNSIGNED[spec.width])
    return found


def _converted(group: Any) -> list[tuple[int, NDArray[np.unsignedinteger]]]:
    bits = group.convert()
    return list(zip(group.tensors, bits, strict=True)) if group.owned else []


def _canonical(box: Any) -> NDArray[np.int64]:
    index = np.array([box.there0], np.int64)
    for dim in box.dims:
        index = (index[:, None] + np.arange(dim.n) * dim.there).reshape(-1)
    return index
