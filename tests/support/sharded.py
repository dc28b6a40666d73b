"""What runs on each rank in the tests of sharded sources: models sharded by torch itself, trained for a few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcr.errors import SchemaError, StorageRebound
from dcr.layout.schema import SHELLS, WIDTHS, width_of
from dcr.probing.bits import bits_of
from dcr.sources import dtensor, probe, zero
from dcr.sources.module import ModuleSource
from support.ranks import assembled

STEPS = 3


class Net(nn.Module):
    """Odd extents on purpose: 10 and 7 rows leave uneven shards on 4 ranks, 5 and 1 leave empty ones."""

    def __init__(self, rows: int, out: int, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up = nn.Linear(6, rows)
        self.down = nn.Linear(rows, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7 if tied else out)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = self.norm(x + self.down(torch.relu(self.up(x))))
        out: torch.Tensor = self.head(x) * self.scale
        return out


def fsdp(net: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _shard(net, mesh)


def tp(net: nn.Module) -> None:
    _parallel(net, init_device_mesh("cpu", (dist.get_world_size(),)))


def fsdp_tp(net: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _parallel(net, mesh["tp"])
    _shard(net, mesh["dp"])


def hsdp(net: nn.Module) -> None:
    _shard(net, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def masters(net: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    _shard(net, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def plain(net: nn.Module) -> None:
    """Data parallel: every rank holds everything."""


def _shard(net: nn.Module, mesh: Any, **options: Any) -> None:
    for part in (net.up, net.down):
        fully_shard(part, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options)


def _parallel(net: nn.Module, mesh: Any) -> None:
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def train(net: nn.Module, steps: int = STEPS, lr: float = 1e-2) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, foreach=False)
    for step in range(steps):
        torch.manual_seed(step)
        net(torch.randint(0, 7, (4, 5))).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        net.steps += 1


def canonical(tensor: torch.Tensor, dtype: str) -> list[int]:
    """A parameter's whole, cast by torch, as bits."""
    full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return bits_of(full.to(getattr(torch, dtype))).tolist()


def trained(
    layout: Callable[[nn.Module], None], rows: int, out: int, dtype: str | None = None, tied: bool = False
) -> dict[str, Any]:
    """Shard, make the source, train; what it then publishes is compared with `full_tensor`. Facts about its map."""
    torch.manual_seed(0)
    net = Net(rows, out, tied=tied)
    layout(net)
    source = dtensor.source(net, dtype=dtype)
    before = assembled(source)
    train(net)
    found = assembled(source)
    tensors = dict(net.named_parameters(remove_duplicate=False)) | dict(net.named_buffers())
    differ = [
        name
        for spec in source.schema.tensors
        for name in (spec.name, *spec.aliases)
        if found[spec.name].tolist() != canonical(tensors.pop(name), spec.dtype)
    ]
    still = [name for name, bits in found.items() if np.array_equal(bits, before[name])]
    owned = sum(shard.box.numel * source.schema.tensors[shard.tensor].width for shard in source.shards)
    return {
        "differ": differ,
        "missing": sorted(tensors),
        "unchanged": still,
        "residual": [(group.tensors, group.reason) for group in source.residual],
        "boxes": max((sum(s.tensor == t for s in source.shards) for t in range(len(source.schema.tensors))), default=0),
        "owned_bytes": owned,
        "all_bytes": source.schema.nbytes,
        "dtypes": sorted({spec.dtype for spec in source.schema.tensors}),
    }


def all_of(cases: list[tuple[str, tuple[Any, ...]]]) -> dict[str, dict[str, Any]]:
    """Several layouts in one world."""
    return {name: trained(*case) for name, case in cases}


def misplaced() -> dict[str, Any]:
    """As `trained`, when the map takes strided shards for plain ones: the certificate has to notice."""
    honest = dtensor.along

    def along(placement: Any, d: int) -> Any:
        plain = Shard(0) if getattr(placement, "dim", None) == d else Replicate()
        return plain if hasattr(placement, "split_factor") else honest(placement, d)

    dtensor.along = along
    try:
        return trained(fsdp_tp, 8, 5)
    finally:
        dtensor.along = honest


def rebound() -> dict[str, Any]:
    """A shard that is replaced is bound again; what a source says when it becomes another."""
    net = Net(10, 5, tied=False)
    fsdp(net)
    source = dtensor.source(net)
    net.up.weight = nn.Parameter(net.up.weight.detach().clone() + 1)
    found = assembled(source)["up.weight"].tolist() == canonical(net.up.weight, "float32")
    net.up.weight = nn.Parameter(net.up.weight.detach().to(torch.float16))
    try:
        source.storages()
    except StorageRebound as error:
        return {"found": found, "said": str(error)}
    return {"found": found, "said": ""}


