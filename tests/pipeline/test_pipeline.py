"""The runner: order, bounded queues, one bare error, nothing left behind, and statistics that name the bottleneck.

Stages are gated with events and, where time matters, run under a clock that only they move.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.errors import StateError
from dcr.events import Event, StageWorked
from dcr.events.observers import StageStatistics, Summary
from dcr.pipeline import DROP, FunctionStage, Inbox, Outbox, Pipeline, gather_bare, meter, queues, runner, stage


class Held:
    """An item that holds something: it must be handed on or released."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.released = False
        self.nbytes = 10
        self.where = f"item {number}"

    def release(self) -> None:
        self.released = True


class Relay:
    """A stage that hands every item on, as it is."""

    name = "relay"

    async def run(self, inbox: Inbox[Any], outbox: Outbox[Any]) -> None:
        async for item in inbox:
            await outbox.send(item)


class Fails:
    """A stage that fails at one item, which it has in its hands, or at the end of its inbox."""

    name = "fails"

    def __init__(self, at: int) -> None:
        self._at = at

    async def run(self, inbox: Inbox[Any], outbox: Outbox[Any]) -> None:
        taken = 0
        async for item in inbox:
            if taken == self._at:
                item.release()
                raise ValueError(f"failed at {taken}")
            taken += 1
            await outbox.send(item)
        raise ValueError("failed at the end")


@stage
async def add_one(item: int) -> int:
    return item + 1


@stage
def double(item: int) -> int:
    return item * 2


async def counted(count: int) -> AsyncIterator[int]:
    for item in range(count):
        yield item


# ---------------------------------------------------------------------- items


async def test_items_pass_all_stages_in_order() -> None:
    found: list[int] = []
    await Pipeline(add_one, double).run(range(20), into=found.append)
    assert found == [(item + 1) * 2 for item in range(20)]


async def test_items_may_come_from_an_async_iterable() -> None:
    found: list[int] = []
    await Pipeline(add_one).run(counted(3), into=found.append)
    assert found == [1, 2, 3]


async def test_no_items_are_no_error() -> None:
    summary = await Pipeline(add_one, double).run([])
    assert [one.items for one in summary.stages] == [0, 0]


async def test_a_pipeline_can_run_again() -> None:
    ship, found = Pipeline(add_one), list[int]()
    await ship.run([1], into=found.append)
    summary = await ship.run([2, 3], into=found.append)
    assert (found, summary.stages[0].items) == ([2, 3, 4], 2)


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
async def test_a_dropped_item_goes_no_further(kind: str) -> None:
    def odd(item: int) -> Any:
        return item if item % 2 else DROP

    async def odd_async(item: int) -> Any:
        return odd(item)

    found: list[int] = []
    await Pipeline(stage(odd if kind == "plain" else odd_async), add_one).run(range(6), into=found.append)
    assert found == [2, 4, 6]


async def test_none_is_an_item_like_any_other() -> None:
    found: list[Any] = []
    await Pipeline(stage(lambda item: None)).run([1, 2], into=found.append)
    assert found == [None, None]


async def test_a_stage_may_send_more_or_less_than_it_takes() -> None:
    class Pairs:
        name = "pairs"

        async def run(self, inbox: Inbox[int], outbox: Outbox[tuple[int, ...]]) -> None:
            kept: list[int] = []
            async for item in inbox:
                kept.append(item)
                if len(kept) == 2:
                    await outbox.send(tuple(kept))
                    kept.clear()
            await outbox.send(tuple(kept))

    found: list[tuple[int, ...]] = []
    await Pipeline(Pairs()).run(range(5), into=found.append)
    assert found == [(0, 1), (2, 3), (4,)]


async def test_a_pipeline_needs_a_stage() -> None:
    with pytest.raises(StateError, match="at least one stage"):
        Pipeline()


# ---------------------------------------------------------------------- functions as stages


async def test_a_plain_function_runs_in_a_worker_thread_and_a_coroutine_on_the_loop() -> None:
    threads: dict[str, int] = {}

    @stage
    def plain(item: int) -> int:
        threads["plain"] = threading.get_ident()
        return item

    @stage
    async def coroutine(item: int) -> int:
        threads["coroutine"] = threading.get_ident()
        return item

    await Pipeline(plain, coroutine).run([1])
    assert threads["coroutine"] == threading.get_ident() != threads["plain"]


