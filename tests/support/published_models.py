"""The shapes of published models, from their configurations, as Megatron-core keeps them over 4 ranks; and their maps.

Dense weights are tensor-parallel over the 4 ranks, experts expert-parallel. Nothing here holds memory: a tensor is a
name, a way of `dcr.sources.megatron`, and shapes. `declare` states a map of each way by its formula; tests certify the
formulas at reduced sizes against the exporter, and prove at full size that they make up the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dcr.layout.boxes import Box, Dim
from dcr.layout.overlap import intersect
from dcr.layout.schema import TensorSpec

RANKS = 4
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Config:
    """Sizes as in a model's config.json."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocab: int
    qk_norm: bool = False
    experts: int = 0
    expert_ff: int = 0
    dense_layers: int = 0
    shared_expert: bool = False
    router_bias: bool = False
    q_lora: int = 0
    kv_lora: int = 0
    rope_dim: int = 0
    v_dim: int = 0
    pattern: str = ""
    mamba_heads: int = 0
    mamba_head_dim: int = 0
    mamba_groups: int = 0
    state: int = 0
    conv: int = 4
    quantised: bool = False


QWEN3_30B_A3B = Config("Qwen3-30B-A3B", 2048, 48, 32, 4, 128, 6144, 151936, qk_norm=True, experts=128, expert_ff=768)
QWEN3_8B = Config("Qwen3-8B", 4096, 36, 32, 8, 128, 12288, 151936, qk_norm=True)
LLAMA_8B = Config("Llama-3.1-8B", 4096, 32, 32, 8, 128, 14336, 128256)
DEEPSEEK_V3 = Config(
    "DeepSeek-V3, bf16 checkpoint",
    *(7168, 61, 128, 128, 128, 18432, 129280),
    experts=256,
    expert_ff=2048,
    dense_layers=3,
    shared_expert=True,
    router_bias=True,
    q_lora=1536,
    kv_lora=512,
    rope_dim=64,
    v_dim=128,
)
DEEPSEEK_V3_FP8 = replace(DEEPSEEK_V3, name="DeepSeek-V3, fp8 checkpoint", quantised=True)
NEMOTRON_H = Config(
    "Nemotron-H-8B",
    *(4096, 52, 32, 8, 128, 21504, 131072),
    pattern="M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    mamba_heads=128,
    mamba_head_dim=64,
    mamba_groups=8,
    state=128,
)
MODELS = (QWEN3_30B_A3B, QWEN3_8B, LLAMA_8B, DEEPSEEK_V3, DEEPSEEK_V3_FP8, NEMOTRON_H)


