"""The guarantees of delivery to members."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import anyio
import pytest

from dcr.errors import DcrError
from dcr.pipeline import gather_bare
from dcr.protocol.wire import Abort, Chunk, Commit, Head, Join, MemberRef, Message
from dcr.seams import Link, Run
from dcr.testing.conformance.scene import (
    RUN,
    Scene,
    attempt,
    chunk,
    identity,
    on_a_loop,
    opening,
    random_bytes,
    require_same,
    send_all,
    settled,
)
from dcr.testing.conformance.setting import MiB, Setting


class DeliveryTests(Setting):
    """What a publisher sends reaches every member: whole, in order, of this run and of the newest term only."""

    @on_a_loop
    async def test_messages_arrive_whole_and_in_the_order_of_sending(self) -> None:
        sent = attempt(identity(), [bytes(range(256)) * n + b"end" for n in range(24)])
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            member = await scene.join()
            await send_all(sender, sent)
            require_same(await scene.take_attempt(member), sent, "one attempt")

    @on_a_loop
    async def test_messages_arrive_in_order_while_more_are_being_sent(self) -> None:
        sent = attempt(identity(), [b"%d" % n for n in range(60)])
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            member = await scene.join()
            found: list[Message] = []

            async def receive() -> None:
                found.extend(await scene.take_attempt(member))

            await gather_bare([receive, partial(send_all, sender, sent)])
            require_same(found, sent, "one attempt")

    @on_a_loop
    async def test_a_chunk_without_a_body_arrives(self) -> None:
        sent = attempt(identity(), [b"", b"", b""])
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            member = await scene.join()
            await send_all(sender, sent)
            require_same(await scene.take_attempt(member), sent, "chunks without bodies")

    @on_a_loop
    async def test_a_large_body_arrives_whole(self) -> None:
        sent = attempt(identity(), [random_bytes(self.large_body_bytes), b"behind it"])
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            member = await scene.join()
            found: list[Message] = []

            async def receive() -> None:
                found.extend(await scene.take_attempt(member))

            await gather_bare([receive, partial(send_all, sender, sent)])
            require_same(found, sent, f"a body of {self.large_body_bytes} bytes")

    @on_a_loop
    async def test_an_attempt_waits_for_a_member_that_does_not_receive_yet(self) -> None:
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            member = await scene.join()
            sent = attempt(identity())
            await send_all(sender, sent)
            await settled()
            require_same(await scene.take_attempt(member), sent, "what was sent before the first receive")

    @on_a_loop
    async def test_every_member_receives_everything(self) -> None:
        sent = attempt(identity())
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            members = {name: await scene.join(name) for name in ("a", "b", "c")}
            await send_all(sender, sent)
            for name, member in members.items():
                require_same(await scene.take_attempt(member), sent, f"member {name}")

    @on_a_loop
    async def test_a_member_that_joins_in_the_middle_receives_the_attempt_from_its_opening(self) -> None:
        sent = attempt(identity(), [b"%d" % n for n in range(8)])
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            await send_all(sender, sent[:5])
            member = await scene.join("late")
            first = await scene.take(member, "the Open of an attempt that is under way")
            await send_all(sender, sent[5:])
            require_same([first, *await scene.take_attempt(member)], sent, "a member that joined in the middle")

    @on_a_loop
    async def test_a_chunk_that_is_sent_again_after_the_seal_arrives_again(self) -> None:
        sent = attempt(identity())
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            member = await scene.join()
            await send_all(sender, sent)
            await scene.take_attempt(member)
            await sender.send(sent[2])
            require_same([await scene.take(member, "a chunk sent again")], [sent[2]], "a chunk sent again")

    @on_a_loop
    async def test_a_commit_reaches_every_member(self) -> None:
        async with self.scene() as scene:
            sender, run = await scene.lead()
            members = [await scene.join(name) for name in ("a", "b")]
            await self._commit(scene, sender, run, members)
            for member in members:
                require_same([await scene.take(member, "a Commit")], [Message(Commit(identity()))], "after the seal")

    @on_a_loop
    async def test_the_next_attempt_follows_the_commit(self) -> None:
        second = attempt(identity(2), base=identity(1))
        async with self.scene() as scene:
            sender, run = await scene.lead()
            member = await scene.join()
            await self._commit(scene, sender, run, [member])
            await scene.take(member, "the Commit of the first attempt")
            await send_all(sender, second)
            require_same(await scene.take_attempt(member, "the second attempt"), second, "after a commit")

    @on_a_loop
    async def test_an_abort_reaches_every_member_in_the_middle_of_the_attempt(self) -> None:
        gone = Message(Abort(identity(), "for a reason"))
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            members = [await scene.join(name) for name in ("a", "b")]
            await send_all(sender, attempt(identity())[:3])
            for member in members:
                await scene.take(member, "an Open")
            await sender.send(gone)
            for member in members:
                taken = await scene.take_all(member, "an Abort", lambda message: not isinstance(message.header, Chunk))
                require_same(taken[-1:], [gone], "after the chunks")

    @on_a_loop
    async def test_the_next_attempt_follows_the_abort(self) -> None:
        second = attempt(identity(2))
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            member = await scene.join()
            await sender.send(opening(identity(1)))
            await scene.take(member, "an Open")
            await sender.send(Message(Abort(identity(1), "for a reason")))
            await scene.take(member, "an Abort")
            await send_all(sender, second)
            require_same(await scene.take_attempt(member, "the second attempt"), second, "after an abort")

    @on_a_loop
    async def test_a_later_term_ends_the_attempt_of_the_one_before(self) -> None:
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            member = await scene.join()
            await sender.send(opening(identity(1)))
            await scene.take(member, "an Open")
            successor, _ = await scene.lead(Head(RUN, 2, None, b""))
            await successor.send(opening(identity(2, term=2)))
            found = [(await scene.take(member, "an Abort of the superseded attempt")).header for _ in range(2)]
            assert isinstance(found[0], Abort), f"expected the superseded attempt's Abort, found {found[0]}"
            assert found[0].identity == identity(1)
            assert found[1] == opening(identity(2, term=2)).header

    @on_a_loop
    async def test_an_attempt_of_a_superseded_term_is_not_delivered(self) -> None:
        sent = attempt(identity(6, term=2))
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            member = await scene.join()
            successor, _ = await scene.lead(Head(RUN, 2, None, b""))
            with suppress(DcrError, OSError):  # it may also be refused at once
                await send_all(sender, attempt(identity(5, term=1)))
            await send_all(successor, sent)
            require_same(await scene.take_attempt(member), sent, "after a publisher of a later term took over")

    @on_a_loop
    async def test_an_attempt_whose_sender_is_gone_is_never_sealed(self) -> None:
        sent = attempt(identity(2, term=2))
        async with self.scene() as scene:
            run = await scene.open()
            await scene.move(run, Head(RUN, 1, None, b""))
            member = await scene.join()
            async with run.sender() as sender:
                await send_all(sender, attempt(identity(1))[:-1])
                await scene.take(member, "an Open")
            successor, _ = await scene.lead(Head(RUN, 2, None, b""))
            await send_all(successor, sent)
            taken = await scene.take_attempt(member, "the attempt of the successor")
            require_same(taken[-len(sent) :], sent, "after a sender that closed without a seal")

    @on_a_loop
    async def test_two_runs_never_mix(self) -> None:
        async with self.scene() as one, self.scene() as other:
            for scene, run in ((one, "one"), (other, "other")):
                sender, _ = await scene.lead(Head(run, 1, None, b""))
                await send_all(sender, attempt(identity(run=run), [run.encode()]))
            for scene, run in ((one, "one"), (other, "other")):
                sent = attempt(identity(run=run), [run.encode()])
                require_same(await scene.take_attempt(await scene.join()), sent, f"run {run}")

    @on_a_loop
    async def test_the_members_of_two_runs_never_mix(self) -> None:
        async with self.scene() as one, self.scene() as other:
            senders = [(await scene.lead(Head(run, 1, None, b"")))[0] for scene, run in ((one, "1"), (other, "2"))]
            await one.join("of one")
            await other.join("of other")
            for scene, sender, name in ((one, senders[0], "of one"), (other, senders[1], "of other")):
                found = await scene.take(sender, "a Join")
                require_same([found], [Message(Join(MemberRef(name, "1"), None))], "the members of a run")

    @on_a_loop
    async def test_a_slow_receiver_holds_its_sender_back(self) -> None:
        async with self.scene() as scene:
            sender, run = await scene.lead()
            if run.store is not None:
                pytest.skip("what it stores it need not hold in memory")
            member = await scene.join()
            await sender.send(opening(identity()))
            await scene.take(member, "an Open")
            accepted = 0
            while accepted <= self.held_bytes:
                with anyio.move_on_after(0.3) as stuck:
                    await sender.send(chunk(identity(), accepted // MiB, bytes(MiB)))
                if stuck.cancelled_caught:
                    break
                accepted += MiB
            assert accepted <= self.held_bytes, f"{accepted} bytes were taken of a sender though nobody received them"

    async def _commit(self, scene: Scene, sender: Link, run: Run, members: Sequence[Link]) -> None:
        """The first attempt, taken by all members, and then committed."""
        await send_all(sender, attempt(identity()))
        for member in members:
            await scene.take_attempt(member)
        await scene.move(run, Head(RUN, 1, identity(), b"root"))
        await sender.send(Message(Commit(identity())))
