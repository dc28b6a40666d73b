"""What tests ask the workers of a vLLM engine, which keeps its weights canonical (`dcr.engines.vllm_cpu`)."""

from __future__ import annotations

import copy
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader

from dcr.engines.vllm_cpu import Canonical
from dcr.errors import ReadBackError


class Inspector(Canonical):
    """Methods of a worker: `collective_rpc` finds them by name. Pass it as `worker_extension_cls`."""

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

    def move_experts(self) -> None:
        """Turn the maps of experts round, as whoever balances their load would change them."""
        for name, buffer in self.model_runner.get_model().named_buffers():
            if name.endswith("_expert_map"):
                buffer.copy_(buffer.flip(0))

    def break_install(self, rank: int, frame: int, how: str) -> None:
        """Let the frame-th frame from now on fail in one rank, once it is written: by an "error", or a "kill"."""
        if self.rank != rank:
            return
        session = self.weight_transfer_engine._session
        write, left = session.write, [frame]

        def breaking(install: Callable[..., None], *ready: Any) -> None:
            def broken(*ready: Any) -> None:
                install(*ready)
                left[0] -= len(ready)
                if ready and left[0] == 0 and how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if ready and left[0] == 0:
                    raise ReadBackError("a test says that memory did not keep its bits")

            write(broken, *ready)

        session.write = breaking

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
