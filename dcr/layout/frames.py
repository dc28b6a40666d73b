"""Frames: runs of regions of one dtype, numbered one after another; the unit that a chunk describes.

Small tensors share a frame, big ones are split. A `Layout` (schema and frames) is what both ends must agree on:
it travels with every version, and a position in a chunk means an element of its frame.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from dcr.errors import LayoutError, SchemaError, WireError
from dcr.layout.boxes import Box, Dim
from dcr.layout.schema import DTYPES, Schema, TensorSpec, keys, width_of
from dcr.layout.views import Lanes, Rows, rows_of

FRAME_ELEMS = 1 << 22


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A strided region of one canonical tensor: first element, and (extent, stride) per dimension, in elements."""

    tensor: int
    there0: int
    dims: tuple[tuple[int, int], ...]

    def box(self, here0: int) -> Box:
        """The box from a dense numbering that starts at here0 to this region."""
        here, dims = 1, []
        for n, there in reversed(self.dims):
            dims.append(Dim(n, here, there))
            here *= n
        return Box(here0, self.there0, tuple(reversed(dims)))

    def runs(self) -> NDArray[np.int64]:
        """Its contiguous canonical runs [runs, 2], in numbering order: first element, length."""
        dims = list(self.dims)
        length = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
        starts = np.array([self.there0], np.int64)
        for n, stride in dims:
            starts = (starts[:, None] + np.arange(n) * stride).reshape(-1)
        return np.stack([starts, np.full_like(starts, length)], axis=1)


class FrameSpec(msgspec.Struct, frozen=True, array_like=True):
    """A frame as it travels: dtype and regions."""

    dtype: str
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One frame, bound to its schema.

    tensors: the tensors it touches, as indices into the schema; column TENSOR of `rows` is an index into this.
    rows: int64 [regions, COLUMNS], from the frame's dense numbering (storage 0) to canonical coordinates.
    keys: digest keys uint64 [len(tensors), 2].
    """

    index: int
    spec: FrameSpec
    tensors: tuple[int, ...]
    rows: Rows
    keys: Lanes
    numel: int

    @property
    def width(self) -> int:
        return width_of(self.spec.dtype)

    @property
    def nbytes(self) -> int:
        return self.numel * self.width


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """A schema and its frames; `digest` (32 bytes) names both.

    Raises:
        LayoutError: a region leaves its tensor, has another dtype than its frame, or two regions share an element.
    """

    schema: Schema
    frames: tuple[Frame, ...] = field(init=False)
    specs: tuple[FrameSpec, ...]
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        all_keys = keys(self.schema.tensors)
        frames = tuple(_bind(index, spec, self.schema, all_keys) for index, spec in enumerate(self.specs))
        _require_disjoint(self.specs, self.schema)
        object.__setattr__(self, "frames", frames)
        object.__setattr__(self, "digest", hashlib.blake2b(encode(self), digest_size=32).digest())

    def frames_of(self, name: str, rows: range | None = None) -> list[int]:
        """The frames that hold elements of a tensor, or of some of its rows (steps of its first dimension).

        What a reader of a part needs: the chunks of no other frames say anything of it.

        Raises:
            SchemaError: there is no such tensor. LayoutError: it has no such rows, or `rows` has a step.
        """
        names = [spec.name for spec in self.schema.tensors]
        if name not in names:
            raise SchemaError(f"{name} is not in this schema of {len(names)} tensors")
        tensor = names.index(name)
        first, last = _elements_of(self.schema.tensors[tensor], rows)
        return [frame.index for frame in self.frames if tensor in frame.tensors and _holds(frame, tensor, first, last)]


def _elements_of(spec: TensorSpec, rows: range | None) -> tuple[int, int]:
    """The canonical indices of some rows: the first one, and the one after the last."""
    if rows is None:
        return 0, spec.numel
    height = spec.shape[0] if spec.shape else 1
    if rows.step != 1 or not 0 <= rows.start <= rows.stop <= height:
        raise LayoutError(f"{spec.name} has rows 0 to {height}, not {rows}")
    width = spec.numel // height if height else 0
    return rows.start * width, rows.stop * width


def _holds(frame: Frame, tensor: int, first: int, last: int) -> bool:
    """Whether a frame holds some element of a tensor from `first` on and before `last`."""
    runs = (region.runs() for region in frame.spec.regions if region.tensor == tensor)
    return any(bool((np.maximum(run[:, 0], first) < np.minimum(run.sum(axis=1), last)).any()) for run in runs)


def encode(layout: Layout) -> bytes:
    """A layout as msgpack: the body of an Open message."""
    return msgspec.msgpack.encode((layout.schema.tensors, layout.specs))


def decode(data: bytes | memoryview) -> Layout:
    """The inverse of `encode`.

    Raises:
        WireError: not a layout. LayoutError, SchemaError: a layout that is not sound.
    """
    try:
        tensors, specs = msgspec.msgpack.decode(data, type=tuple[tuple[TensorSpec, ...], tuple[FrameSpec, ...]])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"not a layout: {error}") from error
    return Layout(Schema(tensors), specs)


class Shard(msgspec.Struct, frozen=True):
    """One box of a shard map: elements of a source storage that are canonical elements of a tensor.

    kind: the value map between them, one of dcr.kernels.reference's NONE, F32_BF16, F32_F16.
    """

    tensor: int
    storage: int
    box: Box
    kind: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SourceFrame:
    """Where the elements of one frame lie in a source: rows int64 [B, COLUMNS] over the source's storages."""

    spec: FrameSpec
    rows: Rows
    kind: int


