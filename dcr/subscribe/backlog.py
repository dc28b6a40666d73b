"""Stored versions that a member has yet to install: what it was loaded with, what it missed, how it is seeded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from itertools import takewhile

from dcr.errors import (
    BaseMismatch,
    DcrError,
    DigestMismatch,
    IncompleteError,
    LayoutError,
    PayloadError,
    RankError,
    StateError,
    StorageRebound,
)
from dcr.events import (
    FellBehind,
    PrepareCompleted,
    PrepareFailed,
    PrepareStarted,
    SeedFetchCompleted,
    SeedFetchFailed,
    SeedFetchStarted,
    VersionReplaced,
)
from dcr.protocol.machines import MemberEvent
from dcr.protocol.wire import Identity
from dcr.runs import chain
from dcr.seams import Store
from dcr.stages.compose import Uncomposable
from dcr.subscribe.membership import Membership
from dcr.subscribe.offers import Offers
from dcr.subscribe.prepared import Overfull, Prepared, Seed, reader
from dcr.subscribe.version import Version


class Backlog:
    """Follows the head through the run's store, if it has one."""

    def __init__(self, member: Membership, offers: Offers) -> None:
        self._member = member
        self._offers = offers
        self._most: int | None = None  # how many links are tried as one, after more of them did not make one
        self._missing: Identity | None = None  # the last version of which something could not be read

    async def recognise(self) -> None:
        """If the weights as they were loaded are those of a version of the run, start from there."""
        member, store = self._member, self._member.store
        head, links = await member.committed(), list[chain.Stored]()
        if head is None or store is None:
            return
        while not links:
            try:
                links = await chain.back_from(store, head, until=None)
            except IncompleteError as error:
                head = await self._look_again(head, error)
        await member.rank.bind(links[-1].opened)
        held = chain.recognise(links, head, root=member.rank.root, layout=member.rank.layout.digest)
        if held is not None:
            await member.hold(held)

    async def catch_up(self) -> None:
        """Offer the newest stored version until live memory holds what the head names."""
        member, store = self._member, self._member.store
        while store is not None:
            head = await member.committed()
            if head is None or head == member.holds:
                self._most = None
                return
            try:
                links = await self._links(store, head)
                member.lacks = len(links)
                if member.holds is None or links[0].open.base is None:
                    await self._offer_seed(store, head, links)
                else:
                    await self._follow(store, _of_one_layout(links)[: self._most])
            except IncompleteError as error:
                await self._look_again(head, error)

    async def _look_again(self, identity: Identity, error: IncompleteError) -> Identity:
        """What the head names, after something that leads to a version could not be read.

        It may have been removed since there is a newer version; or an anchor of the same one, which another look finds.

        Raises: the error that is given, if neither is so.
        """
        head = await self._member.committed()
        if head is None or head.version < identity.version or head == identity == self._missing:
            raise error
        self._missing = identity
        return head

    async def _links(self, store: Store, head: Identity) -> list[chain.Stored]:
        holds = self._member.holds
        if holds is not None:
            try:
                return await chain.back_from(store, head, until=holds)
            except IncompleteError as error:
                self._member.emit(FellBehind, holds.version, type(error).__name__, str(error))
        return await chain.back_from(store, head, until=None)

    # ------------------------------------------------------------------ deltas

    async def _follow(self, store: Store, links: Sequence[chain.Stored]) -> None:
        """Prepare the stored versions that come after the one held as one, and offer the last of them.

        Where they do not make one change, or one that fits, fewer are tried next: one of them alone at the end.
        """
        member, identity = self._member, links[-1].open.identity
        member.machine.move(MemberEvent.OPENED)
        try:
            prepared = await self._prepare(store, links)
        except (BaseMismatch, DigestMismatch) as error:
            if await member.doubt(identity, error):
                return
            if len(links) == 1:
                raise  # memory is as it should be: it is the stored version that does not fit
            self._most = len(links) // 2
        except (Uncomposable, IncompleteError, PayloadError, LayoutError):
            member.machine.move(MemberEvent.DROPPED)
            if len(links) == 1:
                raise
            self._most = len(links) // 2
        else:
            member.machine.move(MemberEvent.PREPARED)
            member.machine.move(MemberEvent.COMMITTED)
            await self._offers.offer_prepared(prepared)

    async def _prepare(self, store: Store, links: Sequence[chain.Stored]) -> Prepared:
        member, version, began_s = self._member, links[-1].open.identity.version, time.monotonic()
        member.emit(PrepareStarted, version, "stored", len(links))
        try:
            prepared = await self._prepared(store, links)
        except Exception as error:
            why, duration_s = (type(error).__name__, str(error)), time.monotonic() - began_s
            member.emit(PrepareFailed, version, "stored", len(links), *why, duration_s)
            raise
        duration_s = time.monotonic() - began_s
        member.emit(PrepareCompleted, version, "stored", len(links), prepared.changed, duration_s)
        return prepared

    async def _prepared(self, store: Store, links: Sequence[chain.Stored]) -> Prepared:
        member, link = self._member, links[0]
        await member.rank.bind(link.opened)
        if len(links) > 1:
            return await member.rank.compose(links, store.read)
        receipt = member.receipt(link.open, stored=True)
        async with aclosing(store.read(link.open.identity)) as messages:
            return await member.rank.prepare(receipt, reader(messages, link.open.identity), None)

    # ------------------------------------------------------------------ seeds

    async def _offer_seed(self, store: Store, head: Identity, links: Sequence[chain.Stored]) -> None:
        """Offer the version that the head names, to be written whole: fetched before, if that can be."""
        version = Version(head, "seed", None)
        seed = await self._sow(store, links)
        if seed is None:
            await self._offers.offer(version, partial(self._seed, store, version))
        else:
            await self._offers.offer(version, partial(self._plant, version, seed))

    async def _sow(self, store: Store, links: Sequence[chain.Stored]) -> Seed | None:
        """Fetch and verify a seed beside generation; None if it has to be written as it comes, which an event tells."""
        if len(_of_one_layout(links)) < len(links):
            return None
        member, version, began_s = self._member, links[-1].open.identity.version, time.monotonic()
        member.emit(SeedFetchStarted, version, len(links))
        try:
            seed = await member.rank.sow(links, store.read)
        except (DcrError, OSError, Overfull, Uncomposable) as error:
            why, duration_s = (type(error).__name__, str(error)), time.monotonic() - began_s
            member.emit(SeedFetchFailed, version, len(links), *why, duration_s)
            if isinstance(error, StorageRebound):
                raise
            return None
        member.emit(SeedFetchCompleted, version, len(links), time.monotonic() - began_s)
        return seed

    async def _plant(self, version: Version, seed: Seed) -> Exception | None:
        """Write what was fetched over whatever live memory holds."""
        member, begun = self._member, self._member.begin_install(version.identity, "seed")
        try:
            await member.rank.require_awake()
            await member.rank.require_fingerprint()
            await member.rank.require_unwritten()
        except (BaseMismatch, RankError, StateError, StorageRebound) as error:
            member.fail_install(begun, error, "unchanged")
            return error
        if member.holds is not None:
            member.machine.move(MemberEvent.LOST_TRUST)
        member.machine.move(MemberEvent.SEED)
        try:
            pause_s = await member.rank.plant(seed)
            await member.rank.require_root(version.identity, seed.root)
        except Exception as error:  # of the engine, or of what its user makes of the weights
            await member.poison(begun, version.identity, error)
            return error
        await member.installed(begun, version.identity, seed.root, pause_s)
        return None

    async def _seed(self, store: Store, version: Version) -> Exception | None:
        """Write stored versions over whatever live memory holds: an anchor, and the deltas after it."""
        member, begun = self._member, self._member.begin_install(version.identity, "seed")
        try:
            await member.rank.require_awake()
            await member.rank.require_fingerprint()
            links = await self._readable(store, version)
        except (IncompleteError, RankError, StateError, StorageRebound) as error:
            member.fail_install(begun, error, "unchanged")
            return error
        if member.holds is not None:
            member.machine.move(MemberEvent.LOST_TRUST)
        member.machine.move(MemberEvent.SEED)
        paused_s = time.monotonic()
        try:
            last = await self._overwrite(store, version, links)
            pause_s = time.monotonic() - paused_s
            await member.rank.require_root(version.identity, last.seal.root)
            await member.rank.refresh(version.identity, last.seal.root)
        except Exception as error:  # of the store, of the engine, or of what its user makes of the weights
            await member.poison(begun, version.identity, error)
            return error
        await member.installed(begun, version.identity, last.seal.root, pause_s)
        return None

    async def _readable(self, store: Store, version: Version) -> list[chain.Stored]:
        """The links from an anchor to a version; to the newest one instead, where it has been removed.

        Raises:
            IncompleteError: it cannot be read, and there is nothing newer.
        """
        while True:
            try:
                return await chain.back_from(store, version.identity, until=None)
            except IncompleteError as error:
                await self._replace(version, error)

    async def _overwrite(self, store: Store, version: Version, links: Sequence[chain.Stored]) -> chain.Stored:
        """Write some links into live memory; the last one of those that were written. Raises as `_readable`."""
        while True:
            try:
                for link in links:
                    async with aclosing(store.read(link.open.identity)) as messages:
                        await self._member.rank.overwrite(link.opened, messages)
            except IncompleteError as error:
                # an anchor writes every element, so it does not matter how far this one has come
                await self._replace(version, error)
                links = await self._readable(store, version)
            else:
                return links[-1]

    async def _replace(self, version: Version, error: IncompleteError) -> None:
        """Make a version that was removed before it was installed the newest one; raises as `_look_again`."""
        head = await self._look_again(version.identity, error)
        if head != version.identity:
            self._member.emit(VersionReplaced, version.number, head.version, type(error).__name__, str(error))
            version.identity = head


async def count_lacking(member: Membership) -> int:
    """Read the head; how many stored versions lead there from what is held, or from an anchor if they were removed."""
    head, held, store = await member.committed(), member.holds, member.store
    lacks = 0 if head is None or head == held else 1
    if lacks and head is not None and store is not None:
        try:
            lacks = len(await chain.back_from(store, head, until=held))
        except IncompleteError:
            lacks = len(await chain.back_from(store, head, until=None))
    if held == member.holds:  # else a version was installed meanwhile
        member.lacks = lacks
    return member.lacks


def _of_one_layout(links: Sequence[chain.Stored]) -> list[chain.Stored]:
    """The first links, as far as their layout is the same: positions mean elements of one layout only."""
    return list(takewhile(lambda link: link.open.layout == links[0].open.layout, links))
