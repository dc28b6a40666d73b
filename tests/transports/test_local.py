"""What only the local transport promises: which files are news, and who takes part."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import anyio
import pytest

from dcr.errors import WireError
from dcr.transports.local import LocalRun, LocalTransport, files, member
from dcr.wire import Chunk, ChunkRef, Head, Identity, Join, MemberRef, Message, Open, Seal

FIRST = Identity("run", 1, 1, 1)
REF = MemberRef("engine", "life")


@pytest.fixture
async def run(tmp_path: Path) -> LocalRun:
    async with LocalTransport(poll_s=0.001, stale_s=5.0, fsync=False).open(f"local://{tmp_path}") as run:
        await run.ledger.swap(Head("run", 1, None, b""), b"")
        return run


def chunk(frame: int) -> Message:
    return Message(Chunk(FIRST, frame, "raw", 0, 1, b"d" * 32, b"c" * 16), b"body")


async def test_a_seal_comes_last_though_a_chunk_before_it_was_not_listed_yet(run: LocalRun) -> None:
    hidden = [True]

    def listed(folder: Path) -> list[Path]:
        found = real(folder)
        if any(path.name == "seal" for path in found) and hidden:  # the list was begun before the chunk was written
            hidden.clear()
            return [path for path in found if not path.name.endswith(".chunk")]
        return found

    real = member.listed
    with mock.patch.object(member, "listed", listed):
        async with run.sender() as sender, run.member(REF) as link:
            await sender.send(Message(Open(FIRST, None, b"layout", ())))
            refs = tuple(ChunkRef(frame, b"d" * 32, b"c" * 16, 1, 4) for frame in (0, 1))
            for frame in (0, 1):
                await sender.send(chunk(frame))
            await sender.send(Message(Seal(FIRST, None, refs, b"", b"")))
            kinds = [type((await link.receive()).header).__name__ for _ in range(4)]
    assert kinds == ["Open", "Chunk", "Chunk", "Seal"]


async def test_an_opening_that_is_no_message_is_told_once_and_the_next_attempt_is_seen(run: LocalRun) -> None:
    second = Identity("run", 1, 2, 1)
    async with run.sender() as sender, run.member(REF) as link:
        await sender.send(Message(Open(FIRST, None, b"layout", ())))
        opening = run.root / "attempts" / files.folder_name(FIRST) / "open"
        opening.write_bytes(opening.read_bytes().replace(b"open", b"oxen"))
        with anyio.fail_after(5), pytest.raises(WireError):
            await link.receive()
        await sender.send(Message(Open(second, None, b"layout", ())))
        with anyio.fail_after(5):
            assert (await link.receive()).header == Open(second, None, b"layout", ())


@pytest.mark.parametrize("name", [b"", b"../../elsewhere", b"\xff", b"000000000001.000001"])
async def test_a_pointer_that_names_no_attempt_is_no_news(run: LocalRun, name: bytes) -> None:
    (run.root / files.pointer_name(1)).write_bytes(name)
    async with run.sender() as sender, run.member(REF) as link:
        await sender.send(Message(Open(FIRST, None, b"layout", ())))
        with anyio.fail_after(5):
            assert (await link.receive()).header == Open(FIRST, None, b"layout", ())


async def _joins(sender: Any) -> list[Identity | None]:
    """What all Joins that are there now say."""
    held = []
    with anyio.move_on_after(0.05):
        while True:
            header = (await sender.receive()).header
            assert isinstance(header, Join)
            held.append(header.holds)
    return held


async def test_a_join_that_is_written_anew_is_news_though_its_inode_has_the_old_number(run: LocalRun) -> None:
    async with run.sender() as sender, run.member(REF) as link:
        await link.send(Message(Join(REF, None)))
        assert await _joins(sender) == [None]
        path = run.root / "members" / files.file_name(REF)
        before = path.stat()
        await link.send(Message(Join(REF, FIRST)))
        stamp = before.st_ino, path.stat().st_mtime_ns
        with mock.patch("dcr.transports.local.sender.stamp", return_value=stamp):
            assert await _joins(sender) == [FIRST]


async def test_a_sign_of_life_is_no_news(run: LocalRun) -> None:
    async with run.sender() as sender, run.member(REF) as link:
        await link.send(Message(Join(REF, None)))
        assert await _joins(sender) == [None]
        os.utime(run.root / "members" / files.file_name(REF))
        assert await _joins(sender) == []


async def test_the_same_join_said_again_is_news(run: LocalRun) -> None:
    async with run.sender() as sender, run.member(REF) as link:
        for _ in range(2):
            await link.send(Message(Join(REF, None)))
            assert await _joins(sender) == [None]


async def test_a_member_without_a_sign_of_life_does_not_take_part(run: LocalRun) -> None:
    async with run.sender(), run.member(REF) as link:
        await link.send(Message(Join(REF, None)))
        assert [join.member for join in await run.members()] == [REF]
        long_ago = time.time() - 60
        os.utime(run.root / "members" / files.file_name(REF), (long_ago, long_ago))
        assert await run.members() == []


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
    for name in ("attempts", "members"):
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


@pytest.fixture
def hour_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host's clock is an hour ahead of the file system's."""
    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: real() + 3600)
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + 3600 * 10**9)


@pytest.mark.usefixtures("hour_off")
async def test_who_lives_is_judged_by_the_clock_that_stamps_the_files(run: LocalRun) -> None:
    async with run.member(REF) as link:
        await link.send(Message(Join(REF, None)))
        async with run.sender() as sender:
            with anyio.fail_after(2):  # less than it takes to the next sign of life
                assert (await sender.receive()).header == Join(REF, None)
            assert await run.members() == [Join(REF, None)]


async def test_a_member_gives_a_sign_of_life_to_a_new_publisher(run: LocalRun) -> None:
    async with run.member(REF) as link:
        await link.send(Message(Join(REF, None)))
        (path,) = (run.root / "members").iterdir()
        os.utime(path, (0, 0))  # as a host stamps it whose clock is far behind
        _, tag = await run.ledger.read()
        await run.ledger.swap(Head("run", 2, None, b""), tag)
        with anyio.move_on_after(0.4):  # less than it takes to the next sign of life
            await link.receive()
        assert path.stat().st_mtime > 0


def test_a_clock_leaves_nothing_behind_and_works_where_nothing_can_be_written(tmp_path: Path) -> None:
    assert abs(files.clock(tmp_path) - time.time()) < 60
    assert list(tmp_path.iterdir()) == []
    assert abs(files.clock(tmp_path / "missing") - time.time()) < 60
