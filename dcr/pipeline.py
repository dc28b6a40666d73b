"""The runner: typed stages joined by bounded queues, fail-stop, with statistics that name the bottleneck.

An item *moves*: a stage that has sent it may not touch it afterwards. A stage ends when its inbox is exhausted; the
runner then closes its outbox. The first error stops every stage and is raised bare, with notes that say where.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar, cast, overload

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from dcr.errors import StateError
from dcr.observe import Event, Observer, StageStatistics, Summary, ignore
from dcr.seams import Stage

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
G = TypeVar("G")
Taken = TypeVar("Taken", covariant=True)
Sent = TypeVar("Sent", contravariant=True)
First = TypeVar("First")
Last = TypeVar("Last")


class Drop:
    """The type of DROP."""

    def __repr__(self) -> str:
        return "dcr.DROP"


DROP: Final = Drop()


@dataclass(slots=True)
class _Work:
    """One item in one worker's hands. Times are seconds."""

    item: Any
    wait_s: float
    began_s: float
    blocked_s: float = 0.0


class _Meter:
    """Counts what one stage does, item by item, and tells an observer."""

    def __init__(self, name: str, workers: int, version: int | None, observe: Observer) -> None:
        self.name = name
        self.workers = workers
        self.items = 0
        self.nbytes = 0
        self.blocked_in_s = 0.0
        self.blocked_out_s = 0.0
        self.started_s = time.monotonic()
        self.ended_s = self.started_s
        self._version = version
        self._observe = observe
        self._in_hand: dict[int, _Work] = {}  # by the task that works on it

    def asked(self) -> None:
        """A worker asks for its next item: it is done with the one before."""
        work = self._in_hand.pop(anyio.get_current_task().id, None)
        if work is not None and self._observe is not ignore:
            self._observe(self._event(work))

    def took(self, item: Any, wait_s: float) -> None:
        """A worker has got an item, after waiting for it."""
        now_s = time.monotonic()
        self.items += 1
        self.nbytes += getattr(item, "nbytes", 0)
        self._in_hand[anyio.get_current_task().id] = _Work(item, wait_s, now_s)

    def blocked(self, blocked_s: float) -> None:
        """A worker could not go on."""
        self.blocked_out_s += blocked_s
        work = self._in_hand.get(anyio.get_current_task().id)
        if work is not None:
            work.blocked_s += blocked_s

    def ended(self) -> None:
        """The stage has ended; so has every item that was still in hand."""
        self.ended_s = time.monotonic()
        for work in self._in_hand.values():
            self._observe(self._event(work))
        self._in_hand.clear()

    def _event(self, work: _Work) -> Event:
        now_s, item = time.monotonic(), work.item
        return Event(
            "worked",
            self._version,
            frame=item if isinstance(item, int) else getattr(item, "number", None),
            nbytes=getattr(item, "nbytes", None),
            stage=self.name,
            wait_s=work.wait_s,
            work_s=now_s - work.began_s - work.blocked_s,
            blocked_s=work.blocked_s,
            at_s=now_s,
        )

    def statistics(self) -> StageStatistics:
        lifetime_s = (self.ended_s - self.started_s) * self.workers
        busy_s = max(0.0, lifetime_s - self.blocked_in_s - self.blocked_out_s)
        return StageStatistics(
            self.name, self.workers, self.items, self.nbytes, busy_s, self.blocked_in_s, self.blocked_out_s
        )


class Inbox(Generic[Taken]):
    """The items that a stage takes; iterate over it, from several tasks if you like."""

    def __init__(self, stream: MemoryObjectReceiveStream[Taken], meter: _Meter) -> None:
        self._stream = stream
        self._meter = meter

    def __aiter__(self) -> Inbox[Taken]:
        return self

    async def __anext__(self) -> Taken:
        self._meter.asked()
        before_s = time.monotonic()
        try:
            item = await self._stream.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None
        finally:
            wait_s = time.monotonic() - before_s
            self._meter.blocked_in_s += wait_s
        self._meter.took(item, wait_s)
        return item

    def close(self) -> int:
        """Take no more: whoever sends to it is told, and what still waits is given up. How many items that were."""
        left = 0
        while True:
            try:
                discard(self._stream.receive_nowait())
            except (anyio.WouldBlock, anyio.EndOfStream, anyio.ClosedResourceError):
                break
            left += 1
        self._stream.close()
        return left


