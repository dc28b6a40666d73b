"""Any exporter as a source: its map is found and proved, and what has no map is exported anew, exactly.

The oracle is the exporter itself, run over the live tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest
import torch
from support.ranks import assembled
from torch import nn

from dcr.errors import SchemaError, StorageRebound
from dcr.layout.boxes import Box, Dim
from dcr.probing import standins
from dcr.probing.bits import bits_of, random_bits, tensor_of
from dcr.seams import Source
from dcr.sources import certificate, probe

Tensors = Mapping[str, torch.Tensor]
Exported = Iterator[tuple[str, torch.Tensor]]
HEADS, DIM, GROUPS, HIDDEN, FF, EXPERTS = 4, 6, 2, 10, 12, 3


def weights(dtype: str = "bfloat16") -> dict[str, torch.Tensor]:
    """A layer as trainers keep it: fused, grouped, transposed."""
    shapes = {
        "qkv": ((HEADS + 2 * GROUPS) * DIM, HIDDEN),
        "qkv_bias": ((HEADS + 2 * GROUPS) * DIM,),
        "fc1": (2 * FF, HIDDEN),
        "experts": (EXPERTS, HIDDEN, FF),
        "embed": (24, HIDDEN),
        "norm": (HIDDEN,),
        "rope": (HEADS * DIM, HIDDEN),
        "scalar": (),
    }
    return {
        name: tensor_of(random_bits(int(np.prod(shape)), dtype, (7, i)), dtype, shape)
        for i, (name, shape) in enumerate(shapes.items())
    }


def grouped(tensor: torch.Tensor) -> Exported:
    """Query, key and value heads interleaved by group."""
    each = HEADS // GROUPS
    by_group = tensor.view(GROUPS, each + 2, DIM, *tensor.shape[1:])
    for name, part in (("q", by_group[:, :each]), ("k", by_group[:, each]), ("v", by_group[:, each + 1])):
        yield name, part.reshape(-1, *tensor.shape[1:])


def export(tensors: Tensors) -> Exported:
    """Moves only: split, permute, transpose, cut off the padding."""
    for name, tensor in tensors.items():
        match name:
            case "qkv" | "qkv_bias":
                for part, moved in grouped(tensor):
                    yield f"{part}.{name}", moved
            case "fc1":
                yield from zip(("gate", "up"), tensor.chunk(2), strict=True)
            case "experts":
                for i, expert in enumerate(tensor):
                    yield f"expert.{i}", expert.t().contiguous()
            case "embed":
                yield "embed", tensor[:21]
            case "rope":
                yield "rope", tensor.view(HEADS, 2, DIM // 2, HIDDEN).transpose(1, 2).reshape(-1, HIDDEN)
            case _:
                yield name, tensor.clone()


def agree(source: Source, exporter: Callable[[Tensors], Exported], tensors: Tensors) -> bool:
    """What the source publishes is what the exporter makes of the live tensors now."""
    found = assembled(source)
    expected = {name: bits_of(tensor) for name, tensor in exporter(tensors)}
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16", "float8_e4m3fn", "int8", "int64", "bool"])
def test_an_exporter_that_moves_is_direct_in_few_boxes(dtype: str) -> None:
    tensors = weights(dtype)
    source = probe.source(tensors, export=export)
    assert source.residual == ()
    assert agree(source, export, tensors)
    assert len(source.shards) == len(source.schema.tensors)


def test_the_map_holds_for_later_weights() -> None:
    tensors = weights()
    source = probe.source(tensors, export=export)
    for name, tensor in tensors.items():
        tensor.copy_(tensor_of(random_bits(tensor.numel(), "bfloat16", (9, len(name))), "bfloat16", tensor.shape))
    assert agree(source, export, tensors)


def test_live_memory_is_neither_read_nor_written_nor_moved() -> None:
    tensors = weights()
    before = {name: (tensor.data_ptr(), bits_of(tensor).tolist()) for name, tensor in tensors.items()}
    pointers = {pointer for pointer, _ in before.values()}

    def watched(given: Tensors) -> Exported:
        assert not {tensor.data_ptr() for tensor in given.values()} & pointers
        for tensor in given.values():
            tensor.add_(0)
        return export(given)

    probe.source(tensors, export=watched)
    assert {name: (tensor.data_ptr(), bits_of(tensor).tolist()) for name, tensor in tensors.items()} == before


def test_never_more_than_one_group_is_exported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = weights()
    monkeypatch.setattr(probe, "GROUP_ELEMS", 400)
    sizes = []

    def watched(given: Tensors) -> Exported:
        sizes.append(sum(tensor.numel() for tensor in given.values()))
        return export(given)

    source = probe.source(tensors, export=watched)
    assert max(sizes) <= max(400, *(tensor.numel() for tensor in tensors.values()))
    assert agree(source, export, tensors)


def test_strided_live_tensors_are_read_where_they_lie() -> None:
    tensors = weights()
    buffer = torch.zeros(2000, dtype=torch.bfloat16)
    buffer[7 : 7 + tensors["fc1"].numel()] = tensors["fc1"].reshape(-1)
    tensors["fc1"] = buffer[7 : 7 + tensors["fc1"].numel()].view(2 * FF, HIDDEN)
    tensors["qkv"] = tensors["qkv"].t().contiguous().t()
    source = probe.source(tensors, export=export)
    assert source.residual == ()
    assert agree(source, export, tensors)


# ---------------------------------------------------------------------- what has no map


def exactly(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Exported]:
    """`export`, but for the norm, with a change of values."""

    def exporter(tensors: Tensors) -> Exported:
        for name, tensor in export(tensors):
            yield name, change(tensor) if name == "norm" else tensor

    return exporter


def quantised(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.float() / tensor.float().abs().max()).to(torch.float8_e4m3fn)


def branch(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0) if tensor.float().abs().max() > 1e4 else tensor


ARITHMETIC = {
    "plus one": (lambda t: t + 1, "random bits|arithmetic"),
    "minus exp": (lambda t: -torch.exp(t.float()).to(t.dtype), "arithmetic"),
    "quantised": (quantised, "arithmetic|random bits"),
    "absolute": (torch.abs, "random bits"),
    "zeros become plain": (lambda t: t + 0.0, "random bits"),
    "depends on values": (branch, "random bits"),
    "constant": (torch.ones_like, "random bits"),
    "padded": (lambda t: torch.cat([t, torch.zeros_like(t)]), "constants"),
    "mean": (lambda t: t.float().mean().reshape(1).to(t.dtype), "arithmetic"),
    "wider": (lambda t: t.double(), "random bits"),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_is_demoted_with_a_reason_and_still_exact(name: str) -> None:
    change, reason = ARITHMETIC[name]
    tensors, exporter = weights(), exactly(change)
    if name == "zeros become plain":
        # Only minus zero betrays it; a certificate on few elements may lack one.
        tensors["norm"] = tensor_of(random_bits(1 << 18, "bfloat16", (1,)), "bfloat16", (1 << 18,))
    source = probe.source(tensors, export=exporter)
    (group,) = source.residual
    assert [source.schema.tensors[t].name for t in group.tensors] == ["norm"]
    assert any(word in group.reason for word in reason.split("|")), group.reason
    assert agree(source, exporter, tensors)


def test_a_residual_groups_fingerprint_follows_its_inputs_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = weights()
    source = probe.source(tensors, export=exactly(lambda t: t + 1), groups=[[name] for name in tensors])
    (group,) = source.residual
    before = group.fingerprint()
    tensors["fc1"].zero_()
    assert group.fingerprint() == before
    tensors["norm"].view(torch.int16)[3] ^= 1
    assert group.fingerprint() != before


def test_casts_of_masters_are_direct() -> None:
    def exporter(tensors: Tensors) -> Exported:
        for name, tensor in export(tensors):
            yield name, tensor.to(torch.bfloat16)

    tensors = weights("float32")
    source = probe.source(tensors, export=exporter)
    assert source.residual == ()
    assert agree(source, exporter, tensors)


def test_without_the_certificate_a_branch_on_values_would_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digits look plain: only random bits tell."""
    monkeypatch.setattr(certificate, "SEEDS", ())
    tensors = {"norm": weights()["norm"]}
    assert not agree(probe.source(tensors, export=exactly(branch)), exactly(branch), tensors)


