"""Engines with hostile loaders as members of a run: seeded, refitted, failing half-way, tampered with; real ends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from support.loaders import Through
from support.refits import FAST, publish

import dcr
from dcr.codecs.patch import Change, Operation
from dcr.errors import DigestMismatch, Poisoned, ReadBackError, SchemaError, StateError
from dcr.layout.frames import FrameSpec, Layout, Region
from dcr.layout.schema import Schema, TensorSpec
from dcr.loaders.engine import memories_of, slots_of
from dcr.loaders.native import NativeLoader
from dcr.loaders.probe import random_tensor
from dcr.probing.bits import bits_of
from dcr.testing.hostile import CASES, Case, Model, ToyEngine

KINDS = ["absorbed weights", "composed", "quantised", "cast", "tied heads", "padded vocabulary", "rebinding", "threads"]


class Tree(torch.nn.Module):
    """A trainer that holds tensors under dotted names; `aliases` of a name are tied to it."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(case.shapes.items()):
            tensor = random_tensor(TensorSpec(name, "bfloat16", shape), seed, number)
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            for path in (name, *case.aliases.get(name, ())):
                self._put(path, parameter)

    def _put(self, path: str, parameter: torch.nn.Parameter) -> None:
        *above, name = path.split(".")
        module: torch.nn.Module = self
        for part in above:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(name, parameter)

    def step(self, seed: int, share: float = 0.3) -> None:
        """New finite bits for a share of all elements."""
        generator = torch.Generator().manual_seed(seed)
        for number, tensor in enumerate(self.parameters()):
            new = random_tensor(TensorSpec("t", "bfloat16", tuple(tensor.shape)), seed, number)
            tensor.data.copy_(torch.where(torch.rand(tensor.shape, generator=generator) < share, new, tensor.data))

    def pairs(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.state_dict().items())


def memory(engine: ToyEngine) -> dict[str, bytes]:
    return {one.path: one.live.tobytes() for one in memories_of(slots_of(engine.module))}


def natively(case: Case, trainer: Tree) -> dict[str, bytes]:
    """The memory of an engine that its own loader has loaded."""
    engine = case.make()
    engine.load(trainer.pairs())
    engine.settle({slot.module for slot in slots_of(engine.module)})
    return memory(engine)


class Breaking(Through):
    """A native loader that fails when it has installed the n-th frame, and whose undo may fail too."""

    def __init__(self, engine: Any, **options: Any) -> None:
        super().__init__(NativeLoader(engine, **options))

    at: int | None = None
    undoes = True
    installed = 0

    def install(self, ready: Any) -> None:
        super().install(ready)
        self.installed += 1
        if self.at == self.installed:
            raise ReadBackError("a test says that memory did not keep its bits")

    def undo(self, ready: Any) -> None:
        if not self.undoes:
            raise ReadBackError("a test says that the undo failed")
        super().undo(ready)


@asynccontextmanager
async def following(
    folder: Path, case: Case, **options: Any
) -> AsyncIterator[tuple[Tree, ToyEngine, Breaking, dcr.Publisher, Any]]:
    """A trainer, and an engine that was seeded with its first version."""
    trainer, engine = Tree(case, 1), case.make()
    loader = Breaking(engine, waive=case.waive)
    url = f"local://{folder / 'run'}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST, frame_elems=33, **options) as publisher:
        await publish(publisher, 1)
        async with dcr.subscriber(url, loader=loader, member="m", transport=FAST) as versions:
            with anyio.fail_after(30):
                await (await anext(versions)).install()
            yield trainer, engine, loader, publisher, versions


async def offered(publisher: dcr.Publisher, versions: Any, version: int) -> Any:
    with anyio.fail_after(30):
        await publisher.joined(1)
        await publisher.publish(version)
        return await anext(versions)


