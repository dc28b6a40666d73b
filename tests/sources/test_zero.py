"""Flat partitions as sources, in real processes: one interval each, and the padding at the end is never read."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
from support import partitioned
from support.ranks import run

from dcr.probing.bits import bits_of
from dcr.sources.zero import Partition


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run(4, partitioned.cases)


def test_all_ranks_together_publish_the_parameters_cast(four: Any) -> None:
    assert all(facts["exact"] for facts in four)


def test_a_step_on_the_partitions_is_seen_and_garbage_in_the_padding_is_not(four: Any) -> None:
    assert all(facts["stepped"] for facts in four)


def test_seventy_elements_over_four_ranks_leave_two_unread(four: Any) -> None:
    assert [facts["read"].get("w") for facts in four] == [18, 18, 18, 16]
    assert [facts["read"].get("small") for facts in four] == [1, 1, 1, None]


def test_a_module_that_deepspeed_partitioned_is_read_by_its_attributes(four: Any) -> None:
    expected = {name.replace(".", "_"): bits_of(value).tolist() for name, value in partitioned.values().items()}
    assert all(facts["module"] == expected | {"steps": [0]} for facts in four)


def test_replicas_are_owned_once_and_evenly(four: Any) -> None:
    elems = [facts["replicated"] for facts in four]
    assert sum(elems) == sum(math.prod(shape) for shape in partitioned.SHAPES.values())
    assert max(elems) - min(elems) <= 1


def test_partitions_that_do_not_make_up_the_parameter_are_refused(four: Any) -> None:
    assert all("w (68 of 70 elements)" in facts["refused"] for facts in four)


@pytest.mark.parametrize(("index", "held"), [(0, (0, 18)), (2, (36, 54)), (3, (54, 70)), (4, None)])
def test_a_partition_is_one_interval(index: int, held: tuple[int, int] | None) -> None:
    box = Partition(partitioned.torch.zeros(18), (7, 10), index).box()
    assert (box.there0, box.there0 + box.numel) == (held or (0, 0))


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeeds_own_partitions_are_what_it_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        monkeypatch.setenv(name, value)
    for facts in run(2, partitioned.deepspeed_trained):
        assert facts["exact"]
        assert facts["changed"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
        assert facts["local"][0] == 0
