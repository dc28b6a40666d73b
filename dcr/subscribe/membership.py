"""A member's place in a run: its link, its live memory, which version that holds, and what it says of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, Literal, ParamSpec

import anyio

from dcr.errors import BaseMismatch, DcrError, DigestMismatch, WireError
from dcr.events import (
    Event,
    HeadStale,
    InstallCompleted,
    InstallFailed,
    InstallStarted,
    MessageIgnored,
    Recognised,
    ReportLost,
    TrustLost,
)
from dcr.events.observers import Observer, tell
from dcr.protocol.machines import MemberEvent, MemberMachine
from dcr.protocol.receipt import Receipt
from dcr.protocol.wire import Ack, Commit, Head, Header, Identity, Join, MemberRef, Message, Nack, Open
from dcr.seams import Link, Run, Store
from dcr.subscribe.rank import Rank

READ_AGAIN_S = (0.0, 0.01, 0.1, 0.4)  # before each reading of a head that turns out to be older than it can be
Standing = tuple[str, int, int]  # run, term and version, at least
Fields = ParamSpec("Fields")


@dataclass(frozen=True, slots=True)
class Installation:
    """A version that is being written into live memory. kind: as of a `Version`; began_s: of time.monotonic()."""

    identity: Identity
    kind: Literal["delta", "seed"]
    began_s: float


@dataclass(frozen=True, slots=True)
class Staleness:
    """A head that is older than it can be: what it says (None: there is none), and what it must say at least."""

    version: int | None
    term: int | None
    least_version: int
    least_term: int

    def __str__(self) -> str:
        version = -1 if self.version is None else self.version
        names = "no head" if self.term is None else f"version {version} and term {self.term}"
        return (
            f"expected version {self.least_version} or later and term {self.least_term} or later in the head, found "
            f"{names}; it is not followed: see what answers for the run, a cache or a restored backup"
        )


class Membership:
    """What a member is to its run. Live attempts and stored versions change it in turn, in one task.

    rank: its live memory. machine: what it does, and which version it holds. head: the newest that was read. lacks: how
    many stored versions led from what it holds to the head when it last looked; from an anchor, if it holds none of
    them. stale: why the head that was read last is not followed; None if it is.
    """

    def __init__(self, ref: MemberRef, run: Run, link: Link, rank: Rank, observe: Observer) -> None:
        self.ref = ref
        self.rank = rank
        self.head: Head | None = None
        self.machine = MemberMachine()
        self.lacks = 0
        self.stale: Staleness | None = None
        self._announced: Standing | None = None  # by what was received, until the head has been read
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
        """Read the head; what it names.

        A head never goes back, so one that is older than what was read before, or than what messages have announced (a
        cache, a replica, a restored backup), is read again for a moment. If it stays, it is not followed, and not an
        error either: what is live stays, and the next read may be right.
        """
        for pause_s in READ_AGAIN_S:
            await anyio.sleep(pause_s)
            head, _ = await self._run.ledger.read()
            stale = _staleness(head, self.head, self._announced)
            if stale is None:
                break
        self._announced = None
        if stale is None:
            self.head = head
        elif stale != self.stale:
            self.emit(HeadStale, stale.version, stale.term, stale.least_version, stale.least_term)
        self.stale = stale
        return self.head.identity if self.head else None

    async def receive(self) -> Message:
        """The next message; one that was put back comes first."""
        if self._back is not None:
            message, self._back = self._back, None
            return message
        message = await self._link.receive()
        match message.header:
            case Commit(identity=identity):
                self._announced = identity.run, identity.term, identity.version
            case Open(identity=identity):  # a publisher's first head names no version, but its term
                self._announced = identity.run, identity.term, -1
            case _:
                pass
        return message

    def put_back(self, message: Message) -> None:
        """Have the last message received once more."""
        self._back = message

    async def next(self) -> Message | None:
        """The next message; None for one that cannot be understood: it is reported, and it is no attempt."""
        try:
            return await self.receive()
        except WireError as error:
            self.emit(MessageIgnored, type(error).__name__, str(error))
            return None

    async def send(self, header: Header) -> None:
        await self._link.send(Message(header))

    async def say(self, header: Header) -> None:
        """Report what has happened; a report that does not get through does not change what has."""
        try:
            await self.send(header)
        except (DcrError, OSError) as error:
            self.emit(ReportLost, type(header).__name__, type(error).__name__, str(error))

    @property
    def join(self) -> Join:
        """That it takes part, and what it holds."""
        return Join(self.ref, self.holds, self.rank.reads_base)

    def emit(
        self, kind: Callable[Concatenate[float, str, Fields], Event], *args: Fields.args, **fields: Fields.kwargs
    ) -> None:
        """Tell the observer of an event of this member that happens now."""
        tell(self._observe, kind, self.ref.member, *args, **fields)

    # ------------------------------------------------------------------ what live memory holds

    @property
    def holds(self) -> Identity | None:
        """The version in live memory, None if none that is known."""
        return self.machine.holds

    def receipt(self, header: Open, *, stored: bool = False) -> Receipt:
        """What an attempt must fulfil to be prepared here; a stored one may be of a term before the head's."""
        assert self.head is not None
        return Receipt(header, run=self.head.run, term=0 if stored else self.head.term, holds=self.holds)

    async def hold(self, identity: Identity) -> None:
        """Live memory, whatever wrote it, has turned out to hold a version: it is shown."""
        self.machine.move(MemberEvent.RECOGNISED, identity)
        await self.show()
        self.emit(Recognised, identity.version)

    async def show(self) -> None:
        """Have the engine show the version that it holds, if it can."""
        if self.holds is not None:
            await self.rank.show(self.holds.version)

    def begin_install(self, identity: Identity, kind: Literal["delta", "seed"]) -> Installation:
        """A version is about to be written."""
        self.emit(InstallStarted, identity.version, kind)
        return Installation(identity, kind, time.monotonic())

    def fail_install(
        self, begun: Installation, error: Exception, live: Literal["unchanged", "undone", "poisoned"]
    ) -> None:
        """A version could not be written; live: what live memory holds now."""
        self.emit(
            InstallFailed,
            begun.identity.version,
            begun.kind,
            live=live,
            error=type(error).__name__,
            reason=str(error),
            duration_s=time.monotonic() - begun.began_s,
        )

    async def installed(self, begun: Installation, identity: Identity, root: bytes, pause_s: float) -> None:
        """A version, which may have replaced the one that was begun, has been written and read back: say so."""
        self.lacks = 0
        self.machine.move(MemberEvent.INSTALLED, identity)
        await self.show()
        self.emit(InstallCompleted, identity.version, begun.kind, pause_s, time.monotonic() - begun.began_s)
        await self.say(Ack("installed", self.ref, identity, root, pause_s))
        await self.say(self.join)

    async def poison(self, begun: Installation, identity: Identity, error: Exception) -> None:
        """Live memory may hold half of a version: say so."""
        reason = f"poisoned: {type(error).__name__}: {error}"
        self.machine.move(MemberEvent.FAILED)
        self.fail_install(begun, error, "poisoned")
        await self.say(Nack(self.ref, identity, None, reason))

    async def doubt(self, identity: Identity, error: BaseMismatch | DigestMismatch) -> bool:
        """Old or new bits are not those expected: look at what live memory really holds before anybody is blamed.

        True if it is not what it should be: then it is not trusted any more.
        """
        if self.holds is None:
            self.machine.move(MemberEvent.DROPPED)
            return False
        believed = self.rank.root
        if await self.rank.rescan() == believed:
            self.machine.move(MemberEvent.DROPPED)
            return False
        self.lose_trust(identity, error)
        return True

    def lose_trust(self, identity: Identity, error: Exception) -> None:
        """Live memory holds something else than was believed: it has to be seeded."""
        self.emit(TrustLost, identity.version, type(error).__name__, str(error))
        self.machine.move(MemberEvent.LOST_TRUST)


def _staleness(head: Head | None, newest: Head | None, announced: Standing | None) -> Staleness | None:
    """What makes a head older than one that was read or announced before; None if nothing does.

    Heads of two runs have no order: whoever starts a new run where another one was is followed.
    """
    term, version = (-1, -1) if head is None else (head.term, _version(head))
    before = [(newest.run, newest.term, _version(newest))] if newest else []
    before += [announced] if announced else []
    for run, least_term, least_version in before:
        if (head is None or run == head.run) and (term < least_term or version < least_version):
            named = head.identity.version if head and head.identity else None
            return Staleness(named, head.term if head else None, least_version, least_term)
    return None


def _version(head: Head) -> int:
    return -1 if head.identity is None else head.identity.version