async def test_an_object_with_an_async_call_runs_on_the_loop() -> None:
    class Call:
        async def __call__(self, item: int) -> int:
            return threading.get_ident() + item

    found: list[int] = []
    await Pipeline(stage(Call())).run([0], into=found.append)
    assert found == [threading.get_ident()]


async def test_a_function_that_returns_an_awaitable_is_awaited() -> None:
    async def later(item: int) -> int:
        return item + 1

    found: list[int] = []
    await Pipeline(stage(lambda item: later(item))).run([1], into=found.append)
    assert found == [2]


def test_a_decorated_function_keeps_its_name_and_can_be_called() -> None:
    assert (add_one.name, add_one.workers, double(4)) == ("add_one", 1, 8)


def test_workers_and_name_can_be_given() -> None:
    @stage(workers=3, name="mine")
    def one(item: int) -> int:
        return item

    assert isinstance(one, FunctionStage)
    assert (one.name, one.workers) == ("mine", 3)


@pytest.mark.parametrize("workers", [1, 3])
async def test_as_many_threads_work_at_once_as_there_are_workers(workers: int) -> None:
    together = threading.Barrier(workers, timeout=30)

    @stage(workers=workers)
    def meet(item: int) -> int:
        together.wait()
        return item

    found: list[int] = []
    await Pipeline(meet).run(range(2 * workers), into=found.append)
    assert sorted(found) == list(range(2 * workers))


@pytest.mark.parametrize("kind", ["threads", "coroutines"])
async def test_never_more_work_at_once_than_there_are_workers(kind: str) -> None:
    working, most, lock = 0, 0, threading.Lock()

    def enter(step: int) -> None:
        nonlocal working, most
        with lock:
            working += step
            most = max(most, working)

    @stage(workers=2)
    def threads(item: int) -> int:
        enter(1)
        enter(-1)
        return item

    @stage(workers=2)
    async def coroutines(item: int) -> int:
        enter(1)
        await anyio.lowlevel.checkpoint()
        enter(-1)
        return item

    found: list[int] = []
    await Pipeline(threads if kind == "threads" else coroutines).run(range(30), into=found.append)
    assert (sorted(found), most <= 2) == (list(range(30)), True)


async def test_stages_work_at_the_same_time() -> None:
    """The second stage waits, with item 0 in its hands, until the first one has begun item 1."""
    begun = anyio.Event()

    @stage
    async def first(item: int) -> int:
        if item == 1:
            begun.set()
        return item

    @stage
    async def second(item: int) -> int:
        await begun.wait()
        return item

    found: list[int] = []
    await Pipeline(first, second).run(range(2), into=found.append)
    assert found == [0, 1]


# ---------------------------------------------------------------------- bounded queues


async def taken_while_blocked(depth: int, *, own_depth: int | None = None) -> int:
    """How many items two stages take in before the second lets anything through."""
    gate, taken = anyio.Event(), 0

    def items() -> Iterator[int]:
        nonlocal taken
        for item in range(100):
            taken += 1
            yield item

    @stage
    async def gated(item: int) -> int:
        await gate.wait()
        return item

    relay = Relay()
    if own_depth is not None:
        relay.depth = own_depth  # type: ignore[attr-defined]
    async with anyio.create_task_group() as group:
        group.start_soon(Pipeline(relay, gated, depth=depth).run, items())
        await anyio.wait_all_tasks_blocked()
        before = taken
        gate.set()
    assert taken == 100
    return before


@pytest.mark.parametrize("depth", [1, 2, 5])
async def test_a_stalled_stage_stalls_everything_before_it(depth: int) -> None:
    in_hands, queues = 3, 2  # the feeder's, one per stage; before either stage
    assert await taken_while_blocked(depth) == in_hands + queues * depth


async def test_a_stage_may_set_the_depth_of_its_own_outbox() -> None:
    assert await taken_while_blocked(2, own_depth=10) == 3 + 2 + 10


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
@pytest.mark.parametrize("workers", [1, 3])
async def test_an_error_is_raised_bare_with_the_stage_and_the_item_in_its_notes(kind: str, workers: int) -> None:
    def fail(item: Held) -> Held:
        if item.number == 4:
            raise KeyError("lost")
        return item

    async def fail_async(item: Held) -> Held:
        return fail(item)

    failing = FunctionStage(fail if kind == "plain" else fail_async, workers=workers, name="middle")
    with pytest.raises(KeyError, match="lost") as caught:
        await Pipeline(Relay(), failing, Relay()).run(map(Held, range(10)))
    assert caught.value.__notes__ == ["item 4", "in stage 'middle'"]


