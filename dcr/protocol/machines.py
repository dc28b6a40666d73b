"""The refit protocol's two state machines: of an attempt at its publisher, and of a member. No IO, no clock.

Each table says which events a state takes, and to which state they lead; any other event is refused. Both ends move by
these machines only, and docs/protocol.md draws them from these tables.

An attempt is opened, its chunks are sent, it is sealed, members vote, the head is swapped. Only the swap makes it the
version. A swap whose outcome is not known is read back, never retried blind.

A member (one engine with all its ranks) fetches, verifies and prepares an attempt while the version before it serves,
and votes; once the head names the attempt it may be installed. Before that not one live byte changes. A failed
installation is undone; what can be neither undone nor redone poisons the member.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

from dcr.errors import StateError
from dcr.protocol.wire import Identity

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)


class AttemptState(enum.Enum):
    """States of a publisher's attempt."""

    SENDING = "sending"
    VOTING = "voting"
    SWAPPING = "swapping"
    UNKNOWN = "unknown"  # the swap may or may not have happened
    COMMITTED = "committed"
    ABORTED = "aborted"
    FENCED = "fenced"  # the head is another publisher's


class AttemptEvent(enum.Enum):
    """What happens to a publisher's attempt."""

    SEALED = "sealed"
    CARRIED = "carried"
    GAVE_UP = "gave up"
    SWAPPED = "swapped"
    REFUSED = "refused"
    NO_ANSWER = "no answer"
    HEAD_IS_OURS = "head is ours"
    HEAD_IS_BASE = "head is the base"
    LOST = "head is another's"


ATTEMPT: Mapping[AttemptState, Mapping[AttemptEvent, AttemptState]] = {
    AttemptState.SENDING: {
        AttemptEvent.SEALED: AttemptState.VOTING,
        AttemptEvent.GAVE_UP: AttemptState.ABORTED,
    },
    AttemptState.VOTING: {
        AttemptEvent.CARRIED: AttemptState.SWAPPING,
        AttemptEvent.GAVE_UP: AttemptState.ABORTED,
    },
    AttemptState.SWAPPING: {
        AttemptEvent.SWAPPED: AttemptState.COMMITTED,
        AttemptEvent.REFUSED: AttemptState.UNKNOWN,
        AttemptEvent.NO_ANSWER: AttemptState.UNKNOWN,
        AttemptEvent.LOST: AttemptState.FENCED,
    },
    AttemptState.UNKNOWN: {
        AttemptEvent.HEAD_IS_OURS: AttemptState.COMMITTED,
        AttemptEvent.HEAD_IS_BASE: AttemptState.SWAPPING,
        AttemptEvent.LOST: AttemptState.FENCED,
    },
    AttemptState.COMMITTED: {},
    AttemptState.ABORTED: {},
    AttemptState.FENCED: {},
}


class MemberState(enum.Enum):
    """States of a member; in SERVING, FETCHING, PREPARED and COMMITTED the version before it serves."""

    EMPTY = "empty"  # holds nothing that has been verified; may not serve
    INSPECTING = "inspecting"  # holds nothing, and compares its memory with a whole version that was opened
    SERVING = "serving"
    FETCHING = "fetching"
    PREPARED = "prepared"
    COMMITTED = "committed"
    INSTALLING = "installing"
    SEEDING = "seeding"  # overwrites everything from committed versions; no undo
    POISONED = "poisoned"


class MemberEvent(enum.Enum):
    """What happens to a member."""

    RECOGNISED = "recognised"
    OPENED = "opened"
    PREPARED = "prepared"
    DROPPED = "dropped"
    COMMITTED = "head names it"
    INSTALL = "install"
    INSTALLED = "installed"
    UNDONE = "undone"
    FAILED = "failed"
    SEED = "seed"
    LOST_TRUST = "lost trust"


