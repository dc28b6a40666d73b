"""The publisher: a trainer's end, on each of its ranks. It captures, ships, seals, collects votes, moves the head.

One version is in flight at a time. All work runs in tasks that the publisher owns; what its user awaits only waits
for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from dcr import plugins
from dcr.closing import Contexts, Life
from dcr.codecs.patch import Operation
from dcr.errors import StateError
from dcr.events import PublishSkipped
from dcr.events.observers import Observer, ignore, tell
from dcr.layout.frames import FRAME_ELEMS
from dcr.pipeline.budget import ByteBudget, MiB
from dcr.publish import dismissal, numbers, opening
from dcr.publish.flight import Flights
from dcr.publish.leader import Leader, Standing
from dcr.publish.meeting import Ranks
from dcr.publish.options import NAME, WHEN_BUSY, WhenBusy, encoder_of, group_of, judge_options, require_number
from dcr.publish.part import Part
from dcr.publish.refit import Refit
from dcr.publish.retention import Retention
from dcr.publish.turns import Turns
from dcr.seams import BasedCodec, Codec, Run, Source, Stage, Transport, Writer
from dcr.seams.required import COUNT, judge, optional, require


@dataclass(frozen=True, slots=True)
class _Works:
    """What an open publisher works with. requests: to the task that flies."""

    run: Run
    part: Part
    flights: Flights
    requests: MemoryObjectSendStream[Refit]


class Publisher:
    """Publishes versions of a source's weights; an async context manager.

    group: None for one process; else the ranks among which the weights are spread, each of which makes a publisher
    of its own source and calls `publish` for the same versions: a process group of torch.distributed (gloo or nccl)
    that is used for nothing else, or any `dcr.seams.Group`. Other options are the same on all of them.
    transport: None finds one by the URL's scheme. codec: how chunks are encoded.
    A level, which chooses for each frame by what it costs here: "fast" for links at the speed of memory, "balanced", or
    "small" for links below 1 Gbit/s; or one codec for all, by name (see `dcr plugins`) or value.
    operation: how bit-preserving changes travel. budget: bytes of encoded chunks in flight, 256 MiB by default.
    quorum: how many members that hold the base must prepare a version before it is committed, or "all" of them.
    vote_timeout_s: how long they may take, counted from the seal. stages: stages of your own between compress and
    transfer. frame_elems: elements per frame. workers: threads that compare, and as many that compress.
    anchor_every: after every so many commits the committed bits are stored whole as well, as an anchor, and what lies
    before the last but one is removed, so that the store stays small and a late joiner reads few deltas. "auto": once
    the deltas since the last anchor take as many bytes as it does, but not before 20 commits, and after 1,000 at the
    latest. None: all versions are kept, and the first is the only anchor. when_busy: what `publish` does while a
    version is under way: "wait" for its end; or "skip": capture nothing and return at once, since a later version
    carries these changes too.

    Raises:
        OptionError: `source` is none (a bare module, for example), or an option is not what it may be. LocalError: the
            URL cannot be one run's alone. PluginError: its scheme or the codec is unknown.
    """

    def __init__(
        self,
        url: str,
        *,
        source: Source,
        group: Any = None,
        transport: Transport | None = None,
        codec: str | Codec | BasedCodec = "balanced",
        operation: Operation = Operation.STEP,
        budget: ByteBudget | None = None,
        quorum: int | Literal["all"] = "all",
        vote_timeout_s: float = 600.0,
        stages: Sequence[Stage[Any, Any]] = (),
        frame_elems: int = FRAME_ELEMS,
        anchor_every: int | Literal["auto"] | None = "auto",
        when_busy: WhenBusy = "wait",
        workers: int = 1,
        observe: Observer = ignore,
    ) -> None:
        require(source, Source, "dcr.source(model)")
        judge_options(
            operation=operation,
            budget=budget,
            quorum=quorum,
            vote_timeout_s=vote_timeout_s,
            stages=stages,
            frame_elems=frame_elems,
            anchor_every=anchor_every,
            when_busy=when_busy,
            workers=workers,
            observe=observe,
        )
        self._url = url
        self._transport: Transport = plugins.transport_for(url, transport)
        self._ranks = Ranks(group_of(group))
        self._make_part = partial(
            Part, source, stages=stages, frame_elems=frame_elems, workers=workers, observe=observe
        )
        self._make_leader = partial(Leader, quorum=quorum, vote_timeout_s=vote_timeout_s, observe=observe)
        self._make_flights = partial(
            Flights,
            codec=encoder_of(codec),
            operation=operation,
            budget=budget or ByteBudget(256 * MiB),
            workers=workers,
            observe=observe,
        )
        self._anchor_every = anchor_every
        self._when_busy = when_busy
        self._turns = Turns(self._ranks)
        self._observe = observe
        self._life = Life("publisher", self._enter)
        self._works: _Works | None = None  # once it has been opened
        self._refit: Refit | None = None
        self._turn = anyio.Lock()
        self._drained = anyio.Event()
        self._last_version = -1
        self._before: tuple[int, Refit | None] = -1, None  # what they were before the version in flight
        self._unclaimed: Refit | None = None  # begun by a publish that has not returned

    # ------------------------------------------------------------------ what its user calls

    async def publish(self, version: int | None = None, *, when_busy: WhenBusy | None = None) -> Refit:
        """Begin to publish the weights as they are now; returns once the version before it has ended.

        when_busy: "wait" or "skip" for this call, the same on all ranks; None as the publisher was told. A call that is
        skipped returns at once, and its refit says so: nothing was captured, the number stays free, and the changes go
        with a later version, since each is compared with what was committed last.

        Storage that moved since the last version is looked up here, on all ranks.

        version: greater than every one before it; None takes the next number. Do not change the weights before
        `captured()` returns. A call that is given up may have begun a version, of the weights as they were: a call with
        the same number returns that one, and a call without a number begins the next, of the weights as they are.

        Raises:
            OptionError: the number is no int. StateError: it was used, or is none of a version; or the publisher is not
                open. StorageRebound: a weight is no longer what it was, on some rank; names it; nothing was opened. Any
                error of the version before it that nobody has been told yet.
        """
        if version is not None:
            require_number(version)
        judge(when_busy=(when_busy, optional(WHEN_BUSY)))
        self._life.require_open()
        async with self._turn:
            refit = self._unclaimed
            if refit is None or refit.version != version:
                if (when_busy or self._when_busy) == "skip" and await self._turns.skip():
                    return self._skipped(version)
                refit = await self._request(version)
            try:
                await refit.bound()
            except Exception:
                self._unclaimed = None
                if refit.ended:  # nothing was opened: the number is free, and the next call may work
                    self._last_version, self._refit = self._before
                raise
            self._unclaimed = None
            return refit

    def _skipped(self, version: int | None) -> Refit:
        refit = Refit(numbers.take(version, self._last_version), skipped=True)
        assert self._refit is not None
        tell(self._observe, PublishSkipped, refit.version, self._refit.version)
        return refit

    async def _request(self, version: int | None) -> Refit:
        """Begin a version, once the one before it has ended; raises as `publish`."""
        await self._settled()
        await self._turns.free()
        self._life.require_open()
        if (broken := self._broken) is not None:
            raise StateError(f"this publisher cannot go on: {broken}; close it and make a new one") from broken
        number = numbers.take(version, self._last_version)
        refit = Refit(number)
        self._opened.requests.send_nowait(refit)  # there is room: the version before has ended
        self._turns.begin()
        self._before = self._last_version, self._refit
        self._last_version, self._refit, self._unclaimed = number, refit, refit
        return refit

    async def captured(self) -> None:
        """Wait until the last `publish` has read the weights: they may change from now on."""
        self._life.require_here()
        if self._refit is None:
            self._life.require_open()
        else:
            await self._refit.captured()

    async def joined(self, members: int) -> None:
        """Wait until at least so many members take part."""
        judge(members=(members, COUNT))
        roster = self._led.roster
        while len(roster) < members:
            await roster.news()

    async def dismiss(self, member: str) -> bool:
        """Take a member out of the run that is known to be dead, instead of waiting until it is missed.

        It is asked no more, an open vote is decided without it, and `installed()` answers "dismissed" for it. One that
        lives all the same takes part again as soon as it says something. False if none of this name took part.

        Raises:
            StateError: this is not the publisher's first rank. RemoteError, OSError: the run could not be told.
        """
        judge(member=(member, NAME))
        counted = self._led.roster.dismiss(member)
        return await dismissal.dismiss(self._opened.run, member) > 0 or counted

    @property
    def members(self) -> list[str]:
        """The members that take part now."""
        return sorted(ref.member for ref in self._led.roster)

    @property
    def version(self) -> int | None:
        """The last committed version, None before the first."""
        identity = self._works.part.baseline.identity if self._works else None
        return identity.version if identity else None

    @property
    def head(self) -> int | None:
        """The version that the run's head names, None before the first one.

        Greater than `version`, or not None where that is, if the run goes on from weights that this publisher lacks.
        """
        identity = self._works.flights.head if self._works else None
        return identity.version if identity else None

    @property
    def _opened(self) -> _Works:
        """
        Raises:
            StateError: the publisher is not open.
        """
        self._life.require_open()
        assert self._works is not None
        return self._works

    @property
    def _led(self) -> Leader:
        """
        Raises:
            StateError: the publisher is not open, or this is not the rank that knows the members.
        """
        self._life.require_open()
        if self._ranks.leader is None:
            raise StateError("members are known to the publisher's first rank: ask there")
        return self._ranks.leader

    @property
    def _broken(self) -> Exception | None:
        """Why there can be no further version. What only the first rank knows, it tells the others in its next one."""
        leader = self._ranks.leader if self._ranks.world == 1 else None
        of_flights = self._works.flights.broken if self._works else None
        of_leader = leader.broken if leader else None
        return self._ranks.lost or of_flights or of_leader

    # ------------------------------------------------------------------ life

    async def open(self) -> Publisher:
        """Take the term and start; any task may call it, and another one `aclose`. `async with` does both.

        Raises:
            StateError: it was opened before; or there is no event loop of asyncio. Whatever the source, the transport
                or the other ranks raise.
        """
        await self._life.open()
        return self

    async def aclose(self) -> None:
        """Wait until the last version has ended, and leave. One that is cancelled gives that version up, and leaves.

        Raises: the error of the last version, if nobody has been told of it.
            StateError: this is a fork of the publisher's process; nothing was done.
        """
        self._life.require_here()
        try:
            if self._life.is_open:
                await self._settled()
                self._opened.requests.close()
                await self._drained.wait()
        finally:
            await self._life.close()

    async def __aenter__(self) -> Publisher:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if error is None:
            await self.aclose()
        elif self._life.is_here:
            await self._life.close()

    async def _enter(self, contexts: Contexts) -> None:
        run: Run = await contexts.enter(self._transport.open(self._url))
        await contexts.enter(self._ranks)
        link = await contexts.enter(self._link(run))
        requests, receive = anyio.create_memory_object_stream[Refit](1)
        contexts.call(requests.close)
        contexts.call(receive.close)
        contexts.call(self._give_up)
        group = await contexts.enter(anyio.create_task_group())
        contexts.call(group.cancel_scope.cancel)
        part = await opening.join(self._ranks, self._make_part)
        flights = await self._start(part, link)
        self._works = _Works(run, part, flights, requests)
        if self._ranks.leader is not None:
            group.start_soon(self._ranks.leader.listen)
        group.start_soon(self._work, flights, receive)

    def _give_up(self) -> None:
        """No task works any more: whoever waits for one is told."""
        self._drained.set()
        if self._ranks.leader is not None:
            self._ranks.leader.roster.end(StateError("the publisher was closed"))
        if self._refit is not None:
            self._refit.fail(StateError(f"the publisher was closed before version {self._refit.version} was committed"))

    @asynccontextmanager
    async def _link(self, run: Run) -> AsyncIterator[Writer]:
        if self._ranks.leads:
            async with run.sender() as link:
                self._ranks.leader = self._make_leader(run, link)
                yield link
        else:
            async with run.writer((self._ranks.rank, self._ranks.world)) as writer:
                yield writer

    async def _start(self, part: Part, link: Writer) -> Flights:
        """Take the term; if the ranks together hold the very bits of the head's version, start from it."""
        layout = part.baseline.layout
        standing = await self._ranks.lead("start", lambda leader: leader.start(layout), Standing)
        head, self._last_version = standing.head, standing.newest
        if head.identity is not None:
            self._last_version = max(self._last_version, head.identity.version)
            await opening.resume(self._ranks, part, head)
        retention = Retention(self._anchor_every, part.schema.nbytes)
        return self._make_flights(self._ranks, part, link, head, retention=retention)

    async def _settled(self) -> None:
        """The version before has ended, and somebody knows how."""
        if self._refit is not None and not self._refit.seen:
            await self._refit.committed()

    # ------------------------------------------------------------------ tasks

    async def _work(self, flights: Flights, requests: MemoryObjectReceiveStream[Refit]) -> None:
        async for refit in requests:
            try:
                await flights.fly(refit)
            except Exception as error:
                refit.give_up(error)
            except BaseException:
                refit.fail(StateError(f"the publisher was closed while version {refit.version} was in flight"))
                raise
            await self._turns.end(refit.version)
        self._drained.set()