class Outbox(Generic[Sent]):
    """Where a stage sends its items; `send` waits while the queue is full."""

    def __init__(
        self, stream: MemoryObjectSendStream[Sent] | None, sink: Callable[[Sent], None] | None, meter: _Meter
    ) -> None:
        self._stream = stream
        self._sink = sink
        self._meter = meter

    async def send(self, item: Sent) -> None:
        """Hand an item on.

        Raises:
            StateError: the next stage returned although there was more to come.
        """
        if self._stream is None:
            self._end(item)
            return
        with self.waiting():
            try:
                await self._stream.send(item)
            except anyio.get_cancelled_exc_class():
                discard(item)
                raise
            except anyio.BrokenResourceError:
                discard(item)
                raise StateError(
                    f"the stage after {self._meter.name!r} returned before its inbox was exhausted; "
                    "read the inbox to its end"
                ) from None

    def close(self) -> None:
        """Send no more: the next stage's inbox ends."""
        if self._stream is not None:
            self._stream.close()

    def _end(self, item: Sent) -> None:
        if self._sink is None:
            discard(item)
        else:
            self._sink(item)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent in here counts as blocked on output, such as waiting for a lease."""
        before_s = time.monotonic()
        try:
            yield
        finally:
            self._meter.blocked(time.monotonic() - before_s)


def discard(item: object) -> None:
    """An item goes no further: if it holds something (`release`), give it back."""
    release = getattr(item, "release", None)
    if release is not None:
        release()


async def serve(
    inbox: Inbox[A],
    outbox: Outbox[B],
    work: Callable[[A], B | Drop | Awaitable[B | Drop]],
    *,
    workers: int = 1,
) -> None:
    """Run `work` over all items with a number of workers, each item's result going to the outbox.

    A plain function runs in a worker thread (with as many threads as workers); a coroutine function on the event
    loop. DROP as a result sends nothing. With several workers, results may overtake each other.
    """
    limiter = anyio.CapacityLimiter(workers)
    is_async = inspect.iscoroutinefunction(work) or inspect.iscoroutinefunction(getattr(work, "__call__", None))  # noqa: B004

    async def worker() -> None:
        async for item in inbox:
            try:
                if is_async:
                    result = await cast(Awaitable[B | Drop], work(item))
                else:
                    made = await anyio.to_thread.run_sync(work, item, limiter=limiter)
                    result = cast(B | Drop, await made if inspect.isawaitable(made) else made)
            except BaseException as error:
                discard(item)
                if (where := getattr(item, "where", None)) is not None:
                    error.add_note(str(where))
                raise
            if not isinstance(result, Drop):
                await outbox.send(result)

    if workers == 1:
        await worker()
        return
    await gather_bare([worker] * workers)


async def gather_bare(tasks: Iterable[Callable[[], Awaitable[Any]]]) -> None:
    """Run tasks together; the first error cancels the others and is raised itself, not in a group."""
    first: list[Exception] = []

    async def guarded(task: Callable[[], Awaitable[Any]]) -> None:
        try:
            await task()
        except Exception as error:
            first.append(error)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for task in tasks:
            group.start_soon(guarded, task)
    if first:
        raise first[0]


class FunctionStage(Generic[A, B]):
    """A plain function as a stage."""

    def __init__(
        self, function: Callable[[A], B | Drop | Awaitable[B | Drop]], *, workers: int = 1, name: str | None = None
    ) -> None:
        self.function = function
        self.workers = workers
        self.name: str = name or str(getattr(function, "__name__", type(function).__name__))

    def __call__(self, item: A) -> B | Drop | Awaitable[B | Drop]:
        return self.function(item)

    async def run(self, inbox: Inbox[A], outbox: Outbox[B]) -> None:
        await serve(inbox, outbox, self.function, workers=self.workers)


class Decorator(Protocol):
    """What `stage(...)` with options gives: it makes a stage of a function."""

    @overload
    def __call__(self, function: Callable[[A], Awaitable[B | Drop]], /) -> FunctionStage[A, B]: ...
    @overload
    def __call__(self, function: Callable[[A], B | Drop], /) -> FunctionStage[A, B]: ...


@overload
def stage(function: Callable[[A], Awaitable[B | Drop]], /) -> FunctionStage[A, B]: ...
@overload
def stage(function: Callable[[A], B | Drop], /) -> FunctionStage[A, B]: ...
@overload
def stage(*, workers: int = 1, name: str | None = None) -> Decorator: ...
def stage(function: Any = None, /, *, workers: int = 1, name: str | None = None) -> Any:
    """Make a stage of a function that takes one item and returns one, or DROP.

    A plain function runs in a worker thread of the stage's own, a coroutine function on the event loop.
    """
    if function is not None:
        return FunctionStage(function)
    return lambda decorated: FunctionStage(decorated, workers=workers, name=name)


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
            raise StateError("a pipeline needs at least one stage")
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

        observe: is told of each item that a stage has worked on ("worked"); version: is named in those events.

        Raises: the first error of any stage, bare, with notes that name stage and item.
        """
        meters = [_Meter(stage.name, getattr(stage, "workers", 1), version, observe) for stage in self._stages]
        before_s = time.monotonic()
        with ExitStack() as streams:
            await gather_bare(self._tasks(items, meters, into, streams))
        return Summary(time.monotonic() - before_s, tuple(meter.statistics() for meter in meters))

    def _tasks(
        self,
        items: Iterable[First] | AsyncIterable[First],
        meters: list[_Meter],
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
            raise StateError("the first stage returned before its inbox was exhausted") from None
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


def _staged(one: Stage[A, B], inbox: Inbox[A], outbox: Outbox[B], meter: _Meter) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        meter.started_s = time.monotonic()
        try:
            try:
                await one.run(inbox, outbox)
            finally:
                left = inbox.close()
                outbox.close()
                meter.ended()
            if left:
                raise StateError("it returned before its inbox was exhausted; read the inbox to its end")
        except Exception as error:
            error.add_note(f"in stage {one.name!r}")
            raise

    return run
