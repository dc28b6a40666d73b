"""When anchors are stored, and what may go then: by count, by bytes, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.refits import FAST, Weights, publish

import dcr
from dcr.publish.retention import EARLIEST, LATEST, Retention

DENSE = 1000


def commits_until_due(retention: Retention, delta_bytes: int) -> int:
    return next(count for count in range(1, 2 * LATEST) if retention.count(delta_bytes))


@pytest.mark.parametrize(
    ("delta_bytes", "commits"), [(DENSE, EARLIEST), (DENSE // 2, EARLIEST), (DENSE // 50, 50), (0, LATEST)]
)
def test_an_anchor_is_due_once_deltas_take_as_many_bytes(delta_bytes: int, commits: int) -> None:
    retention = Retention("auto", DENSE)
    for version in (7, 8):
        assert commits_until_due(retention, delta_bytes) == commits
        retention.anchor(version)


def test_an_anchor_that_could_not_be_stored_stays_due() -> None:
    retention = Retention("auto", DENSE)
    commits_until_due(retention, DENSE)
    assert retention.count(0)


def test_a_number_is_counted_in_commits() -> None:
    retention = Retention(3, DENSE)
    assert [retention.count(DENSE) for _ in range(6)] == [False, False, True, False, False, True]


@pytest.mark.parametrize("every", ["auto", 2])
def test_what_lies_before_the_last_but_one_anchor_may_go(every: object) -> None:
    retention = Retention(every, DENSE)  # type: ignore[arg-type]
    assert [retention.anchor(version) for version in (1, 21, 41)] == [None, 1, 21]


def test_without_anchors_everything_is_kept() -> None:
    retention = Retention(None, DENSE)
    assert not any(retention.count(DENSE) for _ in range(2 * LATEST))
    assert [retention.anchor(version) for version in (1, 2)] == [None, None]


async def test_a_runs_directory_stays_small_unasked(tmp_path: Path) -> None:
    trainer = Weights({"w": torch.zeros(400, dtype=torch.bfloat16)})
    url = f"local://{tmp_path}/run"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
        for version in range(1, 3 * EARLIEST):
            trainer.w.data.view(torch.int16).add_(1)
            await publish(publisher, version)
    async with FAST.open(url) as run:
        kept = [version for version in range(3 * EARLIEST) if await run.store.outlines(version - 1, version)]
    assert kept == list(range(EARLIEST + 1, 3 * EARLIEST))
