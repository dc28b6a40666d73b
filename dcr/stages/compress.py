"""Compress and decompress: a patch to a chunk, a chunk to a change. Both run in worker threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from dcr import codec as codecs
from dcr import digest, wire
from dcr.budget import ByteBudget, Lease
from dcr.errors import PayloadError
from dcr.frames import Layout
from dcr.patch import Change, Operation, Patch, relative
from dcr.pipeline import Inbox, Outbox, serve
from dcr.seams import BasedCodec, Codec
from dcr.views import Bits
from dcr.wire import Chunk, Identity

if TYPE_CHECKING:
    from typing_extensions import TypeIs


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
    from_base: bool = False  # the old bits were needed to decode it

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
    """Patches in, parcels out; each takes its lease here, at its worst case.

    reads_base: every receiver can decode chunks that need their base; else a codec that needs none stands in.
    """

    name = "compress"

    def __init__(
        self,
        identity: Identity,
        codec: Codec | BasedCodec,
        operation: Operation,
        budget: ByteBudget,
        *,
        reads_base: bool = False,
        workers: int = 1,
    ) -> None:
        self.workers = workers
        self.identity = identity
        self._codec = codec
        self._operation = operation
        self._budget = budget
        self._reads_base = reads_base

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
        name, body = self._encode(patch, change)
        content, changed = digest.total(patch.new_sums), len(change.values)
        bound = wire.chunk_digest(patch.frame.index, name, change.operation, changed, content, body)
        chunk = Chunk(self.identity, patch.frame.index, name, int(change.operation), changed, bound, content)
        return chunk, body

    def _encode(self, patch: Patch, change: Change) -> tuple[str, bytes]:
        """The name of the codec that was used, and the body."""
        codec = self._codec
        if is_based(codec):
            if self._reads_base and patch.base is not None and change.positions is not None:
                return codec.name, codec.encode(change, patch.frame.numel, base=patch.base)
            codec = codecs.BALANCED
        return codec.name, codec.encode(change, patch.frame.numel)


class Decompress:
    """Verified parcels in, changes out; gives the lease back when the body has been read.

    find: a codec by its name. read: the old bits of a frame, for chunks that need their base; None if nothing here
    holds them.
    """

    name = "decompress"

    def __init__(
        self,
        layout: Layout,
        find: Callable[[str], Codec | BasedCodec],
        read: Callable[[int], Bits] | None = None,
        *,
        workers: int = 1,
    ) -> None:
        self.workers = workers
        self._layout = layout
        self._find = find
        self._read = read

    async def run(self, inbox: Inbox[Parcel], outbox: Outbox[Unpacked]) -> None:
        """See `dcr.seams.Stage`."""
        await serve(inbox, outbox, self.decode, workers=self.workers)

    def decode(self, parcel: Parcel) -> Unpacked:
        """The change in a parcel.

        Raises:
            PayloadError: it does not decode, names an operation that is not known, or needs a base that is not here.
            BaseMismatch: it does not fit the old bits that live memory holds.
        """
        with parcel.lease:
            return decode(parcel.chunk, parcel.body, self._layout, self._find, self._read)


def decode(
    chunk: Chunk,
    body: bytes,
    layout: Layout,
    find: Callable[[str], Codec | BasedCodec],
    read: Callable[[int], Bits] | None = None,
) -> Unpacked:
    """The change that a chunk of a layout describes; find and read: as for `Decompress`.

    Raises: as `Decompress.decode`.
    """
    if chunk.operation not in set(Operation):
        raise PayloadError(f"{chunk.identity}: frame {chunk.frame} has the unknown operation {chunk.operation}")
    frame, operation, codec = layout.frames[chunk.frame], Operation(chunk.operation), find(chunk.codec)
    numel, width = frame.numel, frame.width
    if not is_based(codec):
        change = codec.decode(body, operation=operation, changed=chunk.changed, numel=numel, width=width)
        return Unpacked(chunk, change)
    if read is None:
        raise PayloadError(
            f"{chunk.identity}: the codec {chunk.codec!r} needs the old bits of frame {chunk.frame}, which the loader "
            "here cannot read whole; publish with one that needs no base, such as balanced"
        )
    base = read(chunk.frame)
    change = codec.decode(body, operation=operation, changed=chunk.changed, numel=numel, width=width, base=base)
    return Unpacked(chunk, change, from_base=True)


def is_based(codec: Codec | BasedCodec) -> TypeIs[BasedCodec]:
    """Whether a codec needs the old bits of the frame."""
    return codec.needs_base
