"""Engines whose loaders remember earlier loads, or read memory and tensors that they were not given.

What a recorder takes for a function of one load is here a function of several: halves of a pair that wait for each
other, post-load steps that read another module, counters, inputs that are changed in place. Cases are as in
`dcr.testing.hostile`; each ends exact, or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch

from dcr.loaders.engine import Pairs
from dcr.loaders.record import Kind
from dcr.testing.hostile import Case, Loads, Model, ToyEngine, one_by_one, parameter

LAYER, MODEL = Kind.LAYER, Kind.MODEL


def _copy(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    parameter(model, name).copy_(tensor)


# ---------------------------------------------------------------------- halves that wait


def _dequantised(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight.float() * scale.float()).to(weight.dtype)


def _pair(weight: str = "l.weight", scale: str = "l.scale") -> Callable[[], ToyEngine]:
    """The weight is kept as it is, and weight x scale is written once both have come, in whatever calls."""

    def make() -> ToyEngine:
        waiting: dict[str, torch.Tensor] = {}

        def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
            waiting[name] = tensor.clone()
            if name == weight:
                parameter(model, "raw").copy_(tensor)
            if len(waiting) == 2:
                parameter(model, "product").copy_(_dequantised(waiting[weight], waiting[scale]))
                waiting.clear()

        return ToyEngine(Model(raw=(6, 4), product=(6, 4)), one_by_one(load))

    return make


def _fusing(*names: str) -> Callable[[], ToyEngine]:
    """Rows of several tensors are put together when the last of them has come, in whatever calls."""

    def make() -> ToyEngine:
        waiting: dict[str, torch.Tensor] = {}

        def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
            waiting[name] = tensor
            if len(waiting) == len(names):
                parameter(model, "fused").copy_(torch.cat([waiting.pop(one) for one in names]))

        return ToyEngine(Model(fused=(2 * len(names), 4)), one_by_one(load))

    return make


def _counting_pairs() -> ToyEngine:
    """Whatever two tensors come one after the other are a pair: a load that is cut leaves all later ones shifted."""
    waiting: list[torch.Tensor] = []

    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:  # noqa: ARG001
        waiting.append(tensor.clone())
        if len(waiting) == 2:
            parameter(model, "product").copy_(waiting[0].float() * waiting[1].float().sign())
            waiting.clear()

    return ToyEngine(Model(product=(4, 4)), one_by_one(load))


def _scaled_by_another_module() -> ToyEngine:
    """Every weight is multiplied by the scale that came last, of the model's head."""
    last = [torch.ones(1)]

    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        if name == "scale":
            last[0] = tensor.clone()
        else:
            parameter(model, name).copy_(_dequantised(tensor, last[0]))

    return ToyEngine(Model(layers=torch.nn.ModuleList([Model(w=(4, 4)), Model(w=(4, 4))])), one_by_one(load))


def _fused_experts() -> ToyEngine:
    """Fused experts: w1 and w3 wait for scales that come under names of their own, and share the greater one."""
    waiting: dict[str, torch.Tensor] = {}

    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        waiting[name] = tensor.clone()
        if len(waiting) < 4:
            return
        scales = [waiting[f"experts.{which}_scale"].float() for which in ("w1", "w3")]
        shared = torch.maximum(*scales)
        for rows, which, scale in zip(parameter(model, "experts.w13").chunk(2), ("w1", "w3"), scales, strict=True):
            rows.copy_(waiting[f"experts.{which}"].float() * scale / (shared.abs() + 1))
        parameter(model, "experts.scale").copy_(shared)
        waiting.clear()

    return ToyEngine(Model(experts=Model(w13=(8, 4), scale=(1,))), one_by_one(load))


# ---------------------------------------------------------------------- what is read besides


