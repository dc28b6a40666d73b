"""The local transport: a run is a directory on a file system that all sides see (`local:///path/to/run`).

Every object is a file under its key (`dcr/runs/records.py` lists them). All are written under a temporary name first,
so that what has its name is whole; what is created once gets its name by `link`, which no other file's name gives way
to, on a network file system either. What is no hint is flushed to the disk before a put returns: a version survives
the host once the head names it.
"""

from __future__ import annotations

import itertools
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.to_thread

from dcr.runs.stored import StoredTransport
from dcr.seams import urls
from dcr.seams.objects import Entry, Found
from dcr.seams.required import FLAG, judge

HINTS = "live/"
TEMPORARY = ".tmp"


class FileObjects:
    """Objects as the files of a directory."""

    def __init__(self, root: Path, *, fsync: bool) -> None:
        self.root = root
        self._fsync = fsync
        self._side = uuid.uuid4().hex  # no other's temporary file has it in its name
        self._count = itertools.count()

    async def put(self, key: str, pieces: Sequence[bytes], *, absent: bool = False) -> bool:
        """See `dcr.seams.Objects.put`."""
        return await anyio.to_thread.run_sync(self._put, key, pieces, absent)

    async def get(self, key: str, *, span: tuple[int, int] | None = None, unless: bytes | None = None) -> Found | None:
        """See `dcr.seams.Objects.get`."""
        return await anyio.to_thread.run_sync(self._get, key, span, unless)

    async def list(self, prefix: str, *, after: str = "", limit: int = 1000) -> Sequence[Entry]:
        """See `dcr.seams.Objects.list`."""
        return await anyio.to_thread.run_sync(self._list, prefix, after, limit)

    async def delete(self, keys: Sequence[str]) -> None:
        """See `dcr.seams.Objects.delete`."""
        await anyio.to_thread.run_sync(self._delete, keys)

    # ------------------------------------------------------------------ in a thread

    def _put(self, key: str, pieces: Sequence[bytes], absent: bool) -> bool:
        path, flush = self.root / key, self._fsync and not key.startswith(HINTS)
        temporary = path.with_name(f"{self._side}.{next(self._count)}{TEMPORARY}")
        try:
            try:
                self._write(temporary, pieces, flush)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._write(temporary, pieces, flush)
            if absent:
                os.link(temporary, path)
            else:
                temporary.replace(path)
            if flush:
                _sync(path.parent)
        except FileExistsError as error:
            if not absent or error.filename2 is None:
                raise self._explained(error) from None
            return False
        except OSError as error:
            raise self._explained(error) from None
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        return True

    def _write(self, path: Path, pieces: Sequence[bytes], flush: bool) -> None:
        with path.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            now_ns = time.time_ns()  # a file system's clock ticks: two writes within one tick are two all the same
            os.utime(file.fileno(), ns=(now_ns, now_ns))
            if flush:
                os.fsync(file.fileno())

    def _get(self, key: str, span: tuple[int, int] | None, unless: bytes | None) -> Found | None:
        try:
            with (self.root / key).open("rb") as file:
                tag = _tag(os.fstat(file.fileno()))
                if tag == unless:
                    return Found(tag, None)
                if span is None:
                    return Found(tag, file.read())
                file.seek(span[0])
                return Found(tag, file.read(max(0, span[1] - span[0])))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    def _list(self, prefix: str, after: str, limit: int) -> Sequence[Entry]:
        folder = prefix.rpartition("/")[0]
        found = (entry for entry in self._walk(folder) if entry.key.startswith(prefix) and entry.key > after)
        return sorted(found)[:limit]

    def _walk(self, folder: str) -> Iterator[Entry]:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.root / folder) as entries:
            for entry in entries:
                key = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir(follow_symlinks=False):
                    yield from self._walk(key)
                elif not entry.name.endswith(TEMPORARY):
                    with suppress(FileNotFoundError):
                        yield Entry(key, _tag(entry.stat()))

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with suppress(FileNotFoundError, NotADirectoryError):
                (self.root / key).unlink()
        for folder in {(self.root / key).parent for key in keys} - {self.root}:
            with suppress(OSError):  # it is not empty, or gone
                folder.rmdir()

    def _explained(self, error: OSError) -> OSError:
        if isinstance(error, PermissionError | NotADirectoryError | FileExistsError):
            error.add_note(
                f"local://{self.root} is where the publisher and every member of the run write: choose a directory "
                "that each of them can make, or write in"
            )
        return error


class LocalTransport(StoredTransport):
    """Opens runs in directories.

    poll_s: how often a side looks for news while an attempt is open, in seconds; a tenth as often while none is.
    stale_s: a member without a sign of life for so long has left. fsync: flush to the disk where the module's text
    promises it; without, versions survive the process but not the host.
    """

    def __init__(self, *, poll_s: float = 0.01, stale_s: float = 30.0, fsync: bool = True) -> None:
        judge(fsync=(fsync, FLAG))
        super().__init__(self._find, query=False, poll_s=poll_s, stale_s=stale_s, pack_s=0.0)
        self._options["idle_s"] = 10 * poll_s
        self._fsync = fsync

    @asynccontextmanager
    async def _find(self, url: str) -> AsyncIterator[FileObjects]:
        yield FileObjects(Path(urls.path_of(url, "local")), fsync=self._fsync)


def _tag(found: os.stat_result) -> bytes:
    return b"%d.%d.%d" % (found.st_ino, found.st_mtime_ns, found.st_size)


def _sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


transport = LocalTransport()
