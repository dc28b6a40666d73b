"""A trainer's module, published and installed for real: every bit arrives, in every dtype, shape and stride."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.refits import (
    FAST,
    Rollout,
    Weights,
    empty_like,
    publish,
    random_bits,
    require_equal,
    running,
    said,
    set_bits,
    state,
)

import dcr
from dcr.codecs.patch import Operation
from dcr.events import InstallCompleted
from dcr.kernels import reference
from dcr.layout.schema import WIDTHS

TORCH = {name: getattr(torch, name) for name in WIDTHS}
END_TO_END = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype that can be published, any shape, with odd strides and an offset."""
    dtype = draw(st.sampled_from(sorted(WIDTHS)))
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    order = draw(st.permutations(range(len(shape))))
    pad, offset = draw(st.integers(0, 2)), draw(st.integers(0, 3))
    stride, strides = 1 + pad, [0] * len(shape)
    for d in order:
        strides[d] = stride
        stride = stride * max(1, shape[d]) + pad
    backing = torch.zeros(offset + stride + 8, dtype=TORCH[dtype])
    return backing.as_strided(shape, strides, offset)


@st.composite
def trainers(draw: st.DrawFn) -> Weights:
    """A module of a few tensors, some of them tied."""
    module = Weights(
        {f"w{index}": tensor for index, tensor in enumerate(draw(st.lists(tensors(), min_size=1, max_size=6)))}
    )
    if draw(st.booleans()):
        name, tied = next(iter(module.state_dict(keep_vars=True).items()))
        register = module.register_parameter if isinstance(tied, torch.nn.Parameter) else module.register_buffer
        register("tied_to_" + name, tied)
    return module


def change(module: torch.nn.Module, rng: np.random.Generator, share: float) -> None:
    """Give a share of all elements any other bits."""
    for tensor in module.state_dict().values():
        if tensor.numel():
            dtype = str(tensor.dtype).removeprefix("torch.")
            index = np.flatnonzero(rng.random(tensor.numel()) < share)
            set_bits(tensor, index, random_bits(rng, len(index), dtype))


def in_a_directory(flow: Any) -> None:
    """Run an async flow that takes an empty directory."""
    with tempfile.TemporaryDirectory() as folder:
        anyio.run(flow, Path(folder))


@END_TO_END
@given(trainer=trainers(), seed=st.integers(0, 2**32), operation=st.sampled_from(Operation), frame=st.integers(20, 200))
def test_every_version_equals_a_dense_copy(trainer: Weights, seed: int, operation: Operation, frame: int) -> None:
    async def flow(folder: Path) -> None:
        rng = np.random.default_rng(seed)
        change(trainer, rng, 1.0)
        rollout = Rollout(empty_like(trainer))
        source = dcr.source(trainer)
        codec = ("gaps", "raw")[seed % 2]
        async with (
            running(folder, [rollout]) as url,
            dcr.publisher(
                url, source=source, transport=FAST, operation=operation, codec=codec, frame_elems=frame
            ) as publisher,
        ):
            await publisher.joined(1)
            for version, share in enumerate((1.0, 0.1, 0.0, 0.02, 0.9), start=1):
                change(trainer, rng, share if version > 1 else 0)
                await publish(publisher, version)
                await rollout.reached(version)
                require_equal(rollout.module, state(trainer))

    in_a_directory(flow)


@pytest.mark.parametrize("operation", Operation)
async def test_values_that_return_to_an_older_version_arrive(tmp_path: Path, operation: Operation) -> None:
    trainer = Weights({"w": torch.zeros(100, dtype=torch.bfloat16)})
    rollout = Rollout(empty_like(trainer))
    async with (
        running(tmp_path, [rollout]) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST, operation=operation) as publisher,
    ):
        await publisher.joined(1)
        for version, value in enumerate((0x8000, 0x7FC1, 0x8000, 0, 0x7FC1), start=1):
            set_bits(trainer.w, np.array([7, 8]), np.array([value, value ^ 1], np.uint16))
            await publish(publisher, version)
            await rollout.reached(version)
            require_equal(rollout.module, state(trainer))


