"""A transport in memory: what `dcr.transports.local` does, without files, threads or polling.

For tests of whatever stands on a transport: wrap it to make faults, or read a run's attempts to see what was sent.
Messages are kept as wire bytes, so only what can be encoded gets through, and nobody shares an object with anybody.
Sides are woken when something happens. Use one transport value for both ends, within one event loop at a time.

    sender's Open, Chunk, Seal, Abort   become part of an attempt; an identity is opened once
    writer's Chunk                      becomes part of the attempt that a sender has opened
    member's Join, Leave                reach every sender that is open, and Joins those that open later
    member's Ack, Nack                  reach the sender that opened the attempt
    a member receives                   the newest attempt of the head's term beyond its version, from its beginning
                                        whenever the member came; its Abort; a Commit whenever the head moves
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
import anyio.lowlevel

from dcr import urls, wire
from dcr.errors import IncompleteError, LocalError
from dcr.wire import Abort, Ack, Chunk, Commit, Head, Identity, Join, Leave, MemberRef, Message, Nack, Open, Seal

T = TypeVar("T")


class MemoryTransport:
    """Opens runs by the path of their URL (`memory:///run-17`); they live as long as this value."""

    def __init__(self) -> None:
        self._runs: dict[str, MemoryRun] = {}

    @asynccontextmanager
    async def open(self, url: str) -> AsyncIterator[MemoryRun]:
        """See `dcr.seams.Transport.open`."""
        yield self.run(url)

    def run(self, url: str) -> MemoryRun:
        """The run of a URL, to be looked at."""
        return self._runs.setdefault(urls.path_of(url, "memory"), MemoryRun())


@dataclass(slots=True)
class Attempt:
    """One attempt as wire bytes. owner: the sender that opened it, which is told of votes."""

    owner: _SenderLink
    opened: bytes
    chunks: list[bytes] = field(default_factory=list)
    sealed: bytes | None = None
    aborted: bytes | None = None


def is_current(identity: Identity, head: Head) -> bool:
    """Whether an attempt is of the head's term; a publisher of a lower one has been superseded."""
    return identity.term >= head.term


class MemoryRun:
    """A run: its ledger, its store, and links. `attempts` and `joined` may be read; do not change them."""

    def __init__(self) -> None:
        self.attempts: dict[Identity, Attempt] = {}
        self.newest = -1
        self.joined: dict[MemberRef, bytes] = {}
        self.senders: list[_SenderLink] = []
        self.ledger = _Ledger(self)
        self.store = _Store(self)
        self._asleep: list[anyio.Event] = []

    async def members(self) -> list[Join]:
        """See `dcr.seams.Run.members`."""
        await anyio.lowlevel.checkpoint()
        headers = [wire.parse(data).header for _, data in sorted(self.joined.items())]
        return [header for header in headers if isinstance(header, Join)]

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[_SenderLink]:
        """See `dcr.seams.Run.sender`."""
        link = _SenderLink(self, self.joined.values())
        self.senders.append(link)
        try:
            yield link
        finally:
            self.senders.remove(link)
            link.closed = True
            self.wake()

    @asynccontextmanager
    async def writer(self, part: tuple[int, int]) -> AsyncIterator[_WriterLink]:
        """See `dcr.seams.Run.writer`."""
        if not 0 < part[0] < part[1]:
            raise LocalError(f"expected a writer from 1 to {part[1] - 1}, found {part[0]}: the first one is the sender")
        yield _WriterLink(self)

    @asynccontextmanager
    async def member(self, ref: MemberRef) -> AsyncIterator[_MemberLink]:
        """See `dcr.seams.Run.member`. A member whose link ends has left."""
        link = _MemberLink(self, ref)
        try:
            yield link
        finally:
            link.closed = True
            self.wake()
            if ref in self.joined:
                self.tell_senders(Message(Leave(ref)))

    def tell_senders(self, message: Message) -> None:
        """A Join or a Leave, to all senders."""
        data = wire.encode(message)
        match message.header:
            case Join(member=ref):
                self.joined[ref] = data
            case Leave(member=ref):
                self.joined.pop(ref, None)
        for link in self.senders:
            link.inbox.append(data)
        self.wake()

    def wake(self) -> None:
        """Something has changed: whoever waits looks again."""
        for event in self._asleep:
            event.set()

    async def wait(self, look: Callable[[], T | None]) -> T:
        """Look, again after each change, until there is something to see. Cancelling it loses nothing."""
        await anyio.lowlevel.checkpoint()
        while (found := look()) is None:
            event = anyio.Event()
            self._asleep.append(event)
            try:
                await event.wait()
            finally:
                self._asleep.remove(event)
        return found


