"""Members that are behind: they catch up in one pause, never go back, and follow what replaces a version."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch
from support.kept import Kept, attempts, clear
from support.loaders import Through
from support.refits import FAST, Rollout, Weights, bits, empty_like, publish, require_equal, running, set_bits, state

import dcr
from dcr.codecs.codec import CLASSES
from dcr.errors import DigestMismatch, IncompleteError, PayloadError, StorageRebound, VoteError
from dcr.events import Event, HeadStale, PrepareCompleted, PrepareFailed, SeedFetchFailed
from dcr.loaders.module import ModuleLoader
from dcr.protocol import digest, wire
from dcr.protocol.wire import Commit, Head, Identity, MemberRef, Message
from dcr.subscribe.membership import Membership
from dcr.subscribe.prepared import Overfull
from dcr.subscribe.rank import Rank
from dcr.testing import MemoryTransport

ELEMS, FRAME_ELEMS = 4000, 1000
URL = "memory:///run"


class Counting(Through):
    """A loader that keeps what it is told to install."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(ModuleLoader(module))
        self.installs: list[int] = []

    def install(self, ready: Any) -> None:
        self.installs.append(ready.frame)
        super().install(ready)


class Opened:
    """A transport whose one run was opened before."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @asynccontextmanager
    async def open(self, url: str) -> AsyncIterator[Any]:
        yield self._run


class Laggard:
    """A member that comes and goes: it is loaded with what it held last."""

    def __init__(self, module: torch.nn.Module, transport: Any) -> None:
        self.module = module
        self.loader = Counting(module)
        self.events: list[Event] = []
        self.offered: list[dcr.Version] = []
        self.transport = transport

    async def follow(self, until: int) -> None:
        """Install what is offered until memory holds a version; then leave."""
        self.offered.clear()
        self.events.clear()
        self.loader.installs.clear()
        with anyio.fail_after(20):
            async with dcr.subscriber(
                URL, loader=self.loader, member="m", transport=self.transport, observe=self.events.append
            ) as versions:
                self.subscriber = versions
                while versions.version != until:
                    version = await anext(versions)
                    self.offered.append(version)
                    await version.install()

    def seen(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def model(elems: int = ELEMS) -> Weights:
    return Weights({"w": torch.zeros(elems, dtype=torch.bfloat16), "b": torch.zeros(7)})


def change(trainer: Weights, rng: np.random.Generator, count: int) -> set[int]:
    """Give `count` elements of w other bits; which ones."""
    at = rng.choice(trainer.w.numel(), count, replace=False)
    set_bits(trainer.w, at, bits(trainer.w)[at] ^ rng.integers(1, 1 << 16, count, np.uint16))
    return set(at.tolist())


async def publish_all(transport: Any, trainer: Weights, steps: Iterable[Callable[[], object]], **options: Any) -> None:
    """A version of its own for each change, by a publisher that waits for nobody."""
    options = {"source": dcr.source(trainer), "frame_elems": FRAME_ELEMS, "anchor_every": None, **options}
    async with dcr.publisher(URL, transport=transport, **options) as publisher:
        for step in steps:
            step()
            await publish(publisher)


# ---------------------------------------------------------------------- one pause


@pytest.mark.parametrize("codec", ["raw", "fast", "balanced", "small"])
async def test_fifty_versions_behind_is_one_version_of_what_they_changed_together(codec: str) -> None:
    rng, transport, trainer = np.random.default_rng(5), MemoryTransport(), model()
    laggard, changed = Laggard(empty_like(trainer), transport), set[int]()
    options = {"source": dcr.source(trainer), "frame_elems": FRAME_ELEMS, "anchor_every": None, "codec": codec}
    async with dcr.publisher(URL, transport=transport, **options) as publisher:
        await publish(publisher, 1)
        await laggard.follow(1)
        for version in range(2, 52):
            changed |= change(trainer, rng, 20)
            await publish(publisher, version)
        await laggard.follow(51)
    assert [(version.number, version.kind) for version in laggard.offered] == [(51, "delta")]
    assert laggard.offered[0].changed == len(changed)
    assert sorted(laggard.loader.installs) == sorted(set(laggard.loader.installs))
    assert [event.versions for event in laggard.seen(PrepareCompleted) if event.versions > 1] == [50]
    require_equal(laggard.module, state(trainer))


async def test_deltas_that_need_their_old_bits_are_composed_over_those_of_the_deltas_before_them() -> None:
    """Small weights change, by many bits: so each version has other elements in each class of old bits."""
    rng, transport, trainer = np.random.default_rng(5), MemoryTransport(), model(20 * ELEMS)
    laggard, kinds = Laggard(empty_like(trainer), transport), set[str]()

    def step() -> None:
        small = np.flatnonzero(bits(trainer.w) & 0x7FFF < 0x2000)
        at = rng.choice(small, len(small) // 3, replace=False)
        set_bits(trainer.w, at, rng.integers(0, 1 << 16, len(at), np.uint16))

    change(trainer, rng, trainer.w.numel())
    await publish_all(transport, trainer, [lambda: None], codec=CLASSES.name, frame_elems=10 * ELEMS)
    await laggard.follow(0)
    options = {"source": dcr.source(trainer), "frame_elems": 10 * ELEMS, "codec": CLASSES.name}
    async with dcr.publisher(URL, transport=transport, **options) as publisher:
        for _ in range(3):
            step()
            kinds |= {chosen.form for chosen in (await publish(publisher)).chosen}
    await laggard.follow(3)
    assert "class" in kinds
    assert [event.versions for event in laggard.seen(PrepareCompleted) if event.versions > 1] == [3]
    require_equal(laggard.module, state(trainer))


async def test_deltas_of_another_layout_are_not_composed_with_those_before_them() -> None:
    """A trainer that was restarted with other frames goes on where it was: a position means another element then."""
    rng, transport, trainer = np.random.default_rng(5), MemoryTransport(), model()
    laggard, steps = Laggard(empty_like(trainer), transport), [lambda: change(trainer, rng, 20)] * 3
    await publish_all(transport, trainer, [lambda: None])
    async with dcr.subscriber(
        URL, loader=laggard.loader, member="m", transport=transport, observe=laggard.events.append
    ) as versions:
        await publish_all(transport, trainer, steps[:1], quorum=0)
        offered = await anext(versions)
        await publish_all(transport, trainer, steps, quorum=0)
        await publish_all(transport, trainer, steps, quorum=0, frame_elems=FRAME_ELEMS // 2)
        await offered.install()
        while versions.version != 7:
            version = await anext(versions)
            laggard.offered.append(version)
            await version.install()
    assert [(version.number, version.kind) for version in laggard.offered] == [(4, "delta"), (7, "delta")]
    assert not laggard.seen(PrepareFailed)
    require_equal(laggard.module, state(trainer))


async def test_whole_frames_between_deltas_are_composed_with_them() -> None:
    """A frame of which nearly all has changed is sent whole, as an overwrite: deltas go before and behind it."""
    rng, transport, trainer = np.random.default_rng(5), MemoryTransport(), model()
    laggard = Laggard(empty_like(trainer), transport)
    await publish_all(transport, trainer, [lambda: None])
    await laggard.follow(0)
    counts = (10, 3000, 20, 3, ELEMS, 100)
    await publish_all(transport, trainer, [lambda count=count: change(trainer, rng, count) for count in counts])
    await laggard.follow(len(counts))
    assert [version.kind for version in laggard.offered] == ["delta"]
    require_equal(laggard.module, state(trainer))


async def test_steps_behind_xors_of_the_same_elements_take_a_pause_of_their_own() -> None:
    transport, trainer = MemoryTransport(), model()
    laggard, at = Laggard(empty_like(trainer), transport), np.arange(0, ELEMS, 50)

    def flip(mask: int) -> Callable[[], None]:
        return lambda: set_bits(trainer.w, at, bits(trainer.w)[at] ^ np.uint16(mask))

    await publish_all(transport, trainer, [lambda: None])
    await laggard.follow(0)
    await publish_all(transport, trainer, [flip(mask) for mask in (3, 5, 9)], operation=dcr.Operation.XOR)
    await publish_all(transport, trainer, [flip(mask) for mask in (17, 33, 65)], operation=dcr.Operation.STEP)
    await laggard.follow(6)
    assert [version.number for version in laggard.offered] == [3, 6]
    assert len(laggard.seen(PrepareFailed)) == 1
    require_equal(laggard.module, state(trainer))


def flipped(attempt: Kept) -> None:
    first, *others = attempt.chunks
    attempt.write_pack(attempt.packs[0], [first[:-1] + bytes([first[-1] ^ 1]), *others])
    for key in attempt.packs[1:]:
        attempt.write_pack(key, [])


def missing(attempt: Kept) -> None:
    attempt.write_pack(attempt.packs[-1], [])


def resealed(attempt: Kept) -> None:
    """A seal that names other bits than its chunks lead to."""
    message = wire.parse(attempt.sealed)
    lanes = digest.unpack(message.body).copy()
    target = slice(len(lanes) // 3, 2 * len(lanes) // 3)
    lanes[target] += np.uint64(1)
    seal = msgspec.structs.replace(message.header, root=digest.root(lanes[target]))
    attempt.sealed = b"".join(wire.pieces(Message(seal, digest.pack(lanes))))


@pytest.mark.parametrize(
    ("damage", "error"), [(flipped, PayloadError), (missing, IncompleteError), (resealed, DigestMismatch)]
)
async def test_a_stored_version_that_is_damaged_stops_a_laggard_at_the_one_before_it(
    damage: Callable[[Kept], None], error: type[Exception]
) -> None:
    rng, transport, trainer = np.random.default_rng(5), MemoryTransport(), model()
    laggard, states = Laggard(empty_like(trainer), transport), []

    def step() -> None:
        change(trainer, rng, 20)
        states.append(state(trainer))

    await publish_all(transport, trainer, [step] * 3)
    await laggard.follow(2)
    await publish_all(transport, trainer, [step] * 9)
    (attempt,) = (one for identity, one in attempts(transport.run(URL)).items() if identity.version == 8)
    damage(attempt)
    with pytest.raises(error, match="version 8"):
        await laggard.follow(11)
    assert laggard.offered[-1].number == 7
    require_equal(laggard.module, states[7])


async def test_what_comes_after_versions_that_made_no_change_together_is_one_again() -> None:
    rng, transport, trainer = np.random.default_rng(5), MemoryTransport(), model()
    laggard, step = Laggard(empty_like(trainer), transport), lambda: change(trainer, rng, ELEMS // 4)
    await publish_all(transport, trainer, [lambda: None])
    async with dcr.subscriber(
        URL, loader=laggard.loader, member="m", transport=transport, observe=laggard.events.append
    ) as versions:
        await publish_all(transport, trainer, [step], quorum=0)
        offered = await anext(versions)
        await publish_all(transport, trainer, [step] * 2, quorum=0, operation=dcr.Operation.XOR)
        await publish_all(transport, trainer, [step] * 2, quorum=0, operation=dcr.Operation.STEP)
        await offered.install()
        while versions.version != 5:
            await (offered := await anext(versions)).install()
        assert laggard.seen(PrepareFailed)
        await publish_all(transport, trainer, [step], quorum=0)
        offered = await anext(versions)
        await publish_all(transport, trainer, [step] * 4, quorum=0)
        await offered.install()
        assert (await anext(versions)).number == 10


async def test_memory_that_somebody_has_changed_is_seeded_and_not_composed_upon() -> None:
    rng, transport, trainer = np.random.default_rng(5), MemoryTransport(), model()
    laggard = Laggard(empty_like(trainer), transport)

    class Spoiling(Counting):
        """Memory changes once, while a chain is prepared."""

        spoilt = False

        def prepare(self, frame: int, change: Any) -> Any:
            if not self.spoilt:
                self.spoilt = True
                at = change.positions[:1]
                set_bits(laggard.module.w, at, bits(laggard.module.w)[at] ^ np.uint16(1))
            return super().prepare(frame, change)

    await publish_all(transport, trainer, [lambda: None])
    await laggard.follow(0)
    await publish_all(transport, trainer, [lambda: change(trainer, rng, 20)] * 5)
    laggard.loader = Spoiling(laggard.module)
    await laggard.follow(5)
    assert [version.kind for version in laggard.offered] == ["seed"]
    require_equal(laggard.module, state(trainer))


# ---------------------------------------------------------------------- what is offered stays, or is replaced


@pytest.fixture
def unsown(monkeypatch: pytest.MonkeyPatch) -> None:
    """No seed fits into memory: each is written as it comes from the store."""

    async def sow(*_: Any) -> None:
        raise Overfull("no room")

    monkeypatch.setattr(Rank, "sow", sow)


async def test_a_seed_that_is_offered_needs_its_files_no_more() -> None:
    rng, transport, trainer = np.random.default_rng(5), MemoryTransport(), model(64)
    receiver = empty_like(trainer)
    await publish_all(transport, trainer, [lambda: change(trainer, rng, 5)] * 3)
    async with dcr.subscriber(URL, loader=dcr.loader(receiver), member="m", transport=transport) as versions:
        version = await anext(versions)
        clear(transport.run(URL))
        await version.install()
        assert (version.kind, versions.version, versions.may_serve) == ("seed", 2, True)
        require_equal(receiver, state(trainer))


async def test_more_than_fits_is_written_as_it_comes() -> None:
    """What differs takes more memory than the model: positions, and old bits for the undo, beside the new ones."""
    transport, trainer = MemoryTransport(), model(64)
    receiver, events = empty_like(trainer), list[Event]()
    await publish_all(transport, trainer, [lambda: change(trainer, np.random.default_rng(5), 64)])
    async with dcr.subscriber(
        URL, loader=dcr.loader(receiver), member="m", transport=transport, observe=events.append
    ) as versions:
        await (await anext(versions)).install()
        require_equal(receiver, state(trainer))
    assert [event.error for event in events if isinstance(event, SeedFetchFailed)] == ["Overfull"]


@pytest.mark.usefixtures("unsown")
@pytest.mark.parametrize("anchor_every", [1, 2])
async def test_a_plain_loop_goes_on_when_a_version_is_removed_before_it_is_installed(
    tmp_path: Path, anchor_every: int
) -> None:
    rng, url, trainer = np.random.default_rng(5), f"local://{tmp_path}", model(64)
    receiver, events = empty_like(trainer), list[Event]()
    async with dcr.publisher(
        url, source=dcr.source(trainer), transport=FAST, quorum=0, anchor_every=anchor_every
    ) as publisher:
        change(trainer, rng, 5)
        await publish(publisher, 1)
        async with dcr.subscriber(
            url, loader=dcr.loader(receiver), member="m", transport=FAST, observe=events.append
        ) as versions:
            with anyio.fail_after(10):
                first = await anext(versions)
            assert first.number == 1
            for number in range(2, 9):
                change(trainer, rng, 5)
                await publish(publisher, number)
            await first.install()
            assert first.number == versions.version == versions.latest
            with anyio.fail_after(10):
                while versions.version != 8:
                    await (await anext(versions)).install()
            require_equal(receiver, state(trainer))
            assert "version_replaced" in [event.name for event in events]
            assert not {"install_failed", "subscriber_failed"} & {event.name for event in events}


@pytest.mark.usefixtures("unsown")
async def test_a_seed_whose_files_go_while_they_are_read_goes_on_with_the_newest() -> None:
    """The anchor is written, the delta behind it is gone by then, and an anchor of a newer version is there instead."""
    rng, transport, trainer = np.random.default_rng(5), MemoryTransport(), model(64)
    receiver = empty_like(trainer)
    async with transport.open(URL) as run:
        read = run.store.read

        async def read_late(identity: Any, frames: Any = None) -> AsyncIterator[Message]:
            if identity.version == 1:
                await publish_all(transport, trainer, [lambda: change(trainer, rng, 5)] * 4, quorum=0, anchor_every=1)
            async for message in read(identity):
                yield message

        await publish_all(transport, trainer, [lambda: change(trainer, rng, 5)] * 2)
        run.store.read = read_late  # type: ignore[method-assign]
        async with dcr.subscriber(URL, loader=dcr.loader(receiver), member="m", transport=Opened(run)) as versions:
            version = await anext(versions)
            assert version.number == 1
            await version.install()
            assert version.number == versions.version == 5
        require_equal(receiver, state(trainer))


@pytest.mark.parametrize("number", range(1, 7))
async def test_an_object_that_cannot_be_read_once_is_looked_for_again(number: int) -> None:
    """As if it had been removed beside an anchor that was made meanwhile: as a member enters, catches up, or seeds."""
    rng, transport, trainer = np.random.default_rng(5), MemoryTransport(), model(64)
    laggard, reads = Laggard(empty_like(trainer), transport), 0
    await publish_all(transport, trainer, [lambda: change(trainer, rng, 5)] * 3)
    async with transport.open(URL) as run:
        describe = run.store.describe

        async def describe_late(identity: Any) -> Any:
            nonlocal reads
            reads += 1
            if reads == number:
                raise IncompleteError(f"{identity} is missing")
            return await describe(identity)

        run.store.describe = describe_late  # type: ignore[method-assign]
        laggard.transport = Opened(run)
        await laggard.follow(2)
        assert reads > number
        require_equal(laggard.module, state(trainer))


@pytest.mark.usefixtures("unsown")
async def test_a_seed_that_is_damaged_and_not_replaced_is_an_error() -> None:
    rng, transport, trainer = np.random.default_rng(5), MemoryTransport(), model(64)
    await publish_all(transport, trainer, [lambda: change(trainer, rng, 5)])
    async with dcr.subscriber(URL, loader=dcr.loader(empty_like(trainer)), member="m", transport=transport) as versions:
        version = await anext(versions)
        clear(transport.run(URL))
        with pytest.raises(IncompleteError):
            await version.install()
        assert not versions.may_serve


async def test_a_seed_is_not_written_where_weights_lay_before() -> None:
    rng, transport, trainer = np.random.default_rng(5), MemoryTransport(), model(64)
    receiver = empty_like(trainer)
    await publish_all(transport, trainer, [lambda: change(trainer, rng, 5)])
    async with dcr.subscriber(URL, loader=dcr.loader(receiver), member="m", transport=transport) as versions:
        version, before = await anext(versions), receiver.w.data
        receiver.w.data = before.clone()
        with pytest.raises(StorageRebound):
            await version.install()
        assert not bits(before).any()
        assert not versions.may_serve


# ---------------------------------------------------------------------- members never go back


class Forgetful:
    """A transport whose members read an older head once: at the n-th read."""

    def __init__(self, transport: Any, at: int) -> None:
        self._transport = transport
        self._at = at
        self._heads: list[tuple[Head | None, bytes]] = []
        self.reads = self.lied = 0

    @asynccontextmanager
    async def open(self, url: str) -> AsyncIterator[Any]:
        async with self._transport.open(url) as run:
            read = run.ledger.read

            async def look() -> tuple[Head | None, bytes]:
                self.reads += 1
                newest = await read()
                if not self._heads or self._heads[-1] != newest:
                    self._heads.append(newest)
                if self.reads != self._at:
                    return newest
                older = self._heads[max(0, len(self._heads) - 3)]
                self.lied += older != newest
                return older

            run.ledger.read = look
            yield run


async def test_an_older_head_that_is_read_once_takes_no_member_back(tmp_path: Path) -> None:
    """At every read of the head in turn, both by the member and by its link."""
    n, lied = 1, 0
    while n:
        rng, trainer = np.random.default_rng(5), model(64)
        rollout, transport = Rollout(empty_like(trainer)), Forgetful(FAST, n)
        async with (
            running(tmp_path / str(n), [rollout], transport=transport) as url,
            dcr.publisher(url, source=dcr.source(trainer), transport=FAST, vote_timeout_s=5) as publisher,
        ):
            await publisher.joined(1)
            for number in range(1, 6):
                change(trainer, rng, 5)
                await publish(publisher, number)
                await rollout.reached(number)
            require_equal(rollout.module, state(trainer))
        assert [rollout.kinds[number] for number in range(2, 6)] == ["delta"] * 4
        assert "trust_lost" not in rollout.names()
        lied += transport.lied
        n = n + 3 if transport.reads >= n else 0
    assert lied > 3


class Lagging:
    """A transport whose members read each head once more after its link has seen the next one."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport

    @asynccontextmanager
    async def open(self, url: str) -> AsyncIterator[Any]:
        async with self._transport.open(url) as run:
            newest = run.ledger.read
            before = await newest()

            async def read() -> Any:
                nonlocal before
                lagging, before = before, await newest()
                return lagging

            run.ledger.read = read
            yield run


