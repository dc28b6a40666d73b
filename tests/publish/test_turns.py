"""What `publish` does while a version is under way: wait, or skip, alike on all ranks."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from support.refits import FAST, Weights, empty_like, publish, require_equal, running, set_bits, state
from support.rows import Model, trainer

import dcr
import dcr.blocking
from dcr.errors import OptionError, StateError
from dcr.events import Event, PublishSkipped
from dcr.testing.memory import MemoryTransport

URL = "memory:///turns"


class Slow:
    """A member that installs a version once it may."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.version: int | None = None
        self.may_install = anyio.Event()
        self.may_install.set()
        self.news = anyio.Event()

    async def run(self, url: str, transport: Any) -> None:
        loader = dcr.loader(self.module)
        async with dcr.subscriber(url, loader=loader, member="slow", transport=transport) as versions:
            async for version in versions:
                await self.may_install.wait()
                await version.install()
                self.version = version.number
                self.news.set()
                self.news = anyio.Event()

    async def reached(self, version: int) -> None:
        with anyio.fail_after(20):
            while self.version is None or self.version < version:
                await self.news.wait()


@asynccontextmanager
async def following(url: str, module: torch.nn.Module, transport: Any) -> AsyncIterator[Slow]:
    slow = Slow(empty_like(module))
    async with anyio.create_task_group() as group:
        group.start_soon(slow.run, url, transport)
        yield slow
        group.cancel_scope.cancel()


def weights() -> Weights:
    return Weights({"w": torch.zeros(1000, dtype=torch.bfloat16)})


def change(module: Weights, step: int) -> None:
    set_bits(module.w, np.arange(step % 7, 1000, 7), np.full(len(range(step % 7, 1000, 7)), step, np.uint16))


async def test_a_trainer_goes_on_beside_a_slow_member_which_ends_at_the_newest_version(tmp_path: Path) -> None:
    module, events, url = weights(), list[Event](), f"local://{tmp_path}"
    async with (
        following(url, module, FAST) as slow,
        dcr.publisher(
            url, source=dcr.source(module), transport=FAST, when_busy="skip", observe=events.append
        ) as publisher,
    ):
        await publisher.joined(1)
        await publish(publisher, 1)
        await slow.reached(1)
        slow.may_install = anyio.Event()
        await publish(publisher, 2)  # it prepares this one, and then installs it for long
        change(module, 3)
        third = await publisher.publish(3)
        skipped = []
        for step in range(4, 20):
            await publisher.captured()
            change(module, step)
            skipped.append(await publisher.publish(step))
        assert not third.skipped
        assert all(refit.skipped for refit in skipped)
        slow.may_install.set()
        assert (await third.committed()).changed
        last = await publisher.publish(20, when_busy="wait")
        await last.committed()
        await slow.reached(20)
        require_equal(slow.module, state(module))
    told = [event for event in events if isinstance(event, PublishSkipped)]
    assert [event.version for event in told] == list(range(4, 20))
    assert {event.busy_with for event in told} == {3}


async def test_a_skipped_refit_says_so_and_leaves_its_number_free(tmp_path: Path) -> None:
    module, url = weights(), f"local://{tmp_path}"
    async with (
        following(url, module, FAST) as slow,
        dcr.publisher(url, source=dcr.source(module), transport=FAST) as publisher,
    ):
        await publisher.joined(1)
        await publish(publisher, 1)
        await slow.reached(1)
        slow.may_install = anyio.Event()
        await publish(publisher, 2)
        under_way = await publisher.publish(3)
        refit = await publisher.publish(when_busy="skip")
        assert (refit.skipped, refit.version) == (True, 4)
        with anyio.fail_after(0):
            await refit.captured()
        for wait in (refit.committed, refit.installed):
            with pytest.raises(StateError, match="version 4 was skipped"):
                await wait()
        slow.may_install.set()
        await under_way.committed()
        assert not (await publisher.publish(4, when_busy="skip")).skipped


async def test_a_number_that_was_used_is_refused_by_a_call_that_is_skipped_too(tmp_path: Path) -> None:
    module, url = weights(), f"local://{tmp_path}"
    async with (
        following(url, module, FAST) as slow,
        dcr.publisher(url, source=dcr.source(module), transport=FAST, when_busy="skip") as publisher,
    ):
        await publisher.joined(1)
        slow.may_install = anyio.Event()
        await publish(publisher, 1)
        await publisher.publish(2)
        with pytest.raises(StateError, match="version 2 is not new"):
            await publisher.publish(2)
        slow.may_install.set()


async def test_what_is_neither_wait_nor_skip_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"source": dcr.source(weights()), "transport": FAST}
    with pytest.raises(OptionError, match="'wait' or 'skip'"):
        dcr.publisher(f"local://{tmp_path}", when_busy="no", **options)
    async with dcr.publisher(f"local://{tmp_path}", **options) as publisher:
        with pytest.raises(OptionError, match="'wait' or 'skip'"):
            await publisher.publish(when_busy="no")  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
async def test_ranks_skip_the_same_calls_whoever_comes_first(seed: int) -> None:
    """Each rank publishes at its own pace; none waits for the slow member."""
    model, transport, chance = Model(), MemoryTransport(), random.Random(seed)
    paces = [0.0, chance.choice([0.0, 0.003]), chance.choice([0.0, 0.003])]
    chance.shuffle(paces)
    skipped: list[list[bool]] = [[], [], []]
    async with (
        following(URL, model.engine(), transport) as slow,
        trainer(URL, model, 3, transport=transport, when_busy="skip") as ranks,
    ):
        await ranks.publishers[0].joined(1)
        await ranks.publish(1)
        await slow.reached(1)
        slow.may_install = anyio.Event()
        await ranks.publish(2)
        model.step()
        for source in ranks.sources:
            source.take()

        async def loop(rank: int) -> None:
            for step in range(3, 30):
                await anyio.sleep(paces[rank])
                refit = await ranks.publishers[rank].publish(step)
                skipped[rank].append(refit.skipped)
                if step == 20 and rank == 0:
                    slow.may_install.set()

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for rank in range(3):
                    tasks.start_soon(loop, rank)
        assert skipped[0] == skipped[1] == skipped[2]
        assert skipped[0][:18] == [False, *[True] * 17]
        model.step()
        for source in ranks.sources:
            source.take()

        async def finish(publisher: dcr.Publisher) -> None:
            await (await publisher.publish(40, when_busy="wait")).committed()

        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for publisher in ranks.publishers:
                    tasks.start_soon(finish, publisher)
        await slow.reached(40)
        require_equal(slow.module, model.expected())


def test_the_blocking_face_skips_too(tmp_path: Path) -> None:
    module = weights()
    with dcr.blocking.publisher(f"local://{tmp_path}", source=dcr.source(module), transport=FAST) as publisher:
        assert not publisher.publish(1, when_busy="skip").skipped


async def test_errors_of_a_version_reach_whoever_publishes_next(tmp_path: Path) -> None:
    """A version that failed is not under way: the next call, which would not be skipped, raises what became of it."""
    module = weights()
    async with (
        running(tmp_path, []) as url,
        dcr.publisher(
            url, source=dcr.source(module), transport=FAST, when_busy="skip", quorum=1, vote_timeout_s=0.1
        ) as publisher,
    ):
        refit = await publisher.publish(1)
        with pytest.raises(dcr.errors.VoteError):
            await refit.committed()
        again = await publisher.publish(when_busy="wait")
        with pytest.raises(dcr.errors.VoteError):
            await again.committed()