MEMBER: Mapping[MemberState, Mapping[MemberEvent, MemberState]] = {
    MemberState.EMPTY: {
        MemberEvent.RECOGNISED: MemberState.SERVING,
        MemberEvent.OPENED: MemberState.INSPECTING,
        MemberEvent.SEED: MemberState.SEEDING,
    },
    MemberState.INSPECTING: {
        MemberEvent.PREPARED: MemberState.INSPECTING,
        MemberEvent.RECOGNISED: MemberState.PREPARED,
        MemberEvent.DROPPED: MemberState.EMPTY,
    },
    MemberState.SERVING: {
        MemberEvent.OPENED: MemberState.FETCHING,
        MemberEvent.LOST_TRUST: MemberState.EMPTY,
    },
    MemberState.FETCHING: {
        MemberEvent.PREPARED: MemberState.PREPARED,
        MemberEvent.DROPPED: MemberState.SERVING,
        MemberEvent.LOST_TRUST: MemberState.EMPTY,
    },
    MemberState.PREPARED: {
        MemberEvent.COMMITTED: MemberState.COMMITTED,
        MemberEvent.DROPPED: MemberState.SERVING,
    },
    MemberState.COMMITTED: {
        MemberEvent.INSTALL: MemberState.INSTALLING,
        MemberEvent.LOST_TRUST: MemberState.EMPTY,
    },
    MemberState.INSTALLING: {
        MemberEvent.INSTALLED: MemberState.SERVING,
        MemberEvent.UNDONE: MemberState.COMMITTED,
        MemberEvent.FAILED: MemberState.POISONED,
    },
    MemberState.SEEDING: {
        MemberEvent.INSTALLED: MemberState.SERVING,
        MemberEvent.FAILED: MemberState.POISONED,
    },
    MemberState.POISONED: {
        MemberEvent.SEED: MemberState.SEEDING,
    },
}

MAY_SERVE = frozenset({MemberState.SERVING, MemberState.FETCHING, MemberState.PREPARED, MemberState.COMMITTED})


class AttemptMachine:
    """An attempt as its publisher moves it."""

    def __init__(self) -> None:
        self.state = AttemptState.SENDING

    def move(self, event: AttemptEvent) -> AttemptState:
        """Take an event; the state that it leads to.

        Raises:
            StateError: the event is not legal now.
        """
        self.state = _after(ATTEMPT, self.state, event)
        return self.state


class MemberMachine:
    """A member as its subscriber moves it. holds: the version in its live memory, None if none that is known."""

    def __init__(self) -> None:
        self.state = MemberState.EMPTY
        self.holds: Identity | None = None

    def move(self, event: MemberEvent, holds: Identity | None = None) -> MemberState:
        """Take an event; the state that it leads to.

        holds: with RECOGNISED and INSTALLED, the version that live memory holds from now on.

        Raises:
            StateError: the event is not legal now.
        """
        self.state = _after(MEMBER, self.state, event)
        if event in (MemberEvent.RECOGNISED, MemberEvent.INSTALLED):
            self.holds = holds
        elif self.state in (MemberState.EMPTY, MemberState.SEEDING, MemberState.POISONED):
            self.holds = None  # invariant: what may be half a version is not called one
        return self.state


def verdict(identity: Identity, committed: Identity | None, term: int) -> bool | None:
    """Decide what the head says of an attempt: it names it (True), it never will (False), or not yet (None).

    A number alone names nothing: another attempt at the same version holds other bits.

    committed: what the head names. term: the head's.
    """
    if committed is not None and committed.version >= identity.version:
        return committed == identity
    return False if term > identity.term else None


def _after(table: Mapping[S, Mapping[E, S]], state: S, event: E) -> S:
    try:
        return table[state][event]
    except KeyError:
        legal = ", ".join(one.value for one in table[state]) or "nothing: it is final"
        raise StateError(f"{event.value!r} is not legal in state {state.value!r}; legal: {legal}") from None
