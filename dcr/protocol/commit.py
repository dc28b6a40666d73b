"""The refit protocol's two state machines, and the bookkeeping of one attempt on either side. No IO, no clock.

The tables are the documentation: state -> event -> next state. An event that a state does not list is refused.

Sender (one attempt):

    an attempt is opened, its chunks are sent, it is sealed, members vote, the head is swapped. Only the swap makes it
    the version. A swap whose outcome is unknown is read back, never retried blind.

Member (one engine with all its ranks):

    an attempt is fetched, verified and prepared while the version before it serves; the member votes; once the head
    names the attempt it may be installed. Before that not one live byte changes. A failed installation is undone;
    what can be neither undone nor redone poisons the member.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Literal, TypeVar

from dcr.errors import BaseMismatch, IncompleteError, PayloadError, RunMismatch, StateError
from dcr.protocol.wire import Ack, Chunk, ChunkRef, Identity, MemberRef, Nack, Open, Seal

S = TypeVar("S")


class Sender(enum.Enum):
    """States of a publisher's attempt."""

    SENDING = "sending"
    VOTING = "voting"
    SWAPPING = "swapping"
    UNKNOWN = "unknown"  # the swap may or may not have happened
    COMMITTED = "committed"
    ABORTED = "aborted"
    FENCED = "fenced"


SENDER: Mapping[Sender, Mapping[str, Sender]] = {
    Sender.SENDING: {"sealed": Sender.VOTING, "gave_up": Sender.ABORTED},
    Sender.VOTING: {"quorum": Sender.SWAPPING, "gave_up": Sender.ABORTED},
    Sender.SWAPPING: {"swapped": Sender.COMMITTED, "refused": Sender.UNKNOWN, "no_answer": Sender.UNKNOWN},
    Sender.UNKNOWN: {"head_is_ours": Sender.COMMITTED, "head_is_base": Sender.SWAPPING, "lost": Sender.FENCED},
    Sender.COMMITTED: {},
    Sender.ABORTED: {},
    Sender.FENCED: {},
}


class Member(enum.Enum):
    """States of a member; in SERVING, FETCHING, PREPARED and COMMITTED the version before it serves."""

    EMPTY = "empty"  # holds nothing that has been verified; may not serve
    SERVING = "serving"
    FETCHING = "fetching"
    PREPARED = "prepared"
    COMMITTED = "committed"
    INSTALLING = "installing"
    SEEDING = "seeding"  # overwrites everything from committed versions; no undo
    POISONED = "poisoned"


MEMBER: Mapping[Member, Mapping[str, Member]] = {
    Member.EMPTY: {"recognised": Member.SERVING, "seed": Member.SEEDING},
    Member.SERVING: {"opened": Member.FETCHING, "lost_trust": Member.EMPTY},
    Member.FETCHING: {"prepared": Member.PREPARED, "dropped": Member.SERVING, "lost_trust": Member.EMPTY},
    Member.PREPARED: {"head_names_it": Member.COMMITTED, "dropped": Member.SERVING},
    Member.COMMITTED: {"install": Member.INSTALLING, "lost_trust": Member.EMPTY},
    Member.INSTALLING: {"installed": Member.SERVING, "undone": Member.COMMITTED, "failed": Member.POISONED},
    Member.SEEDING: {"installed": Member.SERVING, "failed": Member.POISONED},
    Member.POISONED: {"seed": Member.SEEDING},
}

MAY_SERVE = frozenset({Member.SERVING, Member.FETCHING, Member.PREPARED, Member.COMMITTED})


def after(state: Sender, event: str) -> Sender:
    """The sender's next state.

    Raises:
        StateError: the event is not legal now.
    """
    return _next(SENDER, state, event)


def member_after(state: Member, event: str) -> Member:
    """The member's next state.

    Raises:
        StateError: the event is not legal now.
    """
    return _next(MEMBER, state, event)


def verdict(identity: Identity, committed: Identity | None, term: int) -> bool | None:
    """Decide what the head says of an attempt: it names it (True), it never will (False), or not yet (None).

    A number alone names nothing: another attempt at the same version holds other bits.

    committed: what the head names. term: the head's.
    """
    if committed is not None and committed.version >= identity.version:
        return committed == identity
    return False if term > identity.term else None


