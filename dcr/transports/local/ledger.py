"""The head, in a file that is replaced by compare-and-set."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio.to_thread
import msgspec

from dcr.errors import WireError
from dcr.transports.local.files import Disk
from dcr.wire import Head


class FileLedger:
    """The head in a file; a lock beside it makes compare-and-set atomic."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self._path = root / "head"
        self._lock = root / "head.lock"
        self._disk = disk

    async def read(self) -> tuple[Head | None, bytes]:
        """See `dcr.seams.Ledger.read`."""
        return await anyio.to_thread.run_sync(self.look)

    async def swap(self, head: Head, tag: bytes) -> bool:
        """See `dcr.seams.Ledger.swap`."""
        return await anyio.to_thread.run_sync(self._swap, head, tag)

    def look(self) -> tuple[Head | None, bytes]:
        """`read`, blocking."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None, b""
        try:
            return msgspec.msgpack.decode(data, type=Head), hashlib.blake2b(data, digest_size=16).digest()
        except msgspec.MsgspecError as error:
            raise WireError(
                f"{self._path} is not a head record ({error}): "
                "it is damaged, or another program's; start a run elsewhere"
            ) from error

    def _swap(self, head: Head, tag: bytes) -> bool:
        self._disk.make(self._path.parent)
        with self._locked():
            if self.look()[1] != tag:
                return False
            self._disk.write(self._path, msgspec.msgpack.encode(head), flush=True)
            self._disk.sync(self._path.parent)
            return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
