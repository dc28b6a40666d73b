"""Several engine ranks as one loader: they are bound, prepare, install and undo together.

    R  ranks      P  parts: distinct canonical regions that ranks hold      T  tensors of the layout

Every rank says which parts it holds, and sums digests part by part. The owner of a part is the lowest rank that holds
it: owners' sums add up to the tensor's, the other holders' must be equal to it. Two parts are the same region or share
nothing, and together the parts are the whole model: that is proved when the ranks are bound (`dcr.layout.coverage`).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dcr.codecs.patch import Change
from dcr.errors import DigestMismatch, SchemaError, StateError
from dcr.layout import coverage
from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import Layout, Region
from dcr.layout.schema import patterns
from dcr.layout.views import UNSIGNED, Lanes
from dcr.memory.placement import Place, Placement
from dcr.seams import Batching, RankLoader, RankReady, Watching

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """One frame, prepared by all ranks that hold some of it.

    shares: (rank, what it has ready). The rest: see `dcr.seams.Undoable`.
    """

    frame: int
    shares: tuple[tuple[int, RankReady], ...]
    old_sums: Lanes
    new_sums: Lanes
    copies_agree: bool

    @property
    def number(self) -> int:
        return self.frame

    @property
    def changed(self) -> int:
        """Elements that will be written, by all ranks together."""
        return sum(ready.changed for _, ready in self.shares)

    @property
    def nbytes(self) -> int:
        """Memory held by all ranks, in bytes."""
        return sum(ready.nbytes for _, ready in self.shares)


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Who holds what of a layout.

    of_rank: for each rank, its parts as numbers into the P distinct ones. tensor: that of each part [P].
    holders: for each frame, the ranks that hold some of its tensors. tensors: its tensors, ascending.
    """

    layout: Layout
    of_rank: tuple[NDArray[np.int64], ...]
    tensor: NDArray[np.int64]
    holders: tuple[tuple[int, ...], ...]
    tensors: tuple[NDArray[np.int64], ...]


class Ranks:
    """The ranks of one member, in order, as one loader; all are called at once, each by one thread at a time.

    waive: patterns (as in fnmatch) of published names that no rank need hold. Such tensors are kept here, beside the
    engine, in canonical form.

    Raises:
        StateError: there are none.
    """

    def __init__(self, ranks: Sequence[RankLoader[Any]], *, waive: Sequence[str] = ()) -> None:
        if not ranks:
            raise StateError("a member has at least one rank; none was given")
        self._given = tuple(ranks)
        self._ranks: tuple[RankLoader[Any], ...] = self._given
        self._waive = patterns(waive)
        self._pool = ThreadPoolExecutor(len(ranks) + 1, thread_name_prefix="dcr-rank")
        self._bound: _Parts | None = None

    def bind(self, layout: Layout) -> None:
        """See `dcr.seams.Loader.bind`.

        Raises:
            SchemaError: no rank holds any of a tensor, and it is not waived.
            LayoutError: what the ranks hold is not every element of the model once, or as equal regions.
        """
        held = self._each_number(lambda r: self._given[r].bind(layout), range(len(self._given)))
        there = {part.tensor for parts in held for part in parts}
        absent = [t for t, spec in enumerate(layout.schema.tensors) if spec.numel and t not in there]
        spares = [_Spare(layout, absent)] if absent else []
        bound = _parts(layout, [*held, *(spare.parts for spare in spares)])
        self._require_waived(layout, absent)
        self._ranks, self._bound = (*self._given, *spares), bound

    def epoch(self) -> bytes:
        """See `dcr.seams.Loader.epoch`."""
        return _together(self._each(lambda rank: rank.epoch()))

    def mark(self) -> bytes:
        """See `dcr.seams.Watching.mark`: of all ranks that see what others do to them."""
        return _together(self._each(lambda rank: rank.mark() if isinstance(rank, Watching) else b""))

    def require_awake(self) -> None:
        """See `dcr.seams.Watching.require_awake`."""
        self._each(lambda rank: rank.require_awake() if isinstance(rank, Watching) else None)

    def prepare(self, frame: int, change: Change) -> Joint:
        """See `dcr.seams.Loader.prepare`."""
        parts = self._parts
        holders = parts.holders[frame]
        readies = self._each(lambda rank: rank.prepare(frame, change), holders)
        numbers = [parts.of_rank[r][list(ready.parts)] for r, ready in zip(holders, readies, strict=True)]
        sums = [np.hstack([ready.old_sums, ready.new_sums]) for ready in readies]
        lanes, same = summed(parts, parts.tensors[frame], numbers, sums)
        agree = same and all(ready.copies_agree for ready in readies)
        return Joint(frame, tuple(zip(holders, readies, strict=True)), lanes[:, :2], lanes[:, 2:], agree)

    def install(self, ready: Joint) -> None:
        """See `dcr.seams.Loader.install`; all ranks have ended when it returns or raises."""
        shares = dict(ready.shares)
        self._each_number(lambda r: self._ranks[r].install(shares[r]), shares)

    def install_all(self, readies: Sequence[Joint]) -> None:
        """See `dcr.seams.Batching.install_all`; all ranks have ended when it returns or raises."""
        shares: dict[int, list[RankReady]] = defaultdict(list)
        for ready in readies:
            for rank, share in ready.shares:
                shares[rank].append(share)
        self._each_number(lambda r: _install(self._ranks[r], shares[r]), shares)

    def undo(self, ready: Joint) -> None:
        """See `dcr.seams.Loader.undo`; every rank is undone, also when one fails."""
        shares = dict(ready.shares)
        self._each_number(lambda r: self._ranks[r].undo(shares[r]), shares)

    def settle(self) -> None:
        """See `dcr.seams.Loader.settle`."""
        self._each(lambda rank: rank.settle())

    def digest(self) -> Lanes:
        """See `dcr.seams.Loader.digest`."""
        parts = self._parts
        every = np.arange(len(parts.layout.schema.tensors))
        lanes, same = summed(parts, every, parts.of_rank, self._each(lambda rank: rank.digest()))
        if not same:
            raise DigestMismatch("two ranks hold other bits of the same part of a tensor; seed this member anew")
        return lanes

    def _require_waived(self, layout: Layout, absent: Sequence[int]) -> None:
        names = [layout.schema.tensors[tensor].name for tensor in absent]
        names = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in self._waive)]
        if names:
            raise SchemaError(
                f"{len(names)} of {len(layout.schema.tensors)} tensors are published, and no rank holds any of them: "
                f"{', '.join(names[:5])}. Either the engine's loader does not take them, and they may be waived; or it "
                "has moved their weights out of its parameters, and has to be told to leave them (docs/engines.md)"
            )

    @property
    def _parts(self) -> _Parts:
        if self._bound is None:
            raise StateError("the ranks are not bound to a layout yet; call bind first")
        return self._bound

    def _each(self, call: Callable[[RankLoader[Any]], Result], which: Iterable[int] | None = None) -> list[Result]:
        return self._each_number(lambda r: call(self._ranks[r]), range(len(self._ranks)) if which is None else which)

    def _each_number(self, call: Callable[[int], Result], which: Iterable[int]) -> list[Result]:
        """Call some ranks at once and wait for all of them; the first error, with the others named in notes."""
        futures = [(r, self._pool.submit(call, r)) for r in which]
        errors = [(r, error) for r, future in futures if (error := future.exception()) is not None]
        if errors:
            for r, error in errors:
                errors[0][1].add_note(f"rank {r} of {len(self._ranks)}: {type(error).__name__}: {error}")
            raise errors[0][1]
        return [future.result() for _, future in futures]