class _Ledger:
    """The head; its tag counts the swaps."""

    def __init__(self, run: MemoryRun) -> None:
        self._run = run
        self._swaps = 0
        self.head: Head | None = None

    async def read(self) -> tuple[Head | None, bytes]:
        """See `dcr.seams.Ledger.read`."""
        await anyio.lowlevel.checkpoint()
        return self.head, b"%d" % self._swaps

    async def swap(self, head: Head, tag: bytes) -> bool:
        """See `dcr.seams.Ledger.swap`."""
        await anyio.lowlevel.checkpoint()
        if tag != b"%d" % self._swaps:
            return False
        self.head, self._swaps = head, self._swaps + 1
        self._run.wake()
        return True


class _Store:
    """Sealed attempts of a run."""

    def __init__(self, run: MemoryRun) -> None:
        self.run, self._attempts = run, run.attempts

    async def newest(self) -> int:
        """See `dcr.seams.Store.newest`."""
        await anyio.lowlevel.checkpoint()
        return self.run.newest

    async def attempts(self, version: int) -> list[Identity]:
        """See `dcr.seams.Store.attempts`."""
        await anyio.lowlevel.checkpoint()
        found = ((identity, one) for identity, one in self._attempts.items() if identity.version == version)
        return sorted(identity for identity, one in found if one.sealed is not None and one.aborted is None)

    async def describe(self, identity: Identity) -> tuple[Message, Message]:
        """See `dcr.seams.Store.describe`."""
        await anyio.lowlevel.checkpoint()
        opened, *_, sealed = self._whole(identity)
        return wire.parse(opened), wire.parse(sealed)

    async def read(self, identity: Identity) -> AsyncGenerator[Message, None]:
        """See `dcr.seams.Store.read`."""
        seen: set[int] = set()
        for data in self._whole(identity):
            await anyio.lowlevel.checkpoint()
            message = wire.parse(data)
            match message.header:
                case Chunk(frame=frame):
                    seen.add(frame)
                case Seal(chunks=refs) if missing := {ref.frame for ref in refs} - seen:
                    raise IncompleteError(f"{identity}: the chunks of frames {sorted(missing)} are missing")
            yield message

    async def prune(self, keep: Set[Identity], below: int) -> None:
        """See `dcr.seams.Store.prune`."""
        await anyio.lowlevel.checkpoint()
        for identity in [one for one in self._attempts if one.version < below and one not in keep]:
            del self._attempts[identity]

    def _whole(self, identity: Identity) -> list[bytes]:
        attempt = self._attempts.get(identity)
        if attempt is None or attempt.sealed is None:
            raise IncompleteError(f"{identity} is {'not sealed' if attempt else 'missing: removed, or never opened'}")
        return [attempt.opened, *attempt.chunks, attempt.sealed]


class _SenderLink:
    """The publisher's side."""

    def __init__(self, run: MemoryRun, joins: Iterable[bytes]) -> None:
        self._run = run
        self.inbox = deque(joins)
        self.closed = False

    async def send(self, message: Message) -> None:
        """See `dcr.seams.Link.send`."""
        await anyio.lowlevel.checkpoint()
        data = wire.encode(message)
        match message.header:
            case Open(identity=identity):
                if identity in self._run.attempts:
                    raise LocalError(f"{identity} was opened before: an identity is used once")
                self._run.attempts[identity] = Attempt(self, data)
                self._run.newest = max(self._run.newest, identity.version)
            case Chunk(identity=identity):
                self._mine(identity).chunks.append(data)
            case Seal(identity=identity):
                self._mine(identity).sealed = data
            case Abort(identity=identity):
                self._mine(identity).aborted = data
            case Commit():
                pass  # members look at the head itself
            case header:
                raise LocalError(f"a publisher sends Open, Chunk, Seal, Abort or Commit, not {type(header).__name__}")
        self._run.wake()

    async def receive(self) -> Message:
        """See `dcr.seams.Link.receive`."""
        return wire.parse(await self._run.wait(self._look))

    def _look(self) -> bytes | None:
        if self.inbox:
            return self.inbox.popleft()
        if self.closed:
            raise IncompleteError("the link is closed: nothing more comes over it, open another")
        return None

    def _mine(self, identity: Identity) -> Attempt:
        attempt = self._run.attempts.get(identity)
        if attempt is None or attempt.owner is not self:
            raise LocalError(f"{identity} has not been opened on this link; send its Open first")
        return attempt


