"""A transport: a run is one SQLite file, a message one row (`sqlite:///path/to/run.db`)."""

import sqlite3
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Set
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import anyio
import anyio.to_thread
import msgspec

from dcr import wire
from dcr.errors import IncompleteError, LocalError, RemoteError
from dcr.wire import Abort, Chunk, Commit, Head, Identity, Join, Leave, MemberRef, Message, Seal

TABLES = """
create table if not exists head (tag integer, record blob);
insert into head select 0, null where not exists (select * from head);
create table if not exists messages (
    number integer primary key autoincrement,
    version integer, term integer, attempt integer, kind text, part integer, data blob
);
create index if not exists by_attempt on messages (version, term, attempt, kind, part);
"""
THIS = "(version, term, attempt) = (?, ?, ?)"
ROW = "(version, term, attempt, kind, part, data)"


class SqliteTransport:
    """Opens runs in files. poll_s: how often a side looks for news, in seconds. fsync: survive the host's death too."""

    def __init__(self, *, poll_s: float = 0.01, fsync: bool = True) -> None:
        self._poll_s, self._fsync = poll_s, fsync

    @asynccontextmanager
    async def open(self, url: str) -> AsyncIterator["SqliteRun"]:
        parts = urlsplit(url)
        if parts.scheme != "sqlite" or parts.netloc + parts.query + parts.fragment or parts.path[:1] != "/":
            raise LocalError(f"expected a URL such as sqlite:///path/to/run.db, found {url!r}")
        with closing(_Rows(Path(unquote(parts.path)), self._fsync)) as rows:
            yield SqliteRun(rows, self._poll_s)


transport = SqliteTransport()


