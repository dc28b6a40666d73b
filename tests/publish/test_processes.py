"""Publishers of several ranks, each in a process of its own: what engines get is `full_tensor()`, bit for bit."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from support import publishing, sharded
from support.publishing import MiB
from support.ranks import _rank, run

FOUR = {
    "fsdp, 10 rows over 4": (sharded.fsdp, 10, 5),
    "fsdp, 7 rows over 4": (sharded.fsdp, 7, 1),
    "tp": (sharded.tp, 8, 5),
    "fsdp x tp": (sharded.fsdp_tp, 10, 5),
    "replicas": (sharded.hsdp, 10, 5),
    "masters": (sharded.masters, 10, 5, "bfloat16"),
}
TWO = {"fsdp": (sharded.fsdp, 7, 1), "tp": (sharded.tp, 8, 5), "masters": (sharded.masters, 7, 5, "bfloat16")}
pytestmark = pytest.mark.timeout(600)  # torch starts six times
CASES = [(4, name) for name in FOUR] + [(2, name) for name in TWO]


@pytest.fixture(scope="module")
def worlds() -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Facts of every rank, by number of ranks and name of the case."""
    found = {}
    for size, cases in ((4, FOUR), (2, TWO)):
        by_rank = run(size, publishing.all_of, cases)
        found |= {(size, name): [facts[name] for facts in by_rank] for name in (*cases, "faulty")}
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_engine_gets_the_full_tensors_after_every_step(case: Any, worlds: Any) -> None:
    first, *others = worlds[case]
    assert first["differ"] == []
    assert [is_anchor for is_anchor, *_ in first["reports"]] == [True, False, False]
    assert all(0 < changed <= elements for _, _, changed, elements in first["reports"])
    assert all(facts["reports"] == first["reports"] for facts in others)
    if "masters" in case[1]:  # fp32 masters move by less than a bf16 can show
        assert all(changed < elements for is_anchor, _, changed, elements in first["reports"] if not is_anchor)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_publishing_runs_no_collective_of_the_trainers(case: Any, worlds: Any) -> None:
    """All groups but the publisher's own count what they run: nothing is gathered for tensors that have a map."""
    for facts in worlds[case]:
        assert facts["collectives"] == [0, 0, 0]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rank_holds_a_baseline_of_what_it_owns(case: Any, worlds: Any) -> None:
    for facts in worlds[case]:
        assert facts["held"] == facts["owned"]
    elements = worlds[case][0]["reports"][0][3]
    assert sum(facts["held"] for facts in worlds[case]) == elements


@pytest.mark.parametrize("size", [2, 4])
def test_an_error_on_one_rank_is_told_on_all_and_the_next_version_works(size: int, worlds: Any) -> None:
    """Then a chunk of that rank's is corrupted, and sent again; then all ranks start anew."""
    for rank, facts in enumerate(worlds[size, "faulty"]):
        assert facts["told"] == ("ValueError: on purpose" if rank == 1 else "RankError: rank 1: ValueError: on purpose")
        assert [version for version, again_bytes in facts["again"].items() if again_bytes] == [3]
        assert facts["differ"] == []
        assert facts["resumed"] == 4
        assert facts["goes_on_with"] == (5, False)


@pytest.fixture(scope="module")
def copies() -> list[dict[str, Any]]:
    return run(3, publishing.copies)


@pytest.mark.parametrize("case", ["ignored", "replicated"])
def test_copies_that_differ_are_an_error_that_names_tensor_and_ranks(case: str, copies: Any) -> None:
    """Rank 2 alone holds another bit, in the second version; the third is mended, and is a delta again."""
    for facts in (rank[case] for rank in copies):
        assert facts["told"].startswith("CopiesDiffer: ")
        assert "up.weight on ranks 0, 1 against rank 2" in facts["told"]
        assert "down.weight" not in facts["told"]
        assert (facts["differ"], facts["version"]) == ([], 3)


@pytest.mark.parametrize("case", ["ignored", "replicated", "names"])
def test_nothing_is_published_of_copies_that_differ(case: str, copies: Any) -> None:
    for before, after in (rank[case]["objects"] for rank in copies):
        assert before == after


def test_two_names_of_one_tensor_that_hold_different_bits_are_an_error(copies: Any) -> None:
    for facts in (rank["names"] for rank in copies):
        assert "embed.weight and head.weight are published as one tensor" in facts["told"]
        assert (facts["differ"], facts["version"]) == ([], 3)


def test_a_trainer_that_moves_its_weights_at_each_step_goes_on_and_is_told_at_publish_what_cannot_be() -> None:
    for rank, facts in enumerate(run(2, publishing.moved)):
        assert facts["told"].startswith(("" if rank == 1 else "rank 1: ") + "up.weight: expected torch.float32")
        assert facts["differ"] == []
        assert facts["anchors"] == [True, False, False, False]


def test_no_rank_holds_more_than_its_baseline_the_budget_and_what_changed() -> None:
    """A quarter of a gigabyte over four ranks, and 64 MiB for what one chunk takes while it is made and written."""
    world, tensors, elems, budget_bytes = 4, 8, 16 * MiB, 32 * MiB
    shard_bytes = 2 * tensors * elems // world
    for anchor, *deltas in run(world, publishing.peaks, tensors, elems, budget_bytes):
        assert anchor["bytes"] <= shard_bytes + budget_bytes + 64 * MiB
        for delta in deltas:
            own = delta["changed"] // world
            assert own > 300_000
            assert delta["bytes"] <= shard_bytes + budget_bytes + 12 * own + 64 * MiB
            assert delta["gathered"] < 200_000


@pytest.mark.parametrize(("doomed", "silent"), [(0, False), (1, False), (1, True)])
def test_a_rank_that_is_killed_or_hangs_ends_the_publisher_on_the_others(
    doomed: int, silent: bool, tmp_path: Path
) -> None:
    size, context = 3, multiprocessing.get_context("spawn")
    results = context.Queue()
    (tmp_path / "run").mkdir()
    args = (str(tmp_path), results, publishing.killed, (str(tmp_path / "run"), doomed, silent))
    ranks = [context.Process(target=_rank, args=(rank, size, *args), daemon=True) for rank in range(size)]
    for process in ranks:
        process.start()
    others = [rank for rank in range(size) if rank != doomed]
    for rank in others:
        ranks[rank].join(100)
    ranks[doomed].kill()
    for rank in others:
        record = json.loads((tmp_path / "run" / f"rank-{rank}.json").read_text())
        assert record["said"] == ["RanksLost", "StateError"]
        assert record["waited_s"] < 50