async def test_an_error_of_the_items_themselves_is_raised_bare() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        await Pipeline(add_one).run(items())


async def test_an_error_of_async_items_is_raised_bare() -> None:
    async def items() -> AsyncIterator[int]:
        yield 1
        raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        await Pipeline(add_one).run(items())


async def test_an_error_of_the_sink_is_raised_bare() -> None:
    def refuse(item: int) -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        await Pipeline(add_one).run([1], into=refuse)


async def test_the_first_of_two_errors_wins() -> None:
    failed = anyio.Event()

    @stage
    async def second(item: int) -> int:
        try:
            await anyio.sleep_forever()
        finally:
            failed.set()
            raise RuntimeError("came later")

    class First:
        name = "first"

        async def run(self, inbox: Inbox[int], outbox: Outbox[int]) -> None:
            async for item in inbox:
                await outbox.send(item)
            await anyio.wait_all_tasks_blocked()
            raise ValueError("came first")

    with pytest.raises(ValueError, match="came first"):
        await Pipeline(First(), second).run([1])
    assert failed.is_set()


async def test_an_error_stops_a_stage_that_waits_to_send() -> None:
    blocked = anyio.Event()

    class Endless:
        name = "endless"

        async def run(self, inbox: Inbox[int], outbox: Outbox[int]) -> None:
            try:
                while True:
                    await outbox.send(0)
            finally:
                blocked.set()

    class Broken:
        name = "broken"

        async def run(self, inbox: Inbox[int], outbox: Outbox[int]) -> None:
            await anyio.wait_all_tasks_blocked()
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await Pipeline(Endless(), Broken()).run([])
    assert blocked.is_set()


async def test_a_thread_at_work_is_waited_for_and_never_abandoned() -> None:
    started, proceed, finished = threading.Event(), threading.Event(), threading.Event()

    @stage
    def slow(item: int) -> int:
        started.set()
        proceed.wait(30)
        finished.set()
        return item

    class Fails:
        name = "fails"

        async def run(self, inbox: Inbox[int], outbox: Outbox[int]) -> None:
            await anyio.to_thread.run_sync(started.wait, 30)
            threading.Timer(0.05, proceed.set).start()
            raise ValueError("while a thread works")

    with pytest.raises(ValueError, match="while a thread works"):
        await Pipeline(slow, Fails()).run([1])
    assert finished.is_set()


class Idle:
    """A stage that returns after a number of items, when nothing moves any more, whatever is left."""

    name = "idle"

    def __init__(self, after: int) -> None:
        self._after = after

    async def run(self, inbox: Inbox[Any], outbox: Outbox[Any]) -> None:
        for _ in range(self._after):
            await outbox.send(await anext(inbox))
        await anyio.wait_all_tasks_blocked()


@pytest.mark.parametrize("items", [1, 2, 3, 4, 50], ids=lambda count: f"{count} items")
@pytest.mark.parametrize("first", [True, False], ids=["the first stage", "a later stage"])
async def test_a_stage_that_returns_while_items_are_left_is_an_error(first: bool, items: int) -> None:
    ship = Pipeline(Idle(0)) if first else Pipeline(Relay(), Idle(0))
    with pytest.raises(StateError, match="returned"):
        await ship.run(range(items))


async def test_a_stage_that_returns_early_is_named() -> None:
    with pytest.raises(StateError) as caught:
        await Pipeline(Relay(), Idle(1)).run(range(50))
    said = " ".join([str(caught.value), *caught.value.__notes__])
    assert "the stage after 'relay'" in said or "'idle'" in said


async def test_a_stage_that_returns_after_the_last_item_without_asking_for_more_is_no_error() -> None:
    found: list[int] = []
    await Pipeline(Idle(3)).run(range(3), into=found.append)
    assert found == [0, 1, 2]


# ---------------------------------------------------------------------- nothing is left behind


