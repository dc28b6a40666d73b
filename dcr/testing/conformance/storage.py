"""The guarantees of a store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager

import pytest

from dcr.errors import IncompleteError
from dcr.protocol.wire import Abort, Head, Identity, Message
from dcr.seams import Link, Run, Store
from dcr.testing.conformance.scene import (
    RUN,
    Scene,
    attempt,
    identity,
    on_a_loop,
    opening,
    random_bytes,
    require_same,
    send_all,
)
from dcr.testing.conformance.setting import MiB, Part, Setting


class StoreTests(Setting):
    """What is kept: attempts that were sealed and not given up, whole or refused by name. Skipped without a store."""

    @on_a_loop
    async def test_nothing_was_opened_in_a_new_run(self) -> None:
        async with self._stored() as (_, _, store):
            assert await store.newest() == -1

    @on_a_loop
    async def test_the_newest_version_counts_though_it_was_only_opened(self) -> None:
        async with self._stored() as (_, sender, store):
            await send_all(sender, attempt(identity(4)))
            await sender.send(opening(identity(9)))
            assert await store.newest() == 9

    @on_a_loop
    async def test_a_sealed_attempt_is_listed(self) -> None:
        async with self._stored() as (_, sender, store):
            await send_all(sender, attempt(identity(4)))
            assert await _at(store, 4) == [identity(4)]

    @on_a_loop
    async def test_attempts_at_one_version_are_listed_together(self) -> None:
        both = [identity(4), identity(4, attempt=2)]
        async with self._stored() as (_, sender, store):
            for of in both:
                await send_all(sender, attempt(of))
            assert await _at(store, 4) == both

    @on_a_loop
    async def test_an_attempt_without_its_seal_is_not_listed(self) -> None:
        async with self._stored() as (_, sender, store):
            await send_all(sender, attempt(identity(4))[:-1])
            assert await _at(store, 4) == []

    @on_a_loop
    async def test_an_attempt_that_was_given_up_is_not_listed(self) -> None:
        async with self._stored() as (_, sender, store):
            await send_all(sender, attempt(identity(4)))
            await sender.send(Message(Abort(identity(4), "for a reason")))
            assert await _at(store, 4) == []

    @on_a_loop
    async def test_an_attempt_is_described_by_its_open_and_its_seal(self) -> None:
        sent = attempt(identity(4), base=identity(3))
        async with self._stored() as (_, sender, store):
            await send_all(sender, sent)
            require_same(await store.describe(identity(4)), [sent[0], sent[-1]], "a description")

    @on_a_loop
    async def test_an_attempt_is_read_as_it_was_sent(self) -> None:
        sent = attempt(identity(4), [b"", random_bytes(MiB), b"x"])
        async with self._stored() as (_, sender, store):
            await send_all(sender, sent)
            require_same(await _read(store, identity(4)), sent, "a stored attempt")

    @on_a_loop
    async def test_many_chunks_are_read_in_the_order_of_sending(self) -> None:
        sent = attempt(identity(4), [b"%d" % n for n in range(30)])
        async with self._stored() as (_, sender, store):
            await send_all(sender, sent)
            require_same(await _read(store, identity(4)), sent, "a stored attempt")

    @on_a_loop
    async def test_a_chunk_that_was_sent_again_does_not_spoil_its_attempt(self) -> None:
        sent = attempt(identity(4))
        async with self._stored() as (_, sender, store):
            await send_all(sender, [*sent, sent[2]])
            found = await _read(store, identity(4))
            once = [message for n, message in enumerate(found) if message not in found[:n]]
            require_same(once, sent, "a stored attempt of which one chunk was sent twice")

    @on_a_loop
    async def test_a_stored_attempt_outlives_its_links(self) -> None:
        sent, url = attempt(identity(4)), self.new_url()
        async with self.scene(url) as scene:
            sender, run = await scene.lead()
            _store_of(run)
            await send_all(sender, sent)
        async with self.scene(url) as scene:
            require_same(await _read(_store_of(await scene.open()), identity(4)), sent, "opened again")

    @on_a_loop
    async def test_the_head_outlives_its_links(self) -> None:
        url = self.new_url()
        async with self.scene(url) as scene:
            _, run = await scene.lead(Head(RUN, 3, identity(4), b"root"))
            _store_of(run)
        async with self.scene(url) as scene:
            head, _ = await (await scene.open()).ledger.read()
            assert head == Head(RUN, 3, identity(4), b"root")

    @on_a_loop
    async def test_a_reader_may_stop_in_the_middle(self) -> None:
        sent = attempt(identity(4))
        async with self._stored() as (_, sender, store):
            await send_all(sender, sent)
            async with aclosing(store.read(identity(4))) as messages:
                require_same([await anext(messages)], sent[:1], "the first message")
            require_same(await _read(store, identity(4)), sent, "read once more")

    @on_a_loop
    async def test_an_attempt_that_was_never_sent_is_an_error(self) -> None:
        async with self._stored() as (_, sender, store):
            await send_all(sender, attempt(identity(4)))
            with pytest.raises(IncompleteError):
                await store.describe(identity(5))

    @pytest.mark.parametrize("part", ["open", "chunk", "seal"])
    @on_a_loop
    async def test_an_attempt_with_a_missing_part_is_refused_by_name(self, part: Part) -> None:
        async with self._stored() as (scene, sender, store):
            await send_all(sender, attempt(identity(4)))
            name = await self.remove_part(scene.url, identity(4), part)
            store = _store_of(await scene.open())  # one that has not read it before
            await self._require_refused(_read(store, identity(4)), name)

    @pytest.mark.parametrize("part", ["open", "chunk", "seal"])
    @on_a_loop
    async def test_an_attempt_with_a_truncated_part_is_refused_by_name(self, part: Part) -> None:
        async with self._stored() as (scene, sender, store):
            await send_all(sender, attempt(identity(4)))
            name = await self.truncate_part(scene.url, identity(4), part)
            store = _store_of(await scene.open())
            await self._require_refused(_read(store, identity(4)), name)

    @pytest.mark.parametrize("part", ["open", "seal"])
    @on_a_loop
    async def test_an_attempt_with_a_missing_part_is_not_described(self, part: Part) -> None:
        async with self._stored() as (scene, sender, store):
            await send_all(sender, attempt(identity(4)))
            name = await self.remove_part(scene.url, identity(4), part)
            store = _store_of(await scene.open())
            await self._require_refused(store.describe(identity(4)), name)

    @on_a_loop
    async def test_pruning_removes_what_is_older_and_not_kept(self) -> None:
        async with self._pruned() as store:
            assert [await _at(store, version) for version in (1, 2)] == [[], []]

    @on_a_loop
    async def test_a_pruned_attempt_is_an_error(self) -> None:
        async with self._pruned() as store:
            with pytest.raises(IncompleteError):
                await store.describe(identity(1))

    @on_a_loop
    async def test_pruning_leaves_what_is_kept(self) -> None:
        async with self._pruned() as store:
            require_same(await _read(store, identity(3)), attempt(identity(3)), "an attempt to keep")

    @on_a_loop
    async def test_pruning_leaves_what_is_newer(self) -> None:
        async with self._pruned() as store:
            for version in (4, 5):
                require_same(await _read(store, identity(version)), attempt(identity(version)), "a newer attempt")

    @on_a_loop
    async def test_pruning_does_not_trouble_a_member_that_has_taken_what_is_removed(self) -> None:
        second = attempt(identity(2))
        async with self._stored() as (scene, sender, store):
            member = await scene.join()
            await send_all(sender, attempt(identity(1)))
            await scene.take_attempt(member, "the first attempt")
            await scene.move(await scene.open(), Head(RUN, 1, identity(1), b"root"))
            await scene.take(member, "a Commit")
            await store.prune(frozenset(), below=2)
            await send_all(sender, second)
            require_same(await scene.take_attempt(member, "the second attempt"), second, "after the first was removed")

    @on_a_loop
    async def test_the_newest_version_is_known_after_pruning(self) -> None:
        async with self._pruned() as store:
            assert await store.newest() == 5
            await store.prune(frozenset(), below=6)
            assert await store.newest() == 5

    @asynccontextmanager
    async def _stored(self) -> AsyncIterator[tuple[Scene, Link, Store]]:
        async with self.scene() as scene:
            sender, run = await scene.lead()
            yield scene, sender, _store_of(run)

    @asynccontextmanager
    async def _pruned(self) -> AsyncIterator[Store]:
        """Versions 1 to 5, of which those below 4 are removed, but for 3."""
        async with self._stored() as (_, sender, store):
            for version in range(1, 6):
                await send_all(sender, attempt(identity(version)))
            await store.prune(frozenset({identity(3)}), below=4)
            yield store

    async def _require_refused(self, reading: Awaitable[object], name: str) -> None:
        with pytest.raises(IncompleteError) as refused:
            await reading
        text = " ".join([str(refused.value), *getattr(refused.value, "__notes__", ())])
        assert name in text, f"expected an error that names {name!r}, found {text!r}"


def _store_of(run: Run) -> Store:
    if run.store is None:
        pytest.skip("this transport keeps nothing")
    return run.store


async def _at(store: Store, version: int) -> list[Identity]:
    """The attempts at a version, by their outlines."""
    return [outline.identity for outline in await store.outlines(version - 1, version)]


async def _read(store: Store, of: Identity) -> list[Message]:
    async with aclosing(store.read(of)) as messages:
        return [message async for message in messages]
