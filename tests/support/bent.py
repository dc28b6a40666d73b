"""Transports, codecs and loaders that are wrong in one way each, for tests of the kits that must notice."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio

from dcr.protocol.wire import MemberRef, Message
from dcr.testing.memory import MemoryTransport

Send = Callable[[Any, Message], Awaitable[None]]
Receive = Callable[[Any], Awaitable[Message]]
Fault = Callable[[Message], Iterable[Message]]


class Bent:
    """Something with some of its attributes replaced; the others are those of what is wrapped."""

    def __init__(self, straight: Any, **bends: Any) -> None:
        self._straight = straight
        for name, bend in bends.items():
            setattr(self, name, bend)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._straight, name)


class BentTransport:
    """A transport in memory, bent: each argument makes the wrong thing from the right one.

    url: from a URL. run, ledger, store: from the run's. sender, writer, member: from a link. Each is
    called anew at each open.
    """

    def __init__(self, **bends: Callable[[Any], Any]) -> None:
        self.straight = MemoryTransport()
        self._bends = bends

    @asynccontextmanager
    async def open(self, url: str) -> AsyncIterator[Any]:
        async with self.straight.open(self._bent("url", url)) as run:
            yield self._bent(
                "run",
                Bent(
                    run,
                    ledger=self._bent("ledger", run.ledger),
                    store=self._bent("store", run.store),
                    sender=lambda: self._link("sender", run.sender()),
                    writer=lambda part: self._link("writer", run.writer(part)),
                    member=lambda ref: self._link("member", run.member(ref)),
                ),
            )

    @asynccontextmanager
    async def _link(self, side: str, opened: AbstractAsyncContextManager[Any]) -> AsyncIterator[Any]:
        async with opened as link:
            yield self._bent(side, link)

    def _bent(self, what: str, straight: Any) -> Any:
        bend = self._bends.get(what)
        return straight if bend is None else bend(straight)


def receiving(fault: Fault) -> Callable[[Any], Bent]:
    """A bend of a link: a fault on what it receives."""

    def bend(link: Any) -> Bent:
        waiting: list[Message] = []

        async def receive() -> Message:
            while not waiting:
                waiting.extend(fault(await link.receive()))
            return waiting.pop(0)

        return Bent(link, receive=receive)

    return bend


def sending(fault: Fault) -> Callable[[Any], Bent]:
    """A bend of a link: a fault on what it sends."""

    def bend(link: Any) -> Bent:
        async def send(message: Message) -> None:
            for one in fault(message):
                await link.send(one)

        return Bent(link, send=send)

    return bend


def replacing(**methods: Callable[..., Any]) -> Callable[[Any], Bent]:
    """A bend of anything: methods by functions that take the straight thing first."""

    def bend(straight: Any) -> Bent:
        bound = {
            name: lambda *args, method=method, **rest: method(straight, *args, **rest)
            for name, method in methods.items()
        }
        return Bent(straight, **bound)

    return bend


def dropping(*kinds: type) -> Fault:
    """A fault: messages of these kinds are lost."""
    return lambda message: () if isinstance(message.header, kinds) else (message,)


def doubling(*kinds: type) -> Fault:
    """A fault: messages of these kinds come twice."""
    return lambda message: (message, message) if isinstance(message.header, kinds) else (message,)


def changing(kind: type, change: Callable[[Message], Message]) -> Fault:
    """A fault: messages of a kind are changed."""
    return lambda message: (change(message) if isinstance(message.header, kind) else message,)


def once(key: Callable[[Message], Any]) -> Fault:
    """A fault: of messages with one key, only the first comes; None is no key."""
    seen: set[Any] = set()

    def fault(message: Message) -> Iterable[Message]:
        found = key(message)
        if found is not None and found in seen:
            return ()
        seen.add(found)
        return (message,)

    return fault


def after(kind: type, fault: Fault) -> Fault:
    """A fault that begins behind the first message of a kind."""
    begun: list[bool] = []

    def late(message: Message) -> Iterable[Message]:
        result = list(fault(message)) if begun else [message]
        begun.extend([True] * isinstance(message.header, kind))
        return result

    return late


def swapping(kind: type) -> Fault:
    """A fault: messages of a kind change places two by two."""
    kept: list[Message] = []

    def fault(message: Message) -> Iterable[Message]:
        if not isinstance(message.header, kind):
            held, kept[:] = kept[:], []
            return (*held, message)
        if not kept:
            kept.append(message)
            return ()
        return (message, kept.pop())

    return fault


async def taken_and_then_a_wait(link: Any) -> Message:
    """A receive that waits with a message in its hand."""
    message: Message = await link.receive()
    await anyio.sleep(0.01)
    return message


def half_sent(half: Callable[[Message], Message]) -> Callable[[Any, Message], Awaitable[None]]:
    """A send that leaves half of a message behind when it is cancelled."""

    async def send(link: Any, message: Message) -> None:
        try:
            await anyio.sleep(0.01)
            await link.send(message)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await link.send(half(message))
            raise

    return send


def kit_tests(kit: type) -> set[str]:
    """The names of a kit's tests."""
    return {name for name, _ in inspect.getmembers(kit, inspect.isfunction) if name.startswith("test_")}


def ref_of(message: Message) -> MemberRef | None:
    """Whom a member's message is from."""
    return getattr(message.header, "member", None)
