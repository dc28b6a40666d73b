"""Engines whose loaders are hostile: tensors get their kinds, no byte is ever wrong, what cannot be done is refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dcr.errors import SchemaError
from dcr.loaders.engine import Engine
from dcr.loaders.record import Kind
from dcr.schema import Schema, TensorSpec
from dcr.testing.engines import EngineTests, World
from dcr.testing.hostile import CASES, Case

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

    def make(self) -> Engine:
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
