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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from dcr.boxes import Box
from dcr.errors import LayoutError, SchemaError
from dcr.fit import HOLE, fit
from dcr.loaders.certify import Cast, Finding, Home, cast_of, certify
from dcr.loaders.engine import Engine, Memory, Octets, slots_of
from dcr.loaders.kinds import Constants, Kind, Record, Reload, Verdict
from dcr.loaders.probe import Numbering, blank, random_tensor
from dcr.loaders.standin import StandIns
from dcr.loaders.trial import Seen, Trial
from dcr.schema import Schema

__all__ = ["Constants", "Kind", "Record", "Reload", "Verdict", "record", "units_of"]

# A map of more boxes than this is a table, and has to hold so many elements a box.
TABLE_BOXES = 64
TABLE_ELEMS = 16


def record(engine: Engine, schema: Schema, *, waived: Collection[int] = ()) -> Record:
    """Try an engine's loader out on every tensor of a schema; live memory is not touched.

    waived: tensors that the loader need not take.

    Raises:
        SchemaError: the loader cannot be tried, or does not do the same thing twice.
    """
    with StandIns(slots_of(engine.module, ["*"])) as stand_ins:
        return _Recorder(Trial(engine, schema, stand_ins), waived).record()


def units_of(names: Sequence[str]) -> list[list[int]]:
    """Tensors that are loaded together: those of one numbered layer, or of one top-level module."""
    groups: dict[str, list[int]] = defaultdict(list)
    for index, name in enumerate(names):
        numbered = re.match(r"(.*?\.)?\d+(?=\.|$)", name)
        groups[numbered[0] if numbered else name.partition(".")[0]].append(index)
    return list(groups.values())


