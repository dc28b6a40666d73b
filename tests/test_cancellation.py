"""Cancellation at every await of either end: nothing is left over, weights are whole, and the next version is right.

Suspensions of all tasks on the loop are counted; at the n-th one, the task that uses an end is cancelled: by
`task.cancel()`, or by an anyio scope. For every n up to the last. Of those at one place (the calls that led to it, with
their lines) the first TIMES count: a link that polls comes back to its places for as long as it waits.
"""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from support.refits import FAST, Rollout, Weights, publish, require_equal, set_bits, state

import dcr
from dcr.loaders.module import ModuleLoader
from dcr.sources.module import ModuleSource
from dcr.testing import MemoryTransport
from dcr.transports.local import LocalTransport

ELEMS = 64
TIMES = 1  # that a place counts
VOTE_S = 60  # a loaded machine meets it, and a member that left without a word counts for longer
DISK = LocalTransport(poll_s=0.001, stale_s=10 * VOTE_S, fsync=False)
KINDS = {
    CoroutineType: ("cr_frame", "cr_await"),
    GeneratorType: ("gi_frame", "gi_yieldfrom"),
    AsyncGeneratorType: ("ag_frame", "ag_await"),
}
URL = "memory:///run"


class Suspensions:
    """Counts suspensions of all tasks, and acts at the n-th since `arm`."""

    def __init__(self) -> None:
        self.count = 0
        self._at = -1
        self._act: Callable[[], object] = lambda: None
        self._places: Counter[object] = Counter()

    def arm(self, at: int, act: Callable[[], object]) -> None:
        self.count, self._at, self._act = 0, at, act
        self._places.clear()

    def factory(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(self._counted(coro), loop=loop, **options)
        task.add_done_callback(lambda _: coro.close())  # it may be cancelled before it starts
        return task

    async def _counted(self, coro: Any) -> Any:
        return await _Stepped(coro, self._step)

    def _step(self, coro: Any) -> None:
        if self.count >= self._at:
            return
        place = _place(coro)
        self._places[place] += 1
        if self._places[place] <= TIMES:
            self.count += 1
            if self.count == self._at:
                self._act()


def _place(waiting: Any) -> object:
    """Where a coroutine is suspended: the code and the line of each call, from the outermost in."""
    calls = []
    while (kind := KINDS.get(type(waiting))) is not None:
        frame, awaited = kind
        at = getattr(waiting, frame)
        calls.append((at.f_code, at.f_lineno))
        waiting = getattr(waiting, awaited)
        if type(waiting).__name__.startswith("async_generator_"):  # it does not say of which generator it is a step
            waiting = next(part for part in gc.get_referents(waiting) if isinstance(part, AsyncGeneratorType))
    return tuple(calls)


class _Stepped:
    """A coroutine that calls back each time it suspends."""

    def __init__(self, coro: Any, step: Callable[[Any], None]) -> None:
        self._coro = coro
        self._step = step

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[Any], Any] = self._coro.send
        value: Any = None
        while True:
            try:
                waited_for = resume(value)
            except StopIteration as stop:
                return stop.value
            self._step(self._coro)
            try:
                value, resume = (yield waited_for), self._coro.send
            except BaseException as error:
                value, resume = error, self._coro.throw


@pytest.fixture
async def suspensions() -> Any:
    counter, loop = Suspensions(), asyncio.get_running_loop()
    loop.set_task_factory(counter.factory)
    yield counter
    loop.set_task_factory(None)


def native(user: Callable[[], Coroutine[Any, Any, None]]) -> tuple[Awaitable[None], Callable[[], object]]:
    """A user as a task, and what cancels it."""
    task = asyncio.ensure_future(user())

    async def ended() -> None:
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    return ended(), task.cancel


def scoped(user: Callable[[], Coroutine[Any, Any, None]]) -> tuple[Awaitable[None], Callable[[], object]]:
    """A user within a scope, and what cancels it."""
    scope = anyio.CancelScope()

    async def ended() -> None:
        with scope:
            await user()

    return ended(), scope.cancel


@asynccontextmanager
async def nothing_left(budget: dcr.ByteBudget) -> Any:
    """No lease, task or busy thread remains of what happens within."""
    tasks, threads = asyncio.all_tasks(), len(threading.enumerate())
    yield
    assert budget.statistics().leased == 0
    assert not asyncio.all_tasks() - tasks
    assert anyio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
    assert len(threading.enumerate()) <= threads + 8  # idle workers of anyio's pool


async def begin(url: str, transport: Any) -> None:
    """A run whose head is version 1, what `trainer_of` gives."""
    async with dcr.publisher(url, source=ModuleSource(trainer_of()), transport=transport) as publisher:
        await publish(publisher, 1)


