"""Megatron-core models: an exporter to checkpoint layout for the probe, and flat ranges of fp32 masters.

The exporter is plain code that gathers and splits tensors, as a dense export would; where its elements lie is found out
by running it over stand-ins, so there is no second statement of a layout that could differ from the first. Nothing of
megatron-core is imported: what is needed of a model are its parameters' names, its layers' numbers and a few sizes.

    T  tensor-parallel ranks      G  key-value groups      Q  query heads per group      D  elements per head
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
import torch.distributed as dist

from dcr.errors import SchemaError
from dcr.layout.schema import patterns
from dcr.probing.standins import Export
from dcr.probing.tensors import named
from dcr.sources import probe
from dcr.sources.mapped import MappedSource
from dcr.sources.probe import GROUP_ELEMS, Span
from dcr.sources.ranks import Peers

LAYER = r"decoder\.layers\.(?P<layer>\d+)\."
TO = "model.layers.{layer}."
EXPERT = TO + "mlp.experts.{expert}."


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes that parameter names and shapes do not tell.

    query_heads, kv_groups: of the whole model. vocab_size: without the padding. experts: of the whole model.
    tied: the output layer, where a pipeline's last stage has one, is a copy of the embedding.
    layers: layers' numbers in the whole model, by path, where they are not what the layers say (`layer_number`); if
    neither tells any, the number in the path counts.
    tp, etp: this rank's tensor-parallel groups, of dense and of expert weights; None means no such parallelism.
    ep_rank, ep_size: the expert-parallel rank and size.
    """

    query_heads: int
    kv_groups: int
    vocab_size: int
    experts: int = 0
    tied: bool = False
    layers: Mapping[str, int] | None = None
    tp: dist.ProcessGroup | None = None
    etp: dist.ProcessGroup | None = None
    ep_rank: int = 0
    ep_size: int = 1


# What a way yields: a local expert's number (0 without experts), and one tensor per canonical name.
Parts = Iterable[tuple[int, Sequence[torch.Tensor]]]
Way = Callable[[torch.Tensor, Geometry], Parts]

# Parameter names as a regular expression, what is done to the tensor (a name in WAYS, or a function), canonical names.
# The first rule that fits counts. {layer} and {expert} are numbers in the whole model.
Rule = tuple[str, str | Way, Sequence[str]]
RULES: Sequence[Rule] = (
    (r"embedding\.word_embeddings\.weight", "vocab", ["model.embed_tokens.weight"]),
    (r"output_layer\.weight", "vocab", ["lm_head.weight"]),
    (r"decoder\.final_(?:layernorm|norm)\.weight", "whole", ["model.norm.weight"]),
    (
        LAYER + r"(?:input_layernorm\.|self_attention\.linear_qkv\.layer_norm_)weight",
        "whole",
        [TO + "input_layernorm.weight"],
    ),
    (
        LAYER + r"self_attention\.linear_qkv\.(?P<leaf>weight|bias)",
        "qkv",
        [TO + f"self_attn.{x}_proj.{{leaf}}" for x in "qkv"],
    ),
    (LAYER + r"self_attention\.linear_proj\.weight", "row", [TO + "self_attn.o_proj.weight"]),
    (LAYER + r"self_attention\.linear_proj\.bias", "whole", [TO + "self_attn.o_proj.bias"]),
    (LAYER + r"self_attention\.(?P<which>[qk])_layernorm\.weight", "whole", [TO + "self_attn.{which}_norm.weight"]),
    (
        LAYER + r"(?:pre_mlp_layernorm\.|mlp\.linear_fc1\.layer_norm_)weight",
        "whole",
        [TO + "post_attention_layernorm.weight"],
    ),
    (
        LAYER + r"mlp\.linear_fc1\.(?P<leaf>weight|bias)",
        "gated",
        [TO + f"mlp.{x}_proj.{{leaf}}" for x in ("gate", "up")],
    ),
    (LAYER + r"mlp\.linear_fc2\.weight", "row", [TO + "mlp.down_proj.weight"]),
    (LAYER + r"mlp\.linear_fc2\.bias", "whole", [TO + "mlp.down_proj.bias"]),
    (LAYER + r"mlp\.router\.weight", "whole", [TO + "mlp.gate.weight"]),
    (LAYER + r"mlp\.router\.expert_bias", "whole", [TO + "mlp.gate.e_score_correction_bias"]),
    (
        LAYER + r"mlp\.shared_experts\.linear_fc1\.weight",
        "gated",
        [TO + f"mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up")],
    ),
    (LAYER + r"mlp\.shared_experts\.linear_fc2\.weight", "row", [TO + "mlp.shared_experts.down_proj.weight"]),
    (
        LAYER
        + r"mlp\.experts\.(?:local_experts\.(?P<expert>\d+)\.linear_fc1\.weight|linear_fc1\.weight(?P<grouped>\d+))",
        "expert gated",
        [EXPERT + f"{x}_proj.weight" for x in ("gate", "up")],
    ),
    (
        LAYER
        + r"mlp\.experts\.(?:local_experts\.(?P<expert>\d+)\.linear_fc2\.weight|linear_fc2\.weight(?P<grouped>\d+))",
        "expert row",
        [EXPERT + "down_proj.weight"],
    ),
    (LAYER + r"mlp\.experts\.weight1", "experts in", [EXPERT + f"{x}_proj.weight" for x in ("gate", "up")]),
    (LAYER + r"mlp\.experts\.weight2", "experts out", [EXPERT + "down_proj.weight"]),
)


