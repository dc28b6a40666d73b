"""Engines whose loaders do what real ones do, and what a recorder is likely to get wrong.

Each case is a model, a loader with its post-load step, a checkpoint's shapes, and the kind that every tensor must get.
They restate, in a few lines of torch each, loaders of the engines that are in use; the kit for adapters
(`dcr.testing.engines.EngineTests`) runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from dcr.loaders.engine import Pairs
from dcr.loaders.record import Kind

Shape = tuple[int, ...]
Loads = Callable[[torch.nn.Module, Pairs], None]
BF16 = torch.bfloat16


class Model(torch.nn.Module):
    """A module of given parameters, in bfloat16 if not said otherwise, and of submodules."""

    def __init__(self, dtype: torch.dtype = BF16, **parts: Shape | torch.nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, torch.nn.Module):
                self.add_module(name, part)
            else:
                filled = torch.full(part, 0.5, dtype=dtype)
                self.register_parameter(name, torch.nn.Parameter(filled, requires_grad=False))


def nothing(model: torch.nn.Module, modules: Set[str]) -> None:
    """The post-load step of most modules."""


@dataclass(slots=True, eq=False)
class ToyEngine:
    """See `dcr.loaders.engine.Adapter`; loads and settles get the model first."""

    module: torch.nn.Module
    loads: Loads
    settles: Callable[[torch.nn.Module, Set[str]], None] = nothing
    replaces: bool = False

    def load(self, pairs: Pairs) -> None:
        self.loads(self.module, pairs)

    def settle(self, modules: Set[str]) -> None:
        self.settles(self.module, modules)

    def fingerprint(self) -> bytes:
        return type(self.module).__name__.encode()


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A hostile engine.

    make: the engine, not loaded. shapes: of the checkpoint's tensors. kinds: what each must be; those not named are
    BITS. homes: of how many boxes their maps consist. aliases: further names of tensors. waive: as the loader's.
    refused: what must be said of an engine that cannot be updated at all.
    """

    make: Callable[[], ToyEngine]
    shapes: Mapping[str, Shape]
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    homes: Mapping[str, int] = field(default_factory=dict)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    waive: tuple[str, ...] = ()
    refused: str = ""


def one_by_one(loads: Callable[[torch.nn.Module, str, torch.Tensor], None]) -> Loads:
    """A loader that takes one tensor after another."""

    def load(model: torch.nn.Module, pairs: Pairs) -> None:
        for name, tensor in pairs:
            loads(model, name, tensor)

    return load


def parameter(model: torch.nn.Module, name: str) -> torch.Tensor:
    """What a loader writes to."""
    return model.get_parameter(name).data


# ---------------------------------------------------------------------- moves