async def on_disk(folder: Path) -> tuple[str, Any]:
    """Such a run in a directory: a copy of one that was begun before."""
    begun = folder.parent / "begun"
    if not begun.exists():
        await begin(f"local://{begun}", DISK)
    shutil.copytree(begun, folder)
    return f"local://{folder}", DISK


async def in_memory(folder: Path) -> tuple[str, Any]:
    """Such a run in memory."""
    transport = MemoryTransport()
    await begin(URL, transport)
    return URL, transport


# The kit cancels every call of each transport's links both ways (`dcr.testing.conformance`); here it is the ends' turn.
WAYS = [pytest.param(native, on_disk, id="native"), pytest.param(scoped, in_memory, id="scoped")]


@asynccontextmanager
async def following(url: str, transport: Any, rollout: Rollout) -> Any:
    """A rollout that follows the run."""
    async with anyio.create_task_group() as group:
        group.start_soon(partial(rollout.run, url, transport=transport, loader=ModuleLoader(rollout.module)))
        yield
        group.cancel_scope.cancel()


def trainer_of(seed: int = 3) -> Weights:
    module = Weights({"w": torch.zeros(ELEMS, dtype=torch.bfloat16)})
    set_bits(module.w, np.arange(ELEMS), np.random.default_rng(seed).integers(0, 1 << 16, ELEMS, np.uint16))
    return module


def second(trainer: Weights) -> None:
    """The version that is cancelled changes elements 1, 20 and 40."""
    set_bits(trainer.w, np.array([1, 20, 40]), np.array([0x1111, 0x2222, 0x7FC1], np.uint16))


def third(trainer: Weights, before: np.ndarray) -> None:
    """The one after it changes 1 again and puts 20 back."""
    set_bits(trainer.w, np.array([1, 20]), np.array([0x3333, before[20]], np.uint16))


async def every_await(one: Callable[[int], Awaitable[bool]]) -> int:
    """Call with n = 1, 2, ... until the n-th suspension is never reached; how many there were."""
    n = 1
    while await one(n):
        n += 1
    return n - 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("cancelling", "start"), WAYS)
async def test_a_publisher_that_is_cancelled_at_any_await(
    tmp_path: Path, suspensions: Suspensions, cancelling: Any, start: Any
) -> None:
    async def at(n: int) -> bool:
        trainer = trainer_of()
        before = state(trainer)["w"]
        rollout, budget = Rollout(trainer_of()), dcr.ByteBudget(1 << 20)
        url, transport = await start(tmp_path / str(n))
        options = {"source": ModuleSource(trainer), "transport": transport, "budget": budget, "frame_elems": 32}
        async with nothing_left(budget), following(url, transport, rollout):
            await rollout.reached(1)

            async def user() -> None:
                async with dcr.publisher(url, **options) as publisher:
                    refit = await publisher.publish(2)
                    await publisher.captured()
                    await refit.committed()

            second(trainer)
            ended, cancel = cancelling(user)
            suspensions.arm(n, cancel)
            await ended
            reached = suspensions.count >= n
            suspensions.arm(-1, cancel)
            third(trainer, before)
            async with dcr.publisher(url, **options) as publisher:
                await publish(publisher, 3)
                await rollout.reached(3)
            require_equal(rollout.module, state(trainer))
        return reached

    assert await every_await(at) > 30


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("cancelling", "start"), WAYS)
async def test_a_publisher_one_of_whose_waits_is_cancelled_goes_on(
    tmp_path: Path, suspensions: Suspensions, cancelling: Any, start: Any
) -> None:
    """The publisher lives in another task than its user: what was begun ends, and what was not can be begun again."""

    async def at(n: int) -> bool:
        trainer = trainer_of()
        before = state(trainer)["w"]
        rollout, budget = Rollout(trainer_of()), dcr.ByteBudget(1 << 20)
        url, transport = await start(tmp_path / str(n))
        options = {"source": ModuleSource(trainer), "transport": transport, "budget": budget, "frame_elems": 32}
        async with nothing_left(budget), following(url, transport, rollout):
            async with dcr.publisher(url, **options) as publisher:
                assert publisher.version == 1
                await rollout.reached(1)
                refits: list[dcr.Refit] = []

                async def user() -> None:
                    await publisher.joined(1)
                    refits.append(await publisher.publish(2))
                    await publisher.captured()
                    await refits[0].committed()
                    await refits[0].installed()

                second(trainer)
                ended, cancel = cancelling(user)
                suspensions.arm(n, cancel)
                await ended
                reached = suspensions.count >= n
                suspensions.arm(-1, cancel)
                refit = refits[0] if refits else await publisher.publish(2)
                await refit.installed()
                third(trainer, before)
                await publish(publisher, 3)
                await rollout.reached(3)
            require_equal(rollout.module, state(trainer))
        return reached

    assert await every_await(at) > 10


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("cancelling", "start"), WAYS)
async def test_a_subscriber_that_is_cancelled_at_any_await(
    tmp_path: Path, suspensions: Suspensions, cancelling: Any, start: Any
) -> None:
    async def at(n: int) -> bool:
        trainer, receiver = trainer_of(), trainer_of()
        versions = [state(trainer)]
        budget = dcr.ByteBudget(1 << 20)
        url, transport = await start(tmp_path / str(n))
        options = {"source": ModuleSource(trainer), "transport": transport, "vote_timeout_s": VOTE_S, "frame_elems": 32}
        async with nothing_left(budget), dcr.publisher(url, **options) as publisher:
            assert publisher.version == 1

            async def user() -> None:
                loader = ModuleLoader(receiver)
                async with dcr.subscriber(
                    url, loader=loader, member="m", transport=transport, budget=budget
                ) as offered:
                    async for version in offered:
                        await version.install()
                        return

            second(trainer)
            versions.append(state(trainer))
            ended, cancel = cancelling(user)
            suspensions.arm(n, cancel)
            joining = anyio.CancelScope()

            async def offer() -> None:
                with joining:
                    await publisher.joined(1)  # so that the member votes, unless it is cancelled before it has joined
                await publish(publisher, 2)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(offer)
                await ended
                joining.cancel()
            reached = suspensions.count >= n
            suspensions.arm(-1, cancel)
            assert any(np.array_equal(state(receiver)["w"], version["w"]) for version in versions)
            third(trainer, versions[0]["w"])
            rollout = Rollout(receiver)
            async with following(url, transport, rollout):
                await publish(publisher, 3)
                await rollout.reached(3)
            require_equal(receiver, state(trainer))
        return reached

    assert await every_await(at) > 30


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cancelling", [native, scoped])
async def test_a_wait_for_a_version_that_is_cancelled_at_any_await_loses_none(
    suspensions: Suspensions, cancelling: Any
) -> None:
    async def at(n: int) -> bool:
        trainer, receiver, transport = trainer_of(), trainer_of(4), MemoryTransport()
        subscriber = dcr.subscriber(URL, loader=dcr.loader(receiver), member="m", transport=transport)
        async with (
            dcr.publisher(URL, source=dcr.source(trainer), transport=transport) as publisher,
            subscriber as versions,
        ):
            await publisher.joined(1)
            taken: list[dcr.Version] = []

            async def user() -> None:
                taken.append(await anext(versions))

            ended, cancel = cancelling(user)
            suspensions.arm(n, cancel)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publish, publisher, 1)
                await ended
                reached = suspensions.count >= n
                with anyio.fail_after(10):
                    version = taken[0] if taken else await anext(versions)
                suspensions.arm(-1, cancel)
            await version.install()
            require_equal(receiver, state(trainer))
        return reached

    assert await every_await(at) > 20


