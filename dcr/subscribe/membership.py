"""A member's place in a run: its link, its live memory, which version that holds, and what it says of it."""

from __future__ import annotations

import time
from typing import Any

from dcr.commit import Member, Receipt, member_after
from dcr.errors import BaseMismatch, DcrError, DigestMismatch, WireError
from dcr.observe import Event, Observer
from dcr.seams import Link, Run, Store
from dcr.subscribe.rank import Rank
from dcr.wire import Ack, Head, Header, Identity, Join, MemberRef, Message, Nack, Open


class Membership:
    """What a member is to its run. Live attempts and stored versions change it in turn, in one task.

    rank: its live memory. holds: the version in it, None if none that is known. head: as it was read last.
    """

    def __init__(self, ref: MemberRef, run: Run, link: Link, rank: Rank, observe: Observer) -> None:
        self.ref = ref
        self.rank = rank
        self.head: Head | None = None
        self.holds: Identity | None = None
        self.state = Member.EMPTY
        self._run = run
        self._link = link
        self._back: Message | None = None
        self._observe = observe

    # ------------------------------------------------------------------ the run

    @property
    def store(self) -> Store | None:
        """Where the run keeps its versions."""
        return self._run.store

    async def committed(self) -> Identity | None:
        """What the head names now."""
        self.head, _ = await self._run.ledger.read()
        return self.head.identity if self.head else None

    async def receive(self) -> Message:
        """The next message; one that was put back comes first."""
        if self._back is not None:
            message, self._back = self._back, None
            return message
        return await self._link.receive()

    def put_back(self, message: Message) -> None:
        """Have the last message received once more."""
        self._back = message

    async def next(self) -> Message | None:
        """The next message; None for one that cannot be understood: it is reported, and it is no attempt."""
        try:
            return await self.receive()
        except WireError as error:
            self.emit("ignored", detail=str(error))
            return None

    async def send(self, header: Header) -> None:
        await self._link.send(Message(header))

    async def say(self, header: Header) -> None:
        """Report what has happened; a report that does not get through does not change what has."""
        try:
            await self.send(header)
        except (DcrError, OSError) as error:
            self.emit("unsaid", detail=f"{type(header).__name__}: {type(error).__name__}: {error}")

    @property
    def join(self) -> Join:
        """That it takes part, and what it holds."""
        return Join(self.ref, self.holds, self.rank.reads_base)

    def emit(self, name: str, version: int | None = None, **rest: Any) -> None:
        self._observe(Event(name, version, self.ref.member, **rest))

    # ------------------------------------------------------------------ what live memory holds

    def move(self, event: str) -> None:
        """Take a step of the member's state machine (`dcr.commit.MEMBER`)."""
        self.state = member_after(self.state, event)

    def receipt(self, header: Open, *, stored: bool = False) -> Receipt:
        """What an attempt must fulfil to be prepared here; a stored one may be of a term before the head's."""
        assert self.head is not None
        return Receipt(header, run=self.head.run, term=0 if stored else self.head.term, holds=self.holds)

    async def hold(self, identity: Identity) -> None:
        """Live memory, whatever wrote it, has turned out to hold a version: it is shown."""
        self.holds = identity
        self.move("recognised")
        await self.show()
        self.emit("recognised", identity.version)

    async def show(self) -> None:
        """Have the engine show the version that it holds, if it can."""
        if self.holds is not None:
            await self.rank.show(self.holds.version)

    async def installed(self, identity: Identity, root: bytes, began_s: float, pause_s: float) -> None:
        """A version has been written and read back: show it, and say so."""
        self.holds = identity
        self.move("installed")
        await self.show()
        self.emit("installed", identity.version, detail=f"{time.monotonic() - began_s:.6f} s", pause_s=pause_s)
        await self.say(Ack("installed", self.ref, identity, root, pause_s))
        await self.say(self.join)

    async def poison(self, identity: Identity, error: Exception) -> None:
        """Live memory may hold half of a version: say so."""
        reason = f"poisoned: {type(error).__name__}: {error}"
        self.holds = None
        self.move("failed")
        self.emit("poisoned", identity.version, detail=reason)
        await self.say(Nack(self.ref, identity, None, reason))

    async def doubt(self, identity: Identity, error: BaseMismatch | DigestMismatch) -> bool:
        """Old or new bits are not those expected: look at what live memory really holds before anybody is blamed.

        True if it is not what it should be: then it is not trusted any more.
        """
        if self.holds is None:
            return False
        believed = self.rank.root
        if await self.rank.rescan() == believed:
            self.move("dropped")
            return False
        self.lose_trust(identity, error)
        return True

    def lose_trust(self, identity: Identity, error: Exception) -> None:
        """Live memory holds something else than was believed: it has to be seeded."""
        self.emit("lost_trust", identity.version, detail=str(error))
        self.holds = None
        self.move("lost_trust")
