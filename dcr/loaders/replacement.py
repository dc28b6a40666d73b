"""Files that will replace others: written beside them, and given the permissions and the owner of what they replace.

Lists of access control are kept where the file system has them, and so is what users attached (`user.*`).
"""

from __future__ import annotations

import mmap
import os
import shutil
import stat
import struct
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Octets = NDArray[np.uint8]

# Where Linux keeps a POSIX access control list, as in linux/posix_acl_xattr.h; tags of the owning group and the mask.
ACL = "system.posix_acl_access"
GROUP, MASK = 0x04, 0x10


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
        _adopt(descriptor, source)
        if fsync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _adopt(descriptor: int, source: Path) -> None:
    like, attributes = source.stat(), _attributes(source)
    acl = attributes.pop(ACL, b"")
    mode = stat.S_IMODE(like.st_mode) & 0o777
    if acl:  # what its mode shows as the group's are those that its list lets in at most
        mode = mode & 0o707 | (_permissions(acl, GROUP) & _permissions(acl, MASK)) << 3
    if not _chown(descriptor, like.st_uid, like.st_gid) and not _chown(descriptor, -1, like.st_gid):
        mode = mode & 0o707 | (mode & 0o007) << 3  # another group than the one that was let in: it gets what all get
        acl = _with_group(acl, mode & 0o007)
    if ACL in _attributes(descriptor):  # inherited from its directory, by whose names others would be let in
        os.removexattr(descriptor, ACL)
    if mode != stat.S_IMODE(os.fstat(descriptor).st_mode):  # where a mount gives all files one mode, it stays
        os.fchmod(descriptor, mode)
    for name, value in (*attributes.items(), *([(ACL, acl)] if acl else [])):
        with suppress(OSError):  # not every file system has them, nor room for them
            os.setxattr(descriptor, name, value)


def _attributes(file: Path | int) -> dict[str, bytes]:
    """The access control list of a file, and what users have attached to it, where the system has such."""
    if sys.platform != "linux":
        return {}
    try:
        names = [name for name in os.listxattr(file) if name == ACL or name.startswith("user.")]
        return {name: os.getxattr(file, name) for name in names}
    except OSError:
        return {}


def _entries(acl: bytes) -> list[tuple[int, int, int]]:
    """(tag, permissions, id) of each entry; four bytes that say the version come before."""
    return list(struct.iter_unpack("<HHI", acl[4:]))


def _permissions(acl: bytes, tag: int) -> int:
    """What the first entry of a tag lets in; all, if there is none."""
    return next((permissions for found, permissions, _ in _entries(acl) if found == tag), 0o7)


def _with_group(acl: bytes, permissions: int) -> bytes:
    """The same list with other permissions for the owning group."""
    entries = [(tag, permissions if tag == GROUP else given, who) for tag, given, who in _entries(acl)]
    return acl[:4] + b"".join(struct.pack("<HHI", *entry) for entry in entries)


def _chown(descriptor: int, user: int, group: int) -> bool:
    now = os.fstat(descriptor)
    if (now.st_uid if user < 0 else user, group) == (now.st_uid, now.st_gid):
        return True
    try:
        os.fchown(descriptor, user, group)
    except OSError:  # only a privileged process may give files away, and no file system has to know owners
        return False
    return True
