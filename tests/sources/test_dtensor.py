"""Sharded modules as sources, in real processes: all ranks publish `full_tensor`, bit for bit, each element once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from support import sharded
from support.ranks import run

from dcr.layout.schema import SHELLS, WIDTHS

FOUR = {
    "fsdp, 10 rows over 4, 5 out": (sharded.fsdp, 10, 5),
    "fsdp, 7 rows over 4": (sharded.fsdp, 7, 3),
    "tp": (sharded.tp, 8, 5),
    "fsdp x tp, 10 rows": (sharded.fsdp_tp, 10, 5),
    "replicas": (sharded.hsdp, 10, 5),
    "masters": (sharded.masters, 10, 5, "bfloat16"),
    "data parallel": (sharded.plain, 10, 5),
}
TWO = {
    "fsdp, 7 rows over 2": (sharded.fsdp, 7, 1),
    "tp": (sharded.tp, 8, 5),
    "masters": (sharded.masters, 7, 5, "bfloat16"),
    "tied": (sharded.masters, 7, 7, "bfloat16", True),
}


@pytest.fixture(scope="module")
def worlds() -> Callable[[Any], list[dict[str, Any]]]:
    """Facts of every rank, given (number of ranks, name of the case); all cases of a size share a world."""

    @cache
    def world(size: int) -> list[dict[str, dict[str, Any]]]:
        return run(size, sharded.all_of, list((FOUR if size == 4 else TWO).items()))

    return lambda case: [facts[case[1]] for facts in world(case[0])]


CASES = [(4, name) for name in FOUR] + [(2, name) for name in TWO]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_ranks_together_publish_the_full_tensors(case: Any, worlds: Any) -> None:
    for facts in worlds(case):
        assert (facts["differ"], facts["missing"]) == ([], [])
        assert facts["unchanged"] == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_parameter_is_direct_in_a_few_boxes(case: Any, worlds: Any) -> None:
    for facts in worlds(case):
        assert facts["residual"] == []
        assert facts["boxes"] <= 3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_own_all_bytes_once(case: Any, worlds: Any) -> None:
    assert sum(facts["owned_bytes"] for facts in worlds(case)) == worlds(case)[0]["all_bytes"]


@pytest.mark.parametrize("case", [(4, "replicas"), (4, "data parallel")], ids=str)
def test_replicas_own_even_shares(case: Any, worlds: Any) -> None:
    owned = [facts["owned_bytes"] for facts in worlds(case)]
    if case == (4, "data parallel"):
        assert max(owned) - min(owned) <= 16
    else:
        assert abs(owned[0] - owned[2]) <= 16
        assert abs(owned[1] - owned[3]) <= 16


def test_masters_are_published_in_the_checkpoints_dtype(worlds: Any) -> None:
    assert worlds((4, "masters"))[0]["dtypes"] == ["bfloat16", "int64"]


@pytest.fixture(scope="module")
def odd() -> list[dict[str, Any]]:
    return run(4, sharded.odd_cases)


def test_a_map_that_the_gather_contradicts_is_demoted_and_its_tensors_still_come_right(odd: Any) -> None:
    for facts in (rank["misplaced"] for rank in odd):
        assert facts["differ"] == []
        assert [tensors for tensors, _ in facts["residual"]] == [(4,), (3,)]
        assert all("_StridedShard" in reason for _, reason in facts["residual"])


def test_a_shard_that_moved_is_bound_again_and_one_that_changed_is_noticed_on_its_rank(odd: Any) -> None:
    assert all(rank["rebound"]["found"] for rank in odd)
    assert all("up.weight: expected torch.float32" in rank["rebound"]["said"] for rank in odd)


def test_a_module_that_fsdp1_wraps_is_refused_by_name_and_trains_on(odd: Any) -> None:
    for rank in odd:
        assert len(rank["flattened"]) == 4
        assert all(said.startswith("1 is wrapped in FullyShardedDataParallel") for said in rank["flattened"])
        assert all("fully_shard" in said for said in rank["flattened"])


def test_ranks_that_disagree_on_a_tensor_are_refused(odd: Any) -> None:
    assert all("weight" in rank["apart"] and "another rank has" in rank["apart"] for rank in odd)


def test_tensors_of_one_rank_only_are_in_every_ranks_schema(odd: Any) -> None:
    names = {f"layers_{rank}.{part}" for rank in range(4) for part in ("weight", "bias")} | {"norm.weight", "norm.bias"}
    for rank, facts in enumerate(odd):
        owned = facts["pipelined"]
        assert set(owned) == names
        assert {name for name, elems in owned.items() if elems and "norm" not in name} == {
            f"layers_{rank}.weight",
            f"layers_{rank}.bias",
        }


def test_an_exporter_that_works_on_dtensors_is_direct(odd: Any) -> None:
    assert all(rank["exported"] == {"differ": [], "residual": []} for rank in odd)


def test_shards_of_every_dtype_are_direct_whatever_a_backend_can_gather() -> None:
    for facts in run(2, sharded.every_dtype):
        assert (facts["differ"], facts["residual"]) == ([], 0)
        assert facts["tensors"] == 2 * (len(WIDTHS) + len(SHELLS))
