"""The local transport: a run is a directory on a file system that all sides see (`local:///path/to/run`).

    head                                  the head record, replaced by compare-and-set under a file lock
    members/<member>.<incarnation>        a Join, for as long as the member takes part; touched as a sign of life
    attempts/<version>.<term>.<attempt>/  one attempt, immutable once sealed
        open, 00000000.chunk, ..., seal   in this order
        abort                             the publisher gave it up
        votes/<member>.<incarnation>.<n>  Acks and Nacks

Every file is one wire message, written under a temporary name and renamed, so that what has its name is whole. Chunks
are flushed to the disk before the seal, and the seal before the head: a version survives the host once the head
names it. Sides find each other's files by looking; nothing is ever appended to.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Set
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from urllib.parse import quote, unquote, urlsplit

import anyio
import anyio.to_thread
import msgspec

from dcr import wire
from dcr.errors import IncompleteError, LocalError, RemoteError, WireError
from dcr.wire import Abort, Ack, Chunk, Commit, Head, Identity, Join, Leave, MemberRef, Message, Nack, Open, Seal

TEMPORARY = ".tmp"
ATTEMPT = re.compile(r"\d{12,}\.\d{6,}\.\d{4,}")


class LocalTransport:
    """Opens runs in directories.

    poll_s: how often a side looks for news, in seconds. stale_s: a member whose sign of life is older has left. fsync:
    flush to the disk where the module's text promises it; without, versions survive the process but not the host.
    """

    def __init__(self, *, poll_s: float = 0.01, stale_s: float = 30.0, fsync: bool = True) -> None:
        self._poll_s = poll_s
        self._stale_s = stale_s
        self._fsync = fsync

    @asynccontextmanager
    async def open(self, url: str) -> AsyncIterator[LocalRun]:
        """See `dcr.seams.Transport.open`."""
        parts = urlsplit(url)
        if parts.scheme != "local" or parts.netloc or not parts.path.startswith("/") or parts.query:
            raise LocalError(f"expected a URL such as local:///path/to/run, found {url!r}")
        root = Path(unquote(parts.path))
        yield LocalRun(root, poll_s=self._poll_s, stale_s=self._stale_s, fsync=self._fsync)


transport = LocalTransport()


class LocalRun:
    """A run in a directory: its ledger, its store, and links."""

    def __init__(self, root: Path, *, poll_s: float, stale_s: float, fsync: bool) -> None:
        self.root = root
        self.poll_s = poll_s
        self.stale_s = stale_s
        self.disk = _Disk(fsync)
        self.ledger = _Ledger(root, self.disk)
        self.store = _Store(root)

    async def members(self) -> list[Join]:
        """See `dcr.seams.Run.members`."""
        return await anyio.to_thread.run_sync(self._joins)

    def _joins(self) -> list[Join]:
        joins = []
        for path in sorted(_listed(self.root / "members")):
            with suppress(IncompleteError):  # it left in this very moment
                header = _load(path).header
                if isinstance(header, Join):
                    joins.append(header)
        return joins

    def sender(self) -> _SenderLink:
        """See `dcr.seams.Run.sender`."""
        return _SenderLink(self)

    def member(self, ref: MemberRef) -> _MemberLink:
        """See `dcr.seams.Run.member`."""
        return _MemberLink(self, ref)


class _Disk:
    """Atomic, and where asked durable, file writes. Blocking."""

    def __init__(self, fsync: bool) -> None:
        self._fsync = fsync

    def make(self, root: Path) -> None:
        """The folders of a run, where they are missing."""
        for folder in (root / "attempts", root / "members"):
            folder.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, data: bytes, *, flush: bool = False) -> None:
        """Make a file appear under its name with all of its bytes."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
        try:
            with temporary.open("wb") as file:
                file.write(data)
                if flush and self._fsync:
                    file.flush()
                    os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def sync(self, *paths: Path) -> None:
        """Flush files, or the names in folders, to the disk."""
        if self._fsync:
            for path in paths:
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)


