"""The guarantees for a publisher of several ranks."""

from __future__ import annotations

from functools import partial

import pytest

from dcr.errors import LocalError
from dcr.pipeline import gather_bare
from dcr.protocol.wire import Abort, Chunk, Message
from dcr.testing.conformance.scene import (
    Scene,
    attempt,
    identity,
    on_a_loop,
    require_same,
    send_all,
    shown,
)
from dcr.testing.conformance.setting import Setting

WRITERS = 3


class WriterTests(Setting):
    """Chunks of several writers of one attempt are its chunks, whoever wrote them."""

    @on_a_loop
    async def test_chunks_of_several_writers_meet_in_one_seal(self) -> None:
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            member = await scene.join()
            opened, *chunks, sealed = attempt(identity(), [b"%d" % n for n in range(9)])
            await sender.send(opened)
            await self._write(scene, chunks)
            await sender.send(sealed)
            taken = await scene.take_attempt(member)
            require_same([taken[0], taken[-1]], [opened, sealed], "the ends of an attempt of several writers")
            for writer in range(WRITERS):
                expected = chunks[writer::WRITERS]
                require_same([one for one in taken if one in expected], expected, f"the chunks of writer {writer}")
            assert len(taken) == len(chunks) + 2, f"sent {shown(chunks)}; found {shown(taken)}"

    @on_a_loop
    async def test_a_stored_attempt_holds_the_chunks_of_all_writers(self) -> None:
        async with self.scene() as scene:
            sender, run = await scene.lead()
            if run.store is None:
                pytest.skip("this transport keeps nothing")
            opened, *chunks, sealed = attempt(identity(4), [b"%d" % n for n in range(9)])
            await sender.send(opened)
            await self._write(scene, chunks)
            await sender.send(sealed)
            found = [message async for message in run.store.read(identity(4))]
            require_same([found[0], found[-1]], [opened, sealed], "the ends of a stored attempt of several writers")
            require_same(sorted(found[1:-1], key=_frame), chunks, "the chunks of several writers, by frame")

    @on_a_loop
    async def test_a_writer_takes_chunks_of_open_attempts_and_nothing_else(self) -> None:
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            opened, chunk, *_ = attempt(identity())
            writer = await scene.writer(1, 2)
            with pytest.raises(LocalError):
                await writer.send(chunk)
            await sender.send(opened)
            with pytest.raises(LocalError):
                await writer.send(Message(Abort(identity(), "a writer may not")))
            await writer.send(chunk)
            member = await scene.join()
            found = [await scene.take(member, "an Open"), await scene.take(member, "a writer's chunk")]
            require_same(found, [opened, chunk], "what a writer added")

    async def _write(self, scene: Scene, chunks: list[Message]) -> None:
        """All writers send their chunks at once; each chunk is some writer's."""
        writers = [await scene.writer(number, WRITERS + 1) for number in range(1, WRITERS + 1)]
        shares = [chunks[number::WRITERS] for number in range(WRITERS)]
        await gather_bare([partial(send_all, one, share) for one, share in zip(writers, shares, strict=True)])


def _frame(message: Message) -> int:
    assert isinstance(message.header, Chunk)
    return message.header.frame
