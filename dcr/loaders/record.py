"""Record: find out where an engine's own loader puts each checkpoint element, and prove it.

    N  elements of a unit of tensors

Structure proposes: the loader runs on stand-ins, a unit of tensors at a time, with sources whose values number their
elements; what arrives is fitted to boxes. Bits certify (`dcr.loaders.certify`): random patterns must land as the boxes
say, on every byte. What operators were seen to do gives the reasons. Memory: a unit is one layer of a model; it takes
about six times its size, while it is recorded.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager

import torch

from dcr.errors import SchemaError
from dcr.loaders.attributes import Attributes
from dcr.loaders.certify import Cast, Finding, Home, cast_of, certify
from dcr.loaders.engine import Engine, Octets, slots_of
from dcr.loaders.finding import TABLE_BOXES, find
from dcr.loaders.kinds import Constants, Kind, Record, Reload, Verdict
from dcr.loaders.probe import Numbering, random_tensor
from dcr.loaders.repeats import Group, Repeats, Unit, closed
from dcr.loaders.standin import StandIns
from dcr.loaders.trial import Seen, Trial, describe
from dcr.schema import Schema

__all__ = ["Constants", "Kind", "Record", "Reload", "Verdict", "record", "units_of"]


def record(engine: Engine, schema: Schema, *, waived: Collection[int] = ()) -> Record:
    """Try an engine's loader out on every tensor of a schema; live memory is not touched.

    waived: tensors that the loader need not take.

    Raises:
        SchemaError: the loader cannot be tried, or does not do the same thing twice.
    """
    attributes = Attributes(engine.module.modules())
    try:
        with StandIns(slots_of(engine.module, ["*"])) as stand_ins:
            return _Recorder(Trial(engine, schema, stand_ins), waived).record()
    finally:
        attributes.restore()


def units_of(names: Sequence[str]) -> list[list[int]]:
    """Tensors that are loaded together: those of one numbered layer, or of one top-level module."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        numbered = re.match(r"(.*?\.)?\d+(?=\.|$)", name)
        groups[numbered[0] if numbered else name.partition(".")[0]].append(index)
    return list(groups.values())


class _Doubtful(Exception):
    """A unit that seemed to be moved only is not: what its loader does with each tensor alone has to be known."""


