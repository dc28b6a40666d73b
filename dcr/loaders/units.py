"""Units: tensors that are recorded together, and what they write; found by loading them on stand-ins.

Each load goes through the whole model in many engines (vLLM's loader does it twice), and a model has far more tensors
than units. So tensors are loaded alone only where something hangs on it: in units whose tensors are not all just moved
when they are loaded together.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager

import torch

from dcr.errors import SchemaError
from dcr.layout.schema import TensorSpec
from dcr.loaders.certify import Finding
from dcr.loaders.engine import Octets
from dcr.loaders.finding import find
from dcr.loaders.probe import Numbering, random_tensor
from dcr.loaders.repeats import Unit
from dcr.loaders.trial import Seen, Trial


def units_of(names: Sequence[str]) -> list[list[int]]:
    """Tensors that are loaded together: those of one numbered layer, or of one top-level module."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        numbered = re.match(r"(.*?\.)?\d+(?=\.|$)", name)
        groups[numbered[0] if numbered else name.partition(".")[0]].append(index)
    return list(groups.values())


class Units:
    """Finds units, and keeps what is known of each tensor.

    waived: tensors that the loader need not take. alone: what was seen of tensors that were loaded alone. eager:
    whether all of them are. aside: memories that only post-load steps write, of modules that no tensor is loaded into.
    error: what the last load that failed has raised.
    """

    def __init__(self, trial: Trial, waived: Collection[int]) -> None:
        self._trial = trial
        self._waived = waived
        self._specs = trial.schema.tensors
        self.alone: dict[int, Seen] = {}
        self.eager = False
        self.aside: set[int] = set()
        self.error: Exception | None = None
        self._moved: dict[int, set[int]] = {}  # what was written for tensors that seemed to be moved only
        self._steady: set[int] = set()  # what loads have written so far, and so have to write each time

    def parts(self) -> list[Unit] | None:
        """Units of tensors that write no memory in common, nor read what others write; None if one cannot be loaded."""
        merged: list[Unit] = []
        for members in units_of([spec.name for spec in self._specs]):
            unit = self._discover(members)
            if unit is None:
                return None
            self._trial.stand_ins.reset(unit.touched)
            related = [other for other in merged if _related(unit, other)]
            merged = [other for other in merged if other not in related]
            merged.append(unit if not related else self._merge([*related, unit]))
        self.aside, read = self._beside(merged)
        related = [unit for unit in merged if read & unit.touched]
        merged = [unit for unit in merged if unit not in related]
        merged += [self._merge(related, self.aside)] if related else []
        for index, unit in enumerate(merged):
            if not unit.tried:
                with reset_after(self._trial, unit.touched):
                    again = self._discover(unit.members, unit.touched)
                if again is None:
                    return None
                merged[index] = again
        return merged

    def whole(self) -> Unit | None:
        """One unit of all tensors that the loader takes; None if it takes them neither in parts nor at once."""
        with reset_after(self._trial, self._trial.memories):
            return self._discover(range(len(self._specs)), self.aside | self._steady, whole=True)

    def _merge(self, units: Sequence[Unit], more: Set[int] = frozenset()) -> Unit:
        """One unit of several, that has to be discovered again."""
        unit = Unit(sorted(tensor for unit in units for tensor in unit.members), [], set(more), tried=False)
        for other in units:
            unit.touched |= other.touched
            unit.together.add(other.together)
        return unit

    def _beside(self, units: Sequence[Unit]) -> tuple[set[int], set[int]]:
        """What post-load steps write of modules that no tensor is loaded into, and what they read."""
        touched = set[int]().union(*(unit.touched for unit in units))
        modules = self._trial.modules_of(self._trial.memories) - self._trial.modules_of(touched)
        seen = self._trial.settle(modules) if modules else Seen()
        self._trial.stand_ins.reset(seen.written)
        return (seen.written - touched, seen.read) if seen.error is None else (set(), set())

    def _scout(self, tensor: int) -> Seen:
        """Load one tensor alone, under each of its names."""
        seen, taken = Seen(), []
        for name in self._trial.names[tensor]:
            self._trial.names[tensor] = (name,)
            alone = self._load([tensor], 1, look=False)
            if alone.error is None:
                taken.append(name)
            seen.add(alone)
        spec = self._specs[tensor]
        self._trial.names[tensor] = tuple(taken) or (spec.name, *spec.aliases)
        if taken:
            seen.error = None
        return seen

    def _load(
        self, tensors: Sequence[int], seed: int, *, settle: Collection[int] | None = None, look: bool = True
    ) -> Seen:
        """Load random bits; once more if the loader has read a table whose stand-in was empty, over a copy of it."""
        for _ in range(len(self._trial.memories) + 1):
            seen = self._trial.load(tensors, random_of(self._specs, seed), settle=settle, look=look)
            if not self._trial.stand_ins.keep(seen.read - seen.written):
                break
        return seen

    def _discover(self, members: Sequence[int], touched: Set[int] = frozenset(), *, whole: bool = False) -> Unit | None:
        """A unit of those tensors that can be loaded together; None if they cannot, without others."""
        unit = None
        if not (whole or self.eager or any(self._is_special(tensor) for tensor in members)):
            unit = self._together(members, touched)
            if unit is not None:
                self._moved |= dict.fromkeys(unit.tensors, unit.steady)
                if self._is_plain(unit):
                    return unit
            self._trial.stand_ins.reset(self._trial.scratched(()))
        for tensor in members:
            if tensor not in self.alone:
                self.alone[tensor] = self._scout(tensor)
        return unit if unit is not None and self._has_learned(unit) else self._together(members, touched, whole=whole)

    def _has_learned(self, unit: Unit) -> bool:
        """Add what loads of each tensor alone did to a unit; False if they wrote other memory than is known of it."""
        seen = self._trial.rebound()
        for tensor in unit.tensors:
            seen.add(self.alone[tensor])
        unit.together.read |= seen.read
        unit.together.rebound += seen.rebound
        return seen.written <= unit.steady

    def _is_special(self, tensor: int) -> bool:
        """Whether a tensor was loaded alone, or has to be: to see under which of its names it is taken."""
        return tensor in self.alone or len(self._trial.names[tensor]) > 1

    def _is_plain(self, unit: Unit) -> bool:
        """Whether the loader only moves a unit's elements, all of them to some place; what was found is kept."""
        if unit.together.values_read:
            return False
        unit.findings = probe(self._trial, unit)
        homes = {home.tensor for finding in unit.findings for home in finding.homes}
        return homes.issuperset(unit.tensors) and not doubts_of(self._trial, unit, unit.findings)

    def _together(self, members: Sequence[int], touched: Set[int], *, whole: bool = False) -> Unit | None:
        """See `_discover`; what is known of tensors alone counts."""
        tensors = list(members)
        alone = [self.alone[tensor] for tensor in members if tensor in self.alone]
        before = self._trial.rebound()
        steady = before.written.union(*(self._moved.get(tensor, set()) for tensor in members))
        known = steady.union(touched, *(seen.written for seen in alone))
        for _ in range(8):
            seen = self._load(tensors, 2, settle=known)
            if seen.error is not None:
                self.error = seen.error
                may_go = tensors if whole else self._waived
                accepted = [t for t in tensors if t not in self.alone or self.alone[t].error is None or t not in may_go]
                if len(accepted) == len(tensors):
                    return None
                tensors = accepted
                continue
            steady |= seen.written
            found = known | seen.written
            found |= self._trial.scratched(found)
            if found == known:
                alone = [self.alone[tensor] for tensor in tensors if tensor in self.alone]
                seen.rebound += before.rebound
                steady = steady.union(*(one.written for one in alone))
                steady |= self._steady if whole else set()
                self._steady |= steady
                seen.read |= set[int]().union(*(one.read for one in alone))
                return Unit(members, tensors, known, steady, seen)
            known = found
        raise SchemaError(f"loading {self._specs[members[0]].name} and its like writes to other memory each time")


