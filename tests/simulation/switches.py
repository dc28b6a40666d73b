"""Switches that replace a piece of code while a run is played, and accidents that nothing but a rule stands against.

A switch is a value that gives a context manager. They add up: what one replaces is what is there when it is entered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import iscoroutinefunction
from typing import Any
from unittest import mock

import numpy as np

from dcr.kernels import reference
from dcr.protocol.wire import Identity
from simulation import hooks
from simulation.hooks import Hook


@dataclass(frozen=True, eq=False)
class Switch:
    """What to do to a run, and which hooks that replaces."""

    hooks: tuple[Hook, ...]
    enter: Callable[[], AbstractContextManager[Any]]

    def __call__(self) -> AbstractContextManager[Any]:
        return self.enter()


nothing_happens = Switch((), nullcontext)


def becomes(hook: Hook) -> Callable[[Callable[[Any], Any]], Switch]:
    """A switch that replaces what a hook names by what a function makes of it."""

    def of(make: Callable[[Any], Any]) -> Switch:
        return Switch((hook,), lambda: mock.patch.object(hook.owner, hook.name, make(hook.value)))

    return of


def _without(check: Any) -> Any:
    """A check that finds nothing."""

    async def awaited(*args: Any, **named: Any) -> None:
        return None

    return awaited if iscoroutinefunction(check) else lambda *args, **named: None


def removed(hook: Hook) -> Switch:
    """A switch that takes a check out."""
    return becomes(hook)(_without)


@contextmanager
def off(switches: Iterable[Switch]) -> Iterator[None]:
    """All of these."""
    with ExitStack() as stack:
        for switch in switches:
            stack.enter_context(switch())
        yield


def together(*switches: Switch) -> Switch:
    """One rule that is held in several places."""
    return Switch(tuple(hook for switch in switches for hook in switch.hooks), lambda: off(switches))


@contextmanager
def callers(hook: Hook) -> Iterator[list[Any]]:
    """The objects on which a method is called meanwhile, each once."""
    seen: list[Any] = []

    @becomes(hook)
    def noted(method: Any) -> Any:
        def note(self: Any, *args: Any, **named: Any) -> Any:
            if not any(self is other for other in seen):
                seen.append(self)
            return method(self, *args, **named)

        return note

    with noted():
        yield seen


# ---------------------------------------------------------------------- accidents


@becomes(hooks.DELTA)
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


@becomes(hooks.BASELINE_FOLD)
def a_bit_of_the_baseline_rots(fold: Any) -> Any:
    """After the first commit."""
    left = [1]

    def then_rot(self: Any, identity: Identity) -> Any:
        indices = fold(self, identity)
        if left:
            left.pop()
            self.base(2)[0] ^= np.uint32(1)
        return indices

    return then_rot


# No accident: what a switch of `mix` needs, since compiled digests do not call it.
digests_in_numpy = becomes(hooks.DIGEST)(lambda compiled: reference.digest)
