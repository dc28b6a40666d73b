"""Construct: find what changed in one frame of the live weights, against the baseline.

    N  elements of a frame      K  changed ones

One pass over memory per frame: N source elements and N baseline elements are read, K positions and bits are written.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from operator import is_

import anyio
import anyio.to_thread
import msgspec
import numpy as np

from dcr import kernels
from dcr.codecs.choice import outgrows
from dcr.codecs.patch import Patch
from dcr.errors import DigestMismatch, FrozenChanged, SchemaError, StateError
from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import FRAME_ELEMS, Frame, SourceFrame
from dcr.layout.schema import Schema, keys
from dcr.layout.views import STORAGE, Bits, Lanes, Table, rows_of
from dcr.memory.baseline import Baseline
from dcr.memory.placement import canonical_table
from dcr.pipeline import DROP, Drop, Inbox, Outbox, serve
from dcr.protocol import digest
from dcr.seams import Residual


class Made(msgspec.Struct, frozen=True, array_like=True):
    """The digest of what a rank's export has made of a residual tensor; others may have made it, too."""

    tensor: int
    lanes: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Conversion:
    """A residual group to convert: its frames, numbered from `first` on, over the arrays that it converts to.

    is_shared: whether other ranks convert it too, so that results have to be compared.
    """

    group: Residual
    plan: Sequence[SourceFrame]
    first: int
    is_shared: bool = False


class Tables:
    """Where the elements of frames lie, worked out once for as long as storages stay the same arrays."""

    def __init__(self, plan: Sequence[SourceFrame]) -> None:
        self._plan = plan
        self._storages: Sequence[Bits] = ()
        self._made: dict[int, Table] = {}

    def over(self, storages: Sequence[Bits]) -> Tables:
        """The same frames over these storages."""
        if len(storages) != len(self._storages) or not all(map(is_, storages, self._storages)):
            self._storages = tuple(storages)
            self._made = {}
        return self

    def __getitem__(self, number: int) -> Table:
        table = self._made.get(number)
        if table is None:
            table = self._made[number] = source_table(self._plan[number], self._storages)
        return table


class Construct:
    """Frame numbers in, patches out; frames without a change send nothing. Behind them, residual groups one by one.

    Patches lie in the baseline's overlay until the commit, so the outbox has room for all of them and capturing the
    weights never waits for the link. Of what is converted, no more than one group is held at a time.

    plan: the frames whose numbers may come, numbered from `first` on; tables: theirs, where they are kept.
    conversions: groups to convert, in this order. audited: a frame whose captured weights are digested as well, so that
    a compare that missed something is found. captured: called when everything has been read. is_dense: whether a frame
    is sent whole, given how many of its elements changed, how many it has, and their width. frozen: frames that may
    not differ from the baseline; published: digests of those that were published before, for where there is none.
    """

    name = "construct"

    def __init__(
        self,
        baseline: Baseline,
        plan: Sequence[SourceFrame],
        storages: Sequence[Bits],
        *,
        first: int = 0,
        tables: Tables | None = None,
        conversions: Sequence[Conversion] = (),
        workers: int = 1,
        audited: int | None = None,
        captured: Callable[[], None] = lambda: None,
        is_dense: Callable[[int, int, int], bool] = outgrows,
        frozen: Container[int] = frozenset(),
        published: Mapping[int, Lanes] | None = None,
    ) -> None:
        self.workers = workers
        self.depth = max(1, len(plan) + sum(len(conversion.plan) for conversion in conversions))
        self._baseline = baseline
        self._plan = plan
        self._tables = (tables or Tables(plan)).over(storages)
        self._first = first
        self._conversions = conversions
        self._audited = audited
        self._captured = captured
        self._is_dense = is_dense
        self._frozen = frozen
        self._published = published or {}
        self.made: list[Made] = []  # by the conversions, where other ranks may have made the same

    async def run(self, inbox: Inbox[int], outbox: Outbox[Patch]) -> None:
        """See `dcr.seams.Stage`."""
        limiter = anyio.CapacityLimiter(self.workers)

        async def capture(index: int) -> Patch | Drop:
            patch = await anyio.to_thread.run_sync(self.patch, index, limiter=limiter)
            if patch is None:
                return DROP
            self._baseline.hold(patch)
            return patch

        await serve(inbox, outbox, capture, workers=self.workers)
        for conversion in self._conversions:
            await self._convert(conversion, outbox)
        self._captured()

    async def _convert(self, conversion: Conversion, outbox: Outbox[Patch]) -> None:
        storages, made = await anyio.to_thread.run_sync(convert, conversion, self._baseline.layout.schema)
        self.made += made
        for index, source in enumerate(conversion.plan, conversion.first):
            table = source_table(source, storages)
            patch = await anyio.to_thread.run_sync(self._compare, index, table, source.kind)
            if patch is not None:
                self._baseline.hold(patch)
                await outbox.send(patch)

    def patch(self, index: int) -> Patch | None:
        """The patch of one frame, None if nothing changed; runs in a worker thread.

        Raises:
            FrozenChanged: it is frozen, and differs from the baseline.
            DigestMismatch: the audited frame's captured bits are not what the patch says; or it is frozen, and the
                baseline has changed.
        """
        number = index - self._first
        return self._compare(index, self._tables[number], self._plan[number].kind)

    def _compare(self, index: int, table: Table, kind: int) -> Patch | None:
        frame, base = self._baseline.layout.frames[index], self._baseline.base(index)
        if base is None:
            anchor = _anchor(frame, table, kind)
            if index in self._published:
                _require_same(frame, anchor.new_sums, self._published[index], self._baseline.layout.schema)
            return anchor
        if index in self._frozen:
            _require_unchanged(frame, table, kind, base, self._baseline.layout.schema, self._published.get(index))
            return None
        patch = delta(frame, table, kind, base, self._is_dense)
        if index == self._audited:
            audit(frame, table, kind, base, patch)
        return patch


