"""Sessions: a rank is written only while one is open, and its model does not run meanwhile.

A session that nobody closes, since the process that wrote was lost half-way, leaves a model that refuses to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from dcr.errors import Poisoned, StateError
from dcr.seams import RankLoader, Watching


class Session:
    """One rank of a model, behind a session; see `dcr.seams.RankLoader`.

    The model is guarded where it is called as a module: what replays a captured graph has to be kept from it otherwise.
    """

    def __init__(self, loader: RankLoader[Any], model: torch.nn.Module) -> None:
        self._loader = loader
        self._model = model
        self._barrier: RemovableHandle | None = None
        self._half = False
        self._begun: set[int] = set()  # what was written in the last session
        self.bind, self.epoch, self.prepare, self.digest = loader.bind, loader.epoch, loader.prepare, loader.digest

    def mark(self) -> bytes:
        """See `dcr.seams.Watching.mark`."""
        return self._loader.mark() if isinstance(self._loader, Watching) else b""

    def require_awake(self) -> None:
        """See `dcr.seams.Watching.require_awake`."""
        if isinstance(self._loader, Watching):
            self._loader.require_awake()

    def open(self) -> None:
        """Let writes through, and the model no more."""
        if self._barrier is None:
            self._barrier = self._model.register_forward_pre_hook(_refuse)
            self._begun.clear()

    def close(self) -> None:
        """The other way round.

        Raises:
            Poisoned: the last write failed here and nothing has undone it; the session stays open.
        """
        if self._half:
            raise Poisoned("this rank may hold half a version: it has to be undone or seeded first")
        if self._barrier is not None:
            self._barrier.remove()
            self._barrier = None

    def install(self, ready: Any) -> None:
        """See `dcr.seams.Loader.install`.

        Raises:
            StateError: no session is open; nothing was written.
        """
        self._require_open()
        self._begun.add(id(ready))
        self._write(self._loader.install, ready)

    def undo(self, ready: Any) -> None:
        """See `dcr.seams.Loader.undo`; what was refused for want of a session needs none to be undone."""
        if self._barrier is not None or id(ready) in self._begun:
            self._require_open()
            self._write(self._loader.undo, ready)

    def settle(self) -> None:
        """See `dcr.seams.Loader.settle`; nothing is written without a session."""
        if self._barrier is not None:
            self._write(self._loader.settle)

    def _require_open(self) -> None:
        if self._barrier is None:
            raise StateError("no weight update session is open; install within `loader.updating(version)`")

    def _write(self, write: Callable[..., None], *ready: Any) -> None:
        self._half = True
        write(*ready)
        self._half = False


def _refuse(*_: Any) -> None:
    raise Poisoned("weights are being written, or were when the process that wrote was lost: this model must not run")