class _Rows:
    """A connection, used by one thread at a time; every method is one transaction. Blocking."""

    def __init__(self, path: Path, fsync: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._file = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        self._file.execute(f"pragma synchronous = {'full' if fsync else 'off'}")
        self._file.executescript(f"pragma journal_mode = wal; begin immediate; {TABLES} commit;")

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def all(self, query: str, *values: object) -> list[Any]:
        with self._lock:
            return self._file.execute(query, values).fetchall()

    def change(self, query: str, *values: object) -> int:
        """How many rows it changed."""
        with self._lock:
            return self._file.execute(query, values).rowcount

    def add(self, message: Message) -> None:
        """One more row; it is part 0 of its kind, part 1, and so on."""
        at, kind = _at(getattr(message.header, "identity", None)), type(message.header).__name__
        part = f"(select count(*) from messages where {THIS} and kind = ?)"
        self.change(
            f"insert into messages {ROW} values (?, ?, ?, ?, {part}, ?)", *at, kind, *at, kind, wire.encode(message)
        )

    def head(self) -> tuple[Head | None, bytes]:
        ((tag, record),) = self.all("select tag, record from head")
        return (msgspec.msgpack.decode(record, type=Head) if record else None), b"%d" % tag

    def members(self) -> tuple[int, list[Join]]:
        """The number of the last row, and who takes part as of then."""
        found: dict[MemberRef, Join] = {}
        query = "kind in ('Join', 'Leave') or number = (select max(number) from messages)"
        rows = self.all(f"select number, data from messages where {query} order by number")
        for _, data in rows:
            match wire.parse(data).header:
                case Join(member=ref) as join:
                    found[ref] = join
                case Leave(member=ref):
                    found.pop(ref, None)
        return (rows[-1][0] if rows else 0), list(found.values())

    def part(self, of: Identity, kind: str, part: int = 0) -> Message:
        """A part of an attempt: its Open, its Seal, or one of its Chunks."""
        found = self.all(f"select data from messages where {THIS} and kind = ? and part = ?", *_at(of), kind, part)
        name = f"{kind} {part} of {of}"
        if not found:
            raise IncompleteError(f"{name} is missing: it was removed, or never written")
        try:
            return wire.parse(found[0][0])
        except RemoteError as error:
            error.add_note(f"in {name}")
            raise


class SqliteRun:
    def __init__(self, rows: _Rows, poll_s: float) -> None:
        self._rows, self._poll_s = rows, poll_s
        self.ledger, self.store = _Ledger(rows), _Store(rows)

    async def members(self) -> list[Join]:
        return (await anyio.to_thread.run_sync(self._rows.members))[1]

    @asynccontextmanager
    async def sender(self) -> AsyncIterator["_Link"]:
        last, joins = await anyio.to_thread.run_sync(self._rows.members)
        seen = _Seen(last, tuple(map(Message, joins)))
        with closing(_Link(self._rows, self._poll_s, seen, _from_members)) as link:
            yield link

    @asynccontextmanager
    async def writer(self, part: tuple[int, int]) -> AsyncIterator["_Writer"]:
        yield _Writer(self._rows)

    @asynccontextmanager
    async def member(self, ref: MemberRef) -> AsyncIterator["_Link"]:
        with closing(_Link(self._rows, self._poll_s, _Seen(), _from_sender)) as link:
            yield link


class _Ledger:
    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    async def read(self) -> tuple[Head | None, bytes]:
        return await anyio.to_thread.run_sync(self._rows.head)

    async def swap(self, head: Head, tag: bytes) -> bool:
        query = "update head set tag = tag + 1, record = ? where tag = ?"
        return await anyio.to_thread.run_sync(self._rows.change, query, msgspec.msgpack.encode(head), int(tag)) == 1


@dataclass(frozen=True)
class _Seen:
    """What a link has delivered. It changes when a message is in hand, so a receive that is cancelled loses nothing.

    number: the last row. first: what comes before any row. attempt: which one is being delivered, and the one whose
    Commit was: `head`.
    """

    number: int = 0
    first: tuple[Message, ...] = ()
    attempt: Identity | None = None
    head: Identity | None = None


Look = Callable[[_Rows, _Seen], tuple[Message, _Seen] | None]


class _Link:
    """One side; `look` says what comes next for it."""

    def __init__(self, rows: _Rows, poll_s: float, seen: _Seen, look: Look) -> None:
        self._rows, self._poll_s, self._seen, self._look = rows, poll_s, seen, look
        self._closed = False

    def close(self) -> None:
        self._closed = True

    async def send(self, message: Message) -> None:
        if not isinstance(message.header, Commit):  # members look at the head itself
            await anyio.to_thread.run_sync(self._rows.add, message)

    async def receive(self) -> Message:
        while not self._closed:
            if found := await anyio.to_thread.run_sync(self._look, self._rows, self._seen):
                message, self._seen = found
                return message
            await anyio.sleep(self._poll_s)
        raise IncompleteError("the link was closed")


class _Writer:
    """A further rank of the publisher: it adds chunks to attempts that the sender has opened."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    async def send(self, message: Message) -> None:
        if not isinstance(message.header, Chunk):
            raise LocalError(f"a writer sends chunks, not {type(message.header).__name__}")
        await anyio.to_thread.run_sync(self._add, message, message.header.identity)

    def _add(self, message: Message, of: Identity) -> None:
        if not self._rows.all(f"select 1 from messages where {THIS} and kind = 'Open'", *_at(of)):
            raise LocalError(f"{of} has not been opened by the run's sender")
        self._rows.add(message)


def _from_members(rows: _Rows, seen: _Seen) -> tuple[Message, _Seen] | None:
    """For a publisher: Joins and Leaves, Acks and Nacks, in order."""
    if seen.first:
        return seen.first[0], replace(seen, first=seen.first[1:])
    query = "select number, data from messages where number > ? and kind in ('Join', 'Leave', 'Ack', 'Nack')"
    for number, data in rows.all(f"{query} order by number limit 1", seen.number):
        return wire.parse(data), replace(seen, number=number)
    return None


def _from_sender(rows: _Rows, seen: _Seen) -> tuple[Message, _Seen] | None:
    """For a member: the rest of its attempt, then that the head has moved, then the newest live attempt."""
    head, _ = rows.head()
    if head is None:
        return None
    if (of := seen.attempt) is not None:
        query = f"select number, data from messages where {THIS} and number > ? and kind not in ('Ack', 'Nack')"
        for number, data in rows.all(f"{query} order by number limit 1", *_at(of), seen.number):
            return wire.parse(data), replace(seen, number=number)
        if head.term > of.term and head.identity != of:
            return Message(Abort(of, f"a publisher of term {head.term} has taken over")), replace(seen, attempt=None)
    if head.identity not in (None, seen.head):
        return Message(Commit(head.identity)), replace(seen, head=head.identity)
    floor = max(one.version if one else -1 for one in (head.identity, of))
    query = """select number, data from messages as m where kind = 'Open' and term = ? and version > ? and number > ?
        and not exists (select * from messages where kind = 'Abort'
            and (version, term, attempt) = (m.version, m.term, m.attempt))"""
    for number, data in rows.all(f"{query} order by number desc limit 1", head.term, floor, seen.number):
        message = wire.parse(data)
        return message, replace(seen, number=number, attempt=message.header.identity)
    return None


def _at(of: Identity | None) -> tuple[int, int, int]:
    return (of.version, of.term, of.attempt) if of else (-1, -1, -1)


class _Store:
    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    async def newest(self) -> int:
        query = "select coalesce(max(version), -1) from messages where kind = 'Open'"
        return (await anyio.to_thread.run_sync(self._rows.all, query))[0][0]

    async def attempts(self, version: int) -> list[Identity]:
        return await anyio.to_thread.run_sync(self._attempts, version)

    async def describe(self, of: Identity) -> tuple[Message, Message]:
        opened = await anyio.to_thread.run_sync(self._rows.part, of, "Open")
        return opened, await anyio.to_thread.run_sync(self._rows.part, of, "Seal")

    async def read(self, of: Identity) -> AsyncGenerator[Message, None]:
        opened, sealed = await self.describe(of)
        yield opened
        for index in range(await anyio.to_thread.run_sync(self._chunks, of, sealed.header)):
            yield await anyio.to_thread.run_sync(self._rows.part, of, "Chunk", index)
        yield sealed

    async def prune(self, keep: Set[Identity], below: int) -> None:
        await anyio.to_thread.run_sync(self._prune, keep, below)

    def _attempts(self, version: int) -> list[Identity]:
        query = "select data from messages where kind = 'Open' and version = ? order by number"
        found = [wire.parse(data).header.identity for (data,) in self._rows.all(query, version)]
        ends = f"select kind from messages where {THIS} and kind in ('Seal', 'Abort')"
        return [of for of in found if self._rows.all(ends, *_at(of)) == [("Seal",)]]

    def _chunks(self, of: Identity, seal: Seal) -> int:
        """How many there are: as many as are sealed, and those that were sent again."""
        query = f"select coalesce(max(part) + 1, 0) from messages where {THIS} and kind = 'Chunk'"
        return max(self._rows.all(query, *_at(of))[0][0], len(seal.chunks))

    def _prune(self, keep: Set[Identity], below: int) -> None:
        kept = [_at(of) for of in keep]
        newest = self._rows.all("select max(version) from messages where kind = 'Open'")[0][0]
        query = "select distinct version, term, attempt from messages where version between 0 and ? - 1"
        for at in self._rows.all(query, below):
            if at not in kept:
                last = f"{THIS} and not (kind = 'Open' and version = ?)"  # its number must not be used again
                self._rows.change(f"delete from messages where {last}", *at, newest)
