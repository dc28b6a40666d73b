"""What runs on each rank with megatron-core itself: real models, trained a few steps, and its own word on the layout.

The oracle is megatron-core's `sharded_state_dict`: for each local tensor it says where in the whole one it lies. What
is left to restate is the names, and that the heads of one group (query, key, value) lie together in the whole tensor.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dcr.probing.bits import bits_of, tensor_of
from dcr.sources import megatron
from dcr.sources.megatron import Geometry
from dcr.sources.ranks import Peers
from support.ranks import assembled

HIDDEN, FF, LAYERS, VOCAB, PADDED, STEPS = 64, 96, 2, 101, 128, 3


@dataclass(frozen=True)
class Case:
    """A model, and how it is spread over the ranks."""

    heads: int = 8
    groups: int = 8
    experts: int = 0
    tied: bool = False
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1


@contextlib.contextmanager
def parallel(case: Case) -> Iterator[Any]:
    """megatron-core's parallel state, on a machine without a GPU."""
    import megatron.core.tensor_parallel.random as random
    from megatron.core import parallel_state

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )
    try:
        yield parallel_state
    finally:
        parallel_state.destroy_model_parallel()


def build(case: Case, state: Any) -> torch.nn.Module:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    moe: dict[str, Any] = {}
    if case.experts:
        moe = {
            "num_moe_experts": case.experts,
            "moe_ffn_hidden_size": 32,
            "moe_router_topk": 2,
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
        }
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FF,
        num_attention_heads=case.heads,
        num_query_groups=case.groups,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        qk_layernorm=True,
        normalization="RMSNorm",
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **moe,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=case.experts or None, moe_grouped_gemm=False, normalization="RMSNorm", qk_layernorm=True
    )
    torch.manual_seed(0)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=PADDED,
        max_sequence_length=32,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=case.tied,
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
    )


def train(model: torch.nn.Module, case: Case, state: Any) -> None:
    """Steps of AdamW; on gradients of the model's own where one stage holds all of it, else on drawn ones."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    ids, positions = torch.arange(16).reshape(2, 8) % VOCAB, torch.arange(8).expand(2, 8)
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool).triu(1)
    for step in range(STEPS):
        if case.pp == 1 and not case.experts:
            model(ids, positions, mask, labels=ids.roll(1, 1)).mean().backward()
        for name, parameter in model.named_parameters():
            split = getattr(parameter, "tensor_model_parallel", False) or case.experts
            if parameter.grad is None:
                copy = "embedding.word_embeddings.weight" if name == "output_layer.weight" and case.tied else name
                generator = torch.Generator().manual_seed(step + zlib.crc32(copy.encode()))
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            elif not split:
                dist.all_reduce(parameter.grad, group=state.get_tensor_model_parallel_group())
        optimizer.step()
        optimizer.zero_grad()


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """megatron-core's whole tensors by its own keys, put together from all ranks as it says."""
    peers = Peers()
    parts: dict[str, list[Any]] = {}
    for value in model.sharded_state_dict().values():
        built = value.build() if hasattr(value, "build") else value
        for one in built.values() if isinstance(built, dict) else built if isinstance(built, list) else [built]:
            if hasattr(one, "global_offset") and hasattr(one, "local_shape"):
                parts.setdefault(one.key, []).append(one)
    keys = sorted({key for data in peers.gather("\n".join(parts).encode()) for key in data.decode().split("\n")})
    found = {}
    for key in keys:
        mine = parts.get(key, [])
        shapes = peers.gather(",".join(str(n) for n in (mine[0].global_shape if mine else ())).encode())
        dtype = "float32"
        shape = tuple(int(n) for n in next(data for data in shapes if data).decode().split(","))
        total: NDArray[np.int64] = np.zeros((2, *shape), np.int64)
        for one in mine:
            if one.replica_id in (0, (0, 0, 0)):
                ahead = one.prepend_axis_num
                local = bits_of(one.data).reshape((1,) * ahead + tuple(one.data.shape))
                span = tuple(slice(o, o + n) for o, n in zip(one.global_offset, local.shape, strict=True))
                total[(0, *span)] += local
                total[(1, *span)] += 1
        total = peers.sum(total)
        assert (total[1] == 1).all(), f"{key} is not whole"
        found[key] = tensor_of(total[0].astype(np.uint32).reshape(-1), dtype, shape)
    return found


NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
}


def checkpoint(case: Case, core: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Canonical names and tensors, from whole ones in megatron-core's order."""
    for key, tensor in core.items():
        if not key.startswith("decoder.layers."):
            name = {
                "embedding.word_embeddings.weight": "model.embed_tokens.weight",
                "output_layer.weight": "lm_head.weight",
                "decoder.final_layernorm.weight": "model.norm.weight",
            }[key]
            yield name, tensor[:VOCAB] if "norm" not in name else tensor
            continue
        leaf = key.removeprefix("decoder.layers.")
        for layer, one in enumerate(tensor):
            to = f"model.layers.{layer}."
            if leaf in NORMS:
                yield to + NORMS[leaf], one
            elif leaf.startswith("self_attention.linear_qkv."):
                each = case.heads // case.groups
                split = one.view(case.groups, each + 2, -1, *one.shape[1:])
                for x, part in zip("qkv", (split[:, :each], split[:, each], split[:, each + 1]), strict=True):
                    yield f"{to}self_attn.{x}_proj.{leaf.split('.')[-1]}", part.reshape(-1, *one.shape[1:])
            elif leaf == "mlp.linear_fc1.weight":
                yield from zip((to + "mlp.gate_proj.weight", to + "mlp.up_proj.weight"), one.chunk(2), strict=True)
            elif leaf.endswith("experts.linear_fc1.weight"):
                for e, expert in enumerate(one):
                    for x, part in zip(("gate", "up"), expert.chunk(2), strict=True):
                        yield f"{to}mlp.experts.{e}.{x}_proj.weight", part
            elif leaf.endswith("experts.linear_fc2.weight"):
                for e, expert in enumerate(one):
                    yield f"{to}mlp.experts.{e}.down_proj.weight", expert
            else:
                raise AssertionError(f"{key} is not known here")


def geometry(case: Case, state: Any) -> Geometry:
    return Geometry(
        case.heads,
        case.groups,
        VOCAB,
        case.experts,
        case.tied,
        tp=state.get_tensor_model_parallel_group(),
        etp=state.get_expert_tensor_parallel_group() if case.experts else None,
        ep_rank=state.get_expert_model_parallel_rank() if case.experts else 0,
        ep_size=case.ep,
    )


def trained(case: Case) -> dict[str, Any]:
    with parallel(case) as state:
        model = build(case, state)
        source = megatron.source(model, geometry(case, state))
        before = assembled(source)
        train(model, case, state)
        found, expected = assembled(source), dict(checkpoint(case, whole(model)))
        return {
            "missing": sorted(found.keys() ^ expected.keys()),
            "differ": sorted(n for n in expected if n in found and not np.array_equal(found[n], bits_of(expected[n]))),
            "unchanged": sorted(name for name in found if np.array_equal(found[name], before[name])),
            "residual": [group.reason for group in source.residual],
        }


def every(cases: list[tuple[str, Case]]) -> dict[str, Any]:
    return {name: trained(case) for name, case in cases}
