"""vLLM on a CPU with its weights as the checkpoint has them, and what tests ask its workers.

On a GPU, vLLM keeps linear and expert weights in their parameters; its CPU backend repacks them into other memory.
Under this module parameters stay as they were loaded: linear layers use them, and experts are packed at each call.
Pass `canonical_weights.Inspector` as `worker_extension_cls`, so that workers import this before they make a model.
"""

from __future__ import annotations

import copy
import hashlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts, cpu_prepack_moe_weight
from vllm.model_executor.model_loader import get_model_loader

from dcr.errors import ReadBackError

apply_packed = CPUUnquantizedExperts.apply


def keep_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def keep_experts(self: Any, layer: torch.nn.Module) -> None:
    self._use_zentorch = False


def apply_plain(self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, *rest: Any, **named: Any) -> None:
    packed = [cpu_prepack_moe_weight(weight, self.isa) for weight in (w1, w2)]
    apply_packed(self, output, hidden_states, *packed, *rest, **named)


utils.dispatch_cpu_unquantized_gemm = keep_linear
CPUUnquantizedExperts.process_weights_after_loading = keep_experts
CPUUnquantizedExperts.apply = apply_plain


class Inspector:
    """Methods of a worker: `collective_rpc` finds them by name."""

    def differing(self, checkpoint: str) -> dict[str, Any]:
        """What differs between the live model and one that vLLM's own loader builds here from a checkpoint."""
        expected = dict(tensors_of(self._built(checkpoint)))
        held = dict(tensors_of(self.model_runner.get_model()))
        names = expected.keys() ^ held.keys() | {
            name for name in expected.keys() & held.keys() if octets(expected[name]) != octets(held[name])
        }
        return {"compared": sorted(held), "differing": sorted(names)}

    def digests(self) -> dict[str, str]:
        """A digest of each of the live model's tensors."""
        return {
            name: hashlib.blake2b(octets(tensor)).hexdigest()
            for name, tensor in tensors_of(self.model_runner.get_model())
        }

    def pointers(self) -> dict[str, int]:
        """Where each of the live model's tensors lies."""
        return {name: tensor.data_ptr() for name, tensor in tensors_of(self.model_runner.get_model())}

    def break_install(self, rank: int, frame: int, how: str) -> None:
        """Let the frame-th frame from now on fail in one rank, once it is written: by an "error", or a "kill"."""
        if self.rank != rank:
            return
        loader = self.weight_transfer_engine._session._loader
        install, left = loader.install, [frame]

        def breaking(ready: Any) -> None:
            install(ready)
            left[0] -= 1
            if left[0] == 0 and how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if left[0] == 0:
                raise ReadBackError("a test says that memory did not keep its bits")

        loader.install = breaking

    def _built(self, checkpoint: str) -> torch.nn.Module:
        config = copy.copy(self.vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        config.compilation_config.static_all_moe_layers = []
        config.model_config = copy.copy(config.model_config)
        config.model_config.model = checkpoint
        with set_current_vllm_config(config):
            return get_model_loader(config.load_config).load_model(vllm_config=config, model_config=config.model_config)


def tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers, and every other tensor that a module keeps; not what requests leave in it."""
    for path, module in model.named_modules():
        held = {**vars(module), **module._parameters, **module._buffers}
        for name, value in held.items():
            for number, one in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                if isinstance(one, torch.Tensor) and name != "kv_cache":
                    yield f"{path}.{name}.{number}", one


def octets(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
