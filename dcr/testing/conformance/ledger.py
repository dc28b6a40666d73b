"""The guarantees of a ledger."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import pytest

from dcr.errors import LocalError
from dcr.pipeline import gather_bare
from dcr.protocol.wire import Head
from dcr.seams import Run
from dcr.testing.conformance.scene import RUN, How, cancelled_at, identity, on_a_loop
from dcr.testing.conformance.setting import Setting


class LedgerTests(Setting):
    """The head: one record, moved by compare-and-set."""

    @on_a_loop
    async def test_a_new_run_has_no_head(self) -> None:
        async with self.scene() as scene:
            head, _ = await (await scene.open()).ledger.read()
            assert head is None

    @on_a_loop
    async def test_a_head_is_read_back_as_it_was_written(self) -> None:
        head = Head("any name: /\N{SNOWMAN}", 1 << 40, identity(1 << 40, term=3), bytes(range(32)))
        async with self.scene() as scene:
            run = await scene.open()
            await scene.move(run, head)
            found, _ = await run.ledger.read()
            assert found == head

    @on_a_loop
    async def test_a_head_is_seen_by_everybody_who_opens_the_run(self) -> None:
        async with self.scene() as scene:
            before, writer = await scene.open(), await scene.open()
            await scene.move(writer, Head(RUN, 1, None, b""))
            for run in (before, await scene.open()):
                head, _ = await run.ledger.read()
                assert head == Head(RUN, 1, None, b"")

    @on_a_loop
    async def test_a_tag_stays_while_nobody_swaps(self) -> None:
        async with self.scene() as scene:
            run = await scene.open()
            await scene.move(run, Head(RUN, 1, None, b""))
            first = await run.ledger.read()
            assert await (await scene.open()).ledger.read() == first

    @on_a_loop
    async def test_a_stale_tag_is_refused(self) -> None:
        async with self.scene() as scene:
            run = await scene.open()
            _, stale = await run.ledger.read()
            await scene.move(run, Head(RUN, 1, None, b""))
            assert not await run.ledger.swap(Head(RUN, 2, None, b""), stale), "a swap with a stale tag succeeded"

    @on_a_loop
    async def test_a_refused_swap_changes_nothing(self) -> None:
        async with self.scene() as scene:
            run = await scene.open()
            _, stale = await run.ledger.read()
            await scene.move(run, Head(RUN, 1, None, b""))
            before = await run.ledger.read()
            await run.ledger.swap(Head(RUN, 2, None, b""), stale)
            assert await run.ledger.read() == before

    @on_a_loop
    async def test_of_many_swaps_at_once_exactly_one_wins(self) -> None:
        async with self.scene() as scene:
            runs = [await scene.open() for _ in range(6)]
            for term in range(1, 6):
                won = await _swap_at_once(runs, [Head(f"of {index}", term, None, b"") for index in range(len(runs))])
                assert len(won) == 1, f"{len(won)} of {len(runs)} swaps with one tag succeeded"

    @on_a_loop
    async def test_the_head_is_that_of_the_winner(self) -> None:
        async with self.scene() as scene:
            runs = [await scene.open() for _ in range(6)]
            for term in range(1, 6):
                heads = [Head(f"of {index}", term, None, b"") for index in range(len(runs))]
                won = await _swap_at_once(runs, heads)
                head, _ = await runs[0].ledger.read()
                assert head in [heads[index] for index in won], f"{won} won, and the head is {head}"

    @pytest.mark.parametrize("how", ["scope", "task"])
    @on_a_loop
    async def test_a_swap_cancelled_at_any_await_happened_or_did_not(self, how: How) -> None:
        async with self.scene() as scene:
            run = await scene.open()
            possible: list[Head | None] = [None]
            for n in itertools.count(1):
                _, tag = await run.ledger.read()
                new = Head(RUN, n, None, b"")
                possible.append(new)
                swapped = await cancelled_at(n, how, partial(run.ledger.swap, new, tag))
                head, _ = await run.ledger.read()
                assert head in possible, f"a swap was cancelled, and the head is {head}"
                if swapped == [True]:
                    assert head == new, "a swap succeeded, and the head is another one"
                    break

    @on_a_loop
    async def test_a_url_that_makes_no_sense_is_refused(self) -> None:
        for url in self.wrong_urls:
            with pytest.raises(LocalError):
                async with self.transport.open(url):
                    pass


async def _swap_at_once(runs: Sequence[Run], heads: Sequence[Head]) -> list[int]:
    """Swap in as many heads with one tag, all at once; the indices of those that succeeded."""
    _, tag = await runs[0].ledger.read()
    won: list[int] = []

    async def swap(index: int) -> None:
        if await runs[index].ledger.swap(heads[index], tag):
            won.append(index)

    await gather_bare([partial(swap, index) for index in range(len(runs))])
    return won
