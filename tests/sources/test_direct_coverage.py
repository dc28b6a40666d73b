"""Which share of published models is direct: maps declared at full size, certified at reduced size, kind by kind."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from support import published_models as models
from support.published_models import MODELS, RANKS, Config, Tensor
from support.ranks import assembled

from dcr.layout.boxes import Box
from dcr.layout.coverage import require_covered, tally
from dcr.layout.schema import Schema, TensorSpec
from dcr.probing.bits import bits_of, random_bits, tensor_of
from dcr.sources import megatron, probe
from dcr.sources.megatron import LAYER, TO, Geometry, Rule

BLOCK = 4


def kind_of(name: str) -> str:
    """A canonical name without its numbers."""
    return re.sub(r"\.\d+\.", ".*.", name)


def rules(c: Config) -> Sequence[Rule]:
    """What the built-in rules do not name: latent attention and hybrid layers."""
    to = "backbone.layers.{layer}."

    def parts(extents: list[int]) -> megatron.Way:
        """Each part is cut by rows over ranks on its own, then a rank's parts are put together."""

        def gathered(tensor: torch.Tensor, geometry: Geometry) -> megatron.Parts:
            split = [one.split([n // RANKS for n in extents]) for one in megatron.gathered(tensor, geometry.tp)]
            yield 0, [torch.cat([one[i] for i in range(len(extents)) for one in split])]

        return gathered

    def cast(tensor: torch.Tensor, geometry: Geometry) -> megatron.Parts:
        for expert, found in megatron.WAYS["column"](tensor, geometry):
            yield expert, [one.bfloat16() for one in found]

    latent: list[Rule] = [
        (LAYER + rf"self_attention\.{name}", how, [TO + f"self_attn.{target}"])
        for name, how, target in (
            (r"linear_q_down_proj\.weight", "whole", "q_a_proj.weight"),
            (r"q_layernorm\.weight", "whole", "q_a_layernorm.weight"),
            (r"linear_q_up_proj\.weight", "column", "q_b_proj.weight"),
            (r"linear_kv_down_proj\.weight", "whole", "kv_a_proj_with_mqa.weight"),
            (r"kv_layernorm\.weight", "whole", "kv_a_layernorm.weight"),
            (r"linear_kv_up_proj\.weight", "column", "kv_b_proj.weight"),
        )
    ]
    hybrid: list[Rule] = [
        (r"embedding\.word_embeddings\.weight", "vocab", ["backbone.embeddings.weight"]),
        (r"decoder\.final_norm\.weight", "whole", ["backbone.norm_f.weight"]),
        (LAYER + r"norm\.weight", "whole", [to + "norm.weight"]),
        (LAYER + r"mixer\.linear_qkv\.weight", "qkv", [to + f"mixer.{x}_proj.weight" for x in "qkv"]),
        (LAYER + r"mixer\.linear_proj\.weight", "row", [to + "mixer.o_proj.weight"]),
        (LAYER + r"mixer\.linear_fc1\.weight", "column", [to + "mixer.up_proj.weight"]),
        (LAYER + r"mixer\.linear_fc2\.weight", "row", [to + "mixer.down_proj.weight"]),
        (LAYER + r"mixer\.in_proj\.weight", parts(models.cuts(c, "mamba in")), [to + "mixer.in_proj.weight"]),
        (LAYER + r"mixer\.conv1d\.(?P<leaf>\w+)", parts(models.cuts(c, "mamba conv")), [to + "mixer.conv1d.{leaf}"]),
        (LAYER + r"mixer\.A_log", cast, [to + "mixer.A_log"]),
        (LAYER + r"mixer\.(?P<leaf>D|dt_bias|norm\.weight)", "column", [to + "mixer.{leaf}"]),
        (LAYER + r"mixer\.out_proj\.weight", "row", [to + "mixer.out_proj.weight"]),
    ]
    return [*(latent if c.q_lora else []), *(hybrid if c.pattern else []), *megatron.RULES]


class Together:
    """All ranks' exporter in one process: tensors are named rank|parameter, gathers find their siblings here."""

    def __init__(self, c: Config, patch: pytest.MonkeyPatch) -> None:
        self._config, self._rules = c, rules(c)
        self._siblings: list[torch.Tensor] = []
        patch.setattr(megatron, "gathered", lambda tensor, group: self._siblings if group else [tensor])

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        c = self._config
        by_name: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        for name, tensor in tensors.items():
            rank, _, parameter = name.partition("|")
            by_name[parameter][int(rank)] = tensor
        for parameter, held in by_name.items():
            own = ".experts." in parameter
            self._siblings = [held[rank] for rank in sorted(held)]
            for rank in held if own else [0]:
                sizes: Any = {"tp": "all", "ep_rank": rank, "ep_size": RANKS, "experts": c.experts}
                one = megatron.Exporter(Geometry(c.heads, c.kv_heads, c.vocab, **sizes), self._rules)
                for target, tensor in one({parameter: held[rank]}):
                    yield from quantised(target, tensor) if c.quantised else [(target, tensor)]


def quantised(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Projections in blocks of fp8 with a scale each, as DeepSeek-V3 is released."""
    if "_proj" not in name:
        yield name, tensor
        return
    rows, cols = (math.ceil(n / BLOCK) for n in tensor.shape)
    padded = torch.zeros(rows * BLOCK, cols * BLOCK)
    padded[: tensor.shape[0], : tensor.shape[1]] = tensor.float()
    blocks = padded.view(rows, BLOCK, cols, BLOCK)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-30) / 448
    whole = (blocks / scale[:, None, :, None]).view(rows * BLOCK, -1)[: tensor.shape[0], : tensor.shape[1]]
    yield name, whole.to(torch.float8_e4m3fn)
    yield name + "_scale_inv", scale


def ranks_of(c: Config, one: Tensor) -> list[int]:
    return list(range(RANKS)) if one.expert is None else [one.expert // (c.experts // RANKS)]


def weights(c: Config) -> dict[str, torch.Tensor]:
    return {
        f"{rank}|{one.name}": tensor_of(random_bits(math.prod(one.local), one.dtype, (i, rank)), one.dtype, one.local)
        for i, one in enumerate(models.tensors(c))
        for rank in ranks_of(c, one)
    }


def maps(c: Config) -> dict[str, list[tuple[str, Box]]]:
    found: dict[str, list[tuple[str, Box]]] = defaultdict(list)
    for one in models.tensors(c):
        for target, rank, box in models.declare(c, one):
            found[target].append((f"{rank}|{one.name}", box))
    return found


@cache
def certified(c: Config) -> tuple[dict[str, str], bool]:
    """At reduced size: the kinds of tensors without a map, and why; whether all that is published is exact."""
    small = models.reduced(c)
    with pytest.MonkeyPatch.context() as patch:
        live, export = weights(small), Together(small, patch)
        names = defaultdict(list)
        for name in live:
            names[name.partition("|")[2]].append(name)
        source = probe.source(live, export=export, groups=list(names.values()), maps=maps(small))
        found, expected = assembled(source), {name: bits_of(tensor) for name, tensor in export(live)}
    exact = {name: bits.tolist() for name, bits in found.items()} == {n: b.tolist() for n, b in expected.items()}
    reasons = {
        kind_of(source.schema.tensors[tensor].name): group.reason
        for group in source.residual
        for tensor in group.tensors
    }
    return reasons, exact


def full(c: Config) -> tuple[Schema, set[str]]:
    """At full size: the schema, proved to be covered by the declared maps and the kinds without one; those kinds."""
    lacking = set(certified(c)[0])
    specs = models.specs(c)
    if c.quantised:
        specs = [one for spec in specs for one in _blocks(spec)]
    schema = Schema(tuple(specs))
    number = {spec.name: i for i, spec in enumerate(schema.tensors)}
    by_rank: dict[int, list[tuple[int, Box]]] = defaultdict(list)
    for tensor in models.tensors(c):
        for target, rank, box in models.declare(c, tensor):
            if kind_of(target) not in lacking:
                by_rank[rank].append((number[target], box))
    whole = [i for i, spec in enumerate(schema.tensors) if kind_of(spec.name) in lacking]
    require_covered(schema, sum((tally(schema, boxes) for boxes in by_rank.values()), tally(schema, (), whole)))
    return schema, lacking


def _blocks(spec: TensorSpec) -> list[TensorSpec]:
    if "_proj" not in spec.name:
        return [spec]
    scales = tuple(math.ceil(n / 128) for n in spec.shape)
    return [TensorSpec(spec.name, "float8_e4m3fn", spec.shape), TensorSpec(spec.name + "_scale_inv", "float32", scales)]


def shares(c: Config) -> tuple[float, int, set[str]]:
    schema, lacking = full(c)
    direct = sum(spec.numel * spec.width for spec in schema.tensors if kind_of(spec.name) not in lacking)
    return direct / schema.nbytes, schema.nbytes, lacking


@pytest.mark.parametrize("c", MODELS, ids=lambda c: c.name)
def test_what_is_published_at_reduced_size_is_what_the_exporter_makes(c: Config) -> None:
    assert certified(c)[1]


@pytest.mark.parametrize("c", [c for c in MODELS if not c.quantised], ids=lambda c: c.name)
def test_every_byte_is_direct_where_the_export_only_moves_and_rounds(c: Config) -> None:
    assert shares(c)[0] == 1.0
    assert certified(c)[0] == {}


def test_blocks_of_fp8_are_residual_and_named() -> None:
    direct, _, lacking = shares(models.DEEPSEEK_V3_FP8)
    assert 0 < direct < 0.01
    assert "model.layers.*.mlp.experts.*.down_proj.weight_scale_inv" in lacking
    assert all("_proj" in kind for kind in lacking)
    assert {kind_of(spec.name) for spec in full(models.DEEPSEEK_V3_FP8)[0].tensors if "_proj" in spec.name} == lacking


@pytest.mark.parametrize("c", MODELS, ids=lambda c: c.name)
def test_the_schema_has_the_published_number_of_parameters(c: Config) -> None:
    known = {
        "Qwen3-30B-A3B": 30_532_122_624,
        "Qwen3-8B": 8_190_735_360,
        "Llama-3.1-8B": 8_030_261_248,
        "DeepSeek-V3, bf16 checkpoint": 671_026_419_200,
        "DeepSeek-V3, fp8 checkpoint": 671_026_419_200,
        "Nemotron-H-8B": 8_100_000_000,
    }
    numel = sum(spec.numel for spec in models.specs(c))
    if c is models.NEMOTRON_H:
        assert abs(numel / known[c.name] - 1) < 0.01
    else:
        assert numel == known[c.name]


def test_a_wrong_formula_is_demoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up exchanged in the declared maps."""
    c = replace(models.QWEN3_8B, name="swapped")
    honest = models.declare

    def swapped(config: Config, one: Tensor) -> Iterator[tuple[str, int, Box]]:
        for target, rank, box in honest(config, one):
            exchanged = {"gate_proj": "up_proj", "up_proj": "gate_proj"}.get(target.split(".")[-2])
            yield (target.replace(target.split(".")[-2], exchanged) if exchanged else target), rank, box

    monkeypatch.setattr(models, "declare", swapped)
    reasons, exact = certified(c)
    assert set(reasons) == {f"model.layers.*.mlp.{x}_proj.weight" for x in ("gate", "up")}
    assert exact


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{'model':30} {'GB':>7} {'tensors':>8} {'direct':>9}  residual"]
    for c in MODELS:
        share, nbytes, lacking = shares(c)
        what = f"{len(lacking)} kinds: {min(lacking)}, ..." if lacking else "none"
        lines.append(f"{c.name:30} {nbytes / 1e9:7.1f} {len(full(c)[0].tensors):8d} {share:9.2%}  {what}")
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert len(lines) == 1 + len(MODELS)
