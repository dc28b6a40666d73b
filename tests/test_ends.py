"""Ends that are opened in one task and closed in another, twice, not at all, or in a fork of their process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from support.refits import FAST, Weights, require_equal, set_bits, state, weights

import dcr
from dcr.closing import Contexts, Life
from dcr.errors import StateError
from dcr.events import AttemptSealed


def publisher_of(url: str, module: Weights, **options: Any) -> dcr.Publisher:
    return dcr.publisher(url, source=dcr.source(module), transport=FAST, **options)


def subscriber_of(url: str, module: Weights) -> dcr.Subscriber:
    return dcr.subscriber(url, loader=dcr.loader(module), member="m", transport=FAST)


async def in_a_task(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """As an actor does: each of its methods runs in a task of its own."""
    return await asyncio.create_task(call())


async def test_each_call_of_an_end_may_come_from_another_task(tmp_path: Path) -> None:
    trainer, engine, tasks = weights(1), weights(0), asyncio.all_tasks()
    publisher, versions = publisher_of(f"local://{tmp_path}", trainer), subscriber_of(f"local://{tmp_path}", engine)
    assert await in_a_task(publisher.open) is publisher
    assert await in_a_task(versions.open) is versions
    for number in (1, 2):
        set_bits(trainer.w, np.array([number]), np.array([0x7FC00000 + number], np.uint32))
        refit = await in_a_task(lambda number=number: publisher.publish(number))
        version = await in_a_task(versions.__anext__)
        await in_a_task(version.install)
        assert (await in_a_task(refit.committed)).version == number
        require_equal(engine, state(trainer))
    await in_a_task(versions.aclose)
    await in_a_task(publisher.aclose)
    assert asyncio.all_tasks() == tasks


async def test_an_opening_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    url, tasks = f"local://{tmp_path}", asyncio.all_tasks()
    for end in (publisher_of(url, weights(1)), subscriber_of(url, weights(0))):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await end.open()
    assert asyncio.all_tasks() == tasks
    assert list(tmp_path.glob("members/*")) == []  # noqa: ASYNC240


async def test_a_close_that_is_given_up_has_given_up_the_version_and_left(tmp_path: Path) -> None:
    tasks = asyncio.all_tasks()
    versions = await subscriber_of(f"local://{tmp_path}", weights(0)).open()
    trainer = weights(1)
    publisher = await publisher_of(f"local://{tmp_path}", trainer).open()
    await publisher.joined(1)
    await publisher.publish(1)
    await anext(versions)  # it is never installed: no member prepares version 2
    set_bits(trainer.w, np.array([1]), np.array([3], np.uint32))
    refit = await publisher.publish(2)
    with anyio.move_on_after(0.05):
        await publisher.aclose()
    with pytest.raises(StateError, match="was closed while version 2 was in flight"):
        await refit.committed()
    await versions.aclose()
    assert asyncio.all_tasks() == tasks


async def test_an_end_is_opened_once_and_closed_as_often_as_one_likes(tmp_path: Path) -> None:
    url = f"local://{tmp_path}"
    for end, kind in ((publisher_of(url, weights(1)), "publisher"), (subscriber_of(url, weights(0)), "subscriber")):
        async with end:
            with pytest.raises(StateError, match=rf"this {kind} was opened before, .*make a new one"):
                await end.open()
            await end.aclose()
        await end.aclose()
        with pytest.raises(StateError, match="was opened before"):
            await end.__aenter__()


async def test_an_end_that_is_not_open_says_how_to_open_it(tmp_path: Path) -> None:
    publisher, versions = publisher_of(f"local://{tmp_path}", weights(1)), subscriber_of("local:///nowhere", weights(0))
    for use in (publisher.publish, publisher.captured, lambda: publisher.joined(1), versions.__anext__):
        with pytest.raises(StateError, match=r"is not open: use it within `async with`, or await its open\(\) first"):
            await use()
    with pytest.raises(StateError, match="is not open"):
        publisher.members  # noqa: B018
    await publisher.aclose()
    with pytest.raises(StateError, match="publisher was closed: make a new one"):
        await publisher.publish()


async def test_an_end_whose_observer_fails_says_so_to_whoever_waits(tmp_path: Path) -> None:
    def fail(event: dcr.Event) -> None:
        if isinstance(event, AttemptSealed):
            raise ZeroDivisionError("on purpose")

    publisher = await publisher_of(f"local://{tmp_path}", weights(1), observe=fail).open()
    refit = await publisher.publish(1)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        await refit.committed()
    assert (await publisher.publish(2)).version == 2
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        await publisher.aclose()


async def test_an_opening_that_fails_is_told_where_it_was_asked_for() -> None:
    async def enter(contexts: Contexts) -> None:
        raise ZeroDivisionError

    life = Life("end", enter)
    with anyio.fail_after(5):
        with pytest.raises(ZeroDivisionError):
            await life.open()
        await life.close()


class Failing:
    """An end whose task fails when it is told to."""

    def __init__(self) -> None:
        self.fail = anyio.Event()
        self.life = Life("end", self._enter)

    async def _enter(self, contexts: Contexts) -> None:
        async def work() -> None:
            await self.fail.wait()
            raise ZeroDivisionError

        group = await contexts.enter(anyio.create_task_group())
        contexts.call(group.cancel_scope.cancel)
        group.start_soon(work)

    async def break_down(self) -> None:
        await self.life.open()
        self.fail.set()
        with anyio.fail_after(5):
            while self.life.is_open:
                await anyio.lowlevel.checkpoint()


async def test_what_ended_an_end_is_raised_when_it_is_closed_and_once() -> None:
    end = Failing()
    await end.break_down()
    with pytest.RaisesGroup(ZeroDivisionError):
        await end.life.close()
    await end.life.close()


async def test_whoever_uses_an_end_that_has_failed_is_told_and_its_close_is_silent() -> None:
    end = Failing()
    await end.break_down()
    with pytest.raises(StateError, match=r"this end has ended: .*ZeroDivisionError"):
        end.life.require_open()
    await end.life.close()


def test_without_an_event_loop_the_blocking_end_is_named() -> None:
    opening = publisher_of("local:///nowhere", weights(1)).open()
    with pytest.raises(StateError, match=r"lives on an event loop of asyncio.*dcr\.blocking\.publisher"):
        opening.send(None)


FORKED = """
import asyncio, multiprocessing, sys, warnings
import torch
import dcr
warnings.simplefilter("ignore", DeprecationWarning)


def child(calls):
    said = []
    for call in calls:
        try:
            asyncio.run(call())
        except dcr.DcrError as error:
            said.append("belongs to process" in str(error))
    sys.exit(len(calls) if said == [True] * len(calls) else 99)


async def main():
    trainer, engine, url = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2), "local://" + sys.argv[1]
    async with (
        dcr.publisher(url, source=dcr.source(trainer)) as publisher,
        dcr.subscriber(url, loader=dcr.loader(engine), member="m") as versions,
    ):
        await publisher.joined(1)
        refit = await publisher.publish(1)
        version = await anext(versions)
        calls = [
            publisher.publish, publisher.captured, publisher.aclose, refit.committed, refit.installed,
            versions.__anext__, versions.aclose, version.install,
        ]
        process = multiprocessing.get_context("fork").Process(target=child, args=(calls,))
        process.start()
        process.join(60)
        print(process.exitcode == len(calls))
        await version.install()
        print((await refit.installed())["m"].said, publisher.members)


asyncio.run(main())
"""


def test_a_fork_that_uses_its_parents_ends_is_told_and_does_nothing_to_them(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-P", "-c", FORKED, str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert process.stdout.splitlines() == ["True", "installed ['m']"], process.stderr
