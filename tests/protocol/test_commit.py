"""The protocol tables, and the bookkeeping of one attempt: votes at the sender, the receipt at a member."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.errors import BaseMismatch, IncompleteError, PayloadError, RunMismatch, StateError
from dcr.protocol.commit import MAY_SERVE, MEMBER, SENDER, Member, Receipt, Sender, Votes, after, member_after, verdict
from dcr.protocol.wire import Ack, Chunk, ChunkRef, Identity, MemberRef, Nack, Open, Seal

Table = Mapping[Any, Mapping[str, Any]]
Step = Callable[[Any, str], Any]
MACHINES: list[tuple[Table, Step]] = [(SENDER, after), (MEMBER, member_after)]
EVENTS = {id(table): {event for events in table.values() for event in events} for table, _ in MACHINES}
PAIRS = [
    pytest.param(table, step, state, event, id=f"{type(state).__name__}-{state.value}-{event}")
    for table, step in MACHINES
    for state in table
    for event in sorted(EVENTS[id(table)] | {"", "unheard_of"})
]
LISTED = [param for param in PAIRS if param.values[3] in param.values[0][param.values[2]]]
UNLISTED = [param for param in PAIRS if param.values[3] not in param.values[0][param.values[2]]]


def reachable(table: Table, start: enum.Enum, *, without: frozenset[Any] = frozenset()) -> set[Any]:
    """States that some run of events leads to, never entering `without`."""
    found, todo = {start}, [start]
    while todo:
        for state in set(table[todo.pop()].values()) - found - without:
            found.add(state)
            todo.append(state)
    return found


def into(table: Table, state: enum.Enum) -> set[tuple[Any, str]]:
    """The (state, event) pairs that lead to a state."""
    return {(before, event) for before, events in table.items() for event, then in events.items() if then is state}


# ---------------------------------------------------------------------- the tables


@pytest.mark.parametrize(("table", "step", "state", "event"), LISTED)
def test_a_listed_event_leads_to_the_state_in_the_table(table: Table, step: Step, state: Any, event: str) -> None:
    assert step(state, event) is table[state][event]


@pytest.mark.parametrize(("table", "step", "state", "event"), UNLISTED)
def test_an_event_that_is_not_listed_is_refused_naming_those_that_are(
    table: Table, step: Step, state: Any, event: str
) -> None:
    with pytest.raises(StateError) as caught:
        step(state, event)
    assert f"{event!r} is not legal in state {state}" in str(caught.value)
    assert str(caught.value).endswith("legal: " + (", ".join(table[state]) or "nothing: it is final"))


@pytest.mark.parametrize(("states", "table"), [(Sender, SENDER), (Member, MEMBER)])
def test_every_state_is_in_its_table(states: type[enum.Enum], table: Table) -> None:
    assert set(states) == set(table)


@pytest.mark.parametrize(("table", "start"), [(SENDER, Sender.SENDING), (MEMBER, Member.EMPTY)])
def test_every_state_can_be_reached(table: Table, start: enum.Enum) -> None:
    assert reachable(table, start) == set(table)


@pytest.mark.parametrize("state", Sender)
def test_every_attempt_can_end(state: Sender) -> None:
    assert any(not SENDER[end] for end in reachable(SENDER, state))


@pytest.mark.parametrize("state", Member)
def test_every_member_can_come_to_serve(state: Member) -> None:
    assert Member.SERVING in reachable(MEMBER, state)


def test_only_a_swap_that_happened_commits() -> None:
    assert into(SENDER, Sender.COMMITTED) == {(Sender.SWAPPING, "swapped"), (Sender.UNKNOWN, "head_is_ours")}


def test_only_a_quorum_leads_to_the_first_swap() -> None:
    assert into(SENDER, Sender.SWAPPING) == {(Sender.VOTING, "quorum"), (Sender.UNKNOWN, "head_is_base")}


def test_once_a_swap_was_tried_the_attempt_is_not_given_up() -> None:
    assert Sender.ABORTED not in reachable(SENDER, Sender.SWAPPING)


def test_the_final_states_of_an_attempt() -> None:
    assert {s for s in Sender if not SENDER[s]} == {Sender.COMMITTED, Sender.ABORTED, Sender.FENCED}


def test_only_what_the_head_names_is_installed() -> None:
    assert into(MEMBER, Member.COMMITTED) == {(Member.PREPARED, "head_names_it"), (Member.INSTALLING, "undone")}
    assert into(MEMBER, Member.INSTALLING) == {(Member.COMMITTED, "install")}


def test_a_prepared_member_never_decides_alone() -> None:
    assert set(MEMBER[Member.PREPARED]) == {"head_names_it", "dropped"}


def test_a_committed_version_is_dropped_only_for_a_seed() -> None:
    assert reachable(MEMBER, Member.COMMITTED, without=frozenset({Member.SERVING})) == {
        *(Member.COMMITTED, Member.INSTALLING, Member.POISONED, Member.SEEDING, Member.EMPTY)
    }


def test_a_poisoned_member_can_only_be_seeded() -> None:
    assert MEMBER[Member.POISONED] == {"seed": Member.SEEDING}


@pytest.mark.parametrize("state", [Member.EMPTY, Member.INSTALLING, Member.SEEDING, Member.POISONED])
def test_a_member_without_one_whole_version_may_not_serve(state: Member) -> None:
    assert state not in MAY_SERVE


def test_a_member_serves_until_it_installs() -> None:
    assert {Member.SERVING, Member.FETCHING, Member.PREPARED, Member.COMMITTED} == MAY_SERVE


# ---------------------------------------------------------------------- votes

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


# ---------------------------------------------------------------------- receipts


def chunk(frame: int, content: bytes = b"c", digest: bytes | None = None, identity: Identity = VERSION_2) -> Chunk:
    return Chunk(identity, frame, "gaps", 2, 5, digest or bytes([frame]) * 32, content)


def seal(*chunks: Chunk, identity: Identity = VERSION_2, base: Identity | None = VERSION_1) -> Seal:
    return Seal(identity, base, tuple(ChunkRef(c.frame, c.digest, c.content, c.changed, 0) for c in chunks), b"", ROOT)


def receipt(
    *,
    identity: Identity = VERSION_2,
    base: Identity | None = VERSION_1,
    holds: Identity | None = VERSION_1,
    term: int = 1,
) -> Receipt:
    return Receipt(Open(identity, base, b"layout", ()), run=RUN, term=term, holds=holds)


def test_it_is_complete_when_it_holds_what_the_seal_lists() -> None:
    one = receipt()
    one.chunk(chunk(0))
    one.chunk(chunk(3))
    one.seal(seal(chunk(3), chunk(0)))
    assert (one.complete, one.require_complete()) == (True, seal(chunk(3), chunk(0)))


def test_chunks_without_a_seal_are_not_complete() -> None:
    one = receipt()
    one.chunk(chunk(0))
    assert (one.complete, one.missing) == (False, None)
    with pytest.raises(IncompleteError, match="before the seal; 1 chunks came"):
        one.require_complete()


def test_missing_chunks_are_named() -> None:
    one = receipt()
    one.chunk(chunk(1))
    one.seal(seal(chunk(0), chunk(1), chunk(7)))
    assert (one.complete, one.missing) == (False, {0, 7})
    with pytest.raises(IncompleteError, match=r"frames \[0, 7\] are missing"):
        one.require_complete()


def test_a_version_without_changes_is_complete_at_its_seal() -> None:
    one = receipt()
    one.seal(seal())
    assert one.complete


def test_a_duplicate_is_harmless() -> None:
    one = receipt()
    assert [one.chunk(chunk(0)), one.chunk(chunk(0))] == [True, False]
    one.seal(seal(chunk(0)))
    assert one.complete


def test_a_duplicate_does_not_make_up_for_a_missing_chunk() -> None:
    one = receipt()
    one.seal(seal(chunk(0), chunk(1)))
    one.chunk(chunk(0))
    one.chunk(chunk(0))
    assert one.missing == {1}


def test_two_different_chunks_of_one_frame_are_refused() -> None:
    one = receipt()
    one.chunk(chunk(0))
    with pytest.raises(PayloadError, match="two different chunks for frame 0"):
        one.chunk(chunk(0, digest=b"x" * 32))


@pytest.mark.parametrize(
    "sealed",
    [seal(chunk(1)), seal(), seal(chunk(0, digest=b"x" * 32)), seal(chunk(0, content=b"x"))],
    ids=["another frame", "none", "another body", "other content"],
)
def test_a_chunk_that_was_not_sealed_is_refused(sealed: Seal) -> None:
    one = receipt()
    one.chunk(chunk(0))
    with pytest.raises(PayloadError, match="frame 0 is not the sealed one"):
        one.seal(sealed)


@pytest.mark.parametrize(
    "late", [chunk(1), chunk(0, digest=b"x" * 32), chunk(0, content=b"x")], ids=["frame", "body", "content"]
)
def test_a_chunk_that_was_not_sealed_is_refused_after_the_seal_too(late: Chunk) -> None:
    one = receipt()
    one.seal(seal(chunk(0)))
    with pytest.raises(PayloadError, match="is not the sealed one"):
        one.chunk(late)


def test_a_refused_chunk_does_not_complete_an_attempt() -> None:
    one = receipt()
    one.seal(seal(chunk(0)))
    with pytest.raises(PayloadError):
        one.chunk(chunk(0, digest=b"x" * 32))
    assert not one.complete


def test_a_seal_that_lists_a_frame_twice_is_refused() -> None:
    with pytest.raises(PayloadError, match="lists a frame twice"):
        receipt().seal(seal(chunk(0), chunk(0)))


@pytest.mark.parametrize("base", [None, Identity(RUN, 1, 0, 1)], ids=["no base", "another base"])
def test_a_seal_from_another_base_than_the_opening_is_refused(base: Identity | None) -> None:
    with pytest.raises(PayloadError, match="its seal starts from"):
        receipt().seal(seal(base=base))


OTHERS = [Identity("other", 1, 2, 1), Identity(RUN, 2, 2, 1), Identity(RUN, 1, 3, 1), Identity(RUN, 1, 2, 2)]


@pytest.mark.parametrize("identity", OTHERS, ids=["run", "term", "version", "attempt"])
def test_a_chunk_of_another_attempt_is_refused(identity: Identity) -> None:
    with pytest.raises(RunMismatch, match="expected version 2"):
        receipt().chunk(chunk(0, identity=identity))


@pytest.mark.parametrize("identity", OTHERS, ids=["run", "term", "version", "attempt"])
def test_a_seal_of_another_attempt_is_refused(identity: Identity) -> None:
    with pytest.raises(RunMismatch, match="expected version 2"):
        receipt().seal(seal(identity=identity))


def test_an_attempt_of_another_run_is_refused() -> None:
    with pytest.raises(RunMismatch, match="expected run run, found other"):
        receipt(identity=Identity("other", 1, 2, 1))


def test_an_attempt_of_a_superseded_publisher_is_refused() -> None:
    with pytest.raises(RunMismatch, match="superseded publisher: the head is at term 2"):
        receipt(term=2)


def test_an_attempt_of_a_later_term_than_the_heads_is_accepted() -> None:
    assert receipt(identity=Identity(RUN, 3, 2, 1)).identity.term == 3


@pytest.mark.parametrize(
    "holds",
    [None, Identity(RUN, 1, 0, 1), Identity(RUN, 1, 1, 2), Identity(RUN, 2, 1, 1), Identity("other", 1, 1, 1)],
    ids=["nothing", "an older version", "another attempt", "another term", "another run"],
)
def test_a_delta_from_a_version_that_is_not_held_is_refused(holds: Identity | None) -> None:
    with pytest.raises(BaseMismatch, match="starts from version 1"):
        receipt(holds=holds)


@pytest.mark.parametrize("holds", [VERSION_2, Identity(RUN, 1, 3, 1)], ids=["the same", "a newer one"])
def test_an_anchor_that_is_not_newer_than_what_is_held_is_refused(holds: Identity) -> None:
    with pytest.raises(BaseMismatch, match="not newer"):
        receipt(base=None, holds=holds)


def test_a_delta_that_goes_back_is_refused() -> None:
    with pytest.raises(BaseMismatch, match="not newer"):
        receipt(base=VERSION_2, holds=VERSION_2)


@pytest.mark.parametrize("holds", [None, VERSION_1], ids=["nothing", "an older version"])
def test_an_anchor_needs_no_base(holds: Identity | None) -> None:
    assert receipt(base=None, holds=holds).base is None


@settings(deadline=None, max_examples=200)
@given(st.sets(st.integers(0, 5)), st.lists(st.integers(0, 5), max_size=12), st.integers(0, 12))
def test_in_any_order_it_is_complete_exactly_when_the_sets_are_equal(
    sealed: set[int], coming: list[int], when: int
) -> None:
    one, foreign = receipt(), False
    events: list[Any] = [chunk(frame) for frame in coming]
    events.insert(when, seal(*map(chunk, sealed)))
    for event in events:
        try:
            one.seal(event) if isinstance(event, Seal) else one.chunk(event)
        except PayloadError:
            foreign = True
            break
    assert foreign == (not set(coming) <= sealed)
    assert foreign or one.complete == (set(coming) == sealed)


# ---------------------------------------------------------------------- what the head says of an attempt


@pytest.mark.parametrize(
    ("committed", "term", "decided"),
    [
        (None, 2, None),
        (Identity("run", 2, 3, 1), 2, None),
        (Identity("run", 2, 4, 1), 2, True),
        (Identity("run", 2, 4, 2), 2, False),
        (Identity("run", 1, 4, 1), 2, False),
        (Identity("run", 2, 5, 1), 2, False),
        (Identity("run", 2, 3, 1), 3, False),
        (Identity("run", 2, 4, 1), 3, True),
    ],
)
def test_the_head_names_an_attempt_or_another_or_nothing_yet(
    committed: Identity | None, term: int, decided: bool | None
) -> None:
    assert verdict(Identity("run", 2, 4, 1), committed, term) is decided
