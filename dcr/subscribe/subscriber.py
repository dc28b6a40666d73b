"""The subscriber: a rollout engine's end. It fetches, verifies and prepares versions while the one before serves.

Nothing uncommitted is ever in live memory: weights change only within `Version.install`. All work runs in tasks that
the subscriber owns; what its user awaits only waits for them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import anyio

from dcr import chain, plugins
from dcr.budget import ByteBudget, MiB
from dcr.closing import Contexts
from dcr.commit import MAY_SERVE, Member, Receipt, member_after
from dcr.errors import (
    BaseMismatch,
    DcrError,
    DigestMismatch,
    IncompleteError,
    PayloadError,
    Poisoned,
    RankError,
    RemoteError,
    RunMismatch,
    StateError,
    StorageRebound,
    WireError,
)
from dcr.observe import Event, Observer, ignore
from dcr.seams import BasedCodec, Codec, Link, Loader, Run, Store, Transport
from dcr.stages.transfer import Aborted, Superseded
from dcr.subscribe.rank import Prepared, Rank, find_codec, reader
from dcr.subscribe.version import Version
from dcr.wire import Abort, Ack, Chunk, Head, Header, Identity, Join, Leave, MemberRef, Message, Nack, Open

LEAVE_TIMEOUT_S = 5.0


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
    """Follows a run and offers its versions; an async context manager, and then an async iterator.

    member: this engine's name among the run's members. transport: None finds one by the URL's scheme. codecs: a
    codec by its name. budget: bytes of encoded chunks in memory, 256 MiB by default. fetch_timeout_s: how long to
    wait for the next piece of an attempt that has begun. workers: threads that decode.
    """

    def __init__(
        self,
        url: str,
        *,
        loader: Loader[Any],
        member: str,
        transport: Transport | None = None,
        codecs: Callable[[str], Codec | BasedCodec] = find_codec,
        budget: ByteBudget | None = None,
        fetch_timeout_s: float = 600.0,
        workers: int = 1,
        observe: Observer = ignore,
    ) -> None:
        self._url = url
        self._transport: Transport = transport or plugins.transport_for(url)
        self._observe = observe
        self._ref = MemberRef(member, uuid.uuid4().hex)
        self._rank = Rank(
            loader,
            budget=budget or ByteBudget(256 * MiB),
            codecs=codecs,
            timeout_s=fetch_timeout_s,
            workers=workers,
            observe=self._of_member,
        )
        self._head: Head | None = None
        self._holds: Identity | None = None
        self._state = Member.EMPTY
        self._offered: Version | None = None
        self._error: Exception | None = None
        self._begun = anyio.Event()

    # ------------------------------------------------------------------ what its user calls

    @property
    def version(self) -> int | None:
        """The version that live memory holds, None if it holds none that is known."""
        return self._holds.version if self._holds else None

    @property
    def may_serve(self) -> bool:
        """True if live memory holds exactly one committed version."""
        return self._state in MAY_SERVE and not isinstance(self._error, StorageRebound)

    def __aiter__(self) -> Subscriber:
        return self

    async def __anext__(self) -> Version:
        """The next version to install.

        Raises:
            StateError: the version before was not installed: the next one stands on it.
        """
        if self._offered is not None and not self._offered.over:
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
        self._contexts = contexts = Contexts()
        try:
            self._run: Run = await contexts.enter(self._transport.open(self._url))
            self._link = await contexts.enter(self._run.member(self._ref))
            self._mail = _Mail(self._link)
            self._offer_to, self._offers = anyio.create_memory_object_stream[Version](1)
            contexts.call(self._offer_to.close)
            contexts.call(self._offers.close)
            self._group = await contexts.enter(anyio.create_task_group())
            contexts.call(self._group.cancel_scope.cancel)
            self._group.start_soon(self._live)
            await self._begun.wait()
            if self._error is not None:
                raise self._error
        except BaseException as error:
            await contexts.close(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._contexts.close(error)

    async def _live(self) -> None:
        """All of this member's work, in one task: so that leaving comes last, however its user is cancelled."""
        try:
            await self._work()
        finally:
            self._begun.set()
            with anyio.move_on_after(LEAVE_TIMEOUT_S, shield=True):
                await self._say(Leave(self._ref))

    async def _work(self) -> None:
        with self._offer_to:
            try:
                await self._recognise()
                await self._link.send(Message(Join(self._ref, self._holds, self._rank.reads_base)))
                self._begun.set()
                while True:
                    await self._catch_up()
                    message = await self._next()
                    if message is not None and isinstance(message.header, Open):
                        await self._attempt(message, message.header)
            except Exception as error:
                self._error = error
                self._emit("failed", detail=f"{type(error).__name__}: {error}")

    async def _next(self) -> Message | None:
        """The next message; None for one that cannot be understood: it is reported, and it is no attempt."""
        try:
            return await self._mail.receive()
        except WireError as error:
            self._emit("ignored", detail=str(error))
            return None

    def _move(self, event: str) -> None:
        self._state = member_after(self._state, event)

    def _of_member(self, event: Event) -> None:
        self._observe(replace(event, member=self._ref.member))

    def _emit(self, name: str, version: int | None = None, **rest: Any) -> None:
        self._observe(Event(name, version, self._ref.member, **rest))

    async def _committed(self) -> Identity | None:
        """What the head names now."""
        self._head, _ = await self._run.ledger.read()
        return self._head.identity if self._head else None

    # ------------------------------------------------------------------ stored versions

    async def _recognise(self) -> None:
        """If the weights as they were loaded are those of a version of the run, start from there."""
        head, store = await self._committed(), self._run.store
        if head is None or store is None:
            return
        links = await chain.back_from(store, head, until=None)
        await self._rank.bind(links[-1].opened)
        root = self._rank.root
        for link, identity in zip(reversed(links), reversed(chain.committed(links, head)), strict=True):
            if link.seal.root == root and link.open.layout == self._rank.layout.digest:
                self._hold(identity)
                return

    def _hold(self, identity: Identity) -> None:
        self._holds = identity
        self._move("recognised")
        self._emit("recognised", identity.version)

    async def _catch_up(self) -> None:
        """Follow the head through stored versions until live memory holds what it names."""
        store = self._run.store
        while store is not None:
            head = await self._committed()
            if head is None or head == self._holds:
                return
            try:
                links = await self._links(store, head)
                if self._holds is None or links[0].open.base is None:
                    await self._offer(Version(head, "seed", None), partial(self._seed, store, head))
                else:
                    await self._follow(store, links[0])
            except IncompleteError:
                if await self._committed() == head:
                    raise
                continue  # what was being read has been removed, since there is something newer

    async def _links(self, store: Store, head: Identity) -> list[chain.Stored]:
        if self._holds is not None:
            try:
                return await chain.back_from(store, head, until=self._holds)
            except IncompleteError as error:
                self._emit("behind", self._holds.version, detail=str(error))
        return await chain.back_from(store, head, until=None)

    async def _follow(self, store: Store, link: chain.Stored) -> None:
        """Prepare and offer the stored version that comes after the one held."""
        self._move("opened")
        try:
            prepared = await self._prepare(link.opened, link.open, store=store)
        except IncompleteError:
            self._move("dropped")
            raise
        except (BaseMismatch, DigestMismatch) as error:
            if not await self._doubt(link.open.identity, error):
                raise  # memory is as it should be: it is the stored version that does not fit
            return
        self._move("prepared")
        self._move("head_names_it")
        await self._offer_prepared(prepared)

    async def _seed(self, store: Store, identity: Identity) -> Exception | None:
        """Write stored versions over whatever live memory holds: an anchor, and the deltas after it."""
        began_s = time.monotonic()
        try:
            await self._rank.require_epoch()
            links = await chain.back_from(store, identity, until=None)
        except (IncompleteError, RankError, StorageRebound) as error:
            return error  # nothing has been written
        if self._holds is not None:
            self._holds = None
            self._move("lost_trust")
        self._move("seed")
        try:
            for link in links:
                async with aclosing(store.read(link.open.identity)) as messages:
                    await self._rank.overwrite(link.opened, messages)
            await self._rank.require_root(identity, links[-1].seal.root)
        except (DcrError, OSError) as error:
            await self._poison(identity, error)
            return error
        await self._installed(identity, links[-1].seal.root, began_s)
        return None

    # ------------------------------------------------------------------ live attempts

    async def _attempt(self, opened: Message, header: Open) -> None:
        """Prepare a live attempt, vote, wait for the head, offer it. What is wrong with it is refused by name."""
        identity = header.identity
        committed = await self._committed()
        if committed is not None and committed.version >= identity.version:
            return
        if self._ref not in header.members and header.base in (None, self._holds):
            await self._say(Join(self._ref, self._holds, self._rank.reads_base))  # what was said before has been lost
        if self._holds is not None:
            self._move("opened")
        try:
            prepared = await self._vote(opened, header)
        except Aborted as error:
            self._emit("aborted", identity.version, detail=str(error))
            if isinstance(error, Superseded):
                self._mail.put_back(error.message)
        except (BaseMismatch, DigestMismatch) as error:
            await self._refuse(identity, error)
            await self._doubt(identity, error)
            return
        except RemoteError as error:
            await self._refuse(identity, error)
        except DcrError as error:  # this side's own trouble: the publisher need not wait for a vote
            await self._refuse(identity, error)
            raise
        else:
            if await self._outcome(identity) and prepared is not None:
                await self._accept(prepared)
                return
        if self._holds is not None:
            self._move("dropped")

    async def _vote(self, opened: Message, header: Open) -> Prepared | None:
        """Verify and prepare an attempt, and say so; None if there is nothing here to prepare it on."""
        began_s = time.monotonic()
        prepared: Prepared | None
        if self._holds is None and header.base is None:
            await self._rank.bind(opened)
            root, prepared = await self._rank.inspect(self._receipt(header), self._mail.receive, self._ask_again)
        else:
            prepared = await self._prepare(opened, header)
            root = prepared.root
        if self._holds is not None:
            self._move("prepared")
        await self._link.send(Message(Ack("prepared", self._ref, header.identity, root)))
        self._emit("prepared", header.identity.version, detail=f"{time.monotonic() - began_s:.3f} s")
        return prepared

    async def _outcome(self, identity: Identity) -> bool:
        """Wait until the head names an attempt (True), or it is given up (False). A member never decides alone."""
        while True:
            committed = await self._committed()
            if committed is not None and committed.version >= identity.version:
                return committed == identity
            if self._head is not None and self._head.term > identity.term:
                return False
            message = await self._next()
            match message and message.header:
                case Abort(identity=given_up) if given_up == identity:
                    return False
                case Open() if message is not None:
                    self._mail.put_back(message)
                    return await self._committed() == identity
                case _:
                    pass

    async def _accept(self, prepared: Prepared) -> None:
        if self._holds is None:  # an anchor whose very bits are held already
            self._hold(prepared.identity)
            self._move("opened")
            self._move("prepared")
        self._move("head_names_it")
        await self._offer_prepared(prepared)

    # ------------------------------------------------------------------ preparing

    async def _prepare(self, opened: Message, header: Open, *, store: Store | None = None) -> Prepared:
        """An attempt, prepared: from the store, or as it comes over the link."""
        receipt = self._receipt(header, stored=store is not None)
        await self._rank.bind(opened)
        if store is None:
            return await self._rank.prepare(receipt, self._mail.receive, self._ask_again)
        async with aclosing(store.read(header.identity)) as messages:
            return await self._rank.prepare(receipt, reader(messages, header.identity), None)

    def _receipt(self, header: Open, *, stored: bool = False) -> Receipt:
        assert self._head is not None
        term = 0 if stored else self._head.term
        return Receipt(header, run=self._head.run, term=term, holds=self._holds)

    async def _ask_again(self, chunk: Chunk, error: PayloadError) -> None:
        reason = f"{type(error).__name__}: {error}"
        self._emit("refused", chunk.identity.version, frame=chunk.frame, detail=reason)
        await self._link.send(Message(Nack(self._ref, chunk.identity, self._holds, reason, (chunk.frame,))))

    async def _refuse(self, identity: Identity, error: DcrError) -> None:
        reason = f"{type(error).__name__}: {error}"
        self._emit("refused", identity.version, detail=reason)
        if not isinstance(error, RunMismatch):
            await self._link.send(Message(Nack(self._ref, identity, self._holds, reason)))

    async def _doubt(self, identity: Identity, error: BaseMismatch | DigestMismatch) -> bool:
        """Old or new bits are not those expected: look at what live memory really holds before anybody is blamed.

        True if it is not what it should be: then it is not trusted any more.
        """
        if self._holds is None:
            return False
        believed = self._rank.root
        if await self._rank.rescan() == believed:
            self._move("dropped")
            return False
        self._emit("lost_trust", identity.version, detail=str(error))
        self._holds = None
        self._move("lost_trust")
        return True

    # ------------------------------------------------------------------ installing

    async def _offer(self, version: Version, install: Callable[[], Awaitable[Exception | None]]) -> None:
        """Offer a version until it is installed, or its installation has poisoned this member."""
        try:
            await self._offer_to.send(version)
            while not version.installed:
                await version.wanted()
                error = await install()
                version.answer(error)
                if isinstance(error, StorageRebound):
                    raise error  # nothing that this subscriber knows is true any more
                if self._state is Member.POISONED or isinstance(error, IncompleteError):
                    break  # it is offered again, or a newer one instead
        finally:
            version.close()

    async def _offer_prepared(self, prepared: Prepared) -> None:
        await self._offer(Version(prepared.identity, "delta", prepared.changed), partial(self._install, prepared))

    async def _install(self, prepared: Prepared) -> Exception | None:
        began_s = time.monotonic()
        try:
            await self._rank.require_epoch()
        except StorageRebound as error:
            return error
        self._move("install")
        try:
            await self._rank.install(prepared)
        except Poisoned as error:
            await self._poison(prepared.identity, error)
            return error
        except Exception as error:
            self._move("undone")
            self._emit("undone", prepared.identity.version, detail=f"{type(error).__name__}: {error}")
            return error
        await self._installed(prepared.identity, prepared.root, began_s)
        return None

    async def _installed(self, identity: Identity, root: bytes, began_s: float) -> None:
        self._holds = identity
        self._move("installed")
        self._emit("installed", identity.version, detail=f"{time.monotonic() - began_s:.6f} s")
        await self._say(Ack("installed", self._ref, identity, root))
        await self._say(Join(self._ref, identity, self._rank.reads_base))

    async def _say(self, header: Header) -> None:
        """Report what has happened; a report that does not get through does not change what has."""
        try:
            await self._link.send(Message(header))
        except (DcrError, OSError) as error:
            self._emit("unsaid", detail=f"{type(header).__name__}: {type(error).__name__}: {error}")

    async def _poison(self, identity: Identity, error: Exception) -> None:
        reason = f"poisoned: {type(error).__name__}: {error}"
        self._holds = None
        self._move("failed")
        self._emit("poisoned", identity.version, detail=reason)
        await self._say(Nack(self._ref, identity, None, reason))