TIED: Sequence[Rule] = ((r"output_layer\.weight", "vocab", ["model.embed_tokens.weight"]),)


def source(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    geometry: Geometry,
    *,
    rules: Sequence[Rule] = (),
    export: Export | None = None,
    masters: Mapping[str, Span] | None = None,
    group: dist.ProcessGroup | None = None,
    waive: Sequence[str] = (),
) -> MappedSource:
    """A Megatron-core model (or the chunks of one, under virtual pipeline stages). Collective over the group's ranks.

    rules: put before RULES, for models with names of their own. export: another exporter (Megatron-Bridge's, through
    `dcr.sources.probe.through`) instead of the rules. masters: the flat fp32 ranges that the distributed optimizer
    keeps on this rank, by parameter name; they are published, rounded, instead of the parameters. waive: patterns of
    names, as the model has them, of what no engine needs: parameters, and what else its checkpoint holds.

    Raises:
        SchemaError: no rule fits a parameter, the model's checkpoint holds more than tensors, or a waived pattern does
            not fit; names it.
    """
    chunks = model if isinstance(model, torch.nn.Module) else torch.nn.ModuleList(model)
    peers = Peers(group)
    chosen = export or Exporter(_with_layers(geometry, chunks), (*rules, *(TIED if geometry.tied else ()), *RULES))
    waive = patterns(waive)
    sizes = {name: tensor.numel() for name, tensor, _ in named(chunks, waive)}
    groups = list(_batches(sizes, peers))
    return probe.source(chunks, export=chosen, groups=groups, masters=masters, group=group, waive=waive)


