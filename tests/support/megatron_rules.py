"""Layers that Megatron-core models have beyond the built-in rules, restated from their layout; runs on each rank.

T  tensor-parallel ranks      K  key heads      V  value heads (V / K of them for a key head)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dcr.errors import SchemaError
from dcr.layout.boxes import Box, Dim
from dcr.probing.bits import bits_of, random_bits, tensor_of
from dcr.probing.tensors import named
from dcr.seams import Source
from dcr.sources import megatron, probe
from dcr.sources.megatron import LAYER, TO, Geometry, Parts, Rule
from support.megatrons import HIDDEN, Model, Place, canonical, facts, groups, layer, local, tree
from support.ranks import _canonical, assembled

# ---------------------------------------------------------------------- Gated Delta Net

KEYS, VALUES, KEY_DIM, VALUE_DIM, CONV = 4, 8, 2, 3, 4
EACH = VALUES // KEYS
IN = (KEYS * KEY_DIM, KEYS * KEY_DIM, VALUES * VALUE_DIM, VALUES * VALUE_DIM, VALUES, VALUES)  # rows of q k v z b a
DELTA, NET = "decoder.layers.0.self_attention.", "model.layers.0.linear_attn."
SHAPES = {
    "in_proj_qkvz.weight": (sum(IN[:4]), HIDDEN),
    "in_proj_ba.weight": (sum(IN[4:]), HIDDEN),
    "conv1d.weight": (sum(IN[:3]), 1, CONV),
    "A_log": (VALUES,),
    "dt_bias": (VALUES,),
    "norm.weight": (VALUE_DIM,),
    "out_proj.weight": (HIDDEN, VALUES * VALUE_DIM),
}


def checkpoint() -> dict[str, torch.Tensor]:
    """The layer in random bits."""
    found = {
        NET + name: tensor_of(random_bits(int(np.prod(shape)), "bfloat16", (6, i)), "bfloat16", shape)
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    found[NET + "A_log"].nan_to_num_(0)  # kept in fp32, and rounded
    return found


def cut(whole: Mapping[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    """A rank's tensors: of in_proj its [q | k | v | z | b | a], which the checkpoint has key head by key head."""
    qkvz, ba = (whole[f"{NET}in_proj_{x}.weight"].view(KEYS, -1, HIDDEN) for x in ("qkvz", "ba"))
    by_head = [KEY_DIM, KEY_DIM, EACH * VALUE_DIM, EACH * VALUE_DIM]
    parts = [*qkvz.split(by_head, 1), *ba.split(EACH, 1)]
    conv = whole[NET + "conv1d.weight"].split(IN[:3])
    return {
        "in_proj.weight": torch.cat([part.chunk(size)[rank].reshape(-1, HIDDEN) for part in parts]),
        "conv1d.weight": torch.cat([part.chunk(size)[rank] for part in conv]),
        "A_log": whole[NET + "A_log"].chunk(size)[rank],
        "dt_bias": whole[NET + "dt_bias"].chunk(size)[rank],
        "out_norm.weight": whole[NET + "norm.weight"],
        "out_proj.weight": whole[NET + "out_proj.weight"].chunk(size, 1)[rank],
    }


