"""Functions as stages: one call for each item, in threads or on the event loop."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Generic, Protocol, TypeVar, cast, overload

import anyio
import anyio.to_thread

from dcr.pipeline.queues import Inbox, Outbox, discard
from dcr.seams.required import WHOLE, Rule, judge

A = TypeVar("A")
B = TypeVar("B")


class Drop:
    """The type of DROP."""

    def __repr__(self) -> str:
        return "dcr.DROP"


DROP: Final = Drop()
FUNCTION = Rule("a function of one item", "describe", callable)


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
        judge(function=(function, FUNCTION), workers=(workers, WHOLE))
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
