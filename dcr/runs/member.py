"""A member's side of a stored run: it is shown what `dcr.protocol.delivery` decides, and speaks through one mailbox."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio
import msgspec

from dcr.errors import DcrError, IncompleteError, LocalError, RemoteError, Unavailable
from dcr.protocol import delivery, wire
from dcr.protocol.delivery import Posted, Shown
from dcr.protocol.wire import Ack, Commit, Identity, Join, Leave, MemberRef, Message, Nack
from dcr.runs.desk import CLOSING_S, Desk
from dcr.runs.ledger import Log
from dcr.runs.records import Mailbox, bell_key, decode_bell, mailbox_key

if TYPE_CHECKING:
    from dcr.runs.stored import StoredRun

ANSWERED = 4  # attempts whose answers a mailbox keeps
KEPT = 1024  # messages that it keeps in any case


class MemberLink:
    """Takes what is new, one step at a time and no more than is received; rewrites its mailbox whole."""

    def __init__(self, run: StoredRun, ref: MemberRef) -> None:
        self._run = run
        self._key = mailbox_key(ref)
        self._desk = Desk()
        self._shown = Shown()
        self._bells: dict[int, tuple[bytes, list[Posted]]] = {}
        self._log = Log(run.objects)
        self._mailbox = Mailbox(uuid.uuid4().bytes)
        self._number = 0
        self._writing = anyio.Lock()
        self._written = 0
        self._joined: set[MemberRef] = set()

    async def __aenter__(self) -> MemberLink:
        await self._run.touch()
        await self._desk.open(self._pull, self._beat)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._joined:  # who takes part by this link does so no longer
            with anyio.move_on_after(CLOSING_S, shield=True), suppress(DcrError, OSError):
                for ref in sorted(self._joined):
                    self._say(Message(Leave(ref)))
                await self._desk.do(self._write)
        await self._desk.close()

    async def receive(self) -> Message:
        """See `dcr.seams.Link.receive`."""
        return await self._desk.receive()

    async def send(self, message: Message) -> None:
        """See `dcr.seams.Link.send`."""
        match message.header:
            case Join() | Leave() | Ack() | Nack():
                await self._desk.do(partial(self._deliver, message))
            case header:
                raise LocalError(f"a member sends Join, Leave, Ack or Nack, not {type(header).__name__}")

    # ------------------------------------------------------------------ the mailbox

    async def _deliver(self, message: Message) -> None:
        entry = self._say(message)
        try:
            await self._write()
        except Exception:
            if entry in self._mailbox.said:
                self._mailbox.said.remove(entry)
            raise

    def _say(self, message: Message) -> tuple[int, bytes]:
        """Add a message to the mailbox; what it replaces or nobody asks for any more goes."""
        self._number += 1
        entry, header = (self._number, wire.encode(message)), message.header
        match header:
            case Join(member=ref) | Leave(member=ref):
                (self._joined.add if isinstance(header, Join) else self._joined.discard)(ref)
                self._mailbox.said = [one for one in self._mailbox.said if not _is_about(one[1], ref)]
        self._mailbox.said = [*_recent(self._mailbox.said), entry][-KEPT:]
        return entry

    async def _write(self) -> None:
        """Write the mailbox as it is now, unless somebody else has while this was waiting."""
        number = self._number
        async with self._writing:
            if self._written < number or number == 0:
                await self._post()

    async def _post(self) -> None:
        number = self._number
        self._mailbox.beat += 1
        await self._run.objects.put(self._key, [msgspec.msgpack.encode(self._mailbox)])
        self._written = number

    async def _beat(self) -> None:
        """Show that this link lives, if it has said anything: the mailbox changes."""
        while True:
            await anyio.sleep(self._run.stale_s / 10 if self._run.stale_s else 1e9)
            await self._sign()

    async def _sign(self) -> None:
        if self._mailbox.said:
            with suppress(DcrError, OSError):
                async with self._writing:
                    await self._post()

    # ------------------------------------------------------------------ what is shown

    async def _pull(self) -> None:
        pace = self._run.pace()
        while True:
            await self._desk.room()
            hint = self._run.objects.changed()
            try:
                found = await self._look()
            except (DcrError, OSError) as error:
                self._desk.put(error)
                found = False
            if not found:
                await pace.wait(hint, busy=self.is_busy)

    @property
    def is_busy(self) -> bool:
        """Whether an attempt is open: it is followed, and the head has not passed it."""
        follows, head = self._shown.follows, self._log.head
        committed = head.identity if head is not None else None
        return follows is not None and (committed is None or committed.version < follows.version)

    async def _look(self) -> bool:
        """Take the next step, if there is one."""
        # the head is read behind the bells: whoever was superseded before it rang is seen to have been
        while True:
            known = self._log.head
            terms = {self._shown.last.term} if self._shown.last is not None else set()
            terms |= {known.term} if known is not None else set()
            posted = [one for term in sorted(terms) for one in await self._bell(term)]
            head = await self._log.follow()
            if head is None or head.term in terms:
                break
        if head is not None and head.term != self._mailbox.term:
            self._mailbox.term = head.term  # a new publisher knows who lives by what changes
            await self._desk.do(self._sign)
        step = delivery.step(self._shown, head, posted)
        if step is None:
            if not await self._log.is_whole():  # its publisher has gone back; the member will say what it makes of that
                self._log = Log(self._run.objects)
            return False
        before, self._shown = self._shown, delivery.after(self._shown, step)
        try:
            messages = await self._read(step)
        except (OSError, Unavailable):
            self._shown = before  # it is there: it could not be read this time
            raise
        except RemoteError:
            if isinstance(step, delivery.Open):  # what cannot be understood is not followed
                self._shown = delivery.after(self._shown, delivery.Abort(step.identity))
            raise
        self._desk.put(*messages)
        return True

    async def _bell(self, term: int) -> list[Posted]:
        tag, posted = self._bells.get(term, (None, list[Posted]()))
        key = bell_key(term)
        found = await self._run.objects.get(key, unless=tag)
        if found is None:
            return []
        if found.data is not None:
            self._bells = {other: bell for other, bell in self._bells.items() if other >= term - 1}
            self._bells[term] = found.tag, []  # what cannot be understood is told once
            posted = decode_bell(found.data, key)
            self._bells[term] = found.tag, posted
        return posted

    async def _read(self, step: delivery.Step) -> list[Message]:
        """The messages of a step."""
        attempts = self._run.store
        match step:
            case delivery.Open(identity=identity):
                opened = await attempts.read_open(identity)
                if opened is None:  # it was removed
                    self._shown = delivery.after(self._shown, delivery.Abort(identity))
                return [] if opened is None else [opened]
            case delivery.Pack(identity=identity, part=part):
                return await self._unless_ended(identity, partial(attempts.read_pack, identity, part))
            case delivery.Seal(identity=identity):
                return await self._unless_ended(identity, partial(attempts.read_seal, identity))
            case delivery.Abort(identity=identity, reason=reason):
                said = None if reason else await attempts.read_abort(identity)
                return [said or Message(wire.Abort(identity, reason or "it was given up"))]
            case delivery.Commit(identity=identity):
                return [Message(Commit(identity))]

    async def _unless_ended(self, identity: Identity, read: Callable[[], Awaitable[list[Message]]]) -> list[Message]:
        """What is stored of an attempt; nothing if it has ended meanwhile: its end is shown next."""
        try:
            return await read()
        except IncompleteError:
            posted = {one.identity: one for one in await self._bell(identity.term)}
            if identity not in posted or posted[identity].aborted:
                return []
            raise


def _is_about(data: bytes, ref: MemberRef) -> bool:
    header = wire.parse(data).header
    return isinstance(header, Join | Leave) and header.member == ref


def _recent(said: list[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Without the answers to attempts before the last few."""
    answered: list[Identity] = []
    kept = []
    for entry in reversed(said):
        header = wire.parse(entry[1]).header
        if isinstance(header, Ack | Nack):
            if header.identity not in answered:
                answered.append(header.identity)
            if len(answered) > ANSWERED and header.identity in answered[ANSWERED:]:
                continue
        kept.append(entry)
    return kept[::-1]
