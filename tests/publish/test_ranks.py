"""A publisher of several ranks, in one event loop: one version of all their chunks, and one end of it for all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest
from simulation import hooks
from simulation.switches import callers
from support.kept import attempts, heads
from support.refits import Rollout, require_equal, said
from support.rows import Model, Rows, Trainer, trainer

import dcr
from dcr.errors import (
    CopiesDiffer,
    DcrError,
    DigestMismatch,
    LayoutError,
    NotCommittedError,
    RankError,
    RanksLost,
    SchemaError,
    StateError,
    VoteError,
)
from dcr.events import ChunkSentAgain, Event
from dcr.layout.boxes import Box
from dcr.layout.frames import Shard
from dcr.layout.schema import Schema
from dcr.protocol.wire import Ack, Head, Message
from dcr.publish import meeting
from dcr.publish.refit import ResidualTensors
from dcr.stages.compress import Parcel
from dcr.testing.faults import FaultyTransport, flip_one_chunk, honest
from dcr.testing.memory import MemoryTransport
from dcr.testing.ranks import MemoryGroup

pytestmark = pytest.mark.anyio
URL = "memory:///run"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def running(
    model: Model, world: int, *, transport: Any = None, on_send: Any = honest, **options: Any
) -> AsyncIterator[tuple[Trainer, Rollout]]:
    """All ranks of a trainer, and an engine that follows them; on_send: what happens to what the engine says."""
    transport = transport or MemoryTransport()
    rollout = Rollout(model.engine())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: rollout.run(URL, transport=FaultyTransport(transport, on_send=on_send)))
        async with trainer(URL, model, world, transport=transport, **options) as ranks:
            await ranks.publishers[0].joined(1)
            yield ranks, rollout
        tasks.cancel_scope.cancel()


async def step(ranks: Trainer, rollout: Rollout, version: int) -> list[dcr.Report]:
    """A version that arrives."""
    ranks.model.step()
    reports = await ranks.publish(version)
    await rollout.reached(version)
    require_equal(rollout.module, ranks.model.expected())
    return reports


@pytest.mark.parametrize("world", [1, 2, 3, 12])
async def test_the_chunks_of_all_ranks_make_one_version(world: int) -> None:
    async with running(Model(), world) as (ranks, rollout):
        for version in (1, 2, 3):
            reports = await step(ranks, rollout, version)
            assert len({(one.identity, one.changed, one.chunks, one.wire_bytes) for one in reports}) == 1
            assert reports[0].members == reports[-1].members == {"rollout": "prepared"}
    assert [rollout.kinds[version] for version in (1, 2, 3)] == ["seed", "delta", "delta"]


def bits_of(baseline: Any) -> list[Any]:
    """What a baseline holds, by frame."""
    return [baseline.base(frame) for frame in range(len(baseline.layout.frames))]


async def test_a_rank_holds_the_baseline_of_what_it_owns_and_nothing_else() -> None:
    model = Model()
    async with running(model, 3) as (ranks, rollout):
        with callers(hooks.BASELINE_FOLD) as baselines:
            await step(ranks, rollout, 1)
    held = [sum(bits.nbytes for bits in bits_of(baseline) if bits is not None) for baseline in baselines]
    owned = [sum(storage.nbytes for storage in source.storages()) for source in ranks.sources]
    assert sorted(held) == sorted(owned)
    assert sum(owned) == model.schema.nbytes


async def test_twenty_thousand_small_tensors_share_few_frames_and_send_nothing_when_nothing_changed() -> None:
    model = Model(shapes={f"experts.{n}": ("bfloat16", (4, 2)) for n in range(20_000)})
    async with trainer(URL, model, 2, transport=MemoryTransport(), frame_elems=1 << 22) as ranks:
        anchor, _ = await ranks.publish(1)
        assert (anchor.chunks, anchor.changed) == (2, 160_000)
        unchanged, _ = await ranks.publish(2)
        assert (unchanged.chunks, unchanged.changed, unchanged.wire_bytes) == (0, 0, 0)
        model.bits["experts.19999"][3, 1] ^= 1
        changed, _ = await ranks.publish(3)
        assert (changed.chunks, changed.changed) == (1, 1)


# ---------------------------------------------------------------------- an error on one rank


class Failing:
    """A stage that fails, or waits first, in some versions."""

    name = "failing"
    workers = 1

    def __init__(self, versions: set[int], error: Exception | None, *, wait_s: float = 0.0) -> None:
        self.versions, self.error, self.wait_s = versions, error, wait_s
        self.cancelled = False

    async def run(self, inbox: Any, outbox: Any) -> None:
        async for parcel in inbox:
            if parcel.chunk.identity.version in self.versions:
                try:
                    await anyio.sleep(self.wait_s)
                except anyio.get_cancelled_exc_class():
                    self.cancelled = True
                    parcel.release()
                    raise
                if self.error is not None:
                    parcel.release()
                    raise self.error
            await outbox.send(parcel)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("version", [1, 2])
async def test_a_stage_that_fails_on_one_rank_fails_the_version_on_all(failing: int, version: int) -> None:
    stage = Failing({version}, StateError("of the stage"))
    async with running(Model(), 3, options={failing: {"stages": [stage]}}) as (ranks, rollout):
        for good in range(1, version):
            await step(ranks, rollout, good)
        ranks.model.step()
        ends = await ranks.attempt(version)
        assert all(isinstance(end, StateError) and "of the stage" in str(end) for end in ends), ends
        assert [f"rank {failing}" in str(end) for end in ends] == [rank != failing for rank in range(3)]
        reports = await step(ranks, rollout, version + 1)
        assert reports[0].is_anchor == (version == 1)


async def test_an_error_that_is_not_dcrs_is_named_on_the_other_ranks() -> None:
    stage = Failing({1}, ZeroDivisionError("by hand"))
    async with running(Model(), 2, options={1: {"stages": [stage]}}) as (ranks, rollout):
        other, own = await ranks.attempt(1)
        assert isinstance(own, ZeroDivisionError)
        assert isinstance(other, RankError)
        assert "rank 1: ZeroDivisionError: by hand" in str(other)
        await step(ranks, rollout, 2)


async def test_an_error_on_one_rank_ends_the_work_of_the_others() -> None:
    slow, failing = Failing({1}, None, wait_s=60), Failing({1}, StateError("at once"))
    async with running(Model(), 2, options={0: {"stages": [slow]}, 1: {"stages": [failing]}}) as (ranks, rollout):
        await ranks.attempt(1)  # within its 20 s
        assert slow.cancelled
        await step(ranks, rollout, 2)


async def test_a_dropped_chunk_on_one_rank_fails_the_version_on_all() -> None:
    @dcr.stage
    def drop(parcel: Parcel) -> Any:
        return parcel if parcel.chunk.identity.version != 2 else dcr.DROP

    async with running(Model(), 2, options={1: {"stages": [drop]}}) as (ranks, rollout):
        await step(ranks, rollout, 1)
        ranks.model.step()
        with pytest.raises(StateError, match="dropped the chunks"):
            await ranks.publish(2)
        await step(ranks, rollout, 3)


async def test_ranks_that_publish_different_versions_are_told() -> None:
    async with running(Model(), 2) as (ranks, rollout):
        ends: list[Exception] = []

        async def publish(rank: int) -> None:
            with pytest.raises(StateError, match=r"bind 5.*bind 4") as caught:
                await ranks.publishers[rank].publish(4 + rank)
            ends.append(caught.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish, 0)
            tasks.start_soon(publish, 1)
        assert len(ends) == 2
        await step(ranks, rollout, 6)


async def test_a_version_that_is_voted_down_fails_on_all_ranks() -> None:
    def mute(message: Message) -> tuple[Message, ...]:
        header = message.header
        return () if isinstance(header, Ack) and header.identity.version == 2 else (message,)

    async with running(Model(), 2, vote_timeout_s=0.2, on_send=mute) as (ranks, rollout):
        await step(ranks, rollout, 1)
        ranks.model.step()
        with pytest.raises(VoteError, match="was given up"):
            await ranks.publish(2)
        await step(ranks, rollout, 3)


def of_the_second(baselines: list[Any]) -> Any:
    """The second rank's: the first owns the first frame."""
    (second,) = [baseline for baseline in baselines if baseline.base(0) is None]
    return second


