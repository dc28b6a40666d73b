"""Members of several ranks: they vote, install, undo and are poisoned as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.loaders import Through
from support.refits import FAST, publish, said
from support.tensor_parallel import (
    SCHEMA,
    SPECS,
    ToyRank,
    fill,
    in_threads,
    parts,
    split,
    touched,
    toys,
    trainer_of,
    values,
)

import dcr
from dcr.codecs.patch import Change, Operation
from dcr.engines.ranks import Ranks
from dcr.errors import DigestMismatch, LayoutError, Poisoned, ReadBackError, SchemaError, StateError
from dcr.kernels import reference
from dcr.layout.frames import FrameSpec, Layout, Region
from dcr.layout.schema import keys


def layout(frame_elems: int = 40) -> Layout:
    """Frames that cut tensors anywhere."""
    frames = []
    for dtype in ("bfloat16", "float32"):
        runs = [(t, i) for t, spec in enumerate(SPECS) if spec.dtype == dtype for i in range(spec.numel)]
        for start in range(0, len(runs), frame_elems):
            piece = runs[start : start + frame_elems]
            tensors = sorted({t for t, _ in piece})
            spans = [[i for u, i in piece if u == t] for t in tensors]
            frames.append(
                FrameSpec(dtype, tuple(Region(t, s[0], ((len(s), 1),)) for t, s in zip(tensors, spans, strict=True)))
            )
    return Layout(SCHEMA, tuple(frames))


def raw(ranks: Sequence[ToyRank]) -> list[dict[str, bytes]]:
    return [rank.raw() for rank in ranks]


def whole_digest(weights: dict[str, np.ndarray]) -> np.ndarray:
    pairs = zip(SPECS, keys(SPECS), strict=True)
    return np.array(
        [
            reference.mix(key, np.arange(spec.numel, dtype=np.uint64), weights[spec.name].astype(np.uint64))
            for spec, key in pairs
        ]
    )


Join = Callable[[Sequence[ToyRank]], Ranks]


@pytest.fixture(params=["here", "sockets"])
def join(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Ranks in this process, or each behind a socket."""
    workers: list[Any] = []

    def join(ranks: Sequence[ToyRank]) -> Ranks:
        if request.param == "here":
            return Ranks(ranks)
        folder = tmp_path / f"{len(workers)}"
        folder.mkdir()
        workers.extend(in_threads(ranks, folder))
        return Ranks(workers[-len(ranks) :])

    yield join
    for worker in workers:
        worker.close()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_digest_of_all_ranks_is_that_of_the_whole_model(join: Join, world: int) -> None:
    weights = values(1)
    ranks = join(toys(world, weights))
    assert np.array_equal(ranks.bind(layout()).digest(), whole_digest(weights))


def test_a_member_has_at_least_one_rank() -> None:
    with pytest.raises(StateError, match="at least one rank"):
        Ranks([])


def test_a_rank_that_is_missing_is_noticed_when_they_are_bound() -> None:
    with pytest.raises(LayoutError, match=r"a_rows \(30 of 60 elements\)"):
        Ranks(toys(2, values(1))[:1]).bind(layout())


def without_experts(weights: dict[str, np.ndarray]) -> list[ToyRank]:
    """Two ranks whose loader takes no experts."""
    ranks = [ToyRank(r, 2, split=lambda spec, *at: [] if "expert" in spec.name else split(spec, *at)) for r in range(2)]
    for rank in ranks:
        rank.fill(SPECS, weights)
    return ranks


@pytest.mark.parametrize("waive", [(), ("expert", "f_*")])
def test_a_tensor_that_no_rank_holds_is_refused_by_name_unless_it_is_waived(waive: Sequence[str]) -> None:
    with pytest.raises(SchemaError, match=r"1 of 7 tensors are published, and no rank holds any of them: e_expert\."):
        Ranks(without_experts(values(1)), waive=waive).bind(layout())


async def test_a_waived_tensor_that_no_rank_holds_counts_for_the_digest(tmp_path: Path) -> None:
    weights = values(1)
    trainer, ranks = trainer_of(weights), without_experts(values(9))
    url = f"local://{tmp_path / 'run'}"
    member = Through(Ranks(ranks, waive=["*_expert"]))
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST, frame_elems=33) as publisher:
        await publish(publisher, 1)
        async with dcr.subscriber(url, loader=member, member="m", transport=FAST) as versions:
            await (await anext(versions)).install()
            await publisher.joined(1)
            for version in range(2, 5):
                weights = touched(weights, version)
                fill(trainer, weights)
                await publisher.publish(version)
                delta = await anext(versions)
                assert delta.kind == "delta"
                await delta.install()
                assert parts(ranks) == parts(without_experts(weights))
                assert np.array_equal(member.digest(), whole_digest(weights))
            member.bind(layout())  # anew: what was kept is of the layout before
            assert not np.array_equal(member.digest(), whole_digest(weights))