class Made:
    """All items that a run was given, and what must have become of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.items: list[Held] = []
        self.delivered: list[Held] = []

    def __iter__(self) -> Iterator[Held]:
        for number in range(self._count):
            self.items.append(Held(number))
            yield self.items[-1]

    async def slowly(self) -> AsyncIterator[Held]:
        items = iter(self)
        for _ in range(self._count):
            await anyio.lowlevel.checkpoint()
            yield next(items)

    def lost(self) -> list[int]:
        return [item.number for item in self.items if not item.released and item not in self.delivered]

    def released_and_delivered(self) -> list[int]:
        return [item.number for item in self.delivered if item.released]


async def test_items_that_nobody_takes_at_the_end_are_released() -> None:
    made = Made(5)
    await Pipeline(Relay()).run(made)
    assert made.lost() == []


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
@pytest.mark.parametrize("at", [0, 1, 3, 9, 10])
async def test_after_a_failure_every_item_was_delivered_or_released(depth: int, at: int) -> None:
    made = Made(10)
    with pytest.raises(ValueError, match="failed at"):
        await Pipeline(Relay(), Fails(at), depth=depth).run(made, into=made.delivered.append)
    assert (made.lost(), made.released_and_delivered()) == ([], [])


async def test_an_item_on_its_way_to_a_waiting_stage_is_released() -> None:
    made = Made(1)

    class Last:
        name = "last"

        async def run(self, inbox: Inbox[Held], outbox: Outbox[Held]) -> None:
            item = await anext(inbox)
            await anyio.wait_all_tasks_blocked()  # the stage after this one waits for an item
            await outbox.send(item)
            raise ValueError("right after it was sent")

    with pytest.raises(ValueError, match="right after"):
        await Pipeline(Last(), Relay()).run(made, into=made.delivered.append)
    assert made.lost() == []


async def test_an_item_that_the_feeder_waits_to_hand_over_is_released() -> None:
    made = Made(10)

    class Broken:
        name = "broken"

        async def run(self, inbox: Inbox[Held], outbox: Outbox[Held]) -> None:
            await anyio.wait_all_tasks_blocked()
            raise ValueError("before the first item")

    with pytest.raises(ValueError, match="before the first"):
        await Pipeline(Broken(), depth=2).run(made)
    assert (len(made.items) > 2, made.lost()) == (True, [])


async def test_items_left_by_a_stage_that_returns_early_are_released() -> None:
    made = Made(10)
    with pytest.raises(StateError):
        await Pipeline(Relay(), Idle(2), Relay()).run(made, into=made.delivered.append)
    assert made.lost() == []


async def test_an_item_whose_work_fails_is_released() -> None:
    @stage
    def fail(item: Held) -> Held:
        raise ValueError(item.where)

    made = Made(1)
    with pytest.raises(ValueError, match="item 0"):
        await Pipeline(fail).run(made)
    assert made.lost() == []


async def test_the_result_of_a_thread_that_was_cancelled_meanwhile_is_released() -> None:
    started, proceed = threading.Event(), threading.Event()
    made = Made(1)
    result = Held(99)

    @stage
    def work(item: Held) -> Held:
        item.release()
        started.set()
        proceed.wait(30)
        return result

    class Fails:
        name = "fails"

        async def run(self, inbox: Inbox[Held], outbox: Outbox[Held]) -> None:
            await anyio.to_thread.run_sync(started.wait, 30)
            threading.Timer(0.05, proceed.set).start()
            raise ValueError("while a thread works")

    with pytest.raises(ValueError, match="while a thread works"):
        await Pipeline(work, Fails()).run(made)
    assert result.released


async def cancel_at(step: int, ship: Pipeline[Held, Held], made: Made, items: Any) -> bool:
    """Run a pipeline, cancel it after some turns of the loop; False if it had ended before."""
    ended = False

    async def run() -> None:
        nonlocal ended
        await ship.run(items, into=made.delivered.append)
        ended = True

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        for _ in range(step):
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    return not ended


@pytest.mark.parametrize("slowly", [False, True], ids=["items at once", "items one by one"])
@pytest.mark.parametrize("depth", [0, 1, 2])
async def test_a_cancellation_at_any_step_loses_no_item(depth: int, slowly: bool) -> None:
    for step in range(200):
        made = Made(5)
        ship: Pipeline[Held, Held] = Pipeline(Relay(), FunctionStage(pass_on, workers=2), Relay(), depth=depth)
        cancelled = await cancel_at(step, ship, made, made.slowly() if slowly else made)
        assert (step, made.lost(), made.released_and_delivered()) == (step, [], [])
        if not cancelled:
            return
    raise AssertionError("the pipeline never came to its end")


async def pass_on(item: Held) -> Held:
    await anyio.lowlevel.checkpoint()
    return item


@settings(deadline=None, max_examples=60)
@given(
    depth=st.integers(0, 3),
    before=st.lists(st.sampled_from(["relay", "workers"]), max_size=2),
    after=st.lists(st.sampled_from(["relay", "workers"]), max_size=2),
    at=st.integers(0, 8),
    slowly=st.booleans(),
)
def test_in_any_pipeline_a_failure_loses_no_item(
    depth: int, before: list[str], after: list[str], at: int, slowly: bool
) -> None:
    make: dict[str, Callable[[], Any]] = {"relay": Relay, "workers": lambda: FunctionStage(pass_on, workers=3)}

    async def run() -> None:
        made = Made(8)
        stages = [*(make[kind]() for kind in before), Fails(at), *(make[kind]() for kind in after)]
        with pytest.raises(ValueError, match="failed at"):
            await Pipeline(*stages, depth=depth).run(made.slowly() if slowly else made, into=made.delivered.append)
        assert (made.lost(), made.released_and_delivered()) == ([], [])

    anyio.run(run)


# ---------------------------------------------------------------------- tasks together


async def test_gathered_tasks_are_all_waited_for() -> None:
    done: list[int] = []

    async def task(turns: int) -> None:
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        done.append(turns)

    await gather_bare([lambda: task(3), lambda: task(0)])
    assert sorted(done) == [0, 3]


async def test_a_cancellation_of_gathered_tasks_is_no_error_of_theirs() -> None:
    with anyio.move_on_after(0) as scope:
        await gather_bare([anyio.sleep_forever, anyio.sleep_forever])
    assert scope.cancelled_caught


async def test_what_is_no_ordinary_exception_is_not_swallowed() -> None:
    class Stop(BaseException):
        pass

    async def stop() -> None:
        raise Stop

    with pytest.raises(BaseException) as caught:  # noqa: PT011
        await gather_bare([stop, anyio.sleep_forever])
    assert isinstance(caught.value, Stop) or caught.group_contains(Stop)


# ---------------------------------------------------------------------- statistics


class Clock:
    """Time that passes only while every stage waits: it jumps to the end of the shortest work."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._alarms: list[tuple[float, anyio.Event]] = []

    def monotonic(self) -> float:
        return self.now_s

    def taking(self, seconds: float, name: str, workers: int = 1) -> FunctionStage[Any, Any]:
        async def work(item: Any) -> Any:
            await self.pass_by(seconds)
            return item

        return FunctionStage(work, name=name, workers=workers)

    async def pass_by(self, seconds: float) -> None:
        self._alarms.append((self.now_s + seconds, anyio.Event()))
        await self._alarms[-1][1].wait()

    async def run(self, *stages: Any, items: int, **options: Any) -> Summary:
        async def tick() -> None:
            while True:
                for _ in range(40):
                    await anyio.lowlevel.checkpoint()
                if self._alarms:
                    alarm = min(self._alarms, key=lambda pair: pair[0])
                    self._alarms.remove(alarm)
                    self.now_s = alarm[0]
                    alarm[1].set()

        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            summary = await Pipeline(*stages).run(range(items), **options)
            group.cancel_scope.cancel()
        return summary


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (meter, queues, runner):
        monkeypatch.setattr(module, "time", made)
    return made


