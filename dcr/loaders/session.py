"""Sessions: a rank is written only while one is open, and its model does not run meanwhile.

A session that nobody closes, since the process that wrote was lost half-way, leaves a model that refuses to run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from dcr.errors import Poisoned, StateError
from dcr.seams import RankWeights


class Session:
    """Guards the weights of one rank: they are written only while it is open, and the model does not run meanwhile.

    The model is guarded where it is called as a module: what replays a captured graph has to be kept from it otherwise.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._barrier: RemovableHandle | None = None
        self._half = False
        self.begun: set[int] = set()  # what was written in the last session

    @property
    def is_open(self) -> bool:
        """Whether weights may be written now."""
        return self._barrier is not None

    def open(self) -> None:
        """Let writes through, and the model no more."""
        if self._barrier is None:
            self._barrier = self._model.register_forward_pre_hook(_refuse)
            self.begun.clear()

    def close(self) -> None:
        """Let the model run again, and nothing be written.

        Raises:
            Poisoned: the last write failed here and nothing has undone it; the session stays open.
        """
        if self._half:
            raise Poisoned("this rank may hold half a version: it has to be undone or seeded first")
        if self._barrier is not None:
            self._barrier.remove()
            self._barrier = None

    def write(self, write: Callable[..., None], *ready: Any) -> None:
        """Write something; until that has ended well, the rank may hold half a version.

        Raises:
            StateError: the session is not open; nothing was written.
        """
        if self._barrier is None:
            raise StateError("no weight update session is open; install within `loader.updating(version)`")
        self._half = True
        write(*ready)
        self._half = False

    def finalize(self, finalize: Callable[[], None]) -> None:
        """Run post-load steps after what was written; nothing is written without a session, so there are none then."""
        if self.is_open:
            self.write(finalize)


class Guarded:
    """One rank's weights behind a session; see `dcr.seams.RankWeights`. What only reads needs no session."""

    def __init__(self, weights: RankWeights[Any], session: Session) -> None:
        self._weights = weights
        self._session = session
        self.parts, self.prepare, self.digest = weights.parts, weights.prepare, weights.digest

    def install(self, ready: Any) -> None:
        """See `dcr.seams.LiveWeights.install`; raises as `Session.write`."""
        if self._session.is_open:
            self._session.begun.add(id(ready))
        self._session.write(self._weights.install, ready)

    def undo(self, ready: Any) -> None:
        """See `dcr.seams.LiveWeights.undo`; what was refused for want of a session needs none to be undone."""
        if self._session.is_open or id(ready) in self._session.begun:
            self._session.write(self._weights.undo, ready)


def _refuse(*_: Any) -> None:
    raise Poisoned("weights are being written, or were when the process that wrote was lost: this model must not run")
