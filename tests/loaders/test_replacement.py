"""A file that replaces another one in a checkpoint directory is to everybody what that one was."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import WEIGHTS, bound, install, load, new_version, save

from dcr.loaders import replacement
from dcr.loaders.checkpoint import entries_of
from dcr.loaders.ownership import LOCK
from dcr.loaders.replacement import ACL
from dcr.stages import apply


@pytest.fixture(params=[1, 2], ids=["single file", "sharded"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    save(tmp_path, WEIGHTS, request.param)
    return tmp_path


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=lambda mask: f"umask {mask:03o}")
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def files(folder: Path) -> list[Path]:
    """Those that readers see: the shards in use, and the index."""
    shards = {folder / entry.file for entry in entries_of(folder)}
    return sorted(shards | set(folder.glob("*.index.json")))


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in files(folder)}


def refit(folder: Path) -> None:
    before = {path.stat().st_ino for path in files(folder)}
    loader = bound(folder)
    install(loader, new_version(loader, 1))
    loader.release()
    assert not before & {path.stat().st_ino for path in files(folder)}


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444], ids=oct)
def test_its_mode_stays_whatever_the_umask(folder: Path, umask: int, mode: int) -> None:
    for path in files(folder):
        path.chmod(mode)
    refit(folder)
    assert modes(folder) == {mode}


def test_nobody_else_can_read_it_before_it_is_complete(folder: Path, umask: int) -> None:
    for path in files(folder):
        path.chmod(0o644)
    loader = bound(folder)
    for ready in new_version(loader, 1):
        loader.install(ready)
    unfinished = [path for path in folder.iterdir() if path.name.endswith(".dcr")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in unfinished} == {0o600}


def test_the_lock_is_made_as_the_umask_says(folder: Path, umask: int) -> None:
    loader = bound(folder)
    assert stat.S_IMODE((folder / LOCK).stat().st_mode) == 0o666 & ~umask
    loader.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_its_owner_and_its_group_stay(folder: Path) -> None:
    for path in files(folder):
        os.chown(path, 1234, 2345)
        path.chmod(0o640)
    refit(folder)
    assert {(path.stat().st_uid, path.stat().st_gid) for path in files(folder)} == {(1234, 2345)}
    assert modes(folder) == {0o640}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize(("mode", "kept"), [(0o640, 0o600), (0o664, 0o644), (0o644, 0o644)], ids=oct)
def test_another_group_is_not_let_in(folder: Path, mode: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither the owner nor the group can be kept, the new group gets what everybody gets."""
    for path in files(folder):
        os.chown(path, 1234, 2345)
        path.chmod(mode)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    refit(folder)
    assert modes(folder) == {kept}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_group_stays_where_the_owner_cannot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in files(folder):
        os.chown(path, 1234, 2345)
        path.chmod(0o640)
    change = os.fchown

    def refuse(descriptor: int, user: int, group: int) -> None:
        if user >= 0:
            raise PermissionError(1, "Operation not permitted")
        change(descriptor, user, group)

    monkeypatch.setattr(os, "fchown", refuse)
    refit(folder)
    assert {path.stat().st_gid for path in files(folder)} == {2345}
    assert modes(folder) == {0o640}


# ---------------------------------------------------------------------- access control lists, and what users attach

USER, GROUP, MASK, OTHER, NAMED = 0x01, 0x04, 0x10, 0x20, 0x02
NOBODY, DEFAULT = 0xFFFFFFFF, "system.posix_acl_default"


def acl(*entries: tuple[int, int, int]) -> bytes:
    """An access control list as Linux keeps it; entries: (tag, permissions, id)."""
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


# The owning group is not let in, the user 1234 is; the bits of `mode` where a group's are show the mask: 0o660.
ALICE = acl((USER, 6, NOBODY), (NAMED, 6, 1234), (GROUP, 0, NOBODY), (MASK, 6, NOBODY), (OTHER, 0, NOBODY))


@pytest.fixture
def attributes(folder: Path) -> None:
    try:
        os.setxattr(folder, "user.dcr", b"")
        os.setxattr(folder, ACL, os.getxattr(folder, ACL) if ACL in os.listxattr(folder) else ALICE)
        os.removexattr(folder, ACL)
    except OSError as error:
        pytest.skip(f"the file system here has no lists: {error}")


@pytest.mark.usefixtures("attributes")
def test_its_access_control_list_and_what_users_attached_stay(folder: Path) -> None:
    for path in files(folder):
        os.setxattr(path, ACL, ALICE)
        os.setxattr(path, "user.origin", b"hub")
    refit(folder)
    assert {os.getxattr(path, ACL) for path in files(folder)} == {ALICE}
    assert {os.getxattr(path, "user.origin") for path in files(folder)} == {b"hub"}
    assert modes(folder) == {0o660}


@pytest.mark.usefixtures("attributes")
def test_a_list_that_cannot_be_kept_lets_nobody_in_who_was_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in files(folder):
        os.setxattr(path, ACL, ALICE)

    def refused(*given: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "on purpose")

    monkeypatch.setattr(os, "setxattr", refused)
    refit(folder)
    assert modes(folder) == {0o600}


@pytest.mark.usefixtures("attributes")
def test_a_list_for_another_group_lets_it_in_as_all_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_in = acl((USER, 6, NOBODY), (NAMED, 6, 1234), (GROUP, 6, NOBODY), (MASK, 6, NOBODY), (OTHER, 4, NOBODY))
    for path in files(folder):
        os.setxattr(path, ACL, let_in)
    monkeypatch.setattr(replacement, "_chown", lambda *given: False)
    refit(folder)
    wanted = acl((USER, 6, NOBODY), (NAMED, 6, 1234), (GROUP, 4, NOBODY), (MASK, 6, NOBODY), (OTHER, 4, NOBODY))
    assert {os.getxattr(path, ACL) for path in files(folder)} == {wanted}


@pytest.mark.usefixtures("attributes")
def test_a_file_without_a_list_gets_none_from_its_directory(folder: Path) -> None:
    for path in files(folder):
        path.chmod(0o640)
    os.setxattr(folder, DEFAULT, ALICE)
    refit(folder)
    assert not [path for path in files(folder) if ACL in os.listxattr(path)]
    assert modes(folder) == {0o640}


def test_a_link_to_a_file_elsewhere_is_replaced_and_that_file_is_not(tmp_path: Path) -> None:
    """As a hub's cache lays checkpoints out."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    save(blobs, WEIGHTS, 2)
    snapshot.mkdir()
    for path in blobs.iterdir():
        path.chmod(0o640)
        (snapshot / path.name).symlink_to(path)
    before = load(blobs)
    loader = bound(snapshot)
    install(loader, new_version(loader, 1))
    assert load(blobs) == before
    assert load(snapshot) != before
    assert modes(snapshot) == {0o640}


def test_a_full_disk_leaves_the_version_before_and_poisons_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at the last file that a version touches; undoing it takes no space."""
    loader, before = bound(folder), load(folder)
    names = sorted(path.name for path in folder.iterdir())
    readies = new_version(loader, 1)
    left = iter(range(len({entry.file for entry in entries_of(folder)}) - 1))
    copy = shutil.copyfile

    def fill(source: Path, target: Path) -> None:
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", fill)
    with pytest.raises(OSError, match="No space left"):
        apply.install(loader, readies, loader.finalize)
    assert (load(folder), sorted(path.name for path in folder.iterdir())) == (before, names)
    monkeypatch.undo()
    apply.install(loader, readies, loader.finalize)
    assert load(folder) != before