async def test_a_head_that_was_announced_is_waited_for(tmp_path: Path) -> None:
    """Nothing else comes after the last version: whoever takes the head before it for the newest waits for ever."""
    rng, trainer = np.random.default_rng(5), model(64)
    rollout = Rollout(empty_like(trainer))
    async with running(tmp_path, [rollout], transport=Lagging(FAST)) as url:
        for numbers in ((1, 2), (3, 4)):  # a publisher, and the next one
            async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
                await publisher.joined(1)
                for number in numbers:
                    change(trainer, rng, 5)
                    await publish(publisher, number)
                    with anyio.fail_after(10):
                        await rollout.reached(number)
    require_equal(rollout.module, state(trainer))
    assert rollout.kinds == {1: "seed"} | dict.fromkeys((2, 3, 4), "delta")


class Reading:
    """A run of which nothing but its head is read."""

    def __init__(self) -> None:
        self.head: Head | None = None
        self.ledger = self

    async def read(self) -> tuple[Head | None, bytes]:
        return self.head, b""


def head_of(run: str, term: int, version: int) -> Head:
    return Head(run, term, Identity(run, term, version, 1), b"")


@pytest.mark.parametrize(
    ("before", "now", "follows"),
    [
        (head_of("a", 2, 5), head_of("a", 2, 6), True),
        (head_of("a", 2, 5), head_of("a", 3, 5), True),
        (head_of("a", 2, 5), head_of("a", 1, 5), False),
        (head_of("a", 2, 5), head_of("a", 2, 4), False),
        (head_of("a", 2, 5), None, False),
        (head_of("a", 2, 5), head_of("b", 1, 0), True),
        (None, head_of("a", 1, 0), True),
    ],
    ids=["later", "next term", "term before", "version before", "no head", "another run", "first"],
)
async def test_a_head_is_followed_unless_it_is_older_than_the_one_before_it(
    before: Head | None, now: Head | None, follows: bool
) -> None:
    run, events = Reading(), list[Event]()
    member: Any = Membership(MemberRef("m", "1"), run, None, None, events.append)  # type: ignore[arg-type]
    for run.head in (before, now):
        await member.committed()
    assert member.head == (now if follows else before)
    assert [type(event) for event in events] == ([] if follows else [HeadStale])