class _Spare:
    """What no rank of the engine holds, as one more rank; see `dcr.seams.RankLoader`."""

    def __init__(self, layout: Layout, tensors: Sequence[int]) -> None:
        specs = [layout.schema.tensors[tensor] for tensor in tensors]
        storages = [np.zeros(spec.numel, UNSIGNED[spec.width]) for spec in specs]
        places = [
            Place(tensor, storage, Box(0, 0, (Dim(spec.numel, 1, 1),)))
            for storage, (tensor, spec) in enumerate(zip(tensors, specs, strict=True))
        ]
        self._placement = Placement(layout, storages, places, partial=True)
        self.parts = self._placement.parts
        self.prepare, self.install = self._placement.prepare, self._placement.install
        self.undo, self.digest = self._placement.undo, self._placement.digest

    def bind(self, layout: Layout) -> Sequence[Region]:  # noqa: ARG002
        """Bound as it was made."""
        return self.parts

    def epoch(self) -> bytes:
        """Nobody else can move this memory."""
        return b""

    def settle(self) -> None:
        """Nothing is made of these tensors."""


def _together(marks: Sequence[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(marks), digest_size=16).digest()


def _install(rank: RankLoader[Any], shares: Sequence[RankReady]) -> None:
    if isinstance(rank, Batching):
        rank.install_all(shares)
        return
    for share in shares:
        rank.install(share)


def summed(
    parts: _Parts, tensors: NDArray[np.int64], numbers: Sequence[NDArray[np.int64]], sums: Sequence[Lanes]
) -> tuple[Lanes, bool]:
    """Add up lanes [L] of parts by rank, each part once, to those of tensors; and say whether all holders agree.

    tensors: ascending, all that the parts are of: a frame costs what is in it, however many tensors a model has.
    """
    number, lanes = np.concatenate(numbers), np.concatenate(sums)
    _, first, inverse = np.unique(number, return_index=True, return_inverse=True)
    total = np.zeros((len(tensors), lanes.shape[1]), np.uint64)
    np.add.at(total, np.searchsorted(tensors, parts.tensor[number[first]]), lanes[first])
    return total, bool((lanes == lanes[first][inverse]).all())


def _parts(layout: Layout, held: Sequence[Sequence[Region]]) -> _Parts:
    numbers: dict[Region, int] = {}
    of_rank = tuple(
        np.array([numbers.setdefault(_canonical(region), len(numbers)) for region in regions], np.int64)
        for regions in held
    )
    owned = [(region.tensor, region.box(0)) for region in numbers]
    coverage.require_covered(layout.schema, coverage.tally(layout.schema, owned))
    tensor = np.array([region.tensor for region in numbers], np.int64)
    tensors = [set(tensor[own].tolist()) for own in of_rank]
    holders = tuple(
        tuple(r for r, some in enumerate(tensors) if not some.isdisjoint(frame.tensors)) for frame in layout.frames
    )
    return _Parts(layout, of_rank, tensor, holders, tuple(np.array(frame.tensors, np.int64) for frame in layout.frames))


def _canonical(region: Region) -> Region:
    """One form for one region, however its dimensions were cut: outer strides first, runs in one piece."""
    dims: list[tuple[int, int]] = []
    for n, stride in sorted((dim for dim in region.dims if dim[0] != 1), key=lambda dim: -dim[1]):
        if dims and dims[-1][1] == stride * n:
            dims[-1] = (dims[-1][0] * n, stride)
        else:
            dims.append((n, stride))
    return Region(region.tensor, region.there0, tuple(dims))