class _Ledger:
    """The head in a file; a lock beside it makes compare-and-set atomic."""

    def __init__(self, root: Path, disk: _Disk) -> None:
        self._path = root / "head"
        self._lock = root / "head.lock"
        self._disk = disk

    async def read(self) -> tuple[Head | None, bytes]:
        """See `dcr.seams.Ledger.read`."""
        return await anyio.to_thread.run_sync(self._read)

    async def swap(self, head: Head, tag: bytes) -> bool:
        """See `dcr.seams.Ledger.swap`."""
        return await anyio.to_thread.run_sync(self._swap, head, tag)

    def _read(self) -> tuple[Head | None, bytes]:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None, b""
        try:
            return msgspec.msgpack.decode(data, type=Head), hashlib.blake2b(data, digest_size=16).digest()
        except msgspec.MsgspecError as error:
            raise WireError(f"{self._path} is not a head record: {error}") from error

    def _swap(self, head: Head, tag: bytes) -> bool:
        self._disk.make(self._path.parent)
        with self._locked():
            if self._read()[1] != tag:
                return False
            self._disk.write(self._path, msgspec.msgpack.encode(head), flush=True)
            self._disk.sync(self._path.parent)
            return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class _Store:
    """Committed versions, as their attempts' directories."""

    def __init__(self, root: Path) -> None:
        self._attempts = root / "attempts"

    async def describe(self, identity: Identity) -> tuple[Message, Message]:
        """See `dcr.seams.Store.describe`."""
        folder = self._attempts / _name(identity)
        opened = await anyio.to_thread.run_sync(_load, folder / "open")
        sealed = await anyio.to_thread.run_sync(_load, folder / "seal")
        return opened, sealed

    async def read(self, identity: Identity) -> AsyncGenerator[Message, None]:
        """See `dcr.seams.Store.read`."""
        folder = self._attempts / _name(identity)
        yield await anyio.to_thread.run_sync(_load, folder / "open")
        for number, path in enumerate(sorted(await anyio.to_thread.run_sync(_chunks, folder))):
            expected = folder / f"{number:08d}.chunk"
            yield await anyio.to_thread.run_sync(_load, path if path == expected else expected)
        yield await anyio.to_thread.run_sync(_load, folder / "seal")

    async def attempts(self, version: int) -> list[Identity]:
        """See `dcr.seams.Store.attempts`."""
        return await anyio.to_thread.run_sync(self._attempts_at, version)

    async def newest(self) -> int:
        """See `dcr.seams.Store.newest`."""
        folders = await anyio.to_thread.run_sync(_attempt_folders, self._attempts)
        return max((_order(folder.name)[0] for folder in folders), default=-1)

    async def prune(self, keep: Set[Identity], below: int) -> None:
        """See `dcr.seams.Store.prune`."""
        await anyio.to_thread.run_sync(self._prune, {_name(identity) for identity in keep}, below)

    def _attempts_at(self, version: int) -> list[Identity]:
        found = []
        for folder in _attempt_folders(self._attempts):
            if _order(folder.name)[0] == version and (folder / "seal").exists() and not (folder / "abort").exists():
                header = _load(folder / "open").header
                assert isinstance(header, Open)
                found.append(header.identity)
        return found

    def _prune(self, keep: Set[str], below: int) -> None:
        for folder in _attempt_folders(self._attempts):
            if _order(folder.name)[0] < below and folder.name not in keep:
                gone = folder.with_name(folder.name + TEMPORARY)
                folder.rename(gone)
                shutil.rmtree(gone)


