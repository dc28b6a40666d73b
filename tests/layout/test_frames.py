"""Frames: a plan must name every canonical element once, number it as the source does, and survive the wire.

The oracle writes out, element by element, which (tensor, canonical index) a region or a source row stands for.
"""

from __future__ import annotations

import tracemalloc
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dcr.errors import LayoutError, SchemaError, WireError
from dcr.kernels.reference import F32_BF16
from dcr.layout import frames
from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import FrameSpec, Layout, Region, Shard, SourceFrame
from dcr.layout.schema import Schema, TensorSpec, keys
from dcr.layout.views import NDIM, STORAGE, TENSOR, box_of

examples = settings(deadline=None, max_examples=100)
Element = tuple[int, int]


def expand(start: int, dims: list[tuple[int, int]]) -> NDArray[np.int64]:
    """Elements at start + the sum of index * stride, row-major over (extent, stride)."""
    places = np.array([start], np.int64)
    for n, stride in dims:
        places = (places[:, None] + np.arange(n) * stride).reshape(-1)
    return places


def named(spec: FrameSpec) -> list[Element]:
    """(tensor, canonical index) of every element of a frame, in the order of its regions."""
    return [(r.tensor, int(i)) for r in spec.regions for i in expand(r.there0, list(r.dims))]


def read(source: SourceFrame, storages: list[list[Element]]) -> list[Element]:
    """What the source's storages hold where a frame's rows point."""
    found: list[Element] = []
    for row in source.rows:
        box = box_of(row)
        found += [storages[row[STORAGE]][i] for i in expand(box.here0, [(dim.n, dim.here) for dim in box.dims])]
    return found