def reduced(config: Config) -> Config:
    """The same structure, small enough to export; each kind of layer occurs."""
    small = replace(config, hidden=16, heads=8, kv_heads=min(config.kv_heads, 8) // 2 or 1, head_dim=4, ff=24, vocab=41)
    small = replace(small, layers=2 if not config.pattern else 3, pattern="M-*" if config.pattern else "")
    if config.experts:
        small = replace(small, experts=8, expert_ff=8, dense_layers=min(config.dense_layers, 1))
    if config.q_lora:
        small = replace(small, q_lora=12, kv_lora=8, rope_dim=2, v_dim=4, kv_heads=8)
    if config.pattern:
        small = replace(small, mamba_heads=8, mamba_head_dim=2, mamba_groups=4, state=3)
    return small


@dataclass(frozen=True)
class Tensor:
    """A parameter: its name, its way, this rank's shape; canonical names and shapes. expert: is one of a rank's own."""

    name: str
    way: str
    local: Shape
    targets: Sequence[tuple[str, Shape]]
    dtype: str = "bfloat16"
    to: str = "bfloat16"
    expert: int | None = None


def tensors(c: Config) -> Iterator[Tensor]:
    """Every parameter of a model, once; experts by their global number."""
    root = "backbone" if c.pattern else "model"
    padded = math.ceil(c.vocab / (32 * RANKS)) * 32 * RANKS
    embed = f"{root}.embeddings.weight" if c.pattern else "model.embed_tokens.weight"
    norm = f"{root}.norm_f.weight" if c.pattern else "model.norm.weight"
    yield Tensor(
        "embedding.word_embeddings.weight", "vocab", (padded // RANKS, c.hidden), [(embed, (c.vocab, c.hidden))]
    )
    yield Tensor("output_layer.weight", "vocab", (padded // RANKS, c.hidden), [("lm_head.weight", (c.vocab, c.hidden))])
    yield Tensor("decoder.final_norm.weight", "whole", (c.hidden,), [(norm, (c.hidden,))])
    for i in range(c.layers):
        at, to = f"decoder.layers.{i}.", f"{root}.layers.{i}."
        if c.pattern:
            yield from _hybrid(c, c.pattern[i], at, to)
            continue
        yield _whole(at + "input_layernorm.weight", to + "input_layernorm.weight", (c.hidden,))
        yield _whole(at + "pre_mlp_layernorm.weight", to + "post_attention_layernorm.weight", (c.hidden,))
        yield from (
            _latent(c, at + "self_attention.", to + "self_attn.")
            if c.q_lora
            else _attention(c, at + "self_attention.", to + "self_attn.")
        )
        yield from (
            _mlp(c, at + "mlp.", to + "mlp.")
            if i < c.dense_layers or not c.experts
            else _moe(c, at + "mlp.", to + "mlp.")
        )


def _whole(name: str, target: str, shape: Shape, **options: str) -> Tensor:
    return Tensor(name, "whole", shape, [(target, shape)], **options)


def _column(name: str, target: str, shape: Shape, **options: str) -> Tensor:
    return Tensor(name, "column", (shape[0] // RANKS, *shape[1:]), [(target, shape)], **options)


def _row(name: str, target: str, shape: Shape) -> Tensor:
    return Tensor(name, "row", (shape[0], shape[1] // RANKS), [(target, shape)])


def _gated(name: str, targets: Sequence[str], ff: int, hidden: int) -> Tensor:
    return Tensor(name, "gated", (2 * ff // RANKS, hidden), [(target, (ff, hidden)) for target in targets])


def _attention(c: Config, at: str, to: str) -> Iterator[Tensor]:
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    targets = [(to + f"{x}_proj.weight", (rows, c.hidden)) for x, rows in (("q", q), ("k", kv), ("v", kv))]
    yield Tensor(at + "linear_qkv.weight", "qkv", ((q + 2 * kv) // RANKS, c.hidden), targets)
    yield _row(at + "linear_proj.weight", to + "o_proj.weight", (c.hidden, q))
    if c.qk_norm:
        for x in "qk":
            yield _whole(at + f"{x}_layernorm.weight", to + f"{x}_norm.weight", (c.head_dim,))


def _latent(c: Config, at: str, to: str) -> Iterator[Tensor]:
    """Latent attention: down-projections on every rank, up-projections by heads."""
    q, kv = c.heads * (c.head_dim + c.rope_dim), c.heads * (c.head_dim + c.v_dim)
    yield _whole(at + "linear_q_down_proj.weight", to + "q_a_proj.weight", (c.q_lora, c.hidden))
    yield _whole(at + "q_layernorm.weight", to + "q_a_layernorm.weight", (c.q_lora,))
    yield _column(at + "linear_q_up_proj.weight", to + "q_b_proj.weight", (q, c.q_lora))
    yield _whole(
        at + "linear_kv_down_proj.weight", to + "kv_a_proj_with_mqa.weight", (c.kv_lora + c.rope_dim, c.hidden)
    )
    yield _whole(at + "kv_layernorm.weight", to + "kv_a_layernorm.weight", (c.kv_lora,))
    yield _column(at + "linear_kv_up_proj.weight", to + "kv_b_proj.weight", (kv, c.kv_lora))
    yield _row(at + "linear_proj.weight", to + "o_proj.weight", (c.hidden, c.heads * c.v_dim))


def _mlp(c: Config, at: str, to: str) -> Iterator[Tensor]:
    yield _gated(at + "linear_fc1.weight", [to + "gate_proj.weight", to + "up_proj.weight"], c.ff, c.hidden)
    yield _row(at + "linear_fc2.weight", to + "down_proj.weight", (c.hidden, c.ff))


def _moe(c: Config, at: str, to: str) -> Iterator[Tensor]:
    yield _whole(at + "router.weight", to + "gate.weight", (c.experts, c.hidden))
    if c.router_bias:
        bias = at + "router.expert_bias", to + "gate.e_score_correction_bias", (c.experts,)
        yield _whole(*bias, dtype="float32", to="float32")
    if c.shared_expert:
        shared = [to + f"shared_experts.{x}_proj.weight" for x in ("gate", "up")]
        yield _gated(at + "shared_experts.linear_fc1.weight", shared, c.expert_ff, c.hidden)
        yield _row(
            at + "shared_experts.linear_fc2.weight", to + "shared_experts.down_proj.weight", (c.hidden, c.expert_ff)
        )
    each = c.experts // RANKS
    for e in range(c.experts):
        one, name = f"{to}experts.{e}.", at + "experts.linear_fc{}.weight" + str(e % each)
        up, down = (c.expert_ff, c.hidden), (c.hidden, c.expert_ff)
        halves = [(one + "gate_proj.weight", up), (one + "up_proj.weight", up)]
        yield Tensor(name.format(1), "expert gated", (2 * c.expert_ff, c.hidden), halves, expert=e)
        yield Tensor(name.format(2), "expert row", down, [(one + "down_proj.weight", down)], expert=e)


def _hybrid(c: Config, kind: str, at: str, to: str) -> Iterator[Tensor]:
    yield _whole(at + "norm.weight", to + "norm.weight", (c.hidden,))
    at, to = at + "mixer.", to + "mixer."
    if kind == "*":
        yield from _attention(c, at, to)
    elif kind == "-":
        yield _column(at + "linear_fc1.weight", to + "up_proj.weight", (c.ff, c.hidden))
        yield _row(at + "linear_fc2.weight", to + "down_proj.weight", (c.hidden, c.ff))
    else:
        yield from _mamba(c, at, to)


def cuts(c: Config, part: str) -> list[int]:
    """The extents of the parts that in_proj and conv1d hold one after another."""
    inner, groups = c.mamba_heads * c.mamba_head_dim, c.mamba_groups * c.state
    return [inner, inner, groups, groups, c.mamba_heads] if part == "mamba in" else [inner, groups, groups]


def _mamba(c: Config, at: str, to: str) -> Iterator[Tensor]:
    inner = c.mamba_heads * c.mamba_head_dim
    for name, way, rest in (
        ("in_proj.weight", "mamba in", (c.hidden,)),
        ("conv1d.weight", "mamba conv", (1, c.conv)),
        ("conv1d.bias", "mamba conv", ()),
    ):
        rows = sum(cuts(c, way))
        yield Tensor(at + name, way, (rows // RANKS, *rest), [(to + name, (rows, *rest))])
    yield _column(at + "A_log", to + "A_log", (c.mamba_heads,), dtype="float32")
    yield _column(at + "D", to + "D", (c.mamba_heads,))
    yield _column(at + "dt_bias", to + "dt_bias", (c.mamba_heads,))
    yield _column(at + "norm.weight", to + "norm.weight", (inner,))
    yield _row(at + "out_proj.weight", to + "out_proj.weight", (c.hidden, inner))


def specs(c: Config) -> list[TensorSpec]:
    """The checkpoint that is published."""
    return [TensorSpec(name, one.to, shape) for one in tensors(c) for name, shape in one.targets]


def line(numel: int, here: int = 0, there: int = 0) -> Box:
    return Box(here, there, (Dim(numel, 1, 1),))


def declare(c: Config, one: Tensor) -> Iterator[tuple[str, int, Box]]:
    """(canonical name, rank, box from that rank's row-major elements) of one parameter, by the formula of its way."""
    name, shape = one.targets[0]
    numel, rest = math.prod(one.local), math.prod(one.local[1:])
    if one.expert is not None:
        rank, part = one.expert // (c.experts // RANKS), numel // len(one.targets)
        for i, (target, _) in enumerate(one.targets):
            yield target, rank, line(part, i * part)
        return
    for rank in range(RANKS):
        if one.way == "whole" and rank == 0:
            yield name, rank, line(numel)
        elif one.way == "column":
            yield name, rank, line(numel, 0, rank * numel)
        elif one.way == "vocab":
            yield name, rank, line(max(0, min(numel, shape[0] * rest - rank * numel)), 0, rank * numel)
        elif one.way == "row":
            rows, cols = one.local
            yield name, rank, Box(0, rank * cols, (Dim(rows, cols, cols * RANKS), Dim(cols, 1, 1)))
        elif one.way == "gated":
            for i, (target, _) in enumerate(one.targets):
                yield target, rank, line(numel // 2, i * numel // 2, rank * numel // 2)
        elif one.way == "qkv":
            yield from _declare_qkv(c, one, rank)
        elif one.way.startswith("mamba"):
            here = first = 0
            for n in cuts(c, one.way):
                yield name, rank, line(n * rest // RANKS, here, (first + rank * n // RANKS) * rest)
                here, first = here + n * rest // RANKS, first + n


def _declare_qkv(c: Config, one: Tensor, rank: int) -> Iterator[tuple[str, int, Box]]:
    """Heads interleaved by group, cut evenly into ranks, if need be within a group."""
    each, head, numel = c.heads // c.kv_heads, c.head_dim * c.hidden, math.prod(one.local)
    held = line(numel, 0, rank * numel)  # from this rank's elements to those of the interleaved whole
    for (target, _), first, count in zip(one.targets, (0, each, each + 1), (each, 1, 1), strict=True):
        part = Box(0, first * head, (Dim(c.kv_heads, count * head, (each + 2) * head), Dim(count * head, 1, 1)))
        for box in intersect(part, held):  # from the canonical tensor to this rank's elements
            yield target, rank, box.inverted()
