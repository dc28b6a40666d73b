"""What a version costs at an engine's side grows with what it touches, and with nothing else: counted, not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.counts import Scanned, calls_of
from support.refits import Weights

from dcr.codecs.patch import Change, Operation
from dcr.engines.ranks import Ranks
from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import FrameSpec, Layout, Region
from dcr.layout.schema import Schema, TensorSpec
from dcr.loaders.engine import slots_of
from dcr.loaders.module import ModuleLoader
from dcr.loaders.native import NativeLoader
from dcr.loaders.standin import StandIns
from dcr.memory.placement import Place, Placement

ELEMENTS = 6  # of each tensor


def layout_of(count: int) -> Layout:
    """Many tensors in one frame."""
    specs = tuple(TensorSpec(f"w{number}", "bfloat16", (2, 3)) for number in range(count))
    regions = tuple(Region(number, 0, ((ELEMENTS, 1),)) for number in range(count))
    return Layout(Schema(specs), (FrameSpec("bfloat16", regions),))


def weights_of(count: int) -> Weights:
    return Weights({f"w{number}": torch.zeros(2, 3, dtype=torch.bfloat16) for number in range(count)})


class Engine:
    """An engine that keeps tensors as they are published."""

    replaces = False

    def __init__(self, count: int) -> None:
        self.module = weights_of(count)
        self.named = dict(self.module.named_parameters())

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in pairs:
            self.named[name].data.copy_(tensor)

    def settle(self, modules: Set[str]) -> None:
        pass

    def fingerprint(self) -> bytes:
        return b"many"


def module(count: int) -> ModuleLoader:
    return ModuleLoader(weights_of(count))


def native(count: int) -> NativeLoader:
    return NativeLoader(Engine(count))


def rank(count: int) -> NativeLoader:
    return NativeLoader(Engine(count), partial=True)


def change_of(count: int) -> Change:
    """One element of each tensor."""
    positions = np.arange(count, dtype=np.uint32) * ELEMENTS
    return Change(Operation.OVERWRITE, positions, np.ones(count, np.uint16))


def pause_of(make: Callable[[int], ModuleLoader | NativeLoader], count: int) -> tuple[int, int, int]:
    """Calls of a preparation, of an installation and of an undo, in which each tensor changes."""
    loader = make(count)
    weights = loader.bind(layout_of(count))
    ready = weights.prepare(0, change_of(count))
    prepared = calls_of(lambda: weights.prepare(0, change_of(count)))
    installed = calls_of(lambda: (weights.install(ready), loader.finalize()))
    undone = calls_of(lambda: (weights.undo(ready), loader.finalize()))
    return prepared, installed, undone


@pytest.mark.parametrize("make", [module, native, rank])
def test_a_pause_costs_no_call_per_tensor(make: Callable[[int], ModuleLoader | NativeLoader]) -> None:
    assert pause_of(make, 20) == pause_of(make, 40)


@pytest.mark.parametrize("make", [module, native, rank])
def test_a_look_at_where_weights_lie_asks_each_for_its_place_once(
    make: Callable[[int], ModuleLoader | NativeLoader],
) -> None:
    calls = []
    for count in (20, 40):
        loader = make(count)
        loader.bind(layout_of(count))
        loader.fingerprint()
        calls.append(calls_of(loader.fingerprint))
    assert calls[1] - calls[0] <= 4 * 20  # itself, its address, its strides, and whether it shows what lies there


def test_where_stand_ins_lie_is_worked_out_once_and_kept_up() -> None:
    """Every trial of a loader asks for it, and there is one for each tensor."""
    sizes = {"small": 6, "large": 1 << 20, "last": 1 << 20}
    slots = slots_of(Weights({name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}))
    with StandIns(slots) as stand_ins:
        index = stand_ins.index
        for noisy in ([], [0, 1], [1, 2], []):
            stand_ins.stage(noisy)
            assert stand_ins.index is index
            assert index == {slot.tensor.untyped_storage().data_ptr(): stand_ins.memory_of(slot) for slot in slots}


def test_joining_ranks_costs_a_frame_what_is_in_it() -> None:
    """Sums are made for the frame's tensors, not for all of the model's."""
    count, cut = 30, 3
    one = layout_of(count)
    regions = one.specs[0].regions
    layout = Layout(one.schema, tuple(FrameSpec("bfloat16", regions[at : at + cut]) for at in range(0, count, cut)))
    ranks = Ranks([rank(count)])
    ready = ranks.bind(layout).prepare(7, change_of(cut))
    assert ready.old_sums.base.shape == ready.new_sums.base.shape == (cut, 4)


@pytest.mark.parametrize("partial", [False, True])
def test_binding_looks_at_each_tensor_of_a_frame_a_few_times(partial: bool) -> None:
    count = 200
    layout = layout_of(count)
    scanned = Scanned(layout.frames[0].tensors)
    object.__setattr__(layout, "frames", (replace(layout.frames[0], tensors=scanned),))
    storages = [np.zeros(ELEMENTS, np.uint16) for _ in range(count)]
    places = [Place(number, number, Box(0, 0, (Dim(ELEMENTS, 1, 1),))) for number in range(count)]
    Placement(layout, storages, places, partial=partial)
    assert scanned.looks <= 5 * count
