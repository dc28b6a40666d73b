"""A transport in memory: the run of `dcr.runs` over a dictionary, without files, threads or polling; for tests.

Sides are woken when something is written. Use one transport value for both ends, within one event loop at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel

from dcr.runs import StoredTransport
from dcr.seams import urls
from dcr.seams.objects import Entry, Found


class MemoryObjects:
    """Objects in a dictionary; the tag of each counts the writes. `data` may be read, and changed to do damage."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self._tags: dict[str, bytes] = {}
        self._writes = 0
        self._changed = anyio.Event()

    async def put(self, key: str, pieces: Sequence[bytes], *, absent: bool = False) -> bool:
        """See `dcr.seams.Objects.put`."""
        await anyio.lowlevel.checkpoint()
        if absent and key in self.data:
            return False
        self._writes += 1
        self.data[key], self._tags[key] = b"".join(pieces), b"%d" % self._writes
        self._wake()
        return True

    async def get(self, key: str, *, span: tuple[int, int] | None = None, unless: bytes | None = None) -> Found | None:
        """See `dcr.seams.Objects.get`."""
        await anyio.lowlevel.checkpoint()
        if key not in self.data:
            return None
        tag = self._tags.get(key, b"")
        return Found(tag, None if tag == unless else self.data[key][slice(*span) if span else slice(None)])

    async def list(self, prefix: str, *, after: str = "", limit: int = 1000) -> Sequence[Entry]:
        """See `dcr.seams.Objects.list`."""
        await anyio.lowlevel.checkpoint()
        keys = sorted(key for key in self.data if key.startswith(prefix) and key > after)
        return [Entry(key, self._tags.get(key, b"")) for key in keys[:limit]]

    async def delete(self, keys: Sequence[str]) -> None:
        """See `dcr.seams.Objects.delete`."""
        await anyio.lowlevel.checkpoint()
        for key in keys:
            self.data.pop(key, None)
        self._wake()

    def changed(self) -> anyio.Event:
        """What is set when something is written from now on."""
        return self._changed

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


class MemoryTransport(StoredTransport):
    """Opens runs by the path of their URL (`memory:///run-17`); they live as long as this value."""

    def __init__(self) -> None:
        super().__init__(self._find, query=False, poll_s=None, stale_s=None, pack_s=0.0)
        self._runs: dict[str, MemoryObjects] = {}

    @asynccontextmanager
    async def _find(self, url: str) -> AsyncIterator[MemoryObjects]:
        yield self.run(url)

    def run(self, url: str) -> MemoryObjects:
        """What the run of a URL is kept in, to look at."""
        return self._runs.setdefault(urls.path_of(url, "memory"), MemoryObjects())
