"""The publisher's side of a stored run: the sender, and the writers of its further ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio

from dcr.errors import DcrError, LocalError
from dcr.protocol.catalogue import outline_of
from dcr.protocol.delivery import Part, Posted
from dcr.protocol.wire import Abort, Chunk, Commit, Identity, Message, Open, Seal
from dcr.runs.desk import Desk
from dcr.runs.mailboxes import Mailboxes
from dcr.runs.packer import Packer, Pieces
from dcr.runs.records import OPENS, WRITERS, bell_key, encode_bell, name_of

if TYPE_CHECKING:
    from dcr.runs.stored import StoredRun

POSTED = 4  # attempts that a bell names: the one under way, and those that slow members may still be taking
ASKED = 8  # attempts that members may still answer


class Upload:
    """One attempt as its sender stores it. written: packs whose names are taken; parts: those that are there."""

    def __init__(self, opened: Message, identity: Identity) -> None:
        self.opened = opened
        self.identity = identity
        self.written = 0
        self.parts: set[Part] = set()
        self.sealed: Message | None = None
        self.aborted = False
        self.packer: Packer | None = None

    def posted(self) -> Posted:
        """What the bell says of it."""
        return Posted(self.identity, tuple(sorted(self.parts)), self.sealed is not None, self.aborted)


class SenderLink:
    """Stores attempts, rings the bell of its term, and takes what members say."""

    def __init__(self, run: StoredRun) -> None:
        self._run = run
        self._desk = Desk()
        self._uploads: deque[Upload] = deque(maxlen=POSTED)
        self._asked: deque[Identity] = deque(maxlen=ASKED)
        self._mailboxes = Mailboxes(run, self._asked)
        self._writers = False
        self._ringing = anyio.Lock()
        self._rung = 0
        self._wanted = 0
        self._opened = anyio.Event()

    async def __aenter__(self) -> SenderLink:
        await self._run.touch()
        await self._desk.open(self._listen, self._watch)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._desk.close()

    async def receive(self) -> Message:
        """See `dcr.seams.Link.receive`."""
        return await self._desk.receive()

    async def send(self, message: Message) -> None:
        """See `dcr.seams.Link.send`."""
        match message.header:
            case Chunk(identity=identity):
                packer = self._upload(identity).packer
                assert packer is not None
                await packer.add(message)
            case Open(identity=identity):
                await self._desk.do(partial(self._open, message, identity))
            case Seal(identity=identity):
                await self._desk.do(partial(self._seal, message, self._upload(identity)))
            case Abort(identity=identity):
                await self._desk.do(partial(self._abort, message, self._upload(identity)))
            case Commit():
                pass  # members follow the log of heads themselves
            case header:
                raise LocalError(f"a publisher sends Open, Chunk, Seal, Abort or Commit, not {type(header).__name__}")

    # ------------------------------------------------------------------ attempts

    def _upload(self, identity: Identity) -> Upload:
        for upload in self._uploads:
            if upload.identity == identity:
                return upload
        raise LocalError(f"{identity} has not been opened on this link; send its Open first")

    async def _open(self, message: Message, identity: Identity) -> None:
        upload = Upload(message, identity)
        upload.packer = Packer(
            self._desk, partial(self._write, upload), pack_bytes=self._run.pack_bytes, pack_s=self._run.pack_s
        )
        if not await self._run.store.write_open(message):
            raise LocalError(f"{identity} was opened before: an attempt id is used once")
        self._uploads.append(upload)
        self._asked.append(identity)
        await self._ring()
        self._opened.set()

    async def _write(self, upload: Upload, chunks: Pieces) -> None:
        part = (0, upload.written)
        upload.written += 1
        if not await self._run.store.write_pack(upload.identity, part, chunks):
            raise LocalError(f"a pack of {upload.identity} is there already: two publishers write one attempt")
        await self._add(upload, {part})

    async def _add(self, upload: Upload, parts: Set[Part]) -> None:
        """Packs are there: tell members, and name them in the seal if it has been stored without them."""
        upload.parts |= parts
        if upload.sealed is not None:
            await self._run.store.write_seal(upload.opened, upload.sealed, upload.parts)
        self._wanted += 1
        self._desk.spawn(self._ring_quietly)

    async def _seal(self, message: Message, upload: Upload) -> None:
        assert upload.packer is not None
        await upload.packer.flush()
        if await self._has_writers():
            upload.parts |= await self._run.store.stored_parts(upload.identity)
        await self._run.store.write_seal(upload.opened, message, upload.parts)
        upload.sealed = message
        await self._ring()
        await self._run.store.catalogue(outline_of(upload.opened, message))

    async def _abort(self, message: Message, upload: Upload) -> None:
        assert upload.packer is not None
        upload.aborted = True
        await upload.packer.flush()
        await self._run.store.write_abort(message, upload.identity)
        await self._ring()  # before seal and packs go, so that whoever misses one finds out why
        await self._run.store.withdraw(upload.identity)
        if upload.sealed is not None:
            await self._run.store.catalogue()

    # ------------------------------------------------------------------ the bell

    async def _ring(self) -> None:
        """Write what members look at, unless somebody else has while this was waiting."""
        self._wanted += 1
        wanted = self._wanted
        async with self._ringing:
            if self._rung >= wanted:
                return
            wanted = self._wanted
            term = self._uploads[-1].identity.term
            bell = [upload.posted() for upload in self._uploads if upload.identity.term == term]
            await self._run.objects.put(bell_key(term), [encode_bell(bell)])
            self._rung = wanted

    async def _ring_quietly(self) -> None:
        if self._rung < self._wanted:
            with suppress(DcrError, OSError):  # the next ring, at the seal at the latest, says it too
                await self._ring()

    # ------------------------------------------------------------------ what others write

    async def _listen(self) -> None:
        """Take what members say."""
        pace = self._run.pace()
        while True:
            hint = self._run.objects.changed()
            try:
                messages = await self._mailboxes.look()
            except (DcrError, OSError) as error:
                messages = []
                self._desk.put(error)
                await self._desk.room()
            self._desk.put(*messages)
            await pace.wait(hint, busy=bool(self._uploads) and not self._is_idle())

    def _is_idle(self) -> bool:
        """Whether nothing is open that members may be about to answer."""
        last, head = self._uploads[-1], self._run.log.head
        committed = head.identity if head is not None else None
        passed = committed is not None and committed.version >= last.identity.version
        return last.aborted or (passed and not self._mailboxes.busy)

    async def _watch(self) -> None:
        """Tell members of the packs of other writers while an attempt is open."""
        pace = self._run.pace()
        await self._opened.wait()
        while True:
            hint, upload = self._run.objects.changed(), self._uploads[-1]
            with suppress(DcrError, OSError):
                if not upload.aborted and not self._is_idle() and await self._has_writers():
                    new = await self._run.store.stored_parts(upload.identity) - upload.parts
                    if new := {part for part in new if part[0] > 0}:
                        await self._desk.do(partial(self._add, upload, new))
            await pace.wait(hint, busy=not self._is_idle())

    async def _has_writers(self) -> bool:
        if not self._writers:
            self._writers = await self._run.objects.get(WRITERS) is not None
        return self._writers


class WriterLink:
    """A further rank of the publisher: stores packs of attempts that the sender has opened."""

    def __init__(self, run: StoredRun, part: tuple[int, int]) -> None:
        if not 0 < part[0] < part[1]:
            raise LocalError(f"expected a writer from 1 to {part[1] - 1}, found {part[0]}: the first one is the sender")
        self._run = run
        self._number = part[0]
        self._desk = Desk()
        self._identity: Identity | None = None
        self._packer: Packer | None = None
        self._written = 0

    async def __aenter__(self) -> WriterLink:
        await self._run.objects.put(WRITERS, [])
        await self._desk.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._desk.close()

    async def send(self, message: Message) -> None:
        """See `dcr.seams.Writer.send`."""
        if not isinstance(message.header, Chunk):
            raise LocalError(f"a writer sends chunks only, not {type(message.header).__name__}")
        identity = message.header.identity
        if identity != self._identity:
            if await self._run.objects.get(OPENS + name_of(identity)) is None:
                raise LocalError(f"{identity} has not been opened by the run's sender, or was removed")
            if identity != self._identity:
                self._packer = Packer(
                    self._desk, partial(self._write, identity), pack_bytes=self._run.pack_bytes, pack_s=self._run.pack_s
                )
                self._identity, self._written = identity, 0
        assert self._packer is not None
        await self._packer.add(message)

    async def _write(self, identity: Identity, chunks: Pieces) -> None:
        while True:  # a writer of this number that died has used some names
            part = (self._number, self._written)
            self._written += 1
            if await self._run.store.write_pack(identity, part, chunks):
                return
