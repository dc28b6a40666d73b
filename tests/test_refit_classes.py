"""Chunks that need the old bits, end to end: they are made where every member reads its base, and arrive from live
attempts, from the store, and while a member is seeded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.loaders import Through
from support.refits import FAST, Rollout, Weights, empty_like, publish, require_equal, running, set_bits, state

import dcr
from dcr.codecs.codec import CLASS_SPARSE
from dcr.errors import PayloadError
from dcr.stages.compress import Parcel

N = 200_000


class Spy:
    """A stage of one's own that keeps what passes: (codec, first byte of the body)."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def stage(self) -> Any:
        @dcr.stage
        def spy(parcel: Parcel) -> Parcel:
            self.seen.append((parcel.chunk.codec, parcel.body[0]))
            return parcel

        return spy

    def take(self) -> set[tuple[str, int]]:
        taken, self.seen = set(self.seen), []
        return taken


class Sharded(Through):
    """A loader whose weights can not be read a frame at a time."""

    reads_base = False
    read = None


BY_CLASS = {("classes", CLASS_SPARSE)}


def weights(rng: np.random.Generator) -> Weights:
    return Weights(
        {
            "w": torch.from_numpy(rng.standard_normal(N).astype(np.float32) * 0.02).bfloat16(),
            "scale": torch.from_numpy(rng.standard_normal(300).astype(np.float32)),
            "count": torch.zeros(3, dtype=torch.int64),
        }
    )


def step(trainer: Weights, rng: np.random.Generator) -> None:
    """As an optimizer's: small weights change likelier."""
    old = state(trainer)["w"]
    magnitude = old & 0x7FFF
    small = magnitude < np.quantile(magnitude, 0.3)
    index = np.flatnonzero(rng.random(N) < np.where(small, 0.2, 0.004))
    set_bits(trainer.w, index, old[index] + rng.choice(np.array([1, 0xFFFF], np.uint16), len(index)))
    set_bits(trainer.scale, np.array([7]), state(trainer)["scale"][7:8] ^ np.uint32(1))
    trainer.count += 1


def publisher(url: str, trainer: Weights, spy: Spy, **options: Any) -> Any:
    options = {"codec": "classes", "frame_elems": 150_000, **options}
    return dcr.publisher(url, source=dcr.source(trainer), transport=FAST, stages=[spy.stage()], **options)


async def test_versions_by_class_arrive(tmp_path: Path) -> None:
    rng, spy = np.random.default_rng(0), Spy()
    trainer = weights(rng)
    rollout = Rollout(empty_like(trainer))
    async with running(tmp_path, [rollout]) as url, publisher(url, trainer, spy) as publishing:
        await publishing.joined(1)
        for version in range(1, 5):
            await publish(publishing, version)
            await rollout.reached(version)
            require_equal(rollout.module, state(trainer))
            assert spy.take() >= BY_CLASS if version > 1 else not BY_CLASS & spy.take()
            step(trainer, rng)


async def test_a_dense_change_goes_without_classes(tmp_path: Path) -> None:
    rng, spy = np.random.default_rng(1), Spy()
    trainer = weights(rng)
    rollout = Rollout(empty_like(trainer))
    async with running(tmp_path, [rollout]) as url, publisher(url, trainer, spy) as publishing:
        await publishing.joined(1)
        await publish(publishing, 1)
        spy.take()
        set_bits(trainer.w, np.arange(N), state(trainer)["w"] + np.uint16(1))
        await publish(publishing, 2)
        await rollout.reached(2)
        require_equal(rollout.module, state(trainer))
        assert not BY_CLASS & spy.take()


async def test_a_late_joiner_is_seeded_through_versions_by_class(tmp_path: Path) -> None:
    rng, spy = np.random.default_rng(2), Spy()
    trainer = weights(rng)
    async with publisher(f"local://{tmp_path}", trainer, spy) as publishing:
        for version in range(1, 4):
            await publish(publishing, version)
            step(trainer, rng)
        await publish(publishing, 4)
        assert spy.take() >= BY_CLASS
        rollout = Rollout(empty_like(trainer))
        async with running(tmp_path, [rollout]):
            await rollout.reached(4)
            require_equal(rollout.module, state(trainer))
            assert rollout.kinds == {4: "seed"}


