"""Flat partitions (DeepSpeed ZeRO-3), and replicas that only need owners (ZeRO-1, ZeRO-2, plain data parallel).

ZeRO-3 lays a parameter out row-major, pads it to a multiple of the ranks and gives each rank one equal span. Canonical
tensors are row-major too, so a partition is one interval of one; the padding at the end is memory that nobody wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dcr.errors import SchemaError
from dcr.layout.boxes import Box, Dim
from dcr.layout.schema import TensorSpec, patterns, waived
from dcr.probing.state import require_named
from dcr.probing.tensors import Tied, named, require_plain, require_tensors, require_unflattened
from dcr.sources.casts import Dtypes, canonical_dtype, kind, named_dtypes
from dcr.sources.mapped import MappedSource, Piece, shared, stored, united
from dcr.sources.ranks import Peers
from dcr.sources.waivers import require_waivable


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """The index-th of equal spans of a flattened parameter of some shape: `tensor`, one-dimensional."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    index: int

    def box(self) -> Box:
        """From the partition's elements to the parameter's, without the padding."""
        size = self.tensor.numel()
        start = self.index * size
        held = max(0, min(size, math.prod(self.shape) - start))
        return Box(0, start if held else 0, (Dim(held, 1, 1),))


def source(
    weights: torch.nn.Module | Mapping[str, Partition | torch.Tensor],
    *,
    dtype: Dtypes = None,
    group: dist.ProcessGroup | None = None,
    waive: Sequence[str] = (),
) -> MappedSource:
    """Partitions, and whole tensors that all ranks hold alike. Collective over the group's ranks.

    weights: a module, of which parameters that DeepSpeed partitioned (`ds_tensor`, `ds_shape`, `ds_process_group`) are
    taken as partitions and all others as whole; or both by name. dtype, waive: as for
    `dcr.sources.module.ModuleSource`. group: all ranks of the trainer; None means the default group.

    Raises:
        SchemaError: a tensor cannot be published, or ranks differ in what they have.
        LayoutError: over all ranks an element is held by nobody: a partition is missing, or of another size.
    """
    waive = patterns(waive)
    if isinstance(weights, torch.nn.Module):
        require_unflattened(weights)
    else:
        require_tensors(weights, waive, kinds=(torch.Tensor, Partition))
    peers = Peers(group)
    module = weights if isinstance(weights, torch.nn.Module) else None
    require_waivable(((name, key) for name, key, _, _ in _entries(weights, ())), waive, module, peers)
    if module is not None:
        require_named(module, waive)
    held = _held(weights, waive)
    asked = named_dtypes(dtype, [one.local.names for one in held])
    wanted = [canonical_dtype(one.local.name, one.local.dtype, one.local.is_parameter, asked) for one in held]
    specs = [
        TensorSpec(one.local.name, want, one.shape, one.local.names[1:]) for one, want in zip(held, wanted, strict=True)
    ]
    schema = united(specs, peers)
    number = {spec.name: index for index, spec in enumerate(schema.tensors)}
    pieces = [
        Piece(number[one.local.name], local, box, kind(one.local.name, one.local.dtype, want))
        for local, (one, want) in enumerate(zip(held, wanted, strict=True))
        for box in stored(one.local.own_box(), one.box)
    ]
    return MappedSource(
        schema,
        shared(pieces, schema, peers),
        [one.local for one in held],
        lambda: (
            (name, one.tensor if isinstance(one, Partition) else one) for name, _, one, _ in _entries(weights, waive)
        ),
        peers=peers,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A parameter's local tensor under all its names, its whole shape, and the box from the one to the other."""

    local: Tied
    shape: tuple[int, ...]
    box: Box


def _held(weights: torch.nn.Module | Mapping[str, Partition | torch.Tensor], waive: Sequence[str]) -> list[_Held]:
    groups: dict[int, tuple[list[str], Partition | torch.Tensor, bool]] = {}
    for name, key, one, is_parameter in _entries(weights, waive):
        groups.setdefault(key, ([], one, is_parameter))[0].append(name)
    if not groups:
        raise SchemaError("there is nothing to publish: neither parameters nor persistent buffers")
    found = []
    for names, one, is_parameter in groups.values():
        tensor = (one.tensor if isinstance(one, Partition) else one).detach()
        require_plain(names[0], tensor)
        shape = one.shape if isinstance(one, Partition) else tuple(one.shape)
        box = one.box() if isinstance(one, Partition) else Box(0, 0, (Dim(tensor.numel(), 1, 1),))
        found.append(_Held(Tied(tuple(names), tensor, is_parameter), shape, box))
    return found


def _entries(
    weights: torch.nn.Module | Mapping[str, Partition | torch.Tensor], waive: Sequence[str]
) -> Iterator[tuple[str, int, Partition | torch.Tensor, bool]]:
    """(name, identity, partition or whole tensor, whether it is a parameter)."""
    if not isinstance(weights, torch.nn.Module):
        yield from ((name, id(one), one, True) for name, one in weights.items() if not waived(name, waive))
        return
    for name, tensor, is_parameter in named(weights, waive):
        part = getattr(tensor, "ds_tensor", None)
        if part is None:
            yield name, id(tensor), tensor, is_parameter
        else:
            index = dist.get_rank(getattr(tensor, "ds_process_group", None))
            yield name, id(tensor), Partition(part, tuple(_shape(tensor)), index), is_parameter


def _shape(parameter: torch.Tensor) -> Sequence[int]:
    shape: Sequence[int] = parameter.ds_shape  # type: ignore[attr-defined]
    return shape
