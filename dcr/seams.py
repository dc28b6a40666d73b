"""The protocols that join the rooms. Whatever has these members fits; nothing need be imported to implement them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence, Set
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from dcr.frames import Layout, Region, Shard
from dcr.patch import Change, Operation
from dcr.schema import Schema
from dcr.views import Bits, Lanes
from dcr.wire import Head, Identity, Join, MemberRef, Message

if TYPE_CHECKING:
    from dcr.pipeline import Inbox, Outbox

In = TypeVar("In", contravariant=True)
Out = TypeVar("Out", covariant=True)


class Stage(Protocol[In, Out]):
    """One step of a pipeline. Optional attributes: workers (tasks it runs), depth (of its outbox)."""

    @property
    def name(self) -> str:
        """What statistics and errors call it."""
        ...

    async def run(self, inbox: Inbox[In], outbox: Outbox[Out]) -> None:
        """Take items until the inbox is exhausted; raise to stop the whole pipeline."""
        ...


class Codec(Protocol):
    """A change of one frame, to bytes and back. Pure. One that needs the base is a `BasedCodec`."""

    @property
    def name(self) -> str:
        """What the chunk header says; a receiver finds the codec by it."""
        ...

    @property
    def needs_base(self) -> bool:
        """True if decoding needs the frame's old bits."""
        ...

    def encode(self, change: Change, numel: int) -> bytes:
        """Bytes of a change of a frame of numel elements."""
        ...

    def decode(self, body: bytes, *, operation: Operation, changed: int, numel: int, width: int) -> Change:
        """The inverse.

        Raises:
            PayloadError: the body does not decode to `changed` values within the frame.
        """
        ...


class BasedCodec(Protocol):
    """As `Codec`, for chunks that mean something only beside the frame's old bits: needs_base is True.

    It is used between ends that both hold them; a frame without a base, or a dense change, goes by another codec.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs_base(self) -> bool: ...

    def encode(self, change: Change, numel: int, *, base: Bits) -> bytes:
        """Bytes of a change of a frame whose old bits are base [N]."""
        ...

    def decode(self, body: bytes, *, operation: Operation, changed: int, numel: int, width: int, base: Bits) -> Change:
        """The inverse.

        Raises:
            PayloadError: the body does not decode to `changed` values within the frame.
            BaseMismatch: it does not fit these old bits.
        """
        ...


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

    async def attempts(self, version: int) -> list[Identity]:
        """The sealed attempts at a version that were not given up."""
        ...

    async def describe(self, identity: Identity) -> tuple[Message, Message]:
        """The Open and the Seal of a sealed attempt.

        Raises:
            IncompleteError: one of them is missing or cut short; names it.
        """
        ...

    def read(self, identity: Identity) -> AsyncGenerator[Message, None]:
        """The Open, every Chunk and the Seal of a sealed attempt.

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


class Group(Protocol):
    """The ranks of one publisher. Every rank makes the same calls in the same order, one at a time.

    A call that fails, or is cancelled, ends the group: its members can no longer know what the others know.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    async def gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, in rank order, on every rank. Sizes may differ.

        Raises: anything, if a rank is lost or does not come in time.
        """
        ...

    async def add(self, lanes: Lanes) -> Lanes:
        """The sum over ranks of uint64 arrays of one shape, wrapping around, on every rank.

        Raises: as `gather`.
        """
        ...


class Residual(Protocol):
    """Tensors without a map: their export does arithmetic, so it has to run; one group, exported together."""

    @property
    def tensors(self) -> Sequence[int]:
        """The group, as indices into the schema."""
        ...

    @property
    def reason(self) -> str:
        """Why they have no map, for the report."""
        ...

    @property
    def owned(self) -> bool:
        """Whether this rank publishes them: true on one rank."""
        ...

    def fingerprint(self) -> bytes:
        """A digest of the bits, on this rank, that the export reads; if it stays on all ranks, so does the result."""
        ...

    def convert(self) -> Sequence[Bits] | None:
        """Run the export of this group: canonical bits, flat and unsigned, one array per tensor; None where not owned.

        It may be collective: once any rank's fingerprint changed, every rank calls it, group by group in one order.
        """
        ...