# ---------------------------------------------------------------------- declared maps


ROWS = Dim(FF, HIDDEN, HIDDEN)
GATE = [("fc1", Box(0, 0, (Dim(FF * HIDDEN, 1, 1),)))]
UP = [("fc1", Box(FF * HIDDEN, 0, (Dim(FF * HIDDEN, 1, 1),)))]


def test_declared_maps_are_certified_and_used() -> None:
    tensors = {"fc1": weights()["fc1"]}
    source = probe.source(tensors, export=export, maps={"gate": GATE, "up": UP})
    assert source.residual == ()
    assert agree(source, export, tensors)


def test_swapped_halves_are_caught() -> None:
    tensors = {"fc1": weights()["fc1"]}
    source = probe.source(tensors, export=export, maps={"gate": UP, "up": GATE})
    assert source.shards == []
    assert [source.schema.tensors[t].name for group in source.residual for t in group.tensors] == ["gate", "up"]
    assert agree(source, export, tensors)


@pytest.mark.parametrize(
    "boxes",
    [[], [("fc1", Box(0, 0, (Dim(7, 1, 1),)))], [("fc1", Box(5, 0, (Dim(2 * FF * HIDDEN, 1, 1),)))], [*GATE, *GATE]],
    ids=["nothing", "a part", "out of bounds", "twice"],
)
def test_a_declared_map_that_is_not_whole_is_demoted(boxes: list[tuple[str, Box]]) -> None:
    tensors = {"fc1": weights()["fc1"]}
    source = probe.source(tensors, export=export, maps={"gate": boxes, "up": UP})
    assert [source.schema.tensors[t].name for group in source.residual for t in group.tensors] == ["gate"]
    assert agree(source, export, tensors)