class Whole:
    """Frame numbers in, the committed bits of each frame out, whole: an anchor of the baseline."""

    name = "whole"
    workers = 1

    def __init__(self, baseline: Baseline) -> None:
        self._baseline = baseline

    async def run(self, inbox: Inbox[int], outbox: Outbox[Patch]) -> None:
        """See `dcr.seams.Stage`."""
        await serve(inbox, outbox, self.patch)

    def patch(self, index: int) -> Patch:
        """One frame; its bits are borrowed from the baseline."""
        frame, bits = self._baseline.layout.frames[index], self._baseline.base(index)
        if bits is None:
            raise StateError("nothing is committed yet: there is nothing to make an anchor of")
        return _whole(frame, bits)


def convert(conversion: Conversion, schema: Schema) -> tuple[Sequence[Bits], Sequence[Made]]:
    """What a residual group converts to, nothing where another rank owns it; and the digests to compare. Blocking.

    Raises:
        SchemaError: it is not what the schema says.
    """
    group = conversion.group
    arrays = group.convert()
    made = _require_fit(group, arrays, schema)
    compared = made.items() if conversion.is_shared else ()
    digests = [Made(tensor, _lanes(bits, tensor, schema)) for tensor, bits in compared]
    return list(made.values()) if group.owned else (), digests


def _require_fit(group: Residual, arrays: Sequence[Bits | None] | None, schema: Schema) -> dict[int, Bits]:
    """What this rank has made of a group's tensors: who owns the group all of them, others what they have."""
    given = [None] * len(group.tensors) if arrays is None else arrays
    made = {tensor: bits for tensor, bits in zip(group.tensors, given, strict=False) if bits is not None}
    specs = [schema.tensors[tensor] for tensor in group.tensors]
    unfit = [tensor for tensor, bits in made.items() if (len(bits), bits.itemsize) != _extent(schema, tensor)]
    if unfit or len(given) != len(specs) or (group.owned and len(made) < len(specs)):
        names = ", ".join(f"{spec.name} ({spec.numel} elements of {spec.width} bytes)" for spec in specs[:3])
        found = None if arrays is None else [None if bits is None else (len(bits), bits.itemsize) for bits in arrays]
        raise SchemaError(f"the export of {names} and what belongs to it gave {found}")
    return made


