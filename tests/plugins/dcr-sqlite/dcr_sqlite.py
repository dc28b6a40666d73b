"""A transport: a run is one SQLite file, an object one row (`sqlite:///path/to/run.db`)."""

import sqlite3
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from urllib.parse import unquote, urlsplit

import anyio.to_thread

import dcr
from dcr.errors import LocalError, Unavailable
from dcr.seams import Entry, Found

TABLE = "create table if not exists objects (key text primary key, tag integer, data blob)"


class SqliteObjects:
    """Objects as the rows of a table; every method is one transaction, in a thread."""

    def __init__(self, path: Path, *, fsync: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        self._file.execute(f"pragma synchronous = {'full' if fsync else 'off'}")
        self._file.executescript(f"pragma journal_mode = wal; begin immediate; {TABLE}; commit;")

    def close(self) -> None:
        with self._lock:
            self._file.close()

    async def put(self, key: str, pieces: Sequence[bytes], *, absent: bool = False) -> bool:
        verb = "insert or ignore" if absent else "insert or replace"
        query = f"{verb} into objects values (?, abs(random()), ?) returning 1"
        return bool(await self._rows(query, key, b"".join(pieces)))

    async def get(self, key: str, *, span: tuple[int, int] | None = None, unless: bytes | None = None) -> Found | None:
        first, last = span or (0, 1 << 30)
        query = "select tag, case when tag = ? then null else substr(data, ?, ?) end from objects where key = ?"
        for number, data in await self._rows(query, int(unless or -1), first + 1, last - first, key):
            tag = b"%d" % number
            return Found(tag, None if tag == unless else data or b"")
        return None

    async def list(self, prefix: str, *, after: str = "", limit: int = 1000) -> Sequence[Entry]:
        query = "select key, tag from objects where key > ? and substr(key, 1, ?) = ? order by key limit ?"
        rows = await self._rows(query, max(after, prefix[:-1]), len(prefix), prefix, limit)
        return [Entry(key, b"%d" % tag) for key, tag in rows]

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            await self._rows("delete from objects where key = ?", key)

    async def _rows(self, query: str, *values: object) -> Sequence[tuple]:
        return await anyio.to_thread.run_sync(self._run, query, *values)

    def _run(self, query: str, *values: object) -> Sequence[tuple]:
        try:
            with self._lock:
                return self._file.execute(query, values).fetchall()
        except sqlite3.OperationalError as error:  # locked for too long, or no room: maybe not a moment later
            raise Unavailable(f"SQLite: {error}") from error


@asynccontextmanager
async def open_objects(url: str, *, fsync: str = "yes") -> AsyncIterator[SqliteObjects]:
    """fsync: "no" for files that need not outlive the host; an option is written `sqlite:///run.db?fsync=no`."""
    parts = urlsplit(url)
    if parts.scheme != "sqlite" or parts.netloc or parts.path[:1] != "/":
        raise LocalError(f"expected a URL such as sqlite:///path/to/run.db, found {url!r}")
    with closing(SqliteObjects(Path(unquote(parts.path)), fsync=fsync != "no")) as objects:
        yield objects


transport = dcr.stored(open_objects, pack_s=0.0)
