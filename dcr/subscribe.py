"""The subscriber: a rollout engine's end. It fetches, verifies and prepares versions while the one before serves.

Nothing uncommitted is ever in live memory: weights change only within `Version.install`. All work runs in tasks that
the subscriber owns; what its user awaits only waits for them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import anyio
import anyio.to_thread

from dcr import chain, digest, frames, plugins
from dcr.budget import ByteBudget
from dcr.commit import MAY_SERVE, Member, Receipt, member_after
from dcr.errors import (
    BaseMismatch,
    DcrError,
    DigestMismatch,
    IncompleteError,
    PayloadError,
    Poisoned,
    RemoteError,
    RunMismatch,
    StateError,
    StorageRebound,
)
from dcr.frames import Layout
from dcr.observe import Event, Observer, ignore
from dcr.pipeline import Pipeline
from dcr.ready import Ready
from dcr.seams import Codec, Link, Loader, Run, Store, Transport
from dcr.stages import apply
from dcr.stages.apply import Inspect, Prepare, Write
from dcr.stages.compress import Decompress
from dcr.stages.transfer import Aborted, Fetch
from dcr.views import Lanes
from dcr.wire import Abort, Ack, Chunk, Head, Identity, Join, Leave, MemberRef, Message, Nack, Open

LEAVE_TIMEOUT_S = 5.0


@dataclass(eq=False)
class Version:
    """A committed version, ready to be installed. `install` is the only moment at which weights change.

    kind: "delta" (prepared, with an undo) or "seed" (this member held no version that leads here: everything is
    written from stored versions, without an undo). changed: elements that will be written; None for a seed.
    """

    number: int
    identity: Identity
    kind: Literal["delta", "seed"]
    changed: int | None
    _wanted: anyio.Event = field(default_factory=anyio.Event)
    _answered: anyio.Event = field(default_factory=anyio.Event)
    _error: Exception | None = None
    installed: bool = False

    async def install(self) -> None:
        """Write it, read it back, and report it installed. After an error that is not `Poisoned`, try again.

        Raises:
            ReadBackError: memory did not keep what was written; it was undone, the version before still serves.
            Poisoned: live memory may hold half a version: do not serve; the next version offered seeds it anew.
            StorageRebound: a weight was replaced since it was bound; nothing was written.
            StateError: it is installed already, or the subscriber was closed.
        """
        if self.installed or self._wanted.is_set():
            raise StateError(f"version {self.number} {'is' if self.installed else 'is being'} installed already")
        self._answered = anyio.Event()
        self._wanted.set()
        await self._answered.wait()
        if self._error is not None:
            raise self._error

    async def wanted(self) -> None:
        """For the subscriber: wait until somebody calls install."""
        await self._wanted.wait()

    def answer(self, error: Exception | None) -> None:
        """For the subscriber: how it went."""
        self._error, self.installed = error, error is None
        self._wanted = anyio.Event()
        self._answered.set()


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a member voted for: everything that is needed to install it."""

    identity: Identity
    root: bytes
    target: Lanes
    readies: list[Ready]


def _find_codec(name: str) -> Codec:
    codec: Codec = plugins.load("dcr.codecs", name)
    return codec


