"""Switches that replace a piece of code while a run is played, and accidents that nothing but a rule stands against.

A switch is a function that gives a context manager. They add up: what one replaces is what is there when it is entered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from inspect import iscoroutinefunction
from typing import Any
from unittest import mock

import numpy as np

from dcr import kernels, reference
from dcr.baseline import Baseline
from dcr.stages import construct
from dcr.wire import Identity

Switch = Callable[[], AbstractContextManager[Any]]
nothing_happens: Switch = nullcontext


def becomes(owner: Any, name: str) -> Callable[[Callable[[Any], Any]], Switch]:
    """A switch that replaces an attribute by what a function makes of the one that is there."""

    def of(make: Callable[[Any], Any]) -> Switch:
        return lambda: mock.patch.object(owner, name, make(getattr(owner, name)))

    return of


def _without(check: Any) -> Any:
    """A check that finds nothing."""

    async def awaited(*args: Any, **named: Any) -> None:
        return None

    return awaited if iscoroutinefunction(check) else lambda *args, **named: None


def removed(owner: Any, name: str) -> Switch:
    """A switch that takes a check out."""
    return becomes(owner, name)(_without)


@contextmanager
def off(switches: Iterable[Switch]) -> Iterator[None]:
    """All of these."""
    with ExitStack() as stack:
        for switch in switches:
            stack.enter_context(switch())
        yield


def together(*switches: Switch) -> Switch:
    """One rule that is held in several places."""
    return lambda: off(switches)


# ---------------------------------------------------------------------- accidents


@becomes(construct, "_delta")
def a_compare_misses_a_change(delta: Any) -> Any:
    """Once: what changed in the last frame."""
    left = [1]

    def blind(frame: Any, *rest: Any) -> Any:
        patch = delta(frame, *rest)
        if frame.index == 2 and patch is not None and left:
            left.pop()
            return None
        return patch

    return blind


@becomes(Baseline, "fold")
def a_bit_of_the_baseline_rots(fold: Any) -> Any:
    """After the first commit."""
    left = [1]

    def then_rot(self: Baseline, identity: Identity) -> Any:
        indices = fold(self, identity)
        if left:
            left.pop()
            self._frames[2][0] ^= np.uint32(1)
        return indices

    return then_rot


def digests_in_numpy() -> AbstractContextManager[None]:
    """No accident: what a switch of `reference.mix` needs, since compiled digests do not call it."""
    return off(
        becomes(kernels, name)(lambda compiled, name=name: getattr(reference, name)) for name in ("digest", "digest_at")
    )
