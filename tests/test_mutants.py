"""Each rule of the protocol, switched off, is found out by the history: the state machine can fail.

Every case aims one run at one rule. With the rule off the history must find what the case says; with all rules on the
same run must be well. Where several checks hold a rule, all of them are off together, and each of them alone must be
enough: that also shows that each switch hits the code that is used.

Rules of a refit that have no code here, and so no case:

    given-up indices are sent again     nothing uncommitted is in live memory, so an attempt leaves nothing behind
    write-ahead log, journal, mark      no memory outlives its process: what is found in it is read before it is
                                        believed, and a restarted trainer proves its bits or sends an anchor
    healing by a union of indices       a member without a clean base is seeded from the store
    several versions in flight          a publisher has one
    casts, waived names, maps           the loaders' own tests: a digest cannot see a wrong map over equal bits
    relays, scrubbing, rollback         there are none
    one patch per frame and attempt     test_baseline.py, and "a chunk belongs to the attempt" at the other end
"""

from __future__ import annotations

import pytest
import rules
from mutants import CASES, Case
from switches import Switch

NAMES = {id(switch): name for name, switch in vars(rules).items()}
ALONE = [(case, kept) for case in CASES if len(case.held_by) > 1 for kept in case.held_by]


def name(value: object) -> str:
    return value.rule if isinstance(value, Case) else NAMES[id(value)]


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_rule_that_is_off_is_found_out(case: Case) -> None:
    found = case.finds(*case.also_off, *case.held_by)
    assert found is not None, "nothing was found"
    assert case.finding in found.split("\n")[0], found


@pytest.mark.parametrize("case", CASES, ids=name)
def test_with_all_rules_on_the_same_run_is_well(case: Case) -> None:
    assert case.finds() is None


@pytest.mark.parametrize(("case", "kept"), ALONE, ids=name)
def test_of_checks_that_hold_one_rule_each_is_enough(case: Case, kept: Switch) -> None:
    others = (switch for switch in case.held_by if switch is not kept)
    assert case.finds(*case.also_off, *others) is None
