"""Events of a member."""

from __future__ import annotations

from typing import Literal, TypeAlias

from dcr.events.moment import Moment


class Recognised(Moment, frozen=True):
    """The weights as they were loaded are those of a stored version: the member starts from there."""

    member: str
    version: int


class HeadStale(Moment, frozen=True):
    """The head is older than one that was read or announced before, and is not followed; None: there is no head."""

    member: str
    version: int | None
    term: int | None
    least_version: int
    least_term: int


class FellBehind(Moment, frozen=True):
    """What follows the version held can no longer be read: the member is seeded."""

    member: str
    version: int
    error: str
    reason: str


class PrepareStarted(Moment, frozen=True):
    """The member fetches, verifies and prepares a version beside generation; versions: stored ones, taken as one."""

    member: str
    version: int
    origin: Literal["live", "stored"]
    versions: int


class PrepareCompleted(Moment, frozen=True):
    """The version is prepared; changed_elems: to be written, None of an anchor that was only verified."""

    member: str
    version: int
    origin: Literal["live", "stored"]
    versions: int
    changed_elems: int | None
    duration_s: float


class PrepareFailed(Moment, frozen=True):
    """The version could not be prepared, or was given up; nothing was written. Of several stored ones, fewer follow."""

    member: str
    version: int
    origin: Literal["live", "stored"]
    versions: int
    error: str
    reason: str
    duration_s: float


class ChunkRefused(Moment, frozen=True):
    """A chunk is not what was sent: the member asks for it again."""

    member: str
    version: int
    frame: int
    error: str
    reason: str


class AttemptRefused(Moment, frozen=True):
    """The member votes against an attempt."""

    member: str
    version: int
    error: str
    reason: str


class SeedFetchStarted(Moment, frozen=True):
    """The member fetches and verifies a seed beside generation; versions: an anchor, and the deltas after it."""

    member: str
    version: int
    versions: int


class SeedFetchCompleted(Moment, frozen=True):
    """The seed is in memory, to be installed."""

    member: str
    version: int
    versions: int
    duration_s: float


class SeedFetchFailed(Moment, frozen=True):
    """The seed could not be fetched before its installation: it is written as it is read, in a longer pause."""

    member: str
    version: int
    versions: int
    error: str
    reason: str
    duration_s: float


class VersionReplaced(Moment, frozen=True):
    """A version that was to be installed is no longer stored; a newer one takes its place."""

    member: str
    version: int
    by_version: int
    error: str
    reason: str


class InstallStarted(Moment, frozen=True):
    """The version is being written into live memory."""

    member: str
    version: int
    kind: Literal["delta", "seed"]


class InstallCompleted(Moment, frozen=True):
    """The version is live, read back and shown; pause_s: for which weights were written."""

    member: str
    version: int
    kind: Literal["delta", "seed"]
    pause_s: float
    duration_s: float


class InstallFailed(Moment, frozen=True):
    """The version is not live; live: whether anything was written. If it is "poisoned", do not serve."""

    member: str
    version: int
    kind: Literal["delta", "seed"]
    live: Literal["unchanged", "undone", "poisoned"]
    error: str
    reason: str
    duration_s: float


class TrustLost(Moment, frozen=True):
    """Live memory holds something else than was believed: it will be seeded. version: which was to follow."""

    member: str
    version: int
    error: str
    reason: str


class ReportLost(Moment, frozen=True):
    """What the member had to say did not get through; message: its type. What has happened has happened."""

    member: str
    message: str
    error: str
    reason: str


class SubscriberFailed(Moment, frozen=True):
    """The subscriber has ended with an error, which whoever waits for a version is told."""

    member: str
    error: str
    reason: str


MemberEvent: TypeAlias = (
    Recognised
    | HeadStale
    | FellBehind
    | PrepareStarted
    | PrepareCompleted
    | PrepareFailed
    | ChunkRefused
    | AttemptRefused
    | SeedFetchStarted
    | SeedFetchCompleted
    | SeedFetchFailed
    | VersionReplaced
    | InstallStarted
    | InstallCompleted
    | InstallFailed
    | TrustLost
    | ReportLost
    | SubscriberFailed
)
