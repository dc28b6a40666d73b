"""Events of a publisher, on each of its ranks."""

from __future__ import annotations

from typing import TypeAlias

from dcr.events.moment import Moment


class PublishStarted(Moment, frozen=True):
    """A version is on its way."""

    version: int


class PublishCompleted(Moment, frozen=True):
    """The head names the version: it is committed. base: the version it starts from; None: an anchor."""

    version: int
    term: int
    attempt: int
    base: int | None
    total_elems: int
    changed_elems: int
    chunks: int
    wire_bytes: int
    dense_bytes: int
    sent_again_bytes: int
    captured_s: float
    duration_s: float


class PublishFailed(Moment, frozen=True):
    """The version was given up; the next one starts from the same base."""

    version: int
    error: str
    reason: str
    duration_s: float


class PublishSkipped(Moment, frozen=True):
    """Nothing was captured, since another version was under way. busy_with: which."""

    version: int
    busy_with: int


class CaptureStarted(Moment, frozen=True):
    """The weights are being read: they must not change."""

    version: int


class CaptureCompleted(Moment, frozen=True):
    """The weights have been read: they may change."""

    version: int
    duration_s: float


class CaptureFailed(Moment, frozen=True):
    """The version was given up before its weights had been read."""

    version: int
    error: str
    reason: str
    duration_s: float


class AttemptOpened(Moment, frozen=True):
    """An attempt at the version was opened."""

    version: int
    run: str
    term: int
    attempt: int
    base: int | None


class AttemptSealed(Moment, frozen=True):
    """All chunks are sent, and listed in the seal: members vote."""

    version: int
    chunks: int


class AttemptAborted(Moment, frozen=True):
    """Members were told that an opened attempt is given up; first rank only."""

    version: int
    error: str
    reason: str


class ChunkSentAgain(Moment, frozen=True):
    """A chunk that a member refused was sent once more."""

    version: int
    frame: int
    wire_bytes: int


class ResendIgnored(Moment, frozen=True):
    """A chunk was asked for again that this rank never sent."""

    version: int
    frame: int


class AnchorStarted(Moment, frozen=True):
    """The committed bits are being stored whole beside their delta."""

    version: int


class AnchorCompleted(Moment, frozen=True):
    """An anchor is stored: whoever joins later reads from here. chunks, wire_bytes: of all ranks."""

    version: int
    chunks: int
    wire_bytes: int
    duration_s: float


class AnchorFailed(Moment, frozen=True):
    """The anchor could not be stored; the version stays committed, and whoever joins later reads more."""

    version: int
    error: str
    reason: str
    duration_s: float


class PruneStarted(Moment, frozen=True):
    """Stored versions before `below` are being removed; first rank only."""

    version: int
    below: int


class PruneCompleted(Moment, frozen=True):
    """Stored versions before `below` are removed."""

    version: int
    below: int
    duration_s: float


class PruneFailed(Moment, frozen=True):
    """Stored versions before `below` could not all be removed; later ones are not harmed."""

    version: int
    below: int
    error: str
    reason: str
    duration_s: float


PublisherEvent: TypeAlias = (
    PublishStarted
    | PublishCompleted
    | PublishFailed
    | PublishSkipped
    | CaptureStarted
    | CaptureCompleted
    | CaptureFailed
    | AttemptOpened
    | AttemptSealed
    | AttemptAborted
    | ChunkSentAgain
    | ResendIgnored
    | AnchorStarted
    | AnchorCompleted
    | AnchorFailed
    | PruneStarted
    | PruneCompleted
    | PruneFailed
)
