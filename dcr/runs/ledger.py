"""The heads of a run as a numbered log: head n + 1 is created once, by whoever comes first, and none is ever removed.

No lock, so none that a fork, a stopped process or a lease could keep; and nothing that goes back.
"""

from __future__ import annotations

import uuid
from contextlib import suppress

import msgspec

from dcr.errors import DcrError
from dcr.protocol.wire import Head
from dcr.runs.patience import Patient
from dcr.runs.records import NEWEST, Entry, decode, head_key, seal_up, unseal


class Log:
    """The newest head that was seen: `number` (0: none yet) and `head`."""

    def __init__(self, objects: Patient) -> None:
        self._objects = objects
        self.number = 0
        self.head: Head | None = None
        self._tag: bytes | None = None

    async def read(self) -> tuple[Head | None, bytes]:
        """See `dcr.seams.Ledger.read`."""
        await self.follow()
        return self.head, b"%d" % self.number

    async def swap(self, head: Head, tag: bytes) -> bool:
        """See `dcr.seams.Ledger.swap`."""
        number = int(tag) + 1
        entry = msgspec.msgpack.encode(Entry(head, uuid.uuid4().bytes))
        if not await self._objects.put(head_key(number), seal_up([entry]), absent=True):
            return False
        self._see(number, head)
        with suppress(DcrError, OSError):  # a hint: whoever starts without it looks for longer
            await self._objects.put(NEWEST, [b"%d" % number])
        return True

    async def follow(self) -> Head | None:
        """Look for newer heads; the newest."""
        if not self.number:
            await self._start()
        step = 1
        while await self._look(self.number + step):  # as many as there may be are passed over in doubled steps
            step *= 2
        while step > 1:
            step //= 2
            while step and await self._look(self.number + step):
                pass
        return self.head

    async def _start(self) -> None:
        found = await self._objects.get(NEWEST)
        if found is not None and found.data and found.data.isdigit():
            await self._look(int(found.data))

    async def _look(self, number: int) -> bool:
        """Take a head, if there is one under this number."""
        key = head_key(number)
        found = await self._objects.get(key)
        if found is None or found.data is None:
            return False
        body, _ = unseal(found.data, key, tuple[()])
        entry: Entry = decode(bytes(body), key, Entry)
        self._see(number, entry.head, found.tag)
        return True

    async def is_whole(self) -> bool:
        """Whether the newest head that was seen is still there: it goes only if a backup was restored over the run."""
        if not self.number:
            return True
        return await self._objects.get(head_key(self.number), unless=self._tag) is not None

    def _see(self, number: int, head: Head, tag: bytes | None = None) -> None:
        # invariant: nobody follows a head with a lower number than one that it has seen
        if number > self.number:
            self.number, self.head, self._tag = number, head, tag
