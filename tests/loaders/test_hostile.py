"""Engines whose loaders are hostile: tensors get their kinds, no byte is ever wrong, what cannot be done is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from dcr.errors import SchemaError
from dcr.layout.schema import Schema, TensorSpec
from dcr.loaders import standin
from dcr.loaders.engine import Adapter, Pairs
from dcr.loaders.record import Kind, record
from dcr.testing.engines import EngineTests, World
from dcr.testing.hostile import CASES as MOVES
from dcr.testing.hostile import Case, Model, ToyEngine
from dcr.testing.stateful import STATEFUL

CASES = {**MOVES, **STATEFUL}
TAKEN = [name for name, case in CASES.items() if not case.refused]
REFUSED = [name for name, case in CASES.items() if case.refused]


def schema_of(case: Case) -> Schema:
    return Schema(
        tuple(TensorSpec(name, "bfloat16", shape, case.aliases.get(name, ())) for name, shape in case.shapes.items())
    )


@pytest.mark.parametrize("name", TAKEN)
class TestHostile(EngineTests):
    """The kit for engines, over every case."""

    @pytest.fixture(autouse=True)
    def _case(self, name: str) -> None:
        self.case = CASES[name]
        self.waive = self.case.waive

    def make(self) -> Adapter:
        return self.case.make()

    def schema(self) -> Schema:
        return schema_of(self.case)

    def kinds(self) -> Mapping[str, Kind]:
        return self.case.kinds

    def test_a_map_has_no_more_boxes_than_it_needs(self) -> None:
        world = self._world()
        world.bind()
        names = [world.schema.tensors[home.tensor].name for home in world.loader.record.homes]
        assert {name: names.count(name) for name in self.case.homes} == dict(self.case.homes)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_updated_is_refused_by_name_and_untouched(name: str) -> None:
    case = CASES[name]
    world = World(lambda pairs: case.make(), schema_of(case))
    before, pointers = world.memory(), world.pointers()
    with pytest.raises(SchemaError, match=case.refused):
        world.bind()
    assert (world.memory() == before, world.pointers() == pointers) == (True, True)


LARGE = [name for name in TAKEN if name != "expert fan-out"]  # its loader reads a table, which only small memory keeps


@pytest.mark.parametrize("name", LARGE)
def test_memory_that_begins_as_empty_pages_makes_no_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins of large tensors are no copies."""
    case = CASES[name]
    found = []
    for small_bytes in (standin.SMALL_BYTES, 0):
        monkeypatch.setattr(standin, "SMALL_BYTES", small_bytes)
        engine = case.make()
        found.append(record(engine, schema_of(case)))
    assert [(one.verdicts, one.homes, one.reloads, one.names) for one in found[:1]] == [
        (one.verdicts, one.homes, one.reloads, one.names) for one in found[1:]
    ]


def test_a_record_takes_a_unit_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of other units are not there while one is recorded: memory is bounded by the largest layer."""
    monkeypatch.setattr(standin, "SMALL_BYTES", 0)
    shapes = {f"layers.{layer}.w": (8, 8) for layer in range(6)}
    layers = torch.nn.ModuleList([Model(w=(8, 8)) for _ in range(6)])
    most: list[int] = []
    entered: list[standin.StandIns] = []
    enter = standin.StandIns.__enter__
    monkeypatch.setattr(standin.StandIns, "__enter__", lambda self: (entered.append(self), enter(self))[1])

    def load(model: torch.nn.Module, pairs: Pairs) -> None:
        for name, tensor in pairs:
            model.get_parameter(name).data.copy_(tensor)
        most.append(sum(entered[0].scratched(index) for index in range(6)))

    engine = ToyEngine(Model(layers=layers), load)
    record(engine, Schema(tuple(TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items())))
    assert set(most) == {1}
