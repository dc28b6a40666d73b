"""Record: find out where an engine's own loader puts each checkpoint element, and prove it.

    N  elements of a unit of tensors

Structure proposes: the loader runs on stand-ins, a unit of tensors at a time, with sources whose values number their
elements; what arrives is fitted to boxes. Bits certify (`dcr.loaders.certify`): random patterns must land as the boxes
say, on every byte. What operators were seen to do gives the reasons. Memory: a unit is one layer of a model; it takes
about six times its size, while it is recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

from dcr.errors import SchemaError
from dcr.layout.schema import Schema
from dcr.loaders.attributes import Attributes
from dcr.loaders.certify import Cast, Finding, Home, cast_of, certify
from dcr.loaders.engine import Adapter, slots_of
from dcr.loaders.finding import TABLE_BOXES
from dcr.loaders.kinds import Constants, Kind, Record, Reload, Verdict
from dcr.loaders.repeats import Group, Repeats, Unit, closed
from dcr.loaders.standin import StandIns
from dcr.loaders.trial import Trial, describe
from dcr.loaders.units import Units, doubts_of, probe, random_of, reset_after

__all__ = ["Constants", "Kind", "Record", "Reload", "Verdict", "record"]


def record(engine: Adapter, schema: Schema, *, waived: Collection[int] = ()) -> Record:
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


class _Doubtful(Exception):
    """A unit that seemed to be moved only is not: what its loader does with each tensor alone has to be known."""


class _Recorder:
    """The record as it grows.

    It goes over all units several times: between two trials of a tensor all others are loaded with other values, so
    that a loader which remembers some of them does not make the same twice.

    If a unit that seemed to be moved only is not, all is begun anew, with every tensor alone first
    (`dcr.loaders.units`).
    """

    def __init__(self, trial: Trial, waived: Collection[int]) -> None:
        self._trial = trial
        self._specs = trial.schema.tensors
        self._units = Units(trial, waived)
        self._verdicts: dict[int, Verdict] = {}
        self._homes: list[Home] = []
        self._constants: list[Constants] = []
        self._reloads: list[Reload] = []

    def record(self) -> Record:
        if not self._is_recorded():
            self._trial.stand_ins.stage()
            self._trial.stand_ins.reset(self._trial.memories)
            everything = self._units.whole()
            if everything is None:
                raise SchemaError(
                    "expected a loader that takes the parts of this model, or all of it at once; it raises "
                    f"{describe(self._units.error)}"
                ) from self._units.error
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
            units = self._units.parts()
            return units is not None and self._record(units)
        except _Doubtful:
            self._units.eager = True
            self._trial.stand_ins.stage()
            self._trial.stand_ins.reset(self._trial.memories)
            return self._is_recorded()

    # ------------------------------------------------------------------ sweeps

    def _record(self, units: Sequence[Unit], *, whole: bool = False) -> bool:
        """Record units; False if tensors of one of them can only be loaded with those of another."""
        stand_ins = self._trial.stand_ins
        findings: list[list[Finding]] = []
        doubts: list[dict[int, str]] = []
        for unit in units:
            with reset_after(self._trial, unit.touched):
                findings.append(probe(self._trial, unit) if unit.findings is None else unit.findings)
                doubts.append(doubts_of(self._trial, unit, findings[-1]))
                self._certify(unit, findings[-1], doubts[-1], 0)
        touched = set[int]().union(*(unit.touched for unit in units))
        aside = self._settled(self._units.aside - touched)
        stand_ins.stage(touched)
        if self._settled(self._units.aside - touched) != aside:
            return False
        for unit, found, wrong in zip(units, findings, doubts, strict=True):
            with reset_after(self._trial, unit.touched):
                self._certify(unit, found, wrong, 1)
        groups: list[list[Group]] = []
        for unit, found, wrong in zip(units, findings, doubts, strict=True):
            with reset_after(self._trial, unit.touched):
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
        with reset_after(self._trial, memories):
            self._trial.settle(self._trial.modules_of(memories))
            return {index: self._trial.stand_ins.scratch(index).tobytes() for index in memories}

    def _certify(self, unit: Unit, findings: Sequence[Finding], doubts: dict[int, str], number: int) -> None:
        for memory in certify(self._trial, unit.tensors, findings, number) if unit.tensors else ():
            doubts.setdefault(memory, "random bits do not land where numbered elements did")
        if doubts and not all(tensor in self._units.alone for tensor in unit.tensors):
            raise _Doubtful

    def _again(self, units: Sequence[Unit], groups: Sequence[Sequence[Group]], *, whole: bool) -> bool:
        """Try all groups again, once every tensor was loaded with other values; False if one makes something else."""
        for unit in units:
            with reset_after(self._trial, unit.touched):
                self._trial.load(unit.tensors, random_of(self._specs, 9), settle=unit.touched)
        for unit, chosen in zip(units, groups, strict=True):
            for group in chosen:
                with reset_after(self._trial, unit.touched):
                    repeats = Repeats(self._trial, unit, {}).again(group)
                if not repeats:
                    self._require_partial(group.reload.tensors[0], group.reason, None, whole=whole)
                    return False
        return True

    # ------------------------------------------------------------------ judging

    def _groups(
        self, unit: Unit, findings: Sequence[Finding], doubts: dict[int, str], *, whole: bool
    ) -> list[Group] | None:
        """The tensors that have to be loaded together; None if some can only be loaded with those of other units."""
        reasons = {
            tensor: f"the loader reads values ({', '.join(sorted(self._units.alone[tensor].values_read))})"
            for tensor in unit.tensors
            if tensor in self._units.alone and self._units.alone[tensor].values_read
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
            error = self._units.alone[tensor].error
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
        if not homes and self._units.alone[tensor].written:
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
            known |= {tensor for tensor in tensors if finding.memory in self._units.alone[tensor].written}
            writers[finding.memory] = known or set(tensors)
        return writers

    def _cast(self, home: Home) -> Cast | None:
        return cast_of(self._specs[home.tensor], self._trial.stand_ins.memories[home.memory])
