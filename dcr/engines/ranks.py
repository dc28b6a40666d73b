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
from dcr.seams import Batching, Loader, RankReady, RankWeights, Watching

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
    """The loaders of a member's ranks, in order, as one; all are called at once, each by one thread at a time.

    waive: patterns (as in fnmatch) of published names that no rank need hold. Such tensors are kept here, beside the
    engine, in canonical form.

    Raises:
        StateError: there are none.
    """

    def __init__(self, ranks: Sequence[Loader], *, waive: Sequence[str] = ()) -> None:
        if not ranks:
            raise StateError("a member has at least one rank; none was given")
        self._ranks = tuple(ranks)
        self._waive = patterns(waive)
        self._at_once = _AtOnce(len(ranks))

    def bind(self, layout: Layout) -> JointWeights:
        """See `dcr.seams.Loader.bind`.

        Raises:
            SchemaError: no rank holds any of a tensor, and it is not waived.
            LayoutError: what the ranks hold is not every element of the model once, or as equal regions.
        """
        held: list[Any] = self._each(lambda rank: rank.bind(layout))
        there = {part.tensor for weights in held for part in weights.parts}
        absent = [t for t, spec in enumerate(layout.schema.tensors) if spec.numel and t not in there]
        if absent:
            held.append(_spare(layout, absent))
        parts = _parts(layout, [weights.parts for weights in held])
        self._require_waived(layout, absent)
        return JointWeights(held, parts, self._at_once)

    def fingerprint(self) -> bytes:
        """See `dcr.seams.Loader.fingerprint`."""
        return _together(self._each(lambda rank: rank.fingerprint()))

    def finalize(self) -> None:
        """See `dcr.seams.Loader.finalize`."""
        self._each(lambda rank: rank.finalize())

    def mark(self) -> bytes:
        """See `dcr.seams.Watching.mark`: of all ranks that see what others do to them."""
        return _together(self._each(lambda rank: rank.mark() if isinstance(rank, Watching) else b""))

    def require_awake(self) -> None:
        """See `dcr.seams.Watching.require_awake`."""
        self._each(lambda rank: rank.require_awake() if isinstance(rank, Watching) else None)

    def _require_waived(self, layout: Layout, absent: Sequence[int]) -> None:
        names = [layout.schema.tensors[tensor].name for tensor in absent]
        names = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in self._waive)]
        if names:
            raise SchemaError(
                f"{len(names)} of {len(layout.schema.tensors)} tensors are published, and no rank holds any of them: "
                f"{', '.join(names[:5])}. Either the engine's loader does not take them, and they may be waived; or it "
                "has moved their weights out of its parameters, and has to be told to leave them (docs/engines.md)"
            )

    def _each(self, call: Callable[[Loader], Result]) -> list[Result]:
        return self._at_once.each(lambda r: call(self._ranks[r]), range(len(self._ranks)))


class JointWeights:
    """The weights of all ranks of a member, bound to one layout; see `dcr.seams.LiveWeights`."""

    def __init__(self, ranks: Sequence[RankWeights[Any]], parts: _Parts, at_once: _AtOnce) -> None:
        self._ranks = tuple(ranks)
        self._parts = parts
        self._at_once = at_once

    def prepare(self, frame: int, change: Change) -> Joint:
        """See `dcr.seams.LiveWeights.prepare`."""
        parts = self._parts
        holders = parts.holders[frame]
        readies: list[RankReady] = self._at_once.each(lambda r: self._ranks[r].prepare(frame, change), holders)
        numbers = [parts.of_rank[r][list(ready.parts)] for r, ready in zip(holders, readies, strict=True)]
        sums = [np.hstack([ready.old_sums, ready.new_sums]) for ready in readies]
        lanes, same = summed(parts, parts.tensors[frame], numbers, sums)
        agree = same and all(ready.copies_agree for ready in readies)
        return Joint(frame, tuple(zip(holders, readies, strict=True)), lanes[:, :2], lanes[:, 2:], agree)

    def install(self, ready: Joint) -> None:
        """See `dcr.seams.LiveWeights.install`; all ranks have ended when it returns or raises."""
        shares = dict(ready.shares)
        self._at_once.each(lambda r: self._ranks[r].install(shares[r]), shares)

    def install_all(self, readies: Sequence[Joint]) -> None:
        """See `dcr.seams.Batching.install_all`; all ranks have ended when it returns or raises."""
        shares: dict[int, list[RankReady]] = defaultdict(list)
        for ready in readies:
            for rank, share in ready.shares:
                shares[rank].append(share)
        self._at_once.each(lambda r: _install(self._ranks[r], shares[r]), shares)

    def undo(self, ready: Joint) -> None:
        """See `dcr.seams.LiveWeights.undo`; every rank is undone, also when one fails."""
        shares = dict(ready.shares)
        self._at_once.each(lambda r: self._ranks[r].undo(shares[r]), shares)

    def digest(self) -> Lanes:
        """See `dcr.seams.LiveWeights.digest`."""
        parts, count = self._parts, len(self._ranks)
        every = np.arange(len(parts.layout.schema.tensors))
        sums = self._at_once.each(lambda r: self._ranks[r].digest(), range(count))
        lanes, same = summed(parts, every, parts.of_rank, sums)
        if not same:
            raise DigestMismatch("two ranks hold other bits of the same part of a tensor; seed this member anew")
        return lanes


class _AtOnce:
    """Threads that call the ranks of a member, and what is kept beside them, all at once."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._pool = ThreadPoolExecutor(ranks + 1, thread_name_prefix="dcr-rank")

    def each(self, call: Callable[[int], Result], which: Iterable[int]) -> list[Result]:
        """Call some ranks at once and wait for all of them; the first error, with the others named in notes."""
        futures = [(r, self._pool.submit(call, r)) for r in which]
        errors = [(r, error) for r, future in futures if (error := future.exception()) is not None]
        if errors:
            for r, error in errors:
                errors[0][1].add_note(f"rank {r} of {self._ranks}: {type(error).__name__}: {error}")
            raise errors[0][1]
        return [future.result() for _, future in futures]


def _spare(layout: Layout, tensors: Sequence[int]) -> Placement:
    """What no rank of the engine holds, as the weights of one more rank: nobody else can move this memory."""
    specs = [layout.schema.tensors[tensor] for tensor in tensors]
    storages = [np.zeros(spec.numel, UNSIGNED[spec.width]) for spec in specs]
    places = [
        Place(tensor, storage, Box(0, 0, (Dim(spec.numel, 1, 1),)))
        for storage, (tensor, spec) in enumerate(zip(tensors, specs, strict=True))
    ]
    return Placement(layout, storages, places, partial=True)


def _together(marks: Sequence[bytes]) -> bytes:
    return hashlib.blake2b(b"".join(marks), digest_size=16).digest()


def _install(rank: RankWeights[Any], shares: Sequence[RankReady]) -> None:
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
