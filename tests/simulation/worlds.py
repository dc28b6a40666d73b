"""A whole run in one simulated machine: trainers and engines around the real ends, driven by a plan and watched.

A plan is a list of steps. Whoever ends with an error that a fault excuses is started again, as a supervisor would; an
error without such a reason is a violation. When the steps are done the weather calms down, and then the run must be
well: one more version is committed, and every engine reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import anyio.abc
import numpy as np

import dcr
from dcr.codecs.codec import GAPS, RAW
from dcr.codecs.patch import Change, Operation
from dcr.errors import DcrError, RanksLost, ReadBackError, StateError
from dcr.events import PipelineEvent
from dcr.layout.frames import Layout
from dcr.layout.views import Lanes
from dcr.memory.ready import Ready
from dcr.protocol.wire import Identity
from dcr.testing import MemoryTransport
from dcr.testing.ranks import MemoryGroup
from simulation import machine
from simulation.bodies import OCTETS, Share, Split, Whole, model, random_octets
from simulation.history import History, Memory, Octets, Seen
from simulation.machine import TICK_S
from simulation.storms import Actor, Fault, Storm, StormyTransport

URL = "memory:///run"
CODECS = {"raw": RAW, "gaps": GAPS}
FRAME_ELEMS = 16
FETCH_TIMEOUT_S, VOTE_TIMEOUT_S = 0.3, 0.5
SETTLED_S = 2.0  # longer than any time-out and any late message
BOUND_S = 30.0
MAX_ROUNDS = 60_000
# ---------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Publish:
    """The trainer changes its weights and publishes them.

    edit: "some" bytes, by seed and amount; "return" to all bits of an earlier version; "part" of them; all, none, or
    those `at` certain places.
    """

    edit: Literal["some", "return", "part", "none", "all", "at"] = "some"
    seed: int = 0
    amount: int = 3
    zombie: bool = False
    at: tuple[int, ...] = ()


@dataclass(frozen=True)
class Wait:
    ticks: int = 0


@dataclass(frozen=True)
class Kill:
    """An engine's process ends (hard: without a word), starts again after some ticks; its memory stays or is lost."""

    engine: int = 0
    hard: bool = True
    memory: Literal["kept", "lost"] = "kept"
    ticks: int = 1


@dataclass(frozen=True)
class Start:
    engine: int = 0


@dataclass(frozen=True)
class Break:
    """An engine's memory fails while the n-th frame from now is written; then its undo, too, or its whole process.

    rank: which one's it is, where an engine has several; None: the others have written as well.
    """

    engine: int = 0
    frame: int = 0
    and_then: Literal["", "undo", "dies"] = ""
    rank: int | None = None


@dataclass(frozen=True)
class Corrupt:
    """Something else writes to an engine's memory: anywhere, or at certain places."""

    engine: int = 0
    seed: int = 0
    amount: int = 1
    at: tuple[int, ...] = ()
    mask: int = 0x55


@dataclass(frozen=True)
class Rebind:
    """A weight of an engine gets another storage."""

    engine: int = 0


@dataclass(frozen=True)
class Restart:
    """Another trainer process takes over, while the one before is closed, killed, or goes on as a zombie."""

    old: Literal["closed", "killed", "zombie"] = "zombie"
    weights: Literal["same", "earlier", "other"] = "same"
    seed: int = 0


@dataclass(frozen=True)
class Arm:
    fault: Fault


Step = Publish | Wait | Kill | Start | Break | Corrupt | Rebind | Restart | Arm


@dataclass(frozen=True)
class Plan:
    """Steps, and how the run is set up.

    seed: of first weights, and of all delays (0: none). engines: how many there are; late ones start by a step, or at
    the end. loaded: engines begin with the trainer's weights. busy: ticks that an engine takes before it installs.
    alike: all engines bear one name, as if one had been started again before it ended. ranks: of each engine.
    trainer_ranks: of each trainer.
    """

    steps: tuple[Step, ...]
    seed: int = 0
    engines: int = 2
    late: int = 0
    loaded: bool = False
    busy: int = 0
    codec: str = "raw"
    operation: Operation = Operation.STEP
    quorum: int | Literal["all"] = "all"
    anchor_every: int | None = None
    alike: bool = False
    ranks: int = 1
    trainer_ranks: int = 1


# ---------------------------------------------------------------------- engines


class Died(Exception):
    """An engine's process has ended in the middle of a write."""


