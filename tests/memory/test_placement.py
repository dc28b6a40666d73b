"""Placements: canonical changes land exactly where an engine keeps them, can be undone, and touch nothing else.

The oracle keeps each tensor as an array of canonical bits and writes it into the storages element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dcr import kernels
from dcr.codecs.patch import Change, Operation
from dcr.errors import DigestMismatch, LayoutError, ReadBackError
from dcr.layout import frames
from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import FrameSpec, Layout, Region, Shard
from dcr.layout.schema import Schema, TensorSpec
from dcr.memory.placement import Place, Placement, canonical_table

Bits = NDArray[np.unsignedinteger]
examples = settings(deadline=None, max_examples=80)


def cells(place: Place) -> list[int]:
    """The storage element of every canonical element of a place's tensor."""
    at = np.array([place.box.here0])
    for dim in place.box.dims:
        at = (at[:, None] + np.arange(dim.n) * dim.here).reshape(-1)
    return at.tolist()


@dataclass
class Engine:
    """Storages, where each tensor lies in them, and a placement over both."""

    layout: Layout
    storages: list[Bits]
    places: list[Place]

    def __post_init__(self) -> None:
        self.placement = Placement(self.layout, self.storages, self.places)

    def snapshot(self) -> list[list[int]]:
        return [storage.tolist() for storage in self.storages]

    def held(self, tensor: int) -> list[list[int]]:
        """The canonical bits in each home of a tensor."""
        return [self.storages[p.storage][cells(p)].tolist() for p in self.places if p.tensor == tensor]

    def loaded(self, index: int, bits: dict[int, int]) -> list[list[int]]:
        """What a load would leave: the frame's elements with these positions replaced, in every home."""
        storages = [storage.copy() for storage in self.storages]
        elements = [
            (r.tensor, int(i))
            for r in self.layout.frames[index].spec.regions
            for i in np.array([r.there0] if not r.dims else _spread(r))
        ]
        for position, word in bits.items():
            tensor, element = elements[position]
            for place in self.places:
                if place.tensor == tensor:
                    storages[place.storage][cells(place)[element]] = word
        return [storage.tolist() for storage in storages]


def _spread(region: Region) -> NDArray[np.int64]:
    at = np.array([region.there0])
    for n, stride in region.dims:
        at = (at[:, None] + np.arange(n) * stride).reshape(-1)
    return at


def overwrite(bits: dict[int, int], dtype: type = np.uint16) -> Change:
    return Change(
        Operation.OVERWRITE, np.array(sorted(bits), np.uint32), np.array([bits[i] for i in sorted(bits)], dtype)
    )


def dense(bits: Sequence[int], dtype: type = np.uint16) -> Change:
    return Change(Operation.OVERWRITE, None, np.array(bits, dtype))


def row(numel: int, first: int = 0) -> Box:
    return Box(first, 0, (Dim(numel, 1, 1),))


A, B = TensorSpec("a", "bfloat16", (2, 3)), TensorSpec("b", "bfloat16", (4,))
LAYOUT = Layout(
    Schema((A, B)),
    (
        FrameSpec("bfloat16", (Region(0, 0, ((6, 1),)), Region(1, 0, ((2, 1),)))),
        FrameSpec("bfloat16", (Region(1, 2, ((2, 1),)),)),
    ),
)


@pytest.fixture
def engine() -> Engine:
    """`a` transposed in storage 0 behind two foreign elements; `b` backwards in storage 1, and a copy of it."""
    storages: list[Bits] = [
        np.arange(10, 20, dtype=np.uint16),
        np.arange(30, 34, dtype=np.uint16),
        np.zeros(9, np.uint16),
    ]
    storages[2][1:8:2] = [33, 32, 31, 30]
    a = Place(0, 0, Box(2, 0, (Dim(2, 1, 3), Dim(3, 2, 1))))
    return Engine(
        LAYOUT, storages, [a, Place(1, 1, Box(3, 0, (Dim(4, -1, 1),))), Place(1, 2, Box(1, 0, (Dim(4, 2, 1),)))]
    )


