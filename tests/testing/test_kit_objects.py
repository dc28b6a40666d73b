"""The kit for objects over the built-in ones; and for every test in it, objects that are wrong in just that way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from support.bent import Bent, kit_tests, replacing

from dcr.errors import DcrError
from dcr.seams import Entry, Found
from dcr.testing import ObjectsTests
from dcr.testing.memory import MemoryObjects
from dcr.transports.local import FileObjects

Wrong = Callable[[MemoryObjects], Any]


class TestMemoryObjects(ObjectsTests):
    @pytest.fixture(autouse=True)
    def _anew(self) -> None:
        self.open_objects = lambda kept=MemoryObjects(): given(kept)  # noqa: B008 - one for each test


class TestFileObjects(ObjectsTests):
    @pytest.fixture(autouse=True)
    def _anew(self, tmp_path: Path) -> None:
        self.open_objects = lambda: given(FileObjects(tmp_path / "run", fsync=False))


class Kit(ObjectsTests):
    """The kit over what is wrong. It is not collected: it is no Test by name."""

    large_bytes = 1 << 20


@asynccontextmanager
async def given(objects: Any) -> AsyncIterator[Any]:
    yield objects


# ---------------------------------------------------------------------- what is wrong


async def _put_first_piece(objects: Any, key: str, pieces: Any, *, absent: bool = False) -> bool:
    return await objects.put(key, pieces[:1], absent=absent)


async def _put_in_two(objects: Any, key: str, pieces: Any, *, absent: bool = False) -> bool:
    """Half an object is there for a while."""
    await objects.put(key, pieces[:1], absent=absent)
    await anyio.sleep(0.001)
    return await objects.put(key, pieces)


async def _put_half_when_cancelled(objects: Any, key: str, pieces: Any, *, absent: bool = False) -> bool:
    try:
        await anyio.sleep(0.01)
        return await objects.put(key, pieces, absent=absent)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await objects.put(key, [pieces[0][:5]])
        raise


async def _put_and_say_nothing(objects: Any, key: str, pieces: Any, *, absent: bool = False) -> Any:
    await objects.put(key, pieces, absent=absent)


async def _put_over(objects: Any, key: str, pieces: Any, *, absent: bool = False) -> bool:
    return await objects.put(key, pieces)


async def _put_over_and_say_no(objects: Any, key: str, pieces: Any, *, absent: bool = False) -> bool:
    was = await objects.get(key)
    await objects.put(key, pieces)
    return not absent or was is None


async def _look_then_put(objects: Any, key: str, pieces: Any, *, absent: bool = False) -> bool:
    if absent and await objects.get(key) is not None:
        return False
    await anyio.sleep(0.002)
    return await objects.put(key, pieces)


async def _created_if_the_same(objects: Any, key: str, pieces: Any, *, absent: bool = False) -> bool:
    if await objects.put(key, pieces, absent=absent):
        return True
    return (await objects.get(key)).data == b"".join(pieces)


async def _put_once(objects: Any, key: str, pieces: Any, *, absent: bool = False) -> bool:
    return await objects.put(key, pieces, absent=True) or not absent


async def _put_a_megabyte(objects: Any, key: str, pieces: Any, *, absent: bool = False) -> bool:
    return await objects.put(key, [b"".join(pieces)[: 1 << 19]], absent=absent)


async def _get_the_prefix(objects: Any, key: str, **rest: Any) -> Found | None:
    found = await objects.get(key, **rest)
    below = [entry.key for entry in await objects.list(key)]
    return found if found or not below else await objects.get(below[0], **rest)


async def _get_without_span(objects: Any, key: str, *, span: Any = None, unless: Any = None) -> Found | None:
    return await objects.get(key, unless=unless)


async def _get_always(objects: Any, key: str, *, span: Any = None, unless: Any = None) -> Found | None:
    return await objects.get(key, span=span)


async def _get_tagged_by_size(objects: Any, key: str, *, span: Any = None, unless: Any = None) -> Found | None:
    found = await objects.get(key, span=span)
    if found is None:
        return None
    tag = b"%d" % len(found.data)
    return Found(tag, None if tag == unless else found.data)


async def _list_tagged_otherwise(objects: Any, prefix: str, **rest: Any) -> list[Entry]:
    return [Entry(entry.key, entry.tag + b"?") for entry in await objects.list(prefix, **rest)]


async def _list_backwards(objects: Any, prefix: str, **rest: Any) -> list[Entry]:
    return (await objects.list(prefix, **rest))[::-1]


async def _list_from_the_key(objects: Any, prefix: str, *, after: str = "", limit: int = 1000) -> list[Entry]:
    return await objects.list(prefix, after=after[:-1], limit=limit)


async def _list_one_page(objects: Any, prefix: str, *, after: str = "", limit: int = 1000) -> list[Entry]:
    return [] if limit == 1000 and after else await objects.list(prefix, after=after, limit=limit)


async def _list_everything(objects: Any, prefix: str, **rest: Any) -> list[Entry]:
    return await objects.list("", **rest)


def _lists_late(objects: MemoryObjects) -> Bent:
    seen: list[list[Entry]] = [[]]

    async def list_late(prefix: str, **rest: Any) -> list[Entry]:
        seen.append(list(await objects.list(prefix, **rest)))
        return seen[-2]

    return Bent(objects, list=list_late)


async def _delete_the_first(objects: Any, keys: Any) -> None:
    await objects.delete(keys[:1])


async def _delete_what_is_there(objects: Any, keys: Any) -> None:
    for key in keys:
        if await objects.get(key) is None:
            raise FileNotFoundError(key)


def _one_at_a_time(objects: MemoryObjects) -> Bent:
    busy: list[str] = []

    async def put(key: str, pieces: Any, *, absent: bool = False) -> bool:
        if busy:
            raise DcrError("somebody else is at it")
        busy.append(key)
        try:
            await anyio.sleep(0.001)
            return await objects.put(key, pieces, absent=absent)
        finally:
            busy.pop()

    return Bent(objects, put=put)


def _of_its_own(objects: MemoryObjects) -> MemoryObjects:
    return MemoryObjects()


BREAKS: list[tuple[str, Wrong, tuple[Any, ...]]] = [
    ("an_object_is_read_as_it_was_written", replacing(put=_put_and_say_nothing), ()),
    ("pieces_are_one_object", replacing(put=_put_first_piece), ()),
    ("a_large_object_is_whole", replacing(put=_put_a_megabyte), ()),
    ("what_is_not_there_is_none", replacing(get=_get_the_prefix), ()),
    ("an_object_is_replaced_whole", replacing(put=_put_once), ()),
    ("everybody_sees_what_was_written", _of_its_own, ()),
    ("a_reader_beside_a_writer_sees_whole_objects_only", replacing(put=_put_in_two), ()),
    *[("a_span_is_those_bytes", replacing(get=_get_without_span), (span,)) for span in ((0, 4), (2, 5), (3, 3))],
    ("an_object_that_has_the_tag_comes_without_data", replacing(get=_get_always), ()),
    ("an_object_that_was_written_anew_has_another_tag", replacing(get=_get_tagged_by_size), ()),
    ("a_list_has_the_tags_that_reads_have", replacing(list=_list_tagged_otherwise), ()),
    ("what_is_there_is_not_created_again", replacing(put=_put_over), ()),
    ("what_is_there_is_not_created_again", replacing(put=_put_over_and_say_no), ()),
    ("of_many_who_create_one_object_exactly_one_does", replacing(put=_look_then_put), ()),
    ("the_same_bytes_created_twice_are_created_once", replacing(put=_created_if_the_same), ()),
    ("a_list_is_of_the_prefix_in_the_order_of_keys", replacing(list=_list_backwards), ()),
    ("a_list_is_of_the_prefix_in_the_order_of_keys", replacing(list=_list_everything), ()),
    ("a_list_goes_on_after_a_key", replacing(list=_list_from_the_key), ()),
    ("a_list_of_more_than_one_page_is_whole", replacing(list=_list_one_page), ()),
    ("a_list_sees_what_was_written_and_removed_before_it", _lists_late, ()),
    ("what_was_removed_is_gone_and_can_be_created", replacing(delete=_delete_the_first), ()),
    ("removing_what_is_not_there_is_no_error", replacing(delete=_delete_what_is_there), ()),
    ("calls_may_be_made_at_a_time", _one_at_a_time, ()),
    *[
        ("a_put_cancelled_at_any_await_is_whole_or_nothing", replacing(put=_put_half_when_cancelled), (how,))
        for how in ("scope", "task")
    ],
]


@pytest.mark.parametrize(("test", "wrong", "args"), BREAKS, ids=lambda value: value if isinstance(value, str) else "")
def test_the_kit_notices(test: str, wrong: Wrong, args: tuple[Any, ...]) -> None:
    kit, kept = Kit(), MemoryObjects()
    kit.open_objects = lambda: given(wrong(kept))  # type: ignore[method-assign]
    with pytest.raises((AssertionError, DcrError, OSError)):
        getattr(kit, f"test_{test}")(*args)


def test_every_test_of_the_kit_can_fail() -> None:
    assert kit_tests(ObjectsTests) - {f"test_{name}" for name, _, _ in BREAKS} == set()
