"""The real ends as a state machine: drawn plans of work and faults, checked against the history from outside."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from simulation.plans import plans
from simulation.storms import Fault
from simulation.worlds import Arm, Plan, Publish, Rebind, Wait, World

EXAMPLES = max(500, settings.default.max_examples)  # 10,000 with --hypothesis-profile=long
FOUND = {
    "a Join that is lost, and a quorum": Plan(
        (Arm(Fault("member", "send", "lose", "Join")), Wait(1)), engines=1, quorum=1
    ),
    "a Commit that cannot be read": Plan(
        (Publish(), Wait(6000), Arm(Fault("member", "receive", "flip", "Commit", amount=1)), Publish(), Wait(6000)),
        engines=1,
    ),
    "a weight that is replaced during a seed": Plan(
        (
            Arm(Fault("member", "store", "stall", "Chunk", 2, 2500)),
            Publish(),
            Wait(2000),
            Rebind(),
            Wait(6000),
        ),
        engines=1,
    ),
    "a link that ends at one of several ranks": Plan(
        (Arm(Fault("publisher", "receive", "cut", "Ack", amount=1)), *[Publish()] * 4, Wait(1)),
        engines=1,
        trainer_ranks=2,
    ),
    "a weight that is replaced before a seed": Plan((Publish(), Wait(50), Rebind(), Wait(6000)), engines=1, busy=100),
}


@pytest.mark.timeout(3600)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans())
def test_any_plan_leaves_only_committed_bits_served_and_the_run_well(plan: Plan) -> None:
    World(plan).run()


@pytest.mark.parametrize("plan", FOUND.values(), ids=FOUND.keys())
def test_a_plan_that_has_found_a_defect_finds_none_any_more(plan: Plan) -> None:
    World(plan).run()
