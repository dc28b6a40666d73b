"""What runs on each rank in the tests of flat partitions."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dcr.errors import LayoutError
from dcr.probing.bits import bits_of
from dcr.sources import zero
from dcr.sources.zero import Partition
from support.ranks import assembled

SHAPES = {"w": (7, 10), "small": (3,), "scalar": (), "even": (4, 8), "embed.weight": (5, 3)}


def flat(value: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A rank's partition as ZeRO-3 makes it: padded at the end, where the memory is whatever it was (here NaN)."""
    span = math.ceil(value.numel() / size)
    padded = torch.full((span * size,), float("nan"), dtype=value.dtype)
    padded[: value.numel()] = value.reshape(-1)
    return padded[rank * span : (rank + 1) * span].clone()


class Split(nn.Module):
    """A module whose parameters look as DeepSpeed leaves them: empty, with the partition as an attribute."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            parameter = nn.Parameter(torch.empty(0, dtype=value.dtype))
            parameter.ds_tensor = flat(value, dist.get_rank(), dist.get_world_size())
            parameter.ds_shape = value.shape
            parameter.ds_process_group = dist.group.WORLD
            self.register_parameter(name.replace(".", "_"), parameter)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))


def values(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def cases() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = values()
    parts = {name: Partition(flat(value, rank, size), tuple(value.shape), rank) for name, value in whole.items()}
    source = zero.source(parts, dtype="bfloat16")
    expected = {name: bits_of(value.bfloat16()) for name, value in whole.items()}
    before = assembled(source)
    for part in parts.values():  # a step on what each rank holds; it goes over the padding too
        part.tensor.mul_(-2)
    after = assembled(source)
    module = Split(whole)
    replicas = zero.source({name: value.clone() for name, value in whole.items()})
    try:
        zero.source({"w": Partition(torch.zeros(17), (7, 10), rank)})
        refused = ""
    except LayoutError as error:
        refused = str(error)
    return {
        "exact": all(np.array_equal(before[name], expected[name]) for name in SHAPES),
        "stepped": all(np.array_equal(after[name], bits_of((whole[name] * -2).bfloat16())) for name in SHAPES),
        "module": {name: bits.tolist() for name, bits in assembled(zero.source(module)).items()},
        "read": {source.schema.tensors[shard.tensor].name: shard.box.here_bounds[1] + 1 for shard in source.shards},
        "replicated": sum(shard.box.numel for shard in replicas.shards),
        "refused": refused,
    }


def deepspeed_trained() -> dict[str, Any]:
    """DeepSpeed's own ZeRO-3, a few steps; the oracle is its own gather of each parameter."""
    import deepspeed

    # Its compiled collective for ranks of one host would take minutes to build; gloo does.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 10), nn.ReLU(), nn.Linear(10, 3))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 8},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    source = zero.source(net)
    before = assembled(source)
    for _ in range(3):
        engine.backward(engine(torch.randn(2, 7).bfloat16()).float().square().mean())
        engine.step()
    found = assembled(source)
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        expected = {name: bits_of(parameter).tolist() for name, parameter in net.named_parameters()}
    return {
        "exact": {name: bits.tolist() for name, bits in found.items()} == expected,
        "changed": [name for name in found if not np.array_equal(found[name], before[name])],
        "local": [parameter.numel() for parameter in net.parameters()],
    }
