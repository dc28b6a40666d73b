"""A member that holds an offered version back can ask how far the run has gone on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.refits import FAST, publish
from torch import nn

import dcr
import dcr.blocking
from dcr.errors import StateError

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def step(model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight.add_(1)


@asynccontextmanager
async def ends(folder: Path, **options: Any) -> AsyncIterator[tuple[nn.Linear, dcr.Publisher, dcr.Subscriber]]:
    """A publisher that waits for nobody's vote, and a member."""
    trainer, url = nn.Linear(2, 2), f"local://{folder}"
    source, loader = dcr.source(trainer), dcr.loader(nn.Linear(2, 2))
    async with (
        dcr.publisher(url, source=source, transport=FAST, quorum=0, vote_timeout_s=0.01, **options) as publisher,
        dcr.subscriber(url, loader=loader, member="m", transport=FAST) as versions,
    ):
        yield trainer, publisher, versions


async def test_what_is_newer_than_an_offer_is_seen_when_it_is_looked_for(tmp_path: Path) -> None:
    async with ends(tmp_path) as (trainer, publisher, versions):
        await publish(publisher, 1)
        offered = await anext(versions)
        assert (await versions.look(), versions.latest, versions.behind) == (1, 1, 1)
        for version in (2, 5):
            step(trainer)
            await publish(publisher, version)
        assert (await versions.look(), versions.latest, versions.behind) == (3, 5, 3)
        await offered.install()
        assert (await versions.look(), versions.version, versions.latest) == (2, 1, 5)
        await (await anext(versions)).install()
        assert (await versions.look(), versions.behind) == (0, 0)


async def test_versions_that_were_removed_since_are_counted_from_an_anchor_on(tmp_path: Path) -> None:
    async with ends(tmp_path, anchor_every=1) as (trainer, publisher, versions):
        await publish(publisher, 1)
        await (await anext(versions)).install()
        for version in range(2, 6):
            step(trainer)
            await publish(publisher, version)
        assert await versions.look() >= 1
        assert versions.latest == 5


async def test_a_run_without_a_version_has_none_that_is_lacked(tmp_path: Path) -> None:
    async with ends(tmp_path) as (_, _, versions):
        assert (await versions.look(), versions.latest) == (0, None)


async def test_only_a_member_that_takes_part_can_look(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="is not open"):
        await dcr.subscriber(f"local://{tmp_path}", loader=dcr.loader(nn.Linear(2, 2)), member="m").look()


def test_a_script_without_an_event_loop_looks_too(tmp_path: Path) -> None:
    url, trainer = f"local://{tmp_path}", nn.Linear(2, 2)
    loader = dcr.loader(nn.Linear(2, 2))
    with (
        dcr.blocking.publisher(url, source=dcr.source(trainer), transport=FAST, quorum=0, vote_timeout_s=0.01) as pub,
        dcr.blocking.subscriber(url, loader=loader, member="m", transport=FAST) as versions,
    ):
        pub.publish(1).committed()
        next(versions)
        step(trainer)
        pub.publish(2).committed()
        assert (versions.look(), versions.latest, versions.behind) == (2, 2, 2)
