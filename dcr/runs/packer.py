"""Chunks in packs: whatever is sent while packs are on their way goes with the next one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from dcr.errors import IncompleteError, LocalError
from dcr.protocol import wire
from dcr.protocol.wire import Chunk, Message
from dcr.runs.desk import CLOSED, Desk

PUTS = 4  # packs that are written at a time
Pieces = list[tuple[int, tuple[bytes, bytes]]]  # of each chunk its frame, and what it is on the wire


class Pack:
    """Chunks that travel as one object. stored: it is there, or has failed."""

    def __init__(self) -> None:
        self.chunks: Pieces = []
        self.nbytes = 0
        self.stored = anyio.Event()
        self.full = anyio.Event()
        self.failure: Exception | None = None
        self.kept = False


class Packer:
    """Writes packs: each closes when it holds pack_bytes, when it is flushed, or pack_s after its first chunk.

    write: stores the chunks of one pack.
    """

    def __init__(
        self, desk: Desk, write: Callable[[Pieces], Awaitable[None]], *, pack_bytes: int, pack_s: float
    ) -> None:
        self._desk = desk
        self._write = write
        self._pack_bytes = pack_bytes
        self._pack_s = pack_s
        self._filling: Pack | None = None
        self._underway: set[Pack] = set()
        self._puts = anyio.Semaphore(PUTS)

    async def add(self, message: Message) -> None:
        """Put a chunk into a pack, and wait until that is stored; cancelled later, it is stored all the same."""
        if not isinstance(message.header, Chunk):
            raise LocalError(f"a pack holds chunks, not {type(message.header).__name__}")
        pieces = wire.pieces(message)
        if self._desk.closed:
            raise IncompleteError(CLOSED)
        pack = self._filling
        if pack is None:
            pack = self._filling = Pack()
            self._underway.add(pack)
            self._desk.spawn(lambda: self._carry(pack))
        pack.chunks.append((message.header.frame, pieces))
        pack.nbytes += len(pieces[0]) + len(pieces[1])
        if pack.nbytes >= self._pack_bytes:
            self._close(pack)
        await pack.stored.wait()
        if pack.failure is not None:
            raise pack.failure
        if not pack.kept:
            raise IncompleteError(CLOSED)

    async def flush(self) -> None:
        """Wait until every pack is stored, or has failed."""
        if self._filling is not None:
            self._close(self._filling)
        for pack in list(self._underway):
            await pack.stored.wait()

    def _close(self, pack: Pack) -> None:
        if self._filling is pack:
            self._filling = None
        pack.full.set()

    async def _carry(self, pack: Pack) -> None:
        try:
            with anyio.move_on_after(self._pack_s):
                await pack.full.wait()
            async with self._puts:  # while others are on their way, it goes on filling
                self._close(pack)
                await self._write(pack.chunks)
                pack.kept = True
        except Exception as error:
            pack.failure = error
        finally:
            self._close(pack)
            self._underway.discard(pack)
            pack.chunks = []  # its lease ends with the send: the memory is free by then
            pack.stored.set()
