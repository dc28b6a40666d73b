"""What recording an engine costs, what it reads, and what it leaves behind."""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dcr.layout.schema import Schema, TensorSpec
from dcr.loaders import standin
from dcr.loaders.engine import Pairs, slots_of
from dcr.loaders.record import Kind, record
from dcr.testing.hostile import CASES, Model, ToyEngine, one_by_one, parameter
from dcr.testing.stateful import STATEFUL


def schema_of(shapes: dict[str, tuple[int, ...]]) -> Schema:
    return Schema(tuple(TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items()))


def counted(change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[ToyEngine, Counter[str]]:
    """An engine of four layers, and how often its loader has taken each tensor."""
    taken: Counter[str] = Counter()

    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        taken[name] += 1
        parameter(model, name).copy_(change(tensor))

    layers = torch.nn.ModuleList([Model(w=(8, 8), v=(8,)) for _ in range(4)])
    return ToyEngine(Model(layers=layers), one_by_one(load)), taken


LAYERS = {f"layers.{i}.{name}": shape for i in range(4) for name, shape in {"w": (8, 8), "v": (8,)}.items()}


def test_what_is_only_moved_is_not_loaded_tensor_by_tensor() -> None:
    """An engine's loader may go through all of its modules at each call, and there are more tensors than layers."""
    together: set[int] = set()

    def load(model: torch.nn.Module, pairs: Pairs) -> None:
        together.add(len(pairs))
        for name, tensor in pairs:
            parameter(model, name).copy_(tensor)

    layers = torch.nn.ModuleList([Model(w=(8, 8), v=(8,)) for _ in range(4)])
    record(ToyEngine(Model(layers=layers), load), schema_of(LAYERS))
    assert together == {2}


@pytest.mark.parametrize(("change", "loads"), [(lambda tensor: tensor, 7), (lambda tensor: tensor + 1, 15)])
def test_recording_takes_a_fixed_number_of_loads(change: Callable[[torch.Tensor], torch.Tensor], loads: int) -> None:
    """Two together, two digits and a complement, two certificates; one alone and more for what is made of values."""
    engine, taken = counted(change)
    record(engine, schema_of(LAYERS))
    assert max(taken.values()) <= loads


@pytest.mark.parametrize("fails", [False, True], ids=["taken", "refused"])
def test_what_modules_keep_beside_tensors_is_as_it_was(fails: bool) -> None:
    """Else an engine goes on with numbers that were made of random bits."""

    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        model.scale = float(tensor.float().abs().max())  # type: ignore[assignment]
        model.seen.append(name)  # type: ignore[operator, union-attr]
        if fails:
            raise ZeroDivisionError
        parameter(model, name).copy_(tensor)

    engine = ToyEngine(Model(w=(4, 4)), one_by_one(load))
    engine.module.scale, engine.module.seen = 1.0, []  # type: ignore[assignment]
    (verdict,) = record(engine, schema_of({"w": (4, 4)}), waived={0}).verdicts
    assert verdict.kind is (Kind.SKIP if fails else Kind.LAYER)
    assert (engine.module.scale, engine.module.seen) == (1.0, [])


def test_a_large_table_that_a_loader_reads_is_found_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large stand-ins begin as empty pages: one that is read begins as a copy."""
    monkeypatch.setattr(standin, "SMALL_BYTES", 0)
    case = CASES["expert fan-out"]
    shapes = {f"experts.{i}.w": (4, 6) for i in range(3)}
    verdicts = record(case.make(), schema_of(shapes), waived={2}).verdicts
    assert [verdict.kind for verdict in verdicts] == [Kind.BITS, Kind.BITS, Kind.SKIP]


@pytest.mark.parametrize("name", [name for name, case in STATEFUL.items() if not case.refused])
def test_what_is_large_is_recorded_as_what_is_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a loader reads besides is random bits in one of two trials, of whatever size it is."""
    monkeypatch.setattr(standin, "SMALL_BYTES", 0)
    case = STATEFUL[name]
    schema = schema_of(dict(case.shapes))
    found = {
        spec.name: verdict.kind
        for spec, verdict in zip(schema.tensors, record(case.make(), schema).verdicts, strict=True)
    }
    assert found == {spec.name: case.kinds.get(spec.name, Kind.BITS) for spec in schema.tensors}


def test_stand_ins_of_noise_are_noise_and_return_to_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standin, "SMALL_BYTES", 64)
    model = Model(torch.float32, large=(1 << 10,), small=(4,))
    with standin.StandIns(slots_of(model)) as stand_ins:
        before = [stand_ins.scratch(index).tobytes() for index in range(2)]
        stand_ins.stage({0, 1})
        noise = [stand_ins.scratch(index).tobytes() for index in range(2)]
        assert not any(one == other for one, other in zip(before, noise, strict=True))
        model.get_parameter("large").data.zero_()
        stand_ins.reset({0})
        assert model.get_parameter("large").data.numpy().tobytes() == noise[0]
        stand_ins.stage()
        assert [stand_ins.scratch(index).tobytes() for index in range(2)] == before
        assert model.get_parameter("large").data.numpy().tobytes() == before[0]


def test_memory_that_no_load_touches_is_not_read_through() -> None:
    """Looking for writes that were not seen creates no page of a large stand-in."""
    model = Model(torch.float32, cache=(16 << 20,))
    with standin.StandIns(slots_of(model)) as stand_ins:
        address = model.get_parameter("cache").data_ptr()
        assert not stand_ins.scratched(0)
        assert pages_in(address, 64 << 20) == 0


@pytest.mark.parametrize("place", [0, 5_000_001, (16 << 20) - 1])
def test_a_write_anywhere_in_a_large_stand_in_is_seen_until_it_is_reset(place: int) -> None:
    model = Model(torch.float32, cache=(16 << 20,))
    with standin.StandIns(slots_of(model)) as stand_ins:
        cache = model.get_parameter("cache").data
        assert cache[7_000_000] == 0  # a page that was read only
        cache[place] = 1
        assert stand_ins.scratched(0)
        stand_ins.reset({0})
        assert not stand_ins.scratched(0)


def pages_in(address: int, size_bytes: int) -> int:
    """How many pages of a range exist."""
    page = mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        entries = np.frombuffer(os.pread(file.fileno(), size_bytes // page * 8, address // page * 8), np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(62)))
