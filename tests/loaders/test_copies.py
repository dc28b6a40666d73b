"""An engine that computes with a copy of its weights is warned of when it is bound, where that can be seen."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dcr.errors import StaleCopyWarning
from dcr.layout.frames import Layout
from dcr.layout.schema import Schema, TensorSpec
from dcr.loaders.copies import warn_of_copies, warn_of_frozen_graphs
from dcr.loaders.module import ModuleLoader
from dcr.loaders.native import NativeLoader

SPECS = (TensorSpec("layer.weight", "float32", (2, 2)), TensorSpec("layer.bias", "float32", (2,)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def quietly(make: Callable[[], Any]) -> Any:
    """What torch deprecates of its own is not what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def frozen() -> Model:
    model = Model().eval()
    model.fast = quietly(lambda: torch.jit.freeze(torch.jit.script(copy.deepcopy(model.layer).eval())))
    return model


def packed() -> Model:
    model = Model()
    model.layer.fast = model.layer.weight.detach().to_mkldnn()
    return model


def compiled() -> Model:
    model = Model()
    quietly(model.layer.compile)
    return model


def compiled_forward() -> Model:
    model = Model()
    model.forward = quietly(lambda: torch.compile(model.forward))
    return model


@pytest.fixture
def freezing() -> Iterator[None]:
    config = quietly(lambda: importlib.import_module("torch._inductor.config"))
    with config.patch(freezing=True):
        yield


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


LOADERS: dict[str, Callable[[nn.Module], Any]] = {
    "module": ModuleLoader,
    "engine": lambda module: NativeLoader(Copying(module)),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("make", "said"),
    [(frozen, r"fast is a frozen ScriptModule \(torch\.jit\.freeze\)"), (packed, "layer keeps weights packed")],
)
def test_a_copy_that_can_be_seen_is_warned_of_at_bind(make: Callable[[], Model], said: str, loader: str) -> None:
    with pytest.warns(StaleCopyWarning, match=f"^{said}.*make it anew after each install"):
        LOADERS[loader](make()).bind(Layout(Schema(SPECS), ()))


@pytest.mark.usefixtures("freezing")
@pytest.mark.parametrize("make", [compiled, compiled_forward])
def test_a_module_that_inductor_freezes_is_warned_of(make: Callable[[], Model]) -> None:
    with pytest.warns(StaleCopyWarning, match=r"compiled while torch\._inductor\.config\.freezing is on"):
        ModuleLoader(make()).bind(Layout(Schema(SPECS), ()))


@pytest.mark.usefixtures("freezing")
def test_what_is_not_compiled_is_not_frozen() -> None:
    warn_of_copies(Model())


@pytest.mark.parametrize(
    "make", [Model, compiled, compiled_forward, lambda: quietly(lambda: torch.jit.script(Model()))]
)
def test_nothing_is_said_of_models_that_compute_with_their_weights(make: Callable[[], nn.Module]) -> None:
    warn_of_copies(make())


def test_a_kind_of_copy_is_warned_of_once() -> None:
    with pytest.warns(StaleCopyWarning) as said:
        warn_of_copies(nn.ModuleList([packed(), packed()]))
    assert [str(one.message).split()[0] for one in said] == ["0.layer"]


@pytest.mark.parametrize("setting", ["freezing", "max_autotune"])
def test_an_engine_of_vllm_that_freezes_while_it_compiles_is_warned_of(setting: str) -> None:
    with pytest.warns(StaleCopyWarning, match=rf"inductor_compile_config\['{setting}'\]"):
        warn_of_frozen_graphs(SimpleNamespace(mode=2, inductor_compile_config={setting: True, "dce": True}))


@pytest.mark.parametrize("mode", [0, 2])
def test_an_engine_of_vllm_that_does_not_is_not(mode: int) -> None:
    inductor = {"max_autotune": mode == 0, "dce": True}  # not compiled at all, or without it
    warn_of_frozen_graphs(SimpleNamespace(mode=mode, inductor_compile_config=inductor))
