"""What an exporter does to one group: the boxes that its digits show or a user declares, and the proof by random bits.

N  elements of a canonical tensor
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dcr.errors import LayoutError, SchemaError
from dcr.kernels import reference
from dcr.layout.boxes import Box
from dcr.layout.fit import fit
from dcr.layout.schema import DTYPES, TensorSpec
from dcr.layout.views import Bits
from dcr.probing.bits import bits_of, dtype_of, wrong_bytes
from dcr.probing.standins import Numbers, StandIns
from dcr.probing.tensors import Tied
from dcr.sources.casts import CASTS

# A canonical tensor's name to its parts: a local tensor, and a box from its row-major elements to canonical ones.
Maps = Mapping[str, Sequence[tuple[str, Box]]]

SEEDS = (1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """One exported tensor: the boxes to it from row-major elements of its group's tensors, or why there are none."""

    spec: TensorSpec
    part: StandIns
    boxes: Sequence[tuple[int, Box]]
    reason: str = ""


def certified(part: StandIns, maps: Maps | None = None) -> list[Exported]:
    """Every tensor that a group exports, with its boxes, from the digits or as declared, or why it has none.

    Raises:
        SchemaError: the exporter fails, or does not always give the same tensors.
    """
    with torch.no_grad():
        return _certified(part, _probed(part) if maps is None else _declared(part, maps))


def _probed(part: StandIns) -> Iterator[Exported]:
    """What the digits show."""
    specs: dict[str, TensorSpec] = {}
    numbers: dict[str, Numbers] = {}
    for place, tensors in enumerate(part.digits()):
        for name, tensor in part.run(tensors):
            if place == 0:
                specs[name], numbers[name] = _spec(name, tensor), Numbers(np.zeros(tensor.numel(), np.int64))
            numbers[name].add(tensor, part.base, place)
    for name, spec in specs.items():
        boxes, reason = _fitted(numbers.pop(name), spec, part)
        yield Exported(spec, part, boxes, reason)


def _fitted(numbers: Numbers, spec: TensorSpec, part: StandIns) -> tuple[list[tuple[int, Box]], str]:
    """Boxes to an exported tensor from the tensors of its group on this rank, or why there are none."""
    if not numbers.sound or numbers.index.max(initial=0) > part.total:
        return [], "its values are not values of the weights: the export does arithmetic"
    if not numbers.index.all():
        return [], "some of its elements are constants"
    try:
        return fit(numbers.within(part.first, part.starts[-1]), spec.shape, starts=part.starts[:-1]), ""
    except LayoutError as error:
        return [], str(error)


def _declared(part: StandIns, maps: Maps) -> Iterator[Exported]:
    """What maps say of the tensors that a group exports."""
    index = {name: position for position, one in enumerate(part.tensors) for name in one.names}
    for name, tensor in part.run(part.random(0)[1]):
        boxes = [(index[local], box) for local, box in maps.get(name, ()) if local in index]
        yield Exported(_spec(name, tensor), part, boxes, "" if name in maps else "no map was declared for it")


def _certified(part: StandIns, found: Iterable[Exported]) -> list[Exported]:
    """The same; where a byte of an export of random bits is not what the boxes say, with the reason and no boxes."""
    by_name = {one.spec.name: one for one in found}
    wrong = dict.fromkeys(by_name, 0)
    for seed in SEEDS:
        memory, tensors = part.random(seed)
        exported = set()
        for name, tensor in part.run(tensors):
            exported.add(name)
            if name in by_name and not by_name[name].reason:
                wrong[name] += _wrong(by_name[name], memory, tensor)
        if differ := exported ^ by_name.keys():
            raise SchemaError(f"the exporter does not always give the same tensors: {', '.join(sorted(differ)[:5])}")
    return [
        replace(one, boxes=(), reason=f"{wrong[name]} bytes of two exports of random bits are not what its map says")
        if wrong[name]
        else one
        for name, one in by_name.items()
    ]


def _wrong(one: Exported, memory: Sequence[Bits], tensor: torch.Tensor) -> int:
    """Bytes of an exported tensor that differ from what the boxes make of the stand-ins' memory."""
    canonical = bits_of(tensor)
    if _spec(one.spec.name, tensor) != one.spec:
        return canonical.nbytes
    by_local: dict[int, list[Box]] = defaultdict(list)
    for local, box in one.boxes:
        by_local[local].append(box)
    wrong = 0
    for local, boxes in by_local.items():
        cast = cast_of(one.part.tensors[local], one.spec)
        try:
            wrong += canonical.nbytes if cast is None else wrong_bytes(memory[local], canonical, boxes, cast)
        except LayoutError:  # a declared box that leaves its tensor
            return canonical.nbytes
    return wrong


def cast_of(local: Tied, spec: TensorSpec) -> int | None:
    """The value map from a local tensor to a canonical one; None if there is none."""
    return reference.NONE if local.dtype == spec.dtype else CASTS.get((local.dtype, spec.dtype))


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    if dtype_of(tensor) not in DTYPES:
        raise SchemaError(f"{name} is exported as {tensor.dtype}, which cannot be published")
    return TensorSpec(name, dtype_of(tensor), tuple(tensor.shape))
