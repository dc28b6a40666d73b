"""What others do to an engine's weights: a sleep, a reload; and which version the engine is told to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.refits import FAST, publish
from support.tensor_parallel import WatchedRank, fill, in_threads, parts, touched, toys, trainer_of, values

import dcr
from dcr.engines.ranks import Ranks
from dcr.errors import BaseMismatch, ReadBackError, StateError


class LabelledRanks(Ranks):
    """Ranks of an engine that shows a version, and notes when it is paused and what is bound meanwhile."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        super().__init__(ranks)
        self.labels: list[int] = []
        self.calls: list[str] = []

        self.engine = self

    def bind(self, layout: Any) -> Any:
        self.calls.append("bind")
        return super().bind(layout)

    async def pause(self) -> None:
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def flush(self) -> None: ...

    async def label(self, version: int) -> None:
        self.labels.append(version)


class Run:
    """A trainer at version 1, and two ranks that have loaded it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"local://{folder / 'run'}"
        self.weights = values(1)
        self.trainer = trainer_of(self.weights)
        self.ranks = [WatchedRank(rank, 2) for rank in range(2)]
        for rank, loaded in zip(self.ranks, toys(2, self.weights), strict=True):
            rank.memories = loaded.memories

    def publisher(self) -> dcr.Publisher:
        return dcr.publisher(self.url, source=dcr.source(self.trainer), transport=FAST, frame_elems=33)

    def subscriber(self, loader: Any) -> dcr.Subscriber:
        return dcr.subscriber(self.url, loader=loader, member="m", transport=FAST)

    async def next(self, publisher: dcr.Publisher, versions: dcr.Subscriber, number: int = 2) -> dcr.Version:
        self.weights = touched(self.weights, number)
        fill(self.trainer, self.weights)
        await publisher.publish(number)
        return await anext(versions)

    @property
    def installed(self) -> bool:
        return parts(self.ranks) == parts(toys(2, self.weights))


Joined = Callable[[Run], Sequence[Any]]


@pytest.fixture(params=["here", "behind sockets"])
def joined(request: pytest.FixtureRequest) -> Iterator[Joined]:
    """The ranks of a run, as they are or as workers."""
    with ExitStack() as opened:

        def join(run: Run) -> Sequence[Any]:
            ranks = run.ranks if request.param == "here" else in_threads(run.ranks, run.folder)
            for rank in ranks if ranks is not run.ranks else ():
                opened.callback(rank.close)
            return ranks

        yield join


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


async def test_an_engine_that_sleeps_is_not_written_and_takes_the_version_once_it_is_awake(
    run: Run, joined: Joined
) -> None:
    async with run.publisher() as publisher:
        await publish(publisher, 1)
        async with run.subscriber(Ranks(joined(run))) as versions:
            await publisher.joined(1)
            version = await run.next(publisher, versions)
            before = parts(run.ranks)
            run.ranks[1].sleeps = True
            with pytest.raises(StateError, match="sleeps"):
                await version.install()
            assert parts(run.ranks) == before
            run.ranks[1].sleeps = False
            await version.install()
            assert run.installed


async def test_weights_that_somebody_else_has_written_are_scanned_before_a_version_is_installed_on_them(
    run: Run, joined: Joined
) -> None:
    async with run.publisher() as publisher:
        await publish(publisher, 1)
        async with run.subscriber(Ranks(joined(run))) as versions:
            await publisher.joined(1)
            version = await run.next(publisher, versions)
            for memory in run.ranks[1].memories.values():
                memory[3:-2] ^= 1
            run.ranks[1].writes += 1
            before = parts(run.ranks)
            with pytest.raises(BaseMismatch, match="something other than dcr has written"):
                await version.install()
            assert parts(run.ranks) == before
            assert not versions.may_serve
            seed = await anext(versions)
            assert (seed.number, seed.kind) == (2, "seed")
            await seed.install()
            assert run.installed


async def test_weights_that_were_reloaded_with_the_same_bits_go_on_after_one_scan(run: Run, joined: Joined) -> None:
    async with run.publisher() as publisher:
        await publish(publisher, 1)
        async with run.subscriber(Ranks(joined(run))) as versions:
            await publisher.joined(1)
            version = await run.next(publisher, versions)
            scans = run.ranks[0].scans
            run.ranks[1].writes += 1
            await version.install()
            assert run.installed
            assert run.ranks[0].scans == scans + 1
            version = await run.next(publisher, versions, 3)
            await version.install()
            assert run.ranks[0].scans == scans + 1


async def test_an_engine_that_sleeps_is_not_seeded(run: Run) -> None:
    for memory in run.ranks[0].memories.values():
        memory[3:-2] ^= 1
    async with run.publisher() as publisher:
        await publish(publisher, 1)
        async with run.subscriber(Ranks(run.ranks)) as versions:
            seed = await anext(versions)
            run.ranks[1].sleeps = True
            before = parts(run.ranks)
            with pytest.raises(StateError, match="sleeps"):
                await seed.install()
            assert parts(run.ranks) == before
            run.ranks[1].sleeps = False
            await seed.install()
            assert run.installed


async def test_a_version_that_is_recognised_is_shown_and_every_one_that_is_installed(run: Run) -> None:
    loader = LabelledRanks(run.ranks)
    async with run.publisher() as publisher:
        await publish(publisher, 1)
        async with run.subscriber(loader) as versions:
            assert loader.labels == [1]
            assert loader.calls == ["pause", "bind", "resume"]
            await publisher.joined(1)
            version = await run.next(publisher, versions)
            assert loader.labels == [1]
            assert loader.calls == ["pause", "bind", "resume"]
            await version.install()
            assert loader.labels == [1, 2]


async def test_a_version_that_is_seeded_is_shown(run: Run) -> None:
    for memory in run.ranks[0].memories.values():
        memory[3:-2] ^= 1
    loader = LabelledRanks(run.ranks)
    async with run.publisher() as publisher:
        await publish(publisher, 1)
        async with run.subscriber(loader) as versions:
            assert loader.labels == []
            await (await anext(versions)).install()
            assert loader.labels == [1]
            assert loader.calls == ["pause", "bind", "resume"]


async def test_an_undo_shows_the_version_before_once_more(run: Run) -> None:
    loader = LabelledRanks(run.ranks)
    async with run.publisher() as publisher:
        await publish(publisher, 1)
        async with run.subscriber(loader) as versions:
            await publisher.joined(1)
            version = await run.next(publisher, versions)
            run.ranks[1].fail_at = run.ranks[1].installs + 1
            with pytest.raises(ReadBackError):
                await version.install()
            assert loader.labels == [1, 1]
