"""Rules that a user passes, and numbers of layers: Gated Delta Nets, virtual stages, multi-token prediction."""

from __future__ import annotations

from typing import Any

import pytest
from support import megatron_rules, megatrons
from support.megatrons import Model
from support.ranks import run

DELTA_NETS = {"gated delta net, tp 1": 1, "gated delta net, tp 2": 2, "gated delta net, tp 4": 4}
PIPELINE = Model(layers=4, tp=2)
PIPELINES = {"vp 2 x pp 2 x tp 2": megatron_rules.interleaved, "with a layer of mtp": megatron_rules.predicting}
BA = "model.layers.0.linear_attn.in_proj_ba.weight"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    """Facts of every one of four ranks, by case."""
    cases: list[tuple[str, Any, Any]] = [(name, megatron_rules.delta_net, size) for name, size in DELTA_NETS.items()]
    cases += [(name, target, PIPELINE) for name, target in PIPELINES.items()]
    return run(4, megatrons.every, [*cases, ("declared", megatron_rules.declared, 4)])


@pytest.mark.parametrize("case", [*DELTA_NETS, *PIPELINES])
def test_all_ranks_together_publish_the_checkpoint(case: str, world: list[dict[str, Any]]) -> None:
    for facts in (facts[case] for facts in world):
        assert facts["names"]
        assert (facts["differ"], facts["residual"]) == ([], [])
    assert sum(facts[case]["owned"] for facts in world) == world[0][case]["bytes"]


@pytest.mark.parametrize("case", DELTA_NETS)
def test_each_element_of_a_delta_net_is_where_its_layout_puts_it(case: str, world: list[dict[str, Any]]) -> None:
    for facts in (facts[case] for facts in world):
        assert (facts["misplaced"], facts["exported"]) == ([], [])
        assert facts["boxes"] <= 4  # replicas share their range


def test_a_map_with_two_parts_exchanged_fails_its_certificate_and_still_comes_right(
    world: list[dict[str, Any]],
) -> None:
    for facts in (facts["declared"] for facts in world):
        assert facts == {"right": {"residual": [], "differ": []}, "exchanged": {"residual": [BA], "differ": []}}
