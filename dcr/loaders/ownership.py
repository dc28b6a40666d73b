"""Who may write in a checkpoint directory: one process at a time, while everybody may read.

Two things say who it is. A lock of the operating system (flock) on a file in the directory ends with the process that
took it, however that ends, so that a restart finds nothing in its way. The record in that file names the owner by host,
process and nonce: where hosts do not share locks, or somebody removed the file, an owner learns from it that the
directory is another's by now, before it puts a file in place.
"""

from __future__ import annotations

import fcntl
import os
import socket
import uuid
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from dcr.errors import LocalError, StateError, StorageRebound

LOCK = ".dcr.lock"
MAX_RECORD_BYTES = 4096


class Owner(msgspec.Struct, frozen=True):
    """Who writes in a directory; since: UTC; nonce: of this ownership and no other."""

    host: str
    process: int
    since: str
    nonce: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host} (since {self.since})"


class Ownership:
    """The sole right to write in a directory, until `release`, the end of its process, or the end of this object."""

    def __init__(self, path: Path, descriptor: int, owner: Owner) -> None:
        self.owner = owner
        self._path = path
        self._descriptor = descriptor
        self._finalizer = weakref.finalize(self, _release, path, descriptor, owner)
        os.register_at_fork(after_in_child=_leave_to_parent(weakref.ref(self)))

    @property
    def is_here(self) -> bool:
        """Whether this process is the owner, not a child that was forked from it."""
        return os.getpid() == self.owner.process

    def require_here(self) -> None:
        """Find that this process is the owner.

        Raises:
            StateError: it is a child that was forked from the owner.
        """
        if not self.is_here:
            raise StateError(
                f"{self._path.parent} is written by {self.owner}, and this is process {os.getpid()}, forked from it; "
                "make the loader in the process that installs"
            )

    def require(self) -> None:
        """Find that the directory is this process's still.

        Raises:
            StateError: as `require_here`. StorageRebound: somebody else took the directory.
        """
        self.require_here()
        if (now := _read(self._path)) != self.owner:
            raise StorageRebound(
                f"{self._path.parent} was taken over by {now or 'somebody who removed its lock'}: nothing more is "
                "written here; end one of the two, then subscribe anew"
            )

    def release(self) -> None:
        """Let others write in the directory."""
        self._finalizer()

    def close_in_child(self) -> None:
        """Close a forked child's share of the lock, which would outlive the parent; the parent's stays."""
        os.close(self._descriptor)


def claim(folder: Path) -> Ownership:
    """Take the sole right to write in a directory.

    Raises:
        StateError: another process, or another loader of this one, has it. LocalError: nobody can have it here.
    """
    path = folder / LOCK
    while True:
        descriptor = _open(path)
        try:
            lock(path, descriptor)
            if _is_at(path, descriptor):  # else its last owner removed it before it was locked here
                owner = _this_process()
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, msgspec.json.encode(owner) + b"\n", 0)
                return Ownership(path, descriptor, owner)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise LocalError(
            f"expected a checkpoint directory that this process can write in, found {path.parent}: {error}; "
            f"if {path.name} is another user's whose process is gone, remove it"
        ) from error


def lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StateError(_refusal(path, _read(path))) from None
    except OSError as error:
        raise LocalError(
            f"{path} cannot be locked ({error}), and without a lock two processes could mix two versions; mount its "
            "file system with locks, or keep the checkpoint on another one"
        ) from error


def _refusal(path: Path, owner: Owner | None) -> str:
    if owner is not None and (owner.host, owner.process) == (socket.gethostname(), os.getpid()):
        return (
            f"{path.parent} is being written by another loader of this process (since {owner.since}); leave the "
            "subscriber that uses that one, or call its release(), before binding a second one"
        )
    return (
        f"{path.parent} is being written by {owner or 'another process'}, and a second writer would mix two versions; "
        "give each a directory of its own, or end that process: its lock ends with it. If it is gone already, a file "
        f"server may take minutes to notice; where you are sure of it, remove {path}"
    )


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _this_process() -> Owner:
    now = datetime.now(UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
    return Owner(socket.gethostname(), os.getpid(), f"{now} UTC", uuid.uuid4().hex)


def _read(path: Path) -> Owner | None:
    """The owner that a lock file names, if it can be read: a new owner may be about to write it."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(MAX_RECORD_BYTES), type=Owner)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def _release(path: Path, descriptor: int, owner: Owner) -> None:
    if os.getpid() != owner.process:
        return  # a forked child drops its copy of the object; the directory stays its parent's
    if _read(path) == owner:  # removed under the lock: whoever opened it before finds that it is gone, and starts over
        path.unlink(missing_ok=True)
    os.close(descriptor)


def _leave_to_parent(reference: weakref.ref[Ownership]) -> Callable[[], None]:
    def leave() -> None:
        ownership = reference()
        if ownership is not None:
            ownership.close_in_child()

    return leave
