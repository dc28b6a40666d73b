"""A run of any `Objects`: what a transport that keeps versions need not write itself.

`stored(open_objects)` is a transport: it opens the objects that a URL names, and gives a `dcr.seams.Run` over them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl

from dcr.errors import OptionError
from dcr.protocol.wire import Join, MemberRef
from dcr.runs.attempts import StoredAttempts
from dcr.runs.desk import Pace
from dcr.runs.ledger import Log
from dcr.runs.mailboxes import members
from dcr.runs.member import MemberLink
from dcr.runs.patience import Patient
from dcr.runs.sender import SenderLink, WriterLink
from dcr.seams import urls
from dcr.seams.objects import Objects
from dcr.seams.required import SECONDS, WAIT, WHOLE, judge, optional

OpenObjects = Callable[..., AbstractAsyncContextManager[Objects]]
TOUCH = "live/touched"


class StoredRun:
    """A run over objects: its log of heads, its stored attempts, and links. See `stored` for the options."""

    def __init__(
        self,
        objects: Objects,
        *,
        poll_s: float | None = 0.01,
        idle_s: float = 0.1,
        stale_s: float | None = 30.0,
        pack_bytes: int = 24 << 20,
        pack_s: float = 0.05,
        patience_s: float = 30.0,
    ) -> None:
        self.objects = Patient(objects, patience_s)
        self.log = self.ledger = Log(self.objects)
        self.store = StoredAttempts(self.objects)
        self.stale_s = stale_s
        self.pack_bytes = pack_bytes
        self.pack_s = pack_s
        self._poll_s = poll_s
        self._idle_s = max(idle_s, poll_s or 0.0)

    def pace(self) -> Pace:
        """How a side waits for news."""
        return Pace(self._poll_s, self._idle_s)

    async def touch(self) -> None:
        """Write an object of no meaning: a side that may not write is told so at once."""
        await self.objects.put(TOUCH, [])

    async def members(self) -> list[Join]:
        """See `dcr.seams.Run.members`."""
        return await members(self)

    def sender(self) -> SenderLink:
        """See `dcr.seams.Run.sender`."""
        return SenderLink(self)

    def writer(self, part: tuple[int, int]) -> WriterLink:
        """See `dcr.seams.Run.writer`."""
        return WriterLink(self, part)

    def member(self, ref: MemberRef) -> MemberLink:
        """See `dcr.seams.Run.member`."""
        return MemberLink(self, ref)


class StoredTransport:
    """Opens runs over objects: a `dcr.seams.Transport`. query: whether a URL may say options in its query."""

    def __init__(self, open_objects: OpenObjects, *, query: bool = True, **options: Any) -> None:
        self._open_objects = open_objects
        self._query = query
        self._options = options
        _judge(options)

    @asynccontextmanager
    async def open(self, url: str) -> AsyncIterator[StoredRun]:
        """See `dcr.seams.Transport.open`.

        Raises:
            LocalError: the URL, or an option in its query, does not make sense.
        """
        address, said = self._split(url)
        own = {name: _value(name, text) for name, text in said.items() if name in RULES}
        _judge(own)
        theirs = {name: text for name, text in said.items() if name not in RULES}
        try:
            opening = self._open_objects(address, **theirs)
        except TypeError as error:
            if not theirs:
                raise
            raise OptionError(f"{url!r} has an option that is none here ({error}); take it from the query") from error
        async with opening as objects:
            yield StoredRun(objects, **(self._options | own))

    def _split(self, url: str) -> tuple[str, dict[str, str]]:
        """A URL without its query, and the options in that."""
        urls.scheme_of(url)
        if not self._query:
            return url, {}
        address, _, query = url.partition("?")
        try:
            pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
        except ValueError as error:
            raise OptionError(f"expected options such as ?poll_s=0.1 in the query of {url!r}: {error}") from None
        if len({name for name, _ in pairs}) < len(pairs):
            raise OptionError(f"expected each option once in the query of {url!r}")
        return address, dict(pairs)


def stored(open_objects: OpenObjects, **options: Any) -> StoredTransport:
    """A transport over objects: what a distribution registers under the entry point group dcr.transports.

    open_objects: opens the objects that a URL names, as an async context manager.

    poll_s: how often a side looks for news while an attempt is open, in seconds; None: the objects' `changed` says.
    idle_s: to what that slows down while none is. stale_s: a member whose mailbox has not changed for so long has left;
    None: no member is lost without a word. pack_bytes, pack_s: a pack of chunks closes when it has so many bytes, or so
    long after its first chunk. patience_s: how long a call is repeated before it raises `Unavailable`.

    Raises:
        OptionError: an option is not what it may be.
    """
    return StoredTransport(open_objects, **options)


RULES = {
    "poll_s": optional(SECONDS),
    "idle_s": SECONDS,
    "stale_s": optional(SECONDS),
    "pack_bytes": WHOLE,
    "pack_s": WAIT,
    "patience_s": WAIT,
}


def _value(name: str, text: str) -> Any:
    """An option of a run as a query says it: a number, or "none"."""
    try:
        return None if text == "none" else int(text) if name == "pack_bytes" else float(text)
    except ValueError:
        raise OptionError(f"expected a number, or none, as {name} in a URL's query, found {text!r}") from None


def _judge(options: dict[str, Any]) -> None:
    """Refuse options that `StoredRun` has not, or that are not what they may be."""
    if unknown := sorted(options.keys() - RULES.keys()):
        raise OptionError(f"expected options among {', '.join(RULES)}, found {', '.join(unknown)}")
    judge(**{name: (value, RULES[name]) for name, value in options.items()})
