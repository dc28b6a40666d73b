"""Compress and decompress: a patch to a chunk, a chunk to a change. Both run in worker threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from dcr.codecs import codec as codecs
from dcr.codecs.choice import Choice, Chooser, Chosen, outgrows
from dcr.codecs.patch import Change, Operation, Patch, relative
from dcr.errors import PayloadError
from dcr.layout.frames import Frame, Layout
from dcr.layout.views import Bits
from dcr.pipeline import Inbox, Outbox, serve
from dcr.pipeline.budget import ByteBudget, Lease
from dcr.protocol import digest, wire
from dcr.protocol.wire import Chunk, Identity
from dcr.seams import BasedCodec, Codec

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

    codec: what encodes them, or what chooses for each. reads_base: every receiver can decode chunks that need their
    base; else a codec that needs none stands in. find: a codec by its name.
    """

    name = "compress"

    def __init__(
        self,
        identity: Identity,
        codec: Codec | BasedCodec | Chooser,
        operation: Operation,
        budget: ByteBudget,
        *,
        reads_base: bool = False,
        find: Callable[[str], Codec | BasedCodec] = codecs.named,
        workers: int = 1,
    ) -> None:
        self.workers = workers
        self.identity = identity
        self._codec = codec
        self._find = find
        self._choices: dict[int, Choice] = {}  # a chunk that is sent again is the same
        self._decoded: set[str] = set()
        self._tally: dict[Choice, tuple[int, int, int]] = {}
        self._lock = threading.Lock()
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
        choice, body = self._encode(patch, change)
        content, changed = digest.total(patch.new_sums), len(change.values)
        bound = wire.chunk_digest(patch.frame.index, choice.codec, change.operation, changed, content, body)
        chunk = Chunk(self.identity, patch.frame.index, choice.codec, int(change.operation), changed, bound, content)
        return chunk, body

    @property
    def chosen(self) -> tuple[Chosen, ...]:
        """What was chosen so far, and why."""
        return tuple(Chosen(*choice, *counts) for choice, counts in self._tally.items())

    def is_dense(self, changed: int, numel: int, width: int) -> bool:
        """Whether a frame of which so many elements changed is sent whole."""
        if isinstance(self._codec, Chooser):
            return self._codec.is_dense(changed, numel, width)
        return outgrows(changed, numel, width)

    def sent(self, nbytes: int, seconds: float) -> None:
        """What the link took, and how long: it may change what is chosen next."""
        if isinstance(self._codec, Chooser):
            self._codec.sent(nbytes, seconds)

    def _encode(self, patch: Patch, change: Change) -> tuple[Choice, bytes]:
        frame, based = patch.frame, self._reads_base and patch.base is not None and change.positions is not None
        again = self._choices.get(frame.index)
        choice = again or self._choose(change, frame.numel, based=based)
        codec = self._codec if choice.codec == getattr(self._codec, "name", None) else self._find(choice.codec)
        assert not isinstance(codec, Chooser)
        began_s = time.perf_counter()
        if is_based(codec):
            assert patch.base is not None
            body = codec.encode(change, frame.numel, base=patch.base)
        else:
            body = codec.encode(change, frame.numel)
        encode_s = time.perf_counter() - began_s
        if again is None:
            self._learn(choice, codec, patch, change, body, encode_s)
        return choice, body

    def _choose(self, change: Change, numel: int, *, based: bool) -> Choice:
        codec, dense = self._codec, change.positions is None
        if isinstance(codec, Chooser):
            return codec.choose(len(change.values), numel, change.values.itemsize, dense=dense, based=based)
        if is_based(codec) and not based:
            return Choice(
                "dense" if dense else "sparse", codecs.BALANCED.name, f"{codec.name} needs old bits at both ends"
            )
        form = "dense" if dense else "class" if is_based(codec) else "sparse"
        return Choice(form, codec.name, "asked for by name")

    def _learn(
        self, choice: Choice, codec: Codec | BasedCodec, patch: Patch, change: Change, body: bytes, encode_s: float
    ) -> None:
        given, frame = len(change.values), patch.frame
        with self._lock:
            self._choices[frame.index] = choice
            frames, changed, nbytes = self._tally.get(choice, (0, 0, 0))
            self._tally[choice] = frames + 1, changed + patch.changed, nbytes + len(body)
            first = choice.codec not in self._decoded
            self._decoded.add(choice.codec)
        if not isinstance(self._codec, Chooser):
            return
        self._codec.measured(choice, given, frame.numel, frame.width, nbytes=len(body), encode_s=encode_s)
        if first:  # one of each kind is decoded as well: a reader's cost is part of the choice
            began_s = time.perf_counter()
            _decoded(codec, body, change.operation, given, frame, patch.base)
            self._codec.decoded(choice, given, time.perf_counter() - began_s)


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
    frame, codec = layout.frames[chunk.frame], find(chunk.codec)
    base = None
    if is_based(codec):
        if read is None:
            raise PayloadError(
                f"{chunk.identity}: the codec {chunk.codec!r} needs the old bits of frame {chunk.frame}, which the "
                "loader here cannot read whole; publish with one that needs no base, such as balanced"
            )
        base = read(chunk.frame)
    change = _decoded(codec, body, Operation(chunk.operation), chunk.changed, frame, base)
    return Unpacked(chunk, change, from_base=base is not None)


def _decoded(
    codec: Codec | BasedCodec, body: bytes, operation: Operation, changed: int, frame: Frame, base: Bits | None
) -> Change:
    numel, width = frame.numel, frame.width
    if not is_based(codec):
        return codec.decode(body, operation=operation, changed=changed, numel=numel, width=width)
    assert base is not None
    return codec.decode(body, operation=operation, changed=changed, numel=numel, width=width, base=base)


def is_based(codec: Codec | BasedCodec) -> TypeIs[BasedCodec]:
    """Whether a codec needs the old bits of the frame."""
    return codec.needs_base