async def test_a_baseline_that_rotted_on_one_rank_is_found_and_sent_anew() -> None:
    async with running(Model(), 2) as (ranks, rollout):
        with callers(hooks.BASELINE_FOLD) as baselines:
            await step(ranks, rollout, 1)
        next(bits for bits in bits_of(of_the_second(baselines)) if bits is not None)[:] ^= 1
        ranks.model.step()
        with pytest.raises(DigestMismatch, match="the baseline"):
            await ranks.publish(2)
        reports = await step(ranks, rollout, 3)
        assert reports[0].is_anchor


async def test_a_baseline_whose_digest_does_not_add_up_to_the_heads_is_not_built_on() -> None:
    async with running(Model(), 2) as (ranks, rollout):
        with callers(hooks.BASELINE_FOLD) as baselines:
            await step(ranks, rollout, 1)
        of_the_second(baselines).lanes[0] += 1
        assert (await step(ranks, rollout, 2))[1].is_anchor


# ---------------------------------------------------------------------- ranks that are lost


async def test_a_rank_that_does_not_come_ends_the_publisher_on_the_others() -> None:
    group = MemoryGroup(3)
    async with running(Model(), 3, group=group) as (ranks, rollout):
        await step(ranks, rollout, 1)
        group.timeout_s = 0.1  # from here on nobody meets all others
        ends: list[Exception] = []

        async def publish(publisher: dcr.Publisher) -> None:
            with pytest.raises(RanksLost, match="start all ranks anew") as caught:
                await publisher.publish(2)
            ends.append(caught.value)

        async with anyio.create_task_group() as tasks:
            for publisher in ranks.publishers[:2]:
                tasks.start_soon(publish, publisher)
        assert len(ends) == 2
        for publisher in ranks.publishers[:2]:
            with pytest.raises(StateError, match="cannot go on"):
                await publisher.publish(3)


