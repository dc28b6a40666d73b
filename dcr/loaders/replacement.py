"""Files that will replace others: written beside them, and given the permissions and the owner of what they replace."""

from __future__ import annotations

import mmap
import os
import shutil
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Octets = NDArray[np.uint8]


class Copy:
    """A copy of a file that is being changed, as a shared memory map; private to its owner until it is closed."""

    def __init__(self, source: Path, target: Path) -> None:
        self.target = target
        self._source = source
        self._descriptor = create(target)
        try:
            shutil.copyfile(source, target)
            self._map = mmap.mmap(self._descriptor, 0)
        except BaseException:
            self.drop()
            raise
        self.octets: Octets = np.frombuffer(self._map, np.uint8)

    def close(self, fsync: bool) -> None:
        """Everything is in the file, which is what it replaces to others; and on the disk if asked."""
        if fsync:
            self._map.flush()
        descriptor, self._descriptor = self._descriptor, -1
        finish(descriptor, self._source, fsync)

    def move(self, name: Path) -> None:
        """Rename it: over what it replaces, or to where an index will look for it."""
        self.target = self.target.replace(name)

    def drop(self) -> None:
        """Nobody wants it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.target.unlink(missing_ok=True)


def write(source: Path, target: Path, data: bytes, *, fsync: bool) -> None:
    """Write what will replace `source` beside it, as `target`."""
    descriptor = create(target)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(data)
    except BaseException:
        os.close(descriptor)
        target.unlink(missing_ok=True)
        raise
    finish(descriptor, source, fsync)


def create(target: Path) -> int:
    """Create a file that only this user can open, whatever the umask; its descriptor."""
    return os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def finish(descriptor: int, source: Path, fsync: bool) -> None:
    """Give a file that is complete the permissions of `source`, and its owner and group where the system lets us."""
    try:
        _adopt(descriptor, source.stat())
        if fsync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _adopt(descriptor: int, like: os.stat_result) -> None:
    mode = stat.S_IMODE(like.st_mode) & 0o777
    if not _chown(descriptor, like.st_uid, like.st_gid) and not _chown(descriptor, -1, like.st_gid):
        mode = mode & 0o707 | (mode & 0o007) << 3  # another group than the one that was let in: it gets what all get
    if mode != stat.S_IMODE(os.fstat(descriptor).st_mode):  # where a mount gives all files one mode, it stays
        os.fchmod(descriptor, mode)


def _chown(descriptor: int, user: int, group: int) -> bool:
    now = os.fstat(descriptor)
    if (now.st_uid if user < 0 else user, group) == (now.st_uid, now.st_gid):
        return True
    try:
        os.fchown(descriptor, user, group)
    except OSError:  # only a privileged process may give files away, and no file system has to know owners
        return False
    return True
