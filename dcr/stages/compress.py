"""Compress and decompress: a patch to a chunk, a chunk to a change. Both run in worker threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import anyio
import anyio.to_thread

from dcr import codec as codecs
from dcr import digest, wire
from dcr.budget import ByteBudget, Lease
from dcr.errors import PayloadError
from dcr.frames import Layout
from dcr.patch import Change, Operation, Patch, relative
from dcr.pipeline import Inbox, Outbox, serve
from dcr.seams import Codec
from dcr.wire import Chunk, Identity


@dataclass(frozen=True, slots=True)
class Parcel:
    """A chunk on its way, and the lease on its bytes."""

    chunk: Chunk
    body: bytes
    lease: Lease

    def release(self) -> None:
        """It goes no further: give its bytes back."""
        self.lease.release()

    @property
    def number(self) -> int:
        """Its frame's number: what events and an error's notes say of it."""
        return self.chunk.frame

    @property
    def where(self) -> str:
        return f"{self.chunk.identity}, frame {self.number}"

    @property
    def nbytes(self) -> int:
        return len(self.body)


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A chunk's change, decoded."""

    chunk: Chunk
    change: Change

    @property
    def number(self) -> int:
        """Its frame's number: what events and an error's notes say of it."""
        return self.chunk.frame

    @property
    def where(self) -> str:
        return f"{self.chunk.identity}, frame {self.number}"

    @property
    def nbytes(self) -> int:
        positions = 0 if self.change.positions is None else self.change.positions.nbytes
        return positions + self.change.values.nbytes


class Compress:
    """Patches in, parcels out; each takes its lease here, at its worst case."""

    name = "compress"

    def __init__(
        self, identity: Identity, codec: Codec, operation: Operation, budget: ByteBudget, *, workers: int = 1
    ) -> None:
        self.workers = workers
        self.identity = identity
        self._codec = codec
        self._operation = operation
        self._budget = budget

    async def run(self, inbox: Inbox[Patch], outbox: Outbox[Parcel]) -> None:
        """See `dcr.seams.Stage`."""
        limiter = anyio.CapacityLimiter(self.workers)

        async def compress(patch: Patch) -> Parcel:
            with outbox.waiting():
                lease = await self._budget.lease(codecs.worst_case_bytes(len(patch.bits), patch.frame.width))
            try:
                chunk, body = await anyio.to_thread.run_sync(self.encode, patch, limiter=limiter)
            except BaseException:
                lease.release()
                raise
            lease.shrink(min(lease.nbytes, len(body)))
            return Parcel(chunk, body, lease)

        await serve(inbox, outbox, compress, workers=self.workers)

    def encode(self, patch: Patch) -> tuple[Chunk, bytes]:
        """The chunk of a patch, and its body; the same bits give the same bytes, however often it is asked for."""
        change = relative(patch, self._operation)
        body = self._codec.encode(change, patch.frame.numel)
        content, changed = digest.total(patch.new_sums), len(change.values)
        bound = wire.chunk_digest(patch.frame.index, self._codec.name, change.operation, changed, content, body)
        chunk = Chunk(
            self.identity, patch.frame.index, self._codec.name, int(change.operation), changed, bound, content
        )
        return chunk, body


class Decompress:
    """Verified parcels in, changes out; gives the lease back when the body has been read.

    find: a codec by its name.
    """

    name = "decompress"

    def __init__(self, layout: Layout, find: Callable[[str], Codec], *, workers: int = 1) -> None:
        self.workers = workers
        self._layout = layout
        self._find = find

    async def run(self, inbox: Inbox[Parcel], outbox: Outbox[Unpacked]) -> None:
        """See `dcr.seams.Stage`."""
        await serve(inbox, outbox, self.decode, workers=self.workers)

    def decode(self, parcel: Parcel) -> Unpacked:
        """The change in a parcel.

        Raises:
            PayloadError: it does not decode, or names an operation that is not known.
        """
        with parcel.lease:
            return Unpacked(parcel.chunk, decode(parcel.chunk, parcel.body, self._layout, self._find))


def decode(chunk: Chunk, body: bytes, layout: Layout, find: Callable[[str], Codec]) -> Change:
    """The change that a chunk of a layout describes.

    Raises:
        PayloadError: as `Decompress.decode`.
    """
    if chunk.operation not in set(Operation):
        raise PayloadError(f"{chunk.identity}: frame {chunk.frame} has the unknown operation {chunk.operation}")
    frame = layout.frames[chunk.frame]
    return find(chunk.codec).decode(
        body, operation=Operation(chunk.operation), changed=chunk.changed, numel=frame.numel, width=frame.width
    )