def test_elements_are_found_where_they_lie(engine: Engine) -> None:
    ready = engine.placement.prepare(0, overwrite(dict.fromkeys(range(8), 0)))
    assert ready.writes[0].old.tolist() == [12, 14, 16, 13, 15, 17, 33, 32]


def test_preparing_writes_nothing(engine: Engine) -> None:
    before = engine.snapshot()
    engine.placement.prepare(0, overwrite({0: 1, 7: 2}))
    engine.placement.prepare(1, dense([1, 2]))
    assert engine.snapshot() == before


def test_an_overwrite_lands_in_every_home_and_nowhere_else(engine: Engine) -> None:
    expected = engine.loaded(0, {1: 100, 6: 200})
    engine.placement.install(engine.placement.prepare(0, overwrite({1: 100, 6: 200})))
    assert engine.snapshot() == expected


def test_a_dense_frame_lands_in_every_home_and_nowhere_else(engine: Engine) -> None:
    bits = [101, 14, 103, 104, 105, 106, 107, 108]
    expected = engine.loaded(0, dict(enumerate(bits)))
    engine.placement.install(engine.placement.prepare(0, dense(bits)))
    assert engine.snapshot() == expected


def test_a_dense_frame_writes_only_what_differs(engine: Engine) -> None:
    ready = engine.placement.prepare(1, dense([31, 99]))
    assert [(w.positions.tolist(), w.bits.tolist(), w.old.tolist()) for w in ready.writes] == [
        ([1], [99], [30]),
        ([1], [99], [30]),
    ]


@pytest.mark.parametrize(
    ("operation", "value", "new"),
    [(Operation.OVERWRITE, 5, 5), (Operation.XOR, 5, 12 ^ 5), (Operation.STEP, 0xFFFF, 11)],
    ids=["overwrite", "xor", "step"],
)
def test_values_are_resolved_against_the_old_bits(engine: Engine, operation: Operation, value: int, new: int) -> None:
    change = Change(operation, np.array([0], np.uint32), np.array([value], np.uint16))
    engine.placement.install(engine.placement.prepare(0, change))
    assert engine.held(0)[0][0] == new


def test_what_is_ready_counts_its_elements_and_its_bytes(engine: Engine) -> None:
    ready = engine.placement.prepare(0, overwrite({0: 1, 6: 2}))
    assert (ready.changed, ready.nbytes) == (2, (2 + 1) * (4 + 2 + 2))


def test_installing_twice_is_harmless(engine: Engine) -> None:
    change = Change(Operation.XOR, np.array([0], np.uint32), np.array([5], np.uint16))
    ready = engine.placement.prepare(0, change)
    for _ in range(2):
        engine.placement.install(ready)
    assert engine.held(0)[0][0] == 12 ^ 5


@pytest.mark.parametrize("change", [overwrite({0: 1, 6: 2, 7: 3}), dense(range(8))], ids=["sparse", "dense"])
def test_an_undo_brings_every_byte_back(engine: Engine, change: Change) -> None:
    before = engine.snapshot()
    ready = engine.placement.prepare(0, change)
    engine.placement.install(ready)
    engine.placement.undo(ready)
    assert engine.snapshot() == before


@pytest.mark.parametrize("change", [overwrite({0: 1, 1: 2}), dense([1, 2])], ids=["sparse", "dense"])
def test_an_undo_gives_a_copy_that_differed_its_own_bits_back(engine: Engine, change: Change) -> None:
    engine.storages[2][5] = 77
    before = engine.snapshot()
    ready = engine.placement.prepare(1, change)
    engine.placement.install(ready)
    engine.placement.undo(ready)
    assert engine.snapshot() == before


def test_the_sums_are_those_of_the_old_and_new_bits(engine: Engine) -> None:
    frame, positions = LAYOUT.frames[0], np.array([1, 6], np.uint32)
    ready = engine.placement.prepare(0, overwrite({1: 100, 6: 200}))
    table = canonical_table(frame, np.zeros(8, np.uint16))
    for sums, bits in ((ready.old_sums, [14, 33]), (ready.new_sums, [100, 200])):
        assert sums.tolist() == kernels.digest_at(table, frame.keys, positions, np.array(bits, np.uint16)).tolist()


