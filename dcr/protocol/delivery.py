"""What a member is shown next, given what it has been shown and what the records of its run say. Pure: no IO.

    Open first; then each pack of its chunks once, and the seal once, in any order; then its end, if it is given up
    a Commit whenever the head names another attempt
    an attempt is live while its term is the head's, its version is beyond the head's, and it is not given up

`step` decides, `after` says what has been shown once that is done; nothing else changes a `Shown`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from dcr.protocol.wire import Head, Identity

Part = tuple[int, int]  # a pack of chunks: which writer's, and its number


class Posted(msgspec.Struct, frozen=True, array_like=True):
    """What the record of a term says of one attempt: which packs are stored, and whether it was sealed or given up."""

    identity: Identity
    packs: tuple[Part, ...] = ()
    sealed: bool = False
    aborted: bool = False


class Open(msgspec.Struct, frozen=True):
    """Show the Open of an attempt: it is followed from now on."""

    identity: Identity


class Pack(msgspec.Struct, frozen=True):
    """Show the chunks of a pack."""

    identity: Identity
    part: Part


class Seal(msgspec.Struct, frozen=True):
    """Show the seal."""

    identity: Identity


class Abort(msgspec.Struct, frozen=True):
    """Show that an attempt is given up. reason: empty where the publisher has said it."""

    identity: Identity
    reason: str = ""


class Commit(msgspec.Struct, frozen=True):
    """Show that the head names an attempt."""

    identity: Identity


Step = Open | Pack | Seal | Abort | Commit


@dataclass(frozen=True, slots=True)
class Shown:
    """What one member's link has been shown.

    follows: the attempt that is being shown. packs, sealed: what of it has been. last: the attempt whose Open was shown
    last. committed: the one whose Commit was.
    """

    follows: Identity | None = None
    packs: frozenset[Part] = frozenset()
    sealed: bool = False
    last: Identity | None = None
    committed: Identity | None = None


def step(shown: Shown, head: Head | None, posted: Iterable[Posted]) -> Step | None:
    """What comes next; None if there is nothing yet. posted: by the terms of the head and of what is followed."""
    if head is None:  # a run without a head has no publisher yet
        return None
    attempts = {one.identity: one for one in posted}
    if shown.follows is not None:
        following = _of_attempt(shown, shown.follows, head, attempts.get(shown.follows))
        if following is not None:
            return following
    if head.identity is not None and head.identity == shown.follows and not shown.sealed:
        return None  # the records are from before its seal: its Commit comes behind that
    if head.identity is not None and head.identity != shown.committed:
        return Commit(head.identity)
    return _opening(shown, head, list(attempts.values()))


def is_current(identity: Identity, head: Head) -> bool:
    """Whether an attempt is of the head's term; a publisher of a lower one has been superseded."""
    # invariant: lower terms are refused
    return identity.term >= head.term


def after(shown: Shown, done: Step) -> Shown:
    """What has been shown once a step is done."""
    match done:
        case Open(identity=identity):
            return Shown(follows=identity, last=identity, committed=shown.committed)
        case Pack(part=part):
            return replace(shown, packs=shown.packs | {part})
        case Seal():
            return replace(shown, sealed=True)
        case Abort():
            return replace(shown, follows=None)
        case Commit(identity=identity):
            return replace(shown, committed=identity)


def _of_attempt(shown: Shown, identity: Identity, head: Head, record: Posted | None) -> Step | None:
    if record is not None and record.aborted:
        return Abort(identity)
    if record is not None and (packs := [part for part in record.packs if part not in shown.packs]):
        return Pack(identity, packs[0])
    if record is not None and record.sealed and not shown.sealed:
        return Seal(identity)
    if not is_current(identity, head) and head.identity != identity:
        return Abort(identity, f"a publisher of term {head.term} has taken over")
    if record is None and not shown.sealed:
        return Abort(identity, "it was removed")
    return None


def _opening(shown: Shown, head: Head, posted: Sequence[Posted]) -> Step | None:
    """The Open of the attempt that the head's publisher has opened last, if it is live."""
    floor = head.identity.version if head.identity is not None else -1
    for record in reversed(posted):
        identity = record.identity
        if identity == shown.last:
            return None
        if is_current(identity, head) and identity.version > floor and not record.aborted:
            return Open(identity)
    return None