async def test_all_bf16_patterns_arrive_from_each_to_its_successor(tmp_path: Path) -> None:
    trainer = Weights({"w": torch.zeros(1 << 16, dtype=torch.bfloat16)})
    rollout = Rollout(empty_like(trainer))
    everything = np.arange(1 << 16)
    async with (
        running(tmp_path, [rollout]) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
    ):
        await publisher.joined(1)
        for version, shift in enumerate((0, 1, 0x8000), start=1):
            set_bits(trainer.w, everything, ((everything + shift) & 0xFFFF).astype(np.uint16))
            await publish(publisher, version)
            await rollout.reached(version)
            require_equal(rollout.module, state(trainer))


async def test_fp32_masters_arrive_rounded_and_only_changed_roundings_travel(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    trainer = Weights(
        {"w": torch.zeros(5000), "steps": torch.tensor(3), "bias_buffer": torch.zeros(3, dtype=torch.int32)}
    )
    set_bits(trainer.w, np.arange(5000), random_bits(rng, 5000, "float32"))
    rollout = Rollout(Weights({**trainer.state_dict(), "w": torch.zeros(5000, dtype=torch.bfloat16)}))
    source = dcr.source(trainer, dtype="bfloat16")
    async with (
        running(tmp_path, [rollout]) as url,
        dcr.publisher(url, source=source, transport=FAST) as publisher,
    ):
        await publisher.joined(1)
        await publish(publisher, 1)
        await rollout.reached(1)
        set_bits(trainer.w, np.arange(10), state(trainer)["w"][:10] ^ np.uint32(1))
        before = state(rollout.module)["w"]
        report = await publish(publisher, 2)
        await rollout.reached(2)
        wanted = reference.cast(state(trainer)["w"], reference.F32_BF16)
        assert np.array_equal(state(rollout.module)["w"], wanted)
        assert report.changed == np.count_nonzero(before != wanted)


async def test_a_late_joiner_starts_from_the_anchor_and_the_deltas(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    trainer = Weights({"w": torch.zeros(3000, dtype=torch.bfloat16)})
    url = f"local://{tmp_path}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
        for version in range(1, 5):
            change(trainer, rng, 0.05)
            await publish(publisher, version)
        rollout = Rollout(empty_like(trainer))
        async with running(tmp_path, [rollout]):
            await rollout.reached(4)
            require_equal(rollout.module, state(trainer))
            assert rollout.kinds == {4: "seed"}
            change(trainer, rng, 0.05)
            await publish(publisher, 5)
            await rollout.reached(5)
            require_equal(rollout.module, state(trainer))
            assert rollout.kinds[5] == "delta"


async def test_a_member_whose_weights_are_an_older_version_needs_no_anchor(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    trainer = Weights({"w": torch.zeros(3000, dtype=torch.bfloat16)})
    url = f"local://{tmp_path}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
        await publish(publisher, 1)
        change(trainer, rng, 0.05)
        await publish(publisher, 2)
        rollout = Rollout(empty_like(trainer, torch.clone))
        change(trainer, rng, 0.05)
        await publish(publisher, 3)
        async with running(tmp_path, [rollout]):
            await rollout.reached(3)
    require_equal(rollout.module, state(trainer))
    assert rollout.kinds == {3: "delta"}
    assert "recognised" in rollout.names()


async def test_a_second_anchor_shortens_the_chain_and_old_versions_are_removed(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    trainer = Weights({"w": torch.zeros(3000, dtype=torch.bfloat16)})
    url = f"local://{tmp_path}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST, anchor_every=2) as publisher:
        for version in range(1, 9):
            change(trainer, rng, 0.05)
            await publish(publisher, version)
        rollout = Rollout(empty_like(trainer))
        async with running(tmp_path, [rollout]):
            await rollout.reached(8)
            require_equal(rollout.module, state(trainer))
    kept = {int(path.name.split(".")[0]) for path in (tmp_path / "seals").iterdir()}
    assert kept == {6, 7, 8}


async def test_several_receivers_follow_one_publisher(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    trainer = Weights({"w": torch.zeros(2000, dtype=torch.bfloat16), "b": torch.zeros(9)})
    rollouts = [Rollout(empty_like(trainer), f"rollout-{index}") for index in range(3)]
    async with (
        running(tmp_path, rollouts) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
    ):
        await publisher.joined(3)
        for version in range(1, 5):
            change(trainer, rng, 0.05)
            refit = await publisher.publish(version)
            report = await refit.committed()
            assert report.members == {f"rollout-{index}": "prepared" for index in range(3)}
            assert said(await refit.installed()) == {f"rollout-{index}": "installed" for index in range(3)}
            for rollout in rollouts:
                require_equal(rollout.module, state(trainer))


async def test_each_member_says_for_how_long_weights_were_written(tmp_path: Path) -> None:
    """A seed pauses for the span of its writes, a delta for its one scatter: both lie within what installing took."""
    rng = np.random.default_rng(4)
    trainer = Weights({"w": torch.zeros(2000, dtype=torch.bfloat16)})
    rollout = Rollout(empty_like(trainer))
    async with (
        running(tmp_path, [rollout]) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
    ):
        await publisher.joined(1)
        await (await publisher.publish(1)).installed()  # so the publisher knows that it holds the base of version 2
        change(trainer, rng, 0.05)
        refit = await publisher.publish(2)
        answer = (await refit.installed())["rollout"]
        await rollout.reached(2)
    installed = [event for event in rollout.events if isinstance(event, InstallCompleted)]
    assert [event.version for event in installed] == [1, 2]
    assert all(0 < event.pause_s <= event.duration_s for event in installed)
    assert answer.pause_s == installed[1].pause_s
    assert str(answer) == f"installed, paused for {answer.pause_s:.6f} s"


async def test_training_may_go_on_as_soon_as_the_weights_are_captured(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    trainer = Weights({"w": torch.zeros(100_000, dtype=torch.bfloat16)})
    rollout = Rollout(empty_like(trainer))
    async with (
        running(tmp_path, [rollout]) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST, frame_elems=1000) as publisher,
    ):
        await publisher.joined(1)
        for version in range(1, 6):
            change(trainer, rng, 0.02)
            published = state(trainer)
            refit = await publisher.publish(version)
            await publisher.captured()
            change(trainer, rng, 0.02)
            await refit.committed()
            await rollout.reached(version)
            require_equal(rollout.module, published)


async def test_pointers_stay_where_they_are(tmp_path: Path) -> None:
    trainer = Weights({"w": torch.zeros(50, 40, dtype=torch.bfloat16).t(), "n": torch.zeros((), dtype=torch.int64)})
    rollout = Rollout(empty_like(trainer, torch.clone))
    before = {name: tensor.data_ptr() for name, tensor in rollout.module.state_dict().items()}
    async with (
        running(tmp_path, [rollout]) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
    ):
        await publisher.joined(1)
        for version in range(1, 4):
            change(trainer, np.random.default_rng(version), 0.5)
            await publish(publisher, version)
            await rollout.reached(version)
    assert {name: tensor.data_ptr() for name, tensor in rollout.module.state_dict().items()} == before


def test_the_blocking_face_refits_without_an_event_loop(tmp_path: Path) -> None:
    import threading

    import dcr.blocking

    trainer = Weights({"w": torch.zeros(500, dtype=torch.bfloat16)})
    receiver = empty_like(trainer, torch.ones_like)
    url = f"local://{tmp_path}"
    seen: list[int] = []

    def follow() -> None:
        with dcr.blocking.subscriber(url, loader=dcr.loader(receiver), member="m", transport=FAST) as versions:
            for version in versions:
                version.install()
                seen.append(version.number)
                if version.number == 3:
                    return

    thread = threading.Thread(target=follow)
    thread.start()
    with dcr.blocking.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
        publisher.joined(1)
        for number in range(1, 4):
            change(trainer, np.random.default_rng(number), 0.1)
            refit = publisher.publish(number)
            publisher.captured()
            refit.committed()
        assert said(refit.installed()) == {"m": "installed"}
    thread.join(10)
    assert seen == [1, 2, 3]
    require_equal(receiver, state(trainer))
