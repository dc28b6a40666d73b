"""A made-up run for tests of transports: its messages, its sides, waits with a deadline, cancellation at any await."""

from __future__ import annotations

import asyncio
import functools
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast

import anyio
import numpy as np

from dcr.layout import frames
from dcr.layout.frames import FrameSpec, Layout, Region
from dcr.layout.schema import Schema, TensorSpec
from dcr.protocol import digest, wire
from dcr.protocol.wire import Ack, Chunk, ChunkRef, Head, Identity, Join, MemberRef, Message, Nack, Open, Seal
from dcr.seams import Link, Run, Transport, Writer

T = TypeVar("T")
P = ParamSpec("P")
How = Literal["scope", "task"]

RUN = "kit"
FRAMES = 64
LAYOUT = Layout(
    Schema((TensorSpec("w", "uint8", (FRAMES,)),)),
    tuple(FrameSpec("uint8", (Region(0, frame, ((1, 1),)),)) for frame in range(FRAMES)),
)


# ---------------------------------------------------------------------- messages


def identity(version: int = 1, *, term: int = 1, attempt: int = 1, run: str = RUN) -> Identity:
    """An attempt of the made-up run."""
    return Identity(run, term, version, attempt)


def opening(of: Identity, base: Identity | None = None, members: tuple[MemberRef, ...] = ()) -> Message:
    """The Open of an attempt."""
    return Message(Open(of, base, LAYOUT.digest, members), frames.encode(LAYOUT))


def chunk(of: Identity, frame: int, body: bytes) -> Message:
    """A chunk that its own digest binds to its body."""
    content = digest.total(digest.zero(1))
    bound = wire.chunk_digest(frame, "raw", 0, 1, content, body)
    return Message(Chunk(of, frame, "raw", 0, 1, bound, content), body)


def sealing(of: Identity, chunks: Sequence[Message], base: Identity | None = None) -> Message:
    """The Seal over some chunks."""
    refs = tuple(_ref(message.header, message.body) for message in chunks if isinstance(message.header, Chunk))
    root = digest.root(digest.zero(1))
    return Message(Seal(of, base, refs, root, root), 3 * digest.pack(digest.zero(1)))


def _ref(header: Chunk, body: bytes) -> ChunkRef:
    return ChunkRef(header.frame, header.digest, header.content, header.changed, len(body))


def attempt(
    of: Identity, bodies: Sequence[bytes] = (b"one", b"two", b"three"), base: Identity | None = None
) -> list[Message]:
    """A whole attempt: Open, one chunk for each body, Seal."""
    chunks = [chunk(of, frame, body) for frame, body in enumerate(bodies)]
    return [opening(of, base), *chunks, sealing(of, chunks, base)]


def vote(name: str, of: Identity, kind: Literal["prepared", "installed"] = "prepared") -> Message:
    """An Ack of a member in its first life."""
    return Message(Ack(kind, MemberRef(name, "1"), of, digest.root(digest.zero(1))))


def refusal(name: str, of: Identity, reason: str, frames: tuple[int, ...] = ()) -> Message:
    """A Nack of a member in its first life."""
    return Message(Nack(MemberRef(name, "1"), of, None, reason, frames))


def random_bytes(count: int) -> bytes:
    """Bytes that no compression shortens much, and that differ everywhere."""
    return np.random.default_rng(count).bytes(count)


def shown(messages: Sequence[Message]) -> str:
    """Messages in a few words each."""
    return ", ".join(_shown(message) for message in messages) or "nothing"


def _shown(message: Message) -> str:
    header: Any = message.header
    words = [type(header).__name__]
    if (of := getattr(header, "identity", None)) is not None:
        words.append(f"{of.run}/{of.version}.{of.term}.{of.attempt}")
    if isinstance(header, Chunk):
        words.append(f"frame {header.frame}")
    if (member := getattr(header, "member", None)) is not None:
        words.append(f"of {member.member!r}/{member.incarnation}")
    return " ".join([*words, f"({len(message.body)} bytes)"] if message.body else words)


def require_same(found: Sequence[Message], expected: Sequence[Message], what: str) -> None:
    """Messages arrived as they were sent: these, whole, in this order."""
    for number, (one, wanted) in enumerate(zip(found, expected, strict=False)):
        if one != wanted:
            same = shown([one]) == shown([wanted])
            how = "with other fields or another body" if same else f"where {shown([wanted])} was sent"
            raise AssertionError(f"{what}: message {number} is {shown([one])}, {how}")
    assert len(found) == len(expected), f"{what}: sent {shown(expected)}; found {shown(found)}"


# ---------------------------------------------------------------------- sides