class Votes:
    """Who has voted on one attempt, and what follows from it.

    electorate: the members named in its Open. quorum: how many of them must prepare it, or "all".
    """

    def __init__(
        self, identity: Identity, root: bytes, electorate: frozenset[MemberRef], quorum: int | Literal["all"]
    ) -> None:
        self.identity = identity
        self.root = root
        self.electorate = electorate
        self._quorum = quorum
        self.prepared: set[MemberRef] = set()
        self.refused: dict[MemberRef, str] = {}

    def prepare(self, ack: Ack) -> bool:
        """Count a vote; False if it is not for this attempt or not from its electorate.

        Raises:
            PayloadError: the member will arrive at other bits than those sealed.
        """
        if ack.identity != self.identity or ack.member not in self.electorate - self.refused.keys():
            return False
        if ack.root != self.root:
            raise PayloadError(
                f"{ack.member.member} prepared {self.identity} with another digest than was sealed: "
                f"expected {self.root.hex()[:16]}, found {ack.root.hex()[:16]}"
            )
        self.prepared.add(ack.member)
        return True

    def refuse(self, nack: Nack) -> None:
        """A member of the electorate is out of this attempt."""
        if nack.identity == self.identity and nack.member in self.electorate:
            self.drop(nack.member, nack.reason)

    def drop(self, member: MemberRef, reason: str) -> None:
        """Count a member as not voting."""
        if member in self.electorate - self.prepared:
            self.refused[member] = reason

    def leave(self, member: MemberRef) -> None:
        """A member has gone on purpose: it is not asked any more. A refusal stands."""
        if member not in self.refused:
            self.electorate -= {member}
            self.prepared.discard(member)

    @property
    def needed(self) -> int:
        """How many members must prepare it."""
        return len(self.electorate) if self._quorum == "all" else self._quorum

    @property
    def missing(self) -> frozenset[MemberRef]:
        """Members that have not answered."""
        return self.electorate - self.prepared - self.refused.keys()

    @property
    def carried(self) -> bool:
        """Enough members prepared it, and nobody is still to answer."""
        return not self.missing and len(self.prepared) >= self.needed

    @property
    def lost(self) -> bool:
        """It can no longer be carried."""
        return len(self.electorate) - len(self.refused) < self.needed


class Receipt:
    """What a member has of one attempt; complete when it holds exactly what the seal lists.

    holds: the version that its live memory holds, or None.

    Raises:
        RunMismatch: another run, or a term below the head's. BaseMismatch: a delta from a version not held.
    """

    def __init__(self, opened: Open, *, run: str, term: int, holds: Identity | None) -> None:
        identity = opened.identity
        if identity.run != run:
            raise RunMismatch(f"expected run {run}, found {identity.run}: check that both ends use one URL")
        if identity.term < term:
            raise RunMismatch(f"{identity} is of a superseded publisher: the head is at term {term}; stop the old one")
        if opened.base is not None and opened.base != holds:
            raise BaseMismatch(f"{identity} starts from {opened.base}, this member holds {holds or 'nothing'}")
        if holds is not None and identity.version <= holds.version:
            raise BaseMismatch(f"{identity} is not newer than {holds}, which is held")
        self.identity = identity
        self.base = opened.base
        self._chunks: dict[int, Chunk] = {}
        self._seal: Seal | None = None

    def chunk(self, chunk: Chunk) -> bool:
        """Take note of a verified chunk; False if it was held already (a duplicate is harmless).

        Raises:
            RunMismatch: of another attempt. PayloadError: unlike one received or sealed.
        """
        self._same(chunk.identity)
        held = self._chunks.get(chunk.frame)
        if held is not None and held.digest != chunk.digest:
            raise PayloadError(f"{self.identity}: two different chunks for frame {chunk.frame}")
        if self._seal is not None:
            require_sealed(chunk, {ref.frame: ref for ref in self._seal.chunks})
        self._chunks[chunk.frame] = chunk
        return held is None

    def seal(self, seal: Seal) -> None:
        """Take note of the seal.

        Raises:
            RunMismatch: of another attempt. PayloadError: it lists other chunks than those received.
        """
        self._same(seal.identity)
        if seal.base != self.base:
            raise PayloadError(f"{self.identity}: its seal starts from {seal.base}, its opening from {self.base}")
        if len({ref.frame for ref in seal.chunks}) != len(seal.chunks):
            raise PayloadError(f"{self.identity}: its seal lists a frame twice")
        sealed = {ref.frame: ref for ref in seal.chunks}
        for chunk in self._chunks.values():
            require_sealed(chunk, sealed)
        self._seal = seal

    @property
    def missing(self) -> frozenset[int] | None:
        """Frames that the seal lists and that have not come; None before the seal."""
        return None if self._seal is None else frozenset(ref.frame for ref in self._seal.chunks) - self._chunks.keys()

    @property
    def complete(self) -> bool:
        return self.missing == frozenset()

    def require_complete(self) -> Seal:
        """The seal.

        Raises:
            IncompleteError: there is none, or chunks that it lists are missing; names them.
        """
        if self._seal is None:
            raise IncompleteError(f"{self.identity}: the link closed before the seal; {len(self._chunks)} chunks came")
        if missing := self.missing:
            raise IncompleteError(f"{self.identity}: the chunks of frames {sorted(missing)[:8]} are missing")
        return self._seal

    def _same(self, identity: Identity) -> None:
        if identity != self.identity:
            raise RunMismatch(
                f"expected {self.identity} of run {self.identity.run}, found {identity} of {identity.run}"
            )


def require_sealed(chunk: Chunk, sealed: Mapping[int, ChunkRef]) -> None:
    """A chunk is the one that the seal lists for its frame.

    Raises:
        PayloadError: it is another, or its frame is not listed.
    """
    ref = sealed.get(chunk.frame)
    if ref is None or (ref.digest, ref.content, ref.changed) != (chunk.digest, chunk.content, chunk.changed):
        raise PayloadError(f"{chunk.identity}: the chunk of frame {chunk.frame} is not the sealed one")


def _next(table: Mapping[S, Mapping[str, S]], state: S, event: str) -> S:
    try:
        return table[state][event]
    except KeyError:
        legal = ", ".join(table[state]) or "nothing: it is final"
        raise StateError(f"{event!r} is not legal in state {state}; legal: {legal}") from None
