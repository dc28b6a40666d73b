"""The publisher's side of a run."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio.to_thread

from dcr import wire
from dcr.errors import IncompleteError, LocalError
from dcr.transports.local.desk import Desk
from dcr.transports.local.files import chunk_name, clock, folder_name, listed, load, pointer_name, stamp
from dcr.wire import Abort, Chunk, Commit, Identity, Join, Leave, Message, Open, Seal

if TYPE_CHECKING:
    from dcr.transports.local import LocalRun


class SenderLink:
    """The publisher's side."""

    def __init__(self, run: LocalRun) -> None:
        self._run = run
        self._desk = Desk(run.poll_s)
        self._members = run.root / "members"
        self._folder: Path | None = None
        self._chunks = 0
        self._folders: deque[Path] = deque(maxlen=8)  # of the attempts that members may still answer
        self._seen: set[tuple[Path, int, int]] = set()
        self._joined: dict[Path, tuple[int, Message]] = {}
        self._beats: dict[Path, tuple[int, float]] = {}

    async def __aenter__(self) -> SenderLink:
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
        disk, data = self._run.disk, wire.pieces(message)
        match message.header:
            case Open(identity=identity):
                self._folder = self._run.root / "attempts" / folder_name(identity)
                (self._folder / "votes").mkdir(parents=True)
                self._chunks = 0
                self._folders.append(self._folder)
                disk.write(self._folder / "open", *data)
                disk.write(self._run.root / pointer_name(identity.term), self._folder.name.encode())
            case Chunk(identity=identity):
                disk.write(self._attempt(identity) / chunk_name(0, self._chunks), *data)
                self._chunks += 1
            case Seal(identity=identity):
                folder = self._attempt(identity)
                disk.sync(*folder.iterdir(), folder, folder.parent)
                disk.write(folder / "seal", *data, flush=True)
                disk.sync(folder)
            case Abort(identity=identity):
                self._abort(self._attempt(identity), data)
            case Commit():
                pass  # members look at the head itself
            case header:
                raise LocalError(f"a publisher sends Open, Chunk, Seal, Abort or Commit, not {type(header).__name__}")

    def _abort(self, folder: Path, data: tuple[bytes, bytes]) -> None:
        """Say that it is given up, and remove its chunks; in this order, unless the disk is full."""
        try:
            self._run.disk.write(folder / "abort", *data)
        except OSError:
            self._remove_chunks(folder)
            self._run.disk.write(folder / "abort", *data)
        self._remove_chunks(folder)

    def _remove_chunks(self, folder: Path) -> None:
        for path in folder.glob("*.chunk"):
            path.unlink(missing_ok=True)

    def _attempt(self, identity: Identity) -> Path:
        if self._folder is None or self._folder.name != folder_name(identity):
            raise LocalError(f"{identity} has not been opened on this link; send its Open first")
        return self._folder

    def _receive(self) -> Message | None:
        now = {path for path in listed(self._members) if self._alive(path)}
        votes = [path for folder in list(self._folders) for path in listed(folder / "votes")]
        keys = {path: (path, *stamp(path)) for path in (*now, *votes)}
        self._seen &= set(keys.values())
        for path, key in sorted(keys.items()):
            if key in self._seen:
                continue
            self._seen.add(key)
            try:
                message = load(path)
            except IncompleteError:
                continue  # the member left in this very moment
            if isinstance(message.header, Join):
                said = key[1], message  # a Join that is written anew is news, a sign of life is not
                if self._joined.get(path) == said:
                    continue
                self._joined[path] = said
            return message
        for path in self._joined.keys() - now:
            header = self._joined.pop(path)[1].header
            assert isinstance(header, Join)
            return Message(Leave(header.member))
        return None

    def _alive(self, path: Path) -> bool:
        """A member touches its file while it lives; what counts is that the time changes, not what it says."""
        try:
            stamp = path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        now_s = time.monotonic()
        if path in self._beats:
            beat, since_s = self._beats[path]
            since_s = since_s if beat == stamp else now_s
        else:  # it may have been there before this publisher
            since_s = now_s - max(0.0, clock(self._members) - stamp / 1e9)
        self._beats[path] = stamp, since_s
        return now_s - since_s < self._run.stale_s


class WriterLink:
    """A further rank of the publisher: writes chunks of attempts that the sender has opened, each flushed at once."""

    def __init__(self, run: LocalRun, part: tuple[int, int]) -> None:
        if not 0 < part[0] < part[1]:
            raise LocalError(f"expected a writer from 1 to {part[1] - 1}, found {part[0]}: the first one is the sender")
        self._run = run
        self._writer = part[0]
        self._desk = Desk(run.poll_s)
        self._folder: Path | None = None
        self._chunks = 0

    async def __aenter__(self) -> WriterLink:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        self._desk.close()

    async def send(self, message: Message) -> None:
        """See `dcr.seams.Writer.send`."""
        await self._desk.send(partial(self._send, message))

    def _send(self, message: Message) -> None:
        if not isinstance(message.header, Chunk):
            raise LocalError(f"a writer sends chunks only, not {type(message.header).__name__}")
        identity = message.header.identity
        folder = self._run.root / "attempts" / folder_name(identity)
        if folder != self._folder:
            if not (folder / "open").exists():
                raise LocalError(f"{identity} has not been opened by the run's sender, or was removed")
            self._folder, self._chunks = folder, 0
        self._run.disk.write(folder / chunk_name(self._writer, self._chunks), *wire.pieces(message), flush=True)
        self._chunks += 1
