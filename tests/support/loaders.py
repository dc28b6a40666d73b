"""A loader around another one, for tests that break or watch some of its verbs."""

from __future__ import annotations

from typing import Any

from dcr.codecs.patch import Change
from dcr.layout.frames import Layout
from dcr.layout.views import Bits, Lanes
from dcr.seams import Loader


class Through:
    """A loader that is its own live weights: all goes on to another one, but what a subclass says."""

    reads_base = True

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.weights: Any = None

    def bind(self, layout: Layout) -> Any:
        self.weights = self.loader.bind(layout)
        return self

    def fingerprint(self) -> bytes:
        return self.loader.fingerprint()

    def finalize(self) -> None:
        self.loader.finalize()

    def prepare(self, frame: int, change: Change) -> Any:
        return self.weights.prepare(frame, change)

    def read(self, frame: int) -> Bits:
        return self.weights.read(frame)

    def install(self, ready: Any) -> None:
        self.weights.install(ready)

    def undo(self, ready: Any) -> None:
        self.weights.undo(ready)

    def digest(self) -> Lanes:
        return self.weights.digest()
