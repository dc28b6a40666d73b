"""Every hook of the simulation's switches is there, and a run that is aimed at its rule goes through it."""

from __future__ import annotations

import pytest

from simulation import hooks, rules, switches
from simulation.hooks import Hook
from simulation.mutants import CASES
from simulation.switches import Switch

HOOKS = [value for value in vars(hooks).values() if isinstance(value, Hook)]


def counted(hook: Hook, calls: list[Hook]) -> Switch:
    """Notes each use of what is there, and changes nothing."""

    class Noted(frozenset):
        def __contains__(self, state: object) -> bool:
            calls.append(hook)
            return super().__contains__(state)

    @switches.becomes(hook)
    def noted(value: object) -> object:
        if isinstance(value, frozenset):
            return Noted(value)
        if isinstance(value, property):
            return property(lambda self: (calls.append(hook), value.fget(self))[1])
        return lambda *args, **named: (calls.append(hook), value(*args, **named))[1]

    return noted


@pytest.mark.parametrize("hook", HOOKS, ids=str)
def test_a_hook_is_used_by_the_run_that_is_aimed_at_its_rule(hook: Hook) -> None:
    aimed = [case for case in CASES if any(hook in switch.hooks for switch in (*case.held_by, case.accident))]
    calls: list[Hook] = []
    for case in aimed:
        case.finds(*case.also_off, counted(hook, calls))
        if calls:
            break
    assert calls


@pytest.mark.parametrize("hook", HOOKS, ids=str)
def test_a_hook_is_public(hook: Hook) -> None:
    assert not any(part.startswith("_") and part != "__init__" for part in f"{hook.module}.{hook.path}".split("."))


def test_every_rule_has_a_run_that_is_aimed_at_it() -> None:
    named = {name for name, value in vars(rules).items() if isinstance(value, Switch) and not name.startswith("_")}
    used = {id(switch) for case in CASES for switch in (*case.held_by, *case.also_off)}
    assert {name for name in named if id(vars(rules)[name]) not in used} == {"a_base_digest_is_the_ranks_own"}
