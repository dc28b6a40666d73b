"""vLLM, seen from within one of its workers: the rank that a member's process calls over a socket.

vLLM makes a `Transfer` in every worker when it is configured with `WeightTransferConfig(backend="dcr")`. It opens a
connection to the member's process and serves there, in a thread of its own: what is prepared is prepared beside
generation. Weights are written only within a weight update session of vLLM, and while one is open the model does not
run: a session that nobody finishes, since the member's process died, leaves an engine that refuses to serve.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.distributed import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import MoERunnerInterface
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.utils import device_loading_context

from dcr.engines import workers
from dcr.engines.vllm_watch import Watch
from dcr.errors import SchemaError, StateError
from dcr.layout.frames import Layout
from dcr.loaders.copies import warn_of_frozen_graphs
from dcr.loaders.engine import Pairs
from dcr.loaders.native import NativeLoader
from dcr.loaders.session import Guarded, Session
from dcr.probing.homes import modules_of

MARK = "_already_called_process_weights_after_loading"  # of a layer whose step ran, and will not run again
# Buffers that vLLM makes itself; a checkpoint may bring them (an fp8 KV cache's scales), and need not.
OWN = ("*._k_scale", "*._v_scale", "*._q_scale", "*._prob_scale")


@dataclass(frozen=True, slots=True, eq=False)
class _Tree:
    """A model's modules as they were found: to settle some of them costs what they are, not what the model is.

    places: vLLM's order of them. paths: their names. attention: the layers whose steps come after all others, with all
    modules in them.
    """

    places: dict[torch.nn.Module, int]
    paths: dict[torch.nn.Module, str]
    attention: tuple[tuple[Any, frozenset[torch.nn.Module]], ...]

    @staticmethod
    def of(root: torch.nn.Module) -> _Tree:
        paths = {module: path for path, module in root.named_modules()}
        attention = tuple(
            (module, frozenset(module.modules())) for module in paths if is_deferred_attention_layer(module)
        )
        return _Tree({module: place for place, module in enumerate(paths)}, paths, attention)

    def is_of(self, modules: Sequence[torch.nn.Module]) -> bool:
        """Whether these are the modules that were found."""
        return len(modules) == len(self.places) and all(map(self.places.__contains__, modules))


class VllmEngine:
    """One vLLM worker's model, its own loader and its post-load steps; see `dcr.loaders.engine.Adapter`."""

    replaces = False

    def __init__(self, model: torch.nn.Module, config: Any, device: torch.device) -> None:
        self.module: Any = model
        self._config = config
        self._device = device
        self._tree = _Tree.of(model)

    def load(self, pairs: Pairs) -> None:
        """See `dcr.loaders.engine.Adapter.load`."""
        with self._as_loaded():
            # Not the instance's own: there, what others load is counted (`dcr.engines.vllm_watch`).
            type(self.module).load_weights(self.module, list(pairs))

    def settle(self, modules: Set[str]) -> None:
        """See `dcr.loaders.engine.Adapter.settle`: the order is vLLM's own, layers and then attention.

        Steps of online quantisation run once in the life of a layer, and leave a mark there, which vLLM removes itself
        where it loads a layer again (`_layerwise_process`): a step that is skipped would leave the old scales. A mark
        that a MoE runner is made with stays, since that one has no steps.
        """
        written = {self.module.get_submodule(name) for name in modules}
        if not written <= self._tree.places.keys():
            self._tree = _Tree.of(self.module)
        with self._as_loaded():
            for module in sorted(written, key=self._tree.places.__getitem__):
                method = getattr(module, "quant_method", None)
                if isinstance(method, QuantizeMethodBase):
                    if not isinstance(module, MoERunnerInterface):
                        vars(module).pop(MARK, None)
                    with device_loading_context(module, self._device):
                        method.process_weights_after_loading(module)
            for attention, within in self._tree.attention:
                if not written.isdisjoint(within):
                    with device_loading_context(attention, self._device):
                        attention.process_weights_after_loading(self._config.model_config.dtype)

    def fingerprint(self) -> bytes:
        """See `dcr.loaders.engine.Adapter.fingerprint`."""
        parallel = self._config.parallel_config
        group = get_world_group()
        modules = list(modules_of(self.module))  # and nothing else that lives on: a pause waits for this
        if not self._tree.is_of(modules):
            self._tree = _Tree.of(self.module)
        kinds = [type(module.__dict__.get("quant_method") or module._modules.get("quant_method")) for module in modules]
        maps = [
            buffer.tolist()
            for module in modules
            for key, buffer in module._buffers.items()
            if buffer is not None
            and not buffer.is_floating_point()
            and ("expert" in key or "expert" in self._tree.paths[module])
        ]
        facts = (
            vllm.__version__,
            torch.__version__,
            type(self.module).__name__,
            (group.rank_in_group, group.world_size, parallel.tensor_parallel_size, parallel.pipeline_parallel_size),
            (parallel.data_parallel_index, parallel.data_parallel_size, parallel.enable_expert_parallel),
            [kind.__name__ for kind in kinds],
            maps,
        )
        return repr(facts).encode()

    @contextmanager
    def _as_loaded(self) -> Iterator[None]:
        """What vLLM's loaders expect around them."""
        with set_current_vllm_config(self._config), torch.no_grad():
            yield


