"""A transport around another one, on a link that is slow: for benchmarks, and to see what overlaps with what."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import msgspec

from dcr.errors import LocalError
from dcr.protocol.wire import PREFIX, Message
from dcr.seams import Link, Run, Transport, Writer
from dcr.testing.wrapped import WrappedRun


class LatencyTransport:
    """Wraps a transport; every send takes `delay_s` + size / `bytes_per_s` before the message is handed over.

    Each link is a line of its own, which carries one message at a time. bytes_per_s: None is as fast as the transport
    is. sleep: how it waits.

    Raises:
        LocalError: a negative delay, or a rate that is not positive.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        delay_s: float = 0.0,
        bytes_per_s: float | None = None,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        if delay_s < 0 or (bytes_per_s is not None and bytes_per_s <= 0):
            raise LocalError(f"expected delay_s >= 0 and bytes_per_s > 0, found {delay_s} and {bytes_per_s}")
        self._transport = transport
        self._delay_s = delay_s
        self._bytes_per_s = bytes_per_s
        self._sleep = sleep

    @asynccontextmanager
    async def open(self, url: str) -> AsyncIterator[Run]:
        """See `dcr.seams.Transport.open`."""
        async with self._transport.open(url) as run:
            yield WrappedRun(
                run, link=lambda link: _SlowLink(link, self._wait), writer=lambda link: _SlowWriter(link, self._wait)
            )

    async def _wait(self, message: Message) -> None:
        size_bytes = PREFIX.size + len(msgspec.msgpack.encode(message.header)) + len(message.body)
        await self._sleep(self._delay_s + (size_bytes / self._bytes_per_s if self._bytes_per_s else 0.0))


Wait = Callable[[Message], Awaitable[None]]


class _SlowWriter:
    def __init__(self, link: Writer, wait: Wait) -> None:
        self._to = link
        self._wait = wait
        self._line = anyio.Lock()

    async def send(self, message: Message) -> None:
        async with self._line:
            await self._wait(message)
            await self._to.send(message)


class _SlowLink(_SlowWriter):
    def __init__(self, link: Link, wait: Wait) -> None:
        super().__init__(link, wait)
        self._link = link

    async def receive(self) -> Message:
        return await self._link.receive()
