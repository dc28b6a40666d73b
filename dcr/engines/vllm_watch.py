"""What others do to the weights of a vLLM worker: they put it to sleep, wake it, reload it, load into its model.

vLLM tells a weight transfer backend none of it, and hands it no reference to its worker. The worker is found among the
objects of this process, and those of its methods that change weights are counted as they begin and as they end.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from vllm.v1.worker.worker_base import WorkerBase

from dcr.errors import StateError

TAGS = frozenset(("weights", "kv_cache"))  # what a worker lets go of when it falls asleep
COUNTED = ("sleep", "wake_up", "reload_weights", "reset_weights")


class Watch:
    """Counts the calls that may have written a worker's weights, and knows whether these sleep.

    Raises:
        StateError: no worker of this configuration is in this process.
    """

    def __init__(self, config: Any, model: torch.nn.Module) -> None:
        self.worker = _worker_of(config)
        self._count = 0
        self._asleep: frozenset[str] = frozenset()
        for name in COUNTED:
            self._count_calls(self.worker, name)
        self._count_calls(model, "load_weights")

    @property
    def mark(self) -> bytes:
        """Another one whenever one of these calls has begun or ended."""
        return str(self._count).encode()

    def require_awake(self) -> None:
        """The weights are where they belong.

        Raises:
            StateError: they are not.
        """
        if "weights" in self._asleep:
            raise StateError(
                "the engine sleeps: what is written now would be lost; wake its weights up "
                '(`wake_up()`, or `wake_up(tags=["weights"])`) and then install'
            )

    def _count_calls(self, holder: Any, name: str) -> None:
        method: Callable[..., Any] = getattr(holder, name)

        @wraps(method)
        def counted(*args: Any, **named: Any) -> Any:
            self._count += 1
            if name == "sleep":
                self._asleep = TAGS  # from its beginning
            try:
                done = method(*args, **named)
            finally:
                self._count += 1
            if name == "wake_up":
                self._asleep -= _woken(*args, **named)
            return done

        setattr(holder, name, counted)


def _woken(tags: list[str] | None = None) -> frozenset[str]:
    return frozenset(tags) if tags else TAGS


def _worker_of(config: Any) -> Any:
    for thing in gc.get_objects():
        # The type is asked, not the object: some answer `isinstance` by importing or computing something.
        if issubclass(type(thing), WorkerBase) and vars(thing).get("vllm_config") is config:
            return thing
    raise StateError(
        "vLLM's worker was not found beside its weight transfer backend, so its sleeps and reloads would not be seen; "
        "dcr is tested with vLLM 0.32.0"
    )
