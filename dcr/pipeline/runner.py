"""The runner: typed stages joined by bounded queues, fail-stop, with statistics that name the bottleneck.

An item *moves*: a stage that has sent it may not touch it afterwards. A stage ends when its inbox is exhausted; the
runner then closes its outbox. The first error stops every stage and is raised bare, with notes that say where.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar, overload

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from dcr.errors import StateError
from dcr.events.observers import Observer, Summary, ignore
from dcr.pipeline.functions import gather_bare
from dcr.pipeline.meter import Meter
from dcr.pipeline.queues import Inbox, Outbox, discard
from dcr.seams import Stage
from dcr.seams.required import COUNT, STAGES, judge

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
G = TypeVar("G")
First = TypeVar("First")
Last = TypeVar("Last")


class Pipeline(Generic[First, Last]):
    """Stages in order, each taking what the one before it sends; a wrong order is a type error.

    depth: how many items may wait between two stages. A stage with an attribute `depth` sets its own outbox's.
    """

    @overload
    def __init__(self: Pipeline[A, B], s1: Stage[A, B], /, *, depth: int = 2) -> None: ...
    @overload
    def __init__(self: Pipeline[A, C], s1: Stage[A, B], s2: Stage[B, C], /, *, depth: int = 2) -> None: ...
    @overload
    def __init__(
        self: Pipeline[A, D], s1: Stage[A, B], s2: Stage[B, C], s3: Stage[C, D], /, *, depth: int = 2
    ) -> None: ...
    @overload
    def __init__(
        self: Pipeline[A, E], s1: Stage[A, B], s2: Stage[B, C], s3: Stage[C, D], s4: Stage[D, E], /, *, depth: int = 2
    ) -> None: ...
    @overload
    def __init__(
        self: Pipeline[A, F],
        s1: Stage[A, B],
        s2: Stage[B, C],
        s3: Stage[C, D],
        s4: Stage[D, E],
        s5: Stage[E, F],
        /,
        *,
        depth: int = 2,
    ) -> None: ...
    @overload
    def __init__(
        self: Pipeline[A, G],
        s1: Stage[A, B],
        s2: Stage[B, C],
        s3: Stage[C, D],
        s4: Stage[D, E],
        s5: Stage[E, F],
        s6: Stage[F, G],
        /,
        *,
        depth: int = 2,
    ) -> None: ...
    @overload
    def __init__(
        self: Pipeline[Any, Any],
        s1: Stage[Any, Any],
        s2: Stage[Any, Any],
        s3: Stage[Any, Any],
        s4: Stage[Any, Any],
        s5: Stage[Any, Any],
        s6: Stage[Any, Any],
        s7: Stage[Any, Any],
        /,
        *more: Stage[Any, Any],
        depth: int = 2,
    ) -> None: ...
    def __init__(self, /, *stages: Stage[Any, Any], depth: int = 2) -> None:
        if not stages:
            raise StateError("a pipeline needs at least one stage; none was given")
        judge(stages=(stages, STAGES), depth=(depth, COUNT))
        self._stages = stages
        self._depth = depth

    async def run(
        self,
        items: Iterable[First] | AsyncIterable[First],
        *,
        into: Callable[[Last], None] | None = None,
        version: int | None = None,
        observe: Observer = ignore,
    ) -> Summary:
        """Feed all items through; what the last stage sends is given to `into`.

        observe: is told when a stage starts and ends, and of each item that it has worked on; version: is named there.

        Raises: the first error of any stage, bare, with notes that name stage and item.
        """
        meters = [Meter(stage.name, getattr(stage, "workers", 1), version, observe) for stage in self._stages]
        before_s = time.monotonic()
        with ExitStack() as streams:
            await gather_bare(self._tasks(items, meters, into, streams))
        return Summary(time.monotonic() - before_s, tuple(meter.statistics() for meter in meters))

    def _tasks(
        self,
        items: Iterable[First] | AsyncIterable[First],
        meters: list[Meter],
        into: Callable[[Last], None] | None,
        streams: ExitStack,
    ) -> list[Callable[[], Awaitable[None]]]:
        """What runs: the feeder and each stage. All queues between them are closed with `streams`."""
        send, receive = anyio.create_memory_object_stream[Any](self._depth)
        streams.enter_context(send)
        tasks: list[Callable[[], Awaitable[None]]] = [_feed(items, send)]
        for index, (one, meter) in enumerate(zip(self._stages, meters, strict=True)):
            inbox, onward = Inbox(receive, meter), None
            if index + 1 < len(self._stages):
                onward, receive = anyio.create_memory_object_stream[Any](getattr(one, "depth", self._depth))
            outbox = Outbox(onward, None if onward else into, meter)
            streams.callback(inbox.close)
            streams.callback(outbox.close)
            tasks.append(_staged(one, inbox, outbox, meter))
        return tasks


def _feed(items: Iterable[A] | AsyncIterable[A], send: MemoryObjectSendStream[A]) -> Callable[[], Awaitable[None]]:
    async def hand_on(item: A) -> None:
        try:
            await send.send(item)
        except anyio.BrokenResourceError:
            discard(item)
            raise StateError(
                "the first stage returned before its inbox was exhausted; read the inbox to its end"
            ) from None
        except BaseException:
            discard(item)
            raise

    async def feed() -> None:
        async with send:
            if isinstance(items, AsyncIterable):
                async for item in items:
                    await hand_on(item)
            else:
                for item in items:
                    await hand_on(item)

    return feed


def _staged(one: Stage[A, B], inbox: Inbox[A], outbox: Outbox[B], meter: Meter) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        try:
            try:
                meter.started()
                await one.run(inbox, outbox)
            finally:
                left = inbox.close()
                outbox.close()
                meter.ended()
            if left:
                raise StateError("it returned before its inbox was exhausted; read the inbox to its end")
        except Exception as error:
            error.add_note(f"in stage {one.name!r}")
            meter.failed(error)
            raise
        meter.completed()

    return run
