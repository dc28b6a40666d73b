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
    one patch per frame and attempt     memory/test_baseline.py, and "a chunk belongs to the attempt" at the other end
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import anyio
import pytest
from support.refits import Rollout, state
from support.rows import Model, trainer

from dcr.errors import VoteError
from dcr.protocol.wire import Identity
from dcr.testing.memory import MemoryTransport
from simulation import hooks, rules
from simulation.mutants import CASES, Case
from simulation.switches import Switch, becomes, off

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


@becomes(hooks.BASELINE_FOLD)
def the_second_rank_is_deaf(fold: Any) -> Any:
    """Its baseline takes the name of a version and not its bits."""

    def name_only(self: Any, identity: Identity) -> None:
        if self.base(0) is not None:  # the first rank owns the first frame
            return fold(self, identity)
        self.drop()
        self.identity = identity
        return None

    return name_only


async def after_a_rank_missed_a_commit(*switched_off: Switch) -> str:
    """What an engine holds of a version in which all bits go back to what they were before that commit."""
    model, transport = Model(), MemoryTransport()
    rollout = Rollout(model.engine())
    with off(switched_off):
        async with anyio.create_task_group() as tasks, trainer("memory:///run", model, 2, transport=transport) as ranks:
            tasks.start_soon(lambda: rollout.run("memory:///run", transport=transport))
            await ranks.publishers[0].joined(1)
            await ranks.publish(1)
            before = {name: bits.copy() for name, bits in model.bits.items()}
            model.step()
            with the_second_rank_is_deaf():
                await ranks.publish(2)
                await rollout.reached(2)
            model.bits |= before
            with suppress(VoteError):
                await ranks.publish(3)
                await rollout.reached(3)
            held, wanted = state(rollout.module), model.expected()
            tasks.cancel_scope.cancel()
    if rollout.version == 2:
        return "the version before"
    return "its bits" if all((held[name] == wanted[name]).all() for name in wanted) else "others"


RANKS_OWN = (rules.a_version_opens_on_the_heads_digest, rules.a_base_digest_is_the_ranks_own)


@pytest.mark.parametrize(
    ("switched_off", "holds"),
    [
        ((), "its bits"),
        (RANKS_OWN[:1], "the version before"),
        (RANKS_OWN[1:], "its bits"),
        (RANKS_OWN, "others"),
    ],
)
async def test_digests_of_the_ranks_own_baselines_show_that_one_missed_a_commit(
    switched_off: tuple[Switch, ...], holds: str
) -> None:
    assert await after_a_rank_missed_a_commit(*switched_off) == holds