def flattened() -> list[str]:
    """What sources say of a module that FSDP1 wraps, while its parameters are whole; it then trains on."""
    options: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
    net = nn.Sequential(nn.Linear(8, 8), FullyShardedDataParallel(nn.Linear(8, 8), **options))
    said = []
    with FullyShardedDataParallel.summon_full_params(net, writeback=False):
        for make in (ModuleSource, dtensor.source, zero.source, partial(probe.source, export=dict.items)):
            try:
                make(net)
            except SchemaError as error:
                said.append(str(error))
    net(torch.randn(2, 8)).sum().backward()
    return said


def apart() -> str:
    """What a source says when ranks hold different tensors under one name."""
    try:
        dtensor.source(nn.Linear(2 + dist.get_rank(), 3))
    except SchemaError as error:
        return str(error)
    return ""


def pipelined() -> dict[str, int]:
    """Each rank holds tensors that the others do not have: elements that each one owns, by name."""
    rank = dist.get_rank()
    net = nn.ModuleDict({f"layers.{rank}".replace(".", "_"): nn.Linear(3, 2), "norm": nn.LayerNorm(4)})
    if rank == dist.get_world_size() - 1:
        net["value_head"] = nn.Linear(3, 1)
    source = dtensor.source(net, waive=["value_head.*"])  # given alike on all ranks, and fits on the last
    assembled(source)
    owned = dict.fromkeys((spec.name for spec in source.schema.tensors), 0)
    for shard in source.shards:
        owned[source.schema.tensors[shard.tensor].name] += shard.box.numel
    return owned


def titan(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """An exporter that works on DTensors, as TorchTitan's adapters do: rotary rows put in the checkpoint's order."""
    for name, tensor in tensors.items():
        if name == "wq.weight":
            rows, cols = tensor.shape
            yield "q_proj.weight", tensor.view(4, rows // 8, 2, cols).transpose(1, 2).reshape(rows, cols)
        elif name == "experts":
            for i, one in enumerate(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor):
                yield f"experts.{i}", one.t()
        else:
            yield name, tensor


def exported() -> dict[str, Any]:
    """An exporter over the DTensors of a module, before and after training."""
    torch.manual_seed(0)
    net = nn.Module()
    net.wq = nn.Linear(6, 16, bias=False)
    net.norm = nn.LayerNorm(6)
    net.experts = nn.Parameter(torch.randn(5, 4, 6))
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    source = probe.source(net, export=titan, groups=[["wq.weight"], ["experts"], ["norm.weight", "norm.bias"]])
    assembled(source)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.to_local().mul_(-1.5)
    found = assembled(source)
    with torch.no_grad():
        expected = {name: canonical(tensor, "float32") for name, tensor in titan(dict(net.named_parameters()))}
    return {
        "differ": sorted(n for n in expected.keys() | found.keys() if found[n].tolist() != expected.get(n)),
        "residual": [group.reason for group in source.residual],
    }


def odd_cases() -> dict[str, Any]:
    cases = {
        "flattened": flattened,
        "misplaced": misplaced,
        "rebound": rebound,
        "apart": apart,
        "pipelined": pipelined,
        "exported": exported,
    }
    return {name: case() for name, case in cases.items()}


def every_dtype() -> dict[str, Any]:
    """Rows, and columns, of a tensor of each dtype; what is published is compared with all ranks' bytes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module, expected = nn.Module(), {}
    for dtype in (*WIDTHS, *SHELLS):
        width = width_of(dtype)
        parts = [np.random.default_rng(rank).integers(0, 2, (3, 4 * width), np.uint8) for rank in range(mesh.size())]
        local = torch.from_numpy(parts[dist.get_rank()]).view(getattr(torch, dtype))
        for dim in (0, 1):
            shard = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
            module.register_buffer(f"{dtype}_{dim}", shard)
            expected[f"{dtype}_{dim}"] = np.concatenate(parts, axis=dim).view(f"u{width}").reshape(-1)
    source = dtensor.source(module)
    found = assembled(source)
    differ = [name for name, bits in expected.items() if not np.array_equal(found[name], bits)]
    return {"differ": differ, "residual": len(source.residual), "tensors": len(found)}
