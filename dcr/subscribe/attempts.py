"""Live attempts: a member prepares each beside generation, votes, and waits for the head to name it."""

from __future__ import annotations

import time

from dcr.errors import BaseMismatch, DcrError, DigestMismatch, IncompleteError, PayloadError, RemoteError, RunMismatch
from dcr.events import AttemptRefused, ChunkRefused, PrepareCompleted, PrepareFailed, PrepareStarted
from dcr.protocol import machines
from dcr.protocol.machines import MemberEvent
from dcr.protocol.wire import Abort, Ack, Chunk, Identity, Message, Nack, Open
from dcr.stages.transfer import Aborted, Superseded
from dcr.subscribe.membership import Membership
from dcr.subscribe.offers import Offers
from dcr.subscribe.prepared import Prepared


class Attempts:
    """Takes attempts as they come over the link, one at a time."""

    def __init__(self, member: Membership, offers: Offers) -> None:
        self._member = member
        self._offers = offers

    async def take(self, opened: Message, header: Open) -> None:
        """Prepare a live attempt, vote, wait for the head, offer it. What is wrong with it is refused by name.

        Raises: this side's own trouble, once it is told.
        """
        member, identity = self._member, header.identity
        committed = await member.committed()
        if member.head is None:
            await self._refuse(identity, IncompleteError(f"{identity} was opened, and the run has no head: start anew"))
            return
        if committed is not None and committed.version >= identity.version:
            if member.stale:  # a publisher that went back itself would wait for this vote in vain
                await self._refuse(identity, BaseMismatch(f"{identity} is not newer than {committed}: {member.stale}"))
            return
        if member.ref not in header.members and header.base in (None, member.holds):
            await member.say(member.join)  # what was said before has been lost
        member.machine.move(MemberEvent.OPENED)
        try:
            prepared = await self._vote(opened, header)
        except Aborted as error:
            if isinstance(error, Superseded):
                member.put_back(error.message)
        except (BaseMismatch, DigestMismatch) as error:
            await self._refuse(identity, error)
            await member.doubt(identity, error)
            return
        except RemoteError as error:
            await self._refuse(identity, error)
        except DcrError as error:  # this side's own trouble: the publisher need not wait for a vote
            await self._refuse(identity, error)
            raise
        else:
            if await self._outcome(identity) and prepared is not None:
                await self._accept(prepared)
                return
        member.machine.move(MemberEvent.DROPPED)

    async def _vote(self, opened: Message, header: Open) -> Prepared | None:
        """Verify and prepare an attempt, and say so; None if there is nothing here to prepare it on."""
        member, version, began_s = self._member, header.identity.version, time.monotonic()
        member.emit(PrepareStarted, version, "live", 1)
        try:
            root, prepared = await self._prepare(opened, header)
        except Exception as error:
            why, duration_s = (type(error).__name__, str(error)), time.monotonic() - began_s
            member.emit(PrepareFailed, version, "live", 1, *why, duration_s)
            raise
        member.machine.move(MemberEvent.PREPARED)
        changed = prepared.changed if prepared is not None else None
        member.emit(PrepareCompleted, version, "live", 1, changed, time.monotonic() - began_s)
        await member.send(Ack("prepared", member.ref, header.identity, root))
        return prepared

    async def _prepare(self, opened: Message, header: Open) -> tuple[bytes, Prepared | None]:
        member = self._member
        receipt = member.receipt(header)
        await member.rank.bind(opened)
        if member.holds is None and header.base is None:
            return await member.rank.inspect(receipt, member.receive, self._ask_again)
        prepared = await member.rank.prepare(receipt, member.receive, self._ask_again)
        return prepared.root, prepared

    async def _outcome(self, identity: Identity) -> bool:
        """Wait until the head names an attempt (True), or it is given up (False). A member never decides alone."""
        member = self._member
        while True:
            decided = await self._verdict(identity)
            if decided is not None:
                return decided
            message = await member.next()
            match message and message.header:
                case Abort(identity=given_up) if given_up == identity:
                    return False
                case Open() if message is not None:
                    member.put_back(message)
                    return await self._verdict(identity) is True
                case _:
                    pass

    async def _verdict(self, identity: Identity) -> bool | None:
        committed = await self._member.committed()
        head = self._member.head
        return machines.verdict(identity, committed, -1 if head is None else head.term)

    async def _accept(self, prepared: Prepared) -> None:
        member = self._member
        if member.holds is None:  # an anchor whose very bits are held already
            await member.hold(prepared.identity)
        member.lacks = 1
        member.machine.move(MemberEvent.COMMITTED)
        await self._offers.offer_prepared(prepared)

    async def _ask_again(self, chunk: Chunk, error: PayloadError) -> None:
        member, kind = self._member, type(error).__name__
        member.emit(ChunkRefused, chunk.identity.version, chunk.frame, kind, str(error))
        await member.send(Nack(member.ref, chunk.identity, member.holds, f"{kind}: {error}", (chunk.frame,)))

    async def _refuse(self, identity: Identity, error: DcrError) -> None:
        member, kind = self._member, type(error).__name__
        member.emit(AttemptRefused, identity.version, kind, str(error))
        if not isinstance(error, RunMismatch):
            await member.send(Nack(member.ref, identity, member.holds, f"{kind}: {error}"))
