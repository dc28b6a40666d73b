"""Modules whose parameters are DTensors (FSDP2, tensor parallel, both): each rank publishes what it holds.

Which global rows, columns, ... a rank holds is asked of torch, one dimension at a time: an index vector is distributed
as that dimension of the parameter is. The certificate then gathers random bits through the parameter's own
`full_tensor`, once per distinct layout, and every byte must be where the map says.

    N  elements of a parameter      d  its dimensions
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dcr.errors import SchemaError
from dcr.kernels import reference
from dcr.layout.boxes import Box, Dim, row_major, whole
from dcr.layout.fit import fit
from dcr.layout.schema import TensorSpec, patterns
from dcr.layout.views import Bits
from dcr.probing.bits import bits_of, random_bits, tensor_of, wrong_bytes
from dcr.probing.state import require_named
from dcr.probing.tensors import Tied, named, require_module, require_plain, require_unflattened
from dcr.seams import Residual
from dcr.sources.casts import Dtypes, canonical_dtype, kind, named_dtypes
from dcr.sources.mapped import MappedSource, Piece, demoted, shared, stored, united
from dcr.sources.ranks import Peers
from dcr.sources.residual import ResidualGroup
from dcr.sources.waivers import require_waivable

SEEDS = (1, 2)
CARRIERS = {1: "uint8", 2: "float16", 4: "int32", 8: "int64"}


@dataclass(frozen=True, slots=True, eq=False)
class _Owner:
    """A tensor of the module under all its names, and this rank's part of it."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    is_parameter: bool

    @property
    def local(self) -> Tied:
        """This rank's part as it lies now."""
        with torch.no_grad():  # else a part would be a node of a graph, and slow to get
            part = self.tensor.to_local() if isinstance(self.tensor, DTensor) else self.tensor
        plain = part.detach()
        require_plain(self.names[0], plain)
        return Tied(self.names, plain, self.is_parameter)

    @property
    def layout(self) -> object:
        """What decides where its elements lie; equal for layers that are alike."""
        tensor = self.tensor
        mesh = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
        return mesh, tuple(tensor.shape), tensor.dtype


def source(
    module: torch.nn.Module,
    *,
    dtype: Dtypes = None,
    group: dist.ProcessGroup | None = None,
    waive: Sequence[str] = (),
) -> MappedSource:
    """A module of DTensors and of plain tensors, which every rank holds alike. Collective over the group's ranks.

    dtype: as for `dcr.sources.module.ModuleSource`: fp32 masters of a bf16 checkpoint are rounded before they are
    compared. waive: as there. group: all ranks of the trainer; None means the default group. Parameters must be in
    their sharded state, as they are after an optimizer step.

    Raises:
        SchemaError: a tensor cannot be published, or ranks differ in what they have.
        LayoutError: over all ranks an element is held by nobody.
    """
    require_module(module)
    require_unflattened(module)
    waive = patterns(waive)
    peers = Peers(group)
    require_waivable(((name, id(tensor)) for name, tensor, _ in named(module)), waive, module, peers)
    require_named(module, waive)
    parts = _parts(module, dtype, waive)
    schema = united([part.spec for part in parts], peers)
    number = {spec.name: index for index, spec in enumerate(schema.tensors)}
    failed = demoted(_certify(parts), peers)
    by_name = {part.spec.name: (index, part) for index, part in enumerate(parts)}
    pieces = [
        Piece(number[name], local, found, part.kind)
        for name, (local, part) in by_name.items()
        if name not in failed
        for box in part.boxes
        for found in stored(part.lies, box)
    ]
    return MappedSource(
        schema,
        shared(pieces, schema, peers),
        [part.owner.local for part in parts],
        lambda: ((name, part_of(tensor)) for name, tensor, _ in named(module, waive)),
        residual=[
            _gathered(module, number[name], by_name[name][1].kind if name in by_name else None, name, failed, peers)
            for name in sorted(failed)
        ],
        peers=peers,
    )


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, as `to_local` gives it without a graph, at the cost of an attribute."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, slots=True, eq=False)
class _ShardedTensor:
    """A canonical tensor; boxes take the row-major elements of this rank's part, which lie as `lies` says, to it."""

    spec: TensorSpec
    owner: _Owner
    kind: int
    lies: Box
    boxes: Sequence[Box]


def _parts(module: torch.nn.Module, dtype: Dtypes, waive: Sequence[str]) -> list[_ShardedTensor]:
    owners = _owners(module, waive)
    asked = named_dtypes(dtype, [owner.names for owner in owners])
    known: dict[object, list[Box]] = {}
    parts = []
    for owner in owners:
        local, layout = owner.local, owner.layout
        if layout not in known:
            known[layout] = _boxes(owner.tensor)
        want = canonical_dtype(local.name, local.dtype, owner.is_parameter, asked)
        spec = TensorSpec(local.name, want, tuple(owner.tensor.shape), owner.names[1:])
        parts.append(_ShardedTensor(spec, owner, kind(local.name, local.dtype, want), local.own_box(), known[layout]))
    return parts


