"""What the first rank of a publisher does for all: the term, the members, openings, seals, votes, the head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import anyio
import msgspec

from dcr.errors import DcrError, StateError, WireError
from dcr.events import AttemptAborted, MemberTimedOut, MessageIgnored
from dcr.events.observers import Observer, tell
from dcr.layout import frames
from dcr.layout.frames import Layout
from dcr.layout.views import Lanes
from dcr.protocol import digest
from dcr.protocol.machines import AttemptEvent, AttemptMachine
from dcr.protocol.votes import Votes
from dcr.protocol.wire import Abort, ChunkRef, Commit, Head, Identity, MemberRef, Message, Open, Seal
from dcr.publish.headship import Headship
from dcr.publish.refit import Refit
from dcr.publish.roster import Roster
from dcr.seams import Link, Run

ABORT_TIMEOUT_S = 10.0
COMMIT_TIMEOUT_S = 120.0


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """Where a run stands when a publisher takes its term. newest: the highest version that was ever opened."""

    head: Head
    newest: int


class Call(msgspec.Struct, frozen=True, array_like=True):
    """What comes next in a vote: chunks are wanted again, or it is carried, or it is lost."""

    again: tuple[int, ...] = ()
    lost: str = ""


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """An attempt has begun. reads_base: chunks may need their base, since every member can read it."""

    identity: Identity
    reads_base: bool


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """A version is committed. answers: what each member said of it."""

    answers: dict[str, str]


class Ballot:
    """One attempt as the first rank moves it: its machine, its votes, and until when they are waited for.

    deadline_s: on the event loop's clock; set by the seal.
    """

    def __init__(self, votes: Votes) -> None:
        self.machine = AttemptMachine()
        self.votes = votes
        self.deadline_s = math.inf


class Leader:
    """Opens, seals and commits attempts, one at a time. quorum, vote_timeout_s, observe: as for `dcr.publisher`.

    outcome: of the last attempt, once the head has moved to it; awaited: the members that are to install it then.
    broken: why members can no longer be heard.
    """

    def __init__(
        self, run: Run, link: Link, *, quorum: int | Literal["all"], vote_timeout_s: float, observe: Observer
    ) -> None:
        self._run = run
        self._link = link
        self._quorum = quorum
        self._vote_timeout_s = vote_timeout_s
        self._observe = observe
        self._layout = self._body = b""
        self._headship: Headship | None = None
        self._ballot: Ballot | None = None
        self.roster = Roster(observe)
        self.outcome: Outcome | None = None
        self.awaited: frozenset[MemberRef] = frozenset()
        self.broken: Exception | None = None

    @property
    def headship(self) -> Headship:
        """
        Raises:
            StateError: the term has not been taken.
        """
        if self._headship is None:
            raise StateError("the publisher has not taken its term yet")
        return self._headship

    async def listen(self) -> None:
        """Take what members send, until the link ends."""
        while True:
            try:
                message = await self._link.receive()
            except WireError as error:
                tell(self._observe, MessageIgnored, None, type(error).__name__, str(error))
            except (DcrError, OSError) as error:
                self.broken = error
                self.roster.end(error)
                return
            else:
                self.roster.receive(message)

    async def start(self, layout: Layout) -> Standing:
        """Take the next term."""
        self._layout, self._body = layout.digest, frames.encode(layout)
        self._headship = await Headship.take(self._run.ledger)
        return Standing(self._headship.head, await self._run.store.newest() if self._run.store else -1)

    # ------------------------------------------------------------------ one attempt

    async def open(self, refit: Refit, base: Identity | None) -> Opened:
        """Begin an attempt; raises Fenced if the head is another publisher's."""
        await self.headship.require()
        head = self.headship.head
        identity = Identity(head.run, head.term, refit.version, 1)
        self.outcome = None
        votes = self.roster.open(identity, base, self._quorum, refit)
        self._ballot = Ballot(votes)
        await self._open(identity, base, tuple(sorted(votes.electorate)))
        return Opened(identity, self.roster.reads_base)

    async def seal(
        self, identity: Identity, base: Identity | None, refs: Sequence[ChunkRef], digests: tuple[Lanes, Lanes, Lanes]
    ) -> None:
        """Complete the attempt; digests: of the base, of the target, and of the old bits that are replaced."""
        ballot = self._voted
        ballot.votes.root = digest.root(digests[1])
        await self._seal(identity, base, refs, digests)
        ballot.machine.move(AttemptEvent.SEALED)
        ballot.deadline_s = anyio.current_time() + self._vote_timeout_s

    async def open_anchor(self, identity: Identity) -> None:
        """Begin an anchor of a committed version, which nobody votes on."""
        await self._open(identity, None, ())

    async def seal_anchor(
        self, identity: Identity, refs: Sequence[ChunkRef], digests: tuple[Lanes, Lanes, Lanes]
    ) -> None:
        """Complete an anchor."""
        await self._seal(identity, None, refs, digests)

    async def _open(self, identity: Identity, base: Identity | None, electorate: tuple[MemberRef, ...]) -> None:
        await self._link.send(Message(Open(identity, base, self._layout, electorate), self._body))

    async def _seal(
        self, identity: Identity, base: Identity | None, refs: Sequence[ChunkRef], digests: tuple[Lanes, Lanes, Lanes]
    ) -> None:
        seal = Seal(identity, base, tuple(refs), digest.root(digests[0]), digest.root(digests[1]))
        await self._link.send(Message(seal, b"".join(map(digest.pack, digests))))

    async def call(self) -> Call:
        """Wait until the vote is carried or lost, or chunks are wanted again."""
        votes = self._voted.votes
        with anyio.CancelScope(deadline=self._voted.deadline_s):
            while not votes.carried and not votes.lost:
                if again := self.roster.take_again():
                    return Call(tuple(again))
                await self.roster.news()
        for member in votes.missing:
            votes.drop(member, f"no vote within {self._vote_timeout_s:g} s")
            self.roster.give_up_on(member)
            tell(self._observe, MemberTimedOut, votes.identity.version, member.member, self._vote_timeout_s)
        if votes.carried:
            return Call()
        reasons = "; ".join(f"{ref.member}: {why}" for ref, why in sorted(votes.refused.items()))
        asked = len(votes.electorate)
        return Call(
            lost=f"{votes.identity} was given up: {len(votes.prepared)} of {asked} members prepared it, "
            f"{votes.needed} are needed ({reasons})"
        )

    async def commit(self) -> Outcome:
        """Move the head.

        Raises:
            NotCommittedError: the head could not be moved, and was not. Fenced: another publisher has taken over. Else
                what made the outcome unknowable. After the last two this publisher is of no use any more.
        """
        votes, machine = self._voted.votes, self._voted.machine
        machine.move(AttemptEvent.CARRIED)
        with anyio.fail_after(COMMIT_TIMEOUT_S):
            await self.headship.move(votes.identity, votes.root, machine)
        self.awaited = self.roster.committed(votes)
        self._end()
        self.outcome = Outcome(_answers(votes, self.roster))
        return self.outcome

    async def announce(self, identity: Identity) -> None:
        """Tell members that the head has moved; they look at it themselves as well."""
        with anyio.move_on_after(ABORT_TIMEOUT_S):
            await self._link.send(Message(Commit(identity)))

    async def abort(self, error: BaseException) -> None:
        """Give the attempt up, if one was opened; not for one whose commit has begun."""
        ballot = self._ballot
        self._end()
        if ballot is None:
            return
        ballot.machine.move(AttemptEvent.GAVE_UP)
        identity = ballot.votes.identity
        reason = f"{type(error).__name__}: {error}"
        with anyio.move_on_after(ABORT_TIMEOUT_S, shield=True):
            try:
                await self._link.send(Message(Abort(identity, reason)))
            except (DcrError, OSError) as failed:
                error.add_note(f"the abort could not be sent either: {failed}")
        tell(self._observe, AttemptAborted, identity.version, type(error).__name__, str(error))

    async def prune(self, below: int) -> None:
        """Remove the versions before one, where they are kept."""
        if self._run.store is not None:
            await self._run.store.prune(frozenset(), below=below)

    def _end(self) -> None:
        self._ballot = None
        self.roster.close()

    @property
    def _voted(self) -> Ballot:
        if self._ballot is None:
            raise StateError("no attempt is open")
        return self._ballot


def _answers(votes: Votes, roster: Roster) -> dict[str, str]:
    said = {ref.member: "behind" for ref in roster}
    said |= {ref.member: why for ref, why in votes.refused.items()}
    return said | {ref.member: "prepared" for ref in votes.prepared}