@st.composite
def sources(draw: st.DrawFn) -> tuple[Schema, list[Shard], list[list[Element]]]:
    """A schema; a shard map that cuts each tensor along one dimension, strided or in blocks; and what storages hold.

    Each piece lies in a storage of its own, its dimensions permuted, behind a few elements that are not published.
    """
    specs, shards, storages = [], [], []
    for number in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        dtype = draw(st.sampled_from(["bfloat16", "float32"]))
        specs.append(TensorSpec(f"t{number}", dtype, shape))
        index = np.arange(specs[-1].numel, dtype=np.int64).reshape(shape)
        cuts = [()]
        if shape:
            axis, parts = draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 3))
            blocks = np.array_split(np.arange(shape[axis]), parts)
            strided = draw(st.booleans())
            steps = [
                slice(part, None, parts) if strided else slice(int(b[0]), int(b[-1]) + 1)
                for part, b in enumerate(blocks)
                if len(b) or strided
            ]
            cuts = [(*[slice(None)] * axis, step) for step in steps]
        for cut in draw(st.permutations(cuts)):
            piece = index[cut] if cut else index
            order = draw(st.permutations(range(piece.ndim)))
            memory = piece.transpose(order)
            home = np.empty(memory.shape, np.int64).transpose(np.argsort(order))
            pad = draw(st.integers(0, 3))
            box = Box(
                pad,
                int(piece.flat[0]) if piece.size else 0,
                tuple(
                    Dim(n, here // 8, there // 8)
                    for n, here, there in zip(piece.shape, home.strides, piece.strides, strict=True)
                ),
            )
            shards.append(Shard(number, len(storages), box))
            storages.append([(-1, -1)] * pad + [(number, int(i)) for i in memory.reshape(-1)])
    return Schema(tuple(specs)), shards, storages


@examples
@given(sources(), st.integers(1, 20))
def test_a_plan_names_every_canonical_element_once(
    source: tuple[Schema, list[Shard], list[list[Element]]], frame_elems: int
) -> None:
    schema, shards, _ = source
    found = Counter(element for one in frames.plan(schema, shards, frame_elems) for element in named(one.spec))
    assert found == Counter((t, i) for t, spec in enumerate(schema.tensors) for i in range(spec.numel))


@examples
@given(sources(), st.integers(1, 20))
def test_regions_are_numbered_as_the_source_is_read(
    source: tuple[Schema, list[Shard], list[list[Element]]], frame_elems: int
) -> None:
    schema, shards, storages = source
    planned = frames.plan(schema, shards, frame_elems)
    assert [read(one, storages) for one in planned] == [named(one.spec) for one in planned]


@examples
@given(sources(), st.integers(1, 20))
def test_frames_have_one_dtype_and_are_full_but_for_the_last_of_it(
    source: tuple[Schema, list[Shard], list[list[Element]]], frame_elems: int
) -> None:
    schema, shards, _ = source
    planned = frames.plan(schema, shards, frame_elems)
    for dtype in ("bfloat16", "float32"):
        sizes = [len(named(one.spec)) for one in planned if one.spec.dtype == dtype]
        total = sum(spec.numel for spec in schema.tensors if spec.dtype == dtype)
        assert sizes == [frame_elems] * (total // frame_elems) + [total % frame_elems] * (total % frame_elems > 0)
    for one in planned:
        assert {schema.tensors[region.tensor].dtype for region in one.spec.regions} == {one.spec.dtype}


@examples
@given(sources(), st.integers(1, 20))
def test_a_plan_binds_to_its_schema_and_survives_the_wire(
    source: tuple[Schema, list[Shard], list[list[Element]]], frame_elems: int
) -> None:
    schema, shards, _ = source
    layout = Layout(schema, tuple(one.spec for one in frames.plan(schema, shards, frame_elems)))
    again = frames.decode(frames.encode(layout))
    assert (again.schema, again.specs, again.digest) == (layout.schema, layout.specs, layout.digest)


def test_small_tensors_share_a_frame() -> None:
    schema = Schema(tuple(TensorSpec(f"t{i}", "bfloat16", (4,)) for i in range(10)))
    shards = [Shard(i, i, Box(0, 0, (Dim(4, 1, 1),))) for i in range(10)]
    assert [len(one.spec.regions) for one in frames.plan(schema, shards, 100)] == [10]


def test_a_big_tensor_is_split_into_runs() -> None:
    schema = Schema((TensorSpec("w", "bfloat16", (10, 10)),))
    planned = frames.plan(schema, [Shard(0, 0, Box(0, 0, (Dim(100, 1, 1),)))], 40)
    assert [one.spec.regions for one in planned] == [
        (Region(0, 0, ((40, 1),)),),
        (Region(0, 40, ((40, 1),)),),
        (Region(0, 80, ((20, 1),)),),
    ]


def test_runs_that_follow_each_other_in_one_tensor_are_one_region() -> None:
    schema = Schema((TensorSpec("w", "bfloat16", (4, 4)),))
    shards = [Shard(0, 0, Box(0, 0, (Dim(8, 1, 1),))), Shard(0, 1, Box(5, 8, (Dim(8, 1, 1),)))]
    assert [one.spec.regions for one in frames.plan(schema, shards)] == [(Region(0, 0, ((16, 1),)),)]


def test_tensors_with_different_value_maps_do_not_share_a_frame() -> None:
    schema = Schema((TensorSpec("a", "bfloat16", (4,)), TensorSpec("b", "bfloat16", (4,))))
    run = Box(0, 0, (Dim(4, 1, 1),))
    planned = frames.plan(schema, [Shard(0, 0, run), Shard(1, 1, run, F32_BF16)])
    assert [one.kind for one in planned] == [0, F32_BF16]


def test_a_shard_past_32_bits_keeps_its_offsets() -> None:
    far = (1 << 33) + 7
    schema = Schema((TensorSpec("w", "bfloat16", (1 << 34,)),))
    (one,) = frames.plan(schema, [Shard(0, 0, Box(far + 1, far, (Dim(6, 1, 1),)))])
    assert one.spec.regions == (Region(0, far, ((6, 1),)),)
    assert box_of(one.rows[0]) == Box(far + 1, far, (Dim(6, 1, 1),))


# ---------------------------------------------------------------------- layouts

SCHEMA = Schema(
    (TensorSpec("a", "bfloat16", (4, 6)), TensorSpec("b", "float32", (5,)), TensorSpec("c", "bfloat16", ()))
)
ROWS = Region(0, 0, ((24, 1),))


def layout(*regions: Region, dtype: str = "bfloat16") -> Layout:
    return Layout(SCHEMA, (FrameSpec(dtype, regions),))


def test_a_frame_knows_its_tensors_keys_and_size() -> None:
    frame = layout(Region(2, 0, ()), Region(0, 2, ((4, 6), (2, 1)))).frames[0]
    assert (frame.index, frame.tensors, frame.numel, frame.width, frame.nbytes) == (0, (0, 2), 9, 2, 18)
    assert frame.keys.tolist() == keys(SCHEMA.tensors)[[0, 2]].tolist()


def test_a_frames_rows_lead_from_its_numbering_to_canonical_coordinates() -> None:
    frame = layout(Region(2, 0, ()), Region(0, 2, ((4, 6), (2, 1)))).frames[0]
    assert frame.rows[:, [STORAGE, TENSOR]].tolist() == [[0, 1], [0, 0]]
    assert [box_of(row) for row in frame.rows] == [Box(0, 0), Box(1, 2, (Dim(4, 2, 6), Dim(2, 1, 1)))]


@pytest.mark.parametrize(
    "region",
    [
        Region(3, 0, ()),
        Region(-1, 0, ()),
        Region(1, 0, ((5, 1),)),
        Region(0, -1, ((2, 1),)),
        Region(0, 0, ((25, 1),)),
        Region(0, 23, ((2, 1),)),
        Region(0, 1, ((2, -2),)),
        Region(0, 0, ((0, 1),)),
        Region(0, 0, ((-1, 1),)),
        Region(0, 1 << 40, ()),
    ],
    ids=[
        *("no such tensor", "a tensor from the end", "another dtype", "before the first", "too long", "past the end"),
        *("backwards past the start", "empty", "negative", "far past the end"),
    ],
)
def test_a_region_that_does_not_fit_is_refused(region: Region) -> None:
    with pytest.raises(LayoutError):
        layout(region)


def test_an_unknown_dtype_of_a_frame_is_refused() -> None:
    with pytest.raises(LayoutError, match="unknown dtype 'bf16'"):
        layout(ROWS, dtype="bf16")


@pytest.mark.parametrize(
    "regions",
    [
        (ROWS, Region(0, 5, ())),
        (Region(0, 0, ((4, 6), (3, 1))), Region(0, 2, ((4, 6), (2, 1)))),
        (Region(0, 0, ((3, 1), (4, 2))),),
        (Region(0, 3, ((2, 0),)),),
        (Region(0, 0, ((12, 2),)), Region(0, 21, ((4, -5),))),
        (Region(2, 0, ()), Region(2, 0, ())),
    ],
    ids=["within a run", "two column blocks", "with itself", "stride 0", "backwards", "a scalar twice"],
)
def test_regions_that_share_an_element_are_refused(regions: tuple[Region, ...]) -> None:
    with pytest.raises(LayoutError, match=r"share elements of [ac]"):
        layout(*regions)


def test_regions_of_two_frames_that_share_an_element_are_refused() -> None:
    one = FrameSpec("bfloat16", (Region(0, 0, ((6, 1),)),))
    other = FrameSpec("bfloat16", (Region(0, 5, ((2, 6),)),))
    with pytest.raises(LayoutError, match="share elements of a"):
        Layout(SCHEMA, (one, other))


def test_interleaved_regions_that_share_nothing_are_accepted() -> None:
    assert layout(Region(0, 0, ((12, 2),)), Region(0, 23, ((12, -2),))).frames[0].numel == 24


def test_a_frame_of_two_to_the_32_elements_is_refused() -> None:
    schema = Schema((TensorSpec("w", "bfloat16", (1 << 32,)),))
    with pytest.raises(LayoutError, match="positions are 32-bit"):
        Layout(schema, (FrameSpec("bfloat16", (Region(0, 0, ((1 << 32, 1),)),)),))


def test_a_region_of_more_elements_than_its_tensor_is_refused_before_it_is_written_out() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(LayoutError):
            layout(Region(2, 0, ((1 << 21, 0),)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_layouts_digest_is_part_of_the_format() -> None:
    found = layout(Region(0, 2, ((4, 6), (2, 1))), Region(2, 0, ())).digest.hex()
    assert found == "6fb247b25738b1704701156c3c14ec6935bf11ccf62a9d82a0b4b03c317fdc6d"


@pytest.mark.parametrize(
    "regions",
    [(Region(2, 0, ()), ROWS), (ROWS,), (Region(0, 0, ((4, 6), (6, 1))), Region(2, 0, ()))],
    ids=["order", "a region less", "numbering by rows"],
)
def test_the_digest_names_these_very_frames(regions: tuple[Region, ...]) -> None:
    assert layout(*regions).digest != layout(ROWS, Region(2, 0, ())).digest


def test_the_digest_covers_the_schema() -> None:
    tied = Schema((msgspec.structs.replace(SCHEMA.tensors[0], aliases=("z",)), *SCHEMA.tensors[1:]))
    assert Layout(tied, ()).digest != Layout(SCHEMA, ()).digest


@pytest.mark.parametrize(
    "data", [b"", b"\xc0", b"\x92\x90", b"\x93\x90\x90\x90", b"{}", b"\x92\x90\x91\x92\xa4bool\xc0"]
)
def test_bytes_that_are_no_layout_are_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="not a layout"):
        frames.decode(data)


def test_an_unsound_schema_is_refused_on_the_wire() -> None:
    with pytest.raises(SchemaError):
        frames.decode(msgspec.msgpack.encode(((TensorSpec("a", "bf16", (1,)),), ())))


@pytest.mark.parametrize(
    ("shape", "there0"), [((1 << 63, 2), 0), ((1 << 63, 2), (1 << 64) - 1)], ids=["shape", "shape and offset"]
)
def test_numbers_past_63_bits_are_refused_on_the_wire(shape: tuple[int, ...], there0: int) -> None:
    spec, region = TensorSpec("a", "bool", shape), Region(0, there0, ())
    with pytest.raises((WireError, SchemaError, LayoutError)):
        frames.decode(msgspec.msgpack.encode(((spec,), (FrameSpec("bool", (region,)),))))


def test_deep_nesting_in_a_layout_is_refused() -> None:
    spec = {"name": "a", "dtype": "bool", "shape": [1], "aliases": [], "later": None}
    data = msgspec.msgpack.encode(([spec], []))
    deep = data.replace(b"\xa5later\xc0", b"\xa5later" + b"\x91" * 100_000 + b"\xc0")
    with pytest.raises(WireError):
        frames.decode(deep)


ENCODED = frames.encode(layout(Region(0, 2, ((4, 6), (2, 1))), Region(2, 0, ())))


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_mutated_layout_is_refused_or_sound(data: st.DataObject) -> None:
    mutated = bytearray(ENCODED)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        cut = data.draw(st.integers(0, 9))
        mutated[at : at + cut] = data.draw(
            st.binary(max_size=9) | st.sampled_from([b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\0" * 7])
        )
        if not mutated:
            return
    try:
        found = frames.decode(bytes(mutated))
    except (WireError, SchemaError, LayoutError):
        return
    for frame in found.frames:
        elements = named(frame.spec)
        assert len(set(elements)) == len(elements) == frame.numel
        assert all(0 <= i < found.schema.tensors[t].numel for t, i in elements)
        assert (frame.rows[:, NDIM] >= 0).all()


# ---------------------------------------------------------------------- a part of it


@examples
@given(sources(), st.integers(1, 40), st.data())
def test_the_frames_of_some_rows_are_those_that_hold_an_element_of_them(
    source: tuple[Schema, list[Shard], list[list[Element]]], frame_elems: int, data: st.DataObject
) -> None:
    schema, shards, _ = source
    found = Layout(schema, tuple(one.spec for one in frames.plan(schema, shards, frame_elems)))
    tensor = data.draw(st.integers(0, len(schema.tensors) - 1))
    spec = schema.tensors[tensor]
    height = spec.shape[0] if spec.shape else 1
    low = data.draw(st.integers(0, height))
    rows = range(low, data.draw(st.integers(low, height)))
    width = spec.numel // height if height else 0
    wanted = {(tensor, index) for index in range(rows.start * width, rows.stop * width)}
    expected = [frame.index for frame in found.frames if wanted & set(named(frame.spec))]
    assert found.frames_of(spec.name, rows) == expected
    everything = [frame.index for frame in found.frames if tensor in frame.tensors]
    assert found.frames_of(spec.name) == everything


@pytest.mark.parametrize("rows", [range(8), range(-1, 2), range(3, 2), range(0, 4, 2)], ids=str)
def test_rows_that_a_tensor_does_not_have_are_refused(rows: range) -> None:
    found = Layout(
        Schema((TensorSpec("w", "bfloat16", (7, 3)),)), (FrameSpec("bfloat16", (Region(0, 0, ((21, 1),)),)),)
    )
    assert found.frames_of("w", range(7)) == [0]
    with pytest.raises(LayoutError):
        found.frames_of("w", rows)
    with pytest.raises(SchemaError):
        found.frames_of("v")