def poll_at_1_ms(versions: int) -> None:
    """A user of asyncio alone that looks for news every millisecond, and installs what there is."""

    async def main() -> None:
        trainer, receiver, transport = trainer_of(), trainer_of(4), MemoryTransport()
        subscriber = dcr.subscriber(URL, loader=dcr.loader(receiver), member="m", transport=transport)
        async with (
            dcr.publisher(URL, source=dcr.source(trainer), transport=transport) as publisher,
            subscriber as offered,
        ):
            await publisher.joined(1)
            for number in range(1, versions + 1):
                second(trainer)
                refit = await publisher.publish(number)
                version = None
                while version is None:
                    try:
                        version = await asyncio.wait_for(anext(offered), 0.001)
                    except TimeoutError:
                        version = offered.offered
                await version.install()
                await refit.committed()
                assert offered.version == number

    asyncio.run(main())


@pytest.mark.timeout(60)
def test_a_user_that_polls_for_versions_gets_every_one() -> None:
    poll_at_1_ms(200)


@pytest.mark.timeout(60)
def test_a_user_that_polls_for_versions_gets_every_one_on_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    uvloop = pytest.importorskip("uvloop")
    monkeypatch.setattr(asyncio, "run", lambda main: asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main))
    poll_at_1_ms(200)


async def test_a_wait_that_times_out_does_not_disturb_the_version_it_waited_for(tmp_path: Path) -> None:
    trainer = trainer_of()
    receiver = trainer_of(4)
    url = f"local://{tmp_path}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
        await publish(publisher, 1)
        loader = dcr.loader(receiver)
        async with dcr.subscriber(url, loader=loader, member="m", transport=FAST) as versions:
            version = await anext(versions)
            await version.install()
            second(trainer)
            refit = await publisher.publish(2)
            for wait in (refit.captured, refit.committed, refit.installed, versions.__anext__):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0):
                        await wait()
            version = await anext(versions)
            with anyio.CancelScope() as scope:
                scope.cancel()
                await version.install()
            with anyio.fail_after(10):
                while versions.version != 2:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
            require_equal(receiver, state(trainer))
