"""Events of the program around: dcr emits none of them."""

from __future__ import annotations

from typing import TypeAlias

from dcr.events.moment import Moment


class UserWorkStarted(Moment, frozen=True):
    """Work of the program itself begins, such as a training step. dcr emits none: a program may, into its own trace."""

    work: str
    version: int | None
    member: str | None


class UserWorkCompleted(Moment, frozen=True):
    """Work of the program itself has ended."""

    work: str
    version: int | None
    member: str | None
    duration_s: float


class UserWorkFailed(Moment, frozen=True):
    """Work of the program itself has ended with an error."""

    work: str
    version: int | None
    member: str | None
    error: str
    reason: str
    duration_s: float


UserEvent: TypeAlias = UserWorkStarted | UserWorkCompleted | UserWorkFailed
