"""What runs on each rank in the tests of residual tensors: an exporter that moves most tensors and computes some.

H  hidden size      R  rank of the adapter
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

import dcr.blocking
from dcr.errors import CopiesDiffer
from dcr.probing.bits import bits_of
from dcr.sources import probe
from support.publishing import Plain, folder
from support.refits import FAST

H, R = 24, 2
GROUPS = [["embed"], ["up"], ["norm"], ["A_log"], ["q", "lora_A", "lora_B"]]
Tensors = Mapping[str, torch.Tensor]


def weights() -> dict[str, torch.Tensor]:
    """This rank's tensors: rows of `up`, `A_log`, `q` and `lora_B`; all of the others."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    cut = {
        name: torch.randn(world * 6, width).chunk(world)[rank] for name, width in (("up", H), ("q", H), ("lora_B", R))
    }
    return {
        "embed": torch.randn(50, H).bfloat16(),
        "norm": (torch.randn(H) / 8).bfloat16(),
        "A_log": torch.randn(world * 4).chunk(world)[rank].clone(),
        "lora_A": torch.randn(R, H).bfloat16(),
        **{name: tensor.bfloat16() for name, tensor in cut.items()},
    }


class Exporter:
    """To checkpoint layout: zero-centred norms get their one, decays their sign, an adapter is merged into its base."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        self.calls.append(next(iter(tensors)))
        for name in tensors:
            match name:
                case "embed":
                    yield "embed.weight", tensors[name]
                case "up":
                    yield "up.weight", gathered(tensors[name]).t()
                case "norm":
                    yield "norm.weight", tensors[name] + 1
                case "A_log":
                    yield "mixer.A", -gathered(tensors[name]).exp()
                case "q":
                    yield "q.weight", gathered(tensors["q"] + tensors["lora_B"] @ tensors["lora_A"])


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's rows, one rank's below another's."""
    mine = tensor.contiguous().view(torch.uint8)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return torch.cat([one.view(tensor.dtype) for one in every])


def step(live: Tensors, names: list[str]) -> None:
    """Change some tensors, on this rank alone."""
    for name in names:
        live[name].mul_(1.25)


# What changes before each version, by rank. An input of q changes on the last rank alone.
STEPS: list[list[list[str]]] = [
    [[], []],
    [["embed", "up"], ["embed", "up"]],
    [["up"], ["up", "lora_B"]],
    [["norm", "A_log"], ["norm"]],
]


def parted() -> list[str]:
    """What each version says of which rank 1 alone changes a tensor that both ranks hold; the last one is mended."""
    live, told = weights(), list[str]()
    source, where, group = probe.source(live, export=Exporter(), groups=GROUPS), folder(), dist.new_group()
    with dcr.blocking.publisher(f"local://{where}", source=source, group=group, transport=FAST) as publisher:
        for version, name in enumerate(["", "norm", "A_log", ""], start=1):
            kept = {name: tensor.clone() for name, tensor in live.items()}
            step(live, [name] if name and dist.get_rank() == 1 else [])
            try:
                publisher.publish(version).committed()
                told.append("")
            except CopiesDiffer as error:
                told.append(str(error))
            for name, tensor in kept.items():
                live[name].copy_(tensor)
    return told


def published() -> dict[str, Any]:
    """Versions of an export with arithmetic in it: what was converted for each, and where an engine then differs."""
    live, export = weights(), Exporter()
    source = probe.source(live, export=export, groups=GROUPS)
    where, group, lead = folder(), dist.new_group(), dist.get_rank() == 0
    specs = source.schema.tensors
    held = Plain({one.name: torch.zeros(one.shape, dtype=getattr(torch, one.dtype)) for one in specs})
    versions = []
    with ExitStack() as stack:
        publishing = dcr.blocking.publisher(f"local://{where}", source=source, group=group, transport=FAST)
        publisher = stack.enter_context(publishing)
        loader = dcr.loader(held)
        engine = dcr.blocking.subscriber(f"local://{where}", loader=loader, member="engine", transport=FAST)
        offered = stack.enter_context(engine) if lead else None
        for version, touched in enumerate(STEPS, start=1):
            step(live, touched[dist.get_rank()])
            export.calls.clear()
            report = publisher.publish(version).committed()
            converted = list(export.calls)
            if offered is not None:
                next(offered).install()
            dense = {name: tensor for names in GROUPS for name, tensor in export({n: live[n] for n in names})}
            state = held.state_dict()
            differ = [n for n, one in dense.items() if bits_of(one).tolist() != bits_of(state[n]).tolist()]
            facts = {"converted": converted, "bytes": report.residual_bytes, "changed": report.changed}
            versions.append({**facts, "differ": differ if lead else []})
    return {
        "versions": versions,
        "residual": [(one.names, one.reason, one.nbytes) for one in report.residual],
        "share": report.residual_share,
        "line": str(report),
        "direct": sorted({specs[shard.tensor].name for shard in source.shards}),
    }