def test_the_sums_of_a_dense_frame_are_those_of_all_its_elements(engine: Engine) -> None:
    frame, new = LAYOUT.frames[1], np.array([31, 99], np.uint16)
    ready = engine.placement.prepare(1, dense(new.tolist()))
    for sums, bits in ((ready.old_sums, np.array([31, 30], np.uint16)), (ready.new_sums, new)):
        assert sums.tolist() == kernels.digest(canonical_table(frame, bits), frame.keys).tolist()


def test_the_digest_is_that_of_the_canonical_bits(engine: Engine) -> None:
    lanes = np.zeros((2, 2), np.uint64)
    for frame, bits in zip(LAYOUT.frames, ([12, 14, 16, 13, 15, 17, 33, 32], [31, 30]), strict=True):
        table = canonical_table(frame, np.array(bits, np.uint16))
        lanes[list(frame.tensors)] += kernels.digest(table, frame.keys)
    assert engine.placement.digest().tolist() == lanes.tolist()


# ---------------------------------------------------------------------- copies


@pytest.mark.parametrize(
    ("change", "agree"),
    [(overwrite({0: 1}), True), (overwrite({1: 1}), False), (dense([31, 30]), False), (dense([1, 2]), False)],
    ids=["another element changes", "it changes", "dense, as the first home", "dense, other bits"],
)
def test_a_copy_that_differs_is_noticed_where_the_change_names_it(engine: Engine, change: Change, agree: bool) -> None:
    engine.storages[2][7] = 77  # the copy of canonical element 3, at position 1 of frame 1
    assert engine.placement.prepare(1, change).copies_agree is agree


@pytest.mark.parametrize("change", [overwrite({0: 1, 7: 2}), dense(range(8))], ids=["sparse", "dense"])
def test_copies_that_agree_are_said_to(engine: Engine, change: Change) -> None:
    assert engine.placement.prepare(0, change).copies_agree


@pytest.mark.parametrize("element", range(4))
def test_the_digest_refuses_copies_that_differ(engine: Engine, element: int) -> None:
    engine.storages[2][1 + 2 * element] ^= 1
    with pytest.raises(DigestMismatch, match="1 elements differ between two copies"):
        engine.placement.digest()


def test_a_copy_that_differed_is_right_after_an_overwrite(engine: Engine) -> None:
    engine.storages[2][:] = 77
    for index, frame in enumerate(LAYOUT.frames):
        engine.placement.install(engine.placement.prepare(index, dense(range(frame.numel))))
    assert engine.held(1) == [[6, 7, 0, 1]] * 2


# ---------------------------------------------------------------------- refusals


def test_a_tensor_without_a_place_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match="no place is known for b"):
        Placement(LAYOUT, [np.zeros(6, np.uint16)], [Place(0, 0, row(6))])


@pytest.mark.parametrize(
    ("numel", "found"),
    [(5, "the places of a hold 5 of its 6"), (7, r"a place of a holds 7 elements in \[0, 6\], it has 6")],
)
def test_a_place_of_another_size_is_refused(numel: int, found: str) -> None:
    with pytest.raises(LayoutError, match=found):
        Placement(LAYOUT, [np.zeros(10, np.uint16)], [Place(0, 0, row(numel)), Place(1, 0, row(4))])


def test_a_place_that_leaves_its_storage_is_refused() -> None:
    with pytest.raises(LayoutError, match="of storage 0, which has 9 elements"):
        Placement(LAYOUT, [np.zeros(9, np.uint16)], [Place(0, 0, row(6)), Place(1, 0, row(4, 6))])


@pytest.mark.parametrize(
    "change",
    [overwrite({8: 1}), overwrite({0: 1, 1 << 31: 1}), dense([1] * 7), dense([1] * 9), dense([1] * 8, np.uint32)],
    ids=["past the frame", "far past the frame", "too few", "too many", "another width"],
)
def test_a_change_that_does_not_fit_its_frame_is_refused(engine: Engine, change: Change) -> None:
    with pytest.raises(LayoutError):
        engine.placement.prepare(0, change)


def test_memory_that_two_elements_share_does_not_hold_what_was_written() -> None:
    shared = Engine(LAYOUT, [np.zeros(8, np.uint16)], [Place(0, 0, row(6)), Place(1, 0, row(4, 4))])
    ready = shared.placement.prepare(0, dense(range(1, 9)))
    with pytest.raises(ReadBackError, match=r"2 of 8 elements of frame 0 \(a, b\)"):
        shared.placement.install(ready)


