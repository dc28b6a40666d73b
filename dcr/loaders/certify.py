"""Certify: random bits pushed through an engine's loader land where a record says, on every byte.

Each load has other bits and another prefill, so what a loader leaves alone, sets to a constant, or makes of values
cannot pass for a move. A record that was not certified is not used.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dcr.layout.boxes import Box
from dcr.layout.schema import TensorSpec
from dcr.layout.views import Bits
from dcr.loaders.engine import Memory
from dcr.loaders.probe import dtype_of, prefill, random_tensor, torch_of
from dcr.loaders.trial import Trial
from dcr.probing.bits import SYMBOLIC, bits_of, name_of

SEEDS = (101, 202)


@dataclass(frozen=True, slots=True)
class Home:
    """One box of a tensor in a memory: from there to canonical coordinates."""

    tensor: int
    memory: int
    box: Box


@dataclass(frozen=True, slots=True)
class Cast:
    """Canonical bits to stored bits, as the engine's own copy does it."""

    source: torch.dtype
    target: torch.dtype

    def __call__(self, bits: Bits) -> Bits:
        return bits_of(torch_of(bits, self.source).to(self.target))


@dataclass(frozen=True, slots=True, eq=False)
class Finding:
    """What a record says of one memory: homes, constants (elements and their bits), and what it cannot explain.

    foreign: elements that are made of values. tangled: what is wrong with homes that are too many boxes.
    """

    memory: int
    homes: tuple[Home, ...]
    constants: NDArray[np.int64]
    constant_bits: Bits
    foreign: int
    tangled: str = ""


def cast_of(spec: TensorSpec, memory: Memory) -> Cast | None:
    """What becomes of a tensor's elements in a memory; None if they keep their bits."""
    source, target = dtype_of(spec), memory.dtype
    same = source == target or (
        source.itemsize == target.itemsize and not SYMBOLIC.isdisjoint((name_of(source), name_of(target)))
    )
    return None if same else Cast(source, target)


def certify(trial: Trial, tensors: Collection[int], findings: Sequence[Finding], number: int) -> set[int]:
    """Load tensors with random bits over random prefill; the memories that do not hold what was foretold.

    number: which of the `SEEDS`; a record is certified by both, with all other tensors loaded anew in between. In the
    first, memories that no finding names must be as they were: what is written there fails every memory of the unit.
    """
    specs, known = trial.schema.tensors, {finding.memory for finding in findings}
    trial.fill(known, SEEDS[number] + number)
    loaded = {t: random_tensor(specs[t], SEEDS[number], t) for t in tensors}
    sources = {t: bits_of(tensor).copy() for t, tensor in loaded.items()}  # a loader may change what it is given
    trial.load(tensors, loaded.__getitem__, settle=known)
    failed: set[int] = set()
    for finding in findings:
        memory = trial.stand_ins.memories[finding.memory]
        expected = prefill(memory, SEEDS[number] + number, finding.memory)
        _foretell(memory.bits(expected), memory, finding, sources, specs)
        if not np.array_equal(expected, trial.stand_ins.scratch(finding.memory)):
            failed.add(finding.memory)
    return known if number == 0 and trial.scratched(known) else failed


def _foretell(
    bits: Bits, memory: Memory, finding: Finding, sources: dict[int, Bits], specs: Sequence[TensorSpec]
) -> None:
    """Write into a picture of a memory what a load should leave there."""
    bits[finding.constants] = finding.constant_bits
    for home in finding.homes:
        cast = cast_of(specs[home.tensor], memory)
        source = sources[home.tensor] if cast is None else cast(sources[home.tensor])
        strided(bits, home.box, "here")[...] = strided(source, home.box, "there")


def strided(flat: Bits, box: Box, side: str) -> Bits:
    """The elements of one side of a box, as a view of a whole storage or tensor."""
    first = box.here0 if side == "here" else box.there0
    strides = tuple(getattr(dim, side) * flat.itemsize for dim in box.dims)
    view: Bits = np.lib.stride_tricks.as_strided(flat[first:], tuple(dim.n for dim in box.dims), strides)
    return view
