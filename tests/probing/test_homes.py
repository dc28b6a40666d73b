"""Where tensors lie: a quick look notices every way in which they can move, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any

import pytest
import torch

from dcr.layout.frames import FrameSpec, Layout, Region
from dcr.layout.schema import Schema, TensorSpec
from dcr.loaders.module import ModuleLoader
from dcr.loaders.native import NativeLoader
from dcr.probing.homes import Homes


class Model(torch.nn.Module):
    """A layer, a persistent buffer, a buffer of the engine's own, and a parameter that is not there yet."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, bias=False)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_parameter("later", None)


def move_data(model: Model) -> None:
    model.layer.weight.data = model.layer.weight.data.clone()


def transpose(model: Model) -> None:
    model.layer.weight.data = model.layer.weight.data.t()


def reshape(model: Model) -> None:
    model.layer.weight.data = model.layer.weight.data.view(2, 8)


def view_as_another_dtype(model: Model) -> None:
    model.scale.data = model.scale.data.view(torch.int32)


def negate_lazily(model: Model) -> None:
    """The same memory in the same shape, which shows other values from now on."""
    model.scale.data = torch._neg_view(model.scale.data)


def replace_parameter(model: Model) -> None:
    model.layer.weight = torch.nn.Parameter(model.layer.weight.data)


def replace_module(model: Model) -> None:
    new = torch.nn.Linear(4, 4, bias=False)
    new.weight = model.layer.weight
    model.layer = new


def replace_buffer(model: Model) -> None:
    model.scale = torch.ones(3)


def add_parameter(model: Model) -> None:
    model.layer.bias = torch.nn.Parameter(torch.zeros(4))


def add_buffer(model: Model) -> None:
    model.register_buffer("more", torch.ones(1))


def keep_a_buffer_out_of_the_state(model: Model) -> None:
    model._non_persistent_buffers_set.add("scale")


def add_module(model: Model) -> None:
    model.head = torch.nn.Linear(2, 2)


def fill_in_what_was_none(model: Model) -> None:
    model.later = torch.nn.Parameter(torch.zeros(1))


def remove_parameter(model: Model) -> None:
    del model.layer.weight


def remove_module(model: Model) -> None:
    del model.layer


def replace_holder(model: Model) -> None:
    model.layer._parameters = dict(model.layer._parameters)


def give_the_storage_back(model: Model) -> None:
    model.scale.untyped_storage().resize_(0)


IN_PLACE = [replace_parameter, replace_module, replace_holder, negate_lazily]  # the same memory under the same names
MOVES = [
    move_data,
    transpose,
    reshape,
    view_as_another_dtype,
    replace_buffer,
    add_parameter,
    add_buffer,
    keep_a_buffer_out_of_the_state,
    add_module,
    fill_in_what_was_none,
    remove_parameter,
    remove_module,
    give_the_storage_back,
]


@pytest.mark.parametrize("move", MOVES + IN_PLACE)
def test_a_move_is_noticed(move: Callable[[Model], None]) -> None:
    model = Model()
    homes = Homes(model)
    assert homes.are_left()
    move(model)
    assert not homes.are_left()


def keep(model: Model) -> None:
    """Nothing."""


def replace_passing_buffer(model: Model) -> None:
    model.cache = torch.ones(2)


def write_values(model: Model) -> None:
    model.layer.weight.data.fill_(7)


@pytest.mark.parametrize("happens", [keep, replace_passing_buffer, write_values])
def test_what_is_no_move_is_not_taken_for_one(happens: Callable[[Model], None]) -> None:
    model = Model()
    homes = Homes(model)
    happens(model)
    assert homes.are_left()


def test_a_view_that_was_lazy_before_has_not_moved() -> None:
    model = Model()
    negate_lazily(model)
    assert Homes(model).are_left()


def test_a_tensor_that_is_looked_at_besides_is_noticed_as_well() -> None:
    model = Model()
    homes = Homes(model, [(model._buffers, "cache")])
    assert homes.are_left()
    replace_passing_buffer(model)
    assert not homes.are_left()


class Counted(torch.nn.Parameter):
    """A parameter whose class has code of its own for all that is asked of it, as vLLM's have."""

    asked = 0

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.asked += 1
        return super().__torch_function__(func, types, args, kwargs or {})


def test_the_code_of_a_tensors_class_is_not_run_to_look_where_it_lies() -> None:
    model = Model()
    model.layer.weight = Counted(model.layer.weight.data)
    homes = Homes(model)
    Counted.asked = 0
    assert homes.are_left()
    assert Counted.asked == 0
    model.layer.weight.data = torch.zeros(4, 4)
    assert not homes.are_left()


class Engine:
    """An engine whose loader writes a weight and an attribute of its own, or a tensor in a list."""

    replaces = False

    def __init__(self, nested: bool) -> None:
        self.module = torch.nn.Module()
        self.module.register_parameter("w", torch.nn.Parameter(torch.zeros(4), requires_grad=False))
        self.nested = nested
        if nested:
            self.module.packed = [torch.zeros(4)]
        else:
            self.module.packed = torch.zeros(4)

    @property
    def packed(self) -> torch.Tensor:
        return self.module.packed[0] if self.nested else self.module.packed

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in pairs:
            self.module.w.data.copy_(tensor)
            self.packed.copy_(tensor)

    def settle(self, modules: Set[str]) -> None:
        pass

    def fingerprint(self) -> bytes:
        return b"packed"


LAYOUT = Layout(Schema((TensorSpec("w", "float32", (4,)),)), (FrameSpec("float32", (Region(0, 0, ((4, 1),)),)),))


@pytest.mark.parametrize("nested", [False, True])
def test_what_a_load_writes_besides_may_not_move_either(nested: bool) -> None:
    engine = Engine(nested)
    loader = NativeLoader(engine)
    loader.bind(LAYOUT)
    before = loader.fingerprint()
    assert loader.fingerprint() == before
    engine.module.packed = [torch.zeros(4)] if nested else torch.zeros(4)
    assert loader.fingerprint() != before


@pytest.mark.parametrize("move", MOVES)
def test_a_loader_tells_an_epoch_from_another(move: Callable[[Model], None]) -> None:
    """The first fingerprint is that of a full look, the second that of a quick one."""
    model = Model()
    loader = ModuleLoader(model)
    assert loader.fingerprint() == loader.fingerprint()
    before = loader.fingerprint()
    move(model)
    assert loader.fingerprint() != before
