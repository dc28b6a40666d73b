"""vLLM on a CPU with its weights where its loader puts them, as on a GPU.

The CPU backend of vLLM repacks linear and expert weights into memory of another form and lets go of the parameters, so
that even its own loader cannot load such a model again. With this module's `Canonical` as `worker_extension_cls`,
parameters stay: linear layers compute with them, and experts are packed at each call. That is slower, and the price of
weights that can be updated.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts, cpu_prepack_moe_weight

_apply_packed = CPUUnquantizedExperts.apply


def _keep_linear(layer: Any, remove_weight: bool) -> None:  # noqa: ARG001
    layer.cpu_linear = torch.nn.functional.linear


def _keep_experts(self: Any, layer: torch.nn.Module) -> None:  # noqa: ARG001
    self._use_zentorch = False


def _apply_plain(self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, *rest: Any, **named: Any) -> None:
    packed = [cpu_prepack_moe_weight(weight, self.isa) for weight in (w1, w2)]
    _apply_packed(self, output, hidden_states, *packed, *rest, **named)


class Canonical:
    """Pass "dcr.engines.vllm_cpu.Canonical" as `worker_extension_cls`; it adds no methods of its own."""


# When this is imported, and by nothing else: vLLM calls nothing of an extension before it makes a model, it only
# imports the class, in each worker.
utils.dispatch_cpu_unquantized_gemm = _keep_linear
CPUUnquantizedExperts.process_weights_after_loading = _keep_experts
CPUUnquantizedExperts.apply = _apply_plain
