"""What a member offers to whoever installs: one version at a time, and what becomes of each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import anyio

from dcr.errors import BaseMismatch, IncompleteError, Poisoned, StateError, StorageRebound
from dcr.protocol.machines import MemberEvent, MemberState
from dcr.subscribe.membership import Membership
from dcr.subscribe.prepared import Prepared
from dcr.subscribe.version import Version


class Offers:
    """Offers versions; they are written by the task that offers, when their user says so.

    A version lies here until its user takes it: a wait that is cancelled, by whatever means, takes nothing along.
    """

    def __init__(self, member: Membership) -> None:
        self._member = member
        self._waiting: Version | None = None
        self._news = anyio.Event()
        self._ended = False

    async def take(self) -> Version | None:
        """Wait for the next version; None if there will be none."""
        while self._waiting is None and not self._ended:
            await self._news.wait()
        # from here to the caller's own `return` nothing is awaited, so no cancellation can come between
        version, self._waiting = self._waiting, None
        if not self._ended:
            self._news = anyio.Event()
        return version

    def end(self) -> None:
        """Nothing will be offered any more."""
        self._waiting, self._ended = None, True
        self._news.set()

    async def offer(self, version: Version, install: Callable[[], Awaitable[Exception | None]]) -> None:
        """Offer a version until it is installed, or its installation has poisoned this member.

        Raises:
            StorageRebound: a weight was replaced.
        """
        self._waiting = version
        self._news.set()
        try:
            while not version.installed:
                await version.wanted()
                try:
                    error = await install()
                except Exception as ended:  # it ends this subscriber: whoever installs learns why, and not only that
                    version.answer(ended)
                    raise
                version.answer(error)
                if isinstance(error, StorageRebound):
                    raise error  # nothing that this subscriber knows is true any more
                is_poisoned = self._member.machine.state is MemberState.POISONED
                if is_poisoned or isinstance(error, (IncompleteError, BaseMismatch)):
                    break  # it is offered again, or a newer one instead
        finally:
            self._waiting = None
            version.close()

    async def offer_prepared(self, prepared: Prepared) -> None:
        """Offer a version that the head names and that is prepared; raises as `offer`."""
        await self.offer(Version(prepared.identity, "delta", prepared.changed), partial(self._install, prepared))

    async def _install(self, prepared: Prepared) -> Exception | None:
        member, begun = self._member, self._member.begin_install(prepared.identity, "delta")
        try:
            await member.rank.require_awake()
            await member.rank.require_fingerprint()
            await member.rank.require_unwritten()
        except (StorageRebound, StateError) as error:
            member.fail_install(begun, error, "unchanged")
            return error
        except BaseMismatch as error:
            member.fail_install(begun, error, "unchanged")
            member.lose_trust(prepared.identity, error)
            return error
        member.machine.move(MemberEvent.INSTALL)
        try:
            pause_s = await member.rank.install(prepared)
        except Poisoned as error:
            await member.poison(begun, prepared.identity, error)
            return error
        except Exception as error:
            member.machine.move(MemberEvent.UNDONE)
            await member.show()
            member.fail_install(begun, error, "undone")
            return error
        await member.installed(begun, prepared.identity, prepared.root, pause_s)
        return None
