"""What only the local transport promises: which directories it takes, what is flushed, and whose clock counts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import pytest

from dcr.protocol.wire import Abort, Head, Join, MemberRef, Message
from dcr.runs import StoredRun
from dcr.testing.conformance.scene import attempt, identity, send_all
from dcr.transports import local
from dcr.transports.local import FileObjects, LocalTransport

REF = MemberRef("engine", "life")


@pytest.fixture
async def run(tmp_path: Path) -> StoredRun:
    async with LocalTransport(poll_s=0.001, stale_s=5.0, fsync=False).open(f"local://{tmp_path}") as run:
        await run.ledger.swap(Head("run", 1, None, b""), b"0")
        return run


def files_of(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


# ---------------------------------------------------------------------- files


async def test_what_is_no_hint_is_flushed_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[bool] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        flushed.append((tmp_path / "heads" / "1").exists())
        real(descriptor)

    monkeypatch.setattr(local.os, "fsync", fsync)
    objects = FileObjects(tmp_path, fsync=True)
    for absent in (True, False):
        flushed.clear()
        (tmp_path / "heads" / "1").unlink(missing_ok=True)
        await objects.put("heads/1", [b"x"], absent=absent)
        assert flushed == [False, True], "the file before it has its name, and the name after that"
    flushed.clear()
    await objects.put("live/bell", [b"x"])
    assert not flushed


async def test_nothing_temporary_is_left(tmp_path: Path) -> None:
    objects = FileObjects(tmp_path, fsync=False)
    for absent in (False, True, True):
        await objects.put("a/b", [b"x"], absent=absent)
    assert files_of(tmp_path) == ["b"]


async def test_a_put_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = FileObjects(tmp_path, fsync=False)
    await objects.put("a/b", [b"before"])

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local.os, "utime", full)
    with pytest.raises(OSError, match="No space left"):
        await objects.put("a/b", [b"after"])
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "a").iterdir()] == [("b", b"before")]


async def test_what_a_dead_process_was_writing_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f"of-another.3{local.TEMPORARY}").write_bytes(b"half")
    assert await FileObjects(tmp_path, fsync=False).list("a/") == []


async def test_an_attempt_that_was_given_up_leaves_no_chunks(tmp_path: Path, run: StoredRun) -> None:
    async with run.sender() as sender:
        await send_all(sender, attempt(identity()))
        await sender.send(Message(Abort(identity(), "for a reason")))
    assert not files_of(tmp_path / "packs")


# ---------------------------------------------------------------------- directories


@pytest.fixture
def readable() -> Iterator[Path]:
    """A directory that may be read and not written; for root, whom nothing is forbidden, as another user."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        if root := os.geteuid() == 0:
            os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            if root:
                os.seteuid(0)
            Path(folder).chmod(0o755)


@pytest.fixture
def shared(readable: Path) -> Path:
    """The same, with the folders of a run in it."""
    user = os.geteuid()
    os.seteuid(os.getuid())
    readable.chmod(0o755)
    for name in ("opens", "live"):
        (readable / name).mkdir()
    readable.chmod(0o555)
    os.seteuid(user)
    return readable


async def require_noted(root: Path, kind: type[OSError]) -> None:
    async with LocalTransport().open(f"local://{root}") as run:
        for side in (run.sender, lambda: run.member(REF)):
            with pytest.raises(kind) as error:
                async with side():
                    pass
            (note,) = error.value.__notes__
            assert note.startswith(f"local://{root} is where the publisher and every member of the run write")


async def test_a_directory_that_may_not_be_made_is_refused_with_who_writes_there(readable: Path) -> None:
    await require_noted(readable / "run", PermissionError)


async def test_a_directory_that_may_not_be_written_is_refused_at_once(shared: Path) -> None:
    await require_noted(shared, PermissionError)


async def test_a_file_in_the_place_of_a_directory_is_refused_with_who_writes_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    await require_noted(tmp_path / "file" / "run", NotADirectoryError)


# ---------------------------------------------------------------------- clocks


async def test_who_lives_is_judged_by_no_clock_of_another_host(run: StoredRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """This host's clock is an hour ahead of the one that stamped the files."""
    async with run.member(REF) as link:
        await link.send(Message(Join(REF, None)))
        real, real_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: real() + 3600)
        monkeypatch.setattr(time, "time_ns", lambda: real_ns() + 3600 * 10**9)
        async with run.sender() as sender:
            with anyio.fail_after(5):
                assert (await sender.receive()).header == Join(REF, None)
            assert await run.members() == [Join(REF, None)]
