"""What looking for news and for stored versions costs: nothing that grows with how many of them a run keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import torch
from support.refits import FAST, Rollout, Weights, publish, running

import dcr
from dcr import chain
from dcr.transports.local import listing
from dcr.transports.local.listing import TICK_S, Listing


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each folder was listed, by its name."""
    counts: Counter[str] = Counter()
    real = Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        counts[folder.name] += 1
        return real(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    return counts


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(listing, "time", clock)
    return clock


async def test_versions_are_published_and_installed_without_a_list_of_all(tmp_path: Path, listed: Counter[str]) -> None:
    trainer = Weights({"w": torch.zeros(64, dtype=torch.bfloat16)})
    engine = Rollout(Weights({"w": torch.ones(64, dtype=torch.bfloat16)}))
    async with (
        running(tmp_path, [engine]) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
    ):
        await publisher.joined(1)
        await publish(publisher, 1)
        await engine.reached(1)
        listed.clear()
        for version in (2, 3, 4):
            trainer.w.data.view(torch.int16).add_(1)
            await publish(publisher, version)
            await engine.reached(version)
        await anyio.sleep(20 * 0.001)  # and while there is nothing new
    assert listed["attempts"] == 0


async def test_a_chain_is_walked_with_one_list(tmp_path: Path, listed: Counter[str], clock: Clock) -> None:
    trainer = Weights({"w": torch.zeros(64, dtype=torch.bfloat16)})
    url = f"local://{tmp_path}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
        for version in range(1, 12):
            trainer.w.data.view(torch.int16).add_(1)
            await publish(publisher, version)
    async with FAST.open(url) as run:
        head, _ = await run.ledger.read()
        assert head is not None
        assert head.identity is not None
        assert await run.store.newest() == 11
        clock.now_s += TICK_S
        listed.clear()
        assert len(await chain.back_from(run.store, head.identity, until=None)) == 11
    assert listed["attempts"] == 1


def attempt(folder: Path, version: int) -> None:
    (folder / f"{version:012d}.000001.0001").mkdir()


def test_a_list_is_made_anew_once_something_changed(tmp_path: Path, clock: Clock) -> None:
    attempts = Listing(tmp_path)
    assert attempts.newest() == -1
    for version in (3, 4):
        attempt(tmp_path, version)
        clock.now_s += 10 * TICK_S
        assert [path.name for path in attempts.at(version)] == [f"{version:012d}.000001.0001"]
        assert attempts.newest() == version


def test_two_changes_within_one_tick_of_the_file_system_are_both_seen(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "stamp_of", lambda _: (1, 1, 1))
    attempts = Listing(tmp_path)
    for version in (1, 2):
        attempt(tmp_path, version)
        clock.now_s += TICK_S / 4
        assert attempts.newest() == version


def test_a_run_that_is_not_there_has_no_attempts(tmp_path: Path) -> None:
    assert Listing(tmp_path / "missing").newest() == -1