def _reads_a_neighbour() -> ToyEngine:
    """A load of `w` also makes `kc` of it and of the live `n`, which it need not have been given."""

    def load(model: torch.nn.Module, pairs: Pairs) -> None:
        for name, tensor in pairs:
            parameter(model, name).copy_(tensor)
        if any(name == "l.w" for name, _ in pairs):
            parameter(model, "l.kc").copy_(_dequantised(parameter(model, "l.w"), parameter(model, "l.n")).t())

    return ToyEngine(Model(l=Model(w=(6, 4), n=(4,), kc=(4, 6))), load)


def _reads_another_layer(*, by_numpy: bool) -> ToyEngine:
    """The same over two layers: what is made in the second is made of the first as well."""

    def settle(model: torch.nn.Module, modules: Set[str]) -> None:
        if "layers.1" not in modules:
            return
        norm, weight = parameter(model, "layers.0.w"), parameter(model, "layers.1.w")
        if by_numpy:  # no operator of torch is seen to read it
            norm = torch.from_numpy(norm.view(torch.int16).numpy().copy()).view(torch.bfloat16)
        parameter(model, "layers.1.kc").copy_(_dequantised(weight, norm[0]))

    layers = [Model(w=(4, 4)), Model(w=(4, 4), kc=(4, 4))]
    return ToyEngine(Model(layers=torch.nn.ModuleList(layers)), one_by_one(_copy), settle)


def _draft(*, alone: bool) -> ToyEngine:
    """A draft model whose post-load step copies the main model's embedding; alone: it loads nothing of its own."""

    def settle(model: torch.nn.Module, modules: Set[str]) -> None:
        if "draft" in modules:
            model.get_buffer("draft.embed").copy_(parameter(model, "model.embed"))

    draft = Model() if alone else Model(fc=(4, 4))
    draft.register_buffer("embed", torch.zeros(8, 4, dtype=torch.bfloat16), persistent=False)
    return ToyEngine(Model(model=Model(embed=(8, 4)), draft=draft), one_by_one(_copy), settle)


# ---------------------------------------------------------------------- counters and flags


def _stops(after: int, loads: Loads) -> Callable[[], ToyEngine]:
    """A loader that takes nothing any more after so many calls."""

    def make() -> ToyEngine:
        calls = [0]

        def load(model: torch.nn.Module, pairs: Pairs) -> None:
            calls[0] += 1
            if calls[0] <= after:
                loads(model, pairs)

        return ToyEngine(Model(w=(8, 8), v=(8,)), load)

    return make


def _processed_once() -> ToyEngine:
    """A post-load step that sets a flag, and does nothing where it is set."""
    attention: Any = Model(w=(6, 4))
    model = Model(attn=attention)
    attention.register_buffer("w_t", torch.zeros(4, 6, dtype=torch.bfloat16), persistent=False)
    attention.already_processed = False

    def settle(model: torch.nn.Module, modules: Set[str]) -> None:
        if "attn" in modules and not attention.already_processed:
            model.get_buffer("attn.w_t").copy_(parameter(model, "attn.w").t())
            attention.already_processed = True

    return ToyEngine(model, one_by_one(_copy), settle)


def _loaded_all() -> ToyEngine:
    """What is derived is derived whenever as many tensors as the layer has have come, in whatever calls."""
    count = [0]

    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        parameter(model, name).copy_(tensor)
        count[0] += 1
        if count[0] % 2 == 0:
            parameter(model, "l.kc").copy_(_dequantised(parameter(model, "l.w"), parameter(model, "l.n")))

    return ToyEngine(Model(l=Model(w=(6, 4), n=(4,), kc=(6, 4))), one_by_one(load))


# ---------------------------------------------------------------------- inputs


