"""The local transport: a run is a directory on a file system that all sides see (`local:///path/to/run`).

    head                                  the head record, replaced by compare-and-set under a file lock
    members/<member>.<incarnation>        a Join, for as long as the member takes part; touched as a sign of life
    open.<term>                           the name of the attempt that the publisher of this term has opened last
    attempts/<version>.<term>.<attempt>/  one attempt, immutable once sealed
        open, 0000-00000000.chunk, ..., seal  in this order; chunks are named by their writer and its count
        abort                             the publisher gave it up
        votes/<member>.<incarnation>.<n>  Acks and Nacks

Every file but `open.<term>` is one wire message. All are written under a temporary name and renamed, so that what has
its name is whole. Chunks are flushed to the disk before the seal, and the seal before the head: a version survives the
host once the head names it. Sides find each other's files by looking, at what is live and never at all that is kept;
nothing is ever appended to.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio.to_thread

from dcr import urls
from dcr.errors import IncompleteError
from dcr.seams.required import FLAG, SECONDS, judge
from dcr.transports.local.files import Disk, clock, listed, load, stamp
from dcr.transports.local.ledger import FileLedger
from dcr.transports.local.member import MemberLink
from dcr.transports.local.sender import SenderLink, WriterLink
from dcr.transports.local.store import FileStore
from dcr.wire import Join, MemberRef


class LocalTransport:
    """Opens runs in directories.

    poll_s: how often a side looks for news, in seconds. stale_s: a member whose sign of life is older has left. fsync:
    flush to the disk where the module's text promises it; without, versions survive the process but not the host.
    """

    def __init__(self, *, poll_s: float = 0.01, stale_s: float = 30.0, fsync: bool = True) -> None:
        judge(poll_s=(poll_s, SECONDS), stale_s=(stale_s, SECONDS), fsync=(fsync, FLAG))
        self._poll_s = poll_s
        self._stale_s = stale_s
        self._fsync = fsync

    @asynccontextmanager
    async def open(self, url: str) -> AsyncIterator[LocalRun]:
        """See `dcr.seams.Transport.open`."""
        root = Path(urls.path_of(url, "local"))
        yield LocalRun(root, poll_s=self._poll_s, stale_s=self._stale_s, fsync=self._fsync)


transport = LocalTransport()


class LocalRun:
    """A run in a directory: its ledger, its store, and links."""

    def __init__(self, root: Path, *, poll_s: float, stale_s: float, fsync: bool) -> None:
        self.root = root
        self.poll_s = poll_s
        self.stale_s = stale_s
        self.disk = Disk(fsync)
        self.ledger = FileLedger(root, self.disk)
        self.store = FileStore(root)

    async def members(self) -> list[Join]:
        """See `dcr.seams.Run.members`."""
        return await anyio.to_thread.run_sync(self._joins)

    def _joins(self) -> list[Join]:
        joins = []
        folder = self.root / "members"
        oldest_ns = int((clock(folder) - self.stale_s) * 1e9)
        for path in sorted(path for path in listed(folder) if stamp(path)[1] >= oldest_ns):
            with suppress(IncompleteError):  # it left in this very moment
                header = load(path).header
                if isinstance(header, Join):
                    joins.append(header)
        return joins

    def sender(self) -> SenderLink:
        """See `dcr.seams.Run.sender`."""
        return SenderLink(self)

    def writer(self, part: tuple[int, int]) -> WriterLink:
        """See `dcr.seams.Run.writer`."""
        return WriterLink(self, part)

    def member(self, ref: MemberRef) -> MemberLink:
        """See `dcr.seams.Run.member`."""
        return MemberLink(self, ref)
