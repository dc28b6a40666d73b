"""Transfer: parcels to a link, and from a link to verified parcels."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread

from dcr.codecs import codec as codecs
from dcr.errors import IncompleteError, PayloadError
from dcr.layout.frames import Layout
from dcr.pipeline import Inbox, Outbox
from dcr.pipeline.budget import ByteBudget, Lease
from dcr.protocol import wire
from dcr.protocol.receipt import Receipt
from dcr.protocol.wire import Abort, Chunk, ChunkRef, Message, Open, Seal
from dcr.seams import Writer
from dcr.stages.compress import Parcel


class Transfer:
    """Parcels in, what the seal must say of them out; the lease ends when the transport holds the bytes.

    sent: told of each body's bytes and seconds.
    """

    name = "transfer"
    workers = 1

    def __init__(self, link: Writer, sent: Callable[[int, float], None] | None = None) -> None:
        self._link = link
        self._sent = sent
        self.sent_bytes = 0

    async def run(self, inbox: Inbox[Parcel], outbox: Outbox[ChunkRef]) -> None:
        """See `dcr.seams.Stage`."""
        async for parcel in inbox:
            began_s = time.perf_counter()
            with parcel.lease:
                await self._link.send(Message(parcel.chunk, parcel.body))
            if self._sent is not None:
                self._sent(len(parcel.body), time.perf_counter() - began_s)
            self.sent_bytes += len(parcel.body)
            chunk = parcel.chunk
            sent = ChunkRef(chunk.frame, chunk.digest, chunk.content, chunk.changed, len(parcel.body))
            del parcel  # its lease has ended: the memory is free before the next one is waited for
            await outbox.send(sent)


class Aborted(Exception):
    """The publisher gave up the attempt that is being fetched."""


class Superseded(Aborted):
    """Another attempt has been opened meanwhile; `message` is its Open."""

    def __init__(self, message: Message) -> None:
        super().__init__("another attempt was opened")
        self.message = message


class Fetch:
    """Reads one attempt: an async iterator over verified parcels that ends when the attempt is complete.

    A chunk that does not match its digest is refused by name and asked for again, at most `retries` times in all.

    receive: the next message of the link, or of the store. again: asks for a chunk once more; None if it cannot be
    asked for. timeout_s: how long to wait for any one message.
    """

    def __init__(
        self,
        receipt: Receipt,
        layout: Layout,
        budget: ByteBudget,
        *,
        receive: Callable[[], Awaitable[Message]],
        again: Callable[[Chunk, PayloadError], Awaitable[None]] | None = None,
        timeout_s: float = 600.0,
        retries: int = 8,
    ) -> None:
        self._receipt = receipt
        self._budget = budget
        self._receive = receive
        self._again = again
        self._timeout_s = timeout_s
        self._retries = retries
        self._bad: PayloadError | None = None
        self._frames = len(layout.frames)
        self._worst_bytes = (
            max(codecs.worst_case_bytes(frame.numel, frame.width) for frame in layout.frames) if layout.frames else 0
        )
        self.seal: Message | None = None

    def __aiter__(self) -> Fetch:
        return self

    async def __anext__(self) -> Parcel:
        """The next chunk that is whole, wanted and new.

        Raises:
            Aborted: the publisher gave the attempt up. IncompleteError: the link closed or fell silent first.
            PayloadError: a chunk stayed wrong, or is not the sealed one. RunMismatch: of another run.
        """
        while not self._receipt.complete:
            lease = await self._budget.lease(self._worst_bytes)
            try:
                parcel = await self._parcel(lease)
            except BaseException:
                lease.release()
                raise
            if parcel is not None:
                return parcel
            lease.release()
        raise StopAsyncIteration

    async def _parcel(self, lease: Lease) -> Parcel | None:
        message = await self._message()
        match message.header:
            case Chunk() as chunk:
                return await self._chunk(chunk, message.body, lease)
            case Seal() as seal:
                self._receipt.seal(seal)
                self.seal = message
            case Abort(identity=identity, reason=reason) if identity == self._receipt.identity:
                raise Aborted(reason)
            case Open(identity=identity) if identity != self._receipt.identity:
                raise Superseded(message)
            case _:
                pass
        return None

    async def _message(self) -> Message:
        try:
            with anyio.fail_after(self._timeout_s):
                return await self._receive()
        except IncompleteError:
            if self._bad is not None:
                raise self._bad from None
            raise
        except TimeoutError:
            missing = self._receipt.missing
            awaited = "its seal" if missing is None else f"the chunks of frames {sorted(missing)[:8]}"
            raise IncompleteError(
                f"{self._receipt.identity}: waited {self._timeout_s:g} s for {awaited}; is the publisher alive?"
            ) from None

    async def _chunk(self, chunk: Chunk, body: bytes, lease: Lease) -> Parcel | None:
        if chunk.identity != self._receipt.identity and chunk.identity.run == self._receipt.identity.run:
            return None  # left over from an attempt that was given up
        if not 0 <= chunk.frame < self._frames:
            raise PayloadError(f"{chunk.identity}: frame {chunk.frame} is not in its layout of {self._frames} frames")
        try:
            await anyio.to_thread.run_sync(wire.check_chunk, chunk, body)
        except PayloadError as error:
            if self._again is None:
                self._bad = error  # one that was sent again may lie behind it
                return None
            if not self._retries:
                raise
            self._retries -= 1
            await self._again(chunk, error)
            return None
        if not self._receipt.chunk(chunk):
            return None
        lease.shrink(min(lease.nbytes, len(body)))
        return Parcel(chunk, body, lease)