def plan(schema: Schema, shards: Sequence[Shard], frame_elems: int = FRAME_ELEMS) -> list[SourceFrame]:
    """Cut a shard map into frames of about frame_elems elements, each of one dtype and one value map.

    Raises:
        LayoutError: frame_elems is not at least 1, or not below 2^32.
    """
    if not 0 < frame_elems < 1 << 32:
        raise LayoutError(f"frames of {frame_elems} elements: expected 1 to 2^32 - 1")
    groups: dict[tuple[str, int], list[Shard]] = defaultdict(list)
    for shard in shards:
        groups[schema.tensors[shard.tensor].dtype, shard.kind].append(shard)
    return [
        _source_frame(dtype, kind, pieces)
        for (dtype, kind), members in groups.items()
        for pieces in _cut(members, frame_elems)
    ]


def _cut(shards: Sequence[Shard], frame_elems: int) -> Iterator[list[tuple[int, int, Box]]]:
    """(storage, tensor, box) pieces in lists of at most frame_elems elements."""
    pieces: list[tuple[int, int, Box]] = []
    room = frame_elems
    for shard in shards:
        start, left = 0, shard.box.numel
        while left:
            count = min(left, room)
            pieces += [(shard.storage, shard.tensor, box) for box in shard.box.run(start, count)]
            start, left, room = start + count, left - count, room - count
            if not room:
                yield pieces
                pieces, room = [], frame_elems
    if pieces:
        yield pieces


def _source_frame(dtype: str, kind: int, pieces: list[tuple[int, int, Box]]) -> SourceFrame:
    tensors = sorted({tensor for _, tensor, _ in pieces})
    local = {tensor: index for index, tensor in enumerate(tensors)}
    regions: list[Region] = []
    for _, tensor, box in pieces:
        there = Box(0, box.there0, tuple(Dim(dim.n, 0, dim.there) for dim in box.dims))
        dims = _canonical_dims(there)
        last = regions[-1] if regions else None
        joined = _joined(last, Region(tensor, box.there0, dims)) if last else None
        if joined:
            regions[-1] = joined
        else:
            regions.append(Region(tensor, box.there0, dims))
    rows = rows_of([(storage, local[tensor], box) for storage, tensor, box in pieces])
    return SourceFrame(FrameSpec(dtype, tuple(regions)), rows, kind)


def _canonical_dims(box: Box) -> tuple[tuple[int, int], ...]:
    """(extent, stride) pairs of the canonical side with adjacent dimensions merged."""
    dims: list[tuple[int, int]] = []
    for n, _, there in box.dims:
        if n == 1:
            continue
        if dims and dims[-1][1] == there * n:
            dims[-1] = (dims[-1][0] * n, there)
        else:
            dims.append((n, there))
    return tuple(dims)


def _run_length(dims: tuple[tuple[int, int], ...]) -> int | None:
    """Elements of a contiguous run, or None if the dims are not one run."""
    if not dims:
        return 1
    return dims[0][0] if len(dims) == 1 and dims[0][1] == 1 else None


def _joined(before: Region, after: Region) -> Region | None:
    """Two runs of one tensor that follow each other, as one."""
    first, second = _run_length(before.dims), _run_length(after.dims)
    if first is None or second is None or before.tensor != after.tensor or before.there0 + first != after.there0:
        return None
    return Region(before.tensor, before.there0, ((first + second, 1),))


def _bind(index: int, spec: FrameSpec, schema: Schema, all_keys: Lanes) -> Frame:
    if spec.dtype not in DTYPES:
        raise LayoutError(f"frame {index}: unknown dtype {spec.dtype!r}; known: {', '.join(DTYPES)}")
    tensors = tuple(sorted({region.tensor for region in spec.regions}))
    local = {tensor: position for position, tensor in enumerate(tensors)}
    entries, first = [], 0
    for region in spec.regions:
        if not 0 <= region.tensor < len(schema.tensors):
            raise LayoutError(
                f"frame {index}: tensor {region.tensor} is not in the schema of {len(schema.tensors)} tensors"
            )
        tensor, box = schema.tensors[region.tensor], region.box(first)
        low, high = box.there_bounds
        room, numel = tensor.numel, box.numel
        fits = low >= 0 and high < room and numel <= room and all(n > 0 for n, _ in region.dims)
        if tensor.dtype != spec.dtype or not fits:
            raise LayoutError(f"frame {index}: a region does not fit {tensor.name} ({tensor.dtype}, {tensor.numel})")
        entries.append((0, local[region.tensor], box))
        first += numel
        if first >= 1 << 32:
            raise LayoutError(f"frame {index} has 2^32 elements or more; positions are 32-bit")
    return Frame(index, spec, tensors, rows_of(entries), all_keys[list(tensors)], first)


def _require_disjoint(specs: Sequence[FrameSpec], schema: Schema) -> None:
    """Each canonical index occurs once: relative values depend on it."""
    whole: list[tuple[int, int, int]] = []  # tensor, first element, length
    parts: list[NDArray[np.int64]] = []
    for spec in specs:
        for region in spec.regions:
            length = _run_length(region.dims)
            if length is not None:
                whole.append((region.tensor, region.there0, length))
            else:
                parts.append(np.insert(region.runs(), 0, region.tensor, axis=1))
    spans = np.concatenate([np.array(whole, np.int64).reshape(-1, 3), *parts])
    spans = spans[np.lexsort((spans[:, 1], spans[:, 0]))]
    one, other = spans[:-1], spans[1:]
    bad = np.flatnonzero((one[:, 0] == other[:, 0]) & (one[:, 1] + one[:, 2] > other[:, 1]))
    if len(bad):
        raise LayoutError(f"two regions share elements of {schema.tensors[one[bad[0], 0]].name}")
