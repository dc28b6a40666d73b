"""Where the names of trainer and engine differ by a wrapper, the error says what to write."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import dcr
from dcr.errors import SchemaError
from dcr.layout import frames
from dcr.layout.frames import Layout
from dcr.loaders.module import ModuleLoader
from dcr.loaders.native import NativeLoader
from dcr.loaders.safetensors import SafetensorsLoader
from dcr.probing.names import hint
from dcr.sources.module import ModuleSource


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def compiled() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch deprecates of its own
        module: nn.Module = torch.compile(plain())
        return module


def under(name: str) -> nn.Module:
    """As DistributedDataParallel keeps a module, without its process group."""
    return nn.ModuleDict({name: plain()})


def normed() -> nn.Module:
    model = plain()
    torch.nn.utils.parametrizations.weight_norm(model[0])
    return model


def normed_as_before() -> nn.Module:
    model = plain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(model[0])
    return model


class Adapter(nn.Module):
    """A linear layer as PEFT wraps it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(2, 1, bias=False)})


def adapted() -> nn.Module:
    model = plain()
    model[0] = Adapter(model[0])
    outer = nn.Module()
    outer.base_model = nn.Module()
    outer.base_model.model = model
    return outer


WRAPPED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "torch.compile": (compiled, r"dcr\.source\(model\._orig_mod\)", r"model\._orig_mod\)"),
    "data parallel": (lambda: under("module"), r"dcr\.source\(model\.module\)", r"dcr\.loader\(model\.module\)"),
    "weight norm": (normed, "remove_parametrizations", "remove_parametrizations"),
    "weight norm as before": (normed_as_before, "remove_weight_norm", "remove_weight_norm"),
    "PEFT": (adapted, r"merge_and_unload\(\)", r"merge_and_unload\(\)"),
}


def layout_of(module: nn.Module) -> Layout:
    source = ModuleSource(module)
    return Layout(source.schema, tuple(frame.spec for frame in frames.plan(source.schema, source.shards)))


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapped_trainer_is_told_what_to_write(kind: str) -> None:
    make, trainer, _ = WRAPPED[kind]
    with pytest.raises(SchemaError, match=rf"the trainer's name has what .* adds: write .*{trainer}"):
        ModuleLoader(plain()).bind(layout_of(make()))


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapped_engine_is_told_what_to_write(kind: str) -> None:
    make, _, engine = WRAPPED[kind]
    with pytest.raises(SchemaError, match=rf"the engine's name has what .* adds: write .*{engine}"):
        ModuleLoader(make()).bind(layout_of(plain()))


@pytest.mark.parametrize("kind", ["torch.compile", "data parallel", "PEFT"])
def test_two_ends_of_one_wrapper_need_no_hint(kind: str) -> None:
    make, _, _ = WRAPPED[kind]
    ModuleLoader(make()).bind(layout_of(make()))


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_checkpoint_directory_says_so_too(kind: str, tmp_path: Path) -> None:
    make, trainer, _ = WRAPPED[kind]
    save_file(plain().state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(SchemaError, match=rf"the trainer's name has what .* adds: write .*{trainer}"):
        SafetensorsLoader(tmp_path).bind(layout_of(make()))


class ByName:
    """An engine whose loader takes its own names only."""

    replaces = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def load(self, pairs: Any) -> None:
        own = dict(self.module.named_parameters())
        for name, tensor in pairs:
            own[name].data.copy_(tensor)

    def settle(self, modules: Any) -> None:
        """Nothing to do."""

    def fingerprint(self) -> bytes:
        return b"by name"


@pytest.mark.parametrize("kind", WRAPPED)
def test_an_engine_loader_says_so_too(kind: str) -> None:
    make, trainer, _ = WRAPPED[kind]
    with pytest.raises(SchemaError, match=rf"the trainer's name has what .* adds: write .*{trainer}"):
        NativeLoader(ByName(plain())).bind(layout_of(make()))


def test_a_weight_here_that_is_published_under_another_name_is_told_by_it() -> None:
    said = hint("module.0.weight", ["0.bias", "0.weight"], published=False)
    assert said.startswith("; it is published as 0.weight; the engine's name has what data parallel adds: write ")


def test_near_names_are_given_where_nothing_is_wrapped() -> None:
    assert hint("layers.0.wieght", ["layers.0.weight", "norm"], published=True) == "; near names here: layers.0.weight"
    assert hint("layers.0.weight", ["layers.O.weight"], published=False) == "; near names published: layers.O.weight"
    assert hint("zzz", ["a", "b"], published=True) == ""


def test_a_name_that_only_looks_wrapped_is_given_near_names() -> None:
    assert hint("module.gate", ["module.gata"], published=True) == "; near names here: module.gata"


class PeftModel(nn.Module):
    """What PEFT calls its wrapper."""


@pytest.mark.parametrize(
    ("make", "write"),
    [
        (compiled, r"; pass model\._orig_mod$"),
        (lambda: under("module"), r"; pass model\.module$"),
        (PeftModel, r"; pass model\.merge_and_unload\(\)$"),
        (plain, r"; any other torch module is dcr\.loader\(model\)$"),
    ],
)
def test_a_wrapped_model_of_transformers_is_told_what_to_pass(make: Callable[[], nn.Module], write: str) -> None:
    with pytest.raises(TypeError, match=rf"expected a model of transformers.*{write}"):
        dcr.loader(make(), kind="transformers")


def test_a_compiled_trainer_of_a_transformers_engine_is_told_what_to_write() -> None:
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config)
    trainer = nn.ModuleDict({"_orig_mod": copy.deepcopy(model)})
    with pytest.raises(SchemaError, match=r"name has what torch\.compile adds: write dcr\.source\(model\._"):
        dcr.loader(model, kind="transformers").bind(layout_of(trainer))
