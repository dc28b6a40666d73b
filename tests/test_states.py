"""The real ends as a state machine: drawn plans of work and faults, checked against the history from outside."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from plans import plans
from worlds import Plan, World

EXAMPLES = max(500, settings.default.max_examples)  # 10,000 with --hypothesis-profile=long


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans())
def test_any_plan_leaves_only_committed_bits_served_and_the_run_well(plan: Plan) -> None:
    World(plan).run()
