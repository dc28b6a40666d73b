"""The union of events: what each one is made of, that JSON keeps it, that what begins is told to end."""

from __future__ import annotations

import itertools
import re
import types
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refits import FAST, Rollout, Weights, empty_like, publish, running, set_bits

import dcr
from dcr.errors import SchemaError, StorageRebound
from dcr.events import (
    AnchorCompleted,
    AnchorFailed,
    AnchorStarted,
    CaptureFailed,
    CaptureStarted,
    Event,
    InstallCompleted,
    InstallFailed,
    MemberEvent,
    MessageIgnored,
    PipelineEvent,
    PrepareCompleted,
    PruneCompleted,
    PublishCompleted,
    PublisherEvent,
    PublishFailed,
    PublishStarted,
    RosterEvent,
    StageFailed,
    UserEvent,
)
from dcr.protocol.wire import Message, Open
from dcr.testing import FaultyTransport

TABLE = Path(__file__).parent.parent / "docs" / "events.md"
EVENTS: tuple[Any, ...] = get_args(Event)
NAMED = {event.__name__: event for event in EVENTS}
# Numbers that have no unit: what they number is their name.
NUMBERS = {
    "version",
    "frame",
    "term",
    "attempt",
    "base",
    "holds",
    "by_version",
    "below",
    "busy_with",
    "least_version",
    "least_term",
}
COUNTS = {"workers", "items", "chunks", "versions"}
SECTIONS = {
    "Stages of a pipeline, at either end": PipelineEvent,
    "A publisher, on each of its ranks": PublisherEvent,
    "What a publisher hears of its members, on its first rank": RosterEvent,
    "A member": MemberEvent,
    "Either end": MessageIgnored,
    "The program around": UserEvent,
}


def fields(event: type[Any]) -> dict[str, tuple[Any, ...]]:
    """The types that each field may have."""
    hints = get_type_hints(event)
    return {
        name: get_args(hints[name]) if isinstance(hints[name], types.UnionType) else (hints[name],)
        for name in event.__struct_fields__
    }