def probe(trial: Trial, unit: Unit) -> list[Finding]:
    """Load numbers, digit by digit, and read them back."""
    if not unit.tensors:
        return []
    memories = sorted(unit.touched)
    stored = frozenset(trial.stand_ins.memories[index].dtype for index in memories)
    numbering = Numbering(tuple(trial.schema.tensors[tensor] for tensor in unit.tensors), stored)
    place = {tensor: index for index, tensor in enumerate(unit.tensors)}
    pictures: list[dict[int, Octets]] = []
    for number in range(numbering.passes):
        trial.wipe(memories, number)
        seen = trial.load(
            unit.tensors,
            lambda t, n=number: numbering.tensor(place[t], n),  # type: ignore[misc]
            settle=memories,
        )
        unit.idle |= trial.idle(unit.steady, number, seen)
        pictures.append({index: trial.stand_ins.scratch(index).copy() for index in memories})
    stand_ins = trial.stand_ins.memories
    return [
        find(stand_ins[index], index, [picture[index] for picture in pictures], numbering, unit.tensors)
        for index in memories
    ]


def doubts_of(trial: Trial, unit: Unit, findings: Sequence[Finding]) -> dict[int, str]:
    """Memories that cannot be updated element by element, and why."""
    doubts: dict[int, str] = {}
    rebound = set(unit.together.rebound)
    for finding in findings:
        path = trial.stand_ins.memories[finding.memory].path
        given = [slot.path for slot in trial.stand_ins.memories[finding.memory].slots if slot.path in rebound]
        if given:
            doubts[finding.memory] = f"the loader gives {given[0]} new memory"
        elif finding.memory in unit.idle:
            doubts[finding.memory] = f"the loader does not write {path} each time"
        elif finding.foreign:
            doubts[finding.memory] = f"{finding.foreign} elements of {path} are made of values"
        elif finding.tangled:
            doubts[finding.memory] = f"{path}: {finding.tangled}"
    return doubts


@contextmanager
def reset_after(trial: Trial, memories: Iterable[int]) -> Iterator[None]:
    """Stand-ins are let go afterwards."""
    try:
        yield
    finally:
        trial.stand_ins.reset(memories)


def random_of(specs: Sequence[TensorSpec], seed: int) -> Callable[[int], torch.Tensor]:
    """Random bits to load for each tensor."""
    return lambda tensor: random_tensor(specs[tensor], seed, tensor)


def _related(unit: Unit, other: Unit) -> bool:
    """True if two units write the same memory, or one reads what the other writes."""
    return bool(
        unit.touched & other.touched or unit.together.read & other.touched or other.together.read & unit.touched
    )