@pytest.mark.parametrize("slow", [0, 1, 2])
async def test_the_stage_that_works_longest_is_the_bottleneck(clock: Clock, slow: int) -> None:
    stages = [clock.taking(10 if index == slow else 1, f"s{index}") for index in range(3)]
    assert (await clock.run(*stages, items=6)).bottleneck == f"s{slow}"


async def test_a_stage_before_a_slow_one_is_blocked_on_its_outbox(clock: Clock) -> None:
    summary = await clock.run(clock.taking(1, "fast"), clock.taking(10, "slow"), items=6)
    fast, slow = summary.stages
    # Item 0 arrives after 1 s; items 1 and 2 fill the queue, item 3 waits for room from 4 s to 11 s, and so on.
    assert (summary.wall_s, fast.busy_s, fast.blocked_out_s) == (61, 6, 7 + 9 + 9)
    assert (slow.busy_s, slow.blocked_in_s) == (60, 1)


async def test_a_stage_behind_a_slow_one_is_blocked_on_its_inbox(clock: Clock) -> None:
    slow, fast = (await clock.run(clock.taking(10, "slow"), clock.taking(1, "fast"), items=6)).stages
    assert (slow.busy_s, slow.blocked_in_s, slow.blocked_out_s) == (60, 0, 0)
    assert (fast.busy_s, fast.blocked_in_s, fast.blocked_out_s) == (6, 55, 0)


