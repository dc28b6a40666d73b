"""Events of a real refit, and the trace that is made of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.refits import FAST, Rollout, Weights, empty_like, publish, running, set_bits

import dcr
from dcr.events import AttemptOpened, AttemptSealed, Event, MemberEvent, MemberInstalled, PipelineEvent, StageWorked
from dcr.observe.trace import Trace


async def refit(folder: Path, observe: Any) -> list[Event]:
    """Two versions over a directory, watched; the receiver's events."""
    trainer = Weights({"w": torch.zeros(4000, dtype=torch.bfloat16)})
    rollout = Rollout(empty_like(trainer))
    async with (
        running(folder, [rollout]) as url,
        dcr.publisher(
            url, source=dcr.source(trainer), transport=FAST, frame_elems=1000, observe=observe, workers=2
        ) as publisher,
    ):
        await publisher.joined(1)
        for version in (1, 2):
            set_bits(trainer.w, np.arange(0, 4000, 100), np.full(40, version, np.uint16))
            await publish(publisher, version)
            await rollout.reached(version)
    return rollout.events


async def test_every_stage_tells_of_every_frame_what_it_waited_worked_and_moved(tmp_path: Path) -> None:
    seen: list[Event] = []
    at_member = await refit(tmp_path, seen.append)
    for events, stages in ((seen, ("construct", "compress", "transfer")), (at_member, ("decompress", "prepare"))):
        worked = [event for event in events if isinstance(event, StageWorked) and event.version == 2]
        assert {(event.stage, event.frame) for event in worked} == set(itertools.product(stages, range(4)))
        assert all(min(event.wait_s, event.work_s, event.blocked_s) >= 0 for event in worked)
        assert all(event.item_bytes for event in worked if event.stage in ("transfer", "decompress"))
    assert all(isinstance(event, MemberEvent | PipelineEvent) and event.member == "rollout" for event in at_member)


async def test_the_life_of_a_version_is_told_in_order(tmp_path: Path) -> None:
    seen: list[Event] = []
    await refit(tmp_path, seen.append)
    others = PipelineEvent | MemberInstalled
    second = [event.name for event in seen if not isinstance(event, others) and getattr(event, "version", None) == 2]
    assert second == [
        "publish_started",
        "capture_started",
        "attempt_opened",
        "capture_completed",
        "attempt_sealed",
        "member_prepared",
        "publish_completed",
    ]


async def test_an_event_is_frozen_and_timed_in_order(tmp_path: Path) -> None:
    seen: list[Event] = []
    await refit(tmp_path, seen.append)
    moments = [event.at_s for event in seen if not isinstance(event, StageWorked)]
    assert moments == sorted(moments)
    assert hash(seen[0]) == hash(seen[0])


async def test_the_trace_has_a_span_for_each_frame_and_rows_do_not_overlap_themselves(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        await refit(tmp_path / "run", trace)
    rows: dict[int, list[tuple[float, float]]] = {}
    document = json.loads(path.read_text())
    for event in document:
        if event["ph"] == "X" and event["cat"] in ("construct", "compress", "transfer"):
            rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sum(len(spans) for spans in rows.values()) == 2 * 3 * 4
    for spans in rows.values():
        spans.sort()
        assert all(before[1] <= after[0] + 1e-3 for before, after in itertools.pairwise(spans))
    named = {event["args"]["name"] for event in document if event["ph"] == "M"}
    assert {"publisher construct 0", "publisher compress 0", "publisher transfer 0"} <= named


def test_a_trace_that_is_asked_for_twice_is_whole_both_times(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    trace(AttemptOpened(1.0, 1, "run", 1, 1, None))
    trace.write()
    trace(AttemptSealed(2.0, 1, 4))
    trace.write()
    names = [event["name"] for event in json.loads((tmp_path / "trace.json").read_text()) if event["ph"] == "i"]
    assert names == ["v1 attempt_opened", "v1 attempt_sealed"]
