"""The guarantees of what members say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import anyio
import pytest

from dcr.protocol.wire import Ack, Head, Join, Leave, MemberRef, Message, Nack
from dcr.seams import Link
from dcr.testing.conformance.scene import (
    RUN,
    Scene,
    attempt,
    identity,
    on_a_loop,
    opening,
    refusal,
    require_same,
    send_all,
    shown,
    vote,
)
from dcr.testing.conformance.setting import Setting


class AnswerTests(Setting):
    """What members say reaches the publisher: all of it, once, with who said it."""

    @on_a_loop
    async def test_a_join_reaches_the_sender(self) -> None:
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            await scene.join("a", holds=identity(7))
            expected = Message(Join(MemberRef("a", "1"), identity(7)))
            require_same([await scene.take(sender, "a Join")], [expected], "a member that joins")

    @on_a_loop
    async def test_a_join_from_before_the_sender_came_reaches_it(self) -> None:
        async with self.scene() as scene:
            await scene.join("early")
            sender, _ = await scene.lead()
            expected = Message(Join(MemberRef("early", "1"), None))
            require_same([await scene.take(sender, "a Join")], [expected], "a member that came first")

    @on_a_loop
    async def test_a_member_that_joins_again_is_heard_with_what_it_holds_now(self) -> None:
        again = Message(Join(MemberRef("a", "1"), identity(3)))
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            member = await scene.join("a")
            await scene.take(sender, "a Join")
            await member.send(again)
            require_same([await scene.take(sender, "a second Join of one member")], [again], "a second Join")

    @on_a_loop
    async def test_two_lives_of_one_member_are_told_apart(self) -> None:
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            for life in ("1", "2"):
                await scene.join("a", life=life)
            joins = [Message(Join(MemberRef("a", life), None)) for life in ("1", "2")]
            await self._require_once(scene, sender, joins)

    @pytest.mark.parametrize("name", ["a/b", "..", "a.b", "a b%20", "\N{SNOWMAN}", "A" * 60])
    @on_a_loop
    async def test_a_member_may_have_any_name(self, name: str) -> None:
        sent = attempt(identity())
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            member = await scene.join(name)
            await send_all(sender, sent)
            await scene.take_attempt(member)
            await member.send(vote(name, identity()))
            joined = Message(Join(MemberRef(name, "1"), None))
            await self._require_once(scene, sender, [joined, vote(name, identity())])

    @on_a_loop
    async def test_votes_reach_the_sender_once(self) -> None:
        await self._answers_reach_once(
            [vote(name, identity(), kind) for name in ("a", "b", "c") for kind in ("prepared", "installed")]
        )

    @on_a_loop
    async def test_refusals_reach_the_sender_once(self) -> None:
        await self._answers_reach_once(
            [
                refusal("a", identity(), "one chunk does not match: \N{SNOWMAN}", (3,)),
                refusal("b", identity(), "more chunks", tuple(range(50))),
                refusal("c", identity(), "r" * 5000),
            ]
        )

    @on_a_loop
    async def test_the_answers_of_one_member_arrive_in_the_order_of_sending(self) -> None:
        answers = [refusal("a", identity(), f"answer {n}", (n,)) for n in range(12)]
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            await sender.send(opening(identity()))
            member = await scene.join("a")
            await scene.take(member, "an Open")
            await send_all(member, answers)
            taken = await scene.take_all(sender, "the last answer", lambda message: message == answers[-1])
            found = [message for message in taken if not isinstance(message.header, Join)]
            require_same(found, answers, "answers of one member")

    @on_a_loop
    async def test_an_answer_to_the_attempt_before_is_heard(self) -> None:
        async with self.scene() as scene:
            sender, run = await scene.lead()
            member = await scene.join("a")
            await scene.take(sender, "a Join")
            await send_all(sender, attempt(identity(1)))
            await scene.take_attempt(member)
            await scene.move(run, Head(RUN, 1, identity(1), b"root"))
            await sender.send(opening(identity(2)))
            late = vote("a", identity(1), "installed")
            await member.send(late)
            found = await scene.take(sender, "an answer to an attempt after which another one was opened")
            require_same([found], [late], "a late answer")

    @on_a_loop
    async def test_a_leave_reaches_the_sender_once(self) -> None:
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            member = await scene.join("a")
            await scene.take(sender, "a Join")
            await member.send(Message(Leave(MemberRef("a", "1"))))
            await self._require_once(scene, sender, [Message(Leave(MemberRef("a", "1")))])

    @on_a_loop
    async def test_a_run_lists_its_members_and_what_they_hold(self) -> None:
        async with self.scene() as scene:
            await scene.join("a")
            await scene.join("b", holds=identity(7))
            found = await (await scene.open()).members()
            wanted = [Join(MemberRef("a", "1"), None), Join(MemberRef("b", "1"), identity(7))]
            assert sorted(found, key=lambda join: join.member) == wanted

    @on_a_loop
    async def test_a_run_lists_what_a_member_that_joined_again_holds_now(self) -> None:
        again = Join(MemberRef("a", "1"), identity(3))
        async with self.scene() as scene:
            member = await scene.join("a")
            await member.send(Message(again))
            assert await (await scene.open()).members() == [again]

    @on_a_loop
    async def test_a_run_does_not_list_a_member_that_left(self) -> None:
        async with self.scene() as scene:
            member = await scene.join("a")
            await member.send(Message(Leave(MemberRef("a", "1"))))
            assert await (await scene.open()).members() == []

    @on_a_loop
    async def test_a_member_that_vanishes_has_left_after_a_while(self) -> None:
        if self.lost_after_s is None:
            pytest.skip("lost_after_s does not say when a member that vanished has left")
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            async with self.transport.open(scene.url) as run, run.member(MemberRef("a", "1")) as member:
                await member.send(Message(Join(MemberRef("a", "1"), None)))
                await scene.take(sender, "a Join")
            with anyio.move_on_after(self.lost_after_s):
                found = await sender.receive()
                require_same([found], [Message(Leave(MemberRef("a", "1")))], "a member that vanished")
                return
            raise AssertionError(f"a member vanished {self.lost_after_s:g} s ago, and no Leave came")

    @on_a_loop
    async def test_a_member_that_stays_is_not_taken_for_lost(self) -> None:
        if self.lost_after_s is None:
            pytest.skip("lost_after_s does not say when a member that vanished has left")
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            await scene.join("a")
            await scene.take(sender, "a Join")
            with anyio.move_on_after(self.lost_after_s):
                raise AssertionError(f"a member stays, and {shown([await sender.receive()])} came")

    async def _answers_reach_once(self, answers: Sequence[Message]) -> None:
        """All answers to one attempt, of members a, b and c."""
        async with self.scene() as scene:
            sender, _ = await scene.lead()
            members = {name: await scene.join(name) for name in ("a", "b", "c")}
            await send_all(sender, attempt(identity()))
            for member in members.values():
                await scene.take_attempt(member)
            for answer in answers:
                assert isinstance(answer.header, Ack | Nack)
                await members[answer.header.member.member].send(answer)
            joins = [Message(Join(MemberRef(name, "1"), None)) for name in members]
            await self._require_once(scene, sender, [*joins, *answers])

    async def _require_once(self, scene: Scene, sender: Link, expected: Sequence[Message]) -> None:
        """These messages, in any order, and none of them twice before two more members are heard."""
        taken = [await scene.take(sender, f"one of {shown(expected)}") for _ in expected]
        for last in ("last", "very last"):
            mark = Message(Join(MemberRef(last, "1"), None))
            await scene.join(last)
            taken += await scene.take_all(sender, "one more Join", lambda message, mark=mark: message == mark)  # type: ignore[misc]
            taken.pop()
        found, wanted = (Counter(shown([message]) for message in messages) for messages in (taken, expected))
        assert found == wanted, f"expected {shown(expected)}; found {shown(taken)}"
        assert all(message in expected for message in taken), f"an answer was changed on its way: {taken}"
