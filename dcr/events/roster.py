"""Events of a publisher's first rank: what it hears of members."""

from __future__ import annotations

from typing import TypeAlias

from dcr.events.moment import Moment


class MemberJoined(Moment, frozen=True):
    """A member said that it takes part, and which version it holds (None: none that is known)."""

    member: str
    holds: int | None


class MemberDoubled(Moment, frozen=True):
    """Two live members have one name, and both vote: a restart, or two engines that need a name of their own each."""

    member: str


class MemberLeft(Moment, frozen=True):
    """A member said that it leaves."""

    member: str


class MemberDismissed(Moment, frozen=True):
    """Every life of the member was reported gone (`dcr dismiss`, `Publisher.dismiss`)."""

    member: str


class MemberTimedOut(Moment, frozen=True):
    """A member did not vote in time: it takes no part until it says something again."""

    version: int
    member: str
    timeout_s: float


class MemberPrepared(Moment, frozen=True):
    """A member voted for the version: it holds and has verified it."""

    version: int
    member: str


class MemberRefused(Moment, frozen=True):
    """A member voted against the version, or was poisoned by it; reason: its own words."""

    version: int
    member: str
    reason: str


class VoteRefused(Moment, frozen=True):
    """A member's vote names other bits than were sent: it counts as a vote against the version."""

    version: int
    member: str
    error: str
    reason: str


class ChunksWanted(Moment, frozen=True):
    """A member wants the chunks of these frames once more; reason: its own words."""

    version: int
    member: str
    frames: tuple[int, ...]
    reason: str


class MemberInstalled(Moment, frozen=True):
    """A member serves the version; pause_s: for which it wrote weights, None if it did not say."""

    version: int
    member: str
    pause_s: float | None


RosterEvent: TypeAlias = (
    MemberJoined
    | MemberDoubled
    | MemberLeft
    | MemberDismissed
    | MemberTimedOut
    | MemberPrepared
    | MemberRefused
    | VoteRefused
    | ChunksWanted
    | MemberInstalled
)
