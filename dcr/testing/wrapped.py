"""A run whose links are somebody else's: what transports around other ones share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from dcr.protocol.wire import Join, MemberRef
from dcr.seams import Ledger, Link, Run, Store, Writer


class WrappedRun:
    """Another run, with its ledger, and each link and writer that it opens, put into what is given for them."""

    def __init__(
        self,
        run: Run,
        *,
        link: Callable[[Link], Link],
        writer: Callable[[Writer], Writer],
        ledger: Callable[[Ledger], Ledger] = lambda ledger: ledger,
    ) -> None:
        self._run = run
        self._ledger = ledger(run.ledger)
        self._wrap_link = link
        self._wrap_writer = writer

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def store(self) -> Store | None:
        return self._run.store

    async def members(self) -> list[Join]:
        """See `dcr.seams.Run.members`."""
        return await self._run.members()

    @asynccontextmanager
    async def sender(self) -> AsyncIterator[Link]:
        """See `dcr.seams.Run.sender`."""
        async with self._run.sender() as link:
            yield self._wrap_link(link)

    @asynccontextmanager
    async def writer(self, part: tuple[int, int]) -> AsyncIterator[Writer]:
        """See `dcr.seams.Run.writer`."""
        async with self._run.writer(part) as writer:
            yield self._wrap_writer(writer)

    @asynccontextmanager
    async def member(self, ref: MemberRef) -> AsyncIterator[Link]:
        """See `dcr.seams.Run.member`."""
        async with self._run.member(ref) as link:
            yield self._wrap_link(link)