@pytest.mark.parametrize("name", KINDS)
async def test_an_engine_is_seeded_and_follows_byte_for_byte(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    async with following(tmp_path, case) as (trainer, engine, _, publisher, versions):
        assert memory(engine) == natively(case, trainer)
        for version in range(2, 6):
            trainer.step(version)
            await (await offered(publisher, versions, version)).install()
            assert memory(engine) == natively(case, trainer)


@pytest.mark.parametrize("name", KINDS)
async def test_an_engine_that_is_behind_catches_up_in_one_version(tmp_path: Path, name: str) -> None:
    """Steps, overwrites and steps again: one frame has elements of both, and tensors that the engine loads itself."""
    case = CASES[name]
    late = {"quorum": 0, "vote_timeout_s": 0.05, "anchor_every": None}
    async with following(tmp_path, case, **late) as (trainer, engine, _, publisher, versions):
        trainer.step(2)
        version = await offered(publisher, versions, 2)
        await publisher.captured()
        for number in range(3, 6):
            trainer.step(number, share=0.1)
            await publish(publisher, number)
        await publisher.aclose()
        for first, operation in ((6, dcr.Operation.OVERWRITE), (9, dcr.Operation.STEP)):
            options = {"transport": FAST, "frame_elems": 33, "operation": operation, **late}
            async with dcr.publisher(f"local://{tmp_path}/run", source=dcr.source(trainer), **options) as another:
                for number in range(first, first + 3):
                    trainer.step(number, share=0.1)
                    await publish(another, number)
        await version.install()
        with anyio.fail_after(30):
            newest = await anext(versions)
        assert (newest.number, newest.kind) == (11, "delta")
        await newest.install()
        assert memory(engine) == natively(case, trainer)


@pytest.mark.parametrize("name", KINDS)
async def test_an_installation_that_fails_half_way_is_undone_and_can_be_repeated(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    async with following(tmp_path, case) as (trainer, engine, loader, publisher, versions):
        before = memory(engine)
        trainer.step(2, share=0.7)
        version = await offered(publisher, versions, 2)
        for at in count(1):  # each frame in turn, until none is left
            loader.at, loader.installed = at, 0
            try:
                await version.install()
            except ReadBackError:
                assert memory(engine) == before
                assert (versions.may_serve, versions.version) == (True, 1)
            else:
                break
        assert at > 1
        assert memory(engine) == natively(case, trainer)


@pytest.mark.parametrize("name", ["composed", "quantised", "rebinding"])
async def test_an_engine_whose_loader_fails_keeps_the_version_before(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    async with following(tmp_path, case) as (trainer, engine, _, publisher, versions):
        before, loads = memory(engine), engine.loads
        trainer.step(2)
        version = await offered(publisher, versions, 2)

        def failing(model: torch.nn.Module, pairs: Any) -> None:
            loads(model, pairs)
            raise RuntimeError("out of memory, says a test")

        engine.loads = failing
        with pytest.raises(RuntimeError, match="out of memory"):
            await version.install()
        assert (memory(engine) == before, versions.may_serve) == (True, True)
        engine.loads = loads
        await version.install()
        assert memory(engine) == natively(case, trainer)


async def test_an_installation_that_cannot_be_undone_poisons_and_is_healed_by_a_seed(tmp_path: Path) -> None:
    case = CASES["composed"]
    async with following(tmp_path, case) as (trainer, engine, loader, publisher, versions):
        trainer.step(2)
        version = await offered(publisher, versions, 2)
        loader.at, loader.installed, loader.undoes = 1, 0, False
        with pytest.raises(Poisoned):
            await version.install()
        assert not versions.may_serve
        loader.at, loader.undoes = None, True
        with anyio.fail_after(30):
            await (await anext(versions)).install()
        assert versions.may_serve
        assert memory(engine) == natively(case, trainer)


@pytest.mark.parametrize("name", KINDS)
async def test_memory_that_was_tampered_with_is_refused_before_the_first_write(tmp_path: Path, name: str) -> None:
    """A bit of everything that a version made: what is moved, cast, absorbed, quantised, or loaded by the engine."""
    case = CASES[name]
    async with following(tmp_path, case, quorum=0) as (trainer, engine, loader, publisher, versions):
        record = loader.loader.record
        made = {home.memory for home in record.homes} | {m for one in record.reloads for m in one.memories}
        flipped = memories_of(slots_of(engine.module))[max(made)]
        flipped.live[0] ^= 1
        before = memory(engine)
        trainer.step(2, share=1.0)
        version = await offered(publisher, versions, 2)
        assert memory(engine) == before
        assert version.kind == "seed"
        await version.install()
        while versions.version != 2:  # what was committed when trust was lost comes first
            await (await anext(versions)).install()
        assert memory(engine) == natively(case, trainer)


def test_verbs_before_a_binding_say_what_is_missing() -> None:
    loader = NativeLoader(CASES["composed"].make())
    for call in (loader.finalize, lambda: loader.record):
        with pytest.raises(StateError, match="call bind first"):
            call()


def test_a_second_binding_does_not_record_again() -> None:
    case = CASES["absorbed weights"]
    engine = case.make()
    loads: list[int] = []
    inner = engine.loads
    engine.loads = lambda model, pairs: (loads.append(1), inner(model, pairs))[1]
    loader = NativeLoader(engine)
    schema = Schema(tuple(TensorSpec(name, "bfloat16", shape) for name, shape in case.shapes.items()))
    loader.bind(Layout(schema, ()))
    first = len(loads)
    loader.bind(Layout(schema, ()))
    assert len(loads) == first > 0


def test_a_binding_after_weights_moved_records_again() -> None:
    case = CASES["absorbed weights"]
    engine = case.make()
    loader = NativeLoader(engine)
    schema = Schema(tuple(TensorSpec(name, "bfloat16", shape) for name, shape in case.shapes.items()))
    loader.bind(Layout(schema, ()))
    before, record = loader.fingerprint(), loader.record
    engine.module.norm.data = engine.module.norm.data.clone()
    assert loader.fingerprint() != before
    loader.bind(Layout(schema, ()))
    assert loader.record is not record


def test_what_the_engine_loaded_itself_is_watched() -> None:
    """The bytes that a reload left have a digest of their own: no canonical bits are there to compare."""
    case = CASES["composed"]
    engine = case.make()
    loader = NativeLoader(engine)
    weights = loader.bind(
        Layout(Schema((TensorSpec("mixer.a", "bfloat16", (8,)), TensorSpec("norm", "bfloat16", (8,)))), ())
    )
    loader.finalize()
    weights.digest()
    engine.module.get_parameter("mixer.a").data.view(torch.int32)[3] ^= 1
    with pytest.raises(DigestMismatch, match=r"mixer\.a: memory is not what the engine's loader left there"):
        weights.digest()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_checkpoint_of_another_dtype_is_cast_as_the_engine_does(dtype: str) -> None:
    case = CASES["transposed"]
    loader = NativeLoader(case.make())
    loader.bind(Layout(Schema((TensorSpec("w", dtype, (4, 6)),)), ()))
    assert loader.record.verdicts[0].kind.value == "cast"


def test_a_published_shape_that_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(SchemaError, match="w is published and goes nowhere here"):
        NativeLoader(CASES["transposed"].make()).bind(Layout(Schema((TensorSpec("w", "bfloat16", (5, 6)),)), ()))


def test_the_engine_of_the_documentation_is_one(tmp_path: Path) -> None:
    """The block of docs/engines.md, as it stands, and a refit through what it makes."""
    text = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    block = "#" + text.split("# an engine of one's own", 1)[1].split("```", 1)[0]
    found: dict[str, Any] = {}
    exec(compile(block, "docs/engines.md", "exec"), found)
    specs = tuple(TensorSpec(name, "bfloat16", (8, 8)) for name in "qkv")
    found["loader"].bind(Layout(Schema(specs), ()))
    assert [verdict.kind.value for verdict in found["loader"].record.verdicts] == ["bits"] * 3


def test_a_weight_that_is_not_in_host_memory_is_refused_by_name() -> None:
    module = torch.nn.Linear(3, 3)
    module.extra = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(SchemaError, match=r"extra\.weight: expected a dense tensor in host memory.*meta"):
        slots_of(module)


def _with_numbers() -> ToyEngine:
    """An engine that keeps the norm of a weight as a Python number, and what it has loaded in a list."""
    model = Model(fc=Model(torch.float32, w=(4,)))
    fc: Any = model.get_submodule("fc")
    fc.norm, fc.seen = 0.0, []

    def load(model: torch.nn.Module, pairs: Any) -> None:
        for name, tensor in pairs:
            fc.norm = tensor.float().abs().max().item()
            fc.seen.append(name)
            model.get_parameter(name).data.copy_(tensor + 1)

    return ToyEngine(model, load)


def _numbers(engine: ToyEngine) -> tuple[float, list[str]]:
    fc: Any = engine.module.get_submodule("fc")
    return fc.norm, list(fc.seen)


def test_what_modules_keep_beside_tensors_is_left_by_binding_follows_installs_and_is_undone() -> None:
    engine = _with_numbers()
    schema = Schema((TensorSpec("fc.w", "bfloat16", (4,)),))
    loader = NativeLoader(engine)
    weights = loader.bind(Layout(schema, (FrameSpec("bfloat16", (Region(0, 0, ((4, 1),)),)),)))
    assert _numbers(engine) == (0.0, [])
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
    ready = weights.prepare(0, Change(Operation.OVERWRITE, None, bits_of(values)))
    weights.install(ready)
    loader.finalize()
    assert _numbers(engine) == (4.0, ["fc.w"])
    weights.undo(ready)
    loader.finalize()
    assert _numbers(engine) == (0.0, [])


def test_a_loader_that_stops_after_it_was_recorded_is_noticed_before_anything_is_written() -> None:
    engine = _with_numbers()
    schema = Schema((TensorSpec("fc.w", "bfloat16", (4,)),))
    loader = NativeLoader(engine)
    weights = loader.bind(Layout(schema, (FrameSpec("bfloat16", (Region(0, 0, ((4, 1),)),)),)))
    before = memory(engine)
    engine.loads = lambda model, pairs: None
    ready = weights.prepare(0, Change(Operation.OVERWRITE, None, np.ones(4, np.uint16)))
    weights.install(ready)
    with pytest.raises(StateError, match=r"to write fc\.w when it loads fc\.w.*nothing any more"):
        loader.finalize()
    assert memory(engine) == before


def test_a_loader_that_loads_the_same_again_is_none_that_has_stopped() -> None:
    engine = _with_numbers()
    schema = Schema((TensorSpec("fc.w", "bfloat16", (4,)),))
    loader = NativeLoader(engine)
    weights = loader.bind(Layout(schema, (FrameSpec("bfloat16", (Region(0, 0, ((4, 1),)),)),)))
    for _ in range(2):
        weights.install(weights.prepare(0, Change(Operation.OVERWRITE, None, np.ones(4, np.uint16))))
        loader.finalize()


def test_lists_that_hold_each_other_are_looked_at_once() -> None:
    model = Model(w=(4,))
    model.cycle = [torch.zeros(3)]
    model.cycle.append(model.cycle)
    assert [slot.path for slot in slots_of(model)] == ["w", "cycle.0"]