class Watched:
    """A loader whose writes the history sees, and which breaks when it is told to."""

    def __init__(self, engine: Engine, loader: Any) -> None:
        self.member = engine.seen.name
        self.fingerprint, self.finalize = loader.fingerprint, loader.finalize
        self.reads_base = getattr(loader, "reads_base", False)
        if self.reads_base:
            self.read = lambda frame: self._weights.read(frame)
        self._engine, self._loader = engine, loader
        self._weights: Any = None
        self._frames: list[Any] = []
        self._undo_fails = False

    def bind(self, layout: Layout) -> Watched:
        self._weights = self._loader.bind(layout)
        self._frames = self._engine.seen.memory.of_frames(layout)
        return self

    def prepare(self, frame: int, change: Change) -> Ready:
        ready = self._weights.prepare(frame, change)
        self._engine.read[id(ready)] = ready, self._engine.seen.rubbish & self._frames[frame]
        return ready

    def install(self, ready: Ready) -> None:
        engine = self._engine
        engine.world.history.writes(engine.seen, engine.installs)
        engine.seen.stands_on |= engine.read[id(ready)][1]
        engine.seen.overlooked |= engine.seen.rubbish
        if engine.breaks and engine.breaks[0][1] == 0 and engine.body.breaks(engine.breaks[0][0]):
            engine.breaks.pop(0)
        self._weights.install(ready)
        if engine.breaks and engine.breaks[0][1] == 0:
            self._break(engine.breaks.pop(0)[0])
        elif engine.breaks:
            engine.breaks[0][1] -= 1

    def _break(self, how: Break) -> None:
        self._undo_fails = how.and_then != ""
        if how.and_then == "dies":
            self._engine.kill(Kill(ticks=100))
            raise Died
        raise ReadBackError("a test says that memory did not keep its bits")

    def undo(self, ready: Ready) -> None:
        if self._undo_fails:
            self._undo_fails = False
            raise ReadBackError("a test says that the undo failed")
        self._engine.seen.writes += 1
        self._weights.undo(ready)

    def digest(self) -> Lanes:
        self._engine.seen.rubbish[:] = self._engine.seen.overlooked[:] = False
        return self._weights.digest()


class Engine:
    """A rollout engine: its memory, and a subscriber that is started again whenever it has ended."""

    def __init__(self, world: World, name: str, octets: Octets) -> None:
        self.world = world
        self.started = False
        self.breaks: list[list[Any]] = []
        self.read: dict[int, tuple[Ready, Any]] = {}
        self.installs: Identity | None = None
        self._scope = anyio.CancelScope()
        self._actor = Actor("member", name)
        self._kill = Kill()
        self._load(name, octets)

    def _load(self, name: str, octets: Octets) -> None:
        self.body: Whole | Split = Whole() if self.world.plan.ranks == 1 else Split(self.world.plan.ranks)
        self.seen = Seen(name, self.body.memory())
        self.seen.memory.write(octets)

    def start(self) -> None:
        if not self.started:
            self.started = True
            self.world.group.start_soon(self._live)

    def kill(self, how: Kill) -> None:
        self.world.history.note(self.seen.name, how)
        self._kill = how
        self._actor.dead = how.hard
        self._scope.cancel()
        self.seen.subscriber = None  # nobody asks it any more

    def corrupt(self, step: Corrupt) -> None:
        """Change bytes of live memory behind everybody's back."""
        octets = self.seen.memory.read()
        at = list(step.at) or np.random.default_rng(step.seed).integers(0, len(octets), step.amount)
        octets[at] ^= np.uint8(step.mask)
        self.seen.memory.write(octets)
        self.seen.rubbish[at] = True

    def rebind(self) -> None:
        """Give a weight another storage, which dcr may refuse to go on with."""
        self.body.move()
        self.seen.memory = self.body.memory()
        self._actor.excused = True

    def _unwatch(self) -> None:
        self.seen.subscriber = self.seen.was = self.installs = None
        self.seen.last = ()
        self.seen.stands_on[:] = self.seen.rubbish[:] = False
        self.read.clear()

    async def _live(self) -> None:
        while True:
            self._actor = Actor("member", self.seen.name)
            with anyio.CancelScope() as self._scope:
                try:
                    await self._follow()
                except Exception as error:
                    self.world.unless_excused(self._actor, error)
                self.world.history.check(self.world.seen)
            killed = self._scope.cancel_called
            self._unwatch()
            if killed and self._kill.memory == "lost":
                self._load(self.seen.name, random_octets(self.world.rng))
            await anyio.sleep((self._kill.ticks if killed else 50) * TICK_S)

    async def _follow(self) -> None:
        world, seen, actor = self.world, self.seen, self._actor
        async with dcr.subscriber(
            URL,
            loader=Watched(self, self.body.loader()),
            member=seen.name,
            transport=StormyTransport(world.transport, world.storm, actor),
            codecs=CODECS.__getitem__,
            fetch_timeout_s=FETCH_TIMEOUT_S,
            observe=lambda event: world.observe(seen.name, event),
        ) as versions:
            seen.subscriber = versions
            async for version in versions:
                world.history.offered(seen, version.identity)
                await anyio.sleep(world.plan.busy * TICK_S)
                await self._install(version)

    async def _install(self, version: dcr.Version) -> None:
        self.seen.overlooked[:] = False
        self.installs = version.identity  # also if it is killed while a thread still writes
        while True:
            self.seen.stands_on[:] = False
            try:
                await version.install()
                if version.kind == "seed":
                    self.world.history.seeded(self.seen)
            except ReadBackError:
                await anyio.sleep(10 * TICK_S)
                continue
            except (DcrError, OSError) as error:  # what comes next is a seed, or the error that ended the subscriber
                self.world.history.note(self.seen.name, f"install: {error!r}")
            break
        self.installs = None