def values(kind: Any) -> st.SearchStrategy[Any]:
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    return {
        int: st.integers(-(1 << 63), (1 << 63) - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(st.characters(exclude_categories=["Cs"])),
        types.NoneType: st.none(),
        tuple[int, ...]: st.lists(st.integers(0, 1 << 40)).map(tuple),
    }[kind]


@pytest.mark.parametrize("event", EVENTS, ids=list(NAMED))
def test_json_keeps_every_field_of_every_event(event: type[Any]) -> None:
    @settings(deadline=None, max_examples=30)
    @given(st.builds(event, **{name: st.one_of(*map(values, kinds)) for name, kinds in fields(event).items()}))
    def comes_back(made: Any) -> None:
        line = msgspec.json.encode(made)
        read = msgspec.json.decode(line, type=Event)
        assert (type(read), read, hash(read)) == (event, made, hash(made))
        assert msgspec.json.decode(line)["event"] == made.name

    comes_back()


@pytest.mark.parametrize("event", EVENTS, ids=list(NAMED))
def test_a_number_has_its_unit_in_its_name(event: type[Any]) -> None:
    for name, kinds in fields(event).items():
        if float in kinds:
            assert name.endswith("_s")
        if int in kinds:
            assert name.endswith(("_bytes", "_elems")) or name in NUMBERS | COUNTS
    assert ("error" in event.__struct_fields__) <= ("reason" in event.__struct_fields__)


@pytest.mark.parametrize("span", [name.removesuffix("Started") for name in NAMED if name.endswith("Started")])
def test_what_is_started_can_be_completed_and_fail_with_its_fields_and_its_duration(span: str) -> None:
    began = set(NAMED[f"{span}Started"].__struct_fields__)
    assert began | {"duration_s"} <= set(NAMED[f"{span}Completed"].__struct_fields__)
    assert began | {"duration_s", "error", "reason"} <= set(NAMED[f"{span}Failed"].__struct_fields__)


def test_whatever_is_completed_was_started() -> None:
    completed = {name.removesuffix("Completed") for name in NAMED if name.endswith("Completed")}
    assert completed == {name.removesuffix("Started") for name in NAMED if name.endswith("Started")}


def test_an_event_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        PublishStarted(1.0, 1).version = 2  # type: ignore[misc]


# ---------------------------------------------------------------------- what the ends tell


async def refits(folder: Path, count: int, **options: Any) -> tuple[list[Event], list[Event]]:
    """Some versions over a directory; the publisher's events and its member's."""
    seen, trainer = list[Event](), Weights({"w": torch.zeros(4000, dtype=torch.bfloat16)})
    rollout = Rollout(empty_like(trainer))
    async with (
        running(folder, [rollout]) as url,
        dcr.publisher(
            url,
            source=dcr.source(trainer),
            frame_elems=1000,
            observe=seen.append,
            **{"transport": FAST, **options},
        ) as publisher,
    ):
        await publisher.joined(1)
        for version in range(1, count + 1):
            set_bits(trainer.w, np.arange(0, 4000, 100), np.full(40, version, np.uint16))
            await publish(publisher, version)
            await rollout.reached(version)
    return seen, rollout.events


def spans(events: list[Event]) -> list[str]:
    """What was started, completed and failed, in order; of stages only what each one was as a whole."""
    return [event.name for event in events if event.name.endswith(("_started", "_completed", "_failed"))]


async def test_both_ends_complete_what_they_start(tmp_path: Path) -> None:
    for events in await refits(tmp_path, 3):
        starts = [name.removesuffix("_started") for name in spans(events) if name.endswith("_started")]
        ends = [name.removesuffix("_completed") for name in spans(events) if name.endswith("_completed")]
        assert sorted(starts) == sorted(ends)
        assert starts


async def test_events_of_both_ends_agree_with_each_other_and_survive_json(tmp_path: Path) -> None:
    at_publisher, at_member = await refits(tmp_path, 2)
    lines = [msgspec.json.encode(event) for event in at_publisher + at_member]
    assert [msgspec.json.decode(line, type=Event) for line in lines] == at_publisher + at_member
    prepared = [(event.version, event.changed_elems) for event in at_member if isinstance(event, PrepareCompleted)]
    installed = [event for event in at_member if isinstance(event, InstallCompleted)]
    assert prepared[-1] == (2, 40)
    assert [(event.version, event.kind) for event in installed] == [(1, "seed"), (2, "delta")]
    assert all(0 < event.pause_s <= event.duration_s for event in installed)


async def test_a_stored_anchor_is_told_with_what_it_cost(tmp_path: Path) -> None:
    seen, _ = await refits(tmp_path, 5, anchor_every=2)
    started = [event.version for event in seen if isinstance(event, AnchorStarted)]
    completed = [event for event in seen if isinstance(event, AnchorCompleted)]
    assert started == [event.version for event in completed] != []
    assert all(event.chunks == 4 and event.wire_bytes > 0 for event in completed)
    assert [event.below for event in seen if isinstance(event, PruneCompleted)]


async def test_an_anchor_that_cannot_be_stored_tells_why_and_the_version_stays(tmp_path: Path) -> None:
    def fail(message: Message) -> tuple[Message, ...]:
        if isinstance(message.header, Open) and message.header.identity.attempt > 1:
            raise OSError(28, "no space left")
        return (message,)

    seen, _ = await refits(tmp_path, 3, anchor_every=2, transport=FaultyTransport(FAST, on_send=fail))
    failed = [(event.version, event.error, event.reason) for event in seen if isinstance(event, AnchorFailed)]
    assert failed == [(2, "OSError", "[Errno 28] no space left")]
    assert [event.version for event in seen if isinstance(event, PublishCompleted)] == [1, 2, 3]


async def test_an_installation_that_wrote_nothing_says_so(tmp_path: Path) -> None:
    seen, trainer = list[Event](), Weights({"w": torch.zeros(4000, dtype=torch.bfloat16)})
    receiver, url = empty_like(trainer), f"local://{tmp_path}"
    loader = dcr.loader(receiver)
    async with (
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
        dcr.subscriber(url, loader=loader, member="m", transport=FAST, observe=seen.append) as versions,
    ):
        await publisher.joined(1)
        await publisher.publish(1)
        version = await anext(versions)
        receiver.w = torch.nn.Parameter(torch.ones_like(receiver.w), requires_grad=False)
        with pytest.raises(StorageRebound):
            await version.install()
    failed = [(event.version, event.live, event.error) for event in seen if isinstance(event, InstallFailed)]
    assert failed == [(1, "unchanged", "StorageRebound")]


async def test_a_version_that_cannot_be_read_tells_why_in_fields(tmp_path: Path) -> None:
    seen, trainer = list[Event](), Weights({"w": torch.zeros(4000, dtype=torch.bfloat16)})
    source = dcr.source(trainer)

    def fail() -> Any:
        raise SchemaError("the weights cannot be read now")

    async with dcr.publisher(f"local://{tmp_path}", source=source, observe=seen.append) as publisher:
        source.storages = fail  # type: ignore[method-assign]
        with pytest.raises(SchemaError):
            await (await publisher.publish(1)).committed()
    assert [type(event) for event in seen] == [PublishStarted, CaptureStarted, CaptureFailed, PublishFailed]
    assert {(event.error, event.reason) for event in seen[2:]} == {("SchemaError", "the weights cannot be read now")}


async def test_a_stage_that_fails_tells_why_in_fields() -> None:
    def fail(item: int) -> int:
        raise ValueError("no such item")

    seen = list[Event]()
    with pytest.raises(ValueError, match="no such item"):
        await dcr.Pipeline(dcr.FunctionStage(fail, name="work")).run([1], observe=seen.append)
    failed = [(event.stage, event.error, event.reason) for event in seen if isinstance(event, StageFailed)]
    assert failed == [("work", "ValueError", "no such item")]


# ---------------------------------------------------------------------- the table


def mark(name: str, kinds: tuple[Any, ...]) -> str:
    return f"`{name}`" + ("?" if types.NoneType in kinds else "")


def table() -> str:
    """Every event, as docs/events.md lists them."""
    lines = []
    for title, union in SECTIONS.items():
        lines += [f"### {title}", "", "| event | fields | what |", "|---|---|---|"]
        for event in get_args(union) or (union,):
            named = ", ".join(mark(name, kinds) for name, kinds in fields(event).items() if name != "at_s")
            lines.append(f"| `{event.__struct_config__.tag}` | {named} | {event.__doc__} |")
        lines.append("")
    return "\n".join(lines)


def test_the_sections_of_the_table_hold_every_event_once() -> None:
    listed = itertools.chain.from_iterable(get_args(union) or (union,) for union in SECTIONS.values())
    assert sorted(event.__name__ for event in listed) == sorted(NAMED)


def test_the_page_lists_every_event_with_its_fields() -> None:
    page = TABLE.read_text()
    assert page[page.index("### ") :] == table(), "write what tests/test_events.py calls table() into docs/events.md"


def test_an_event_is_called_as_its_struct_in_snake_case() -> None:
    for event in EVENTS:
        words = re.findall("[A-Z][a-z]+", event.__name__)
        assert event.__struct_config__.tag == "_".join(words).lower()
