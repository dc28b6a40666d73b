"""Tensors that are said to be frozen cost no bytes in a delta, and a drift of one is found and named."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from simulation import hooks
from simulation.switches import callers
from support.refits import Rollout, publish, require_equal, running, state
from torch import nn

import dcr
from dcr import kernels
from dcr.errors import DigestMismatch, FrozenChanged, OptionError, SchemaError
from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import Shard
from dcr.layout.schema import Schema, TensorSpec
from dcr.publish.copies import Copies, differing
from dcr.publish.frozen import SLICES, frozen_tensors, slice_of
from dcr.seams import Copy
from dcr.testing.memory import MemoryTransport

pytestmark = pytest.mark.anyio
URL, FRAME = "memory:///run", 4


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Adapted(nn.Module):
    """A base of ten frames, and an adapter of two."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.arange(40, dtype=torch.float32))
        self.adapter = nn.Parameter(torch.zeros(8))


@asynccontextmanager
async def publishing(model: nn.Module) -> AsyncIterator[dcr.Publisher]:
    source = dcr.source(model, frozen=["ba*"])
    async with dcr.publisher(URL, source=source, transport=MemoryTransport(), frame_elems=FRAME) as publisher:
        await publish(publisher, 0)
        yield publisher


def step(model: Adapted) -> None:
    with torch.no_grad():
        model.adapter.add_(1)


async def test_one_slice_is_compared_per_version_and_nothing_else_of_what_is_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, compared = Adapted(), list[int]()
    honest = kernels.capture

    def counted(table: object, keys: object, base: np.ndarray, kind: int) -> object:
        compared.append(len(base))
        return honest(table, keys, base, kind)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "capture", counted)
    async with publishing(model) as publisher:
        for version in (1, 2, 3):
            step(model)
            compared.clear()
            report = await publish(publisher, version)
            assert sum(compared) == 8 + FRAME
            assert (report.changed, report.chunks) == (8, 2)


@pytest.mark.parametrize("element", [0, 17, 39])
async def test_a_drift_anywhere_is_an_error_that_names_the_tensor_until_it_is_put_back(element: int) -> None:
    model, frames = Adapted(), 10
    async with publishing(model) as publisher:
        model.base.data[element] += 1
        told = []
        for version in range(1, frames + 2):
            step(model)
            try:
                await publish(publisher, version)
            except FrozenChanged as error:
                told.append(str(error))
        assert len(told) >= 2  # found at the latest in the tenth, and told again with each one after it
        assert all(said.startswith("base must not change") for said in told)
        model.base.data[element] -= 1
        assert (await publish(publisher, frames + 2)).changed == 8


@pytest.mark.parametrize("element", [0, 17, 39])
async def test_a_version_without_a_base_compares_all_that_is_frozen_with_what_was_published(element: int) -> None:
    model = Adapted()
    async with publishing(model) as publisher:
        step(model)
        with callers(hooks.BASELINE_FOLD) as baselines:
            await publish(publisher, 1)
        baselines[0].clear()  # as when its memory was found to have rotted
        model.base.data[element] += 1
        for version in (2, 3):
            with pytest.raises(FrozenChanged, match="base must not change"):
                await publish(publisher, version)
        model.base.data[element] -= 1
        step(model)
        report = await publish(publisher, 4)
        assert (report.is_anchor, report.changed) == (True, 48)


async def test_a_baseline_that_rotted_where_all_is_frozen_blames_nobody_and_is_made_anew() -> None:
    model = Adapted()
    async with publishing(model) as publisher:
        with callers(hooks.BASELINE_FOLD) as baselines:
            await publish(publisher, 1)
        frames = map(baselines[0].base, range(len(baselines[0].layout.frames)))
        rotten = next(bits for bits in frames if bits is not None and bits[1])
        rotten[1] ^= 1
        told, version = "", 1
        while not told and version < 10:
            version += 1
            step(model)
            try:
                await publish(publisher, version)
            except DigestMismatch as error:
                told = str(error)
        assert "the baseline" in told
        assert (await publish(publisher, version + 1)).is_anchor


async def test_what_is_frozen_is_what_the_run_holds_when_a_publisher_goes_on_from_it() -> None:
    model, transport = Adapted(), MemoryTransport()
    for version in (0, 1):
        source = dcr.source(model, frozen=["base"])
        publisher = dcr.publisher(URL, source=source, transport=transport, frame_elems=FRAME)
        with callers(hooks.BASELINE_ADOPT) as baselines:
            await publisher.open()
        async with aclosing(publisher):
            if version:
                assert publisher.version == 0
                baselines[0].clear()
                model.base.data[3] += 1
                with pytest.raises(FrozenChanged, match="base must not change"):
                    await publish(publisher, version)
                break
            await publish(publisher, version)


