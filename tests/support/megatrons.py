"""Megatron-core's layouts, restated from its documentation, cut out of canonical tensors; and what runs on each rank.

T  tensor-parallel ranks      G  key-value groups      Q  query heads per group      D  elements per head
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dcr.layout.boxes import Box, Dim
from dcr.probing.bits import bits_of, random_bits, tensor_of
from dcr.seams import Source
from dcr.sources import megatron, probe
from dcr.sources.megatron import Geometry
from dcr.sources.probe import Span
from support.ranks import assembled

HIDDEN, DIM, FF, EXPERT_FF = 16, 4, 24, 8


@dataclass(frozen=True)
class Model:
    """A model's sizes, and how it is spread over ranks. Ranks are numbered tensor-parallel first, then the rest."""

    layers: int = 2
    heads: int = 8
    groups: int = 8
    vocab: int = 101
    padded: int = 128
    experts: int = 0
    style: str = "sequential"
    tied: bool = False
    bias: bool = False
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    dtype: str = "bfloat16"


def canonical(model: Model) -> dict[str, torch.Tensor]:
    """The checkpoint, in random bits."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (model.vocab, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocab, HIDDEN)
    for i in range(model.layers):
        to, kv = f"model.layers.{i}.", model.groups * DIM
        for part, rows in (("q", model.heads * DIM), ("k", kv), ("v", kv)):
            shapes[f"{to}self_attn.{part}_proj.weight"] = (rows, HIDDEN)
            if model.bias:
                shapes[f"{to}self_attn.{part}_proj.bias"] = (rows,)
        shapes |= {
            f"{to}self_attn.o_proj.weight": (HIDDEN, model.heads * DIM),
            f"{to}self_attn.q_norm.weight": (DIM,),
            f"{to}input_layernorm.weight": (HIDDEN,),
            f"{to}post_attention_layernorm.weight": (HIDDEN,),
        }
        if model.bias:
            shapes[f"{to}self_attn.o_proj.bias"] = (HIDDEN,)
        shapes |= _mlp_shapes(f"{to}mlp.", model)
    found = {
        name: tensor_of(random_bits(int(np.prod(shape)), model.dtype, (5, i)), model.dtype, shape)
        for i, (name, shape) in enumerate(shapes.items())
    }
    for name in found:
        if name.endswith("e_score_correction_bias"):
            found[name] = found[name].float()
    return found


def _mlp_shapes(to: str, model: Model) -> dict[str, tuple[int, ...]]:
    if not model.experts:
        return {
            f"{to}gate_proj.weight": (FF, HIDDEN),
            f"{to}up_proj.weight": (FF, HIDDEN),
            f"{to}down_proj.weight": (HIDDEN, FF),
        }
    shapes: dict[str, tuple[int, ...]] = {
        f"{to}gate.weight": (model.experts, HIDDEN),
        f"{to}gate.e_score_correction_bias": (model.experts,),
    }
    for e in range(model.experts):
        shapes |= {
            f"{to}experts.{e}.gate_proj.weight": (EXPERT_FF, HIDDEN),
            f"{to}experts.{e}.up_proj.weight": (EXPERT_FF, HIDDEN),
            f"{to}experts.{e}.down_proj.weight": (HIDDEN, EXPERT_FF),
        }
    return shapes


@dataclass(frozen=True)
class Place:
    """Where a rank stands."""

    tp: int
    pp: int
    ep: int
    etp: int


def local(model: Model, place: Place, whole: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """A rank's tensors under Megatron's names."""
    first, last = place.pp == 0, place.pp == model.pp - 1
    if first:
        yield "embedding.word_embeddings.weight", _vocab(whole["model.embed_tokens.weight"], model, place)
    if last and (not model.tied or model.pp > 1):
        head = whole["model.embed_tokens.weight" if model.tied else "lm_head.weight"]
        yield "output_layer.weight", _vocab(head, model, place)
    if last:
        yield "decoder.final_layernorm.weight", whole["model.norm.weight"]
    each = model.layers // model.pp
    for i in range(each):
        yield from layer(f"decoder.layers.{i}.", f"model.layers.{place.pp * each + i}.", model, place, whole)


def layer(
    to: str, at: str, model: Model, place: Place, whole: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """A rank's tensors of one layer, given its path in Megatron and in the checkpoint."""
    yield to + "input_layernorm.weight", whole[at + "input_layernorm.weight"]
    yield to + "pre_mlp_layernorm.weight", whole[at + "post_attention_layernorm.weight"]
    yield to + "self_attention.q_layernorm.weight", whole[at + "self_attn.q_norm.weight"]
    for leaf in ("weight", "bias") if model.bias else ("weight",):
        yield f"{to}self_attention.linear_qkv.{leaf}", _qkv(at, leaf, model, place, whole)
    yield to + "self_attention.linear_proj.weight", whole[at + "self_attn.o_proj.weight"].chunk(model.tp, 1)[place.tp]
    if model.bias:
        yield to + "self_attention.linear_proj.bias", whole[at + "self_attn.o_proj.bias"]
    yield from _mlp(to + "mlp.", at + "mlp.", model, place, whole)