def _split(tensor: torch.Tensor, geometry: Geometry, rows: tuple[int, ...]) -> list[list[torch.Tensor]]:
    """By part, every rank's rows of it."""
    by_rank = megatron.gathered(tensor, geometry.tp)
    return [list(part) for part in zip(*(one.split([n // len(by_rank) for n in rows]) for one in by_rank), strict=True)]


def _in_proj(tensor: torch.Tensor, geometry: Geometry) -> Parts:
    heads = [torch.cat(part).view(KEYS, -1, HIDDEN) for part in _split(tensor, geometry, IN)]
    yield 0, [torch.cat(some, 1).reshape(-1, HIDDEN) for some in (heads[:4], heads[4:])]


def _conv(tensor: torch.Tensor, geometry: Geometry) -> Parts:
    yield 0, [torch.cat([torch.cat(part) for part in _split(tensor, geometry, IN[:3])])]


def _rounded(tensor: torch.Tensor, geometry: Geometry) -> Parts:
    for expert, found in megatron.WAYS["column"](tensor, geometry):
        yield expert, [one.bfloat16() for one in found]


_AT, _NET = LAYER + r"self_attention\.", TO + "linear_attn."
DELTA_NET: list[Rule] = [
    (_AT + r"in_proj\.weight", _in_proj, [_NET + f"in_proj_{x}.weight" for x in ("qkvz", "ba")]),
    (_AT + r"conv1d\.weight", _conv, [_NET + "conv1d.weight"]),
    (_AT + "A_log", _rounded, [_NET + "A_log"]),
    (_AT + "dt_bias", "column", [_NET + "dt_bias"]),
    (_AT + r"out_norm\.weight", "whole", [_NET + "norm.weight"]),
    (_AT + r"out_proj\.weight", "row", [_NET + "out_proj.weight"]),
]


def delta_net(size: int) -> dict[str, Any]:
    """The layer over `size` tensor-parallel ranks (and replicas of them), against the checkpoint it was cut from."""
    place, tp, _ = groups(Model(tp=size))
    whole = checkpoint()
    tensors = {DELTA + name: tensor for name, tensor in cut(whole, place.tp, size).items()}
    tensors[DELTA + "A_log"] = tensors[DELTA + "A_log"].float()
    net, sizes = tree(iter(tensors.items())), Geometry(KEYS, KEYS, 0, tp=tp)
    source = megatron.source(net, sizes, rules=DELTA_NET)
    exported = dict(megatron.Exporter(sizes, DELTA_NET)(dict(net.named_parameters())))
    return {
        **facts(source, whole),
        "exported": sorted(n for n in whole if not np.array_equal(bits_of(exported[n]), bits_of(whole[n]))),
        "misplaced": misplaced(source, net, place.tp, size),
    }


def misplaced(source: Source, net: nn.Module, rank: int, size: int) -> list[str]:
    """The tensors whose boxes are not where the layout puts each element: the same cut, of a checkpoint of numbers."""
    first, numbers = 0, {}
    for name, shape in SHAPES.items():
        numbers[NET + name] = torch.arange(first, first + int(np.prod(shape))).view(shape)
        first += int(np.prod(shape))
    held = {DELTA + name: tensor.reshape(-1).numpy() for name, tensor in cut(numbers, rank, size).items()}
    names = [name for name, _, _ in named(net)]
    wrong = []
    for shard in source.shards:
        target = source.schema.tensors[shard.tensor].name
        there = numbers[target].reshape(-1).numpy()[_canonical(shard.box)]
        here = held[names[shard.storage]][_canonical(shard.box.inverted())]
        wrong += [target] if not np.array_equal(here, there) else []
    return wrong


def declared(size: int) -> dict[str, Any]:
    """Declared maps of in_proj, right, and with b and a exchanged: what is demoted, and what still differs."""
    place, tp, _ = groups(Model(tp=size))
    whole, name = checkpoint(), DELTA + "in_proj.weight"
    weights = {name: cut(whole, place.tp, size)["in_proj.weight"]}
    options = {"export": megatron.Exporter(Geometry(KEYS, KEYS, 0, tp=tp), DELTA_NET), "groups": [[name]]}
    qkvz, ba = (NET + f"in_proj_{x}.weight" for x in ("qkvz", "ba"))
    probed = probe.source(weights, **options)
    found = [(name, one.box) for one in probed.shards if probed.schema.tensors[one.tensor].name == qkvz]
    heads, rows = KEYS // size, EACH * HIDDEN
    result = {}
    for case, order in {"right": (0, 1), "exchanged": (1, 0)}.items():
        boxes = []
        for part, at in enumerate(order):
            here, there = sum(IN[: 4 + part]) // size * HIDDEN, (place.tp * heads * 2 + at) * rows
            boxes.append((name, Box(here, there, (Dim(heads, rows, 2 * rows), Dim(rows, 1, 1)))))
        source = probe.source(weights, maps={qkvz: found, ba: boxes}, **options)
        published = assembled(source)
        result[case] = {
            "residual": [source.schema.tensors[t].name for group in source.residual for t in group.tensors],
            "differ": [one for one in (qkvz, ba) if not np.array_equal(published[one], bits_of(whole[one]))],
        }
    return result


# ---------------------------------------------------------------------- names under pipelines

PREDICTED = "mtp.layers.0."
_MTP = r"mtp\.layers\.(?P<layer>\d+)\."
# A layer that predicts one token more is a layer like others, inside a module of its own.
MTP_RULES: list[Rule] = [
    (_MTP + r"(?P<leaf>enorm|hnorm)\.weight", "whole", [TO + "{leaf}.weight"]),
    (_MTP + r"eh_proj\.weight", "column", [TO + "eh_proj.weight"]),
    (_MTP + r"final_layernorm\.weight", "whole", [TO + "shared_head.norm.weight"]),
    *(
        (pattern.replace(LAYER, _MTP + r"transformer_layer\."), way, names)
        for pattern, way, names in megatron.RULES
        if pattern.startswith(LAYER)
    ),
]


def _chunk(number: int, model: Model, place: Place, whole: Mapping[str, torch.Tensor]) -> nn.Module:
    """One of a pipeline's chunks; its layer has its number in the whole model, counted from 1."""
    tensors: Iterator[tuple[str, torch.Tensor]] = local(model, replace(place, pp=number), whole)
    chunk = tree(tensors)
    chunk.get_submodule("decoder.layers.0").layer_number = number + 1
    return chunk


def interleaved(model: Model) -> dict[str, Any]:
    """Two virtual stages on each of two pipeline ranks: a rank's chunks are not neighbours in the model."""
    place, tp, _ = groups(replace(model, pp=2))
    whole, one = canonical(model), replace(model, pp=model.layers)
    chunks = [_chunk(stage * 2 + place.pp, one, place, whole) for stage in range(2)]
    return facts(megatron.source(chunks, Geometry(model.heads, model.groups, model.vocab, tp=tp)), whole)


def predicting(model: Model) -> dict[str, Any]:
    """The same, and on the last stage a layer that predicts a further token, with a copy of the embedding."""
    place, tp, _ = groups(replace(model, pp=2))
    at, one = f"model.layers.{model.layers}.", replace(model, pp=model.layers)
    whole = canonical(replace(model, layers=model.layers + 1))
    shapes = {"enorm": (HIDDEN,), "hnorm": (HIDDEN,), "eh_proj": (HIDDEN, 2 * HIDDEN), "shared_head.norm": (HIDDEN,)}
    for i, (name, shape) in enumerate(shapes.items()):
        bits = random_bits(int(np.prod(shape)), model.dtype, (8, i))
        whole[f"{at}{name}.weight"] = tensor_of(bits, model.dtype, shape)
    chunks = [_chunk(stage * 2 + place.pp, one, place, whole) for stage in range(2)]
    sizes = Geometry(model.heads, model.groups, model.vocab, tp=tp)
    if place.pp == 1:
        more = tree(_predicted(at, one, place, whole))
        for name, module in more.named_children():
            chunks[1].add_module(name, module)
        with pytest.raises(SchemaError, match=r"which layer of the whole model 1\.mtp\.layers\.0 is, is not known"):
            list(megatron.Exporter(replace(sizes, layers={}), MTP_RULES)({f"1.{PREDICTED}enorm.weight": torch.ones(1)}))
        sizes = replace(sizes, layers={"1.mtp.layers.0": model.layers})
    return facts(megatron.source(chunks, sizes, rules=MTP_RULES), whole)


def _predicted(
    at: str, model: Model, place: Place, whole: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    first = local(model, replace(place, pp=0), whole)
    yield next((name, tensor) for name, tensor in first if name.startswith("embedding"))
    yield PREDICTED + "enorm.weight", whole[at + "enorm.weight"]
    yield PREDICTED + "hnorm.weight", whole[at + "hnorm.weight"]
    yield PREDICTED + "eh_proj.weight", whole[at + "eh_proj.weight"].chunk(model.tp)[place.tp]
    yield PREDICTED + "final_layernorm.weight", whole[at + "shared_head.norm.weight"]
    yield from layer(PREDICTED + "transformer_layer.", at, model, place, whole)
