"""Counts of operations for tests: what a call costs in calls of functions, and how often a sequence is searched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any


def calls_of(work: Callable[[], object]) -> int:
    """How many functions, of Python and of C, one call calls in this thread."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


class Scanned(tuple[Any, ...]):
    """A tuple that counts the elements that were looked at, in `looks`."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        self.looks += len(self)
        return super().__iter__()

    def __contains__(self, value: object) -> bool:
        self.looks += len(self)
        return super().__contains__(value)

    def index(self, *arguments: Any) -> int:
        found = super().index(*arguments)
        self.looks += found + 1
        return found
