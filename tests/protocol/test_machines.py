"""The two state machines: what their tables say, that machines follow them, and that code drives each event."""

from __future__ import annotations

import ast
import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import dcr
from dcr.errors import StateError
from dcr.protocol.machines import (
    ATTEMPT,
    MAY_SERVE,
    MEMBER,
    AttemptEvent,
    AttemptMachine,
    AttemptState,
    MemberEvent,
    MemberMachine,
    MemberState,
    verdict,
)
from dcr.protocol.wire import Identity

Table = Mapping[Any, Mapping[Any, Any]]
KINDS = [(ATTEMPT, AttemptMachine, AttemptEvent), (MEMBER, MemberMachine, MemberEvent)]
PAIRS = [
    pytest.param(table, machine, state, event, id=f"{type(state).__name__}-{state.value}-{event.value}")
    for table, machine, events in KINDS
    for state in table
    for event in events
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


def into(table: Table, state: enum.Enum) -> set[tuple[Any, Any]]:
    """The (state, event) pairs that lead to a state."""
    return {(before, event) for before, events in table.items() for event, then in events.items() if then is state}


def machine_in(kind: type[Any], state: Any) -> Any:
    machine = kind()
    machine.state = state
    return machine


# ---------------------------------------------------------------------- the tables


@pytest.mark.parametrize(("table", "kind", "state", "event"), LISTED)
def test_a_listed_event_leads_to_the_state_in_the_table(table: Table, kind: type[Any], state: Any, event: Any) -> None:
    machine = machine_in(kind, state)
    assert machine.move(event) is table[state][event]
    assert machine.state is table[state][event]


@pytest.mark.parametrize(("table", "kind", "state", "event"), UNLISTED)
def test_an_event_that_is_not_listed_is_refused_naming_those_that_are(
    table: Table, kind: type[Any], state: Any, event: Any
) -> None:
    machine = machine_in(kind, state)
    with pytest.raises(StateError) as caught:
        machine.move(event)
    legal = ", ".join(one.value for one in table[state]) or "nothing: it is final"
    assert str(caught.value) == f"{event.value!r} is not legal in state {state.value!r}; legal: {legal}"
    assert machine.state is state


@pytest.mark.parametrize(("states", "table"), [(AttemptState, ATTEMPT), (MemberState, MEMBER)])
def test_every_state_is_in_its_table(states: type[enum.Enum], table: Table) -> None:
    assert set(states) == set(table)


@pytest.mark.parametrize(("table", "start"), [(ATTEMPT, AttemptState.SENDING), (MEMBER, MemberState.EMPTY)])
def test_every_state_can_be_reached(table: Table, start: enum.Enum) -> None:
    assert reachable(table, start) == set(table)


@pytest.mark.parametrize("state", AttemptState)
def test_every_attempt_can_end(state: AttemptState) -> None:
    assert any(not ATTEMPT[end] for end in reachable(ATTEMPT, state))


@pytest.mark.parametrize("state", MemberState)
def test_every_member_can_come_to_serve(state: MemberState) -> None:
    assert MemberState.SERVING in reachable(MEMBER, state)


def test_only_a_swap_that_happened_commits() -> None:
    assert into(ATTEMPT, AttemptState.COMMITTED) == {
        (AttemptState.SWAPPING, AttemptEvent.SWAPPED),
        (AttemptState.UNKNOWN, AttemptEvent.HEAD_IS_OURS),
    }


def test_only_a_vote_that_is_carried_leads_to_the_first_swap() -> None:
    assert into(ATTEMPT, AttemptState.SWAPPING) == {
        (AttemptState.VOTING, AttemptEvent.CARRIED),
        (AttemptState.UNKNOWN, AttemptEvent.HEAD_IS_BASE),
    }


def test_once_a_swap_was_tried_the_attempt_is_not_given_up() -> None:
    assert AttemptState.ABORTED not in reachable(ATTEMPT, AttemptState.SWAPPING)


def test_the_final_states_of_an_attempt() -> None:
    final = {AttemptState.COMMITTED, AttemptState.ABORTED, AttemptState.FENCED}
    assert {state for state in AttemptState if not ATTEMPT[state]} == final


def test_only_what_the_head_names_is_installed() -> None:
    assert into(MEMBER, MemberState.COMMITTED) == {
        (MemberState.PREPARED, MemberEvent.COMMITTED),
        (MemberState.INSTALLING, MemberEvent.UNDONE),
    }
    assert into(MEMBER, MemberState.INSTALLING) == {(MemberState.COMMITTED, MemberEvent.INSTALL)}


def test_a_prepared_member_never_decides_alone() -> None:
    assert set(MEMBER[MemberState.PREPARED]) == {MemberEvent.COMMITTED, MemberEvent.DROPPED}


def test_a_committed_version_is_dropped_only_for_a_seed() -> None:
    assert reachable(MEMBER, MemberState.COMMITTED, without=frozenset({MemberState.SERVING})) >= {MemberState.SEEDING}
    ways = set(MEMBER[MemberState.COMMITTED])
    assert ways == {MemberEvent.INSTALL, MemberEvent.LOST_TRUST}


def test_a_poisoned_member_can_only_be_seeded() -> None:
    assert MEMBER[MemberState.POISONED] == {MemberEvent.SEED: MemberState.SEEDING}


def test_a_member_without_one_whole_version_may_not_serve() -> None:
    assert {MemberState.SERVING, MemberState.FETCHING, MemberState.PREPARED, MemberState.COMMITTED} == MAY_SERVE


# ---------------------------------------------------------------------- what is driven


@pytest.mark.parametrize("events", [AttemptEvent, MemberEvent])
def test_each_event_is_one_that_code_drives(events: type[enum.Enum]) -> None:
    driven = set[str]()
    for path in Path(dcr.__file__).parent.rglob("*.py"):
        if path.name != "machines.py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == events.__name__:
                    driven.add(node.attr)
    assert driven == set(events.__members__)


HELD = Identity("run", 1, 2, 1)


@pytest.mark.parametrize("state", MemberState)
def test_a_member_holds_a_version_where_it_may_serve_and_while_it_can_be_undone(state: MemberState) -> None:
    machine = MemberMachine()
    ways = {
        MemberState.EMPTY: [],
        MemberState.INSPECTING: [MemberEvent.OPENED],
        MemberState.SERVING: [MemberEvent.RECOGNISED],
        MemberState.FETCHING: [MemberEvent.RECOGNISED, MemberEvent.OPENED],
        MemberState.PREPARED: [MemberEvent.OPENED, MemberEvent.PREPARED, MemberEvent.RECOGNISED],
        MemberState.COMMITTED: [
            *(MemberEvent.RECOGNISED, MemberEvent.OPENED, MemberEvent.PREPARED, MemberEvent.COMMITTED)
        ],
        MemberState.INSTALLING: [
            *(MemberEvent.RECOGNISED, MemberEvent.OPENED, MemberEvent.PREPARED, MemberEvent.COMMITTED),
            MemberEvent.INSTALL,
        ],
        MemberState.SEEDING: [MemberEvent.RECOGNISED, MemberEvent.LOST_TRUST, MemberEvent.SEED],
        MemberState.POISONED: [MemberEvent.SEED, MemberEvent.FAILED],
    }
    for event in ways[state]:
        machine.move(event, HELD)
    assert machine.state is state
    assert machine.holds == (HELD if state in MAY_SERVE | {MemberState.INSTALLING} else None)


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