@pytest.mark.parametrize("step_s", [0.0, 0.3])
async def test_a_rank_that_is_closed_in_flight_says_so(step_s: float) -> None:
    model, transport, group = Model(), MemoryTransport(), MemoryGroup(2)
    ends: dict[int, Exception] = {}

    async def live(rank: int, leaves: bool) -> None:
        stages = [Failing({1}, None, wait_s=60)]
        source = Rows(model, rank, 2)
        options: dict[str, Any] = {"source": source, "group": group.rank(rank), "transport": transport}
        try:
            async with dcr.publisher(URL, stages=stages, **options) as publisher:
                refit = await publisher.publish(1)
                if leaves:
                    await anyio.sleep(step_s)
                    raise KeyError("of the user")
                await refit.committed()
        except (KeyError, RanksLost) as error:
            ends[rank] = error

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(live, 0, False)
            tasks.start_soon(live, 1, True)
    assert isinstance(ends[1], KeyError)
    assert isinstance(ends[0], RanksLost)
    assert "rank 1" in str(ends[0])


async def _cut_short(model: Model, transport: Any, doomed: int, number: int) -> tuple[bool, set[str]]:
    """Two versions of two ranks, one cancelled at its number-th meeting: whether it was, and how the ranks end."""
    group, cancelled, ends = MemoryGroup(2, timeout_s=60), list[int](), set[str]()

    async def live(rank: int) -> None:
        def before(at: int) -> None:
            if rank == doomed and at == number:
                cancelled.append(at)
                scope.cancel()

        options: dict[str, Any] = {"source": Rows(model, rank, 2), "group": group.rank(rank, before=before)}
        with anyio.CancelScope() as scope:
            try:
                async with dcr.publisher(URL, transport=transport, **options) as publisher:
                    for version in (1, 2):
                        await (await publisher.publish(version)).committed()
                ends.add("published")
            except DcrError as error:
                ends.add(type(error).__name__)
        if scope.cancelled_caught:
            group.lose(rank)

    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(live, 0)
            tasks.start_soon(live, 1)
    return bool(cancelled), ends


