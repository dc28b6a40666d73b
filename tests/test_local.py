"""What only the local transport promises: which files are news, and who takes part."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import pytest

from dcr.transports.local import LocalRun, LocalTransport, member
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
        path = link._join
        before = path.stat()
        await link.send(Message(Join(REF, FIRST)))
        stamp = before.st_ino, path.stat().st_mtime_ns
        with mock.patch("dcr.transports.local.sender.stamp", return_value=stamp):
            assert await _joins(sender) == [FIRST]


async def test_a_sign_of_life_is_no_news(run: LocalRun) -> None:
    async with run.sender() as sender, run.member(REF) as link:
        await link.send(Message(Join(REF, None)))
        assert await _joins(sender) == [None]
        os.utime(link._join)
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
        os.utime(link._join, (long_ago, long_ago))
        assert await run.members() == []
