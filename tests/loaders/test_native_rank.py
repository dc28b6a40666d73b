"""One of several ranks of any engine: what it holds, what it leaves to others, and what may move."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import pytest
import torch
from support.refits import Weights

from dcr.codecs.patch import Change, Operation
from dcr.engines.ranks import Ranks
from dcr.layout.frames import FrameSpec, Layout, Region
from dcr.layout.schema import Schema, TensorSpec
from dcr.loaders.engine import Pairs
from dcr.loaders.native import NativeLoader

LAYOUT = Layout(Schema((TensorSpec("weight", "float32", (6,)),)), (FrameSpec("float32", (Region(0, 0, ((6, 1),)),)),))


class Toy:
    """A rank with a weight, and a cache of its own that nobody publishes; only the first rank adds the bias."""

    replaces = False

    def __init__(self, rank: int = 0, *, bias: bool = False) -> None:
        self.rank = rank
        self.module = Weights({"weight": torch.arange(6.0)} | ({"bias": torch.zeros(4)} if bias else {}))
        self.module.register_buffer("cache", torch.ones(3), persistent=False)

    def load(self, pairs: Pairs) -> None:
        for name, tensor in pairs:
            if name == "other":
                continue
            kept = tensor if name != "bias" or self.rank == 0 else torch.zeros_like(tensor)
            self.module.get_parameter(name).data.copy_(kept)

    def settle(self, modules: Set[str]) -> None:
        pass

    def fingerprint(self) -> bytes:
        return b"toy"


@pytest.fixture
def engine() -> Toy:
    return Toy()


def test_a_buffer_that_no_load_writes_may_move(engine: Toy) -> None:
    loader = NativeLoader(engine)
    loader.bind(LAYOUT)
    before = loader.fingerprint()
    engine.module.cache = torch.ones(3)
    assert loader.fingerprint() == before


def test_a_weight_may_not_move(engine: Toy) -> None:
    loader = NativeLoader(engine)
    loader.bind(LAYOUT)
    before = loader.fingerprint()
    engine.module.weight.data = torch.arange(6.0)
    assert loader.fingerprint() != before


def test_a_weight_may_not_go(engine: Toy) -> None:
    loader = NativeLoader(engine)
    loader.bind(LAYOUT)
    before = loader.fingerprint()
    del engine.module.weight
    assert loader.fingerprint() != before


def test_a_rank_that_holds_none_of_a_frame_has_nothing_to_write(engine: Toy) -> None:
    """The expert of a neighbour: its loader leaves it out, whatever its name."""
    specs = (TensorSpec("weight", "float32", (6,)), TensorSpec("other", "float32", (2,)))
    frames = tuple(FrameSpec("float32", (Region(t, 0, ((spec.numel, 1),)),)) for t, spec in enumerate(specs))
    rank = NativeLoader(engine, partial=True).bind(Layout(Schema(specs), frames))
    assert rank.parts == [Region(0, 0, ((6, 1),))]
    for positions in (None, np.arange(2, dtype=np.uint32)):
        ready = rank.prepare(1, Change(Operation.OVERWRITE, positions, np.ones(2, np.uint32)))
        assert (ready.changed, ready.writes, ready.parts) == (0, (), ())
        rank.install(ready)


def test_a_bias_that_only_the_first_rank_adds_is_zero_elsewhere() -> None:
    specs = (TensorSpec("weight", "float32", (6,)), TensorSpec("bias", "float32", (4,)))
    frames = (FrameSpec("float32", (Region(0, 0, ((6, 1),)), Region(1, 0, ((4, 1),)))),)
    layout = Layout(Schema(specs), frames)
    engines = [Toy(rank, bias=True) for rank in range(2)]
    ranks = Ranks([NativeLoader(engine, partial=True) for engine in engines])
    weights = ranks.bind(layout)
    values = np.arange(1, 11, dtype=np.float32)
    weights.install(weights.prepare(0, Change(Operation.OVERWRITE, None, values.view(np.uint32))))
    ranks.finalize()
    assert [engine.module.weight.tolist() for engine in engines] == [values[:6].tolist()] * 2
    assert [engine.module.bias.tolist() for engine in engines] == [values[6:].tolist(), [0.0] * 4]


def test_binding_itself_changes_no_fingerprint(engine: Toy) -> None:
    loader = NativeLoader(engine)
    before = loader.fingerprint()
    loader.bind(LAYOUT)
    assert loader.fingerprint() == before