def _extent(schema: Schema, tensor: int) -> tuple[int, int]:
    return schema.tensors[tensor].numel, schema.tensors[tensor].width


def _lanes(bits: Bits, tensor: int, schema: Schema) -> bytes:
    """The digest of a whole tensor."""
    lanes, key = digest.zero(1), keys([schema.tensors[tensor]])
    for start in range(0, len(bits), FRAME_ELEMS):
        part = bits[start : start + FRAME_ELEMS]
        lanes += kernels.digest(Table((part,), rows_of([(0, 0, Box(0, start, (Dim(len(part), 1, 1),)))])), key)
    return digest.pack(lanes)


def source_table(source: SourceFrame, storages: Sequence[Bits]) -> Table:
    """Where a frame's elements lie in the live storages; only those that it uses, so that all have one width."""
    used, rows = np.unique(source.rows[:, STORAGE], return_inverse=True)
    local = source.rows.copy()
    local[:, STORAGE] = rows
    return Table(tuple(storages[storage] for storage in used), local)


def _anchor(frame: Frame, table: Table, kind: int) -> Patch:
    """All N elements: these very bits become the baseline's."""
    return _whole(frame, kernels.read(table, kind))


def _whole(frame: Frame, bits: Bits) -> Patch:
    new_sums = kernels.digest(canonical_table(frame, bits), frame.keys)
    return Patch(frame, None, bits, None, frame.numel, np.zeros_like(new_sums), new_sums)


def delta(frame: Frame, table: Table, kind: int, base: Bits, is_dense: Callable[[int, int, int], bool]) -> Patch | None:
    """The elements that differ from the baseline; None if none does."""
    positions, bits, old, new_sums, old_sums = kernels.capture(table, frame.keys, base, kind)
    if not len(positions):
        return None
    if not is_dense(len(positions), frame.numel, frame.width):
        return Patch(frame, positions, bits, base, len(positions), old_sums, new_sums, old)
    dense = base.copy()
    dense[positions] = bits
    old_sums = kernels.digest(canonical_table(frame, base), frame.keys)
    new_sums = kernels.digest(canonical_table(frame, dense), frame.keys)
    return Patch(frame, None, dense, base, len(positions), old_sums, new_sums)


def _require_unchanged(
    frame: Frame, table: Table, kind: int, base: Bits, schema: Schema, published: Lanes | None
) -> None:
    positions, _, _, new_sums, old_sums = kernels.capture(table, frame.keys, base, kind)
    if len(positions):
        if published is not None and (kernels.digest(table, frame.keys, kind) == published).all():
            raise DigestMismatch(f"frame {frame.index}: the baseline is not what was published; weights are")
        _require_same(frame, new_sums, old_sums, schema, f" ({len(positions)} elements of what was looked at differ)")


def _require_same(frame: Frame, found: Lanes, expected: Lanes, schema: Schema, how: str = "") -> None:
    """The digests of a frozen frame's tensors are those of what was published.

    Raises:
        FrozenChanged: they are not; names the tensors.
    """
    if changed := np.flatnonzero((found != expected).any(axis=1)).tolist():
        names = ", ".join(schema.tensors[frame.tensors[tensor]].name for tensor in changed[:5])
        raise FrozenChanged(
            f"{names}{' and more' if len(changed) > 5 else ''} must not change, and no longer is what was published"
            f"{how}: put it back, or make a new source and a new publisher that do not list it as frozen"
        )


def audit(frame: Frame, table: Table, kind: int, base: Bits, patch: Patch | None) -> None:
    """Digest a frame's captured weights apart from the compare that made its patch.

    Raises:
        DigestMismatch: the compare missed something.
    """
    captured = kernels.digest(table, frame.keys, kind)
    expected = kernels.digest(canonical_table(frame, base), frame.keys)
    if patch is not None:
        expected += patch.new_sums - patch.old_sums
    if (captured != expected).any():
        raise DigestMismatch(
            f"frame {frame.index}: the captured weights do not match the patch made of them; "
            "were they written to before captured() returned?"
        )
