"""How messages travel, and where versions are kept: transports, found through the entry-point group dcr.transports."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Set
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from dcr.protocol.catalogue import Outline
from dcr.protocol.wire import Head, Identity, Join, MemberRef, Message


class Link(Protocol):
    """An open connection of one side (sender or member) to a run."""

    async def send(self, message: Message) -> None:
        """Hand a message over; returns when the transport holds it.

        Raises:
            RemoteError, OSError: it was not handed over.
        """
        ...

    async def receive(self) -> Message:
        """The next message for this side.

        Raises:
            IncompleteError: the link closed. A closed link is never success.
        """
        ...


class Writer(Protocol):
    """An open connection of a further rank of the publisher to a run."""

    async def send(self, message: Message) -> None:
        """Hand over a chunk of an attempt that the run's sender has opened; returns when the transport holds it.

        What has returned is as durable as the transport promises before the seal is sent.

        Raises:
            LocalError: the attempt was not opened, or the message is not a Chunk.
            RemoteError, OSError: it was not handed over.
        """
        ...


class Ledger(Protocol):
    """Where the head lives."""

    async def read(self) -> tuple[Head | None, bytes]:
        """The head and a tag for `swap`; None before the first swap."""
        ...

    async def swap(self, head: Head, tag: bytes) -> bool:
        """Replace the head if it still has this tag; False if it has not.

        Raises: anything else leaves the outcome unknown; read it back.
        """
        ...


class Store(Protocol):
    """What a durable transport keeps: sealed attempts. Which of them are versions, the head and their bases say.

    A missing object is an error, never the end of a chain.
    """

    async def newest(self) -> int:
        """The highest version that was ever opened, sealed or not; -1 if none was."""
        ...

    async def outlines(self, after: int, to: int) -> list[Outline]:
        """The sealed attempts that were not given up, at versions beyond `after` and up to `to`, in order."""
        ...

    async def describe(self, identity: Identity) -> tuple[Message, Message]:
        """The Open and the Seal of a sealed attempt.

        Raises:
            IncompleteError: one of them is missing or cut short; names it.
        """
        ...

    def read(self, identity: Identity, frames: Collection[int] | None = None) -> AsyncGenerator[Message, None]:
        """The Open, every Chunk (of these frames only, if they are given) and the Seal of a sealed attempt.

        Raises:
            IncompleteError: a part of it is missing or cut short; names it.
        """
        ...

    async def prune(self, keep: Set[Identity], below: int) -> None:
        """Remove every attempt at a version less than `below` that is not in `keep`."""
        ...


class Run(Protocol):
    """What a transport opens: a run's ledger, its store (None if it keeps nothing), and links to it."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def store(self) -> Store | None: ...

    async def members(self) -> list[Join]:
        """Who takes part now, and what each one said that it holds."""
        ...

    def sender(self) -> AbstractAsyncContextManager[Link]:
        """The publisher's link: takes Open, Chunk, Seal, Abort, Commit; gives Join, Leave, Ack, Nack."""
        ...

    def writer(self, part: tuple[int, int]) -> AbstractAsyncContextManager[Writer]:
        """The link of a further rank of the publisher, which is number part[0] >= 1 of part[1]: takes Chunks only.

        They join the attempt that the sender opened, maybe from another process, and meet the others in its Seal.
        """
        ...

    def member(self, ref: MemberRef) -> AbstractAsyncContextManager[Link]:
        """A member's link: the other way round."""
        ...


class Transport(Protocol):
    """A value that opens runs by URL; found through the entry-point group dcr.transports by the URL's scheme."""

    def open(self, url: str) -> AbstractAsyncContextManager[Run]:
        """Open a run.

        Raises:
            LocalError: the URL does not make sense; says what was expected.
        """
        ...