def test_a_failed_undo_is_noticed_too() -> None:
    shared = Engine(LAYOUT, [np.zeros(8, np.uint16)], [Place(0, 0, row(6)), Place(1, 0, row(4, 4))])
    ready = shared.placement.prepare(0, overwrite({4: 1, 6: 1}))
    ready.writes[0].old[:] = [5, 6]
    with pytest.raises(ReadBackError, match="did not keep their bits"):
        shared.placement.undo(ready)


# ---------------------------------------------------------------------- any layout


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    """Tensors of several shapes and widths, cut into small frames in several ways, each kept once or twice."""
    specs, shards, places, storages = [], [], [], list[Bits]()
    for tensor in range(draw(st.integers(1, 3))):
        dtype, unsigned = draw(st.sampled_from([("uint8", np.uint8), ("bfloat16", np.uint16), ("float64", np.uint64)]))
        shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
        specs.append(TensorSpec(f"t{tensor}", dtype, shape))
        canonical = np.arange(specs[-1].numel).reshape(shape)
        cuts = [canonical[..., i::2] for i in range(2)] if shape and draw(st.booleans()) else [canonical]
        for cut in cuts:
            if cut.size:
                dims = tuple(Dim(n, 0, stride // 8) for n, stride in zip(cut.shape, cut.strides, strict=True))
                shards.append(Shard(tensor, 0, Box(0, int(cut.flat[0]), dims)))
        bits = np.array(draw(st.lists(st.integers(0, 200), min_size=canonical.size, max_size=canonical.size)), unsigned)
        for _ in range(draw(st.integers(1, 2))):
            order = draw(st.permutations(range(len(shape))))
            strides = np.empty(canonical.transpose(order).shape).transpose(np.argsort(order)).strides
            pad = draw(st.integers(0, 2))
            box = Box(
                pad,
                0,
                tuple(
                    Dim(n, here // 8, there // 8)
                    for n, here, there in zip(shape, strides, canonical.strides, strict=True)
                ),
            )
            storage = np.full(canonical.size + pad + 1, 255, unsigned)
            places.append(Place(tensor, len(storages), box))
            storage[cells(places[-1])] = bits
            storages.append(storage)
    schema = Schema(tuple(specs))
    planned = frames.plan(schema, shards, draw(st.integers(1, 9)))
    return Engine(Layout(schema, tuple(one.spec for one in planned)), storages, places)


@examples
@given(engines(), st.data())
def test_any_change_of_any_layout_lands_as_a_load_would_leave_it(engine: Engine, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(engine.layout.frames) - 1))
    frame = engine.layout.frames[index]
    words = st.integers(0, 200)
    if data.draw(st.booleans()):
        bits = dict(enumerate(data.draw(st.lists(words, min_size=frame.numel, max_size=frame.numel))))
        change = dense(list(bits.values()), np.dtype(f"u{frame.width}").type)
    else:
        bits = data.draw(st.dictionaries(st.integers(0, frame.numel - 1), words))
        change = overwrite(bits, np.dtype(f"u{frame.width}").type)
    before, expected = engine.snapshot(), engine.loaded(index, bits)
    ready = engine.placement.prepare(index, change)
    assert ready.copies_agree
    engine.placement.install(ready)
    assert engine.snapshot() == expected
    engine.placement.undo(ready)
    assert engine.snapshot() == before


@examples
@given(engines(), st.data())
def test_the_sums_of_a_change_update_the_digest(engine: Engine, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(engine.layout.frames) - 1))
    frame = engine.layout.frames[index]
    bits = data.draw(st.dictionaries(st.integers(0, frame.numel - 1), st.integers(0, 200)))
    lanes = engine.placement.digest()
    ready = engine.placement.prepare(index, overwrite(bits, np.dtype(f"u{frame.width}").type))
    lanes[list(frame.tensors)] += ready.new_sums - ready.old_sums
    engine.placement.install(ready)
    assert engine.placement.digest().tolist() == lanes.tolist()