class VllmRank(NativeLoader):
    """The loader of one vLLM worker, which sees sleeps and reloads (`dcr.seams.Watching`), behind a session."""

    def __init__(
        self, engine: VllmEngine, config: Any, watch: Watch, session: Session, *, waive: Sequence[str]
    ) -> None:
        super().__init__(engine, waive=(*OWN, *waive), partial=True)
        self._config = config
        self._watch = watch
        self._session = session
        self._draft_waive = waive
        self.require_awake = watch.require_awake

    def bind(self, layout: Layout) -> Guarded:
        """See `dcr.seams.Loader.bind`.

        Raises:
            StateError: the engine sleeps, or moves its experts about. SchemaError: a draft model would stay behind.
        """
        self._watch.require_awake()
        if self._config.parallel_config.enable_eplb:
            raise StateError(
                "expected experts that stay where they are, found expert load balancing (enable_eplb): it moves them "
                "while the engine runs, so that an update would go to the wrong one; make the engine without it"
            )
        self._require_followed()
        warn_of_frozen_graphs(self._config.compilation_config)
        return Guarded(super().bind(layout), self._session)

    def finalize(self) -> None:
        """See `dcr.seams.Loader.finalize`."""
        self._session.finalize(super().finalize)

    def mark(self) -> bytes:
        """See `dcr.seams.Watching.mark`."""
        return self._watch.mark

    def _require_followed(self) -> None:
        """Every weight of a draft model is one of the model's own, or is waived."""
        draft = self._watch.worker.get_draft_model()
        if not isinstance(draft, torch.nn.Module):
            return
        own = {parameter.untyped_storage().data_ptr() for parameter in self._watch.worker.get_model().parameters()}
        names = [
            f"draft.{name}"
            for name, parameter in draft.named_parameters()
            if parameter.untyped_storage().data_ptr() not in own
        ]
        names = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in self._draft_waive)]
        if names:
            raise SchemaError(
                f"{names[0]} and {len(names) - 1} other weights of the {type(draft).__name__} that drafts for "
                "speculative decoding are not updated here: they would stay as they were loaded, and fewer and fewer "
                'drafts would be accepted; make the engine without it, or say waive=["draft.*"] if they may'
            )


@dataclass
class Told(WeightTransferInitInfo):  # type: ignore[misc]
    """What `init_weight_transfer_engine` says: where the member's process listens, its key in hex, names to waive."""

    address: str
    key: str
    waive: Sequence[str] = ()


@dataclass
class Nothing(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`update_weights` says nothing: weights come from the run."""


class Transfer(WeightTransferEngine):  # type: ignore[misc]
    """vLLM's weight transfer backend "dcr", in one worker."""

    init_info_cls = Told
    update_info_cls = Nothing
    supports_draft_weight_update = False

    _session: Session | None = None
    _connection: socket.socket | None = None

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self._watch = Watch(vllm_config, model)

    def init_transfer_engine(self, init_info: Told) -> None:
        """Connect to the member's process, and serve it until it closes."""
        self.shutdown()
        engine = VllmEngine(self.model, self.vllm_config, self.device)
        self._session = Session(self.model)
        rank = VllmRank(engine, self.vllm_config, self._watch, self._session, waive=init_info.waive)
        self._connection = workers.connect(init_info.address)
        group = get_world_group()
        told = {"key": bytes.fromhex(init_info.key), "rank": group.rank_in_group, "world": group.world_size}
        serving = (self._connection, rank)
        threading.Thread(target=workers.serve, args=serving, kwargs=told, name="dcr-rank", daemon=True).start()

    def start_weight_update(self) -> None:
        """Let the member's process write.

        Raises:
            StateError: the engine sleeps.
        """
        self._watch.require_awake()
        self._joined.open()

    def finish_weight_update(self) -> None:
        """Let the model run again."""
        self._joined.close()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See `receive_weights`."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Nothing) -> None:  # noqa: ARG002
        """Not how weights come.

        Raises:
            StateError: always.
        """
        raise StateError("weights come from the run: install a version of `dcr.subscriber` instead of update_weights")

    def shutdown(self) -> None:
        """Close the connection; the serving thread ends."""
        if self._connection is not None:
            workers.hang_up(self._connection)
            self._connection = None

    @property
    def _joined(self) -> Session:
        if self._session is None:
            raise StateError('this worker is in no member yet: enter `dcr.loader(engine, kind="vllm")` first')
        return self._session
