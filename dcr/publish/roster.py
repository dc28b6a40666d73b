"""The roster: which members take part in a run, what each one holds, and how they vote. For a publisher."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import anyio

from dcr.errors import PayloadError
from dcr.events import (
    ChunksWanted,
    MemberDismissed,
    MemberDoubled,
    MemberInstalled,
    MemberJoined,
    MemberLeft,
    MemberPrepared,
    MemberRefused,
    VoteRefused,
)
from dcr.events.observers import Observer, tell
from dcr.protocol.votes import Votes
from dcr.protocol.wire import Ack, Identity, Join, Leave, MemberRef, Message, Nack
from dcr.publish.refit import Answer, Refit


class Roster:
    """Takes what members send. One attempt is voted on at a time."""

    def __init__(self, observe: Observer) -> None:
        self._observe = observe
        self._news = anyio.Event()
        self._ended: Exception | None = None
        self._again: set[int] = set()
        self._votes: Votes | None = None
        self._asked: tuple[Identity, Identity | None] | None = None  # the last attempt, and its base
        self._silent: set[MemberRef] = set()  # given up on, until they say something
        self._readers: set[MemberRef] = set()  # who can decode chunks that need their base
        self._refits: dict[int, Refit] = {}  # those that a member is still to answer
        self.holds: dict[MemberRef, Identity | None] = {}  # what each member has installed, or prepared and committed

    def __len__(self) -> int:
        return len(self.holds)

    def __iter__(self) -> Iterator[MemberRef]:
        return iter(self.holds)

    async def news(self) -> None:
        """Wait until some member says something.

        Raises: what ended the link, if it has ended.
        """
        if self._ended is None:
            await self._news.wait()
        if self._ended is not None:
            raise self._ended

    def end(self, error: Exception) -> None:
        """The link to the members has ended: nobody will be heard any more."""
        self._ended = self._ended or error
        for refit in self._refits.values():
            refit.abandon(self._ended)
        self._tell()

    def electorate(self, base: Identity | None) -> frozenset[MemberRef]:
        """Who votes on an attempt from this base: the members that hold it; for an anchor, all of them."""
        return frozenset(ref for ref, holds in self.holds.items() if base is None or holds == base)

    def open(self, identity: Identity, base: Identity | None, quorum: int | Literal["all"], refit: Refit) -> Votes:
        """A new attempt: its votes, counted from here on, and who is told of installations."""
        self._again.clear()
        self._asked = identity, base
        self._refits = {version: one for version, one in self._refits.items() if not one.settled}
        self._refits[refit.version] = refit
        self._votes = Votes(identity, b"", self.electorate(base), quorum)
        return self._votes

    def close(self) -> None:
        """The attempt has ended."""
        self._votes = None

    def committed(self, votes: Votes) -> frozenset[MemberRef]:
        """An attempt is the version now: the members that will install it, or have done so already."""
        present = frozenset(votes.prepared & self.holds.keys())
        self.holds |= dict.fromkeys(present, votes.identity)
        return present

    def give_up_on(self, member: MemberRef) -> None:
        """A member that does not answer takes no part until it says something again."""
        if member in self.holds:
            del self.holds[member]
            self._silent.add(member)

    def take_again(self) -> list[int]:
        """Frames whose chunks were refused since the last call."""
        again, self._again = sorted(self._again), set()
        return again

    @property
    def reads_base(self) -> bool:
        """Whether every member can decode chunks that need their base."""
        return self.holds.keys() <= self._readers

    def receive(self, message: Message) -> None:
        """Take a member's message."""
        match message.header:
            case Join(member=member, holds=holds, reads_base=reads_base):
                self._warn_of_twins(member)
                self.holds[member] = holds
                if holds is not None:  # its answer may have been lost, with the attempt that it was written to
                    self._hold(member, holds.version)
                (self._readers.add if reads_base else self._readers.discard)(member)
                tell(self._observe, MemberJoined, member.member, holds.version if holds else None)
            case Leave(member=member):
                self._leave(member)
            case Ack() as ack:
                self._ack(ack)
            case Nack() as nack:
                self._nack(nack)
            case _:
                return
        self._tell()

    def _warn_of_twins(self, member: MemberRef) -> None:
        """A second live member of one name is a mistake, or a restart whose first life has not been missed yet."""
        if member not in self.holds and any(ref.member == member.member for ref in self.holds):
            tell(self._observe, MemberDoubled, member.member)

    def dismiss(self, name: str) -> bool:
        """Every life of a member is known to be gone; whether one was counted."""
        lives = [ref for ref in (*self.holds, *self._silent) if ref.member == name]
        for ref in lives:
            self._leave(ref, dismissed=True)
        self._tell()
        return bool(lives)

    def _leave(self, member: MemberRef, *, dismissed: bool = False) -> None:
        counted = member in self.holds or member in self._silent
        self.holds.pop(member, None)
        self._silent.discard(member)
        self._readers.discard(member)
        if self._votes is not None:
            self._votes.leave(member)
        for refit in self._refits.values():
            refit.answer(member, Answer("dismissed" if dismissed else "left"))
        if counted:
            tell(self._observe, MemberDismissed if dismissed else MemberLeft, member.member)

    def _ack(self, ack: Ack) -> None:
        version = ack.identity.version
        if ack.kind == "installed":
            self.holds[ack.member] = ack.identity
            self._answer(version, ack.member, Answer("installed", ack.pause_s))
            self._hold(ack.member, version)
            tell(self._observe, MemberInstalled, version, ack.member.member, ack.pause_s)
            return
        if ack.member in self._silent and self._asked is not None and ack.identity == self._asked[0]:
            self._silent.remove(ack.member)
            self.holds[ack.member] = self._asked[1]
        if self._votes is not None:
            try:
                if self._votes.prepare(ack):
                    tell(self._observe, MemberPrepared, version, ack.member.member)
            except PayloadError as error:
                self._votes.drop(ack.member, str(error))
                tell(self._observe, VoteRefused, version, ack.member.member, type(error).__name__, str(error))

    def _nack(self, nack: Nack) -> None:
        version = nack.identity.version
        if nack.frames:
            if self._votes is not None and nack.identity == self._votes.identity:
                self._again |= set(nack.frames)
            tell(self._observe, ChunksWanted, version, nack.member.member, nack.frames, nack.reason)
            return
        if nack.member in self.holds or nack.member in self._silent:
            self._silent.discard(nack.member)
            self.holds[nack.member] = nack.holds
        if self._votes is not None:
            self._votes.refuse(nack)
        self._answer(version, nack.member, Answer(nack.reason))
        tell(self._observe, MemberRefused, version, nack.member.member, nack.reason)

    def _answer(self, version: int, member: MemberRef, answer: Answer) -> None:
        if version in self._refits:
            self._refits[version].answer(member, answer)

    def _hold(self, member: MemberRef, version: int) -> None:
        """A member holds a version, so it answers for none before."""
        for refit in self._refits.values():
            refit.hold(member, version)

    def _tell(self) -> None:
        news, self._news = self._news, anyio.Event()
        news.set()