async def test_the_time_of_all_workers_is_added_up(clock: Clock) -> None:
    summary = await clock.run(clock.taking(10, "three", workers=3), items=6)
    (three,) = summary.stages
    assert (summary.wall_s, three.busy_s, summary.utilisation(three)) == (20, 60, 1.0)


async def test_waiting_for_a_lease_counts_as_blocked_on_output(clock: Clock) -> None:
    class Leases:
        name = "leases"

        async def run(self, inbox: Inbox[int], outbox: Outbox[int]) -> None:
            async for item in inbox:
                with outbox.waiting():
                    await clock.pass_by(7)
                await outbox.send(item)

    (one,) = (await clock.run(Leases(), items=2)).stages
    assert (one.blocked_out_s, one.busy_s) == (14, 0)


async def test_items_and_bytes_are_counted_where_they_are_taken_in() -> None:
    drop = FunctionStage(lambda item: item if item.number % 2 else DROP, name="drop")
    summary = await Pipeline(drop, Relay()).run(map(Held, range(5)))
    assert [(one.name, one.items, one.nbytes) for one in summary.stages] == [("drop", 5, 50), ("relay", 2, 20)]


async def test_a_stage_tells_of_each_item_how_long_it_waited_worked_and_was_blocked(clock: Clock) -> None:
    events: list[Event] = []
    await clock.run(clock.taking(1, "fast"), clock.taking(10, "slow"), items=5, observe=events.append, version=7)
    worked = [event for event in events if isinstance(event, StageWorked)]
    told = [(e.stage, e.frame, e.wait_s, e.work_s, e.blocked_s) for e in worked]
    assert [one for one in told if one[0] == "fast"] == [("fast", i, 0, 1, b) for i, b in enumerate([0, 0, 0, 7, 9])]
    assert [one for one in told if one[0] == "slow"] == [("slow", i, w, 10, 0) for i, w in enumerate([1, 0, 0, 0, 0])]
    assert {event.version for event in events} == {7}


async def test_what_is_told_of_items_adds_up_to_the_statistics(clock: Clock) -> None:
    events: list[Event] = []
    stages = clock.taking(3, "a", workers=2), clock.taking(2, "b"), clock.taking(5, "c", workers=3)
    summary = await clock.run(*stages, items=9, observe=events.append)
    for one, seconds in zip(summary.stages, (3, 2, 5), strict=True):
        mine = [event for event in events if isinstance(event, StageWorked) and event.stage == one.name]
        assert [event.work_s for event in mine] == [seconds] * 9
        assert sum(event.blocked_s for event in mine) == one.blocked_out_s


@pytest.mark.parametrize("workers", [1, 3])
async def test_an_error_of_the_observer_reaches_the_caller_and_loses_no_item(workers: int) -> None:
    def refuse(event: Event) -> None:
        raise OSError("the log is full")

    made = Made(10)
    with pytest.raises(OSError, match="the log is full"):
        await Pipeline(FunctionStage(pass_on, workers=workers), Relay()).run(
            made, into=made.delivered.append, observe=refuse
        )
    assert made.lost() == []


def statistics(name: str, busy_s: float, workers: int = 1) -> StageStatistics:
    return StageStatistics(name, workers, 0, 0, busy_s, 0.0, 0.0)


def test_the_busy_time_of_several_workers_is_shared_out_among_them() -> None:
    summary = Summary(10.0, (statistics("four", 16.0, workers=4), statistics("one", 5.0)))
    assert (summary.bottleneck, summary.utilisation(summary.stages[0])) == ("one", 0.4)


def test_a_summary_reads_as_shares_with_the_bottleneck_marked() -> None:
    summary = Summary(10.0, (statistics("construct", 4.0), statistics("compress", 9.7)))
    assert str(summary) == "construct 40 % | compress 97 % <- bottleneck"


def test_a_run_that_took_no_time_divides_by_nothing() -> None:
    assert Summary(0.0, (statistics("construct", 0.0),)).utilisation(statistics("construct", 0.0)) == 0.0


def test_drop_says_what_it_is() -> None:
    assert repr(DROP) == "dcr.DROP"
