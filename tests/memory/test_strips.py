"""Strips: a rank that holds some of a model, some of it twice, and some only as a cast, writes just what it holds.

The oracle keeps where each canonical element lies as arrays of indices, and knows nothing of boxes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.codecs.patch import Change, Operation
from dcr.errors import DigestMismatch, LayoutError
from dcr.kernels import reference
from dcr.layout import frames
from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import FrameSpec, Layout, Region, Shard
from dcr.layout.schema import Schema, TensorSpec, keys
from dcr.layout.views import Bits
from dcr.memory.placement import Place, Placement, wanted
from dcr.memory.strips import covered, joined, shared, without

examples = settings(deadline=None, max_examples=150)


def expand(runs: np.ndarray) -> np.ndarray:
    """The numbers in some runs, one after another."""
    return np.array([number for start, count in runs.tolist() for number in range(start, start + count)], np.int64)


def tripled(bits: Bits) -> Bits:
    """A cast: to twice the width."""
    return bits.astype(np.uint32) * np.uint32(3)


@dataclass
class Rank:
    """Storages, the places in them, and for each place the canonical and the storage index of every element."""

    layout: Layout
    held: list[np.ndarray]  # canonical bits of each tensor, as far as they are held
    storages: list[Bits] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    cells: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def add(self, tensor: int, there: np.ndarray, order: list[int], pad: int, cast: bool) -> None:
        """A place of some canonical elements, given as an array of their indices, in memory of its own."""
        laid = np.arange(there.size).reshape(there.transpose(order).shape).transpose(np.argsort(order)) + pad
        dims = [Dim(n, h // laid.itemsize, 0) for n, h in zip(there.shape, laid.strides, strict=True)]
        steps = [int(there.take(1, axis).flat[0] - there.flat[0]) if n > 1 else 0 for axis, n in enumerate(there.shape)]
        box = Box(pad, int(there.flat[0]), tuple(Dim(d.n, d.here, step) for d, step in zip(dims, steps, strict=True)))
        self.places.append(Place(tensor, len(self.storages), box, tripled if cast else None))
        self.storages.append(np.full(there.size + 2 * pad, 251, np.uint32 if cast else np.uint16))
        self.cells.append((there.reshape(-1), laid.reshape(-1)))
        self.load()

    def load(self) -> None:
        """Write what is held into every place."""
        for place, (there, here) in zip(self.places, self.cells, strict=True):
            bits = self.held[place.tensor][there]
            self.storages[place.storage][here] = tripled(bits) if place.cast else bits

    def snapshot(self) -> list[list[int]]:
        return [storage.tolist() for storage in self.storages]

    def elements(self, index: int) -> list[tuple[int, int]]:
        """Tensor and canonical index of each element of a frame."""
        regions = self.layout.frames[index].spec.regions
        return [(r.tensor, i) for r in regions for first, n in r.runs().tolist() for i in range(first, first + n)]


@st.composite
def ranks(draw: st.DrawFn) -> Rank:
    """Tensors cut along two dimensions; a rank with some of the pieces, and further copies of parts of those."""
    specs, shards, pieces = [], [], []
    for tensor in range(draw(st.integers(1, 2))):
        shape = draw(st.tuples(*[st.integers(1, 5)] * 3))
        specs.append(TensorSpec(f"t{tensor}", "bfloat16", shape))
        canonical = np.arange(specs[-1].numel).reshape(shape)
        for cut in [canonical[:, i::2] for i in range(2)] if draw(st.booleans()) else [canonical]:
            if cut.size:
                dims = tuple(Dim(n, 0, stride // 8) for n, stride in zip(cut.shape, cut.strides, strict=True))
                shards.append(Shard(tensor, 0, Box(0, int(cut.flat[0]), dims)))
        edges = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in (shape[0], shape[2])]
        pieces += [
            (tensor, canonical[a:b, :, c:d])
            for a, b in zip(edges[0], edges[0][1:], strict=False)
            for c, d in zip(edges[1], edges[1][1:], strict=False)
        ]
    schema = Schema(tuple(specs))
    planned = frames.plan(schema, shards, draw(st.integers(1, 40)))
    layout = Layout(schema, tuple(one.spec for one in planned))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    rank = Rank(layout, [rng.integers(0, 1 << 16, spec.numel).astype(np.uint16) for spec in specs])
    chosen = [piece for piece in pieces if draw(st.booleans())]
    for tensor, there in chosen:
        rank.add(tensor, there, draw(st.permutations(range(3))), draw(st.integers(0, 2)), cast=False)
    for tensor, there in chosen:
        if draw(st.booleans()):
            part = there[draw(st.integers(0, len(there) - 1)) :, :: draw(st.integers(1, 2))]
            rank.add(tensor, part, draw(st.permutations(range(3))), 1, cast=draw(st.booleans()))
    return rank


def change_of(rank: Rank, index: int, seed: int, operation: Operation, dense: bool) -> tuple[Change, dict[int, int]]:
    """A change of one frame, and the new bits by position."""
    rng = np.random.default_rng(seed)
    elements = rank.elements(index)
    positions = np.arange(len(elements)) if dense else np.flatnonzero(rng.random(len(elements)) < 0.4)
    new = rng.integers(0, 1 << 16, len(positions)).astype(np.uint16)
    old = np.array([rank.held[t][i] for t, i in elements], np.uint16)[positions]
    values = {Operation.OVERWRITE: new, Operation.XOR: new ^ old, Operation.STEP: new - old}[operation]
    where = None if dense else positions.astype(np.uint32)
    return Change(operation, where, values), dict(zip(positions.tolist(), new.tolist(), strict=True))


OPERATIONS = st.sampled_from([*[(op, False) for op in Operation], (Operation.OVERWRITE, True)])


@examples
@given(ranks(), st.data(), OPERATIONS)
def test_a_change_lands_in_every_place_of_this_rank_and_nowhere_else(
    rank: Rank, data: st.DataObject, how: tuple[Operation, bool]
) -> None:
    placement = Placement(rank.layout, rank.storages, rank.places, partial=True)
    index = data.draw(st.integers(0, len(rank.layout.frames) - 1))
    change, new = change_of(rank, index, data.draw(st.integers(0, 99)), *how)
    before = rank.snapshot()
    ready = placement.prepare(index, change)
    assert rank.snapshot() == before
    assert ready.copies_agree
    placement.install(ready)
    found = rank.snapshot()
    placement.undo(ready)
    assert rank.snapshot() == before
    elements = rank.elements(index)
    for position, word in new.items():
        tensor, element = elements[position]
        rank.held[tensor][element] = word
    rank.load()
    assert found == rank.snapshot()


@examples
@given(ranks())
def test_a_seed_of_what_is_held_writes_nothing(rank: Rank) -> None:
    """Casts, copies and several homes included; the sums are of all elements all the same."""
    placement = Placement(rank.layout, rank.storages, rank.places, partial=True)
    for frame in rank.layout.frames:
        bits = np.array([rank.held[t][i] for t, i in rank.elements(frame.index)], np.uint16)
        ready = placement.prepare(frame.index, Change(Operation.OVERWRITE, None, bits))
        assert [write.nbytes for write in ready.writes] == [0] * len(ready.writes)
        assert (ready.old_sums == ready.new_sums).all()
        assert ready.copies_agree
        assert placement.touched(ready) == set()


@examples
@given(ranks(), st.data(), OPERATIONS)
def test_the_sums_are_those_of_the_parts_that_are_held(
    rank: Rank, data: st.DataObject, how: tuple[Operation, bool]
) -> None:
    placement = Placement(rank.layout, rank.storages, rank.places, partial=True)
    of_parts = [set(expand(_ascending(region)).tolist()) for region in placement.parts]
    index = data.draw(st.integers(0, len(rank.layout.frames) - 1))
    change, new = change_of(rank, index, data.draw(st.integers(0, 99)), *how)
    elements = rank.elements(index)
    old = {position: int(rank.held[elements[position][0]][elements[position][1]]) for position in new}
    ready = placement.prepare(index, change)
    for number, part in enumerate(ready.parts):
        for sums, bits in ((ready.old_sums, old), (ready.new_sums, new)):
            expected = _mixed(rank, elements, bits, placement.parts[part].tensor, of_parts[part])
            assert sums[number].tolist() == expected.tolist()
    others = set(range(len(placement.parts))) - set(ready.parts)
    touched = {elements[position] for position in new}
    assert not any((placement.parts[o].tensor, i) in touched for o in others for i in of_parts[o])


@examples
@given(ranks())
def test_the_parts_are_what_is_held_each_element_once(rank: Rank) -> None:
    placement = Placement(rank.layout, rank.storages, rank.places, partial=True)
    counted = [(region.tensor, i) for region in placement.parts for i in expand(_ascending(region)).tolist()]
    held = {
        (place.tensor, i) for place, (there, _) in zip(rank.places, rank.cells, strict=True) for i in there.tolist()
    }
    assert len(counted) == len(set(counted))
    assert set(counted) == held
    assert {(t, i) for t, runs in wanted(rank.places).items() for i in expand(runs).tolist()} == held


@examples
@given(ranks())
def test_the_digest_is_that_of_the_parts(rank: Rank) -> None:
    placement = Placement(rank.layout, rank.storages, rank.places, partial=True)
    lanes = placement.digest()
    for region, found in zip(placement.parts, lanes, strict=True):
        there = np.sort(expand(_ascending(region)))
        (key,) = keys(rank.layout.schema.tensors[region.tensor : region.tensor + 1])
        expected = reference.mix(key, there.astype(np.uint64), rank.held[region.tensor][there].astype(np.uint64))
        assert found.tolist() == expected.tolist()


@examples
@given(ranks(), st.data())
def test_a_copy_that_went_astray_is_noticed(rank: Rank, data: st.DataObject) -> None:
    again = [
        n
        for n, (there, _) in enumerate(rank.cells)
        if n >= len(Placement(rank.layout, rank.storages, rank.places, partial=True).parts)
    ]
    if not again:
        return
    number = data.draw(st.sampled_from(again))
    placement = Placement(rank.layout, rank.storages, rank.places, partial=True)
    _, here = rank.cells[number]
    rank.storages[number][data.draw(st.sampled_from(here.tolist()))] ^= 1
    with pytest.raises(DigestMismatch, match="1 elements differ between two copies"):
        placement.digest()


def _ascending(region: Region) -> np.ndarray:
    runs = region.runs()
    return runs[np.argsort(runs[:, 0])]


def _mixed(
    rank: Rank, elements: list[tuple[int, int]], bits: dict[int, int], tensor: int, part: set[int]
) -> np.ndarray:
    inside = [(elements[p][1], word) for p, word in bits.items() if elements[p][0] == tensor and elements[p][1] in part]
    there, words = np.array(inside, np.uint64).reshape(-1, 2).T
    (key,) = keys(rank.layout.schema.tensors[tensor : tensor + 1])
    return reference.mix(key, there, words)


# ---------------------------------------------------------------------- refusals

LINE = Layout(Schema((TensorSpec("a", "bfloat16", (8,)),)), (FrameSpec("bfloat16", (Region(0, 0, ((8, 1),)),)),))


def row(first: int, count: int) -> Box:
    return Box(0, first, (Dim(count, 1, 1),))


def test_a_place_that_is_a_first_home_for_half_of_its_elements_is_refused_where_parts_are_summed() -> None:
    with pytest.raises(LayoutError, match="a place holds 4 elements, and an earlier one 2 of them"):
        Placement(LINE, [np.zeros(4, np.uint16)], [Place(0, 0, row(0, 4)), Place(0, 0, row(2, 4))], partial=True)


def test_an_element_that_is_kept_only_as_a_cast_is_refused() -> None:
    with pytest.raises(LayoutError, match="need a canonical home too"):
        Placement(LINE, [np.zeros(8, np.uint32)], [Place(0, 0, row(0, 8), tripled)])


# ---------------------------------------------------------------------- runs

lists = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=6)


def runs_from(gaps: list[tuple[int, int]]) -> np.ndarray:
    runs, at = [], 0
    for gap, count in gaps:
        runs.append((at + gap, count))
        at += gap + count
    return np.array(runs, np.int64).reshape(-1, 2)


@examples
@given(lists, lists)
def test_runs_are_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    first, second = runs_from(one), runs_from(other)
    a, b = set(expand(first).tolist()), set(expand(second).tolist())
    assert expand(shared(first, second)).tolist() == sorted(a & b)
    assert expand(without(first, second)).tolist() == sorted(a - b)
    assert expand(joined(first)).tolist() == sorted(a)
    for numel in (max(a, default=-1) + 1, max(a, default=-1) + 3):
        assert np.flatnonzero(covered(first, numel)).tolist() == sorted(a)
        assert len(covered(first, numel)) == numel
    assert (np.diff(joined(first)[:, 0]) > joined(first)[:-1, 1]).all()
