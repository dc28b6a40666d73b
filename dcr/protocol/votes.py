"""The votes on one attempt, as its publisher counts them. No IO, no clock."""

from __future__ import annotations

from typing import Literal

from dcr.errors import PayloadError
from dcr.protocol.wire import Ack, Identity, MemberRef, Nack


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
