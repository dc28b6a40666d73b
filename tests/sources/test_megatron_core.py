"""megatron-core itself, in real processes: what all ranks publish after training is what its own layout says.

Skipped where megatron-core is not installed; tests/sources/test_megatron.py restates the layouts and always runs.
"""

from __future__ import annotations

from typing import Any

import pytest
from support import megatron_models
from support.megatron_models import Case
from support.ranks import run

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.timeout(300)

CASES = {
    "tp 1": Case(),
    "tp 2": Case(tp=2, groups=4),
    "tp 4, kv heads 8/2": Case(tp=4, groups=2),
    "tp 4, kv heads 32/8": Case(tp=4, heads=32),
    "tp 2 x pp 2": Case(tp=2, pp=2),
    "tp 2 x pp 2, tied": Case(tp=2, pp=2, tied=True),
    "experts, ep 2 x etp 2": Case(tp=2, experts=4, ep=2, etp=2),
    "experts, ep 4": Case(experts=8, ep=4),
}


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    return run(4, megatron_models.every, list(CASES.items()))


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_together_publish_what_megatron_core_holds(name: str, world: Any) -> None:
    for facts in (rank[name] for rank in world):
        assert (facts["missing"], facts["differ"], facts["residual"]) == ([], [], [])


@pytest.mark.parametrize("name", CASES)
def test_training_changed_what_is_published(name: str, world: Any) -> None:
    for facts in (rank[name] for rank in world):
        assert [name for name in facts["unchanged"] if "e_score" not in name] == []
