"""The votes on one attempt, as its publisher counts them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.errors import PayloadError
from dcr.protocol.votes import Votes
from dcr.protocol.wire import Ack, Identity, MemberRef, Nack

RUN = "run"
VERSION_1, VERSION_2 = Identity(RUN, 1, 1, 1), Identity(RUN, 1, 2, 1)
ROOT = b"r" * 32
A, B, C = (MemberRef(name, "life-1") for name in "abc")


def votes(*members: MemberRef, quorum: Any = "all") -> Votes:
    return Votes(VERSION_2, ROOT, frozenset(members), quorum)


def ack(member: MemberRef, identity: Identity = VERSION_2, root: bytes = ROOT) -> Ack:
    return Ack("prepared", member, identity, root)


def nack(member: MemberRef, identity: Identity = VERSION_2) -> Nack:
    return Nack(member, identity, VERSION_1, "out of memory")


def test_a_vote_is_carried_when_all_have_prepared() -> None:
    vote = votes(A, B)
    states = [vote.carried]
    for member in (A, B):
        vote.prepare(ack(member))
        states.append(vote.carried)
    assert states == [False, False, True]


def test_a_quorum_waits_for_those_that_may_still_answer() -> None:
    vote = votes(A, B, quorum=1)
    vote.prepare(ack(A))
    assert (vote.carried, vote.lost, vote.missing) == (False, False, {B})


def test_a_quorum_is_carried_over_those_that_are_out() -> None:
    vote = votes(A, B, C, quorum=2)
    vote.prepare(ack(A))
    vote.refuse(nack(B))
    vote.prepare(ack(C))
    assert (vote.carried, vote.lost) == (True, False)


def test_one_refusal_loses_a_vote_of_all() -> None:
    vote = votes(A, B)
    vote.refuse(nack(A))
    assert (vote.carried, vote.lost, vote.refused) == (False, True, {A: "out of memory"})


def test_a_vote_is_lost_as_soon_as_the_quorum_is_out_of_reach() -> None:
    vote = votes(A, B, C, quorum=2)
    vote.refuse(nack(A))
    before = vote.lost
    vote.refuse(nack(B))
    assert (before, vote.lost) == (False, True)


def test_a_quorum_above_the_electorate_is_lost() -> None:
    vote = votes(A, quorum=2)
    vote.prepare(ack(A))
    assert (vote.carried, vote.lost) == (False, True)


def test_a_vote_without_members_is_carried() -> None:
    assert (votes().carried, votes().lost) == (True, False)


def test_a_second_vote_of_one_member_does_not_count_twice() -> None:
    vote = votes(A, B)
    vote.prepare(ack(A))
    vote.prepare(ack(A))
    assert (vote.carried, vote.prepared) == (False, {A})


@pytest.mark.parametrize(
    "answer",
    [
        ack(C),
        ack(MemberRef("a", "life-2")),
        ack(A, VERSION_1),
        ack(A, Identity(RUN, 1, 2, 2)),
        ack(A, Identity(RUN, 2, 2, 1)),
        ack(A, Identity("other", 1, 2, 1)),
        ack(C, root=b"wrong"),
    ],
    ids=[
        "foreign",
        "another life",
        "another version",
        "another attempt",
        "another term",
        "another run",
        "foreign root",
    ],
)
def test_a_vote_that_is_not_for_this_attempt_does_not_count(answer: Ack) -> None:
    vote = votes(A, B)
    assert (vote.prepare(answer), vote.prepared) == (False, set())


@pytest.mark.parametrize("answer", [nack(C), nack(A, VERSION_1)], ids=["foreign", "another version"])
def test_a_refusal_that_is_not_for_this_attempt_does_not_count(answer: Nack) -> None:
    vote = votes(A, B)
    vote.refuse(answer)
    assert vote.refused == {}


def test_a_vote_for_other_bits_is_refused_by_name() -> None:
    vote = votes(A, B)
    with pytest.raises(PayloadError, match="a prepared version 2"):
        vote.prepare(ack(A, root=b"x" * 32))
    assert vote.prepared == set()


def test_a_refusal_after_the_vote_does_not_take_it_back() -> None:
    vote = votes(A)
    vote.prepare(ack(A))
    vote.refuse(nack(A))
    assert (vote.carried, vote.refused) == (True, {})


def test_a_member_that_leaves_is_not_asked_any_more() -> None:
    vote = votes(A, B)
    vote.prepare(ack(A))
    vote.leave(B)
    assert (vote.carried, vote.missing) == (True, set())


def test_a_member_that_leaves_takes_its_vote_along() -> None:
    vote = votes(A, B, quorum=2)
    vote.prepare(ack(A))
    vote.leave(A)
    vote.prepare(ack(B))
    assert (vote.carried, vote.lost, vote.prepared) == (False, True, {B})


def test_a_refusal_stands_when_its_member_leaves() -> None:
    vote = votes(A, B)
    vote.refuse(nack(A))
    vote.leave(A)
    vote.prepare(ack(B))
    assert (vote.carried, vote.lost, vote.refused) == (False, True, {A: "out of memory"})


def test_a_late_vote_of_a_member_that_is_out_does_not_count() -> None:
    vote = votes(A, B)
    vote.drop(A, "no vote within 5 s")
    assert vote.prepare(ack(A)) is False
    assert vote.prepared == set()


STEPS = st.lists(st.tuples(st.sampled_from(["prepare", "refuse", "leave"]), st.sampled_from([A, B, C])), max_size=9)


@settings(deadline=None, max_examples=200)
@given(STEPS, st.sampled_from(["all", 0, 1, 2, 3]))
def test_a_vote_is_never_both_carried_and_lost(steps: list[tuple[str, MemberRef]], quorum: Any) -> None:
    vote = votes(A, B, C, quorum=quorum)
    for verb, member in steps:
        match verb:
            case "prepare":
                vote.prepare(ack(member))
            case "refuse":
                vote.refuse(nack(member))
            case _:
                vote.leave(member)
        assert not (vote.carried and vote.lost)


@settings(deadline=None, max_examples=200)
@given(STEPS, st.sampled_from(["all", 0, 1, 2, 3]))
def test_when_nobody_is_missing_a_vote_is_decided(steps: list[tuple[str, MemberRef]], quorum: Any) -> None:
    vote = votes(A, B, C, quorum=quorum)
    for verb, member in steps:
        match verb:
            case "prepare":
                vote.prepare(ack(member))
            case "refuse":
                vote.refuse(nack(member))
            case _:
                vote.leave(member)
    assert vote.missing or vote.carried or vote.lost
