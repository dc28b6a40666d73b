"""The byte budget: never over its limit, first come first served, and nothing is lost to a cancellation."""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.errors import BudgetError, StateError
from dcr.pipeline.budget import ByteBudget, Lease


class Askers:
    """Tasks that each ask for one lease and keep it; who got theirs, in order."""

    def __init__(self, group: anyio.abc.TaskGroup, budget: ByteBudget) -> None:
        self._group = group
        self._budget = budget
        self.scopes: dict[str, anyio.CancelScope] = {}
        self.leases: dict[str, Lease] = {}

    async def ask(self, name: str, nbytes: int) -> None:
        """Start a task and let it run until it holds its lease or waits for it."""
        self.scopes[name] = anyio.CancelScope()
        self._group.start_soon(self._hold, name, nbytes)
        await anyio.wait_all_tasks_blocked()

    async def _hold(self, name: str, nbytes: int) -> None:
        with self.scopes[name]:
            lease = await self._budget.lease(nbytes)
            self.leases[name] = lease

    @property
    def granted(self) -> list[str]:
        return list(self.leases)


async def test_a_lease_that_fits_is_granted_at_once() -> None:
    budget = ByteBudget(10)
    await budget.lease(10)
    assert budget.statistics().leased == 10


async def test_a_lease_that_does_not_fit_waits_until_enough_is_given_back() -> None:
    budget = ByteBudget(10)
    first = await budget.lease(6)
    async with anyio.create_task_group() as group:
        askers = Askers(group, budget)
        await askers.ask("a", 5)
        assert (askers.granted, budget.statistics().waiters) == ([], 1)
        first.release()
        await anyio.wait_all_tasks_blocked()
    assert (askers.granted, budget.statistics().leased) == (["a"], 5)


async def test_leases_are_granted_in_the_order_they_were_asked_for() -> None:
    budget = ByteBudget(10)
    first = await budget.lease(10)
    async with anyio.create_task_group() as group:
        askers = Askers(group, budget)
        for name in "abc":
            await askers.ask(name, 3)
        first.release()
        await anyio.wait_all_tasks_blocked()
    assert askers.granted == ["a", "b", "c"]


async def test_a_small_lease_does_not_overtake_a_big_one() -> None:
    budget = ByteBudget(10)
    first = await budget.lease(5)
    async with anyio.create_task_group() as group:
        askers = Askers(group, budget)
        await askers.ask("big", 8)
        await askers.ask("small", 1)
        assert askers.granted == []
        first.release()
        await anyio.wait_all_tasks_blocked()
    assert askers.granted == ["big", "small"]


async def test_shrinking_a_lease_lets_the_next_one_in() -> None:
    budget = ByteBudget(10)
    first = await budget.lease(10)
    async with anyio.create_task_group() as group:
        askers = Askers(group, budget)
        await askers.ask("a", 4)
        first.shrink(7)
        await anyio.wait_all_tasks_blocked()
        assert askers.granted == []
        first.shrink(6)
        await anyio.wait_all_tasks_blocked()
    assert (askers.granted, first.nbytes) == (["a"], 6)


async def test_a_lease_cannot_grow() -> None:
    budget = ByteBudget(10)
    lease = await budget.lease(4)
    with pytest.raises(StateError, match="a lease of 4 bytes cannot grow to 5"):
        lease.shrink(5)
    assert (lease.nbytes, budget.statistics().leased) == (4, 4)


async def test_a_lease_cannot_shrink_below_nothing() -> None:
    budget = ByteBudget(10)
    lease = await budget.lease(4)
    with pytest.raises(StateError):
        lease.shrink(-1)
    assert budget.statistics().leased == 4


async def test_releasing_twice_gives_back_once() -> None:
    budget = ByteBudget(10)
    lease, other = await budget.lease(4), await budget.lease(5)
    lease.release()
    lease.release()
    assert (budget.statistics().leased, other.nbytes) == (5, 5)


async def test_a_lease_ends_with_its_block_even_when_that_fails() -> None:
    budget = ByteBudget(10)
    with pytest.raises(ZeroDivisionError), await budget.lease(4):
        raise ZeroDivisionError
    assert budget.statistics().leased == 0


async def test_a_lease_larger_than_the_budget_is_refused_even_while_others_wait() -> None:
    budget = ByteBudget(10)
    await budget.lease(10)
    with pytest.raises(BudgetError, match="a lease of 11 bytes exceeds the budget of 10"):
        await budget.lease(11)


async def test_a_lease_of_less_than_nothing_is_refused() -> None:
    budget = ByteBudget(10)
    with pytest.raises(BudgetError):
        await budget.lease(-1)
    assert budget.statistics().leased == 0


@pytest.mark.parametrize("limit", [0, -1])
def test_a_budget_of_nothing_is_refused(limit: int) -> None:
    with pytest.raises(BudgetError, match="must be positive"):
        ByteBudget(limit)


async def test_a_lease_of_nothing_waits_its_turn_but_takes_nothing() -> None:
    budget = ByteBudget(10)
    await budget.lease(10)
    await budget.lease(0)
    assert budget.statistics().leased == 10


async def test_the_peak_is_the_most_that_was_ever_leased() -> None:
    budget = ByteBudget(10)
    one = await budget.lease(3)
    other = await budget.lease(5)
    one.release()
    other.release()
    assert (budget.statistics().peak, budget.statistics().leased) == (8, 0)


