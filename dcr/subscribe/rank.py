"""One engine rank at a member: its loader, and what is known of the bits in its live memory."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import anyio
import anyio.to_thread

from dcr.errors import (
    BaseMismatch,
    DigestMismatch,
    PayloadError,
    Poisoned,
    SchemaError,
    StateError,
    StorageRebound,
)
from dcr.events.observers import Observer
from dcr.layout import frames
from dcr.layout.frames import Layout
from dcr.layout.views import Bits, Lanes
from dcr.pipeline import Pipeline
from dcr.pipeline.budget import ByteBudget
from dcr.protocol import digest
from dcr.protocol.receipt import Receipt
from dcr.protocol.wire import Identity, Message, Open
from dcr.runs import chain
from dcr.seams import BasedCodec, Codec, LiveWeights, Loader, Readable, Undoable, Watching
from dcr.stages import apply
from dcr.stages.apply import Inspect, Prepare, Write
from dcr.stages.compose import Compose, Union
from dcr.stages.compress import Decompress
from dcr.stages.transfer import Fetch
from dcr.subscribe import serving
from dcr.subscribe.prepared import AskAgain, Overfull, Prepared, Receive, Seed, reader

_HARMLESS = "it may only make anew what is made of them, in memory of its own; do not serve"


class Rank:
    """A loader, used by one thread at a time, and the digest of what it holds.

    The digest is carried forward from version to version; it is believed only within one storage fingerprint.

    budget: bytes of encoded chunks in memory. timeout_s: how long to wait for the next piece of an attempt that has
    begun. workers: threads that decode.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        budget: ByteBudget,
        codecs: Callable[[str], Codec | BasedCodec],
        timeout_s: float,
        workers: int,
        observe: Observer,
        after_install: Callable[[], object] | None = None,
    ) -> None:
        self._loader = loader
        self._after_install = after_install
        self._is_harmless = after_install is None  # whether that is known to leave the weights alone
        self._budget = budget
        self._codecs = codecs
        self._timeout_s = timeout_s
        self._workers = workers
        self._observe = observe
        self._limiter = anyio.CapacityLimiter(1)
        self._bound: tuple[Layout, LiveWeights[Any]] | None = None
        self._fingerprint = b""
        self._mark = b""
        self._lanes: Lanes = digest.zero(0)

    @property
    def layout(self) -> Layout:
        """The layout that the loader is bound to; raises StateError if there is none, as `weights` does."""
        return self._require_bound()[0]

    @property
    def weights(self) -> LiveWeights[Any]:
        """The live weights that the loader has bound."""
        return self._require_bound()[1]

    @property
    def reads_base(self) -> bool:
        """Whether chunks that need their base can be decoded here."""
        return isinstance(self._loader, Readable) and self._loader.reads_base

    @property
    def root(self) -> bytes:
        """The digest of live memory, as it is believed to be."""
        return digest.root(self._lanes)

    async def bind(self, opened: Message) -> Layout:
        """Bind the loader to an attempt's layout, unless it is bound to it already.

        Raises:
            WireError, LayoutError, SchemaError, PayloadError: it is not a layout, or does not fit this engine.
        """
        header = opened.header
        assert isinstance(header, Open)
        if self._bound is None or self.layout.digest != header.layout:
            layout = await anyio.to_thread.run_sync(frames.decode, opened.body)
            if layout.digest != header.layout:
                raise PayloadError(
                    f"{header.identity}: its layout has the digest {layout.digest.hex()[:16]}, "
                    f"its opening says {header.layout.hex()[:16]}"
                )
            self._fingerprint = await self._run(self._loader.fingerprint)  # first: what moves meanwhile is noticed
            await self.require_awake()
            async with serving.paused(self._loader):  # its loader may be tried out
                self._bound = layout, await self._run(self._loader.bind, layout)
            await self.rescan()
        return self.layout

    async def rescan(self) -> bytes:
        """Recompute the digest from live memory; its root, or nothing if copies of one tensor differ.

        Raises:
            StorageRebound: what was read is not, or not all, what is live.
        """
        self._mark = await self._seen()  # before, so that what is written meanwhile is noticed
        try:
            lanes: Lanes | None = await self._run(self.weights.digest)
        except DigestMismatch:
            lanes = None
        await self.require_fingerprint()
        self._lanes = digest.zero(len(self.layout.schema.tensors)) if lanes is None else lanes
        return b"" if lanes is None else self.root

    async def require_fingerprint(self) -> None:
        """Weights still lie where they lay when the loader was bound, if it has been bound.

        Raises:
            StorageRebound: they do not.
        """
        if self._bound is None:
            return
        try:
            fingerprint = await self._run(self._loader.fingerprint)
        except SchemaError as error:  # it was a tensor that can be written when the loader was bound
            raise StorageRebound(f"{error}. It was replaced since the loader was bound; subscribe anew") from error
        if fingerprint != self._fingerprint:
            raise StorageRebound("a weight was replaced or moved since the loader was bound; subscribe anew")

    async def require_awake(self) -> None:
        """Live memory may be written now.

        Raises:
            StateError: the engine sleeps.
        """
        if isinstance(self._loader, Watching):
            await self._run(self._loader.require_awake)

    async def require_unwritten(self) -> None:
        """Nobody else has written live memory since it was scanned last, or it holds what it held all the same.

        Raises:
            BaseMismatch: live memory holds something else.
        """
        if await self._seen() == self._mark:
            return
        believed = self.root
        if (found := await self.rescan()) != believed:
            raise BaseMismatch(
                "something other than dcr has written these weights (a reload, or a sleep that dropped them): expected "
                f"the digest {believed.hex()[:16]} in live memory, found {found.hex()[:16] or 'copies that differ'}; "
                "the next version offered seeds it anew"
            )

    async def show(self, version: int) -> None:
        """Have the engine show the version that it holds, if it can."""
        await serving.label(self._loader, version)

    async def prepare(self, receipt: Receipt, receive: Receive, again: AskAgain | None) -> Prepared:
        """Fetch, verify and prepare an attempt; writes nothing.

        Raises: as `dcr.stages.transfer.Fetch` and `dcr.stages.apply.verify`.
        """
        await self.require_fingerprint()
        readies: list[Undoable] = []
        fetch = self._fetch(receipt, receive, again)
        stages = Pipeline(self._decompress(), Prepare(self.weights))
        await stages.run(fetch, into=readies.append, version=receipt.identity.version, observe=self._observe)
        seal = receipt.require_complete()
        assert fetch.seal is not None
        target = await anyio.to_thread.run_sync(apply.verify, fetch.seal, self.layout, self._lanes, readies)
        return Prepared(seal.identity, seal.root, target, readies)

    async def compose(
        self, links: Sequence[chain.Stored], read: Callable[[Identity], AsyncGenerator[Message, None]]
    ) -> Prepared:
        """Fetch a chain of stored deltas, one link at a time, and prepare all of it as one; writes nothing.

        Memory is held for what the links change together. links: of one layout, which is bound; the first starts from
        what is held. read: the messages of one.

        Raises: as `prepare`. Uncomposable: these links do not make one change.
        """
        await self.require_fingerprint()
        union, seals = Union(self.layout), list[Message]()
        for link in links:
            async with aclosing(read(link.open.identity)) as messages:
                seals.append(await self._join(union, link, messages))
        readies = await self._run(union.prepare, self.weights)
        target = await anyio.to_thread.run_sync(apply.verify_chain, seals, self.layout, self._lanes, readies)
        return Prepared(links[-1].open.identity, links[-1].seal.root, target, readies)

    async def _join(
        self, union: Union, link: chain.Stored, messages: AsyncIterator[Message], *, based: bool = True
    ) -> Message:
        """Add one link to a union; its seal. based: live memory holds what the union starts from."""
        header = link.open
        receipt = Receipt(header, run=header.identity.run, term=0, holds=header.base)
        fetch = self._fetch(receipt, reader(messages, header.identity), None)
        stages = Pipeline(self._decompress(union, based=based), Compose(union))
        await stages.run(fetch, version=header.identity.version, observe=self._observe)
        receipt.require_complete()
        assert fetch.seal is not None
        return fetch.seal

    async def sow(
        self, links: Sequence[chain.Stored], read: Callable[[Identity], AsyncGenerator[Message, None]]
    ) -> Seed:
        """Fetch an anchor and the deltas after it and compare the anchor with live memory; writes nothing.

        Memory is held for what differs and for what the deltas change together, at most as much as the model takes.
        links: of one layout.

        Raises: as `prepare`. Overfull: more differs. Uncomposable: the deltas do not make one change. PayloadError: one
            of them needs bits that are not in live memory yet.
        """
        anchor, *deltas = links
        await self.bind(anchor.opened)
        await self.rescan()
        union, seals = Union(self.layout), list[Message]()
        for link in deltas:
            async with aclosing(read(link.open.identity)) as messages:
                seals.append(await self._join(union, link, messages, based=False))
        prepared = await self._differences(anchor, read)
        return Seed(links[-1].open.identity, links[-1].seal.root, prepared, union if deltas else None, seals)

    async def _differences(
        self, anchor: chain.Stored, read: Callable[[Identity], AsyncGenerator[Message, None]]
    ) -> Prepared:
        """What of live memory differs from an anchor."""
        readies, left_bytes = list[Undoable](), self.layout.schema.nbytes

        def keep(ready: Undoable) -> None:
            nonlocal left_bytes
            left_bytes -= ready.nbytes
            if left_bytes < 0:
                raise Overfull(
                    f"more differs from {anchor.open.identity} than fits into as much memory as the model takes"
                )
            readies.append(ready)

        receipt = Receipt(anchor.open, run=anchor.open.identity.run, term=0, holds=None)
        async with aclosing(read(anchor.open.identity)) as messages:
            fetch = self._fetch(receipt, reader(messages, anchor.open.identity), None)
            stages = Pipeline(self._decompress(based=False), Prepare(self.weights))
            await stages.run(fetch, into=keep, version=anchor.open.identity.version, observe=self._observe)
        seal = receipt.require_complete()
        assert fetch.seal is not None
        target = await anyio.to_thread.run_sync(apply.verify, fetch.seal, self.layout, self._lanes, readies)
        return Prepared(seal.identity, seal.root, target, readies)

    async def plant(self, seed: Seed) -> float:
        """Write a seed; the seconds that this took. It can be planted once.

        Raises: as `dcr.stages.apply.install` and `verify_chain`; then live memory may hold another version than before.
        """
        last = self._loader.finalize if seed.deltas is not None else self._finalize
        pause_s: float = await self._run(apply.install, self.weights, seed.anchor.readies, last)
        self._lanes = seed.anchor.target
        if seed.deltas is not None:
            began_s = time.monotonic()
            readies = await self._run(seed.deltas.prepare, self.weights)
            self._lanes = apply.verify_chain(seed.seals, self.layout, self._lanes, readies)
            await self._run(apply.install, self.weights, readies, self._finalize)
            pause_s += time.monotonic() - began_s
        return pause_s

    async def inspect(
        self, receipt: Receipt, receive: Receive, again: AskAgain | None
    ) -> tuple[bytes, Prepared | None]:
        """Fetch and verify an anchor without keeping it: its root, and, if these bits are held already, itself.

        Raises: as `prepare`.
        """
        inspect = Inspect(self.layout)
        fetch = self._fetch(receipt, receive, again)
        stages = Pipeline(self._decompress(), inspect)
        await stages.run(fetch, version=receipt.identity.version, observe=self._observe)
        seal = receipt.require_complete()
        assert fetch.seal is not None
        target = inspect.verify(fetch.seal)
        await self.rescan()  # nothing was served until now: what was known of these bits does not count
        held = digest.equal(self._lanes, target)
        return seal.root, Prepared(seal.identity, seal.root, target, []) if held else None

    async def install(self, prepared: Prepared) -> float:
        """Write what is prepared; the seconds that this took.

        Raises: as `dcr.stages.apply.install`. Poisoned: the user's function has written or replaced weights.
        """
        pause_s: float = await self._run(apply.install, self.weights, prepared.readies, self._finalize)
        self._lanes = prepared.target
        await self._require_harmless(prepared.identity, prepared.root)
        return pause_s

    async def overwrite(self, opened: Message, messages: AsyncIterator[Message]) -> None:
        """Write a stored attempt straight into live memory, which is right only if a rescan says so afterwards."""
        header = opened.header
        assert isinstance(header, Open)
        await self.bind(opened)
        receipt = Receipt(header, run=header.identity.run, term=0, holds=header.base)
        fetch = self._fetch(receipt, reader(messages, header.identity), None)
        stages = Pipeline(self._decompress(), Prepare(self.weights), Write(self.weights))
        await stages.run(fetch, version=header.identity.version, observe=self._observe)
        receipt.require_complete()
        await self._run(self._loader.finalize)

    async def require_root(self, identity: Identity, root: bytes) -> None:
        """Rescan live memory.

        Raises:
            Poisoned: it does not hold what it should.
        """
        if (found := await self.rescan()) != root:
            raise Poisoned(
                f"{identity} was written from the store: expected the digest {root.hex()[:16]} in live memory, "
                f"found {found.hex()[:16] or 'copies that differ'}; "
                "do not serve, the next version offered seeds it anew"
            )

    async def refresh(self, identity: Identity, root: bytes) -> None:
        """Have what the user makes of the weights made anew, after a seed; raises what it raises.

        Raises:
            Poisoned: it has written or replaced weights.
        """
        if self._after_install is not None:
            await self._run(self._after_install)
            await self._require_harmless(identity, root)

    async def _require_harmless(self, identity: Identity, root: bytes) -> None:
        """Look at all weights once the user's function has run for the first time: what it does then, it does always.

        Raises:
            Poisoned: it has written them, or replaced one.
        """
        if self._is_harmless:
            return
        try:
            self._is_harmless = await self.rescan() == root
        except StorageRebound as error:
            raise Poisoned(f"{identity}: {error}: after_install has replaced it; {_HARMLESS}") from error
        if not self._is_harmless:
            raise Poisoned(f"{identity}: after_install has written the weights themselves; {_HARMLESS}")

    def _finalize(self) -> None:
        """Bring up to date what is made of the weights: what the loader makes, and then what the user does."""
        self._loader.finalize()
        if self._after_install is not None:
            self._after_install()

    def _fetch(self, receipt: Receipt, receive: Receive, again: AskAgain | None) -> Fetch:
        return Fetch(receipt, self.layout, self._budget, receive=receive, again=again, timeout_s=self._timeout_s)

    def _decompress(self, union: Union | None = None, *, based: bool = True) -> Decompress:
        """The stage that decodes; after a union, chunks that need their base get what it makes of live memory.

        based: live memory holds their base; else such chunks are refused.
        """
        if not based or not self.reads_base:
            return Decompress(self.layout, self._codecs, None, workers=self._workers)
        weights: Any = self.weights
        live: Callable[[int], Bits] = weights.read
        read = live if union is None else (lambda frame: union.over(frame, live(frame)))
        return Decompress(self.layout, self._codecs, read, workers=self._workers)

    def _require_bound(self) -> tuple[Layout, LiveWeights[Any]]:
        if self._bound is None:
            raise StateError("no layout is bound yet: bind an attempt's opening first")
        return self._bound

    async def _seen(self) -> bytes:
        return await self._run(self._loader.mark) if isinstance(self._loader, Watching) else b""

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await anyio.to_thread.run_sync(function, *args, limiter=self._limiter)
