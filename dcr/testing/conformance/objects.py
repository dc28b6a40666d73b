"""The kit for objects: subclass `ObjectsTests`, say how they are opened, and pytest collects the tests.

It asks what a run relies on (`dcr.seams.Objects`); runs over the same objects are tested by `TransportTests`.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import pytest

from dcr.pipeline import gather_bare
from dcr.seams import Objects
from dcr.testing.conformance.scene import How, cancelled_at, on_a_loop, random_bytes


class ObjectsTests:
    """Everything that objects have to hold.

    open_objects: opens one place, empty before each test, and the same one whenever it is called within a test.
    backend: the event loop. deadline_s: how long a call may take. large_bytes: of one big object. pages: how many
    objects a list is tried with; more than fit into one page of the service.
    """

    open_objects: Callable[[], AbstractAsyncContextManager[Objects]]
    backend: str = "asyncio"
    deadline_s: float = 10.0
    large_bytes: int = 24 << 20
    pages: int = 1100

    # ------------------------------------------------------------------ put and get

    @on_a_loop
    async def test_an_object_is_read_as_it_was_written(self) -> None:
        async with self._opened() as objects:
            for key, data in {"a": b"", "b/c": b"x", "b/d.1": bytes(range(256)) * 9}.items():
                assert await objects.put(key, [data]), "a put without conditions says True"
                await self._require(objects, key, data)

    @on_a_loop
    async def test_pieces_are_one_object(self) -> None:
        async with self._opened() as objects:
            await objects.put("a", [b"one", b"", b"two", b"three"])
            await self._require(objects, "a", b"onetwothree")

    @on_a_loop
    async def test_a_large_object_is_whole(self) -> None:
        data = random_bytes(self.large_bytes)
        async with self._opened() as objects:
            await objects.put("a", [data[:1000], data[1000:]])
            await self._require(objects, "a", data)

    @on_a_loop
    async def test_what_is_not_there_is_none(self) -> None:
        async with self._opened() as objects:
            await objects.put("a/b", [b"x"])
            for key in ("b", "a", "a/", "a/b/c", "a/bc"):
                assert await objects.get(key) is None, f"there is no {key!r}"

    @on_a_loop
    async def test_an_object_is_replaced_whole(self) -> None:
        async with self._opened() as objects:
            for data in (b"a longer one", b"short", b"", b"another"):
                await objects.put("a", [data])
                await self._require(objects, "a", data)

    @on_a_loop
    async def test_everybody_sees_what_was_written(self) -> None:
        async with self._opened() as one, self._opened() as other:
            assert await other.get("a") is None
            for data in (b"1", b"2"):
                await one.put("a", [data])
                await self._require(other, "a", data)

    @on_a_loop
    async def test_a_reader_beside_a_writer_sees_whole_objects_only(self) -> None:
        versions = [bytes([n]) * 200_000 for n in range(20)]
        async with self._opened() as one, self._opened() as other:
            await one.put("a", [versions[0]])
            done = anyio.Event()

            async def write() -> None:
                for data in versions:
                    await one.put("a", [data[:77], data[77:]])
                done.set()

            async def read() -> None:
                while not done.is_set():
                    found = await other.get("a")
                    assert found is not None, "an object was gone while it was replaced"
                    assert found.data in versions, "half an object was read"

            await gather_bare([write, read])

    # ------------------------------------------------------------------ spans and tags

    @pytest.mark.parametrize("span", [(0, 4), (2, 5), (6, 10), (3, 3), (8, 99), (20, 30)])
    @on_a_loop
    async def test_a_span_is_those_bytes(self, span: tuple[int, int]) -> None:
        async with self._opened() as objects:
            await objects.put("a", [b"0123456789"])
            found = await objects.get("a", span=span)
            assert found is not None
            assert found.data == b"0123456789"[slice(*span)]

    @on_a_loop
    async def test_an_object_that_has_the_tag_comes_without_data(self) -> None:
        async with self._opened() as objects:
            await objects.put("a", [b"x"])
            first = await objects.get("a")
            assert first is not None
            again = await objects.get("a", unless=first.tag)
            assert again == (first.tag, None)

    @on_a_loop
    async def test_an_object_that_was_written_anew_has_another_tag(self) -> None:
        async with self._opened() as objects:
            tags: list[bytes] = []
            for n in range(40):  # quickly, and of one size
                await objects.put("a", [b"%02d" % n])
                found = await objects.get("a", unless=tags[-1] if tags else None)
                assert found is not None
                assert found.data == b"%02d" % n, "what was written anew came without data, or with that of before"
                tags.append(found.tag)
            assert len(set(tags)) == len(tags)

    @on_a_loop
    async def test_a_list_has_the_tags_that_reads_have(self) -> None:
        async with self._opened() as objects:
            for key in ("a/1", "a/2"):
                await objects.put(key, [key.encode()])
            entries = await objects.list("a/")
            found = [await objects.get(key) for key in ("a/1", "a/2")]
            assert [entry.tag for entry in entries] == [one.tag for one in found if one is not None]

    # ------------------------------------------------------------------ created once

    @on_a_loop
    async def test_what_is_there_is_not_created_again(self) -> None:
        async with self._opened() as objects:
            assert await objects.put("a", [b"first"], absent=True)
            assert not await objects.put("a", [b"second"], absent=True)
            await self._require(objects, "a", b"first")

    @on_a_loop
    async def test_of_many_who_create_one_object_exactly_one_does(self) -> None:
        async with AsyncExitStack() as stack:
            sides = [await stack.enter_async_context(self._opened()) for _ in range(6)]
            for n in range(8):
                won: list[int] = []

                async def create(side: int, key: str = f"a/{n}", won: list[int] = won) -> None:
                    if await sides[side].put(key, [b"of %d" % side], absent=True):
                        won.append(side)

                await gather_bare([partial(create, side) for side in range(len(sides))])
                assert len(won) == 1, f"{len(won)} of {len(sides)} sides created one object"
                await self._require(sides[0], f"a/{n}", b"of %d" % won[0])

    @on_a_loop
    async def test_the_same_bytes_created_twice_are_created_once(self) -> None:
        async with self._opened() as one, self._opened() as other:
            assert [await side.put("a", [b"same"], absent=True) for side in (one, other)] == [True, False]

    # ------------------------------------------------------------------ lists

    @on_a_loop
    async def test_a_list_is_of_the_prefix_in_the_order_of_keys(self) -> None:
        keys = ["a/1", "a/10", "a/2", "a/b/c", "a.x", "ab/1", "b/1"]
        async with self._opened() as objects:
            for key in reversed(keys):
                await objects.put(key, [b"x"])
            for prefix in ("a/", "a/1", "", "c/", "a/b/"):
                expected = sorted(key for key in keys if key.startswith(prefix))
                assert [entry.key for entry in await objects.list(prefix)] == expected, f"below {prefix!r}"

    @on_a_loop
    async def test_a_list_goes_on_after_a_key(self) -> None:
        async with self._opened() as objects:
            for n in range(5):
                await objects.put(f"a/{n}", [b"x"])
            for after, limit in itertools.product(("", "a/0", "a/2", "a/25", "a/4", "b"), (1, 2, 5, 9)):
                expected = [f"a/{n}" for n in range(5) if f"a/{n}" > after][:limit]
                found = [entry.key for entry in await objects.list("a/", after=after, limit=limit)]
                assert found == expected, f"after {after!r}, at most {limit}"

    @on_a_loop
    async def test_a_list_of_more_than_one_page_is_whole(self) -> None:
        async with self._opened() as objects:
            keys = [f"a/{n:06d}" for n in range(self.pages)]
            for key in keys:
                await objects.put(key, [b""])
            found, after = list[str](), ""
            while page := await objects.list("a/", after=after):
                found += [entry.key for entry in page]
                after = found[-1]
            assert found == keys

    @on_a_loop
    async def test_a_list_sees_what_was_written_and_removed_before_it(self) -> None:
        async with self._opened() as one, self._opened() as other:
            for n in range(10):
                await one.put(f"a/{n}", [b"x"])
                assert [entry.key for entry in await other.list("a/")] == [f"a/{n}"]
                await one.delete([f"a/{n}"])

    # ------------------------------------------------------------------ removal

    @on_a_loop
    async def test_what_was_removed_is_gone_and_can_be_created(self) -> None:
        async with self._opened() as objects:
            for key in ("a/1", "a/2", "a/3"):
                await objects.put(key, [b"x"])
            await objects.delete(["a/1", "a/3"])
            assert [await objects.get(key) is None for key in ("a/1", "a/2", "a/3")] == [True, False, True]
            assert await objects.put("a/1", [b"anew"], absent=True)
            await self._require(objects, "a/1", b"anew")

    @on_a_loop
    async def test_removing_what_is_not_there_is_no_error(self) -> None:
        async with self._opened() as objects:
            await objects.delete([])
            await objects.delete(["a", "b/c"])

    # ------------------------------------------------------------------ at a time, and cancelled

    @on_a_loop
    async def test_calls_may_be_made_at_a_time(self) -> None:
        async with self._opened() as objects:

            async def use(n: int) -> None:
                await objects.put(f"a/{n}", [b"%d" % n * 5000])
                await self._require(objects, f"a/{n}", b"%d" % n * 5000)
                await objects.list("a/")

            await gather_bare([partial(use, n) for n in range(16)])

    @pytest.mark.parametrize("how", ["scope", "task"])
    @on_a_loop
    async def test_a_put_cancelled_at_any_await_is_whole_or_nothing(self, how: How) -> None:
        if how == "task" and self.backend != "asyncio":
            pytest.skip("only asyncio has tasks that can be cancelled in spite of a shield")
        async with self._opened() as objects:
            for n in range(1, 20):
                data = b"%d" % n * 3000
                done = await cancelled_at(n, how, partial(objects.put, f"a/{n}", [data], absent=True))
                found = await objects.get(f"a/{n}")
                assert found is None or found.data == data, "half an object was written"
                assert not done or found is not None, "a put returned, and there is no object"

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[Objects]:
        async with self.open_objects() as objects:
            yield objects

    async def _require(self, objects: Objects, key: str, data: bytes) -> None:
        found = await objects.get(key)
        assert found is not None, f"{key!r} was written, and is not there"
        assert found.data == data, f"{key!r} was written with {len(data)} bytes, and read as something else"