def _slices(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """The Mamba in-projection: two parts of one tensor, by slice assignment."""
    target = parameter(model, name)
    target[:10, ...] = tensor[4:].view_as(target[:10])
    target[10:, ...] = tensor[:4].view_as(target[10:])


def _filled(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Padded experts: the region is filled before what belongs there is copied."""
    target = parameter(model, name)
    target[:, :10].fill_(1)
    target[:, :6].copy_(tensor)


def _transposed(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    parameter(model, name).copy_(tensor.t())


def _straightened(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Copied to contiguous memory and then in chunks: the view of the source is lost."""
    straight = tensor.t().contiguous()
    for target, chunk in zip(parameter(model, name).chunk(3), straight.chunk(3), strict=True):
        target.copy_(chunk)


def _rotary(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Rows of rotary halves interleaved: reshape copies."""
    parameter(model, name).copy_(tensor.view(2, 2, 4, 8).transpose(1, 2).reshape(16, 8))


def _plain(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    parameter(model, name).copy_(tensor)


def _vocabulary(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """A padded embedding, and the bias of a padded head."""
    target = parameter(model, name)
    target[: len(tensor)].copy_(tensor)
    target[len(tensor) :].fill_(0 if name == "embed" else float("-inf"))


def _interleaved(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Gate and up projections, column by column."""
    parameter(model, "w13")[:, 0 if name == "gate" else 1 :: 2].copy_(tensor)


def _indexed(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """By index tensors: rows in another order."""
    target = parameter(model, name)
    target[torch.tensor([2, 0, 1, 3])] = tensor
    target.index_copy_(0, torch.tensor([3]), tensor[3:])


def _by_numpy(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Not by an operator of torch at all."""
    parameter(model, name).view(torch.int16).numpy()[...] = tensor.view(torch.int16).numpy()


def _grouped(model: torch.nn.Module, pairs: Pairs) -> None:
    """Names that come together are put together, and those that come alone are dropped."""
    held = dict(pairs)
    if {"attn.q_a", "attn.kv_a"} <= held.keys():
        parameter(model, "attn.fused").copy_(torch.cat([held["attn.q_a"], held["attn.kv_a"]]))


def _buffering() -> Loads:
    """The same over several calls: what comes first waits for what comes next."""
    waiting: dict[str, torch.Tensor] = {}

    def load(model: torch.nn.Module, pairs: Pairs) -> None:
        waiting.update(pairs)
        if len(waiting) == 2:
            parameter(model, "attn.fused").copy_(torch.cat([waiting.pop("attn.q_a"), waiting.pop("attn.kv_a")]))

    return load


def _threaded(work: Callable[[torch.Tensor, torch.Tensor], None]) -> Loads:
    """Work in a pool of threads, where no dispatch mode of the caller is active."""

    def load(model: torch.nn.Module, pairs: Pairs) -> None:
        with ThreadPoolExecutor(2) as pool:
            for job in [pool.submit(work, parameter(model, name), tensor) for name, tensor in pairs]:
                job.result()

    return load


def _fused(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """A fused projection whose key and value heads are replicated over a group."""
    target = parameter(model, "qkv")
    match name:
        case "q":
            target[:16].copy_(tensor)
        case "k" | "v":
            first = 16 if name == "k" else 24
            for replica in range(2):
                target[first + 4 * replica : first + 4 * replica + 4].copy_(tensor)
        case _:
            raise KeyError(name)


def _experts() -> ToyEngine:
    """Experts by a map: one that lives in two slots, one that is kept elsewhere."""
    model = Model(w=(3, 4, 6))
    model.register_buffer("slots", torch.tensor([[0, 2], [1, 1], [-1, -1]]), persistent=False)

    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        slots = model.get_buffer("slots")
        for slot in {int(slots[int(name.split(".")[1]), k].item()) for k in range(2)} - {-1}:
            parameter(model, "w")[slot].copy_(tensor)

    return ToyEngine(model, one_by_one(load))


def _latent_attention() -> ToyEngine:
    """MLA: the halves of kv_b_proj are kept absorbed as well, and made anew by the post-load step."""
    model = Model(attn=Model(kv_b=(2 * (3 + 5), 4), o=(6, 10)), norm=(6,))

    def absorb(model: torch.nn.Module, modules: Set[str]) -> None:
        if "attn" not in modules:
            return
        attention = model.get_submodule("attn")
        per_head = attention.get_parameter("kv_b").data.view(2, 8, 4)
        attention.W_UK_T = per_head[:, :3].contiguous()
        attention.W_UV = per_head[:, 3:].transpose(1, 2).contiguous()

    absorb(model, {"attn"})
    return ToyEngine(model, one_by_one(_plain), absorb)


def _shuffled_experts() -> ToyEngine:
    """A post-load step permutes rows in place, for a kernel that wants them so."""
    model = Model(layers=torch.nn.ModuleList([Model(w=(160, 32)), Model(w=(160, 32))]))
    order = torch.randperm(160, generator=torch.Generator().manual_seed(5))

    def shuffle(model: torch.nn.Module, modules: Set[str]) -> None:
        for name in modules:
            weight = parameter(model, f"{name}.w")
            weight.copy_(weight[order])

    return ToyEngine(model, one_by_one(_plain), shuffle)


def _tied() -> ToyEngine:
    model = Model(embed=(6, 4), head=(6, 4))
    model.head = model.embed
    return ToyEngine(model, one_by_one(_plain))


# ---------------------------------------------------------------------- what is not a move


def _composed(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Mamba's A: loaded, and then replaced by a function of what was loaded."""
    target = parameter(model, name)
    target.copy_(tensor)
    if name == "mixer.a":
        target.copy_(-torch.exp(target))


def _one_more(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """A zero-centred norm."""
    parameter(model, name).copy_(tensor + 1)


def _rebound(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.get_parameter(name).data = tensor.clone()


def _branching(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """What is done depends on values, that reach Python."""
    scale = 0.5 if tensor.float().abs().max() > 3.4e38 else 1.0
    parameter(model, name).copy_(tensor if scale == 1.0 else tensor * scale)


def _clipped(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """What is done depends on values, that do not: right for all but the greatest."""
    parameter(model, name).copy_(torch.where(tensor.float().abs() > 1e4, torch.zeros_like(tensor), tensor))


def _quantised() -> ToyEngine:
    """Each row as bytes and a scale."""
    model = Model(fc=Model(w=(4, 8)), norm=(8,))
    fc = model.get_submodule("fc")
    fc.w = torch.nn.Parameter(torch.zeros(4, 8, dtype=torch.int8), requires_grad=False)
    fc.register_buffer("scale", torch.zeros(4, 1))

    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        if name == "norm":
            parameter(model, name).copy_(tensor)
            return
        scale = tensor.float().abs().amax(1, keepdim=True) / 127 + 1e-30
        model.get_buffer("fc.scale").copy_(scale)
        parameter(model, "fc.w").copy_((tensor.float() / scale).round().clamp(-127, 127).to(torch.int8))

    return ToyEngine(model, one_by_one(load))


def _added(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(tensor + 1)


def _copied(target: torch.Tensor, tensor: torch.Tensor) -> None:
    target.copy_(tensor)


def _accumulating(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    parameter(model, name).add_(tensor)


def _whole(model: torch.nn.Module, pairs: Pairs) -> None:
    """Takes the whole checkpoint or nothing."""
    if len(pairs) != 2:
        raise ValueError(f"expected 2 tensors, found {len(pairs)}")
    for name, tensor in pairs:
        parameter(model, name).copy_(tensor if name == "layers.0.w" else tensor * 2)


def _layers() -> Model:
    return Model(layers=torch.nn.ModuleList([Model(w=(4, 8)), Model(w=(4, 8))]))


def _case(loads: Loads, model: Callable[[], torch.nn.Module], shapes: Mapping[str, Shape], **rest: Any) -> Case:
    return Case(lambda: ToyEngine(model(), loads), shapes, **rest)


LAYER, CAST = Kind.LAYER, Kind.CAST
SQUARE: Mapping[str, Shape] = {"w": (8, 8)}

CASES: Mapping[str, Case] = {
    "slice assignment": _case(one_by_one(_slices), lambda: Model(w=(14, 6)), {"w": (14, 6)}, homes={"w": 2}),
    "fill, then copy": _case(one_by_one(_filled), lambda: Model(w=(4, 12)), {"w": (4, 6)}, homes={"w": 1}),
    "transposed": _case(one_by_one(_transposed), lambda: Model(w=(6, 4)), {"w": (4, 6)}, homes={"w": 1}),
    "made contiguous, in chunks": _case(one_by_one(_straightened), lambda: Model(w=(6, 4)), {"w": (4, 6)}),
    "rotary halves": _case(one_by_one(_rotary), lambda: Model(w=(16, 8)), {"w": (16, 8)}, homes={"w": 1}),
    "cast": _case(one_by_one(_plain), lambda: Model(torch.float32, b=(6,)), {"b": (6,)}, kinds={"b": CAST}),
    "narrowing cast": _case(
        one_by_one(_plain), lambda: Model(torch.float8_e5m2, b=(6,)), {"b": (6,)}, kinds={"b": CAST}
    ),
    "cast into every other element": _case(
        one_by_one(_interleaved),
        lambda: Model(torch.float32, w13=(4, 12)),
        {"gate": (4, 6), "up": (4, 6)},
        kinds={"gate": CAST, "up": CAST},
    ),
    "padded vocabulary": _case(
        one_by_one(_vocabulary), lambda: Model(embed=(12, 4), bias=(12,)), {"embed": (10, 4), "bias": (10,)}
    ),
    "index assignment": _case(one_by_one(_indexed), lambda: Model(w=(4, 6)), {"w": (4, 6)}),
    "by numpy": _case(one_by_one(_by_numpy), lambda: Model(w=(4, 6)), {"w": (4, 6)}),
    "group put together": _case(
        _grouped, lambda: Model(attn=Model(fused=(5, 4))), {"attn.q_a": (3, 4), "attn.kv_a": (2, 4)}
    ),
    "group over several calls": Case(
        lambda: ToyEngine(Model(attn=Model(fused=(5, 4))), _buffering()), {"attn.q_a": (3, 4), "attn.kv_a": (2, 4)}
    ),
    "threads": _case(_threaded(_copied), lambda: Model(w=(8, 8), v=(8,)), {**SQUARE, "v": (8,)}),
    "threads that compute": _case(_threaded(_added), lambda: Model(w=(8, 8)), SQUARE, kinds={"w": LAYER}),
    "replicated heads": _case(
        one_by_one(_fused), lambda: Model(qkv=(32, 6)), {"q": (16, 6), "k": (4, 6), "v": (4, 6)}, homes={"k": 2, "v": 2}
    ),
    "expert fan-out": Case(
        _experts,
        {f"experts.{i}.w": (4, 6) for i in range(3)},
        {"experts.2.w": Kind.SKIP},
        {"experts.0.w": 2},
        waive=("experts.2.*",),
    ),
    "absorbed weights": Case(
        _latent_attention, {"attn.kv_b": (16, 4), "attn.o": (6, 10), "norm": (6,)}, homes={"attn.kv_b": 3}
    ),
    "shuffled experts": Case(
        _shuffled_experts,
        {f"layers.{i}.w": (160, 32) for i in range(2)},
        {f"layers.{i}.w": Kind.TABLE for i in range(2)},
    ),
    "tied heads": Case(_tied, {"embed": (6, 4)}, aliases={"embed": ("head",)}, homes={"embed": 1}),
    "composed": _case(
        one_by_one(_composed),
        lambda: Model(mixer=Model(torch.float32, a=(8,)), norm=(8,)),
        {"mixer.a": (8,), "norm": (8,)},
        kinds={"mixer.a": LAYER},
    ),
    "zero-centred": _case(one_by_one(_one_more), lambda: Model(w=(8, 8)), SQUARE, kinds={"w": LAYER}),
    "rebinding": _case(one_by_one(_rebound), lambda: Model(w=(8, 8)), SQUARE, kinds={"w": LAYER}),
    "branch on a value": _case(one_by_one(_branching), lambda: Model(w=(8, 8)), SQUARE, kinds={"w": LAYER}),
    "clipped": _case(one_by_one(_clipped), lambda: Model(w=(8, 8)), SQUARE, kinds={"w": LAYER}),
    "quantised": Case(_quantised, {"fc.w": (4, 8), "norm": (8,)}, {"fc.w": LAYER}),
    "whole checkpoints only": _case(
        _whole,
        _layers,
        {f"layers.{i}.w": (4, 8) for i in range(2)},
        kinds={"layers.1.w": Kind.MODEL, "layers.0.w": Kind.MODEL},
    ),
    "accumulating": _case(one_by_one(_accumulating), lambda: Model(w=(8, 8)), SQUARE, refused="not the same each time"),
    "tied here, published apart": Case(_tied, {"embed": (6, 4), "head": (6, 4)}, refused="goes nowhere here"),
    "a name it does not know": _case(
        one_by_one(_plain), lambda: Model(w=(8, 8)), {**SQUARE, "v": (8,)}, refused="v is published"
    ),
    "a weight that nobody loads": _case(
        one_by_one(_plain), lambda: Model(w=(8, 8), v=(8,)), SQUARE, refused="v is held here"
    ),
}
