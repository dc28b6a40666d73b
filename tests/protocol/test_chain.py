"""Chains: which stored attempts lead to a version. A missing link is an error, never the end of a chain."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Set

import pytest

from dcr.errors import DcrError, IncompleteError
from dcr.protocol.catalogue import Outline, outline_of
from dcr.protocol.wire import Identity, Message, Open, Seal
from dcr.runs.chain import Stored, anchor_of, back_from


def at(version: int, attempt: int = 1) -> Identity:
    return Identity("run", 1, version, attempt)


class Kept:
    """A store of Opens and Seals in memory; asked too often, it gives up."""

    def __init__(self) -> None:
        self._links: dict[Identity, tuple[Message, Message]] = {}
        self._outlines: list[Outline] = []
        self._left = 50

    def add(self, identity: Identity, base: Identity | None, root: bytes | None = None) -> None:
        bits = root or b"bits of %d" % identity.version
        opened = Message(Open(identity, base, b"layout", ()), b"")
        self._links[identity] = opened, Message(Seal(identity, base, (), b"", bits), b"")
        self._outlines.append(outline_of(*self._links[identity]))

    def lose(self, identity: Identity) -> None:
        """It is still listed, but cannot be read."""
        self._links[identity] = ()  # type: ignore[assignment]

    async def newest(self) -> int:
        return max(identity.version for identity in self._links)

    async def outlines(self, after: int, to: int) -> list[Outline]:
        return [outline for outline in self._outlines if after < outline.identity.version <= to]

    async def describe(self, identity: Identity) -> tuple[Message, Message]:
        self._left -= 1
        assert self._left, "the walk does not end"
        if not self._links.get(identity):
            raise IncompleteError(f"{identity}: its opening is missing")
        return self._links[identity]

    async def read(self, identity: Identity) -> AsyncGenerator[Message, None]:
        for message in await self.describe(identity):
            yield message

    async def prune(self, keep: Set[Identity], below: int) -> None:
        raise AssertionError("a walk removes nothing")


@pytest.fixture
def store() -> Kept:
    """An anchor at version 1, deltas to 2, 3 and 5."""
    made = Kept()
    made.add(at(1), None)
    for base, version in ((1, 2), (2, 3), (3, 5)):
        made.add(at(version), at(base))
    return made


def path(links: list[Stored]) -> list[tuple[int, int]]:
    return [(link.open.identity.version, link.open.identity.attempt) for link in links]


async def test_from_a_held_version_only_the_deltas_after_it_are_needed(store: Kept) -> None:
    assert path(await back_from(store, at(5), until=at(2))) == [(3, 1), (5, 1)]


async def test_nothing_is_needed_by_who_holds_the_head(store: Kept) -> None:
    assert await back_from(store, at(5), until=at(5)) == []


async def test_from_nothing_the_chain_starts_at_the_anchor(store: Kept) -> None:
    assert path(await back_from(store, at(5), until=None)) == [(1, 1), (2, 1), (3, 1), (5, 1)]


async def test_from_nothing_the_chain_starts_at_the_nearest_anchor(store: Kept) -> None:
    store.add(at(3, attempt=2), None)
    assert path(await back_from(store, at(5), until=None)) == [(3, 2), (5, 1)]


async def test_an_anchor_at_the_head_is_all_that_is_needed(store: Kept) -> None:
    store.add(at(5, attempt=2), None)
    assert path(await back_from(store, at(5), until=None)) == [(5, 2)]


async def test_who_holds_a_version_follows_the_deltas_past_an_anchor(store: Kept) -> None:
    store.add(at(3, attempt=2), None)
    assert path(await back_from(store, at(5), until=at(2))) == [(3, 1), (5, 1)]


async def test_a_held_version_that_is_no_part_of_the_chain_leads_back_to_the_anchor(store: Kept) -> None:
    links = await back_from(store, at(5), until=at(2, attempt=7))
    assert (path(links)[0], links[0].open.base) == ((1, 1), None)


@pytest.mark.parametrize("lost", [1, 2, 3, 5])
async def test_a_missing_link_is_an_error_and_never_the_end(store: Kept, lost: int) -> None:
    store.lose(at(lost))
    with pytest.raises(IncompleteError, match=f"version {lost} "):
        await back_from(store, at(5), until=None)


async def test_a_link_lost_behind_an_anchor_is_not_missed(store: Kept) -> None:
    store.add(at(3, attempt=2), None)
    store.lose(at(2))
    assert path(await back_from(store, at(5), until=None)) == [(3, 2), (5, 1)]


async def test_an_anchor_of_other_bits_is_not_used(store: Kept) -> None:
    store.add(at(3, attempt=2), None, root=b"other bits")
    assert path(await back_from(store, at(5), until=None)) == [(1, 1), (2, 1), (3, 1), (5, 1)]


async def test_an_anchor_that_cannot_be_read_is_not_used(store: Kept) -> None:
    store.add(at(3, attempt=2), None)
    store.lose(at(3, attempt=2))
    assert path(await back_from(store, at(5), until=None)) == [(1, 1), (2, 1), (3, 1), (5, 1)]


async def test_another_delta_to_the_same_bits_is_no_anchor(store: Kept) -> None:
    store.add(at(3, attempt=2), at(1))
    link = Stored(*await store.describe(at(3)))
    assert await anchor_of(store, link) is None


async def test_a_link_from_nothing_is_its_own_anchor(store: Kept) -> None:
    link = Stored(*await store.describe(at(1)))
    assert await anchor_of(store, link) is link


@pytest.mark.parametrize("base", [2, 3, 4], ids=["itself", "a newer version", "one another"])
@pytest.mark.parametrize("held", [None, 1], ids=["from nothing", "from version 1"])
async def test_bases_that_do_not_go_back_in_time_are_refused(base: int, held: int | None) -> None:
    """A store is only believed as far as it makes sense: the walk must end."""
    store = Kept()
    for version in (2, 3, 4):
        store.add(at(version), at(base))
    with pytest.raises(DcrError):
        await back_from(store, at(2), until=at(held) if held else None)
