"""What members say, as their publisher reads it: each message once, and who is gone by what no longer changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from dcr.errors import DcrError, WireError
from dcr.protocol.wire import Ack, Identity, Join, Leave, MemberRef, Message, Nack
from dcr.runs.records import MEMBERS, Mailbox, decode, message_of

if TYPE_CHECKING:
    from dcr.runs.stored import StoredRun


@dataclass(slots=True)
class Sender:
    """One link that speaks for members. changed_s: when its mailbox was last seen to change, on this side's clock.

    taken: the number of the last message. alive: it has been heard since this publisher came. joined: for whom.
    """

    tag: bytes
    changed_s: float
    link: bytes = b""
    taken: int = 0
    alive: bool = False
    joined: set[MemberRef] = field(default_factory=set)


class Mailboxes:
    """Looks at all mailboxes of a run. asked: the attempts whose answers count. busy: answers came a moment ago."""

    def __init__(self, run: StoredRun, asked: Collection[Identity]) -> None:
        self._run = run
        self._asked = asked
        self._senders: dict[str, Sender] = {}
        self.busy = False

    async def look(self) -> list[Message | Exception]:
        """What is new: of each member in the order of sending; and what is no mailbox, once."""
        entries = {entry.key: entry.tag for entry in await self._run.objects.list_all(MEMBERS)}
        head = await self._run.log.follow() if entries else None
        term = head.term if head is not None else -1
        messages: list[Message | Exception] = []
        for key in [key for key in self._senders if key not in entries]:
            messages += self._leaves(key)
        for key, tag in entries.items():
            sender = self._senders.get(key)
            if sender is None or sender.tag != tag:
                try:
                    messages += await self._read(key, term)
                except WireError as error:
                    self._senders[key] = Sender(tag, anyio.current_time())
                    messages.append(error)
            elif sender.link and self._run.stale_s and anyio.current_time() - sender.changed_s >= self._run.stale_s:
                messages += self._leaves(key)
                await self._run.objects.delete([key])
        self.busy = any(isinstance(one, Message) and isinstance(one.header, Ack | Nack) for one in messages)
        return messages

    async def _read(self, key: str, term: int) -> list[Message]:
        found = await self._run.objects.get(key)
        if found is None or found.data is None:
            return []
        sender = self._senders.get(key)
        before, sender = sender is not None, sender or Sender(found.tag, 0.0)
        sender.tag, sender.changed_s = found.tag, anyio.current_time()
        self._senders[key] = sender
        mailbox: Mailbox = decode(found.data, key, Mailbox)
        if mailbox.link != sender.link:
            sender.link, sender.taken = mailbox.link, 0
        # a link that died before this publisher came has never seen its head, and changes nothing any more
        sender.alive = sender.alive or before or mailbox.term >= term
        if not sender.alive:
            return []
        messages = [message_of(data, key) for number, data in mailbox.said if number > sender.taken]
        sender.taken = max((number for number, _ in mailbox.said), default=sender.taken)
        messages = list(self._heard(sender, messages))
        if not sender.joined and mailbox.said:
            del self._senders[key]
            await self._run.objects.delete([key])
        return messages

    def _heard(self, sender: Sender, messages: Iterable[Message]) -> Iterable[Message]:
        for message in messages:
            match message.header:
                case Join(member=ref):
                    sender.joined.add(ref)
                    yield message
                case Leave(member=ref):
                    if ref in sender.joined:
                        sender.joined.remove(ref)
                        yield message
                case Ack(identity=identity) | Nack(identity=identity) if identity in self._asked:
                    yield message

    def _leaves(self, key: str) -> list[Message]:
        """A link is gone: all for whom it spoke have left."""
        return [Message(Leave(ref)) for ref in sorted(self._senders.pop(key).joined)]


async def members(run: StoredRun) -> list[Join]:
    """Who takes part now: whoever has joined, has not left, and was not found to be gone by a publisher."""
    joins: dict[MemberRef, Join] = {}
    for entry in await run.objects.list_all(MEMBERS):
        found = await run.objects.get(entry.key)
        if found is None or found.data is None:
            continue
        try:
            mailbox: Mailbox = decode(found.data, entry.key, Mailbox)
            headers = [message_of(data, entry.key).header for _, data in mailbox.said]
        except DcrError:
            continue  # somebody else has put it there
        for header in headers:
            if isinstance(header, Join):
                joins[header.member] = header
    return [joins[ref] for ref in sorted(joins)]