class _Mail:
    """A link whose last message can be put back."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._back: Message | None = None

    async def receive(self) -> Message:
        if self._back is not None:
            message, self._back = self._back, None
            return message
        return await self._link.receive()

    def put_back(self, message: Message) -> None:
        self._back = message


class Subscriber:
    """Follows a run and offers its versions; use it as an async context manager (`dcr.subscriber`), then iterate.

    member: this engine's name among the run's members. transport: None finds one by the URL's scheme. find_codec: a
    codec by its name. budget: bytes of encoded chunks in memory. fetch_timeout_s: how long to wait for the next piece
    of an attempt that has begun. workers: threads that decode.
    """

    def __init__(
        self,
        url: str,
        *,
        loader: Loader,
        member: str,
        transport: Transport | None = None,
        find_codec: Callable[[str], Codec] = _find_codec,
        budget: ByteBudget | None = None,
        fetch_timeout_s: float = 600.0,
        workers: int = 1,
        observe: Observer = ignore,
    ) -> None:
        self._url = url
        self._loader = loader
        self._transport: Transport = transport or plugins.transport_for(url)
        self._find_codec = find_codec
        self._budget = budget or ByteBudget(256 << 20)
        self._fetch_timeout_s = fetch_timeout_s
        self._workers = workers
        self._observe = observe
        self._ref = MemberRef(member, uuid.uuid4().hex)
        self._layout: Layout | None = None
        self._epoch = b""
        self._holds: Identity | None = None
        self._lanes: Lanes = digest.zero(0)
        self._state = Member.EMPTY
        self._offered: Version | None = None
        self._limiter = anyio.CapacityLimiter(1)  # the loader is used by one thread at a time

    # ------------------------------------------------------------------ what its user calls

    @property
    def version(self) -> int | None:
        """The version that live memory holds, None if it holds none that is known."""
        return self._holds.version if self._holds else None

    @property
    def may_serve(self) -> bool:
        """True if live memory holds exactly one committed version."""
        return self._state in MAY_SERVE

    def __aiter__(self) -> Subscriber:
        return self

    async def __anext__(self) -> Version:
        """The next version to install.

        Raises:
            StateError: the version before was not installed: the next one stands on it.
        """
        if self._offered is not None and not self._offered.installed and not self._poisoned:
            raise StateError(f"version {self._offered.number} was offered and not installed; install it first")
        try:
            self._offered = await self._offers.receive()
        except anyio.EndOfStream:
            if self._error is not None:
                raise self._error from None
            raise StopAsyncIteration from None
        return self._offered

    # ------------------------------------------------------------------ life

    async def __aenter__(self) -> Subscriber:
        self._error: Exception | None = None
        async with AsyncExitStack() as stack:
            self._run: Run = await stack.enter_async_context(self._transport.open(self._url))
            self._link = await stack.enter_async_context(self._run.member(self._ref))
            self._mail = _Mail(self._link)
            self._head, _ = await self._run.ledger.read()
            await self._recognise()
            await self._link.send(Message(Join(self._ref, self._holds)))
            send, self._offers = anyio.create_memory_object_stream[Version](1)
            stack.callback(self._offers.close)
            self._group = await stack.enter_async_context(anyio.create_task_group())
            self._group.start_soon(self._work, send)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._group.cancel_scope.cancel()
        try:
            with anyio.move_on_after(LEAVE_TIMEOUT_S, shield=True):
                await self._link.send(Message(Leave(self._ref)))
        finally:
            await self._stack.aclose()

    @property
    def _poisoned(self) -> bool:
        return self._state is Member.POISONED

    def _emit(self, name: str, version: int | None = None, **rest: Any) -> None:
        self._observe(Event(name, version, self._ref.member, **rest))

    def _move(self, event: str) -> None:
        self._state = member_after(self._state, event)

    # ------------------------------------------------------------------ what is held

    async def _recognise(self) -> None:
        """If the weights as they were loaded are those of a version of the run, start from there."""
        store = self._run.store
        if store is None or self._head is None or self._head.identity is None:
            return
        links = await chain.back_from(store, self._head.identity, until=None)
        await self._bind(links[-1].opened)
        root = await self._rescan()
        for link in reversed(links):
            if link.seal.root == root and link.open.layout == self._bound.digest:
                self._hold(link.open.identity)
                return

    def _hold(self, identity: Identity) -> None:
        self._holds = identity
        self._move("recognised")
        self._emit("recognised", identity.version)

    async def _bind(self, opened: Message) -> Layout:
        """Bind the loader to an attempt's layout, unless it is bound to it already.

        Raises:
            WireError, LayoutError, SchemaError: it is not a layout, or does not fit this engine.
        """
        header = opened.header
        assert isinstance(header, Open)
        if self._layout is None or self._layout.digest != header.layout:
            layout = await anyio.to_thread.run_sync(frames.decode, opened.body)
            if layout.digest != header.layout:
                raise PayloadError(f"{header.identity}: its layout does not match the digest in its opening")
            await self._in_thread(self._loader.bind, layout)
            self._layout = layout
            self._epoch = await self._in_thread(self._loader.epoch)
            await self._rescan()
        return self._layout

    @property
    def _bound(self) -> Layout:
        assert self._layout is not None
        return self._layout

    async def _rescan(self) -> bytes:
        """Recompute the digest of live memory; its root, or nothing if copies of a tensor differ."""
        try:
            self._lanes = await self._in_thread(self._loader.digest)
        except DigestMismatch as error:
            self._emit("suspect", detail=str(error))
            return b""
        return digest.root(self._lanes)

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await anyio.to_thread.run_sync(function, *args, limiter=self._limiter)

    # ------------------------------------------------------------------ the loop

    async def _work(self, offers: Any) -> None:
        async with offers:
            try:
                while True:
                    await self._catch_up(offers)
                    message = await self._mail.receive()
                    if isinstance(message.header, Open):
                        await self._attempt(message, offers)
            except Exception as error:
                self._error = error
                self._emit("failed", detail=str(error))

    async def _read_head(self) -> Head | None:
        self._head, _ = await self._run.ledger.read()
        return self._head

    async def _catch_up(self, offers: Any) -> None:
        """Follow the head through stored versions until live memory holds what it names."""
        store = self._run.store
        while store is not None:
            head = await self._read_head()
            if head is None or head.identity is None or head.identity == self._holds:
                return
            links = await self._links(store, head.identity)
            if links[0].open.base is None or self._holds is None:
                await self._offer_seed(store, links, offers)
            else:
                await self._follow(store, links[0], offers)

    async def _links(self, store: Store, head: Identity) -> list[chain.Stored]:
        if self._holds is not None:
            try:
                return await chain.back_from(store, head, until=self._holds)
            except IncompleteError as error:
                self._emit("behind", self._holds.version, detail=str(error))
        return await chain.back_from(store, head, until=None)

    async def _follow(self, store: Store, link: chain.Stored, offers: Any) -> None:
        """Prepare and offer the stored version that comes after the one held."""
        identity = link.open.identity
        messages = store.read(identity)
        await anext(messages)
        self._move("opened")
        try:
            prepared = await self._prepare(link.opened, receive=_reader(messages, identity))
        except BaseMismatch as error:
            await self._lose_trust(identity, error)
            return
        self._move("prepared")
        self._move("head_names_it")
        await self._offer(prepared, offers)

    async def _attempt(self, opened: Message, offers: Any) -> None:
        """A live attempt: prepare it, vote, wait for the head, offer it. What is wrong with it is told by name."""
        assert isinstance(opened.header, Open)
        identity = opened.header.identity
        if await self._is_past(identity):
            return
        was_empty = self._holds is None
        if not was_empty:
            self._move("opened")
        try:
            prepared = await self._vote(opened)
        except Aborted as error:
            self._emit("aborted", identity.version, detail=str(error))
            self._drop(was_empty)
            return
        except BaseMismatch as error:
            await self._refuse(identity, error)
            if was_empty:
                return
            await self._lose_trust(identity, error)
            return
        except RemoteError as error:
            await self._refuse(identity, error)
            self._drop(was_empty)
            return
        if await self._outcome(identity) and prepared is not None:
            if was_empty:
                self._hold(identity)
            else:
                self._move("head_names_it")
            await self._offer(prepared, offers)
        else:
            self._drop(was_empty)

    async def _is_past(self, identity: Identity) -> bool:
        head = await self._read_head()
        return head is not None and head.identity is not None and head.identity.version >= identity.version

    def _drop(self, was_empty: bool) -> None:
        if not was_empty:
            self._move("dropped")

    async def _vote(self, opened: Message) -> _Prepared | None:
        """Fetch, verify and prepare an attempt, and say so; None if there is nothing here to prepare it on."""
        assert isinstance(opened.header, Open)
        identity = opened.header.identity
        began_s = time.monotonic()
        if self._holds is None and opened.header.base is None:
            root, prepared = await self._inspect(opened)
        else:
            prepared = await self._prepare(opened, receive=self._mail.receive, again=self._ask_again)
            root = prepared.root
        if self._holds is not None:
            self._move("prepared")
        await self._link.send(Message(Ack("prepared", self._ref, identity, root)))
        self._emit("prepared", identity.version, detail=f"{time.monotonic() - began_s:.3f} s")
        return prepared

    async def _outcome(self, identity: Identity) -> bool:
        """Wait until the head names an attempt (True), or it is given up (False). A member never decides alone."""
        while True:
            head = await self._read_head()
            if head is not None and head.identity is not None and head.identity.version >= identity.version:
                return head.identity == identity
            if head is not None and head.term > identity.term:
                return False
            message = await self._mail.receive()
            match message.header:
                case Abort(identity=given_up) if given_up == identity:
                    return False
                case Open():
                    self._mail.put_back(message)
                    head = await self._read_head()
                    return head is not None and head.identity == identity
                case _:
                    pass

    # ------------------------------------------------------------------ preparing

    def _receipt(self, opened: Open, layout: Layout, *, stored: bool) -> Receipt:
        assert self._head is not None
        term = 0 if stored else self._head.term
        return Receipt(opened, run=self._head.run, term=term, holds=self._holds, frames=len(layout.frames))

    async def _prepare(
        self,
        opened: Message,
        *,
        receive: Callable[[], Awaitable[Message]],
        again: Callable[[Chunk, PayloadError], Awaitable[None]] | None = None,
    ) -> _Prepared:
        assert isinstance(opened.header, Open)
        layout = await self._bind(opened)
        await self._check_epoch()
        receipt = self._receipt(opened.header, layout, stored=again is None)
        fetch = self._fetch(receipt, layout, receive, again)
        readies: list[Ready] = []
        stages = Pipeline(self._decompress(layout), Prepare(self._loader))
        await stages.run(fetch, into=readies.append)
        seal = receipt.require_complete()
        assert fetch.seal is not None
        target = await anyio.to_thread.run_sync(apply.verify, fetch.seal, layout, self._lanes, readies)
        return _Prepared(seal.identity, seal.root, target, readies)

    async def _inspect(self, opened: Message) -> tuple[bytes, _Prepared | None]:
        """Verify an anchor without keeping it: nothing is held here that it could be compared with.

        If live memory happens to hold its very bits, it is prepared: there is nothing to write.
        """
        assert isinstance(opened.header, Open)
        layout = await self._bind(opened)
        receipt = self._receipt(opened.header, layout, stored=False)
        fetch = self._fetch(receipt, layout, self._mail.receive, self._ask_again)
        inspect = Inspect(layout)
        await Pipeline(self._decompress(layout), inspect).run(fetch)
        seal = receipt.require_complete()
        assert fetch.seal is not None
        target = inspect.verify(fetch.seal)
        if (self._lanes == target).all():
            return seal.root, _Prepared(seal.identity, seal.root, target, [])
        return seal.root, None

    def _fetch(self, receipt: Receipt, layout: Layout, receive: Any, again: Any) -> Fetch:
        return Fetch(receipt, layout, self._budget, receive=receive, again=again, timeout_s=self._fetch_timeout_s)

    def _decompress(self, layout: Layout) -> Decompress:
        return Decompress(layout, self._find_codec, workers=self._workers)

    async def _ask_again(self, chunk: Chunk, error: PayloadError) -> None:
        reason = f"{type(error).__name__}: {error}"
        self._emit("refused", chunk.identity.version, frame=chunk.frame, detail=reason)
        await self._link.send(Message(Nack(self._ref, chunk.identity, self._holds, reason, (chunk.frame,))))

    async def _refuse(self, identity: Identity, error: RemoteError) -> None:
        reason = f"{type(error).__name__}: {error}"
        self._emit("refused", identity.version, detail=reason)
        if not isinstance(error, RunMismatch):
            await self._link.send(Message(Nack(self._ref, identity, self._holds, reason)))

    async def _lose_trust(self, identity: Identity, error: BaseMismatch) -> None:
        """Old bits were not those expected: recompute what live memory holds before anybody is blamed."""
        believed = digest.root(self._lanes)
        if await self._rescan() == believed:
            self._move("dropped")
            return
        self._emit("lost_trust", identity.version, detail=str(error))
        self._holds = None
        self._move("lost_trust")

    async def _check_epoch(self) -> None:
        if await self._in_thread(self._loader.epoch) != self._epoch:
            raise StorageRebound("a weight was replaced or moved since the loader was bound; subscribe anew")

    # ------------------------------------------------------------------ installing

    async def _offer(self, prepared: _Prepared, offers: Any) -> None:
        """Offer a prepared version until it is installed, or its installation has poisoned this member."""
        changed = sum(ready.changed for ready in prepared.readies)
        version = Version(prepared.identity.version, prepared.identity, "delta", changed)
        await offers.send(version)
        while not version.installed and not self._poisoned:
            await version.wanted()
            version.answer(await self._install(prepared))

    async def _install(self, prepared: _Prepared) -> Exception | None:
        began_s = time.monotonic()
        try:
            await self._check_epoch()
        except StorageRebound as error:
            return error
        self._move("install")
        try:
            await self._in_thread(apply.install, self._loader, prepared.readies)
        except Poisoned as error:
            await self._poison(prepared.identity, error)
            return error
        except Exception as error:
            self._move("undone")
            self._emit("undone", prepared.identity.version, detail=str(error))
            return error
        self._lanes = prepared.target
        await self._installed(prepared.identity, prepared.root, began_s)
        return None

    async def _installed(self, identity: Identity, root: bytes, began_s: float) -> None:
        self._holds = identity
        self._move("installed")
        self._emit("installed", identity.version, detail=f"{time.monotonic() - began_s:.6f} s")
        await self._link.send(Message(Ack("installed", self._ref, identity, root)))

    async def _offer_seed(self, store: Store, links: list[chain.Stored], offers: Any) -> None:
        identity = links[-1].open.identity
        version = Version(identity.version, identity, "seed", None)
        await offers.send(version)
        await version.wanted()
        version.answer(await self._seed(store, links))

    async def _seed(self, store: Store, links: list[chain.Stored]) -> Exception | None:
        """Write stored versions over whatever live memory holds; right only if a rescan says so."""
        began_s, last = time.monotonic(), links[-1]
        if self._state is Member.SERVING:
            self._move("lost_trust")
        self._holds = None
        self._move("seed")
        try:
            await self._bind(last.opened)
            for link in links:
                await self._overwrite(store, link)
            if await self._rescan() != last.seal.root:
                raise Poisoned(f"{last.open.identity} was written from the store, but live memory has another digest")
        except (DcrError, OSError) as error:
            await self._poison(last.open.identity, error)
            return error
        await self._installed(last.open.identity, last.seal.root, began_s)
        return None

    async def _overwrite(self, store: Store, link: chain.Stored) -> None:
        layout = await self._bind(link.opened)
        opened = link.open
        receipt = Receipt(opened, run=opened.identity.run, term=0, holds=opened.base, frames=len(layout.frames))
        messages = store.read(opened.identity)
        await anext(messages)
        fetch = self._fetch(receipt, layout, _reader(messages, opened.identity), None)
        stages = Pipeline(self._decompress(layout), Prepare(self._loader), Write(self._loader))
        await stages.run(fetch)
        receipt.require_complete()

    async def _poison(self, identity: Identity, error: Exception) -> None:
        self._holds = None
        self._move("failed")
        self._emit("poisoned", identity.version, detail=f"{type(error).__name__}: {error}")
        await self._link.send(Message(Nack(self._ref, identity, None, f"poisoned: {type(error).__name__}: {error}")))


def _reader(messages: Any, identity: Identity) -> Callable[[], Awaitable[Message]]:
    """The messages of a stored attempt, one by one."""

    async def receive() -> Message:
        try:
            return await anext(messages)
        except StopAsyncIteration:
            raise IncompleteError(f"{identity}: the store ended before the attempt was complete") from None

    return receive