def test_a_map_for_a_tensor_that_is_not_exported_is_refused() -> None:
    with pytest.raises(SchemaError, match="declared for gat,"):
        probe.source({"fc1": weights()["fc1"]}, export=export, maps={"gat": GATE, "up": UP})


# ---------------------------------------------------------------------- exporters that misbehave


def test_an_exporter_that_fails_is_named_with_its_group() -> None:
    def fails(tensors: Tensors) -> Exported:
        yield "x", tensors["lacking"]

    with pytest.raises(SchemaError, match=r"failed on the group fc1: KeyError: 'lacking'; pass `groups`"):
        probe.source({"fc1": weights()["fc1"]}, export=fails)


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(SchemaError, match="gave x twice"):
        probe.source({"fc1": weights()["fc1"]}, export=lambda t: iter([("x", t["fc1"]), ("x", t["fc1"])]))


def test_a_name_given_by_two_groups_is_refused() -> None:
    tensors = {name: weights()[name] for name in ("fc1", "norm")}
    with pytest.raises(SchemaError, match="two groups export x"):
        probe.source(tensors, export=lambda t: iter([("x", next(iter(t.values())))]), groups=[["fc1"], ["norm"]])


def test_an_exporter_that_forgets_is_refused() -> None:
    calls = iter(range(99))

    def forgets(tensors: Tensors) -> Exported:
        yield "a", tensors["norm"]
        if next(calls) < 2:
            yield "b", tensors["norm"]

    with pytest.raises(SchemaError, match="not always give the same tensors: b"):
        probe.source({"norm": weights()["norm"]}, export=forgets)


# ---------------------------------------------------------------------- modules


def test_an_exporter_that_reads_its_module_is_lent_the_stand_ins() -> None:
    module = nn.Linear(5, 4)
    module.register_buffer("bias_buffer", torch.zeros(4))
    before = {name: (t.data_ptr(), bits_of(t).tolist()) for name, t in module.state_dict().items()}

    def own(names: object) -> Exported:
        yield "w", module.weight.t()
        yield "b", module.bias
        yield "router", module.bias_buffer

    exporter = probe.through(module, own)
    source = probe.source(module, export=exporter)
    assert {name: (t.data_ptr(), bits_of(t).tolist()) for name, t in module.state_dict().items()} == before
    assert source.residual == ()
    assert agree(source, lambda _: own(()), {})


def test_a_failing_exporter_gives_the_module_back() -> None:
    module = nn.Linear(5, 4)
    pointer = module.weight.data_ptr()

    def fails(names: object) -> Exported:
        yield "w", module.weight
        raise RuntimeError("no")

    with pytest.raises(SchemaError, match="RuntimeError: no"):
        probe.source(module, export=probe.through(module, fails))
    assert module.weight.data_ptr() == pointer


def test_a_module_whose_tensor_moved_is_bound_again_and_one_that_changed_is_noticed() -> None:
    module = nn.Linear(5, 4)
    source = probe.source(module, export=lambda t: iter(t.items()))
    module.bias.data = module.bias.data.clone() + 1
    assert assembled(source)["bias"].tolist() == bits_of(module.bias).tolist()
    module.bias.data = torch.zeros(4, dtype=torch.float16)
    with pytest.raises(StorageRebound, match=r"bias: expected torch\.float32"):
        source.storages()


def test_an_export_reads_its_inputs_where_they_lie_now() -> None:
    module = nn.Linear(5, 4)
    source = probe.source(module, export=lambda t: ((name, tensor + 1) for name, tensor in t.items()))
    before = [group.fingerprint() for group in source.residual]
    module.bias.data = torch.ones(4)
    assert [group.fingerprint() for group in source.residual] != before
    assert assembled(source)["bias"].tolist() == bits_of(torch.full((4,), 2.0)).tolist()


def test_an_export_that_computes_reads_each_name_of_a_tensor_that_was_untied() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    source = probe.source(module, export=lambda t: ((name, tensor + 1) for name, tensor in t.items()))
    (group,) = source.residual
    before = group.fingerprint()
    module[1].weight = nn.Parameter(torch.full((4, 4), 2.0))
    assert group.fingerprint() != before
    found = assembled(source)
    for name, parameter in module.named_parameters():
        assert found[name].tolist() == bits_of(parameter.detach() + 1).tolist()


def test_numbers_past_one_digit_are_exact() -> None:
    """More elements than bfloat16 counts, backwards, so that no two neighbours could be mixed up."""
    tensors = {"w": tensor_of(random_bits(1 << 17, "bfloat16", (3,)), "bfloat16", (1 << 17,))}
    backwards = probe.source(tensors, export=lambda t: iter([("w", t["w"].flip(0))]))
    assert [shard.box for shard in backwards.shards] == [Box((1 << 17) - 1, 0, (Dim(1 << 17, -1, 1),))]
    assert standins.BASE**2 < 1 << 17
