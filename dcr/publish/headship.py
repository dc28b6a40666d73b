"""The publisher's hold on the head: taking a term, moving the head, and knowing whether it moved."""

from __future__ import annotations

import uuid

import anyio

from dcr.errors import Fenced, NotCommittedError
from dcr.protocol.machines import AttemptEvent, AttemptMachine, AttemptState
from dcr.protocol.wire import Head, Identity
from dcr.seams import Ledger

TRIES, PAUSE_S = 3, 0.2


def recognise(head: Head, root: bytes) -> Identity | None:
    """The version that the head names, if bits with this root are its own; None if they are not."""
    return head.identity if root == head.root else None


class Headship:
    """The head as this publisher left it. A publisher with a higher term fences this one.

    ledger: where the head is kept. head: what this publisher wrote to it last.
    """

    def __init__(self, ledger: Ledger, head: Head) -> None:
        self.ledger = ledger
        self.head = head

    @classmethod
    async def take(cls, ledger: Ledger) -> Headship:
        """Take the next term, so that publishers before this one are refused from now on."""
        while True:
            head, tag = await ledger.read()
            if head is None:
                ours = Head(uuid.uuid4().hex, 1, None, b"")
            else:
                ours = Head(head.run, head.term + 1, head.identity, head.root)
            if await ledger.swap(ours, tag):
                return cls(ledger, ours)

    async def require(self) -> None:
        """The head is still as this publisher left it.

        Raises:
            Fenced: it is another publisher's.
        """
        now, _ = await self.ledger.read()
        if now != self.head:
            raise Fenced(
                f"expected the head at term {self.head.term}, found {now.term if now else 'none'}: "
                "another publisher has taken over; this one may not publish any more"
            )

    async def move(self, identity: Identity, root: bytes, machine: AttemptMachine) -> None:
        """Make a sealed attempt the version. A swap without an answer, or refused, is read back, never retried blind.

        Raises:
            Fenced: the head is another publisher's; the attempt is not, and will not be, the version.
            NotCommittedError: it could not be moved, several times, and was not.
            Exception: the head can be neither swapped nor read: whether it moved is not known.
        """
        now, tag = await self.ledger.read()
        if now != self.head:
            machine.move(AttemptEvent.LOST)
        ours = Head(self.head.run, self.head.term, identity, root)
        failure: Exception | None = None
        tries = 0
        while machine.state is not AttemptState.COMMITTED:
            if machine.state is AttemptState.FENCED:
                raise Fenced(
                    f"{identity} was not committed: another publisher has moved the head since; "
                    "this one may not publish any more"
                ) from failure
            try:
                event = AttemptEvent.SWAPPED if await self.ledger.swap(ours, tag) else AttemptEvent.REFUSED
            except Exception as error:
                event, failure = AttemptEvent.NO_ANSWER, error
            if machine.move(event) is AttemptState.UNKNOWN:
                machine.move(await self.read_back(ours, tag, failure))
            if machine.state is AttemptState.SWAPPING:
                tries += 1
                if tries == TRIES:
                    why = "its swap was refused" if failure is None else repr(failure)
                    raise NotCommittedError(
                        f"{identity}: the head could not be moved in {TRIES} tries ({why}); publish the next version"
                    ) from failure
                await anyio.sleep(PAUSE_S * tries)
        self.head = ours

    async def read_back(self, ours: Head, base: bytes, failure: Exception | None) -> AttemptEvent:
        """What has become of a swap; a refusal may answer a second try of one that had worked."""
        try:
            head, tag = await self.ledger.read()
        except Exception as error:
            error.add_note(f"reading the head back, after moving it failed with {failure!r}")
            raise
        if head == ours:
            return AttemptEvent.HEAD_IS_OURS
        return AttemptEvent.HEAD_IS_BASE if tag == base else AttemptEvent.LOST
