"""An exporter that does arithmetic on some tensors, on two ranks: only these are converted, and only when they must."""

from __future__ import annotations

from typing import Any

import pytest
from support import exporting
from support.ranks import run

NORM_BYTES, DECAY_BYTES, MERGED_BYTES = 2 * exporting.H, 4 * 8, 2 * 12 * exporting.H
DIRECT_BYTES = 2 * (50 + 12) * exporting.H
RESIDUAL_BYTES = NORM_BYTES + DECAY_BYTES + MERGED_BYTES


@pytest.fixture(scope="module")
def world() -> list[dict[str, Any]]:
    """Facts of both ranks."""
    return run(2, exporting.published)


def test_only_tensors_with_arithmetic_are_residual_and_the_report_lists_them(world: list[dict[str, Any]]) -> None:
    for facts in world:
        assert facts["direct"] == ["embed.weight", "up.weight"]
        assert [(names, nbytes) for names, _, nbytes in facts["residual"]] == [
            (("norm.weight",), NORM_BYTES),
            (("mixer.A",), DECAY_BYTES),
            (("q.weight",), MERGED_BYTES),
        ]
        norm, *others = (reason for _, reason, _ in facts["residual"])
        assert "random bits are not what its map says" in norm  # numbers plus one are numbers too
        assert all("the export does arithmetic" in reason for reason in others)
        assert facts["share"] == RESIDUAL_BYTES / (RESIDUAL_BYTES + DIRECT_BYTES)
        assert f"residual {100 * facts['share']:.2f} %" in facts["line"]


def test_a_version_converts_the_groups_whose_inputs_changed_on_any_rank(world: list[dict[str, Any]]) -> None:
    for facts in world:
        assert [(one["converted"], one["bytes"]) for one in facts["versions"]] == [
            (["norm", "A_log", "q"], RESIDUAL_BYTES),
            ([], 0),
            (["q"], MERGED_BYTES),
            (["norm", "A_log"], NORM_BYTES + DECAY_BYTES),
        ]


def test_an_engine_holds_what_the_exporter_makes_bit_for_bit(world: list[dict[str, Any]]) -> None:
    assert [one["differ"] for one in world[0]["versions"]] == [[]] * len(exporting.STEPS)
    assert all(one["changed"] for one in world[0]["versions"])


def test_a_copy_that_parted_on_one_rank_is_found_in_what_is_made_of_it() -> None:
    for told in run(2, exporting.parted):
        assert [said.partition(";")[0].rpartition(": ")[2] for said in told] == [
            "",
            "norm.weight on rank 0 against rank 1",
            "",  # rank 1's own rows: both have gathered the same
            "",
        ]
