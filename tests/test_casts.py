"""Casts at their edges, at each place that casts: torch's own results, for all patterns or all exponents and ties.

N  patterns of a dtype
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest
import torch
from support.refits import Weights, publish, zeros

import dcr
from dcr import kernels
from dcr.kernels import reference
from dcr.layout.boxes import Box, Dim
from dcr.layout.views import UNSIGNED, Bits, Table, rows_of
from dcr.loaders.native import NativeLoader
from dcr.probing.bits import bits_of
from dcr.sources.casts import CASTS
from dcr.testing.hostile import Model, ToyEngine, one_by_one
from dcr.testing.memory import MemoryTransport

FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
URL = "memory:///run"
NAN = {"bfloat16": 0x7FC0, "float16": 0x7E00}
# Under each upper half: what lies below, at, and above the ties of bfloat16 (15 bits), float16 (12) and both float8.
LOWER = (0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF)


def patterns(dtype: str) -> torch.Tensor:
    """All patterns of at most 16 bits; of float32 all upper halves, which is every exponent, with lower ones."""
    width = getattr(torch, dtype).itemsize
    if width <= 2:
        bits = np.arange(1 << 8 * width, dtype=UNSIGNED[width])
    else:
        upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
        bits = np.concatenate([upper | np.uint32(lower) for lower in LOWER])
    return torch.from_numpy(bits.view(np.uint8)).view(getattr(torch, dtype))


def read(bits: Bits, kind: int) -> Bits:
    return kernels.read(Table((bits,), rows_of([(0, 0, Box(0, 0, (Dim(len(bits), 1, 1),)))])), kind)


@pytest.mark.parametrize("cast", [read, reference.cast], ids=["kernels", "reference"])
@pytest.mark.parametrize(("source", "target"), CASTS)
def test_a_source_casts_numbers_as_torch_does_and_nans_as_stated(
    source: str, target: str, cast: Callable[[Bits, int], Bits]
) -> None:
    tensor = patterns(source)
    expected = bits_of(tensor.to(getattr(torch, target))).copy()
    expected[tensor.isnan().numpy()] = NAN[target]
    assert np.array_equal(cast(bits_of(tensor), CASTS[source, target]), expected)


def test_every_cast_of_a_source_has_a_stated_nan() -> None:
    assert {target for _, target in CASTS} == NAN.keys()


def _copies(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    module.get_parameter(name).data.copy_(tensor)


def _interleaves(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    module.get_parameter(name).data.view(-1, 2)[:, 1].copy_(tensor)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
@pytest.mark.parametrize(("source", "stored"), list(permutations(FLOATS, 2)))
@pytest.mark.parametrize("load", [_copies, _interleaves])
async def test_an_engine_that_casts_holds_what_its_own_copy_makes(
    source: str, stored: str, load: Callable[..., None]
) -> None:
    tensor, size = patterns(source), len(patterns(source)) * (1 + (load is _interleaves))
    engine = ToyEngine(Model(getattr(torch, stored), w=(size,)), one_by_one(load))
    with torch.no_grad():
        engine.module.get_parameter("w").view(torch.uint8).zero_()
    transport = MemoryTransport()
    trainer = Weights({"w": zeros(tensor)})
    async with (
        dcr.publisher(URL, source=dcr.source(trainer), transport=transport) as publisher,
        dcr.subscriber(URL, loader=NativeLoader(engine), member="m", transport=transport) as versions,
    ):
        for given in (tensor, tensor.view(torch.uint8).flip(0).view(tensor.dtype)):
            trainer.w.data.copy_(given)
            await publish(publisher)
            await (await anext(versions)).install()
            _require_as_copied(engine, given, load)


def _require_as_copied(engine: ToyEngine, given: torch.Tensor, load: Callable[..., None]) -> None:
    held = engine.module.get_parameter("w").data.clone()
    load(engine.module, "w", given)
    wanted = engine.module.get_parameter("w").data.clone()
    engine.module.get_parameter("w").data.copy_(held)
    differ = bits_of(held) != bits_of(wanted)
    assert not differ[~wanted.float().isnan().numpy()].any()
    assert held.float().isnan().equal(wanted.float().isnan())
