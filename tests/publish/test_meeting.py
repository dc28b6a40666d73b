"""Steps of several ranks: all get all results, or all the same error; nobody waits for a rank that is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import numpy as np
import pytest
from support import publishing
from support.ranks import run

from dcr.errors import DcrError, DigestMismatch, RankError, RanksLost, StateError
from dcr.publish import meeting
from dcr.publish.meeting import Alone, Ranks
from dcr.testing.ranks import MemoryGroup

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def number(value: int, *, after_s: float = 0.0) -> Callable[[], Awaitable[int]]:
    async def work() -> int:
        await anyio.sleep(after_s)
        return value

    return work


def failure(error: Exception, *, after_s: float = 0.0) -> Callable[[], Awaitable[int]]:
    async def work() -> int:
        await anyio.sleep(after_s)
        raise error

    return work


async def ends(steps: list[Callable[[], Awaitable[Any]]]) -> list[Any]:
    """What becomes of each rank's step: its result, or the error that it raised."""
    found: dict[int, Any] = {}

    async def one(rank: int) -> None:
        try:
            found[rank] = await steps[rank]()
        except Exception as error:
            found[rank] = error

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for rank in range(len(steps)):
                tasks.start_soon(one, rank)
    return [found[rank] for rank in range(len(steps))]


def made(world: int, **options: Any) -> list[Ranks]:
    group = MemoryGroup(world, **options)
    return [Ranks(group.rank(rank)) for rank in range(world)]


async def share(ranks: list[Ranks], works: list[Callable[[], Awaitable[int]]], step: str = "step") -> list[Any]:
    return await ends(
        [lambda one=one, work=work: one.share(step, work, int) for one, work in zip(ranks, works, strict=False)]
    )


async def test_every_rank_gets_every_result_in_rank_order() -> None:
    ranks = made(3)
    assert await share(ranks, [number(10), number(11, after_s=0.05), number(12)]) == [[10, 11, 12]] * 3
    assert ranks[0].received_bytes > 0


async def test_what_the_first_rank_decides_all_learn() -> None:
    ranks = made(3)
    decide = [lambda one=one: one.decide("step", number(7 + one.rank), int) for one in ranks]
    assert await ends(decide) == [7, 7, 7]


async def test_lanes_add_up_and_wrap() -> None:
    ranks = made(3)
    lanes = np.array([[1, 2**64 - 1]], np.uint64)
    sums = await ends([lambda one=one: one.add("step", lanes) for one in ranks])
    assert [one.tolist() for one in sums] == [[[3, 2**64 - 3]]] * 3


async def test_one_rank_alone_meets_nobody() -> None:
    one = Ranks(Alone())
    value = object()

    async def work() -> Any:
        return value

    assert await one.share("step", work, object) == [value]
    assert await one.decide("step", work, object) is value
    assert one.received_bytes == 0


@pytest.mark.parametrize("after_s", [0.0, 0.05])
async def test_an_error_on_one_rank_is_of_the_same_type_on_all(after_s: float) -> None:
    ranks, error = made(3), DigestMismatch("bits")
    first, own, third = await share(ranks, [number(1), failure(error, after_s=after_s), number(3)])
    assert own is error
    assert (type(first), str(first)) == (type(third), str(third)) == (DigestMismatch, "rank 1: bits")
    assert await share(ranks, [number(1), number(2), number(3)], "next") == [[1, 2, 3]] * 3


async def test_of_several_errors_all_raise_that_of_the_lowest_rank() -> None:
    first, second, third = await share(made(3), [number(1), failure(StateError("one")), failure(KeyError("two"))])
    assert [str(first), str(second), str(third)] == ["rank 1: one", "one", "rank 1: one"]
    assert isinstance(third.__cause__, KeyError)


async def test_an_error_that_is_not_dcrs_names_its_type() -> None:
    first, _ = await share(made(2), [number(1), failure(ZeroDivisionError("by zero"))])
    assert isinstance(first, RankError)
    assert str(first) == "rank 1: ZeroDivisionError: by zero"


async def test_an_error_stops_the_work_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "BEAT_S", 0.05)
    first, _ = await share(made(2), [number(1, after_s=60), failure(StateError("at once"))])
    assert str(first) == "rank 1: at once"


async def test_long_work_is_not_mistaken_for_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "BEAT_S", 0.02)
    assert await share(made(2, timeout_s=0.2), [number(1), number(2, after_s=0.7)]) == [[1, 2]] * 2


async def test_ranks_at_different_steps_are_told_where_they_are() -> None:
    ranks = made(2)
    found = await ends([lambda one=one: one.share(f"publish {one.rank}", number(1), int) for one in ranks])
    assert [type(error) for error in found] == [StateError] * 2
    assert "rank 1 is at 'publish 1' while rank 0 is at 'publish 0'" in str(found[0])
    assert await share(ranks, [number(1), number(2)], "next") == [[1, 2]] * 2


async def test_a_rank_that_does_not_come_is_lost_for_good() -> None:
    ranks = made(3, timeout_s=0.1)
    for step in ("one", "two"):
        found = await share(ranks[:2], [number(1), number(2)], step)
        assert [type(error) for error in found] == [RanksLost] * 2


@pytest.mark.parametrize("before", ["work", "meeting"])
async def test_a_cancelled_rank_says_so_to_the_others(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it was at work, or waited at the meeting."""
    monkeypatch.setattr(meeting, "BEAT_S", 0.05)
    ranks, found = made(2), list[Any]()
    works = [number(0, after_s=0.3), number(1, after_s=60.0 if before == "work" else 0.0)]

    async def stays() -> None:
        for step in ("one", "two"):
            try:
                found.append(await ranks[0].share(step, works[0], int))
            except DcrError as error:
                found.append(error)
                return

    async def leaves() -> None:
        async with ranks[1]:
            with anyio.move_on_after(0.1):
                await ranks[1].share("one", works[1], int)
                await anyio.sleep(60)

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stays)
            tasks.start_soon(leaves)
    assert isinstance(found[-1], RanksLost)
    assert "rank 1" in str(found[-1])
    assert ranks[0].lost is not None


async def test_all_ranks_may_leave_at_any_time() -> None:
    ranks = made(2)

    async def life(one: Ranks, sleep_s: float) -> None:
        async with one:
            await one.share("step", number(1), int)
            await anyio.sleep(sleep_s)

    assert await ends([lambda: life(ranks[0], 0.0), lambda: life(ranks[1], 0.2)]) == [None, None]


def test_a_process_group_gathers_and_adds() -> None:
    """Real ranks: sizes that differ, nothing at all, sums that wrap; the default group is refused."""
    for facts in run(2, publishing.grouped):
        assert facts["gathered"] == [[b"", b"\x01" * 1000], [b"", b""], [b"x", b"x\x01"]]
        assert facts["added"] == [[2**64 - 2, 1], [0, 0]]
        assert "a group of its own" in facts["refused"]
