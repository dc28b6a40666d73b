"""Numbers that elements carry through a loader: every dtype gives them back, and nothing else is taken for one."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from itertools import product

import numpy as np
import pytest
import torch

from dcr.layout.schema import TensorSpec
from dcr.loaders.probe import BLOCK, Numbering, random_tensor
from dcr.probing.bits import bits_of

FLOATS = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
OTHERS = ["uint8", "int8", "int16", "int32", "int64", "bool"]
SHAPES = [(3, BLOCK // 2 + 1), (1,), (), (BLOCK + 7,)]


def numbering(sources: list[str], stored: str) -> Numbering:
    specs = [TensorSpec(f"t{i}", sources[i % len(sources)], shape) for i, shape in enumerate(SHAPES)]
    return Numbering(tuple(specs), frozenset({getattr(torch, stored)}))


def numbers_after(numbered: Numbering, stored: torch.dtype) -> np.ndarray:
    """What is read of a memory into which all tensors were copied, one after another."""
    pictures = []
    for number in range(numbered.passes):
        tensors = [numbered.tensor(index, number).reshape(-1).to(stored) for index in range(len(numbered.specs))]
        pictures.append(bits_of(torch.cat(tensors)))
    return numbered.read(pictures, stored)


@pytest.mark.parametrize("dtype", FLOATS + OTHERS)
def test_every_dtype_gives_the_numbers_back(dtype: str) -> None:
    numbered = numbering([dtype], dtype)
    assert np.array_equal(numbers_after(numbered, getattr(torch, dtype)), np.arange(numbered.numel))


@pytest.mark.parametrize(("source", "stored"), [pair for pair in product(FLOATS, FLOATS) if pair[0] != pair[1]])
def test_a_cast_between_floats_keeps_the_numbers(source: str, stored: str) -> None:
    numbered = numbering([source], stored)
    assert np.array_equal(numbers_after(numbered, getattr(torch, stored)), np.arange(numbered.numel))


@pytest.mark.parametrize(
    "sources", [["bfloat16", "float32"], ["bfloat16", "float16"], ["uint8", "bfloat16", "float32"]]
)
def test_tensors_of_several_dtypes_are_numbered_together(sources: list[str]) -> None:
    numbered = numbering(sources, "float32")
    assert np.array_equal(numbers_after(numbered, torch.float32), np.arange(numbered.numel))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e5m2", "uint8"])
def test_no_constant_is_taken_for_an_element(dtype: str) -> None:
    numbered, width = numbering([dtype], dtype), getattr(torch, dtype).itemsize
    patterns = np.arange(1 << 8 * min(width, 2)).astype(f"u{width}") << np.array(8 * max(0, width - 2), f"u{width}")
    assert (numbered.read([patterns] * numbered.passes, getattr(torch, dtype)) == -1).all()


COMPUTED = {
    "negate": lambda bits: -bits.view(torch.bfloat16),
    "halve": lambda bits: bits.view(torch.bfloat16) / 2,
    "add one": lambda bits: bits.view(torch.bfloat16) + 1,
    "swap bytes": lambda bits: bits.view(torch.uint8).view(-1, 2).flip(1),
    "set the lowest bit of a float32": lambda bits: bits.view(torch.bfloat16).float().view(torch.int32) | 1,
}


@pytest.mark.parametrize("change", COMPUTED)
def test_values_that_a_loader_computes_are_not_taken_for_elements(change: str) -> None:
    stored = torch.float32 if "float32" in change else torch.bfloat16
    numbered = numbering(["bfloat16"], str(stored).removeprefix("torch."))
    loaded = [numbered.tensor(0, number).reshape(-1) for number in range(numbered.passes)]
    pictures = [bits_of(COMPUTED[change](one.view(torch.int16)).reshape(-1).view(stored)) for one in loaded]
    assert (numbered.read(pictures, stored) == -1).all()


def test_a_layer_of_bfloat16_takes_three_loads() -> None:
    spec = TensorSpec("t", "bfloat16", (1 << 28,))
    assert Numbering((spec,), frozenset({torch.bfloat16, torch.float32})).passes == 3


def test_watching_a_loader_does_not_import_torchs_compiler() -> None:
    program = """
        import sys, torch
        from dcr.loaders.watch import Watch
        kept = torch.zeros(3)
        with Watch({kept.untyped_storage().data_ptr(): 7}, []) as watch:
            kept.copy_(torch.ones(3))
        assert watch.written == {7}, watch.written
        print("torch._dynamo" in sys.modules)
    """
    ran = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "False\n"


ENDLESS = {"float8_e4m3fn": {0x7F, 0xFF}, "float8_e4m3fnuz": {0x80}, "float8_e5m2fnuz": {0x80}}


@pytest.mark.parametrize("dtype", ENDLESS)
def test_every_pattern_that_is_a_number_is_tried(dtype: str) -> None:
    """Also the greatest ones, of 256 and more: a cast that saturates is no cast of torch's."""
    tried = set(bits_of(random_tensor(TensorSpec("t", dtype, (1 << 14,)), 1, 0)).tolist())
    assert tried == set(range(256)) - ENDLESS[dtype]


def test_every_pattern_of_sixteen_bits_that_is_a_number_is_tried() -> None:
    tried = np.unique(bits_of(random_tensor(TensorSpec("t", "bfloat16", (1 << 21,)), 1, 0)))
    assert np.array_equal(tried, [bits for bits in range(1 << 16) if bits & 0x7F80 != 0x7F80])
