"""What a member offers to whoever installs: one version at a time, and what becomes of each."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

from anyio.streams.memory import MemoryObjectSendStream

from dcr.commit import Member
from dcr.errors import BaseMismatch, IncompleteError, Poisoned, StateError, StorageRebound
from dcr.subscribe.membership import Membership
from dcr.subscribe.rank import Prepared
from dcr.subscribe.version import Version


class Offers:
    """Offers versions; they are written by the task that offers, when their user says so."""

    def __init__(self, member: Membership, send: MemoryObjectSendStream[Version]) -> None:
        self._member = member
        self._send = send

    async def offer(self, version: Version, install: Callable[[], Awaitable[Exception | None]]) -> None:
        """Offer a version until it is installed, or its installation has poisoned this member.

        Raises:
            StorageRebound: a weight was replaced.
        """
        try:
            await self._send.send(version)
            while not version.installed:
                await version.wanted()
                error = await install()
                version.answer(error)
                if isinstance(error, StorageRebound):
                    raise error  # nothing that this subscriber knows is true any more
                if self._member.state is Member.POISONED or isinstance(error, (IncompleteError, BaseMismatch)):
                    break  # it is offered again, or a newer one instead
        finally:
            version.close()

    async def offer_prepared(self, prepared: Prepared) -> None:
        """Offer a version that the head names and that is prepared; raises as `offer`."""
        await self.offer(Version(prepared.identity, "delta", prepared.changed), partial(self._install, prepared))

    async def _install(self, prepared: Prepared) -> Exception | None:
        member, began_s = self._member, time.monotonic()
        try:
            await member.rank.require_awake()
            await member.rank.require_epoch()
            await member.rank.require_unwritten()
        except (StorageRebound, StateError) as error:
            return error  # nothing has been written
        except BaseMismatch as error:
            member.lose_trust(prepared.identity, error)
            return error
        member.move("install")
        try:
            await member.rank.install(prepared)
        except Poisoned as error:
            await member.poison(prepared.identity, error)
            return error
        except Exception as error:
            member.move("undone")
            await member.show()
            member.emit("undone", prepared.identity.version, detail=f"{type(error).__name__}: {error}")
            return error
        await member.installed(prepared.identity, prepared.root, began_s)
        return None