# ---------------------------------------------------------------------- cancellation


async def test_a_waiter_that_is_cancelled_takes_nothing() -> None:
    budget = ByteBudget(10)
    first = await budget.lease(10)
    async with anyio.create_task_group() as group:
        askers = Askers(group, budget)
        await askers.ask("a", 4)
        askers.scopes["a"].cancel()
    first.release()
    assert (budget.statistics().leased, budget.statistics().waiters) == (0, 0)


@pytest.mark.parametrize("order", ["release first", "cancel first"])
async def test_a_waiter_granted_and_cancelled_at_one_moment_holds_its_lease_or_nothing(order: str) -> None:
    budget = ByteBudget(10)
    first = await budget.lease(10)
    async with anyio.create_task_group() as group:
        askers = Askers(group, budget)
        await askers.ask("a", 4)
        steps = [first.release, askers.scopes["a"].cancel]
        for step in steps if order == "release first" else reversed(steps):
            step()
        await anyio.wait_all_tasks_blocked()
    assert budget.statistics().leased == sum(lease.nbytes for lease in askers.leases.values())
    assert budget.statistics().waiters == 0


async def test_a_task_cancelled_at_the_moment_of_the_grant_gives_it_back() -> None:
    budget = ByteBudget(10)
    first = await budget.lease(10)
    waiting = asyncio.ensure_future(budget.lease(4))
    await anyio.wait_all_tasks_blocked()
    first.release()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert budget.statistics().leased == 0


async def test_cancelling_the_first_waiter_lets_the_one_behind_it_in() -> None:
    budget = ByteBudget(10)
    await budget.lease(5)
    async with anyio.create_task_group() as group:
        askers = Askers(group, budget)
        await askers.ask("big", 8)
        await askers.ask("small", 5)
        askers.scopes["big"].cancel()
        await anyio.wait_all_tasks_blocked()
        assert askers.granted == ["small"]


async def test_cancelling_a_waiter_in_the_middle_keeps_the_order_of_the_others() -> None:
    budget = ByteBudget(10)
    first = await budget.lease(10)
    async with anyio.create_task_group() as group:
        askers = Askers(group, budget)
        for name in "abc":
            await askers.ask(name, 4)
        askers.scopes["b"].cancel()
        await anyio.wait_all_tasks_blocked()
        first.release()
        await anyio.wait_all_tasks_blocked()
    assert askers.granted == ["a", "c"]


async def test_a_deadline_passed_while_waiting_takes_nothing() -> None:
    budget = ByteBudget(10)
    await budget.lease(8)
    with anyio.move_on_after(0):
        await budget.lease(4)
    assert (budget.statistics().leased, budget.statistics().waiters) == (8, 0)


OPERATIONS = st.lists(
    st.tuples(st.just("ask"), st.integers(0, 10))
    | st.tuples(st.sampled_from(["cancel", "release", "halve"]), st.integers(0, 9))
    | st.tuples(st.just("run"), st.just(0)),
    max_size=40,
)


@settings(deadline=None, max_examples=100)
@given(OPERATIONS)
def test_in_any_interleaving_the_limit_holds_and_everything_comes_back(operations: list[tuple[str, int]]) -> None:
    async def run() -> None:
        budget = ByteBudget(10)
        async with anyio.create_task_group() as group:
            askers = Askers(group, budget)
            for number, (verb, value) in enumerate(operations):
                name = str(value)
                match verb:
                    case "ask":
                        askers.scopes[str(number)] = anyio.CancelScope()
                        group.start_soon(askers._hold, str(number), value)
                    case "cancel" if name in askers.scopes:
                        askers.scopes[name].cancel()
                    case "release" if name in askers.leases:
                        askers.leases[name].release()
                    case "halve" if name in askers.leases:
                        askers.leases[name].shrink(askers.leases[name].nbytes // 2)
                    case _:
                        await anyio.lowlevel.checkpoint()
                held = sum(lease.nbytes for lease in askers.leases.values())
                assert held <= budget.statistics().leased <= 10
            await anyio.wait_all_tasks_blocked()
            assert sum(lease.nbytes for lease in askers.leases.values()) == budget.statistics().leased
            for scope in askers.scopes.values():
                scope.cancel()
        for lease in askers.leases.values():
            lease.release()
        assert (budget.statistics().leased, budget.statistics().waiters) == (0, 0)

    anyio.run(run)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 10), max_size=8), st.sets(st.integers(0, 7)))
def test_those_that_are_not_cancelled_are_served_in_order(sizes: list[int], cancelled: set[int]) -> None:
    async def run() -> None:
        budget = ByteBudget(10)
        order: list[int] = []

        async def use(index: int, scope: anyio.CancelScope) -> None:
            with scope, await budget.lease(sizes[index]):
                order.append(index)
                await anyio.lowlevel.checkpoint()

        first = await budget.lease(10)
        async with anyio.create_task_group() as group:
            scopes = [anyio.CancelScope() for _ in sizes]
            for index, scope in enumerate(scopes):
                group.start_soon(use, index, scope)
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            already = set(order)
            for index in cancelled & set(range(len(sizes))):
                scopes[index].cancel()
            first.release()
        waited = [index for index in order if index not in already]
        assert waited == [index for index in range(len(sizes)) if index not in cancelled | already]

    anyio.run(run)
