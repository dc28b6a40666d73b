"""How a publisher's ranks begin: each takes its part of the weights; together they look whether the head is theirs."""

from __future__ import annotations

from collections.abc import Callable

import anyio.to_thread
import numpy as np

from dcr.layout import coverage
from dcr.layout.views import Lanes
from dcr.protocol import digest
from dcr.protocol.wire import Head
from dcr.publish import headship
from dcr.publish.copies import error_of_made
from dcr.publish.meeting import Ranks
from dcr.publish.part import Part, Plan, require_one_schema
from dcr.stages.construct import Made


async def join(ranks: Ranks, make_part: Callable[[], Part]) -> Part:
    """This rank's part of the weights, among those of the other ranks.

    Raises:
        SchemaError: the ranks know different models. LayoutError: they do not own each element once.
    """
    parts: list[Part] = []

    async def plan() -> Plan:
        parts.append(await anyio.to_thread.run_sync(make_part))
        return parts[0].plan

    async def take_place() -> None:
        await anyio.to_thread.run_sync(parts[0].join, plans, ranks.rank)

    plans = await ranks.share("plan", plan, Plan)
    require_one_schema(plans)
    total = await ranks.add("coverage", parts[0].tally.view(np.uint64))
    coverage.require_covered(parts[0].schema, total.view(np.int64))
    await ranks.share("join", take_place, type(None))
    return parts[0]


async def resume(ranks: Ranks, part: Part, head: Head) -> None:
    """Make the weights the baseline, if the ranks together hold the very bits of the head's version."""
    scanned: list[Lanes] = []

    async def scan() -> tuple[Made, ...]:
        lanes, made = await part.scan()
        scanned.append(lanes)
        return made

    made = await ranks.share("scan", scan, tuple[Made, ...])
    lanes = await ranks.add("scanned", scanned[0])
    identity = headship.recognise(head, digest.root(lanes))
    part.adopt(identity, scanned[0], alike=error_of_made(made, part.schema) is None)