@pytest.mark.parametrize("doomed", [0, 1])
async def test_a_rank_that_is_cancelled_at_any_meeting_leaves_a_run_that_goes_on(
    doomed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank is not held up; ranks that start anew go on from what the head says."""
    monkeypatch.setattr(meeting, "LEAVE_S", 0.05)
    seen, number = set[str](), 0
    while True:
        model, transport = Model(), MemoryTransport()
        cancelled, ends = await _cut_short(model, transport, doomed, number)
        if not cancelled:
            break
        seen |= ends
        async with running(model, 2, transport=transport) as (ranks, rollout):
            await step(ranks, rollout, 7)
        number += 1
    assert number > 15
    assert ends == {"published"}
    assert "RanksLost" in seen
    assert seen <= {"RanksLost", "StateError", "published"}  # lost in a version, lost before the next, not missed


# ---------------------------------------------------------------------- the head


async def test_a_head_that_cannot_be_moved_fails_on_all_ranks_and_the_next_version_works() -> None:
    tries = []

    def full(head: Head) -> None:
        if head.identity is not None and head.identity.version == 2:
            tries.append(head)
            raise OSError("no space left")

    transport = FaultyTransport(MemoryTransport(), on_swap=full)
    async with running(Model(), 2, transport=transport) as (ranks, rollout):
        await step(ranks, rollout, 1)
        ranks.model.step()
        with pytest.raises(NotCommittedError, match="no space left"):
            await ranks.publish(2)
        assert len(tries) > 1
        assert not (await step(ranks, rollout, 3))[0].is_anchor


async def test_a_commit_that_other_ranks_do_not_hear_of_is_one_on_the_first() -> None:
    """The meeting after the swap is never held: the first rank knows the outcome, the others say that they do not."""
    group, model, transport = MemoryGroup(2, timeout_s=1.0), Model(), MemoryTransport()

    def before(meeting: int) -> None:
        if any(head.identity is not None for head in heads(transport.run(URL))):
            raise OSError("cut")

    async with running(model, 2, transport=transport, group=group, before={0: before}) as (ranks, _):
        first, second = await ranks.attempt(1)
        assert isinstance(first, dcr.Report)
        assert first.version == 1
        assert isinstance(second, RanksLost)


# ---------------------------------------------------------------------- chunks that were refused


@pytest.mark.parametrize("owner", [0, 1])
async def test_a_chunk_that_was_corrupted_is_sent_again_by_its_owner(owner: int) -> None:
    memory, events = MemoryTransport(), list[Event]()
    flip = flip_one_chunk(2)
    bent = FaultyTransport(memory, on_send=flip)
    options = {owner: {"transport": bent, "observe": events.append}}
    async with running(Model(), 2, transport=memory, options=options) as (ranks, rollout):
        await step(ranks, rollout, 1)
        reports = await step(ranks, rollout, 2)
        await step(ranks, rollout, 3)
    assert reports[0].sent_again == reports[1].sent_again > 0
    assert [event.version for event in events if isinstance(event, ChunkSentAgain)] == [2]


# ---------------------------------------------------------------------- restart, anchors


@pytest.mark.parametrize("world", [2, 5])
async def test_ranks_that_start_anew_go_on_from_the_head_if_their_bits_add_up_to_it(world: int) -> None:
    model, transport = Model(), MemoryTransport()
    async with trainer(URL, model, 2, transport=transport) as ranks:
        await ranks.publish(1)
        await ranks.publish(2)
    async with trainer(URL, model, world, transport=transport) as ranks:
        assert [publisher.version for publisher in ranks.publishers] == [2] * world
        model.step()
        report = (await ranks.publish())[0]
        assert (report.version, report.is_anchor) == (3, False)
        assert report.changed <= 20  # five elements of each of four tensors
    model.step()  # bits that nobody has published
    async with trainer(URL, model, world, transport=transport) as ranks:
        assert [publisher.version for publisher in ranks.publishers] == [None] * world
        assert (await ranks.publish())[0].is_anchor
    rollout = Rollout(model.engine())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: rollout.run(URL, transport=transport))
        await rollout.reached(4)
        require_equal(rollout.module, model.expected())
        tasks.cancel_scope.cancel()


async def test_anchors_hold_what_all_ranks_own() -> None:
    model, transport = Model(), MemoryTransport()
    async with trainer(URL, model, 3, transport=transport, anchor_every=2) as ranks:
        for version in range(1, 6):
            model.step()
            await ranks.publish(version)
        kinds = [
            (identity.version, dcr.protocol.wire.parse(one.opened).header.base is None)
            for identity, one in attempts(transport.run(URL)).items()
        ]
        assert kinds == [(2, False), (2, True), (3, False), (4, False), (4, True), (5, False)]
        expected = model.expected()
    rollout = Rollout(model.engine())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: rollout.run(URL, transport=transport))
        await rollout.reached(5)
        require_equal(rollout.module, expected)
        tasks.cancel_scope.cancel()


# ---------------------------------------------------------------------- what the ranks must agree on


def _first_row_twice(model: Model, rank: int, world: int) -> Rows:
    source = Rows(model, rank, world)
    if rank:
        source.shards[0] = Shard(0, 0, Box(0, 0, source.shards[0].box.dims))
    return source


def _without_c(model: Model, rank: int, world: int) -> Rows:
    source = Rows(model, rank, world)
    source.shards = [shard for shard in source.shards if shard.tensor != 2]
    return source


def _swapped_rows(model: Model, rank: int, world: int) -> Rows:
    """Two ranks that both own the same number of elements, of which some coincide."""
    source = Rows(model, rank, world)
    if rank == 1:
        box = source.shards[0].box
        source.shards[0] = Shard(0, 0, Box(0, box.there0 - 24, box.dims))
    return source


@pytest.mark.parametrize("source", [_first_row_twice, _without_c, _swapped_rows])
async def test_each_element_must_be_owned_once(source: Callable[..., Rows]) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with trainer(URL, Model(), 2, transport=MemoryTransport(), source=source):
            pass
    assert len(caught.value.exceptions) == 2
    assert caught.group_contains(LayoutError, match="not owned exactly once over all ranks: [ac]")


async def test_ranks_must_know_one_schema() -> None:
    def source(model: Model, rank: int, world: int) -> Rows:
        made = Rows(model, rank, world)
        if rank:
            made.schema = Schema(model.schema.tensors[::-1])
            made.shards = [Shard(3 - one.tensor, one.storage, one.box) for one in made.shards]
        return made

    with pytest.raises(ExceptionGroup) as caught:
        async with trainer(URL, Model(), 2, transport=MemoryTransport(), source=source):
            pass
    assert len(caught.value.exceptions) == 2
    assert caught.group_contains(SchemaError, match="differ in names, dtypes, shapes, or order")


async def test_members_are_known_to_the_first_rank_and_refits_tell_of_them_there() -> None:
    async with running(Model(), 2) as (ranks, rollout):
        for source in ranks.sources:
            source.take()
        refits: dict[int, dcr.Refit] = {}

        async def publish(rank: int) -> None:
            refits[rank] = await ranks.publishers[rank].publish(1)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(publish, 0)
            tasks.start_soon(publish, 1)
        first, second = refits[0], refits[1]
        assert said(await first.installed()) == {"rollout": "installed"}
        with pytest.raises(StateError, match="first rank"):
            await second.installed()
        assert ranks.publishers[0].members == ["rollout"]
        with pytest.raises(StateError, match="first rank"):
            await ranks.publishers[1].joined(1)
        assert rollout.error is None


# ---------------------------------------------------------------------- residual tensors


class Doubled:
    """A residual group: its export gives twice the number, which no map can; owned by the last rank."""

    reason = "its export doubles it"

    def __init__(self, model: Model, tensor: int, owned: bool) -> None:
        self.model, self.tensors, self.owned = model, (tensor,), owned
        self.conversions = 0
        self.error: Exception | None = None
        self.input = np.zeros(3, np.uint16)

    def fingerprint(self) -> bytes:
        return self.input.tobytes() if self.owned else b""

    def convert(self) -> list[np.ndarray] | None:
        self.conversions += 1
        if self.error is not None:
            raise self.error
        return [self.input * np.uint16(2)] if self.owned else None


class WithResidual(Rows):
    """Tensor c is residual."""

    def __init__(self, model: Model, rank: int, world: int) -> None:
        super().__init__(model, rank, world)
        self.shards = [shard for shard in self.shards if shard.tensor != 2]
        self.residual = [Doubled(model, 2, rank == world - 1)]

    def take(self) -> None:
        super().take()
        self.residual[0].input[:] = self._model.bits["c"] // 2


def _even(model: Model) -> Model:
    """Tensor c holds only what doubling can give."""
    model.bits["c"] &= np.uint16(0xFFFE)
    return model


@pytest.mark.parametrize("world", [1, 3])
async def test_residual_tensors_are_converted_when_an_input_changed(world: int) -> None:
    model = _even(Model())
    async with running(model, world, source=WithResidual) as (ranks, rollout):
        seen = []
        for version, touched in enumerate([True, False, True, False], start=1):
            if touched:
                model.bits["c"][1] ^= 2
            model.bits["a"][3, 3] ^= 1
            reports = await ranks.publish(version)
            await rollout.reached(version)
            require_equal(rollout.module, model.expected())
            seen.append((reports[0].residual_bytes, reports[0].changed if version > 1 else None))
        assert seen == [(6, None), (0, 1), (6, 2), (0, 1)]
        assert [source.residual[0].conversions for source in ranks.sources] == [2] * world
        assert reports[0].residual == (ResidualTensors(("c",), "its export doubles it", 6),)


async def test_a_conversion_counts_once_its_version_is_committed() -> None:
    model = _even(Model())
    async with running(model, 2, source=WithResidual) as (ranks, rollout):
        await ranks.publish(1)
        model.bits["c"][1] ^= 2
        ranks.sources[1].residual[0].error = StateError("of the export")
        with pytest.raises(StateError, match="of the export"):
            await ranks.publish(2)
        ranks.sources[1].residual[0].error = None
        await ranks.publish(3)
        await rollout.reached(3)
        require_equal(rollout.module, model.expected())


async def test_a_restart_converts_once_and_not_again() -> None:
    model, transport = _even(Model()), MemoryTransport()
    async with trainer(URL, model, 2, transport=transport, source=WithResidual) as ranks:
        await ranks.publish(1)

    def resumed(*args: Any) -> WithResidual:
        made = WithResidual(*args)
        made.take()
        return made

    async with trainer(URL, model, 2, transport=transport, source=resumed) as ranks:
        assert ranks.publishers[1].version == 1
        report, _ = await ranks.publish(2)
        assert (report.changed, report.residual_bytes, report.is_anchor) == (0, 0, False)
        assert ranks.sources[1].residual[0].conversions == 1


class Copied(Doubled):
    """Every rank holds the input, and makes the tensor; `bit` makes this rank's copy another."""

    bit = np.uint16(0)

    def fingerprint(self) -> bytes:
        return (self.input ^ self.bit).tobytes()

    def convert(self) -> list[np.ndarray | None] | None:
        self.conversions += 1
        return [(self.input ^ self.bit) * np.uint16(2)]


class WithCopies(WithResidual):
    def __init__(self, model: Model, rank: int, world: int) -> None:
        super().__init__(model, rank, world)
        self.residual = [Copied(model, 2, rank == world - 1)]


async def test_ranks_whose_exports_make_different_bits_of_one_tensor_publish_nothing() -> None:
    model = _even(Model())
    async with running(model, 3, source=WithCopies) as (ranks, rollout):
        await ranks.publish(1)
        ranks.sources[1].residual[0].bit = np.uint16(4)
        for version in (2, 3):  # told again for as long as it is so
            with pytest.raises(CopiesDiffer, match=r"c on ranks 0, 2 against rank 1; nothing was published"):
                await ranks.publish(version)
        ranks.sources[1].residual[0].bit = np.uint16(0)
        model.bits["c"][1] ^= 2
        assert (await ranks.publish(4))[0].changed == 1
        await rollout.reached(4)
        require_equal(rollout.module, model.expected())
        assert sorted(rollout.kinds) == [1, 4]


async def test_exports_that_part_while_no_publisher_runs_are_found_by_the_next_one() -> None:
    model, transport = _even(Model()), MemoryTransport()
    async with trainer(URL, model, 2, transport=transport, source=WithCopies) as ranks:
        await ranks.publish(1)

    def resumed(model: Model, rank: int, world: int) -> WithCopies:
        made = WithCopies(model, rank, world)
        made.take()
        made.residual[0].bit = np.uint16(4 * (rank == 0))
        return made

    async with trainer(URL, model, 2, transport=transport, source=resumed) as ranks:
        with pytest.raises(CopiesDiffer, match="c on rank 0 against rank 1"):
            await ranks.publish(2)
        ranks.sources[0].residual[0].bit = np.uint16(0)
        report, _ = await ranks.publish(3)
        assert (report.changed, report.is_anchor) == (0, False)


async def test_an_export_that_makes_a_part_of_its_group_elsewhere_than_on_its_owner_is_no_error() -> None:
    model = _even(Model())
    async with running(model, 2, source=WithCopies) as (ranks, rollout):
        ranks.sources[0].residual[0].convert = lambda: [None]
        await ranks.publish(1)
        await rollout.reached(1)
        require_equal(rollout.module, model.expected())


async def test_an_export_that_gives_something_else_is_refused() -> None:
    model = _even(Model())
    async with running(model, 2, source=WithResidual) as (ranks, _):
        ranks.sources[1].residual[0].convert = lambda: [np.zeros(4, np.uint16)]
        with pytest.raises(SchemaError, match=r"c .3 elements of 2 bytes.*gave .*4, 2"):
            await ranks.publish(1)
