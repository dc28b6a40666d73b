"""The files of a run: how they are named, written and read. Blocking."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from dcr import wire
from dcr.errors import IncompleteError, RemoteError, WireError
from dcr.wire import Identity, MemberRef, Message

TEMPORARY = ".tmp"
ATTEMPT = re.compile(r"\d{12,}\.\d{6,}\.\d{4,}")
CHUNK = re.compile(r"(\d{4,})-\d{8,}\.chunk")


def folder_name(identity: Identity) -> str:
    return f"{identity.version:012d}.{identity.term:06d}.{identity.attempt:04d}"


def pointer_name(term: int) -> str:
    """The file that names the attempt which the publisher of a term has opened last."""
    return f"open.{term:06d}"


def read_name(path: Path) -> str | None:
    """The attempt's name that such a file holds; None if there is none, or something else."""
    try:
        name = path.read_text()
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    return name if ATTEMPT.fullmatch(name) else None


def chunk_name(writer: int, number: int) -> str:
    return f"{writer:04d}-{number:08d}.chunk"


def chunk_names(folder: Path) -> list[str]:
    """The names that the chunks in a folder have if none is missing: each writer numbers its own."""
    writers = Counter(int(found[1]) for path in listed(folder) if (found := CHUNK.fullmatch(path.name)))
    return [chunk_name(writer, number) for writer, count in sorted(writers.items()) for number in range(count)]


def order(name: str) -> tuple[int, int, int]:
    version, term, attempt = name.split(".")
    return int(version), int(term), int(attempt)


def file_name(ref: MemberRef) -> str:
    return f"{quote(ref.member, safe='')}.{quote(ref.incarnation, safe='')}"


def listed(folder: Path) -> list[Path]:
    """What is in a folder under its final name; nothing if the folder is gone."""
    try:
        return [path for path in folder.iterdir() if path.suffix != TEMPORARY]
    except FileNotFoundError:
        return []


def attempt_folders(folder: Path) -> list[Path]:
    """The attempts in a folder; what somebody else has put there is not one."""
    return [path for path in listed(folder) if ATTEMPT.fullmatch(path.name)]


def load(path: Path) -> Message:
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


def stamp(path: Path) -> tuple[int, int]:
    """Inode and time of change; zeros if it is gone. An inode's number may be used again, so neither says enough."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def clock(folder: Path) -> float:
    """The time in seconds that a folder's file system stamps on what is written now: of its server, if it has one.

    Another host's clock says nothing about a file's age. Where nothing can be written, this host's has to do.
    """
    probe = folder / f"clock.{os.getpid()}.{threading.get_ident()}{TEMPORARY}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


class Disk:
    """Atomic, and where asked durable, file writes. Blocking."""

    def __init__(self, fsync: bool) -> None:
        self._fsync = fsync

    def make(self, root: Path) -> None:
        """The folders of a run, where they are missing.

        Raises:
            OSError: one cannot be made, or not be written in; a note says who needs it.
        """
        folders = root / "attempts", root / "members"
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            for folder in (root, *folders):
                if not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        except OSError as error:
            error.add_note(
                f"local://{root} is where the publisher and every member of the run write: choose a directory that "
                "each of them can make, or write in"
            )
            raise

    def write(self, path: Path, *data: bytes, flush: bool = False) -> None:
        """Make a file appear under its name with all of its bytes, which are given in pieces."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
        try:
            with temporary.open("wb") as file:
                file.writelines(data)
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