class Announcing:
    """A link over which one commit is announced."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    async def receive(self) -> Message:
        return Message(Commit(self._identity))


async def test_what_was_announced_and_never_came_true_counts_for_one_look_at_the_head() -> None:
    run, link = Reading(), Announcing(Identity("a", 1, 6, 1))
    member: Any = Membership(MemberRef("m", "1"), run, link, None, lambda event: None)  # type: ignore[arg-type]
    run.head = head_of("a", 1, 5)
    await member.receive()
    assert [await member.committed() for _ in range(2)] == [None, run.head.identity]


async def test_a_publisher_that_has_gone_back_is_told_and_not_followed() -> None:
    rng, transport, trainer = np.random.default_rng(5), MemoryTransport(), model(64)
    rollout = Rollout(empty_like(trainer))
    options = {"source": dcr.source(trainer), "transport": transport, "vote_timeout_s": 600.0}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: rollout.run(URL, transport=transport))
        async with dcr.publisher(URL, **options) as publisher:
            await publisher.joined(1)
            await publish(publisher, 1)
            backup = dict(transport.run(URL).data)
            for number in (2, 3):
                change(trainer, rng, 5)
                await publish(publisher, number)
            await rollout.reached(3)
            newest = state(trainer)
        transport.run(URL).data.clear()
        transport.run(URL).data.update(backup)
        async with dcr.publisher(URL, **options) as publisher:
            change(trainer, rng, 5)
            with anyio.fail_after(10), pytest.raises(VoteError, match="not newer than version 3"):
                await (await publisher.publish(2)).committed()
        require_equal(rollout.module, newest)
        assert rollout.subscriber.version == 3
        assert "head_stale" in rollout.names()
        tasks.cancel_scope.cancel()


# ---------------------------------------------------------------------- what a script can follow


async def test_a_member_says_what_is_newest_and_how_much_it_lacks() -> None:
    rng, transport, trainer = np.random.default_rng(5), MemoryTransport(), model(64)
    laggard = Laggard(empty_like(trainer), transport)
    await publish_all(transport, trainer, [lambda: None])
    await laggard.follow(0)
    assert (laggard.subscriber.latest, laggard.subscriber.behind) == (0, 0)
    await publish_all(transport, trainer, [lambda: change(trainer, rng, 5)] * 4)
    async with dcr.subscriber(URL, loader=laggard.loader, member="m", transport=transport) as versions:
        version = await anext(versions)
        assert (versions.version, versions.latest, versions.behind) == (0, 4, 4)
        await version.install()
        assert (versions.version, versions.latest, versions.behind) == (4, 4, 0)
