"""The guarantees of calls that are cancelled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import anyio
import pytest

from dcr.protocol.wire import Ack, Message
from dcr.seams import Link
from dcr.testing.conformance.scene import (
    How,
    attempt,
    cancelled_at,
    chunk,
    identity,
    on_a_loop,
    opening,
    refusal,
    require_same,
    sealing,
    send_all,
    shown,
    vote,
)
from dcr.testing.conformance.setting import Setting


class CancellationTests(Setting):
    """A cancelled call leaves a link as it was, or the call done: by a scope, or by `asyncio.Task.cancel`."""

    @pytest.mark.parametrize("how", ["scope", "task"])
    @on_a_loop
    async def test_a_receive_of_a_member_cancelled_at_any_await_loses_nothing(self, how: How) -> None:
        sent = attempt(identity(), [b"%d" % n for n in range(8)])
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            member = await scene.join()
            await send_all(sender, sent)
            require_same(await self._taken_with_cancellations(member, how, len(sent)), sent, "with cancelled receives")

    @pytest.mark.parametrize("how", ["scope", "task"])
    @on_a_loop
    async def test_a_receive_of_the_sender_cancelled_at_any_await_loses_nothing(self, how: How) -> None:
        answers = [refusal("a", identity(), f"answer {n}", (n,)) for n in range(8)]
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            await sender.send(opening(identity()))
            member = await scene.join("a")
            await scene.take(sender, "a Join")
            await scene.take(member, "an Open")
            await send_all(member, answers)
            found = await self._taken_with_cancellations(sender, how, len(answers))
            require_same(found, answers, "with cancelled receives")

    @pytest.mark.parametrize("how", ["scope", "task"])
    @on_a_loop
    async def test_a_send_of_the_sender_cancelled_at_any_await_is_whole_or_nothing(self, how: How) -> None:
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            member = await scene.join()
            await sender.send(opening(identity()))
            tries = [chunk(identity(), n, b"try %d " % n * 999) for n in range(40)]
            done = await self._sent_with_cancellations(sender, how, tries)
            await sender.send(sealing(identity(), done))
            found = (await scene.take_attempt(member))[1:-1]
            self._require_whole(found, tries, done)

    @pytest.mark.parametrize("how", ["scope", "task"])
    @on_a_loop
    async def test_a_send_of_a_member_cancelled_at_any_await_is_whole_or_nothing(self, how: How) -> None:
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            await sender.send(opening(identity()))
            member = await scene.join("a")
            await scene.take(sender, "a Join")
            await scene.take(member, "an Open")
            tries = [refusal("a", identity(), f"try {n} " * 99, (n,)) for n in range(40)]
            done = await self._sent_with_cancellations(member, how, tries)
            await member.send(vote("a", identity()))
            taken = await scene.take_all(sender, "the last answer", lambda message: isinstance(message.header, Ack))
            self._require_whole(taken[:-1], tries, done)

    async def _taken_with_cancellations(self, link: Link, how: How, count: int) -> list[Message]:
        """So many messages; every receive is cancelled at its first await, then at its second, and so on."""
        taken: list[Message] = []
        self._require_backend(how)
        with anyio.move_on_after(self.deadline_s):
            while len(taken) < count:
                for n in itertools.count(1):
                    if received := await cancelled_at(n, how, link.receive):
                        taken += received
                        break
        return taken

    async def _sent_with_cancellations(self, link: Link, how: How, tries: Sequence[Message]) -> list[Message]:
        """Send messages, cancelled at the first await, the second, and so on; those of which a send returned."""
        self._require_backend(how)
        done, n = [], 0
        for message in tries:
            n += 1
            if await cancelled_at(n, how, partial(link.send, message)):
                done.append(message)
                n = 0
        assert done, "no send returned"
        return done

    def _require_whole(self, found: Sequence[Message], tries: Sequence[Message], done: Sequence[Message]) -> None:
        """Everything that was sent arrived, in order, once; what was cancelled may have."""
        require_same(found, [message for message in tries if message in found], "with cancelled sends")
        missing = [message for message in done if message not in found]
        assert not missing, f"a send returned, and it did not arrive: {shown(missing)}"

    def _require_backend(self, how: How) -> None:
        if how == "task" and self.backend != "asyncio":
            pytest.skip("only asyncio has tasks that can be cancelled in spite of a shield")
