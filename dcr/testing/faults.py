"""A transport around another one, with faults on messages in either direction.

A fault is a function from one message to the messages that come out in its place: none drops it, two duplicate it, a
changed one corrupts it; raising is a send, or a receive, that fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from dcr.protocol.wire import Chunk, Head, Message
from dcr.seams import Ledger, Link, Run, Transport, Writer
from dcr.testing.wrapped import WrappedRun

Fault = Callable[[Message], Iterable[Message]]


def honest(message: Message) -> Iterable[Message]:
    """No fault."""
    return (message,)


class FaultyTransport:
    """Wraps a transport; every link it opens applies the faults.

    on_send, on_receive: for messages of this side, and for messages to it. on_swap: called before each swap of the
    head, with the new one; raising is a swap that was not made.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        on_send: Fault = honest,
        on_receive: Fault = honest,
        on_swap: Callable[[Head], object] = lambda _: None,
    ) -> None:
        self._transport = transport
        self._on_swap = on_swap
        self._on_send = on_send
        self._on_receive = on_receive

    @asynccontextmanager
    async def open(self, url: str) -> AsyncIterator[Run]:
        """See `dcr.seams.Transport.open`."""
        async with self._transport.open(url) as run:
            yield WrappedRun(
                run,
                link=lambda link: _FaultyLink(link, self._on_send, self._on_receive),
                writer=lambda link: _FaultyWriter(link, self._on_send),
                ledger=lambda ledger: _FaultyLedger(ledger, self._on_swap),
            )


class _FaultyLedger:
    def __init__(self, ledger: Ledger, on_swap: Callable[[Head], object]) -> None:
        self._ledger = ledger
        self._on_swap = on_swap

    async def read(self) -> tuple[Head | None, bytes]:
        return await self._ledger.read()

    async def swap(self, head: Head, tag: bytes) -> bool:
        self._on_swap(head)
        return await self._ledger.swap(head, tag)


class _FaultyWriter:
    def __init__(self, link: Writer, on_send: Fault) -> None:
        self._link = link
        self._on_send = on_send

    async def send(self, message: Message) -> None:
        for sent in self._on_send(message):
            await self._link.send(sent)


class _FaultyLink(_FaultyWriter):
    def __init__(self, link: Link, on_send: Fault, on_receive: Fault) -> None:
        super().__init__(link, on_send)
        self._from = link
        self._on_receive = on_receive
        self._waiting: deque[Message] = deque()

    async def receive(self) -> Message:
        while not self._waiting:
            self._waiting.extend(self._on_receive(await self._from.receive()))
        return self._waiting.popleft()


def flip_bit(data: bytes, bit: int) -> bytes:
    """The same bytes with one bit flipped; bit counts from the lowest of the first byte."""
    octets = bytearray(data)
    octets[bit // 8] ^= 1 << bit % 8
    return bytes(octets)


def flip_one_chunk(version: int, *, bit: int | None = None) -> Fault:
    """A fault that flips one bit (None: in the middle) in the body of the first chunk of one version, once."""
    left = [version]

    def fault(message: Message) -> Iterable[Message]:
        header: Any = message.header
        if not isinstance(header, Chunk) or header.identity.version not in left or not message.body:
            return (message,)
        left.clear()
        return (Message(header, flip_bit(message.body, 4 * len(message.body) if bit is None else bit)),)

    return fault
