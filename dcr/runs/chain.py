"""Chains: which stored attempts lead to a version, from one that is held or from an anchor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcr.errors import IncompleteError, PayloadError
from dcr.protocol.wire import Identity, Message, Open, Seal
from dcr.seams import Store


@dataclass(frozen=True, slots=True)
class Stored:
    """One stored attempt of a chain: its Open and its Seal."""

    opened: Message
    sealed: Message

    @property
    def open(self) -> Open:
        assert isinstance(self.opened.header, Open)
        return self.opened.header

    @property
    def seal(self) -> Seal:
        assert isinstance(self.sealed.header, Seal)
        return self.sealed.header


async def back_from(store: Store, head: Identity, *, until: Identity | None) -> list[Stored]:
    """The links from `until` (exclusive) to `head`, oldest first; with until None, from the nearest anchor.

    The first link has base None if the chain starts from an anchor: also where `until` is not part of it.

    Raises:
        IncompleteError: a link is missing and no anchor lies behind it. PayloadError: a base is not older.
    """
    links: list[Stored] = []
    at: Identity | None = head
    while at is not None and at != until:
        link = Stored(*await store.describe(at))
        anchor = await anchor_of(store, link) if until is None else None
        links.append(anchor or link)
        base = links[-1].open.base
        if base is not None and base.version >= at.version:
            raise PayloadError(f"{at} claims to start from {base}, which is not older: the store is damaged")
        at = base
    return links[::-1]


def committed(links: Sequence[Stored], head: Identity) -> list[Identity]:
    """The versions that the links of a chain to `head` lead to; an anchor beside one has an identity of its own."""
    bases = (link.open.base for link in links[1:])
    return [*(base for base in bases if base is not None), head]


def recognise(links: Sequence[Stored], head: Identity, *, root: bytes, layout: bytes) -> Identity | None:
    """Find the newest version of a chain to `head` whose bits, in one layout, have a root; None if there is none.

    layout: the digest of the layout that the root was computed in.
    """
    for link, identity in zip(reversed(links), reversed(committed(links, head)), strict=True):
        if link.seal.root == root and link.open.layout == layout:
            return identity
    return None


async def anchor_of(store: Store, link: Stored) -> Stored | None:
    """An anchor that holds the very bits of this link, if there is one beside it."""
    if link.open.base is None:
        return link
    version = link.open.identity.version
    for outline in await store.outlines(version - 1, version):
        if outline.base is None and outline.root == link.seal.root:
            try:
                return Stored(*await store.describe(outline.identity))
            except IncompleteError:
                continue
    return None
