"""Where a durable run is kept: what an object store or a directory has to do; `dcr.stored` makes runs of it.

Keys are short ASCII paths such as `heads/000000000017`. A value tries once and keeps no state of the protocol; it may
be called from several tasks at a time. What lies below `live/` is rewritten often, and need not outlive the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Found(NamedTuple):
    """An object as `get` found it. tag: another one whenever it is written; data None: it has the tag given."""

    tag: bytes
    data: bytes | None


class Entry(NamedTuple):
    """An object as `list` found it."""

    key: str
    tag: bytes


class Objects(Protocol):
    """Objects by key, each written whole or not at all.

    Errors: `dcr.errors.Unavailable`, ConnectionError and TimeoutError are tried again by the run; `dcr.errors.Denied`
    and everything else is not. An error of an SDK must not get through: whoever catches it knows dcr's and OSError.
    """

    async def put(self, key: str, pieces: Sequence[bytes], *, absent: bool = False) -> bool:
        """Write an object of these pieces; with `absent` only if there is none, and False if there is.

        When it returns, every `get` and `list` that begins later sees the object. A put that is cancelled or raises
        has happened, or not, or happens a moment later.
        """
        ...

    async def get(self, key: str, *, span: tuple[int, int] | None = None, unless: bytes | None = None) -> Found | None:
        """An object; None if there is none. span: only the bytes from the first number up to the second.

        unless: a tag; an object that still has it is not read, and comes without data.
        """
        ...

    async def list(self, prefix: str, *, after: str = "", limit: int = 1000) -> Sequence[Entry]:
        """The objects whose keys begin with a prefix and come after a key, in the order of keys, at most `limit`.

        Fewer than `limit` says that there are no more.
        """
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; one that is not there is no error."""
        ...