class _SenderLink:
    """The publisher's side."""

    def __init__(self, run: LocalRun) -> None:
        self._run = run
        self._desk = _Desk(run.poll_s)
        self._members = run.root / "members"
        self._folder: Path | None = None
        self._chunks = 0
        self._folders: deque[Path] = deque(maxlen=8)  # of the attempts that members may still answer
        self._seen: set[tuple[Path, int]] = set()
        self._joined: dict[Path, MemberRef] = {}
        self._beats: dict[Path, tuple[int, float]] = {}

    async def __aenter__(self) -> _SenderLink:
        await anyio.to_thread.run_sync(self._run.disk.make, self._run.root)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        self._desk.close()

    async def send(self, message: Message) -> None:
        """See `dcr.seams.Link.send`."""
        await self._desk.send(partial(self._send, message))

    async def receive(self) -> Message:
        """See `dcr.seams.Link.receive`."""
        return await self._desk.receive(self._receive)

    def _send(self, message: Message) -> None:
        disk, data = self._run.disk, wire.encode(message)
        match message.header:
            case Open(identity=identity):
                self._folder = self._run.root / "attempts" / _name(identity)
                (self._folder / "votes").mkdir(parents=True)
                self._chunks = 0
                self._folders.append(self._folder)
                disk.write(self._folder / "open", data)
            case Chunk(identity=identity):
                disk.write(self._attempt(identity) / f"{self._chunks:08d}.chunk", data)
                self._chunks += 1
            case Seal(identity=identity):
                folder = self._attempt(identity)
                disk.sync(*folder.iterdir(), folder, folder.parent)
                disk.write(folder / "seal", data, flush=True)
                disk.sync(folder)
            case Abort(identity=identity):
                self._abort(self._attempt(identity), data)
            case Commit():
                pass  # members look at the head itself
            case header:
                raise LocalError(f"a publisher does not send {type(header).__name__}")

    def _abort(self, folder: Path, data: bytes) -> None:
        """Say that it is given up, and remove its chunks; in this order, unless the disk is full."""
        try:
            self._run.disk.write(folder / "abort", data)
        except OSError:
            self._remove_chunks(folder)
            self._run.disk.write(folder / "abort", data)
        self._remove_chunks(folder)

    def _remove_chunks(self, folder: Path) -> None:
        for path in folder.glob("*.chunk"):
            path.unlink(missing_ok=True)

    def _attempt(self, identity: Identity) -> Path:
        if self._folder is None or self._folder.name != _name(identity):
            raise LocalError(f"{identity} has not been opened on this link")
        return self._folder

    def _receive(self) -> Message | None:
        now = {path for path in _listed(self._members) if self._alive(path)}
        votes = [path for folder in list(self._folders) for path in _listed(folder / "votes")]
        keys = {path: (path, _inode(path)) for path in (*now, *votes)}  # a Join that is written anew is news
        self._seen &= set(keys.values())
        for path, key in sorted(keys.items()):
            if key in self._seen:
                continue
            self._seen.add(key)
            try:
                message = _load(path)
            except IncompleteError:
                continue  # the member left in this very moment
            if isinstance(message.header, Join):
                self._joined[path] = message.header.member
            return message
        for path in self._joined.keys() - now:
            return Message(Leave(self._joined.pop(path)))
        return None

    def _alive(self, path: Path) -> bool:
        """A member touches its file while it lives; what counts is that the time changes, not what it says."""
        try:
            stamp = path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        now_s = time.monotonic()
        age_s = max(0.0, time.time() - stamp / 1e9)  # for a file that was there before this publisher
        beat, since_s = self._beats.get(path, (stamp, now_s - age_s))
        if beat != stamp:
            since_s = now_s
        self._beats[path] = stamp, since_s
        return now_s - since_s < self._run.stale_s


class _MemberLink:
    """A member's side. It delivers live attempts of the head's term, and a Commit whenever the head moves."""

    def __init__(self, run: LocalRun, ref: MemberRef) -> None:
        self._run = run
        self._desk = _Desk(run.poll_s)
        self._ref = ref
        self._join = run.root / "members" / _file_name(ref)
        self._folder: Path | None = None
        self._opened: Identity | None = None
        self._last = ""
        self._waiting: deque[Path] = deque()
        self._seen: set[Path] = set()
        self._head: Identity | None = None
        self._votes = 0

    async def __aenter__(self) -> _MemberLink:
        await anyio.to_thread.run_sync(self._run.disk.make, self._run.root)
        self._group = await anyio.create_task_group().__aenter__()
        self._group.start_soon(self._beat)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._desk.close()
        self._group.cancel_scope.cancel()
        if isinstance(error, anyio.get_cancelled_exc_class()):
            await self._group.__aexit__(kind, error, at)
        else:
            await self._group.__aexit__(None, None, None)

    async def _beat(self) -> None:
        """Show that this member lives."""
        while True:
            await anyio.sleep(self._run.stale_s / 10)
            with suppress(OSError):
                await anyio.to_thread.run_sync(os.utime, self._join)

    async def send(self, message: Message) -> None:
        """See `dcr.seams.Link.send`."""
        await self._desk.send(partial(self._send, message))

    async def receive(self) -> Message:
        """See `dcr.seams.Link.receive`."""
        return await self._desk.receive(self._receive)

    def _send(self, message: Message) -> None:
        disk, data = self._run.disk, wire.encode(message)
        match message.header:
            case Join():
                disk.write(self._join, data)
            case Leave():
                self._join.unlink(missing_ok=True)
            case Ack(identity=identity) | Nack(identity=identity):
                folder = self._run.root / "attempts" / _name(identity) / "votes"
                self._votes += 1
                with suppress(FileNotFoundError):  # the attempt was removed: nobody counts its votes
                    disk.write(folder / f"{_file_name(self._ref)}.{self._votes:08d}", data)
            case header:
                raise LocalError(f"a member does not send {type(header).__name__}")

    def _receive(self) -> Message | None:
        head, _ = self._run.ledger._read()
        if head is None:
            return None
        if self._folder is not None:
            message = self._next_of(self._folder, head)
            if message is not None:
                return message
        if head.identity is not None and head.identity != self._head:
            self._head = head.identity
            return Message(Commit(head.identity))
        return self._open(head)

    def _open(self, head: Head) -> Message | None:
        """The newest attempt that is live: not seen before, of the head's term, beyond its version, not given up."""
        floor = head.identity.version if head.identity else -1
        for folder in sorted(
            _attempt_folders(self._run.root / "attempts"), key=lambda path: _order(path.name), reverse=True
        ):
            version, term, _ = _order(folder.name)
            if folder.name == self._last or version <= floor:
                return None
            if term != head.term or (folder / "abort").exists():
                continue
            try:
                message = _load(folder / "open")
            except IncompleteError:
                continue  # it is being made
            except WireError:
                self._last = folder.name
                raise
            self._last = folder.name
            assert isinstance(message.header, Open)
            self._folder, self._seen, self._opened = folder, set(), message.header.identity
            self._waiting.clear()
            return message
        return None

    def _wait_over(self, folder: Path) -> Message:
        """The next message that waits in the attempt's folder; or its end, if that has come meanwhile."""
        try:
            return _load(self._waiting.popleft())
        except IncompleteError:
            if not (folder / "abort").exists():
                raise
            self._waiting.clear()
            self._folder = None
            return _load(folder / "abort")

    def _next_of(self, folder: Path, head: Head) -> Message | None:
        """What is new of the attempt that was opened: chunks in order, the seal behind them, or its end."""
        assert self._opened is not None
        if self._waiting:
            return self._wait_over(folder)
        present = {path.name: path for path in _listed(folder)}
        news = [present[name] for name in sorted(present) if name.endswith(".chunk")]
        news += [present[name] for name in present if name == "seal"]
        self._waiting.extend(path for path in news if path not in self._seen)
        self._seen.update(news)
        if self._waiting:
            return self._wait_over(folder)
        if "abort" in present:
            self._folder = None
            return _load(present["abort"])
        if head.term > self._opened.term and head.identity != self._opened:
            self._folder = None
            return Message(Abort(self._opened, f"a publisher of term {head.term} has taken over"))
        if not present and folder / "seal" not in self._seen:
            self._folder = None
            return Message(Abort(self._opened, "it was removed"))
        return None