class _Recorder:
    """The record as it grows."""

    def __init__(self, trial: Trial, waived: Collection[int]) -> None:
        self._trial = trial
        self._waived = waived
        self._specs = trial.schema.tensors
        self._alone: dict[int, Seen] = {}
        self._known: dict[tuple[int, ...], tuple[list[int], set[int], Seen] | None] = {}
        self._verdicts: dict[int, Verdict] = {}
        self._homes: list[Home] = []
        self._constants: list[Constants] = []
        self._reloads: list[Reload] = []

    def record(self) -> Record:
        units = self._units()
        if units is None or not all(self._record(unit) for unit in units):
            self._verdicts.clear()
            self._homes.clear()
            self._constants.clear()
            self._reloads.clear()
            if not self._record(range(len(self._specs)), whole=True):
                raise SchemaError("the engine's loader can load neither the parts of this model nor all of it")
        return Record(
            tuple(self._verdicts[tensor] for tensor in range(len(self._specs))),
            tuple(self._homes),
            tuple(self._constants),
            tuple(self._reloads),
            tuple(self._trial.names),
        )

    # ------------------------------------------------------------------ a unit

    def _units(self) -> list[list[int]] | None:
        """Units of tensors that write to no memory in common; None if one of them cannot be loaded by itself."""
        merged: list[tuple[list[int], set[int]]] = []
        for unit in units_of([spec.name for spec in self._specs]):
            with self._reset():
                known = self._known[tuple(unit)] = self._discover(unit)
            if known is None:
                return None
            touched = known[1]
            for other in [other for other in merged if other[1] & touched]:
                merged.remove(other)
                unit, touched = other[0] + unit, other[1] | touched
            merged.append((unit, touched))
        return [sorted(unit) for unit, _ in merged]

    @contextmanager
    def _reset(self) -> Iterator[None]:
        """Stand-ins are let go afterwards."""
        try:
            yield
        finally:
            self._trial.stand_ins.reset(self._trial.memories)

    def _record(self, unit: Sequence[int], *, whole: bool = False) -> bool:
        """Record one unit; False if its tensors cannot be loaded together, and without others."""
        with self._reset():
            known = None if whole else self._known.get(tuple(unit))
            known = known or self._discover(unit, whole=whole)
            if known is None:
                return False
            tensors, touched, together = known
            for tensor in set(unit) - set(tensors):
                self._verdicts[tensor] = Verdict(
                    Kind.SKIP, f"the loader does not take it: {self._alone[tensor].error!r}"
                )
            findings = self._probe(tensors, sorted(touched)) if tensors else []
            doubts = self._doubts(findings, together)
            for memory in certify(self._trial, tensors, findings):
                doubts.setdefault(memory, "random bits do not land where numbered elements did")
            return self._judge(tensors, findings, doubts, whole=whole)

    def _scout(self, tensor: int) -> Seen:
        """Load one tensor alone, under each of its names."""
        seen, taken = Seen(), []
        for name in self._trial.names[tensor]:
            self._trial.names[tensor] = (name,)
            one = self._trial.load([tensor], self._random(1), look=False)
            if one.error is None:
                taken.append(name)
            seen.add(one)
        spec = self._specs[tensor]
        self._trial.names[tensor] = tuple(taken) or (spec.name, *spec.aliases)
        if taken:
            seen.error = None
        return seen

    def _discover(self, unit: Sequence[int], *, whole: bool = False) -> tuple[list[int], set[int], Seen] | None:
        """The tensors of a unit that can be loaded together, the memories that this writes, and what is seen of it."""
        tensors = list(unit)
        for tensor in tensors:
            if tensor not in self._alone:
                self._alone[tensor] = self._scout(tensor)
        before = self._trial.rebound()
        touched = before.written.union(*(self._alone[tensor].written for tensor in unit))
        for _ in range(8):
            seen = self._trial.load(tensors, self._random(2), settle=touched)
            if seen.error is not None:
                may_go = tensors if whole else self._waived
                accepted = [t for t in tensors if self._alone[t].error is None or t not in may_go]
                if len(accepted) == len(tensors):
                    return None
                tensors = accepted
                continue
            found = touched | seen.written
            found |= self._trial.scratched(found)
            if found == touched:
                seen.rebound += before.rebound
                return tensors, touched, seen
            touched = found
        raise SchemaError(f"loading {self._specs[unit[0]].name} and its like writes to other memory each time")

    def _probe(self, tensors: Sequence[int], memories: Sequence[int]) -> list[Finding]:
        """Load numbers, digit by digit, and read them back."""
        stored = frozenset(self._trial.stand_ins.memories[index].dtype for index in memories)
        numbering = Numbering(tuple(self._specs[tensor] for tensor in tensors), stored)
        place = {tensor: index for index, tensor in enumerate(tensors)}
        pictures: list[dict[int, Octets]] = []
        for number in range(numbering.passes):
            self._trial.wipe(memories, number)
            self._trial.load(tensors, lambda t, n=number: numbering.tensor(place[t], n), settle=memories)  # type: ignore[misc]
            pictures.append({index: self._trial.stand_ins.scratch(index).copy() for index in memories})
        return [self._find(index, [one[index] for one in pictures], numbering, tensors) for index in memories]

    def _find(self, index: int, pictures: Sequence[Octets], numbering: Numbering, tensors: Sequence[int]) -> Finding:
        """What one memory holds of the numbers."""
        memory = self._trial.stand_ins.memories[index]
        bits = [memory.bits(picture) for picture in pictures]
        numbers = numbering.read(bits, memory.dtype)
        if memory.dtype is not torch.bool and (numbers >= 0).all():  # the usual case: nothing else is in there
            homes, tangled = _fitted(numbers, memory, index, numbering, tensors)
            return Finding(index, homes, np.empty(0, np.int64), bits[0][:0], 0, tangled)
        filled = [memory.bits(np.full(memory.width, blank(memory, number), np.uint8))[0] for number in (0, 1)]
        untouched, same = bits[0] == filled[0], np.ones(len(bits[0]), bool)
        for number, one in enumerate(bits[1:], start=1):
            untouched &= one == filled[number % 2]
            same &= one == bits[0]
        mapped = (numbers >= 0) & ~untouched
        constant = same & ~mapped & ~untouched
        foreign = int(np.count_nonzero(~(mapped | untouched | constant)))
        numbers[~mapped] = HOLE
        homes, tangled = _fitted(numbers, memory, index, numbering, tensors)
        constants = np.flatnonzero(constant)
        return Finding(index, homes, constants, bits[0][constants], foreign, tangled)

    # ------------------------------------------------------------------ judging

    def _doubts(self, findings: Sequence[Finding], together: Seen) -> dict[int, str]:
        """Memories that cannot be updated element by element, and why."""
        doubts: dict[int, str] = {}
        for finding in findings:
            if finding.foreign:
                doubts[finding.memory] = (
                    f"{finding.foreign} elements of {self._path(finding.memory)} are made of values"
                )
            elif finding.tangled:
                doubts[finding.memory] = f"{self._path(finding.memory)}: {finding.tangled}"
        rebound = set(together.rebound)
        for finding in findings:
            for slot in self._trial.stand_ins.memories[finding.memory].slots:
                if slot.path in rebound:
                    doubts[finding.memory] = f"the loader gives {slot.path} new memory"
        return doubts

    def _judge(
        self, tensors: Sequence[int], findings: Sequence[Finding], doubts: dict[int, str], *, whole: bool
    ) -> bool:
        """Give every tensor its verdict; False if some can only be reloaded with tensors of other units."""
        writers = self._writers(tensors, findings)
        reasons = {
            tensor: f"the loader reads values ({', '.join(sorted(self._alone[tensor].values_read))})"
            for tensor in tensors
            if self._alone[tensor].values_read
        }
        for group, memories in _closed(writers, doubts, reasons):
            reason = next((doubts[m] for m in memories if m in doubts), "") or next(
                reasons[t] for t in group if t in reasons
            )
            reload = self._reload(group, tensors, memories, [finding.memory for finding in findings])
            if reload is None:
                if whole:
                    raise SchemaError(
                        f"{self._specs[min(group)].name}: {reason}, and not the same each time it is loaded"
                    )
                return False
            self._reloads.append(reload)
            for tensor in reload.tensors:
                self._verdicts[tensor] = Verdict(Kind.MODEL if whole else Kind.LAYER, reason)
        reloaded = {memory for reload in self._reloads for memory in reload.memories}
        self._constants += [
            Constants(finding.memory, finding.constants, finding.constant_bits)
            for finding in findings
            if len(finding.constants) and finding.memory not in reloaded
        ]
        self._homes += [h for finding in findings for h in finding.homes if h.tensor not in self._verdicts]
        for tensor in tensors:
            self._verdicts.setdefault(tensor, self._verdict(tensor, findings))
        return True

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

    def _reload(
        self, group: set[int], unit: Sequence[int], memories: set[int], touched: Sequence[int]
    ) -> Reload | None:
        """The fewest tensors whose load gives the same bytes whatever was there before; None if there are none."""
        candidates = [[tensor for tensor in unit if tensor in group]]
        if len(group) < len(unit):
            candidates.append(list(unit))
        for tensors in candidates:
            if self._repeats(tensors, sorted(memories), touched):
                return Reload(tuple(tensors), tuple(sorted(memories)), tuple(sorted(touched)))
        return None

    def _repeats(self, tensors: Sequence[int], memories: Sequence[int], touched: Sequence[int]) -> bool:
        """True if a load makes the same of some memories over two prefills that differ in every bit."""
        results: list[list[Octets]] = []
        for seed in (0, 1):
            self._trial.wipe(memories, seed)
            if self._trial.load(tensors, self._random(3), settle=touched).error is not None:
                return False
            results.append([self._trial.stand_ins.scratch(index).copy() for index in memories])
        for index, one, other in zip(memories, *results, strict=True):
            memory = self._trial.stand_ins.memories[index]
            kept = (one == blank(memory, 0)) & (other == blank(memory, 1))
            if not ((one == other) | kept).all():
                return False
        return True

    def _cast(self, home: Home) -> Cast | None:
        return cast_of(self._specs[home.tensor], self._trial.stand_ins.memories[home.memory])

    def _path(self, memory: int) -> str:
        return self._trial.stand_ins.memories[memory].slots[0].path

    def _random(self, seed: int) -> Callable[[int], torch.Tensor]:
        return lambda tensor: random_tensor(self._specs[tensor], seed, tensor)