# ---------------------------------------------------------------------- trainers


class Over(Exception):
    """A publisher can not go on."""


class Trainer:
    """One life of a trainer process: its weights, and a publisher that does what it is told, one after another."""

    def __init__(self, world: World, name: str, octets: Octets) -> None:
        self.world = world
        self.actor = Actor("publisher", name)
        self.ended = False
        self.module = model(octets, tied=True)
        self.memory = Memory.of(self.module)
        self._scope = anyio.CancelScope()
        self._orders, self._taken = anyio.create_memory_object_stream[Publish](1000)
        self._group = MemoryGroup(world.plan.trainer_ranks)

    def order(self, step: Publish) -> None:
        self._orders.send_nowait(step)

    def close(self, *, hard: bool) -> None:
        self.actor.dead = hard
        self._scope.cancel()

    async def live(self) -> None:
        with self._scope, self._orders, self._taken:
            try:
                async with anyio.create_task_group() as group:
                    ranks = [self._publisher(rank) for rank in range(self.world.plan.trainer_ranks)]
                    opened, close = [anyio.Event() for _ in ranks], anyio.Event()
                    for publisher, event in zip(ranks, opened, strict=True):
                        group.start_soon(_hold_open, publisher, event, close)
                    for event in opened:
                        await event.wait()
                    try:
                        async for step in self._taken:
                            await self._publish(ranks, step, group)
                    finally:
                        close.set()
            except* Exception as errors:
                for error in leaves(errors):
                    self.world.unless_excused(self.actor, error)
        self.ended = True
        self.world.history.note(self.actor.name, "ended")

    def _publisher(self, rank: int) -> dcr.Publisher:
        world, plan = self.world, self.world.plan
        return dcr.publisher(
            URL,
            source=Share(self.module, rank, plan.trainer_ranks),
            group=self._group.rank(rank) if plan.trainer_ranks > 1 else None,
            transport=StormyTransport(world.transport, world.storm, self.actor),
            codec=CODECS[plan.codec],
            operation=plan.operation,
            quorum=plan.quorum,
            vote_timeout_s=VOTE_TIMEOUT_S,
            frame_elems=FRAME_ELEMS,
            anchor_every=plan.anchor_every,
            observe=lambda event: world.observe(self.actor.name, event),
        )

    async def _publish(self, ranks: list[dcr.Publisher], step: Publish, group: anyio.abc.TaskGroup) -> None:
        self.memory.write(self.world.edited(self.memory.read(), step))
        refits = await self._begin_all(ranks)
        octets = self.memory.read()
        self.world.states.append(octets)
        self.world.history.captured(self.actor.term, refits[0].version, octets)
        group.start_soon(self._watch, refits[0])
        for refit in refits:
            with self._bounded(f"version {refit.version} was not captured"):
                try:
                    await refit.captured()
                except (DcrError, OSError) as error:
                    self.world.history.note(self.actor.name, f"capture: {error!r}")

    async def _begin_all(self, ranks: list[dcr.Publisher]) -> list[dcr.Refit]:
        """Publish on all ranks at once: it returns when every rank has called it."""
        refits: dict[int, dcr.Refit] = {}

        async def begin(rank: int) -> None:
            refits[rank] = await self._begin(ranks[rank])

        async with anyio.create_task_group() as tasks:
            for rank in range(len(ranks)):
                tasks.start_soon(begin, rank)
        return [refits[rank] for rank in range(len(ranks))]

    async def _begin(self, publisher: dcr.Publisher) -> dcr.Refit:
        while True:
            with self._bounded("publish did not return"):
                try:
                    return await publisher.publish()
                except (StateError, RanksLost) as error:
                    if self._scope.cancel_called:
                        await anyio.sleep_forever()  # it was told to close, and is told so here as well
                    raise Over(str(error)) from error
                except (DcrError, OSError):
                    pass  # of the version before: its own watcher is told as well

    async def _watch(self, refit: dcr.Refit) -> None:
        outcome: Exception | None = None
        with self._bounded(f"version {refit.version} did not end"):
            try:
                await refit.committed()
            except Exception as error:
                outcome = error
        self.world.history.ended(self.actor.term, refit.version, outcome)
        self.world.told.append((self, refit, outcome))

    @contextmanager
    def _bounded(self, what: str) -> Iterator[None]:
        with anyio.move_on_after(BOUND_S) as scope:
            yield
        if scope.cancelled_caught:
            self.world.history.fail(f"{self.actor.name}: {what} within {BOUND_S} s")


