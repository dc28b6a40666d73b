"""Megatron-core's layouts as sources, in real processes, against layouts restated from its documentation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from support import megatrons
from support.megatrons import Model
from support.ranks import run

FOUR = {
    "tp 1": Model(bias=True),
    "tp 2": Model(tp=2, bias=True),
    "tp 4": Model(tp=4, bias=True),
    "kv heads 32/8, tp 4": Model(heads=32, groups=8, tp=4),
    "kv heads 8/2, tp 4": Model(groups=2, tp=4, bias=True),
    "pp 2 x tp 2, tied": Model(tp=2, pp=2, tied=True),
    "pp 2, untied": Model(pp=2),
    "vocab 50257 padded": Model(vocab=50257, padded=50304, tp=4),
    "experts, sequential, ep 2 x etp 2": Model(experts=4, ep=2, etp=2, tp=2),
    "experts, packed, ep 2 x etp 2": Model(experts=4, ep=2, etp=2, style="packed"),
}
EIGHT = {
    "experts, grouped, ep 4 x etp 2": Model(experts=8, ep=4, etp=2, tp=2, style="grouped"),
    "experts, packed, ep 4 x etp 2, pp 1": Model(experts=8, ep=4, etp=2, style="packed"),
}
CASES = [(4, name) for name in FOUR] + [(8, name) for name in EIGHT]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def worlds() -> Callable[[Any], list[dict[str, Any]]]:
    """Facts of every rank, given (number of ranks, name of the case); all cases of a size share a world."""

    @cache
    def world(size: int) -> list[dict[str, Any]]:
        cases = [(name, megatrons.published, model) for name, model in (FOUR if size == 4 else EIGHT).items()]
        if size == 4:
            cases += [("masters", megatrons.masters, Model(tp=2)), ("swapped", megatrons.swapped, Model(tp=2))]
        return run(size, megatrons.every, cases)

    return lambda case: [facts[case[1]] for facts in world(case[0])]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_together_publish_the_checkpoint(case: Any, worlds: Any) -> None:
    for facts in worlds(case):
        assert facts["names"]
        assert (facts["differ"], facts["residual"]) == ([], [])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_own_all_bytes_once_and_in_few_boxes(case: Any, worlds: Any) -> None:
    assert sum(facts["owned"] for facts in worlds(case)) == worlds(case)[0]["bytes"]
    assert max(facts["boxes"] for facts in worlds(case)) <= 6


def test_flat_ranges_of_masters_are_published_rounded(worlds: Any) -> None:
    for facts in worlds((4, "masters")):
        assert facts == {"differ": [], "names": True, "residual": 0}


def test_swapped_halves_are_caught_and_still_come_right(worlds: Any) -> None:
    names = ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    for facts in worlds((4, "swapped")):
        assert facts == {"direct": 0, "residual": names, "differ": []}