class Scene:
    """One run as its sides see it. Each side opens it anew, as a process of its own would."""

    def __init__(self, transport: Transport, url: str, deadline_s: float, stack: AsyncExitStack) -> None:
        self.url = url
        self._transport = transport
        self._deadline_s = deadline_s
        self._stack = stack

    async def open(self) -> Run:
        """The run, opened once more."""
        return await self._stack.enter_async_context(self._transport.open(self.url))

    async def lead(self, head: Head | None = None) -> tuple[Link, Run]:
        """A publisher's link, and the run behind it, with this head (by default one of term 1, without a version)."""
        run = await self.open()
        link = await self._stack.enter_async_context(run.sender())
        await self.move(run, head or Head(RUN, 1, None, b""))
        return link, run

    async def writer(self, number: int, of: int) -> Writer:
        """The link of a further rank of the publisher."""
        run = await self.open()
        return await self._stack.enter_async_context(run.writer((number, of)))

    async def move(self, run: Run, head: Head) -> None:
        """Make this the head."""
        _, tag = await run.ledger.read()
        assert await run.ledger.swap(head, tag), "a swap was refused though nobody else swapped"

    async def member(self, name: str = "a", *, life: str = "1") -> Link:
        """A member's link that has not said anything yet."""
        run = await self.open()
        return await self._stack.enter_async_context(run.member(MemberRef(name, life)))

    async def join(self, name: str = "a", *, life: str = "1", holds: Identity | None = None) -> Link:
        """A member's link that has sent its Join."""
        link = await self.member(name, life=life)
        await link.send(Message(Join(MemberRef(name, life), holds)))
        return link

    async def take(self, link: Link, what: str) -> Message:
        """The next message.

        Raises:
            AssertionError: none came in time; says what was awaited.
        """
        with anyio.move_on_after(self._deadline_s):
            return await link.receive()
        raise AssertionError(f"waited {self._deadline_s:g} s for {what}, and nothing came")

    async def take_all(self, link: Link, what: str, last: Callable[[Message], bool]) -> list[Message]:
        """Messages up to and with the last."""
        taken: list[Message] = []
        while not taken or not last(taken[-1]):
            taken.append(await self.take(link, f"{what}, after {shown(taken)}"))
        return taken

    async def take_attempt(self, link: Link, what: str = "an attempt") -> list[Message]:
        """Messages up to the next Seal."""
        return await self.take_all(link, what, lambda message: isinstance(message.header, Seal))


async def settled() -> None:
    """A moment later: what was about to happen has happened."""
    for _ in range(5):
        await anyio.sleep(0.002)


async def send_all(link: Writer, messages: Sequence[Message]) -> None:
    """Send messages, one after another."""
    for message in messages:
        await link.send(message)


# ---------------------------------------------------------------------- loops and cancellation


class Timed(Protocol):
    """What runs its tests on a loop of their own."""

    backend: str
    deadline_s: float


K = TypeVar("K", bound=Timed)


def on_a_loop(test: Callable[Concatenate[K, P], Coroutine[Any, Any, None]]) -> Callable[Concatenate[K, P], None]:
    """Run an async test on a loop of its own, within ten times its kit's deadline; needs no pytest plugin."""

    @functools.wraps(test)
    def run(self: K, *args: P.args, **kwargs: P.kwargs) -> None:
        async def timed() -> None:
            with anyio.fail_after(10 * self.deadline_s):
                await test(self, *args, **kwargs)

        try:
            anyio.run(timed, backend=self.backend)
        except BaseExceptionGroup as group:
            raise only(group) from None

    return cast(Callable[Concatenate[K, P], None], run)


def only(error: BaseException) -> BaseException:
    """The one error in groups of one; the group where there are several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def cancelled_at(n: int, how: How, operation: Callable[[], Awaitable[T]]) -> list[T]:
    """Run an operation and cancel it when it waits for the n-th time; its result, or nothing if it was cancelled.

    how: by an anyio scope, which a shield holds off, or by `asyncio.Task.cancel`, which nothing does. Every other
    cancellation comes a moment later than it is due: when a thread that is waited for has begun its work.
    """
    later_s = (n + 1) // 2 % 4 * 0.0003 if n % 2 == 0 else 0.0
    return await (_by_scope if how == "scope" else _by_task)((n + 1) // 2, later_s, operation)


async def _by_scope(n: int, later_s: float, operation: Callable[[], Awaitable[T]]) -> list[T]:
    with anyio.CancelScope() as scope:

        def cancel() -> None:
            scope.deadline = anyio.current_time() + later_s

        return [await _counted(operation(), n, cancel)]
    return []


async def _by_task(n: int, later_s: float, operation: Callable[[], Awaitable[T]]) -> list[T]:
    async def run() -> T:
        return await _counted(operation(), n, cancel)

    def cancel() -> None:
        if later_s:
            asyncio.get_running_loop().call_later(later_s, task.cancel)
        else:
            task.cancel()

    task = asyncio.ensure_future(run())
    try:
        await asyncio.wait([task])
    finally:
        task.cancel()
    return [] if task.cancelled() else [task.result()]


@types.coroutine
def _counted(awaitable: Awaitable[T], n: int, reached: Callable[[], Any]) -> Generator[Any, Any, T]:
    """Await something; call `reached` at its n-th suspension."""
    iterator = awaitable.__await__()
    advance: Callable[[], Any] = functools.partial(next, iterator)
    while True:
        try:
            suspended = advance()
        except StopIteration as done:
            result: T = done.value
            return result
        n -= 1
        if n == 0:
            reached()
        try:
            yield suspended
        except BaseException as error:
            advance = functools.partial(iterator.throw, error)
        else:
            advance = functools.partial(next, iterator)


@asynccontextmanager
async def scene(transport: Transport, url: str, deadline_s: float) -> AsyncIterator[Scene]:
    """A run, with all of its sides closed at the end, the last one first."""
    async with AsyncExitStack() as stack:
        yield Scene(transport, url, deadline_s, stack)