def test_parts_that_overlap_are_refused_by_name() -> None:
    ranks = toys(2, values(1))

    class Wider:
        def bind(self, layout: Layout) -> Any:
            return SimpleNamespace(parts=[Region(0, 0, ((31, 1),)), *ranks[0].bind(layout).parts[1:]])

    with pytest.raises(LayoutError, match=r"a_rows \(61 of 60 elements\)"):
        Ranks([Wider(), ranks[1]]).bind(layout())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("operation", list(Operation))
def test_a_change_reaches_every_rank_that_holds_some_of_it(join: Join, world: int, operation: Operation) -> None:
    old, new = values(1), values(2)
    ranks = toys(world, old)
    frames = layout()
    member = join(ranks).bind(frames)
    wanted = toys(world, new)
    before = raw(ranks)
    readies = []
    for frame in frames.frames:
        olds = np.concatenate(
            [old[SPECS[r.tensor].name][r.runs()[0][0] :][: r.runs()[0][1]] for r in frame.spec.regions]
        )
        news = np.concatenate(
            [new[SPECS[r.tensor].name][r.runs()[0][0] :][: r.runs()[0][1]] for r in frame.spec.regions]
        )
        change = {Operation.OVERWRITE: news, Operation.XOR: olds ^ news, Operation.STEP: news - olds}[operation]
        ready = member.prepare(frame.index, Change(operation, np.arange(frame.numel, dtype=np.uint32), change))
        assert ready.copies_agree
        readies.append(ready)
    assert raw(ranks) == before
    lanes = np.zeros((len(SPECS), 2), np.uint64)
    for ready in readies:
        lanes[list(frames.frames[ready.frame].tensors)] += ready.new_sums
        member.install(ready)
    assert np.array_equal(lanes, whole_digest(new))
    assert raw(ranks) == raw(wanted)
    for ready in reversed(readies):
        member.undo(ready)
    assert raw(ranks) == before


def test_copies_that_differ_between_ranks_are_noticed(join: Join) -> None:
    ranks = toys(4, values(1))
    member = join(ranks).bind(layout())
    ranks[1].memories["c_heads"][4] ^= 1  # rank 0 holds the same head
    with pytest.raises(DigestMismatch):
        member.digest()
    frames = [frame for frame in layout().frames if 2 in frame.tensors]
    ready = [member.prepare(f.index, Change(Operation.OVERWRITE, None, np.zeros(f.numel, np.uint16))) for f in frames]
    assert not all(one.copies_agree for one in ready)


# ------------------------------------------------------------------ as a member of a run


@pytest.mark.parametrize("world", [2, 4])
async def test_a_member_of_several_ranks_follows_a_run(tmp_path: Path, join: Join, world: int) -> None:
    weights = values(1)
    trainer, ranks = trainer_of(weights), toys(world, values(9))
    url = f"local://{tmp_path / 'run'}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST, frame_elems=33) as publisher:
        await publish(publisher, 1)
        async with dcr.subscriber(url, loader=join(ranks), member="m", transport=FAST) as versions:
            seed = await anext(versions)
            assert seed.kind == "seed"
            await seed.install()
            assert parts(ranks) == parts(toys(world, weights))
            await publisher.joined(1)
            for version in range(2, 7):
                weights = touched(weights, version)
                fill(trainer, weights)
                await publisher.publish(version)
                delta = await anext(versions)
                assert (delta.kind, delta.number) == ("delta", version)
                assert parts(ranks) != parts(toys(world, weights))
                await delta.install()
                assert parts(ranks) == parts(toys(world, weights))


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("which", [0, 1])
async def test_an_install_that_fails_on_one_rank_is_undone_on_all(
    tmp_path: Path, join: Join, at: int, which: int
) -> None:
    weights = values(1)
    trainer, ranks = trainer_of(weights), toys(2, weights)
    url = f"local://{tmp_path / 'run'}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST, frame_elems=33) as publisher:
        await publish(publisher, 1)
        async with dcr.subscriber(url, loader=join(ranks), member="m", transport=FAST) as versions:
            assert versions.version == 1
            before = raw(ranks)
            weights = touched(weights, 2)
            fill(trainer, weights)
            await publisher.joined(1)
            refit = await publisher.publish(2)
            version = await anext(versions)
            ranks[which].fail_at = ranks[which].installs + at
            with pytest.raises(ReadBackError):
                await version.install()
            assert raw(ranks) == before
            assert versions.may_serve
            assert versions.version == 1
            await version.install()
            assert parts(ranks) == parts(toys(2, weights))
            assert said(await refit.installed()) == {"m": "installed"}


