"""Whether a call of `publish` begins a version or is skipped, decided alike on every rank.

The first rank decides when its user calls: it skips while a version is under way. The other ranks hear with the words
of each meeting how many calls it has skipped since that version began, for the last time at the meeting that ends it.
All ranks call `publish` as often, so they know from that number whether a call of their own is one of these.
"""

from __future__ import annotations

from contextlib import suppress

import anyio

from dcr.errors import DcrError
from dcr.publish.meeting import Ranks


class Turns:
    """Counts the calls of one rank. is_free: no version is under way, so the next call begins one."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._skipped = 0  # of this rank's calls, since the last version began
        self._freed = anyio.Event()
        self._freed.set()

    @property
    def is_free(self) -> bool:
        return self._freed.is_set()

    def begin(self) -> None:
        """A version is under way from now on."""
        self._skipped = self._ranks.skipped = 0
        self._freed = anyio.Event()

    async def free(self) -> None:
        """Wait until no version is under way, on any rank."""
        await self._freed.wait()

    async def skip(self) -> bool:
        """Decide on a call of this rank's user: whether it is skipped. Cancelled, it has not been made."""
        if self._ranks.leads:
            if self.is_free:
                return False
            self._ranks.skipped += 1
            self._ranks.hurry()
            return True
        with self._ranks.hurrying():
            while self._skipped >= self._ranks.skipped and not self.is_free:
                await self._ranks.heard()
        if self._skipped >= self._ranks.skipped:
            return False
        self._skipped += 1
        return True

    async def end(self, version: int) -> None:
        """The version has ended on this rank; returns once it has on all of them, or they cannot meet any more."""
        freed = self._freed

        async def end() -> int:
            # invariant: this is the last count of the version, since every later call of this rank begins the next one
            if self._ranks.leads:
                freed.set()
            return self._ranks.skipped

        with suppress(DcrError):  # whoever publishes next is told
            skipped = await self._ranks.decide(f"end {version}", end, int)
            if not self._ranks.leads:
                self._ranks.skipped = skipped
        freed.set()
        self._ranks.tell_heard()
