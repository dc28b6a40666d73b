"""Stored versions that a member has yet to install: what it was loaded with, what it missed, how it is seeded."""

from __future__ import annotations

import time
from contextlib import aclosing
from functools import partial

from dcr import chain
from dcr.errors import BaseMismatch, DigestMismatch, IncompleteError, RankError, StateError, StorageRebound
from dcr.seams import Store
from dcr.subscribe.membership import Membership
from dcr.subscribe.offers import Offers
from dcr.subscribe.rank import Prepared, reader
from dcr.subscribe.version import Version
from dcr.wire import Identity


class Backlog:
    """Follows the head through the run's store, if it has one."""

    def __init__(self, member: Membership, offers: Offers) -> None:
        self._member = member
        self._offers = offers

    async def recognise(self) -> None:
        """If the weights as they were loaded are those of a version of the run, start from there."""
        member = self._member
        head, store = await member.committed(), member.store
        if head is None or store is None:
            return
        links = await chain.back_from(store, head, until=None)
        await member.rank.bind(links[-1].opened)
        root = member.rank.root
        for link, identity in zip(reversed(links), reversed(chain.committed(links, head)), strict=True):
            if link.seal.root == root and link.open.layout == member.rank.layout.digest:
                await member.hold(identity)
                return

    async def catch_up(self) -> None:
        """Offer stored versions until live memory holds what the head names."""
        member, store = self._member, self._member.store
        while store is not None:
            head = await member.committed()
            if head is None or head == member.holds:
                return
            try:
                links = await self._links(store, head)
                if member.holds is None or links[0].open.base is None:
                    await self._offers.offer(Version(head, "seed", None), partial(self._seed, store, head))
                else:
                    await self._follow(store, links[0])
            except IncompleteError:
                if await member.committed() == head:
                    raise
                continue  # what was being read has been removed, since there is something newer

    async def _links(self, store: Store, head: Identity) -> list[chain.Stored]:
        held = self._member.holds
        if held is not None:
            try:
                return await chain.back_from(store, head, until=held)
            except IncompleteError as error:
                self._member.emit("behind", held.version, detail=str(error))
        return await chain.back_from(store, head, until=None)

    async def _follow(self, store: Store, link: chain.Stored) -> None:
        """Prepare and offer the stored version that comes after the one held."""
        member = self._member
        member.move("opened")
        try:
            prepared = await self._prepare(store, link)
        except IncompleteError:
            member.move("dropped")
            raise
        except (BaseMismatch, DigestMismatch) as error:
            if not await member.doubt(link.open.identity, error):
                raise  # memory is as it should be: it is the stored version that does not fit
            return
        member.move("prepared")
        member.move("head_names_it")
        await self._offers.offer_prepared(prepared)

    async def _prepare(self, store: Store, link: chain.Stored) -> Prepared:
        rank, identity = self._member.rank, link.open.identity
        receipt = self._member.receipt(link.open, stored=True)
        await rank.bind(link.opened)
        async with aclosing(store.read(identity)) as messages:
            return await rank.prepare(receipt, reader(messages, identity), None)

    async def _seed(self, store: Store, identity: Identity) -> Exception | None:
        """Write stored versions over whatever live memory holds: an anchor, and the deltas after it."""
        member, began_s = self._member, time.monotonic()
        try:
            await member.rank.require_awake()
            await member.rank.require_epoch()
            links = await chain.back_from(store, identity, until=None)
        except (IncompleteError, RankError, StateError, StorageRebound) as error:
            return error  # nothing has been written
        if member.holds is not None:
            member.holds = None
            member.move("lost_trust")
        member.move("seed")
        paused_s = time.monotonic()
        try:
            for link in links:
                async with aclosing(store.read(link.open.identity)) as messages:
                    await member.rank.overwrite(link.opened, messages)
            pause_s = time.monotonic() - paused_s
            await member.rank.require_root(identity, links[-1].seal.root)
            await member.rank.refresh()
        except Exception as error:  # of the store, of the engine, or of what its user makes of the weights
            await member.poison(identity, error)
            return error
        await member.installed(identity, links[-1].seal.root, began_s, pause_s)
        return None
