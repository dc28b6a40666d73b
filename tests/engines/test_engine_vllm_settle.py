"""vLLM's post-load steps, run for the modules that a load has written: each time, in vLLM's order, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LAYERS = 12  # so that the order of paths is not that of layers


def scaled(steps: list[torch.nn.Module]) -> Any:
    """A step that keeps a layer's largest weight; once in the layer's life, as those of online quantisation."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Scaled(QuantizeMethodBase):
        def create_weights(self, *args: object, **named: object) -> None:
            raise NotImplementedError

        def apply(self, *args: object, **named: object) -> torch.Tensor:
            raise NotImplementedError

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            if getattr(layer, "_already_called_process_weights_after_loading", False):
                return
            layer._already_called_process_weights_after_loading = True
            layer.scale.copy_(layer.weight.abs().max())
            steps.append(layer)

    return Scaled()


class Model(torch.nn.Module):
    """Layers with such a step; it counts how often all its modules are gone through."""

    def __init__(self, steps: list[torch.nn.Module]) -> None:
        super().__init__()
        self.walks = 0
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(LAYERS)])
        for layer in self.layers:
            layer.requires_grad_(False)
            layer.scale, layer.quant_method = torch.zeros(()), scaled(steps)

    def modules(self) -> Iterator[torch.nn.Module]:
        self.walks += 1
        return super().modules()


def engine_of(steps: list[torch.nn.Module]) -> Any:
    from vllm.config import VllmConfig

    from dcr.engines.vllm_worker import VllmEngine

    return VllmEngine(Model(steps), VllmConfig(), torch.device("cpu"))


def test_a_step_that_runs_once_in_a_layers_life_runs_after_each_load() -> None:
    engine = engine_of([])
    layer = engine.module.layers[0]
    for value in (3.0, 5.0):
        layer.weight.fill_(value)
        engine.settle({"layers.0"})
        assert layer.scale == value


def test_only_what_was_written_is_settled_in_the_order_of_the_model() -> None:
    steps: list[torch.nn.Module] = []
    engine = engine_of(steps)
    engine.settle({"layers.10", "layers.2", ""})
    assert steps == [engine.module.layers[2], engine.module.layers[10]]


def test_settling_a_layer_does_not_go_through_the_model() -> None:
    engine = engine_of([])
    before = engine.module.walks
    for number in range(LAYERS):
        engine.settle({f"layers.{number}"})
    assert engine.module.walks == before


def test_a_module_that_came_later_is_settled_as_well() -> None:
    steps: list[torch.nn.Module] = []
    engine = engine_of(steps)
    layer = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
    layer.scale, layer.quant_method = torch.zeros(()), scaled(steps)
    engine.module.more = layer
    engine.settle({"more", "layers.0"})
    assert steps == [engine.module.layers[0], layer]