def _fitted(
    numbers: NDArray[np.int64], memory: Memory, index: int, numbering: Numbering, tensors: Sequence[int]
) -> tuple[tuple[Home, ...], str]:
    """The homes in one memory, and what is wrong if they are too many; numbers [elements of the memory] or HOLE."""
    shape = memory.slots[0].tensor.shape
    most = max(TABLE_BOXES, len(numbers) // TABLE_ELEMS)
    try:
        boxes = fit(numbers, shape, starts=numbering.firsts[:-1], most=most)
    except LayoutError as error:
        return (), str(error)
    homes = [Home(tensors[which], index, part.inverted()) for which, box in boxes for part in _injective(box)]
    return tuple(homes), ""


def _injective(box: Box) -> Iterator[Box]:
    """A box from canonical elements, cut until none of them is in it twice: each copy is a home of its own."""
    span = 0
    for d, dim in sorted(enumerate(box.dims), key=lambda pair: abs(pair[1].here)):
        if (dim.n > 1 and abs(dim.here) <= span) or dim.here == 0:
            rest = box.dims[:d] + box.dims[d + 1 :]
            for i in range(dim.n):
                yield from _injective(Box(box.here0 + i * dim.here, box.there0 + i * dim.there, rest))
            return
        span += (dim.n - 1) * abs(dim.here)
    yield box


def _closed(
    writers: dict[int, set[int]], memories: Iterable[int], tensors: Iterable[int]
) -> list[tuple[set[int], set[int]]]:
    """Groups of tensors and memories that hang together, of those that a doubtful memory or tensor is in."""
    groups: list[tuple[set[int], set[int]]] = []
    waiting = [(set(writers[memory]), {memory}) for memory in memories] + [({tensor}, set[int]()) for tensor in tensors]
    for group, held in waiting:
        if any(group & other for other, _ in groups):
            continue
        grown = -1
        while grown != len(group) + len(held):
            grown = len(group) + len(held)
            held |= {memory for memory, those in writers.items() if those & group}
            group = group.union(*(writers[memory] for memory in held))
        groups.append((group, held))
    return groups