class _Recorder:
    """The record as it grows.

    It goes over all units several times: between two trials of a tensor all others are loaded with other values, so
    that a loader which remembers some of them does not make the same twice.

    Each load goes through the whole model in many engines, and a model has far more tensors than units. So tensors are
    loaded alone only where something hangs on it: in units whose tensors are not all just moved when they are loaded
    together. If that turns out late, all is begun anew, with every tensor alone first.
    """

    def __init__(self, trial: Trial, waived: Collection[int]) -> None:
        self._trial = trial
        self._waived = waived
        self._specs = trial.schema.tensors
        self._alone: dict[int, Seen] = {}  # of tensors that were loaded alone
        self._eager = False  # whether all are
        self._moved: dict[int, set[int]] = {}  # what was written for tensors that seemed to be moved only
        self._aside: set[int] = set()
        self._steady: set[int] = set()  # what loads have written so far, and so have to write each time
        self._error: Exception | None = None
        self._verdicts: dict[int, Verdict] = {}
        self._homes: list[Home] = []
        self._constants: list[Constants] = []
        self._reloads: list[Reload] = []

    def record(self) -> Record:
        if not self._is_recorded():
            self._trial.stand_ins.stage()
            self._trial.stand_ins.reset(self._trial.memories)
            with self._reset(self._trial.memories):
                everything = self._discover(range(len(self._specs)), self._aside | self._steady, whole=True)
            if everything is None:
                raise SchemaError(
                    "expected a loader that takes the parts of this model, or all of it at once; it raises "
                    f"{describe(self._error)}"
                ) from self._error
            self._record([everything], whole=True)
        return Record(
            tuple(self._verdicts[tensor] for tensor in range(len(self._specs))),
            tuple(self._homes),
            tuple(self._constants),
            tuple(self._reloads),
            tuple(self._trial.names),
        )

    def _is_recorded(self) -> bool:
        """Record units; False if some can only be loaded as parts of the whole model."""
        try:
            units = self._units()
            return units is not None and self._record(units)
        except _Doubtful:
            self._eager = True
            self._trial.stand_ins.stage()
            self._trial.stand_ins.reset(self._trial.memories)
            return self._is_recorded()

    # ------------------------------------------------------------------ units

    def _units(self) -> list[Unit] | None:
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
        self._aside, read = self._beside(merged)
        related = [unit for unit in merged if read & unit.touched]
        merged = [unit for unit in merged if unit not in related]
        merged += [self._merge(related, self._aside)] if related else []
        for index, unit in enumerate(merged):
            if not unit.tried:
                with self._reset(unit.touched):
                    again = self._discover(unit.members, unit.touched)
                if again is None:
                    return None
                merged[index] = again
        return merged

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

    @contextmanager
    def _reset(self, memories: Iterable[int]) -> Iterator[None]:
        """Stand-ins are let go afterwards."""
        try:
            yield
        finally:
            self._trial.stand_ins.reset(memories)

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
            seen = self._trial.load(tensors, self._random(seed), settle=settle, look=look)
            if not self._trial.stand_ins.keep(seen.read - seen.written):
                break
        return seen

    def _discover(self, members: Sequence[int], touched: Set[int] = frozenset(), *, whole: bool = False) -> Unit | None:
        """A unit of those tensors that can be loaded together; None if they cannot, without others."""
        unit = None
        if not (whole or self._eager or any(self._is_special(tensor) for tensor in members)):
            unit = self._together(members, touched)
            if unit is not None:
                self._moved |= dict.fromkeys(unit.tensors, unit.steady)
                if self._is_plain(unit):
                    return unit
            self._trial.stand_ins.reset(self._trial.scratched(()))
        for tensor in members:
            if tensor not in self._alone:
                self._alone[tensor] = self._scout(tensor)
        return unit if unit is not None and self._has_learned(unit) else self._together(members, touched, whole=whole)

    def _has_learned(self, unit: Unit) -> bool:
        """Add what loads of each tensor alone did to a unit; False if they wrote other memory than is known of it."""
        seen = self._trial.rebound()
        for tensor in unit.tensors:
            seen.add(self._alone[tensor])
        unit.together.read |= seen.read
        unit.together.rebound += seen.rebound
        return seen.written <= unit.steady

    def _is_special(self, tensor: int) -> bool:
        """Whether a tensor was loaded alone, or has to be: to see under which of its names it is taken."""
        return tensor in self._alone or len(self._trial.names[tensor]) > 1

    def _is_plain(self, unit: Unit) -> bool:
        """Whether the loader only moves a unit's elements, all of them to some place; what was found is kept."""
        if unit.together.values_read:
            return False
        unit.findings = self._probe(unit)
        homes = {home.tensor for finding in unit.findings for home in finding.homes}
        return homes.issuperset(unit.tensors) and not self._doubts(unit, unit.findings)

    def _together(self, members: Sequence[int], touched: Set[int], *, whole: bool = False) -> Unit | None:
        """See `_discover`; what is known of tensors alone counts."""
        tensors = list(members)
        alone = [self._alone[tensor] for tensor in members if tensor in self._alone]
        before = self._trial.rebound()
        steady = before.written.union(*(self._moved.get(tensor, set()) for tensor in members))
        known = steady.union(touched, *(seen.written for seen in alone))
        for _ in range(8):
            seen = self._load(tensors, 2, settle=known)
            if seen.error is not None:
                self._error = seen.error
                may_go = tensors if whole else self._waived
                accepted = [
                    t for t in tensors if t not in self._alone or self._alone[t].error is None or t not in may_go
                ]
                if len(accepted) == len(tensors):
                    return None
                tensors = accepted
                continue
            steady |= seen.written
            found = known | seen.written
            found |= self._trial.scratched(found)
            if found == known:
                alone = [self._alone[tensor] for tensor in tensors if tensor in self._alone]
                seen.rebound += before.rebound
                steady = steady.union(*(one.written for one in alone))
                steady |= self._steady if whole else set()
                self._steady |= steady
                seen.read |= set[int]().union(*(one.read for one in alone))
                return Unit(members, tensors, known, steady, seen)
            known = found
        raise SchemaError(f"loading {self._specs[members[0]].name} and its like writes to other memory each time")

    # ------------------------------------------------------------------ sweeps

    def _record(self, units: Sequence[Unit], *, whole: bool = False) -> bool:
        """Record units; False if tensors of one of them can only be loaded with those of another."""
        stand_ins = self._trial.stand_ins
        findings: list[list[Finding]] = []
        doubts: list[dict[int, str]] = []
        for unit in units:
            with self._reset(unit.touched):
                findings.append(self._probe(unit) if unit.findings is None else unit.findings)
                doubts.append(self._doubts(unit, findings[-1]))
                self._certify(unit, findings[-1], doubts[-1], 0)
        touched = set[int]().union(*(unit.touched for unit in units))
        aside = self._settled(self._aside - touched)
        stand_ins.stage(touched)
        if self._settled(self._aside - touched) != aside:
            return False
        for unit, found, wrong in zip(units, findings, doubts, strict=True):
            with self._reset(unit.touched):
                self._certify(unit, found, wrong, 1)
        groups: list[list[Group]] = []
        for unit, found, wrong in zip(units, findings, doubts, strict=True):
            with self._reset(unit.touched):
                grouped = self._groups(unit, found, wrong, whole=whole)
            if grouped is None:
                return False
            groups.append(grouped)
        stand_ins.stage()
        if any(groups) and not self._again(units, groups, whole=whole):
            return False
        for unit, found, chosen in zip(units, findings, groups, strict=True):
            self._judge(unit, found, chosen, whole=whole)
        return True

    def _settled(self, memories: Set[int]) -> dict[int, bytes]:
        """What post-load steps make of memories that no tensor is loaded into."""
        with self._reset(memories):
            self._trial.settle(self._trial.modules_of(memories))
            return {index: self._trial.stand_ins.scratch(index).tobytes() for index in memories}

    def _certify(self, unit: Unit, findings: Sequence[Finding], doubts: dict[int, str], number: int) -> None:
        for memory in certify(self._trial, unit.tensors, findings, number) if unit.tensors else ():
            doubts.setdefault(memory, "random bits do not land where numbered elements did")
        if doubts and not all(tensor in self._alone for tensor in unit.tensors):
            raise _Doubtful

    def _again(self, units: Sequence[Unit], groups: Sequence[Sequence[Group]], *, whole: bool) -> bool:
        """Try all groups again, once every tensor was loaded with other values; False if one makes something else."""
        for unit in units:
            with self._reset(unit.touched):
                self._trial.load(unit.tensors, self._random(9), settle=unit.touched)
        for unit, chosen in zip(units, groups, strict=True):
            for group in chosen:
                with self._reset(unit.touched):
                    repeats = Repeats(self._trial, unit, {}).again(group)
                if not repeats:
                    self._require_partial(group.reload.tensors[0], group.reason, None, whole=whole)
                    return False
        return True

    def _probe(self, unit: Unit) -> list[Finding]:
        """Load numbers, digit by digit, and read them back."""
        if not unit.tensors:
            return []
        memories = sorted(unit.touched)
        stored = frozenset(self._trial.stand_ins.memories[index].dtype for index in memories)
        numbering = Numbering(tuple(self._specs[tensor] for tensor in unit.tensors), stored)
        place = {tensor: index for index, tensor in enumerate(unit.tensors)}
        pictures: list[dict[int, Octets]] = []
        for number in range(numbering.passes):
            self._trial.wipe(memories, number)
            seen = self._trial.load(
                unit.tensors,
                lambda t, n=number: numbering.tensor(place[t], n),  # type: ignore[misc]
                settle=memories,
            )
            unit.idle |= self._trial.idle(unit.steady, number, seen)
            pictures.append({index: self._trial.stand_ins.scratch(index).copy() for index in memories})
        stand_ins = self._trial.stand_ins.memories
        return [
            find(stand_ins[index], index, [picture[index] for picture in pictures], numbering, unit.tensors)
            for index in memories
        ]

    # ------------------------------------------------------------------ judging

    def _doubts(self, unit: Unit, findings: Sequence[Finding]) -> dict[int, str]:
        """Memories that cannot be updated element by element, and why."""
        doubts: dict[int, str] = {}
        rebound = set(unit.together.rebound)
        for finding in findings:
            path = self._path(finding.memory)
            given = [slot.path for slot in self._trial.stand_ins.memories[finding.memory].slots if slot.path in rebound]
            if given:
                doubts[finding.memory] = f"the loader gives {given[0]} new memory"
            elif finding.memory in unit.idle:
                doubts[finding.memory] = f"the loader does not write {path} each time"
            elif finding.foreign:
                doubts[finding.memory] = f"{finding.foreign} elements of {path} are made of values"
            elif finding.tangled:
                doubts[finding.memory] = f"{path}: {finding.tangled}"
        return doubts

    def _groups(
        self, unit: Unit, findings: Sequence[Finding], doubts: dict[int, str], *, whole: bool
    ) -> list[Group] | None:
        """The tensors that have to be loaded together; None if some can only be loaded with those of other units."""
        reasons = {
            tensor: f"the loader reads values ({', '.join(sorted(self._alone[tensor].values_read))})"
            for tensor in unit.tensors
            if tensor in self._alone and self._alone[tensor].values_read
        }
        if not doubts and not reasons:
            return []
        writers = self._writers(unit.tensors, findings)
        repeats, groups = Repeats(self._trial, unit, writers), list[Group]()
        for tensors, memories in closed(writers, doubts, reasons):
            if any(tensors <= set(group.reload.tensors) for group in groups):
                continue
            reason = next((doubts[m] for m in sorted(memories) if m in doubts), "") or next(
                reasons[t] for t in tensors if t in reasons
            )
            group = repeats.group(tensors, memories, reason)
            if group is None:
                self._require_partial(min(tensors), reason, repeats.error, whole=whole)
                return None
            groups = [other for other in groups if not set(other.reload.tensors) <= set(group.reload.tensors)]
            groups.append(group)
        return groups

    def _require_partial(self, tensor: int, reason: str, error: Exception | None, *, whole: bool) -> None:
        """A load of the whole model must make the same each time; one of a part may depend on others."""
        if whole and error is not None:
            raise SchemaError(f"{self._specs[tensor].name}: {reason}; loading it raises {describe(error)}") from error
        if whole:
            raise SchemaError(f"{self._specs[tensor].name}: {reason}, and not the same each time it is loaded")

    def _judge(self, unit: Unit, findings: Sequence[Finding], groups: Sequence[Group], *, whole: bool) -> None:
        """Give every tensor its verdict."""
        for tensor in set(unit.members) - set(unit.tensors):
            error = self._alone[tensor].error
            reason = f"the loader does not take it: {describe(error)}"
            self._verdicts[tensor] = Verdict(Kind.SKIP, reason, error and error.with_traceback(None))
        for group in groups:
            self._reloads.append(group.reload)
            for tensor in group.reload.tensors:
                self._verdicts[tensor] = Verdict(Kind.MODEL if whole else Kind.LAYER, group.reason)
        reloaded = {memory for group in groups for memory in group.reload.memories}
        self._constants += [
            Constants(finding.memory, finding.constants, finding.constant_bits)
            for finding in findings
            if len(finding.constants) and finding.memory not in reloaded
        ]
        self._homes += [h for finding in findings for h in finding.homes if h.tensor not in self._verdicts]
        for tensor in unit.tensors:
            self._verdicts.setdefault(tensor, self._verdict(tensor, findings))

    def _verdict(self, tensor: int, findings: Sequence[Finding]) -> Verdict:
        """The verdict on a tensor whose homes are certified."""
        homes = [home for finding in findings for home in finding.homes if home.tensor == tensor]
        casts = {cast for home in homes if (cast := self._cast(home))}
        if not homes and self._alone[tensor].written:
            return Verdict(Kind.SKIP, "what the loader writes for it is overwritten by another tensor's")
        if not homes:
            return Verdict(Kind.SKIP, "the loader takes it and puts no element of it anywhere")
        if casts:
            return Verdict(Kind.CAST, ", ".join(sorted(f"{cast.source} to {cast.target}" for cast in casts)))
        if len(homes) > TABLE_BOXES:
            return Verdict(Kind.TABLE, f"{len(homes)} boxes")
        return Verdict(Kind.BITS)

    def _writers(self, tensors: Sequence[int], findings: Sequence[Finding]) -> dict[int, set[int]]:
        """Which tensors write to each memory; all of them where it is not known."""
        writers: dict[int, set[int]] = {}
        for finding in findings:
            known = {home.tensor for home in finding.homes}
            known |= {tensor for tensor in tensors if finding.memory in self._alone[tensor].written}
            writers[finding.memory] = known or set(tensors)
        return writers

    def _cast(self, home: Home) -> Cast | None:
        return cast_of(self._specs[home.tensor], self._trial.stand_ins.memories[home.memory])

    def _path(self, memory: int) -> str:
        return self._trial.stand_ins.memories[memory].slots[0].path

    def _random(self, seed: int) -> Callable[[int], torch.Tensor]:
        return lambda tensor: random_tensor(self._specs[tensor], seed, tensor)


def _related(unit: Unit, other: Unit) -> bool:
    """True if two units write the same memory, or one reads what the other writes."""
    return bool(
        unit.touched & other.touched or unit.together.read & other.touched or other.together.read & unit.touched
    )
