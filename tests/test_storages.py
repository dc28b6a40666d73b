"""Storages are judged where they are given, by name and with what to do: at sources and at loaders alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.refits import Weights
from torch import nn

from dcr.codecs.patch import Change, Operation
from dcr.errors import SchemaError
from dcr.layout import frames
from dcr.layout.frames import Layout
from dcr.layout.schema import Schema, TensorSpec
from dcr.loaders.module import ModuleLoader
from dcr.loaders.native import NativeLoader
from dcr.sources.module import ModuleSource


def layout_of(module: nn.Module) -> Layout:
    source = ModuleSource(module)
    return Layout(source.schema, tuple(frame.spec for frame in frames.plan(source.schema, source.shards)))


def unaligned() -> torch.Tensor:
    return torch.frombuffer(bytearray(64), dtype=torch.float32, offset=1, count=4)


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


ODD: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "off its alignment": (unaligned, r"odd: its memory begins at .* 4 bytes per element.*clone\(\)"),
    "quantised": (quantised, r"odd: expected a dense tensor in host memory, found .*qint8.*int_repr"),
    "nested": (nested, r"odd: expected a dense tensor in host memory.*what it consists of"),
    "sparse": (lambda: torch.eye(2).to_sparse(), r"odd: expected a dense tensor in host memory.*to_dense"),
    "meta": (lambda: torch.ones(2, device="meta"), r"odd: expected a dense tensor in host memory.*load the weights"),
    "packed by mkldnn": (lambda: torch.ones(2, 2).to_mkldnn(), r"odd: expected a dense tensor.*pack it after"),
}


def holding(tensor: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", tensor)
    return model


@pytest.mark.parametrize("kind", ODD)
def test_a_source_says_what_a_tensor_is_and_what_to_do(kind: str) -> None:
    make, message = ODD[kind]
    with pytest.raises(SchemaError, match=f"(?s)^{message}"):
        ModuleSource(holding(make()))


@pytest.mark.parametrize("kind", ODD)
def test_a_module_loader_says_so_too(kind: str) -> None:
    make, message = ODD[kind]
    with pytest.raises(SchemaError, match=f"(?s)^{message}"):
        ModuleLoader(holding(make())).bind(layout_of(nn.Linear(2, 2)))


@pytest.mark.parametrize("kind", ODD)
def test_an_engine_loader_says_so_too(kind: str) -> None:
    make, message = ODD[kind]
    with pytest.raises(SchemaError, match=f"(?s)^{message}"):
        NativeLoader(Copying(holding(make()))).bind(Layout(Schema(PLAIN), ()))


@pytest.mark.parametrize("kind", ODD)
def test_what_is_waived_may_be_of_any_kind_and_is_not_touched(kind: str) -> None:
    make, _ = ODD[kind]
    trainer, engine = nn.Linear(2, 2), holding(make())
    layout = layout_of(trainer)
    loader = ModuleLoader(engine, waive=["odd"])
    weights = loader.bind(layout)
    before = loader.fingerprint()
    weights.install(weights.prepare(0, Change(Operation.OVERWRITE, None, np.arange(6, dtype=np.uint32))))
    assert loader.fingerprint() == before
    held = {name: value.detach().reshape(-1).view(torch.int32).tolist() for name, value in engine.named_parameters()}
    assert held == {"weight": [0, 1, 2, 3], "bias": [4, 5]}
    NativeLoader(Copying(holding(make())), waive=["odd"]).bind(Layout(Schema(PLAIN), ()))


@pytest.mark.parametrize("kind", ["module", "engine"])
def test_a_loader_leaves_storages_as_free_to_be_resized_as_they_were(kind: str) -> None:
    """What frees weights by resizing (FSDP1, offloading) goes on as before, also once a version was installed."""
    model = nn.Linear(2, 2)
    loader: Any = ModuleLoader(model) if kind == "module" else NativeLoader(Copying(model))
    weights = loader.bind(layout_of(nn.Linear(2, 2)))
    weights.digest()
    ready = weights.prepare(0, Change(Operation.OVERWRITE, None, np.arange(6, dtype=np.uint32)))
    weights.install(ready)
    weights.undo(ready)
    loader.finalize()
    for tensor in model.parameters():
        assert tensor.untyped_storage().resizable()


PLAIN = (TensorSpec("weight", "float32", (2, 2)), TensorSpec("bias", "float32", (2,)))


class Copying:
    """An engine whose loader copies by name."""

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
        return b"copying"


def test_a_name_that_is_no_text_is_refused_where_it_is_given() -> None:
    model = Weights({"w\udc80": torch.ones(2)})
    with pytest.raises(SchemaError, match=r"the name 'w\\udc80' is no valid text"):
        ModuleSource(model)
    with pytest.raises(SchemaError, match=r"the name 'w\\udc80' is no valid text"):
        ModuleLoader(model).bind(layout_of(Weights({"w": torch.ones(2)})))
    with pytest.raises(SchemaError, match=r"the name 'w\\udc80' is no valid text"):
        Schema((TensorSpec("w\udc80", "float32", (2,)),))


def test_a_pattern_that_names_one_name_of_a_tied_tensor_does_not_waive_it() -> None:
    engine = Weights({"embed": torch.ones(2)})
    engine.register_parameter("head", engine.embed)
    engine.register_parameter("other", nn.Parameter(torch.ones(2)))
    layout = layout_of(Weights({"other": torch.ones(2)}))
    with pytest.raises(SchemaError, match=r"^embed is held here.*it is tied to head, which is waived: waive all"):
        ModuleLoader(engine, waive=["head"]).bind(layout)
    ModuleLoader(engine, waive=["head", "embed"]).bind(layout)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_of_torch_changes_nothing(device: str) -> None:
    trainer, engine = nn.Linear(2, 2), nn.Linear(2, 2)
    torch.set_default_device(device)
    try:
        layout = layout_of(trainer)
        ModuleLoader(engine).bind(layout)
        NativeLoader(Copying(engine)).bind(Layout(Schema(PLAIN), ()))
    finally:
        torch.set_default_device(None)