async def test_an_anchor_holds_what_is_frozen_and_engines_follow(tmp_path: object) -> None:
    model, rollout = Adapted(), Rollout(Adapted())
    async with running(tmp_path, [rollout]) as url:  # type: ignore[arg-type]
        source = dcr.source(model, frozen=["base"])
        async with dcr.publisher(url, source=source, frame_elems=FRAME, anchor_every=1) as publisher:
            for version in (1, 2):
                step(model)
                await publish(publisher, version)
                await rollout.reached(version)
                require_equal(rollout.module, state(model))
        late = Rollout(Adapted())
        async with running(tmp_path, [late]):  # type: ignore[arg-type]
            await late.reached(2)
            require_equal(late.module, state(model))


SCHEMA = Schema((TensorSpec("a.weight", "float32", (2,), ("b.weight",)), TensorSpec("a.bias", "float32", (2,))))
WITH_B = Schema((*SCHEMA.tensors, TensorSpec("b.bias", "float32", (2,))))


def test_patterns_pick_tensors_by_name() -> None:
    assert frozen_tensors(["*.bias"], SCHEMA) == {1}
    assert frozen_tensors(["a.*"], SCHEMA) == {0, 1}


def test_a_pattern_that_freezes_one_tensor_and_fits_a_further_name_of_another_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"fits b.weight, which is tied to a.weight and published under that name"):
        frozen_tensors(["b.*"], WITH_B)


def test_a_further_name_may_fit_a_pattern_where_the_first_one_is_frozen_by_another() -> None:
    assert frozen_tensors(["b.*", "a.w*"], WITH_B) == {0, 2}


@pytest.mark.parametrize(
    ("patterns", "error", "said"),
    [
        (["c.*"], SchemaError, "'c.*' fits no tensor; names here are 'a.weight'"),
        (["b.*"], SchemaError, "fits b.weight, which is tied to a.weight and published under that name"),
        ("a.*", OptionError, r"write frozen=\["),
        ([3], OptionError, r"found \[3\]"),
    ],
)
def test_patterns_that_freeze_nothing_are_refused(patterns: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        frozen_tensors(patterns, SCHEMA)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1, SLICES - 1, SLICES, 3 * SLICES + 5])
def test_all_are_looked_at_once_in_as_many_turns_as_the_documents_say(count: int) -> None:
    items = list(range(count))
    seen = [item for turn in range(7, 7 + min(count, SLICES)) for item in slice_of(items, turn)]
    assert sorted(seen) == items


def test_copies_of_what_is_frozen_are_compared_a_slice_at_a_time() -> None:
    """Two ranks' copies, one of which drifted: found within as many turns as there are slices, and at once if asked."""
    schema = Schema(tuple(TensorSpec(f"t{i}", "float32", (2,)) for i in range(5)))
    shards = tuple(Shard(i, i, Box(0, 0, (Dim(2, 1, 1),))) for i in range(5))
    source = SimpleNamespace(schema=schema, copies=[Copy(b"k" * 16, shards)], frozen={1, 2, 3, 4})
    copies = Copies(source, 100)  # type: ignore[arg-type]
    one = [np.arange(2, dtype=np.uint32) for _ in range(5)]
    other = [bits + np.uint32(i == 3) for i, bits in enumerate(one)]
    found = [bool(differing([copies.roots(one, turn), copies.roots(other, turn)])) for turn in range(8)]
    assert sum(found) == 2
    assert differing([copies.roots(one), copies.roots(other)])


@pytest.mark.parametrize("element", [0, 4, 9])
def test_copies_that_differ_in_any_frame_of_a_tensor_are_found(element: int) -> None:
    schema = Schema((TensorSpec("w", "float32", (10,)),))
    source = SimpleNamespace(schema=schema, copies=[Copy(b"k" * 16, (Shard(0, 0, Box(0, 0, (Dim(10, 1, 1),))),))])
    copies = Copies(source, FRAME)  # type: ignore[arg-type]
    one = np.arange(10, dtype=np.uint32)
    other = one.copy()
    other[element] += 1
    assert differing([copies.roots([one]), copies.roots([other])])
    assert not differing([copies.roots([one]), copies.roots([one.copy()])])