async def test_a_member_catches_up_through_stored_versions_by_class(tmp_path: Path) -> None:
    rng, spy = np.random.default_rng(3), Spy()
    trainer = weights(rng)
    async with publisher(f"local://{tmp_path}", trainer, spy) as publishing:
        await publish(publishing, 1)
        rollout = Rollout(empty_like(trainer, torch.clone))
        for version in (2, 3):
            step(trainer, rng)
            await publish(publishing, version)
        assert spy.take() >= BY_CLASS
        async with running(tmp_path, [rollout]):
            await rollout.reached(3)
            require_equal(rollout.module, state(trainer))
            assert rollout.kinds == {3: "delta"}


async def test_a_trainer_that_restarts_goes_on_by_class(tmp_path: Path) -> None:
    rng, spy = np.random.default_rng(4), Spy()
    trainer = weights(rng)
    rollout = Rollout(empty_like(trainer))
    async with running(tmp_path, [rollout]) as url:
        async with publisher(url, trainer, spy) as publishing:
            await publish(publishing, 1)
            await rollout.reached(1)
        spy.take()
        async with publisher(url, trainer, spy) as publishing:
            await publishing.joined(1)
            step(trainer, rng)
            await publish(publishing, 2)
            await rollout.reached(2)
    require_equal(rollout.module, state(trainer))
    assert spy.take() >= BY_CLASS


async def test_one_member_that_cannot_read_its_base_is_enough_to_do_without_classes(tmp_path: Path) -> None:
    rng, spy = np.random.default_rng(5), Spy()
    trainer = weights(rng)
    modules = [empty_like(trainer), empty_like(trainer)]
    rollouts = [Rollout(module, f"rollout-{index}") for index, module in enumerate(modules)]
    sharded = Sharded(dcr.loader(modules[1]))
    async with (
        running(tmp_path, rollouts[:1]) as url,
        running(tmp_path, rollouts[1:], loader=sharded),
        publisher(url, trainer, spy) as publishing,
    ):
        await publishing.joined(2)
        for version in range(1, 4):
            await publish(publishing, version)
            for rollout in rollouts:
                await rollout.reached(version)
                require_equal(rollout.module, state(trainer))
            step(trainer, rng)
    assert not BY_CLASS & spy.take()


async def test_a_member_that_cannot_read_its_base_refuses_stored_versions_by_class(tmp_path: Path) -> None:
    """Nothing is written: it held version 1 and still does."""
    rng, spy = np.random.default_rng(6), Spy()
    trainer = weights(rng)
    async with publisher(f"local://{tmp_path}", trainer, spy) as publishing:
        await publish(publishing, 1)
        rollout = Rollout(empty_like(trainer, torch.clone))
        held = state(trainer)
        step(trainer, rng)
        await publish(publishing, 2)
    assert spy.take() >= BY_CLASS
    async with running(tmp_path, [rollout], loader=Sharded(dcr.loader(rollout.module))):
        with pytest.raises(PayloadError, match="cannot read whole"):
            await rollout.reached(2)
    require_equal(rollout.module, held)


async def test_other_bits_in_live_memory_are_noticed_before_anything_is_written(tmp_path: Path) -> None:
    """What changed is found by old bits that are not those expected: it is refused, and the member seeded anew."""
    rng, spy = np.random.default_rng(7), Spy()
    trainer = weights(rng)
    rollout = Rollout(empty_like(trainer))
    async with running(tmp_path, [rollout]) as url, publisher(url, trainer, spy, quorum=0) as publishing:
        await publishing.joined(1)
        await publish(publishing, 1)
        await rollout.reached(1)
        set_bits(rollout.module.w, np.arange(N), state(trainer)["w"] ^ np.uint16(0x4000))
        step(trainer, rng)
        await publish(publishing, 2)
        await rollout.reached(2)
        require_equal(rollout.module, state(trainer))
        assert "trust_lost" in rollout.names()
        assert "seed" in rollout.kinds.values()
    assert spy.take() >= BY_CLASS


@pytest.mark.parametrize("change", [lambda bits: bits, lambda bits: bits ^ np.uint16(1)], ids=["same", "other"])
def test_a_placement_reads_what_is_in_live_memory(change: Callable[[np.ndarray], np.ndarray]) -> None:
    from dcr.layout.frames import Layout, plan

    module = weights(np.random.default_rng(8))
    source = dcr.source(module)
    frames = plan(source.schema, source.shards, 70_000)
    loader = dcr.loader(module)
    bound = loader.bind(Layout(source.schema, tuple(frame.spec for frame in frames)))
    set_bits(module.w, np.arange(N), change(state(module)["w"]))
    found = [bound.read(index) for index, frame in enumerate(frames) if frame.spec.dtype == "bfloat16"]
    np.testing.assert_array_equal(np.concatenate(found), state(module)["w"])
