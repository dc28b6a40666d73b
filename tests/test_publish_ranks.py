"""A publisher of several ranks, in one event loop: one version of all their chunks, and one end of it for all."""

from __future__ import annotations

import anyio
import pytest
from refits import Rollout, require_equal
from rows import Model, trainer

from dcr.testing.memory import MemoryTransport

pytestmark = pytest.mark.anyio
URL = "memory:///run"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.parametrize("world", [2, 3, 12])
async def test_the_chunks_of_all_ranks_make_one_version(world: int) -> None:
    model, transport = Model(), MemoryTransport()
    rollout = Rollout(model.engine())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: rollout.run(URL, transport=transport))
        async with trainer(URL, model, world, transport=transport) as ranks:
            await ranks.publishers[0].joined(1)
            for version in (1, 2, 3):
                model.step()
                reports = await ranks.publish(version)
                await rollout.reached(version)
                require_equal(rollout.module, model.expected())
                assert len({(report.identity, report.changed, report.wire_bytes) for report in reports}) == 1
        tasks.cancel_scope.cancel()
    assert [rollout.kinds[version] for version in (1, 2, 3)] == ["seed", "delta", "delta"]
