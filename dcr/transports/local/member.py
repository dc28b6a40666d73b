"""A member's side of a run."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from dcr import wire
from dcr.errors import IncompleteError, LocalError, WireError
from dcr.transports.local.desk import Desk
from dcr.transports.local.files import file_name, folder_name, listed, load, order, pointer_name, read_name
from dcr.wire import Abort, Ack, Commit, Head, Identity, Join, Leave, MemberRef, Message, Nack, Open

if TYPE_CHECKING:
    from dcr.transports.local import LocalRun


class MemberLink:
    """A member's side. It delivers live attempts of the head's term, and a Commit whenever the head moves."""

    def __init__(self, run: LocalRun, ref: MemberRef) -> None:
        self._run = run
        self._desk = Desk(run.poll_s)
        self._ref = ref
        self._join = run.root / "members" / file_name(ref)
        self._folder: Path | None = None
        self._opened: Identity | None = None
        self._last = ""
        self._waiting: deque[Path] = deque()
        self._seen: set[Path] = set()
        self._head: Identity | None = None
        self._votes = 0
        self._term = -1

    async def __aenter__(self) -> MemberLink:
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
        disk, data = self._run.disk, wire.pieces(message)
        match message.header:
            case Join():
                disk.write(self._join, *data)
            case Leave():
                self._join.unlink(missing_ok=True)
            case Ack(identity=identity) | Nack(identity=identity):
                folder = self._run.root / "attempts" / folder_name(identity) / "votes"
                self._votes += 1
                with suppress(FileNotFoundError):  # the attempt was removed: nobody counts its votes
                    disk.write(folder / f"{file_name(self._ref)}.{self._votes:08d}", *data)
            case header:
                raise LocalError(f"a member sends Join, Leave, Ack or Nack, not {type(header).__name__}")

    def _receive(self) -> Message | None:
        head, _ = self._run.ledger.look()
        if head is None:
            return None
        if head.term != self._term:  # a new publisher knows who lives by what changes, not by what clocks say
            self._term = head.term
            with suppress(OSError):
                os.utime(self._join)
        if self._folder is not None:
            message = self._next_of(self._folder, head)
            if message is not None:
                return message
        if head.identity is not None and head.identity != self._head:
            self._head = head.identity
            return Message(Commit(head.identity))
        return self._open(head)

    def _open(self, head: Head) -> Message | None:
        """The attempt that the head's publisher has opened last, if it is live: not seen before, and not given up.

        Its name is looked up, not listed: a run may keep thousands of attempts, and this is asked at every poll.
        """
        floor = head.identity.version if head.identity else -1
        name = read_name(self._run.root / pointer_name(head.term))
        if name is None or name == self._last:
            return None
        folder = self._run.root / "attempts" / name
        version, term, _ = order(name)
        if version <= floor or term != head.term or (folder / "abort").exists():
            return None
        try:
            message = load(folder / "open")
        except IncompleteError:
            return None  # it was removed
        except WireError:
            self._last = name
            raise
        self._last = name
        assert isinstance(message.header, Open)
        self._folder, self._seen, self._opened = folder, set(), message.header.identity
        self._waiting.clear()
        return message

    def _wait_over(self, folder: Path) -> Message:
        """The next message that waits in the attempt's folder; or its end, if that has come meanwhile."""
        try:
            return load(self._waiting.popleft())
        except IncompleteError:
            if not (folder / "abort").exists():
                raise
            self._waiting.clear()
            self._folder = None
            return load(folder / "abort")

    def _next_of(self, folder: Path, head: Head) -> Message | None:
        """What is new of the attempt that was opened: chunks in order, the seal behind them, or its end."""
        assert self._opened is not None
        if self._waiting:
            return self._wait_over(folder)
        present = {path.name: path for path in listed(folder)}
        if "seal" in present and present["seal"] not in self._seen:
            present |= {path.name: path for path in listed(folder)}  # one made beside a write may miss some before it
        news = [present[name] for name in sorted(present) if name.endswith(".chunk")]
        news += [present[name] for name in present if name == "seal"]
        self._waiting.extend(path for path in news if path not in self._seen)
        self._seen.update(news)
        if self._waiting:
            return self._wait_over(folder)
        if "abort" in present:
            self._folder = None
            return load(present["abort"])
        if head.term > self._opened.term and head.identity != self._opened:
            self._folder = None
            return Message(Abort(self._opened, f"a publisher of term {head.term} has taken over"))
        if not present and folder / "seal" not in self._seen:
            self._folder = None
            return Message(Abort(self._opened, "it was removed"))
        return None