class _WriterLink:
    """A further rank of the publisher."""

    def __init__(self, run: MemoryRun) -> None:
        self._run = run

    async def send(self, message: Message) -> None:
        """See `dcr.seams.Writer.send`."""
        await anyio.lowlevel.checkpoint()
        if not isinstance(message.header, Chunk):
            raise LocalError(f"a writer sends chunks only, not {type(message.header).__name__}")
        attempt = self._run.attempts.get(message.header.identity)
        if attempt is None:
            raise LocalError(f"{message.header.identity} has not been opened by the run's sender, or was removed")
        attempt.chunks.append(wire.encode(message))
        self._run.wake()


class _MemberLink:
    """A member's side."""

    def __init__(self, run: MemoryRun, ref: MemberRef) -> None:
        self._run = run
        self._ref = ref
        self._head: Identity | None = None
        self._last: Identity | None = None
        self._follows: Identity | None = None
        self._taken = 0
        self._sealed = False
        self.closed = False

    async def send(self, message: Message) -> None:
        """See `dcr.seams.Link.send`."""
        await anyio.lowlevel.checkpoint()
        match message.header:
            case Join() | Leave():
                self._run.tell_senders(message)
            case Ack(identity=identity) | Nack(identity=identity):
                if identity in self._run.attempts:  # else it was removed, and nobody asks any more
                    self._run.attempts[identity].owner.inbox.append(wire.encode(message))
                    self._run.wake()
            case header:
                raise LocalError(f"a member sends Join, Leave, Ack or Nack, not {type(header).__name__}")

    async def receive(self) -> Message:
        """See `dcr.seams.Link.receive`."""
        return await self._run.wait(self._look)

    def _look(self) -> Message | None:
        if self.closed:
            raise IncompleteError(f"the link of {self._ref.member} is closed: nothing more comes over it, open another")
        head = self._run.ledger.head
        if head is None:
            return None
        if self._follows is not None and (message := self._news(self._follows, head)) is not None:
            return message
        if head.identity is not None and head.identity != self._head:
            self._head = head.identity
            return Message(Commit(head.identity))
        return self._open(head)

    def _news(self, identity: Identity, head: Head) -> Message | None:
        """What is new of the attempt that was opened: chunks in order, the seal behind them, or its end."""
        attempt = self._run.attempts.get(identity)
        if attempt is None:
            self._follows = None
            return None if self._sealed else Message(Abort(identity, "it was removed"))
        if self._taken < len(attempt.chunks):
            self._taken += 1
            return wire.parse(attempt.chunks[self._taken - 1])
        if attempt.sealed is not None and not self._sealed:
            self._sealed = True
            return wire.parse(attempt.sealed)
        if attempt.aborted is not None:
            self._follows = None
            return wire.parse(attempt.aborted)
        if not is_current(identity, head) and head.identity != identity:
            self._follows = None
            return Message(Abort(identity, f"a publisher of term {head.term} has taken over"))
        return None

    def _open(self, head: Head) -> Message | None:
        """The newest attempt that is live: not seen before, of the head's term, beyond its version, not given up."""
        floor = head.identity.version if head.identity else -1
        attempts = self._run.attempts
        for identity in sorted(attempts, key=lambda one: (one.version, one.term, one.attempt), reverse=True):
            if identity == self._last or identity.version <= floor:
                return None
            if is_current(identity, head) and attempts[identity].aborted is None:
                self._last = self._follows = identity
                self._taken, self._sealed = 0, False
                return wire.parse(attempts[identity].opened)
        return None