def _averaged(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Three shards of one weight, averaged: the first one begins anew."""
    target = parameter(model, "w")
    if name == "shards.0.w":
        target.zero_()
    target.add_(tensor / 3)


def _clamping(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """The tensor that is loaded is changed in place before it is copied."""
    parameter(model, name).copy_(tensor.clamp_(-1e4, 1e4))


PAIR: Mapping[str, tuple[int, ...]] = {"l.weight": (6, 4), "l.scale": (6, 1)}
ROWS: Mapping[str, tuple[int, ...]] = {"q": (2, 4), "k": (2, 4), "v": (2, 4)}
TWO: Mapping[str, tuple[int, ...]] = {f"layers.{i}.w": (4, 4) for i in range(2)}
EXPERTS: Mapping[str, tuple[int, ...]] = {
    "experts.w1": (4, 4), "experts.w3": (4, 4), "experts.w1_scale": (1,), "experts.w3_scale": (1,)
}  # fmt: skip


def _kinds(shapes: Mapping[str, tuple[int, ...]], kind: Kind) -> dict[str, Kind]:
    return dict.fromkeys(shapes, kind)


STATEFUL: Mapping[str, Case] = {
    "a pair that waits": Case(_pair(), PAIR, _kinds(PAIR, LAYER)),
    "a pair that waits, the scale first": Case(
        _pair(), {name: PAIR[name] for name in ("l.scale", "l.weight")}, _kinds(PAIR, LAYER)
    ),
    "a pair of two modules that waits": Case(
        _pair("layers.0.weight", "layers.1.scale"),
        {"layers.0.weight": (6, 4), "layers.1.scale": (6, 1)},
        {"layers.0.weight": MODEL, "layers.1.scale": MODEL},
    ),
    "three of a kind that wait": Case(
        _fusing("l.q", "l.k", "l.v"), {f"l.{name}": shape for name, shape in ROWS.items()}, homes={"l.q": 1}
    ),
    "three of three modules that wait": Case(_fusing("q", "k", "v"), ROWS, _kinds(ROWS, MODEL)),
    "any two are a pair": Case(
        _counting_pairs, {"l.weight": (4, 4), "l.scale": (4, 4)}, refused="not the same each time"
    ),
    "scaled by another module": Case(
        _scaled_by_another_module, {"scale": (1,), **TWO}, _kinds({"scale": (1,), **TWO}, MODEL)
    ),
    "fused experts and scales": Case(_fused_experts, EXPERTS, _kinds(EXPERTS, LAYER)),
    "made of a live neighbour": Case(_reads_a_neighbour, {"l.w": (6, 4), "l.n": (4,)}, {"l.w": LAYER, "l.n": LAYER}),
    "made of another layer": Case(lambda: _reads_another_layer(by_numpy=False), TWO, _kinds(TWO, LAYER)),
    "made of another layer, by numpy": Case(lambda: _reads_another_layer(by_numpy=True), TWO, _kinds(TWO, MODEL)),
    "a draft that copies": Case(
        lambda: _draft(alone=False), {"model.embed": (8, 4), "draft.fc": (4, 4)}, homes={"model.embed": 2}
    ),
    "a draft of nothing else": Case(lambda: _draft(alone=True), {"model.embed": (8, 4)}, homes={"model.embed": 2}),
    "counts what was loaded": Case(_loaded_all, {"l.w": (6, 4), "l.n": (4,)}, {"l.w": LAYER, "l.n": LAYER}),
    "averaged shards": Case(
        lambda: ToyEngine(Model(w=(4, 4)), one_by_one(_averaged)),
        {f"shards.{i}.w": (4, 4) for i in range(3)},
        {f"shards.{i}.w": LAYER for i in range(3)},
    ),
    "changes what it is given": Case(
        lambda: ToyEngine(Model(w=(8, 8)), one_by_one(_clamping)), {"w": (8, 8)}, {"w": LAYER}
    ),
    **{
        f"stops after {calls} loads": Case(
            _stops(calls, one_by_one(_copy)), {"w": (8, 8), "v": (8,)}, refused="each time"
        )
        for calls in range(1, 7)
    },
    "processed once": Case(_processed_once, {"attn.w": (6, 4)}, refused=r"attn\.w_t.*each time"),
}