async def _hold_open(publisher: dcr.Publisher, opened: anyio.Event, close: anyio.Event) -> None:
    async with publisher:
        opened.set()
        await close.wait()


def leaves(errors: BaseExceptionGroup[Any]) -> Iterator[BaseException]:
    """The errors in a group of groups."""
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error


# ---------------------------------------------------------------------- the world


class World:
    """One run of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = np.random.default_rng(plan.seed)
        self.transport = MemoryTransport()
        self.told: list[tuple[Trainer, dcr.Refit, Exception | None]] = []  # how refits ended
        self.states = [random_octets(self.rng)]
        self.trainers: list[Trainer] = []
        self.engines: list[Engine] = []
        self._rounds = 0

    @property
    def seen(self) -> list[Seen]:
        return [engine.seen for engine in self.engines]

    def run(self) -> History:
        """Play the plan on a simulated machine.

        Raises: Violation.
        """
        self.history = History(self.plan.quorum)
        try:
            machine.run(self._main, seed=self.plan.seed, each_round=self._each_round)
        except Exception as error:
            self.history.now_s = lambda: float("nan")  # the clock has stopped
            self.history.fail(f"{type(error).__name__}: {error}")
            self.history.require(error)
        self.history.require()
        return self.history

    async def _main(self) -> None:
        self.history.now_s = anyio.current_time
        self.storm = Storm(self.plan.seed, self.history)
        self.history.objects = self.transport.run(URL)
        async with anyio.create_task_group() as self.group:
            self.storm.group = self.group
            await self._play()
            self.group.cancel_scope.cancel()

    def _each_round(self) -> None:
        self._rounds += 1
        if self.history.problem is None:
            self.history.check(self.seen)
            if self._rounds > MAX_ROUNDS:
                self.history.fail(f"still busy after {MAX_ROUNDS} rounds")
        if self.history.problem is not None:
            self.group.cancel_scope.cancel()

    def observe(self, who: str, event: dcr.Event) -> None:
        if not isinstance(event, PipelineEvent):
            self.history.note(who, event)

    def unless_excused(self, actor: Actor, error: BaseException) -> None:
        """An end has ended with an error: that is a violation, unless something happened that it need not survive."""
        self.history.note(actor.name, f"ended with {error!r}")
        superseded = actor.role == "publisher" and actor.term < self.history.term
        if not (actor.dead or actor.excused or superseded):
            self.history.fail(f"{actor.name} ended, for no reason, with {type(error).__name__}: {error}")

    def edited(self, octets: Octets, step: Publish) -> Octets:
        """Weights after a step."""
        rng, new = np.random.default_rng(step.seed), octets.copy()
        earlier = self.states[step.seed % len(self.states)]
        match step.edit:
            case "some":
                at = rng.integers(0, len(new), step.amount)
                new[at] = OCTETS[rng.integers(0, len(OCTETS), step.amount)]
            case "return":
                new = earlier.copy()
            case "part":
                new[: len(new) // 2] = earlier[: len(new) // 2]
            case "all":
                new ^= 0x33
            case "at":
                new[list(step.at)] ^= 0x0F
        return new

    async def _play(self) -> None:
        plan = self.plan
        self._begin(self.states[0])
        for number in range(plan.engines + plan.late):
            octets = self.states[0] if plan.loaded else random_octets(self.rng)
            self.engines.append(Engine(self, f"engine {0 if plan.alike else number}", octets))
        for engine in self.engines[: plan.engines]:
            engine.start()
        for step in plan.steps:
            self.history.note("plan", step)
            await self._do(step)
            for seen in self.seen:
                self.history.check_memory(seen)
        await self._end()

    def _begin(self, octets: Octets) -> None:
        self.trainers.append(Trainer(self, f"trainer {len(self.trainers)}", octets))
        self.group.start_soon(self.trainers[-1].live)

    async def _do(self, step: Step) -> None:
        match step:
            case Wait(ticks):
                await anyio.sleep(ticks * TICK_S)
            case Arm(fault):
                self.storm.arm(fault)
            case Publish():
                self._publish(step)
            case Restart():
                self._restart(step)
            case Start(number):
                self._engine(number).start()
            case Break(number, frame):
                self._engine(number).breaks.append([step, frame])
            case Corrupt(number):
                self._engine(number).corrupt(step)
            case Rebind(number):
                self._engine(number).rebind()
            case Kill(number):
                self._engine(number).kill(step)

    def _engine(self, number: int) -> Engine:
        return self.engines[number % len(self.engines)]

    def _publish(self, step: Publish) -> None:
        trainers = self.trainers[:-1] if step.zombie else self.trainers
        if trainers and not trainers[-1].ended:
            trainers[-1].order(step)
        elif not step.zombie:
            self._restart(Restart("closed"))
            self.trainers[-1].order(step)

    def _restart(self, step: Restart) -> None:
        old = self.trainers[-1]
        if step.old != "zombie":
            old.close(hard=step.old == "killed")
        weights = {
            "same": old.memory.read(),
            "earlier": self.states[step.seed % len(self.states)],
            "other": random_octets(np.random.default_rng(step.seed)),
        }
        self._begin(weights[step.weights])

    # ------------------------------------------------------------------ the end

    async def _end(self) -> None:
        """Calm weather: one more version is committed, and all engines reach it."""
        self.history.note("plan", "calm")
        self.storm.calm()
        for engine in self.engines[: self.plan.engines]:
            engine.breaks.clear()
            engine.start()
        await anyio.sleep(SETTLED_S)
        if (
            self.trainers[-1].actor.term < self.history.term
        ):  # the one that began last was not the last one to take over
            self._restart(Restart("closed"))
        refit = await self._last_version()
        for engine in self.engines:
            engine.start()
        if refit is not None:
            await self._reached(refit)

    async def _last_version(self) -> dcr.Refit | None:
        for _ in range(3):
            before = len(self.told)
            self._publish(Publish("all"))
            if not await self._within(lambda before=before: len(self.told) > before or self.trainers[-1].ended):
                break
            for _, refit, outcome in self.told[before:]:
                if outcome is None:
                    return refit
        self.history.fail("in calm weather no version was committed")
        return None

    async def _reached(self, last: dcr.Refit) -> None:
        def behind() -> list[str]:
            ends = [(seen.name, seen.subscriber) for seen in self.seen]
            return [name for name, end in ends if end is None or end.version != last.version or not end.may_serve]

        if not await self._within(lambda: not behind()):
            self.history.fail(f"in calm weather these did not reach version {last.version}: {behind()}")
        for seen in self.seen:
            seen.rubbish[:] = False  # every element was touched: whatever was wrong had to be noticed
            self.history.check_memory(seen)
        with anyio.move_on_after(BOUND_S) as scope:
            await last.installed()
        if scope.cancelled_caught:
            self.history.fail(f"nobody said that all members have installed version {last.version}")

    async def _within(self, holds: Callable[[], bool]) -> bool:
        for _ in range(int(BOUND_S / SETTLED_S * 20)):
            if holds():
                return True
            await anyio.sleep(SETTLED_S / 20)
        return False
