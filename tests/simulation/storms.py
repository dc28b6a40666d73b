"""Weather for tests: a transport around another one, for one actor, whose links, ledger and store suffer armed faults.

A fault waits for the message that it is for, does its work once and is gone; the list of them can shrink to the one
that matters. What a fault may do keeps to what a transport promises: what a sender was told is held is held, so only a
failed send loses an Open, a Chunk or a Seal.

    at         what
    send       fail (not handed over, error)   vanish (handed over, error)   twice   stall   lose   late
    receive    lose   twice   flip   cut (error, the message is lost)   stall   hold (the next one overtakes it)
               echo (again, some messages later)
    store      fail   flip   stall
    read       fail   stall
    swap       fail   vanish (swapped, error)   retried (swapped, answered False)   late (error, swapped later)   stall
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Set
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import anyio.abc

from dcr.errors import IncompleteError
from dcr.protocol import wire
from dcr.protocol.catalogue import Outline
from dcr.protocol.wire import Head, Identity, Join, MemberRef, Message
from dcr.runs import StoredRun
from dcr.testing import MemoryTransport, flip_bit
from simulation.history import History
from simulation.machine import TICK_S, pause

At = Literal["send", "receive", "store", "read", "swap"]
WHATS: dict[str, tuple[str, ...]] = {
    "send": ("fail", "vanish", "twice", "stall", "lose", "late"),
    "receive": ("lose", "twice", "flip", "cut", "stall", "hold", "echo"),
    "store": ("fail", "flip", "stall"),
    "read": ("fail", "stall"),
    "swap": ("fail", "vanish", "retried", "late", "stall"),
}
KINDS = ("Open", "Chunk", "Seal", "Abort", "Commit", "Join", "Leave", "Ack", "Nack")
DURABLE = {"Open", "Chunk", "Seal"}  # a send of these that returned must have been kept
NOISE = {"twice", "flip", "stall", "hold", "lose", "late", "echo"}  # no reason for an end to give up


@dataclass(frozen=True)
class Fault:
    """One fault: whose it is, at which operation, for which kind of message ("": any), after so many that it spares.

    amount: the bit that is flipped, for how many ticks something is late, or after how many messages it comes again.
    name: of the one actor that it is for ("": whoever comes first).
    """

    who: Literal["publisher", "member"]
    at: At
    what: str
    kind: str = ""
    spared: int = 0
    amount: int = 0
    name: str = ""


class Storm:
    """The weather of a whole run: what is armed, how long things take, and what is still on its way."""

    def __init__(self, seed: int, history: History) -> None:
        self.history = history
        self.delays = random.Random(seed) if seed else None
        self.group: anyio.abc.TaskGroup
        self._armed: list[tuple[Fault, list[int]]] = []

    def arm(self, fault: Fault) -> None:
        self._armed.append((fault, [fault.spared]))

    def calm(self) -> None:
        """No more faults, and no more delays."""
        self._armed.clear()
        self.delays = None

    def strikes(self, actor: Actor, at: At, kind: str = "") -> Fault | None:
        """The fault for this operation, if one is due."""
        for entry in self._armed:
            fault, spared = entry
            if (
                (fault.who, fault.at) == (actor.role, at)
                and fault.kind in ("", kind)
                and fault.name in ("", actor.name)
            ):
                if spared[0]:
                    spared[0] -= 1
                    continue
                self._armed.remove(entry)
                self.history.note(actor.name, f"FAULT {fault.what} at {at} {kind} {fault.amount}")
                actor.excused |= fault.what not in NOISE or at == "swap"
                return fault
        return None

    def later(self, ticks: int, work: Callable[[], Any]) -> None:
        """Do something after a while, whatever has become of who began it."""

        async def late() -> None:
            await anyio.sleep(ticks * TICK_S)
            await work()

        self.group.start_soon(late)


class Failed(OSError):
    """What a fault raises."""


@dataclass(eq=False)
class Actor:
    """One life of a publisher or of a member. dead: killed, so that nothing it does has an effect any more.

    excused: something happened to it that it need not survive. term: the last one that it tried to write to a head.
    """

    role: Literal["publisher", "member"]
    name: str
    dead: bool = False
    excused: bool = False
    term: int = 0

    def require_alive(self) -> None:
        if self.dead:
            raise Failed(f"{self.name} was killed")


class StormyTransport:
    """A memory transport in a storm, for one actor."""

    def __init__(self, transport: MemoryTransport, storm: Storm, actor: Actor) -> None:
        self._transport, self._storm, self._actor = transport, storm, actor

    @asynccontextmanager
    async def open(self, url: str) -> AsyncIterator[_Run]:
        """See `dcr.seams.Transport.open`."""
        async with self._transport.open(url) as run:
            yield _Run(run, self._storm, self._actor)


class _Run:
    def __init__(self, run: StoredRun, storm: Storm, actor: Actor) -> None:
        self._run, self._storm, self._actor = run, storm, actor
        self.ledger = _Ledger(run, storm, actor)
        self.store = _Store(run, storm, actor)

    async def members(self) -> list[Join]:
        return await self._run.members()

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[_Link]:
        async with self._run.sender() as link:
            yield _Link(link, self._storm, self._actor)

    @asynccontextmanager
    async def writer(self, part: tuple[int, int]) -> AsyncIterator[_Link]:
        async with self._run.writer(part) as link:
            yield _Link(link, self._storm, self._actor)

    @asynccontextmanager
    async def member(self, ref: MemberRef) -> AsyncIterator[_Link]:
        """The link of a member that was killed ends later: nobody hears of its death at once."""
        stack = AsyncExitStack()
        link = await stack.enter_async_context(self._run.member(ref))
        try:
            yield _Link(link, self._storm, self._actor)
        finally:
            self._storm.history.left(ref)
            if self._actor.dead:
                self._storm.later(3000, stack.aclose)
            else:
                await stack.aclose()


class _Link:
    def __init__(self, link: Any, storm: Storm, actor: Actor) -> None:
        self._link, self._storm, self._actor = link, storm, actor
        self._waiting: deque[Message] = deque()
        self._echoes: list[tuple[int, Message]] = []  # how many messages come first

    async def send(self, message: Message) -> None:
        """See `dcr.seams.Link.send`."""
        self._actor.require_alive()
        await pause(self._storm.delays)
        kind = type(message.header).__name__
        fault = self._storm.strikes(self._actor, "send", kind)
        match fault.what if fault else "":
            case "fail":
                raise Failed("a test says that this message was not handed over")
            case "lose" if kind not in DURABLE:
                return
            case "late" if kind not in DURABLE:
                assert fault
                return self._storm.later(fault.amount, lambda: self._arrive_late(message))
            case "stall":
                assert fault
                await anyio.sleep(fault.amount * TICK_S)
        await self._hand_over(message)
        if fault and fault.what == "twice" and kind != "Open":
            await self._hand_over(message)
        if fault and fault.what == "vanish":
            raise Failed("a test says that nobody knows whether this message was handed over")

    async def _hand_over(self, message: Message) -> None:
        self._actor.require_alive()
        await self._arrive(message)

    async def _arrive_late(self, message: Message) -> None:
        with suppress(IncompleteError):  # its link may have been closed meanwhile: then it never arrives
            await self._arrive(message)

    async def _arrive(self, message: Message) -> None:
        self._storm.history.sent(message)
        await self._link.send(message)

    async def receive(self) -> Message:
        """See `dcr.seams.Link.receive`."""
        await pause(self._storm.delays)
        while True:
            if self._waiting:
                self._echo()
                return self._waiting.popleft()
            message = await self._link.receive()
            self._actor.require_alive()
            self._waiting.append(message)  # in case of a cancellation within a fault
            await self._struck(message)

    async def _struck(self, message: Message) -> None:
        fault = self._storm.strikes(self._actor, "receive", type(message.header).__name__)
        match fault.what if fault else "":
            case "lose":
                self._waiting.remove(message)
            case "twice":
                self._waiting.append(message)
            case "flip":
                assert fault
                self._waiting.remove(message)
                self._waiting.append(self._flipped(message, fault.amount))
            case "cut":
                self._waiting.remove(message)
                data = wire.encode(message)
                wire.parse(data[: 1 + fault.amount % (len(data) - 1)] if fault else data)
            case "stall":
                assert fault
                await anyio.sleep(fault.amount * TICK_S)
            case "echo":
                assert fault
                self._echoes.append((1 + fault.amount % 8, message))
            case "hold":
                with anyio.move_on_after(0.05):
                    self._waiting.appendleft(await self._link.receive())

    def _echo(self) -> None:
        """A message is about to be given out: what comes again comes nearer."""
        self._echoes = [(left - 1, message) for left, message in self._echoes]
        self._waiting += [message for left, message in self._echoes if left < 0]
        self._echoes = [(left, message) for left, message in self._echoes if left >= 0]

    def _flipped(self, message: Message, bit: int) -> Message:
        try:
            return flipped(message, bit)
        except IncompleteError:  # to its reader, the link has closed
            self._actor.excused = True
            raise


class _Ledger:
    def __init__(self, run: StoredRun, storm: Storm, actor: Actor) -> None:
        self._run, self._storm, self._actor = run, storm, actor

    async def read(self) -> tuple[Head | None, bytes]:
        """See `dcr.seams.Ledger.read`."""
        self._actor.require_alive()
        await pause(self._storm.delays)
        fault = self._storm.strikes(self._actor, "read")
        if fault and fault.what == "fail":
            raise Failed("a test says that the head can not be read")
        if fault:
            await anyio.sleep(fault.amount * TICK_S)
        read = await self._run.ledger.read()
        await pause(self._storm.delays)
        self._actor.require_alive()
        return read

    async def swap(self, head: Head, tag: bytes) -> bool:
        """See `dcr.seams.Ledger.swap`."""
        self._actor.require_alive()
        self._actor.term = head.term
        await pause(self._storm.delays)
        fault = self._storm.strikes(self._actor, "swap")
        what = fault.what if fault else ""
        if fault and what == "late":
            self._storm.later(fault.amount, lambda: self._swap(head, tag))
        if what in ("fail", "late"):
            raise Failed("a test says that the head was not swapped yet")
        if fault and what == "stall":
            await anyio.sleep(fault.amount * TICK_S)
        swapped = await self._swap(head, tag)
        await pause(self._storm.delays)
        self._actor.require_alive()
        if what == "vanish":
            raise Failed("a test says that nobody knows whether the head was swapped")
        return swapped and what != "retried"

    async def _swap(self, head: Head, tag: bytes) -> bool:
        swapped = await self._run.ledger.swap(head, tag)
        if swapped:
            self._storm.history.swapped(head)
        return swapped


class _Store:
    def __init__(self, run: StoredRun, storm: Storm, actor: Actor) -> None:
        self._store, self._storm, self._actor = run.store, storm, actor

    async def newest(self) -> int:
        """See `dcr.seams.Store.newest`."""
        return await self._store.newest()

    async def outlines(self, after: int, to: int) -> list[Outline]:
        """See `dcr.seams.Store.outlines`."""
        return await self._store.outlines(after, to)

    async def describe(self, identity: Identity) -> tuple[Message, Message]:
        """See `dcr.seams.Store.describe`."""
        opened, sealed = await self._store.describe(identity)
        return await self._struck(opened), await self._struck(sealed)

    async def read(self, identity: Identity) -> AsyncGenerator[Message, None]:
        """See `dcr.seams.Store.read`."""
        async for message in self._store.read(identity):
            yield await self._struck(message)

    async def prune(self, keep: Set[Identity], below: int) -> None:
        """See `dcr.seams.Store.prune`."""
        await self._store.prune(keep, below)

    async def _struck(self, message: Message) -> Message:
        self._actor.require_alive()
        await pause(self._storm.delays)
        fault = self._storm.strikes(self._actor, "store", type(message.header).__name__)
        match fault.what if fault else "":
            case "fail":
                raise Failed("a test says that the store can not be read")
            case "flip":
                assert fault
                self._actor.excused = True
                return flipped(message, fault.amount)
            case "stall":
                assert fault
                await anyio.sleep(fault.amount * TICK_S)
        return message


def flipped(message: Message, bit: int) -> Message:
    """A message with one bit flipped on the wire.

    Raises: what a reader of such bytes raises.
    """
    data = wire.encode(message)
    return wire.parse(flip_bit(data, bit % (8 * len(data))))
