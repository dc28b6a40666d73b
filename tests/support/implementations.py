"""Kernels by the implementation that is asked for, whichever this build uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from dcr import kernels
from dcr.kernels import Kernels

VERBS = tuple(name for name in vars(Kernels) if not name.startswith("_"))


@contextmanager
def using(implementation: Kernels) -> Iterator[None]:
    """All calls of `dcr.kernels` go to one implementation."""
    with ExitStack() as patches:
        for name in VERBS:
            patches.enter_context(mock.patch.object(kernels, name, getattr(implementation, name)))
        yield
