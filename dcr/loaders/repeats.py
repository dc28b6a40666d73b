"""Repeats: which tensors have to be loaded together, and how often, for a load to make the same whatever was before.

What was before is all that a load can see besides what it is given: memory that it makes, memory that it does not make,
and what the loader remembers of earlier loads. Each trial changes all three; what is made of them differs then. A load
that does not write has proved nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field

from dcr.loaders.certify import Finding
from dcr.loaders.engine import Octets
from dcr.loaders.kinds import Reload
from dcr.loaders.probe import blank, random_tensor
from dcr.loaders.trial import Make, Seen, Trial

VALUES = 3  # the seed of what is loaded in every trial; that of anything else is another one
NEIGHBOURS, CUT, BESIDE = 11, 12, 40


@dataclass(slots=True, eq=False)
class Unit:
    """Tensors that are recorded together.

    members: all of them. tensors: those that its loader takes. touched: memories that loading them writes. steady:
    those among them that every load must write. idle: those among these that some load did not. together: what was
    seen of a load of them. tried: False if that is still to be done. findings: where numbers were found, if they were
    looked for already.
    """

    members: Sequence[int]
    tensors: list[int]
    touched: set[int]
    steady: set[int] = field(default_factory=set)
    together: Seen = field(default_factory=Seen)
    idle: set[int] = field(default_factory=set)
    tried: bool = True
    findings: list[Finding] | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that have to be loaded together, why, and a digest of what trials made of them."""

    reload: Reload
    reason: str
    made: bytes


class Repeats:
    """Trials of loads of one unit.

    writers: which tensors write to each memory. error: what the last of them raised.
    """

    def __init__(self, trial: Trial, unit: Unit, writers: dict[int, set[int]]) -> None:
        self._trial, self._unit, self._writers = trial, unit, writers
        self._read: set[int] = set()
        self.error: Exception | None = None

    def group(self, tensors: Set[int], memories: Set[int], reason: str) -> Group | None:
        """The fewest tensors, these among them, whose loads repeat; None if all of the unit do not."""
        for chosen, made, times in self._candidates(tensors, memories):
            digest = self._made(chosen, made, times)
            if digest is not None:
                steady = tuple(sorted(self._unit.steady.intersection(made)))
                touched = tuple(sorted(self._unit.touched))
                return Group(Reload(tuple(chosen), tuple(made), touched, times, steady), reason, digest)
        return None

    def again(self, group: Group) -> bool:
        """True if a group still makes the same, once all other tensors of a model were loaded anew."""
        reload = group.reload
        self._forget(reload.tensors[:-1], CUT + 1)
        return (
            self._load(reload.tensors, reload.memories, reload.times, 0) and self._digest(reload.memories) == group.made
        )

    def _candidates(self, tensors: Set[int], memories: Set[int]) -> Iterator[tuple[list[int], list[int], int]]:
        """Tensors, memories, and how often: what hangs together, also with what is read, then the unit, then it twice.

        A loader that remembers one half of a pair has both of one version when all have come again. Less than a unit is
        not loaded twice: whatever two halves come one after the other may be a pair to it.
        """
        yield self._sorted(tensors), sorted(memories), 1
        wider, made = closure(self._writers, tensors, memories | (self._read & self._writers.keys()))
        everything = self._unit.tensors, sorted(self._unit.touched)
        if len(tensors) < len(wider) < len(everything[0]):
            yield self._sorted(wider), sorted(made), 1
        if len(tensors) < len(everything[0]):
            yield *everything, 1
        yield *everything, 2

    def _made(self, tensors: Sequence[int], memories: Sequence[int], times: int) -> bytes | None:
        """A digest of what a load makes of some memories, if it is the same over all that may have been before."""
        results: list[list[Octets]] = []
        digest = b""
        for number in (0, 1):
            if number:
                self._forget([t for t in self._unit.tensors if t not in tensors], NEIGHBOURS)
                self._forget(tensors[1:], CUT)
            if not self._load(tensors, memories, times, number):
                return None
            results.append([self._trial.stand_ins.scratch(index).copy() for index in memories])
            digest = digest or self._digest(memories)
        for index, first, second in zip(memories, *results, strict=True):
            memory = self._trial.stand_ins.memories[index]
            kept = (first == blank(memory, 0)) & (second == blank(memory, 1))
            if not ((first == second) | kept).all():
                return None
        return digest

    def _load(self, tensors: Sequence[int], memories: Sequence[int], times: int, number: int) -> bool:
        """Load some tensors over memory that was filled anew; False if that fails, or leaves some of it as it was."""
        self._trial.fill(self._unit.touched.difference(memories), BESIDE + number)
        self._trial.wipe(memories, number)
        written = Seen()
        for _ in range(times):
            written.add(self._trial.load(tensors, self._values(VALUES), settle=self._unit.touched))
        self._read |= written.read
        self.error = written.error
        return written.error is None and not self._trial.idle(self._unit.steady & set(memories), number, written)

    def _forget(self, tensors: Collection[int], seed: int) -> None:
        """Load something else, so that what the loader remembers is not of the tensors that are tried."""
        if tensors:
            self._trial.load(tensors, self._values(seed))

    def _digest(self, memories: Collection[int]) -> bytes:
        total = hashlib.blake2b(digest_size=16)
        for index in memories:
            total.update(self._trial.stand_ins.scratch(index).data)
        return total.digest()

    def _values(self, seed: int) -> Make:
        specs = self._trial.schema.tensors
        return lambda tensor: random_tensor(specs[tensor], seed, tensor)

    def _sorted(self, tensors: Set[int]) -> list[int]:
        return [tensor for tensor in self._unit.tensors if tensor in tensors]


def closed(
    writers: dict[int, set[int]], memories: Collection[int], tensors: Collection[int]
) -> list[tuple[set[int], set[int]]]:
    """Groups of tensors and memories that hang together, of those that a doubtful memory or tensor is in."""
    groups: list[tuple[set[int], set[int]]] = []
    waiting = [(set(writers[memory]), {memory}) for memory in memories] + [({tensor}, set[int]()) for tensor in tensors]
    for group, held in waiting:
        if not any(group & other for other, _ in groups):
            groups.append(closure(writers, group, held))
    return groups


def closure(writers: dict[int, set[int]], tensors: Set[int], memories: Set[int]) -> tuple[set[int], set[int]]:
    """Tensors and memories, with all that write to these memories, and all that those write to."""
    group, made, grown = set(tensors), set(memories), -1
    while grown != len(group) + len(made):
        group = group.union(*(writers[memory] for memory in made))
        grown = len(group) + len(made)
        made |= {memory for memory, those in writers.items() if those & group}
    return group, made