class Source(Protocol):
    """A trainer rank's weights: schema, shard map, and integer views of its storages.

    The schema is the whole model's and the same on all ranks. Shards are those that this rank owns: over all ranks they
    and the residual groups hold each canonical element once. All ranks list the same groups in the same order.
    """

    @property
    def schema(self) -> Schema: ...

    @property
    def shards(self) -> Sequence[Shard]:
        """The shard map; Shard.storage indexes `storages()`."""
        ...

    @property
    def residual(self) -> Sequence[Residual]:
        """What has no map. Often empty."""
        ...

    def storages(self) -> Sequence[Bits]:
        """The live storages, as flat unsigned arrays, borrowed.

        Raises:
            StorageRebound: a weight no longer lives where the shard map says.
        """
        ...


class Undoable(Protocol):
    """One frame that a loader has prepared: all that is left is to write it.

    old_sums, new_sums: digest sums [tensors of the frame, 2] over the elements that the change names.
    copies_agree: False if a copy of some element held other old bits than the first.
    """

    @property
    def frame(self) -> int: ...

    @property
    def number(self) -> int:
        """Its frame's number: what events say of it."""
        ...

    @property
    def changed(self) -> int:
        """Elements that will be written."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        ...

    @property
    def old_sums(self) -> Lanes: ...

    @property
    def new_sums(self) -> Lanes: ...

    @property
    def copies_agree(self) -> bool: ...


class RankReady(Undoable, Protocol):
    """The share of one rank in a frame. Its sums are [parts of the frame that it holds, 2].

    parts: which parts the sums are of, as indices into what `RankLoader.bind` returned.
    """

    @property
    def parts(self) -> Sequence[int]: ...


Frame = TypeVar("Frame", bound=Undoable)
Share = TypeVar("Share", bound=RankReady)


class Loader(Protocol[Frame]):
    """A member's weights, seen by what can be done to them. Calls run in worker threads, one at a time."""

    def bind(self, layout: Layout) -> None:
        """Fix where each frame's elements go. Called once per layout, before anything else, mutates no weight.

        Raises:
            SchemaError: a published tensor has no place here, a weight here is not published, or dtypes differ.
        """
        ...

    def epoch(self) -> bytes:
        """A fingerprint of where all weights lie; when it changes, what was bound is no longer true."""
        ...

    def prepare(self, frame: int, change: Change) -> Frame:
        """Read the old bits of what will be touched and resolve the change to absolute bits. Writes nothing."""
        ...

    def install(self, ready: Frame) -> None:
        """Write absolute bits and read them back.

        Raises:
            ReadBackError: memory does not hold what was written.
        """
        ...

    def undo(self, ready: Frame) -> None:
        """Write the old bits back, and read them back.

        Raises:
            ReadBackError: as for install.
        """
        ...

    def settle(self) -> None:
        """After the last install or undo of a version: bring what is made of the weights up to date with them.

        Raises: whatever goes wrong; the frames are then undone, and this is called again.
        """
        ...

    def digest(self) -> Lanes:
        """Digest uint64 [T, 2] of the layout's tensors, recomputed from memory.

        Raises:
            DigestMismatch: copies of one tensor differ.
        """
        ...


@runtime_checkable
class Readable(Protocol):
    """What a loader has besides if it can read frames whole: only then do chunks reach it that need the base."""

    def read(self, frame: int) -> Bits:
        """The bits [N] of a frame in live memory, in the frame's own numbering. May run beside other calls."""
        ...


@runtime_checkable
class Batching(Protocol):
    """What a loader has besides if many frames in one call are faster than one after another: a round trip each."""

    def install_all(self, readies: Sequence[Any]) -> None:
        """As `Loader.install` for each of them, in order, but for settling; after an error any may be written."""
        ...


class RankLoader(Protocol[Share]):
    """One of several ranks of a member, which `dcr.subscribe.Ranks` joins; as `Loader`, but for what it says here.

    A part is a region of one tensor that this rank holds, all of it; two of its parts share no element.
    """

    def bind(self, layout: Layout) -> Sequence[Region]:
        """See `Loader.bind`; the parts that this rank holds."""
        ...

    def epoch(self) -> bytes: ...

    def prepare(self, frame: int, change: Change) -> Share:
        """See `Loader.prepare`; what lies elsewhere is left out."""
        ...

    def install(self, ready: Share) -> None: ...

    def undo(self, ready: Share) -> None: ...

    def settle(self) -> None: ...

    def digest(self) -> Lanes:
        """Digest uint64 [parts, 2], recomputed from memory: of each part, under the key of its tensor.

        Raises:
            DigestMismatch: copies of one part differ within this rank.
        """
        ...
