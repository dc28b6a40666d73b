"""The numbers of versions: each is used once in a run, whatever became of it."""

from __future__ import annotations

from dcr.errors import StateError


def take(number: int | None, last: int) -> int:
    """The number of the next version. One that was given up does not become free: its bits may have been seen.

    number: None takes the next. last: the last one that the run has used.

    Raises:
        StateError: it was used.
    """
    if number is None:
        return last + 1
    if number <= last:
        raise StateError(f"version {number} is not new: this run has used {last}; publish {last + 1} or more")
    return number