class Exporter:
    """From a rank's parameters to canonical tensors, each parameter by itself; gathers within `tp` and `etp`."""

    def __init__(self, geometry: Geometry, rules: Sequence[Rule] = RULES) -> None:
        self._geometry = geometry
        self._rules = [(re.compile(r"(?:\d+\.)?(?:module\.)*" + pattern), way, names) for pattern, way, names in rules]

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            match, way, names = self._rule(name)
            fields = {key: value for key, value in match.groupdict().items() if value is not None}
            if "layer" in fields and self._geometry.layers is not None:
                fields["layer"] = self._number(name[: match.end("layer")], self._geometry.layers)
            named_expert = fields.get("expert", fields.get("grouped"))
            first = self._geometry.ep_rank * (self._geometry.experts // self._geometry.ep_size)
            for expert, parts in way(tensor, self._geometry):
                fields["expert"] = str(first + int(named_expert or expert))
                yield from ((target.format(**fields), part) for target, part in zip(names, parts, strict=True))

    @staticmethod
    def _number(path: str, layers: Mapping[str, int]) -> str:
        if path not in layers:
            raise SchemaError(f"which layer of the whole model {path} is, is not known; add it to `Geometry.layers`")
        return str(layers[path])

    def _rule(self, name: str) -> tuple[re.Match[str], Way, Sequence[str]]:
        for pattern, way, names in self._rules:
            if match := pattern.fullmatch(name):
                return match, WAYS[way] if isinstance(way, str) else way, names
        raise SchemaError(f"no rule says how {name} is exported; pass one in `rules`")


def _whole(tensor: torch.Tensor, _: Geometry) -> Parts:
    yield 0, [tensor]


def _row(tensor: torch.Tensor, geometry: Geometry) -> Parts:
    yield 0, [torch.cat(gathered(tensor, geometry.tp), 1)]


def _column(tensor: torch.Tensor, geometry: Geometry) -> Parts:
    yield 0, [torch.cat(gathered(tensor, geometry.tp), 0)]


def _vocab(tensor: torch.Tensor, geometry: Geometry) -> Parts:
    yield 0, [torch.cat(gathered(tensor, geometry.tp), 0)[: geometry.vocab_size]]


def _qkv(tensor: torch.Tensor, geometry: Geometry) -> Parts:
    """Per group: Q query heads, a key head, a value head; cut evenly over ranks, if need be within a group."""
    together = torch.cat(gathered(tensor, geometry.tp), 0)
    heads = geometry.query_heads // geometry.kv_groups
    groups = together.view(geometry.kv_groups, heads + 2, -1, *tensor.shape[1:])  # [G, Q + 2, D, ...]
    parts = groups[:, :heads], groups[:, heads], groups[:, heads + 1]
    yield 0, [part.reshape(-1, *tensor.shape[1:]) for part in parts]


def _gated(tensor: torch.Tensor, geometry: Geometry) -> Parts:
    yield 0, _halves(tensor, geometry.tp)


def _expert_gated(tensor: torch.Tensor, geometry: Geometry) -> Parts:
    yield 0, _halves(tensor, geometry.etp)


def _expert_row(tensor: torch.Tensor, geometry: Geometry) -> Parts:
    yield 0, [torch.cat(gathered(tensor, geometry.etp), 1)]


def _experts_in(tensor: torch.Tensor, geometry: Geometry) -> Parts:
    """All local experts in one tensor whose memory is [experts, hidden, 2 x ff]."""
    experts = geometry.experts // geometry.ep_size
    for expert, one in enumerate(tensor.view(experts, tensor.shape[0], -1)):
        yield expert, _halves(one.t().contiguous(), geometry.etp)


def _experts_out(tensor: torch.Tensor, geometry: Geometry) -> Parts:
    """All local experts in one tensor whose memory is [experts, ff, hidden]."""
    experts = geometry.experts // geometry.ep_size
    for expert, one in enumerate(tensor.view(experts, -1, tensor.shape[1])):
        yield expert, [torch.cat(gathered(one.t().contiguous(), geometry.etp), 1)]


WAYS: Mapping[str, Way] = {
    "whole": _whole,
    "row": _row,
    "column": _column,
    "vocab": _vocab,
    "qkv": _qkv,
    "gated": _gated,
    "expert gated": _expert_gated,
    "expert row": _expert_row,
    "experts in": _experts_in,
    "experts out": _experts_out,
}


def _halves(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Gate and up: each rank holds its part of the one, then its part of the other."""
    parts = [part.chunk(2) for part in gathered(tensor, group)]
    return [torch.cat([part[half] for part in parts]) for half in (0, 1)]


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Gather every rank's tensor, by rank."""
    size = dist.get_world_size(group) if group is not None else 1
    if size == 1:
        return [tensor]
    mine = tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
    every = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(every, mine, group=group)
    return [one.view(tensor.dtype).view(tensor.shape) for one in every]


def _with_layers(geometry: Geometry, chunks: torch.nn.Module) -> Geometry:
    """With the numbers that the layers themselves give (`layer_number`, counted from 1), where it has none."""
    layers: dict[str, int] = {}
    for name, module in chunks.named_modules():
        number = getattr(module, "layer_number", None)
        if isinstance(number, int) and re.fullmatch(r".*decoder\.layers\.\d+", name):
            layers[name] = number - 1
    layers |= geometry.layers or {}
    return replace(geometry, layers=layers) if layers else geometry


def _batches(sizes: Mapping[str, int], peers: Peers) -> Iterator[list[str]]:
    """All ranks' parameter names in batches of about GROUP_ELEMS elements on any one rank. Collective."""
    most: dict[str, int] = {}
    for data in peers.gather(msgspec.msgpack.encode(dict(sizes))):
        for name, size in msgspec.msgpack.decode(data, type=dict[str, int]).items():
            most[name] = max(size, most.get(name, 0))
    batch: list[str] = []
    room = GROUP_ELEMS
    for name, size in most.items():
        if batch and size > room:
            yield batch
            batch, room = [], GROUP_ELEMS
        batch.append(name)
        room -= size
    yield batch
