"""What modules keep beside their tensors (scales as Python numbers, flags, counters, lists): put back after a trial.

A loader that is tried out with random bits leaves numbers of them in the engine's modules, and so does one that fails.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

HOLDERS = (dict, list, OrderedDict, defaultdict)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A dict or list, and what was in it."""

    holder: Any
    contents: Any


class Attributes:
    """The attributes of some modules as they are now; lists and dicts in them with their contents."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._kept: list[_Kept] = []
        seen: set[int] = set()
        for module in modules:
            self._keep(vars(module), seen)

    def restore(self) -> None:
        """Put everything back that is another object now, or was not there."""
        for kept in self._kept:
            if not _same(dict(_items(kept.contents)), dict(_items(kept.holder))):
                _refill(kept.holder, kept.contents)

    def _keep(self, holder: Any, seen: set[int]) -> None:
        if id(holder) in seen:
            return
        seen.add(id(holder))
        self._kept.append(_Kept(holder, dict(holder) if isinstance(holder, dict) else list(holder)))
        for _, value in _items(holder):
            if type(value) in HOLDERS:
                self._keep(value, seen)


def _items(holder: Any) -> Iterable[tuple[Any, Any]]:
    return holder.items() if isinstance(holder, dict) else enumerate(holder)


def _same(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> bool:
    return before.keys() == now.keys() and all(now[key] is value for key, value in before.items())


def _refill(holder: Any, contents: Any) -> None:
    """Make a dict or list what it was, in place."""
    holder.clear()
    if isinstance(holder, dict):
        holder.update(contents)
    else:
        holder.extend(contents)