def _vocab(tensor: torch.Tensor, model: Model, place: Place) -> torch.Tensor:
    padding = torch.full((model.padded - model.vocab, HIDDEN), float("nan"), dtype=tensor.dtype)
    return torch.cat([tensor, padding]).chunk(model.tp)[place.tp]


def _qkv(at: str, leaf: str, model: Model, place: Place, whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
    q, k, v = (whole[f"{at}self_attn.{x}_proj.{leaf}"] for x in "qkv")
    rest = q.shape[1:]
    split = [x.view(model.groups, -1, DIM, *rest) for x in (q, k, v)]
    return torch.cat(split, 1).reshape(-1, *rest).chunk(model.tp)[place.tp]


def _fused(gate: torch.Tensor, up: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])


def _mlp(
    to: str, at: str, model: Model, place: Place, whole: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    if not model.experts:
        yield (
            to + "linear_fc1.weight",
            _fused(whole[at + "gate_proj.weight"], whole[at + "up_proj.weight"], place.tp, model.tp),
        )
        yield to + "linear_fc2.weight", whole[at + "down_proj.weight"].chunk(model.tp, 1)[place.tp]
        return
    yield to + "router.weight", whole[at + "gate.weight"]
    yield to + "router.expert_bias", whole[at + "gate.e_score_correction_bias"]
    count = model.experts // model.ep
    ups, downs = [], []
    for e in range(count):
        one = f"{at}experts.{place.ep * count + e}."
        ups.append(_fused(whole[one + "gate_proj.weight"], whole[one + "up_proj.weight"], place.etp, model.etp))
        downs.append(whole[one + "down_proj.weight"].chunk(model.etp, 1)[place.etp])
    if model.style == "packed":
        yield to + "experts.weight1", torch.stack([x.t() for x in ups]).reshape(HIDDEN, -1)
        yield to + "experts.weight2", torch.stack([x.t() for x in downs]).reshape(-1, HIDDEN)
        return
    for e in range(count):
        names = ("local_experts.{e}.linear_fc{n}.weight", "linear_fc{n}.weight{e}")[model.style == "grouped"]
        yield f"{to}experts." + names.format(e=e, n=1), ups[e]
        yield f"{to}experts." + names.format(e=e, n=2), downs[e]


def tree(tensors: Iterator[tuple[str, torch.Tensor]]) -> nn.Module:
    """A module of tensors with dotted names; float32 ones among bfloat16 are buffers."""
    root = nn.Module()
    for name, tensor in tensors:
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        if leaf == "expert_bias":
            module.register_buffer(leaf, tensor.clone())
        else:
            module.register_parameter(leaf, nn.Parameter(tensor.clone(), requires_grad=False))
    return root


def groups(model: Model) -> tuple[Place, Any, Any]:
    """This rank's place, and its groups. Tensor-parallel ranks are neighbours; pipeline stages are the outermost."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stage, per_stage = divmod(rank, size // model.pp)[0], size // model.pp
    inner = rank % per_stage
    place = Place(inner % model.tp, stage, inner // model.etp % model.ep, inner % model.etp)
    return place, _group(model.tp), _group(model.etp)


def _group(width: int) -> Any:
    mine = None
    for start in range(0, dist.get_world_size(), width):
        group = dist.new_group(list(range(start, start + width)))
        if start <= dist.get_rank() < start + width:
            mine = group
    return mine if width > 1 else None


def geometry(model: Model, place: Place, tp: Any, etp: Any) -> Geometry:
    each = model.layers // model.pp
    layers = {f"decoder.layers.{i}": place.pp * each + i for i in range(each)}
    return Geometry(
        model.heads, model.groups, model.vocab, model.experts, model.tied, layers, tp, etp, place.ep, model.ep
    )


def published(model: Model) -> dict[str, Any]:
    """Cut the checkpoint, make the source, and compare what all ranks publish with the checkpoint, bit for bit."""
    place, tp, etp = groups(model)
    whole = canonical(model)
    net = tree(local(model, place, whole))
    return facts(megatron.source(net, geometry(model, place, tp, etp)), whole)


def facts(source: Source, whole: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """How what all ranks publish compares with the checkpoint, bit for bit, and what of it this rank owns."""
    found = assembled(source)
    by_tensor = Counter(shard.tensor for shard in source.shards)
    return {
        "names": sorted(found) == sorted(whole),
        "differ": sorted(name for name in whole if not np.array_equal(found.get(name), bits_of(whole[name]))),
        "residual": [group.reason for group in source.residual],
        "boxes": max(by_tensor.values()),
        "owned": sum(shard.box.numel * source.schema.tensors[shard.tensor].width for shard in source.shards),
        "bytes": source.schema.nbytes,
    }


def masters(model: Model) -> dict[str, Any]:
    """The distributed optimizer: each data-parallel rank holds fp32 masters of a flat range of each parameter."""
    place, tp, etp = groups(model)
    rank, size = dist.get_rank() // model.tp, dist.get_world_size() // model.tp
    whole = canonical(model)
    net = tree(local(model, place, whole))
    spans, expected = {}, {}
    for number, (name, parameter) in enumerate(net.named_parameters()):
        numel = parameter.numel()
        start, stop = numel * rank // size, numel * (rank + 1) // size
        fp32 = tensor_of(
            random_bits(numel, "float32", (number, 0 if "norm" in name else place.tp)), "float32", (numel,)
        )
        fp32[fp32.isnan()] = 0
        spans[name] = Span(start, fp32[start:stop].clone())
        expected[name] = fp32.bfloat16().view(parameter.shape)
    source = megatron.source(net, geometry(model, place, tp, etp), masters=spans)
    found = assembled(source)
    exporter = megatron.Exporter(geometry(model, place, tp, etp))
    differ = [name for name, tensor in exporter(expected) if not np.array_equal(found[name], bits_of(tensor))]
    return {"differ": differ, "names": sorted(found) == sorted(whole), "residual": len(source.residual)}


def swapped(model: Model) -> dict[str, Any]:
    """A declared map with gate and up exchanged."""
    place, tp, etp = groups(model)
    net = tree(local(model, place, canonical(model)))
    name, rows = "decoder.layers.0.mlp.linear_fc1.weight", FF // model.tp
    half = rows * HIDDEN
    halves = [
        [(name, Box(start, place.tp * half, (Dim(half, 1, 1),)))] for start in ((half, 0) if model.tp else (0, half))
    ]
    to = "model.layers.0.mlp."
    weights = {name: dict(net.named_parameters())[name].detach()}
    source = probe.source(
        weights,
        export=megatron.Exporter(geometry(model, place, tp, etp)),
        groups=[[name]],
        maps={to + "gate_proj.weight": halves[0], to + "up_proj.weight": halves[1]},
    )
    found = assembled(source)
    whole = canonical(model)
    return {
        "direct": len(source.shards),
        "residual": [source.schema.tensors[t].name for group in source.residual for t in group.tensors],
        "differ": [name for name in found if not np.array_equal(found[name], bits_of(whole[name]))],
    }


def every(cases: list[tuple[str, Any, Any]]) -> dict[str, Any]:
    return {name: target(argument) for name, target, argument in cases}
