"""The publisher's hold on the head: taking a term, moving the head, and knowing whether it moved."""

from __future__ import annotations

import uuid

from dcr.commit import Sender, after
from dcr.errors import Fenced
from dcr.seams import Ledger
from dcr.wire import Head, Identity


class Headship:
    """The head as this publisher left it. Whoever takes a later term ends it."""

    def __init__(self, ledger: Ledger, head: Head, tag: bytes) -> None:
        self._ledger = ledger
        self._tag = tag
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
                now, tag = await ledger.read()
                if now == ours:
                    return cls(ledger, ours, tag)

    async def move(self, identity: Identity, root: bytes) -> None:
        """Make a sealed attempt the version. A swap without an answer is read back, never retried blind.

        Raises:
            Fenced: the head is another publisher's; the attempt is not, and will not be, the version.
            Exception: the head can be neither swapped nor read: whether it moved is not known.
        """
        ours = Head(self.head.run, self.head.term, identity, root)
        state = Sender.SWAPPING
        while state is not Sender.COMMITTED:
            failure: Exception | None = None
            try:
                event = "swapped" if await self._ledger.swap(ours, self._tag) else "lost"
            except Exception as error:
                event, failure = "no_answer", error
            state = after(state, event)
            if state is Sender.UNKNOWN:
                state = await self._read_back(ours, failure)
            if state is Sender.FENCED:
                raise Fenced(f"{identity} was not committed: another publisher has moved the head since") from failure
        self.head = ours
        _, self._tag = await self._ledger.read()

    async def _read_back(self, ours: Head, failure: Exception | None) -> Sender:
        try:
            head, tag = await self._ledger.read()
        except Exception as error:
            error.add_note(f"reading the head back, after moving it failed with {failure!r}")
            raise
        if head == ours:
            return after(Sender.UNKNOWN, "head_is_ours")
        return after(Sender.UNKNOWN, "head_is_base" if tag == self._tag else "lost")
