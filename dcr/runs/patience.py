"""Patience with what passes: each call of an `Objects` is repeated for a while; only here, and nowhere else."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import anyio

from dcr.errors import Unavailable
from dcr.seams.objects import Entry, Found, Objects

T = TypeVar("T")

FIRST_S, LONGEST_S = 0.02, 2.0  # of the pauses between two tries
PASSING = {errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN}


def is_passing(error: Exception) -> bool:
    """Whether what went wrong may be gone a moment later."""
    if isinstance(error, Unavailable | ConnectionError | TimeoutError):
        return True
    return isinstance(error, OSError) and error.errno in PASSING


class Patient:
    """Objects whose calls are tried again for patience_s seconds, and then raise `Unavailable`."""

    def __init__(self, objects: Objects, patience_s: float) -> None:
        self.objects = objects
        self._patience_s = patience_s

    async def put(self, key: str, pieces: Sequence[bytes], *, absent: bool = False) -> bool:
        """See `dcr.seams.Objects.put`."""
        failed: list[Exception] = []
        created = await self._try(partial(self.objects.put, key, pieces, absent=absent), failed)
        if created or not failed:
            return created
        found = await self.get(key)  # an earlier try, which nobody answered, may have been the one that created it
        return found is not None and found.data == b"".join(pieces)

    async def get(self, key: str, *, span: tuple[int, int] | None = None, unless: bytes | None = None) -> Found | None:
        """See `dcr.seams.Objects.get`."""
        return await self._try(partial(self.objects.get, key, span=span, unless=unless))

    async def list_all(self, prefix: str, *, after: str = "") -> list[Entry]:
        """All objects below a prefix and after a key, page by page."""
        entries: list[Entry] = []
        limit = 1000
        while True:
            page = await self._try(partial(self.objects.list, prefix, after=after, limit=limit))
            entries += page
            if len(page) < limit:
                return entries
            after = page[-1].key

    async def delete(self, keys: Sequence[str]) -> None:
        """See `dcr.seams.Objects.delete`."""
        for first in range(0, len(keys), 1000):
            await self._try(partial(self.objects.delete, keys[first : first + 1000]))

    def changed(self) -> Any:
        """What can be waited for until something has been written since; None where nobody can say."""
        changed = getattr(self.objects, "changed", None)
        return changed() if changed is not None else None

    async def _try(self, call: Callable[[], Awaitable[T]], failed: list[Exception] | None = None) -> T:
        began_s, pause_s = anyio.current_time(), FIRST_S
        while True:
            try:
                return await call()
            except Exception as error:
                if not is_passing(error):
                    raise
                after_s = anyio.current_time() - began_s
                if after_s + pause_s > self._patience_s:
                    raise Unavailable(f"given up after {after_s:.1f} s: {type(error).__name__}: {error}") from error
                if failed is not None:
                    failed.append(error)
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)