def _owners(module: torch.nn.Module, waive: Sequence[str]) -> list[_Owner]:
    """All tensors in the order of their owners' names; one and the same object under several names is tied."""
    groups: dict[int, tuple[list[str], torch.Tensor, bool]] = {}
    for name, tensor, is_parameter in named(module, waive):
        groups.setdefault(id(tensor), ([], tensor, is_parameter))[0].append(name)
    if not groups:
        raise SchemaError(f"{type(module).__name__} has neither parameters nor persistent buffers")
    return [_Owner(tuple(names), tensor, is_parameter) for names, tensor, is_parameter in groups.values()]


def _boxes(tensor: torch.Tensor) -> list[Box]:
    """From the row-major elements of this rank's part to those of the whole."""
    if not isinstance(tensor, DTensor):
        return [whole(tensor.shape, row_major(tensor.shape))]
    lines = [[box for _, box in fit(_line(tensor, d), (-1,))] if n else [] for d, n in enumerate(tensor.shape)]
    held, strides = row_major(tensor.to_local().shape), row_major(tensor.shape)
    return [
        Box(
            sum(box.there0 * stride for box, stride in zip(boxes, held, strict=True)),
            sum(box.here0 * stride for box, stride in zip(boxes, strides, strict=True)),
            tuple(
                Dim(dim.n, dim.there * here, dim.here * there)
                for box, here, there in zip(boxes, held, strides, strict=True)
                for dim in box.dims
            ),
        ).simplified()
        for boxes in product(*lines)
    ]


def _line(tensor: DTensor, d: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The global indices along dimension d that this rank holds, in its order."""
    placements = [along(placement, d) for placement in tensor.placements]
    indices = torch.arange(tensor.shape[d], device=tensor.device)
    return distribute_tensor(indices, tensor.device_mesh, placements, src_data_rank=None).to_local().cpu().numpy()


def along(placement: Placement, d: int) -> Placement:
    """Reduce a placement to what it does to one dimension."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(0, split_factor=placement.split_factor) if placement.dim == d else Replicate()
    if isinstance(placement, Shard) and placement.dim == d:
        return Shard(0)
    return Replicate()


def _certify(parts: Sequence[_ShardedTensor]) -> dict[str, str]:
    """The tensors of which a byte is not where the map says, and why they may not be used. Collective in their mesh."""
    seen: dict[object, int] = {}
    failed = {}
    for part in parts:
        tensor = part.owner.tensor
        if isinstance(tensor, DTensor):
            key = part.owner.layout
            if key not in seen:
                seen[key] = sum(_wrong(tensor, part.boxes, seed) for seed in SEEDS)
            if seen[key]:
                failed[part.spec.name] = f"{seen[key]} bytes of two gathers are not where {tensor.placements} puts them"
    return failed


def _wrong(tensor: DTensor, boxes: Sequence[Box], seed: int) -> int:
    """Bytes of this rank's part that a gather of random bits puts elsewhere; every rank has bits of its own.

    They are gathered in a dtype of the same width that every backend can gather: where a gather puts an element does
    not depend on what the element means.
    """
    part = tensor.to_local()
    carrier = CARRIERS[part.element_size()]
    bits = random_bits(part.numel(), carrier, (seed, dist.get_rank()))
    stand_in = tensor_of(bits, carrier, part.shape).to(part.device)
    gathered = DTensor.from_local(
        stand_in, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).full_tensor()
    return wrong_bytes(bits, bits_of(gathered), boxes)


def _gathered(
    module: torch.nn.Module, number: int, kind: int | None, name: str, reasons: Mapping[str, str], peers: Peers
) -> Residual:
    """A parameter that only its own gather makes canonical; kind: None where this rank lacks it. Collective."""
    owner = min(rank for rank, has in enumerate(peers.gather(bytes([kind is not None]))) if any(has))

    def now() -> torch.Tensor:
        return next(tensor.detach() for found, tensor, _ in named(module) if found == name)

    def inputs() -> Sequence[Bits]:
        return [] if kind is None else [bits_of(part_of(now()))]

    def export() -> Sequence[Bits | None] | None:
        if kind is None:
            return None
        bits = bits_of(cast(DTensor, now()).full_tensor())
        return [reference.cast(bits, kind) if kind else bits]

    return ResidualGroup((number,), reasons[name], peers.rank == owner, inputs, export)