def _chunks(folder: Path) -> list[Path]:
    return [path for path in _listed(folder) if path.suffix == ".chunk"]


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


class _Desk:
    """What a link does in threads, one thing after another, and what it has found and not handed out.

    A thread goes on when its waiter is cancelled by `task.cancel()`: what it finds is kept for the next one.
    """

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._lock = threading.Lock()
        self._found: deque[Message] = deque()
        self._closed = False

    async def send(self, send: Callable[[], None]) -> None:
        await anyio.to_thread.run_sync(self._alone, send)

    async def receive(self, look: Callable[[], Message | None]) -> Message:
        """The next message; looks again every poll_s."""
        while not self._found:
            if self._closed:
                raise IncompleteError("the link is closed")
            await anyio.to_thread.run_sync(self._alone, partial(self._look, look))
            if not self._found:
                await anyio.sleep(self._poll_s)
        return self._found.popleft()

    def close(self) -> None:
        self._closed = True

    def _alone(self, work: Callable[[], None]) -> None:
        with self._lock:
            work()

    def _look(self, look: Callable[[], Message | None]) -> None:
        if not self._found and (message := look()) is not None:
            self._found.append(message)


def _name(identity: Identity) -> str:
    return f"{identity.version:012d}.{identity.term:06d}.{identity.attempt:04d}"


def _order(name: str) -> tuple[int, int, int]:
    version, term, attempt = name.split(".")
    return int(version), int(term), int(attempt)


def _file_name(ref: MemberRef) -> str:
    return f"{quote(ref.member, safe='')}.{quote(ref.incarnation, safe='')}"


def _listed(folder: Path) -> list[Path]:
    """What is in a folder under its final name; nothing if the folder is gone."""
    try:
        return [path for path in folder.iterdir() if path.suffix != TEMPORARY]
    except FileNotFoundError:
        return []


def _attempt_folders(folder: Path) -> list[Path]:
    """The attempts in a folder; what somebody else has put there is not one."""
    return [path for path in _listed(folder) if ATTEMPT.fullmatch(path.name)]


def _load(path: Path) -> Message:
    """The message in a file.

    Raises:
        IncompleteError: the file is missing or cut short. WireError: it is not a message.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise IncompleteError(f"{path} is missing: it was removed, or never written") from None
    except IsADirectoryError:
        raise WireError(f"{path} is a directory: somebody else has put it there") from None
    try:
        return wire.parse(data)
    except RemoteError as error:
        error.add_note(f"in {path}")
        raise
