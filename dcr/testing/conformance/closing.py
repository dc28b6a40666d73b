"""The guarantees of closing."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import anyio
import pytest

from dcr.errors import IncompleteError
from dcr.protocol.wire import Head, MemberRef, Message
from dcr.seams import Link, Run
from dcr.testing.conformance.scene import RUN, attempt, identity, on_a_loop, require_same, send_all, settled, vote
from dcr.testing.conformance.setting import Setting


class ClosingTests(Setting):
    """A closed link is never success, and leaves nothing behind."""

    @pytest.mark.parametrize("side", ["sender", "member"])
    @on_a_loop
    async def test_a_receive_on_a_closed_link_is_an_error(self, side: str) -> None:
        async with self.scene() as scene:
            _, run = await scene.lead()
            async with _side(run, side) as link:
                pass
            await self._require_closed(link.receive)

    @pytest.mark.parametrize("side", ["sender", "member"])
    @on_a_loop
    async def test_a_receive_that_waits_while_its_link_is_closed_is_an_error(self, side: str) -> None:
        async with self.scene() as scene, anyio.create_task_group() as group:
            _, run = await scene.lead()
            ended = anyio.Event()

            async def wait() -> None:
                await self._require_closed(link.receive)
                ended.set()

            async with _side(run, side) as link:
                group.start_soon(wait)
                await settled()
            await ended.wait()

    @pytest.mark.parametrize("side", ["sender", "member"])
    @on_a_loop
    async def test_an_error_of_its_user_leaves_a_link_as_it_is(self, side: str) -> None:
        async with self.scene() as scene:
            _, run = await scene.lead()
            with pytest.raises(Exception) as raised:  # noqa: PT011
                async with _side(run, side):
                    raise ZeroDivisionError
            assert raised.type is ZeroDivisionError, f"an error of the user came out as {raised.value!r}"

    @pytest.mark.parametrize("side", ["sender", "member"])
    @on_a_loop
    async def test_a_side_that_is_cancelled_while_it_receives_closes(self, side: str) -> None:
        async with self.scene() as scene:
            await scene.lead()
            with anyio.move_on_after(self.deadline_s):
                async with anyio.create_task_group() as group:
                    group.start_soon(self._receive_for_ever, scene.url, side)
                    await settled()
                    group.cancel_scope.cancel()
                return
            raise AssertionError(f"a cancelled {side} did not close within {self.deadline_s:g} s")

    @on_a_loop
    async def test_a_run_can_be_opened_again(self) -> None:
        url = self.new_url()
        for version in (1, 2):
            async with self.scene(url) as scene:
                sender, _ = await scene.lead(Head(RUN, version, None, b""))
                member = await scene.join(life=str(version))
                sent = attempt(identity(version, term=version))
                await send_all(sender, sent)
                require_same(await scene.take_attempt(member), sent, f"opened {version} times")

    @on_a_loop
    async def test_no_task_is_left_after_closing(self) -> None:
        before = {task.id for task in anyio.get_running_tasks()}
        await self._use()
        await settled()
        left = [str(task.name) for task in anyio.get_running_tasks() if task.id not in before]
        assert not left, f"still running after all links and runs were closed: {', '.join(left)}"

    def test_no_thread_is_left_after_the_loop(self) -> None:
        before = set(threading.enumerate())
        on_a_loop(type(self)._use)(self)
        left = set(threading.enumerate()) - before
        for thread in left:
            thread.join(self.deadline_s)
        alive = [thread.name for thread in left if thread.is_alive()]
        assert not alive, f"still running after the event loop ended: {', '.join(alive)}"

    async def _use(self) -> None:
        """One attempt with one member, from opening to closing."""
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            member = await scene.join()
            await send_all(sender, attempt(identity()))
            await scene.take_attempt(member)
            await member.send(vote("a", identity()))
            await scene.take(sender, "a Join")

    async def _receive_for_ever(self, url: str, side: str) -> None:
        async with self.transport.open(url) as run, _side(run, side) as link:
            while True:
                await link.receive()

    async def _require_closed(self, receive: Callable[[], Awaitable[Message]]) -> None:
        with anyio.move_on_after(self.deadline_s):
            with pytest.raises(IncompleteError):
                await receive()
            return
        raise AssertionError(f"a receive on a closed link was still waiting after {self.deadline_s:g} s")


def _side(run: Run, side: str) -> AbstractAsyncContextManager[Link]:
    return run.sender() if side == "sender" else run.member(MemberRef("side", "1"))