async def test_several_ranks_that_are_behind_catch_up_in_one_version(tmp_path: Path, join: Join) -> None:
    weights = values(1)
    trainer, ranks = trainer_of(weights), toys(2, values(9))
    member, url = join(ranks), f"local://{tmp_path / 'run'}"
    options = {"source": dcr.source(trainer), "transport": FAST, "frame_elems": 33, "anchor_every": None}
    async with dcr.publisher(url, **options) as publisher:
        await publish(publisher, 1)
        async with dcr.subscriber(url, loader=member, member="m", transport=FAST) as versions:
            await (await anext(versions)).install()
        for number in range(2, 6):
            weights = touched(weights, number)
            fill(trainer, weights)
            await publish(publisher, number)
    async with dcr.publisher(url, operation=Operation.OVERWRITE, **options) as publisher:
        for number in range(6, 9):
            weights = touched(weights, number)
            fill(trainer, weights)
            await publish(publisher, number)
    async with dcr.subscriber(url, loader=member, member="m", transport=FAST) as versions:
        newest = await anext(versions)
        assert (newest.number, newest.kind) == (8, "delta")
        await newest.install()
    assert parts(ranks) == parts(toys(2, weights))


@pytest.mark.parametrize("deltas", [0, 3])
async def test_several_ranks_fetch_a_seed_before_it_is_offered(tmp_path: Path, join: Join, deltas: int) -> None:
    """Ranks are compared with the anchor beforehand: what they then write needs the chunks no more."""
    weights = values(1)
    trainer, ranks, root = trainer_of(weights), toys(2, touched(weights, 99, every=50)), tmp_path / "run"
    options = {"source": dcr.source(trainer), "transport": FAST, "frame_elems": 33, "anchor_every": None}
    async with dcr.publisher(f"local://{root}", **options) as publisher:
        for number in range(1, 2 + deltas):
            await publish(publisher, number)
            weights, was = touched(weights, number, every=50), weights
            fill(trainer, weights)
    before = raw(ranks)
    async with dcr.subscriber(f"local://{root}", loader=join(ranks), member="m", transport=FAST) as versions:
        seed = await anext(versions)
        assert (seed.kind, seed.number, raw(ranks)) == ("seed", 1 + deltas, before)
        for chunk in root.glob("packs/*/*"):
            chunk.unlink()
        await seed.install()
        assert parts(ranks) == parts(toys(2, was))
        assert versions.may_serve


async def test_a_member_is_poisoned_when_one_rank_can_not_undo(tmp_path: Path, join: Join) -> None:
    weights = values(1)
    trainer, ranks = trainer_of(weights), toys(2, weights)
    url = f"local://{tmp_path / 'run'}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST, frame_elems=33) as publisher:
        await publish(publisher, 1)
        async with dcr.subscriber(url, loader=join(ranks), member="m", transport=FAST) as versions:
            weights = touched(weights, 2)
            fill(trainer, weights)
            await publisher.joined(1)
            refit = await publisher.publish(2)
            version = await anext(versions)
            ranks[1].fail_at, ranks[1].undo_fails = ranks[1].installs + 2, True
            with pytest.raises(Poisoned):
                await version.install()
            assert not versions.may_serve
            assert "poisoned" in (await refit.installed())["m"].said
            seed = await anext(versions)
            assert seed.kind == "seed"
            await seed.install()
            assert parts(ranks) == parts(toys(2, weights))
            assert versions.may_serve


def test_a_joint_error_names_every_rank_that_failed(join: Join) -> None:
    ranks = toys(2, values(1))
    member = join(ranks).bind(layout())
    for rank in ranks:
        rank.fail_at = 0
    ready = member.prepare(0, Change(Operation.OVERWRITE, None, np.zeros(layout().frames[0].numel, np.uint16)))
    with pytest.raises(ReadBackError) as failed:
        member.install(ready)
    assert [note[:11] for note in failed.value.__notes__] == ["rank 0 of 2", "rank 1 of 2"]
