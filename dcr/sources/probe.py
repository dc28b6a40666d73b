"""Any exporter as a source: run it over numbered stand-ins, and read off where each canonical element comes from.

An exporter is a function from some of a rank's tensors to canonical ones. It is run group by group on stand-ins, never
on the weights: a few times on tensors whose values count the group's elements in digits that their dtype holds exactly
(which gives an index map, and `dcr.layout.fit` its boxes), then twice on random bits. A canonical tensor has a map only
if both times each of its bytes was where the boxes said. The rest is exported anew whenever its inputs change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dcr.errors import SchemaError
from dcr.layout import coverage
from dcr.layout.boxes import Box, Dim
from dcr.layout.schema import Schema, patterns, waived
from dcr.layout.views import Bits
from dcr.probing.bits import bits_of
from dcr.probing.standins import BASE, Dress, Export, StandIns, base_of
from dcr.probing.state import require_exportable, require_silent
from dcr.probing.tensors import Tied, named, require_tensors, require_unflattened, tied
from dcr.sources.casts import kind
from dcr.sources.certificate import Exported, Maps, certified
from dcr.sources.dtensor import part_of
from dcr.sources.mapped import MappedSource, Piece, Shares, covered, demoted, shared, stored, united
from dcr.sources.ranks import Peers
from dcr.sources.residual import ResidualGroup
from dcr.sources.waivers import require_waivable

GROUP_ELEMS = BASE**2 - 1  # two digits are enough


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """A master copy of some elements of a tensor: `tensor`, one-dimensional, holds those from `start` on, row-major."""

    start: int
    tensor: torch.Tensor

    def box(self) -> Box:
        """From its own memory to the elements of which it is a copy."""
        stride = self.tensor.stride(0)
        return Box(0, self.start, (Dim(self.tensor.numel(), stride, 1),))


def source(
    weights: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    export: Export,
    groups: Sequence[Sequence[str]] | None = None,
    maps: Maps | None = None,
    masters: Mapping[str, Span] | None = None,
    group: dist.ProcessGroup | None = None,
    waive: Sequence[str] = (),
) -> MappedSource:
    """The source that an exporter defines. Collective over the process group's ranks.

    weights: this rank's tensors, as a module or by name; where they are DTensors an exporter is given DTensors.
    export: may be called on any one group; it may use collectives, and then has to yield a canonical tensor on every
    rank that holds a part of it. groups: names of tensors that are exported together, alike on all ranks (a rank may
    lack some of them); None for an exporter that takes each tensor by itself and without collectives. maps: declared
    maps, taken instead of what digits would show, and certified alike. masters: spans of higher precision that some
    ranks hold of some of the tensors; they are published, rounded, in these tensors' place. waive: patterns of names in
    `weights` that the exporter is not given; also of what else a module's checkpoint holds.

    Raises:
        SchemaError: the exporter fails on a group, exports a name twice, or ranks disagree; a module's checkpoint holds
            more than tensors, or a waived pattern does not fit; names it.
    """
    waive, module = patterns(waive), weights if isinstance(weights, torch.nn.Module) else None
    if module is not None:
        require_unflattened(module)
    else:
        require_tensors(weights, waive)
    peers = Peers(group)
    require_waivable(((name, id(tensor)) for name, tensor, _ in _named(weights)), waive, module, peers)
    silent = require_exportable(module, waive) if module is not None else []
    local = _tensors(weights, waive)
    parts = list(_stand_ins(_grouped(local, groups), export, _dress(weights), peers))

    def present() -> Iterator[tuple[str, torch.Tensor]]:
        require_silent(silent)
        return _present(weights, waive)

    found = _by_name(one for part in parts for one in certified(part, maps))
    schema = united([one.spec for one in found.values()], peers)
    _require_known(maps or (), schema)
    failed = demoted({name: one.reason for name, one in found.items() if one.reason}, peers)
    homes = _homes(local, masters or {}, peers)
    pieces = _pieces(schema, [one for one in found.values() if one.spec.name not in failed], homes)
    shares = shared(pieces, schema, peers)
    for tensor in coverage.uncovered(schema, covered(schema, shares.owned, peers)):
        failed.setdefault(schema.tensors[tensor].name, "over all ranks, not each of its elements is held once")
    return MappedSource(
        schema,
        _without(shares, {tensor for tensor, spec in enumerate(schema.tensors) if spec.name in failed}),
        [*local, *_masters(masters or {})],
        lambda: chain(present(), ((one.name, one.tensor) for one in _masters(masters or {}))),
        residual=_residual(schema, found, failed, parts, peers, lambda: dict(_present(weights, waive))),
        peers=peers,
        proved=not failed,
    )


def through(module: torch.nn.Module, export: Callable[[Sequence[str]], Iterable[tuple[str, torch.Tensor]]]) -> Export:
    """An exporter that reads a module's own tensors, by name, as one that takes tensors.

    While it runs, the named tensors of the module lie over what is passed in; live memory is neither read nor written,
    and afterwards each tensor is again where it was.
    """

    def exporter(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        with _lent(module, tensors):
            yield from export(list(tensors))

    return exporter


@contextmanager
def _lent(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    own = {name: tensor for name, tensor, _ in named(module) if name in tensors}
    homes = {name: tensor.data for name, tensor in own.items()}
    try:
        for name, tensor in own.items():
            tensor.data = tensors[name].detach()
        yield
    finally:
        for name, tensor in own.items():
            tensor.data = homes[name]


def _named(
    weights: torch.nn.Module | Mapping[str, torch.Tensor], waive: Sequence[str] = ()
) -> Iterator[tuple[str, torch.Tensor, bool]]:
    if isinstance(weights, torch.nn.Module):
        yield from named(weights, waive)
    else:
        yield from ((name, tensor, True) for name, tensor in weights.items() if not waived(name, waive))


def _tensors(weights: torch.nn.Module | Mapping[str, torch.Tensor], waive: Sequence[str]) -> list[Tied]:
    """This rank's tensors as they lie now; of a DTensor, its part."""
    with torch.no_grad():
        return tied(
            (name, tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach(), is_parameter)
            for name, tensor, is_parameter in _named(weights, waive)
        )


def _present(
    weights: torch.nn.Module | Mapping[str, torch.Tensor], waive: Sequence[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's tensors as they are now, by name; of a DTensor, its part."""
    return ((name, part_of(tensor)) for name, tensor, _ in _named(weights, waive))


def _without(shares: Shares, failed: Set[int]) -> Shares:
    """What is left of a rank's shares without some tensors, alike on all ranks: a key names what it named."""
    owned, held = ([piece for piece in some if piece.tensor not in failed] for some in (shares.owned, shares.held))
    copies = [(key, [piece for piece in some if piece.tensor not in failed]) for key, some in shares.copies]
    return Shares(owned, held, copies, [pair for pair in shares.twins if pair[0].tensor not in failed])


def _dress(weights: torch.nn.Module | Mapping[str, torch.Tensor]) -> Dress:
    """What makes a DTensor of a part that stands in for one."""
    meshed = {name: tensor for name, tensor, _ in _named(weights) if isinstance(tensor, DTensor)}

    def dress(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in meshed:
            return tensor
        mesh, placements = meshed[name].device_mesh, meshed[name].placements
        shape, stride = meshed[name].shape, meshed[name].stride()
        return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)

    return dress


def _grouped(local: Sequence[Tied], groups: Sequence[Sequence[str]] | None) -> Iterator[list[Tied]]:
    """This rank's tensors group by group; without groups, as many together as GROUP_ELEMS allows."""
    if groups is not None:
        by_name = {name: one for one in local for name in one.names}
        for names in groups:
            yield list({id(by_name[name]): by_name[name] for name in names if name in by_name}.values())
        return
    some: list[Tied] = []
    room = GROUP_ELEMS
    for one in local:
        if some and one.tensor.numel() > room:
            yield some
            some, room = [], GROUP_ELEMS
        some.append(one)
        room -= one.tensor.numel()
    yield some


def _stand_ins(groups: Iterable[list[Tied]], export: Export, dress: Dress, peers: Peers) -> Iterator[StandIns]:
    """The groups with their elements numbered over all ranks. Collective."""
    mine = list(groups)
    sizes = [(sum(one.tensor.numel() for one in some), base_of(some)) for some in mine]
    gathered = peers.gather(msgspec.msgpack.encode(sizes))
    every = [msgspec.msgpack.decode(data, type=list[tuple[int, int]]) for data in gathered]
    if any(len(other) != len(mine) for other in every):
        raise SchemaError(f"ranks have {sorted({len(other) for other in every})} groups: pass the same to all")
    for number, some in enumerate(mine):
        totals = [other[number][0] for other in every]
        base = min(other[number][1] for other in every)
        yield StandIns(number, some, export, sum(totals[: peers.rank]), sum(totals), base, dress)


def _by_name(found: Iterable[Exported]) -> dict[str, Exported]:
    by_name: dict[str, Exported] = {}
    for one in found:
        if one.spec.name in by_name:
            raise SchemaError(f"two groups export {one.spec.name}: pass `groups` that put their tensors together")
        by_name[one.spec.name] = one
    return by_name


def _require_known(names: Iterable[str], schema: Schema) -> None:
    known = {spec.name for spec in schema.tensors}
    for name in names:
        if name not in known:
            raise SchemaError(f"a map was declared for {name}, which the exporter does not give")


# Where a tensor's elements are read: the local tensor's number and dtype, and the box from its storage to them.
_Home = tuple[int, str, Box]


def _masters(masters: Mapping[str, Span]) -> list[Tied]:
    return [Tied((f"master of {name}",), span.tensor.detach(), True) for name, span in masters.items()]


def _homes(local: Sequence[Tied], masters: Mapping[str, Span], peers: Peers) -> dict[str, _Home]:
    """The home of each tensor: a master's span where any rank has one, else the tensor. Collective."""
    everywhere = {
        name
        for data in peers.gather(msgspec.msgpack.encode(list(masters)))
        for name in msgspec.msgpack.decode(data, type=list[str])
    }
    homes = {
        one.name: (index, one.dtype, one.own_box()) for index, one in enumerate(local) if one.name not in everywhere
    }
    for index, (one, (name, span)) in enumerate(zip(_masters(masters), masters.items(), strict=True), start=len(local)):
        homes[name] = index, one.dtype, span.box()
    return homes


def _pieces(schema: Schema, found: Iterable[Exported], homes: Mapping[str, _Home]) -> list[Piece]:
    """The boxes, from the live storages on."""
    number = {spec.name: position for position, spec in enumerate(schema.tensors)}
    pieces = []
    for one in found:
        for position, box in one.boxes:
            name = one.part.tensors[position].name
            if name in homes:
                index, dtype, lies = homes[name]
                cast = kind(one.spec.name, dtype, one.spec.dtype)
                pieces += [Piece(number[one.spec.name], index, part, cast) for part in stored(lies, box)]
    return pieces


def _residual(
    schema: Schema,
    found: Mapping[str, Exported],
    failed: Mapping[str, str],
    parts: Sequence[StandIns],
    peers: Peers,
    now: Callable[[], Mapping[str, torch.Tensor]],
) -> list[ResidualGroup]:
    """What has no map, by the group that exports it and the first rank that does. Collective."""
    mine = {name: found[name].part.number for name in failed if name in found}
    homes: dict[str, tuple[int, int]] = {}
    for rank, data in enumerate(peers.gather(msgspec.msgpack.encode(mine))):
        for name, number in msgspec.msgpack.decode(data, type=dict[str, int]).items():
            homes.setdefault(name, (number, rank))
    together: dict[tuple[int, int], list[int]] = defaultdict(list)
    for tensor, spec in enumerate(schema.tensors):
        if spec.name in homes:
            together[homes[spec.name]].append(tensor)
    return [
        _group(tensors, schema, failed, parts[number].hollow(), now, rank == peers.rank)
        for (number, rank), tensors in sorted(together.items())
    ]


def _lying(tensor: torch.Tensor) -> tuple[object, torch.Tensor]:
    """Where a tensor lies, and the tensor."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype), tensor


def _group(
    tensors: Sequence[int],
    schema: Schema,
    failed: Mapping[str, str],
    part: StandIns,
    now: Callable[[], Mapping[str, torch.Tensor]],
    owned: bool,
) -> ResidualGroup:
    names = [schema.tensors[tensor].name for tensor in tensors]

    def inputs() -> Sequence[Bits]:
        present = now()
        lying = [_lying(present[name]) for one in part.tensors for name in one.names]
        return [bits_of(tensor) for tensor in dict(lying).values()]  # names that are tied are read once

    def export() -> Sequence[Bits | None] | None:
        with torch.no_grad():
            exported = {name: bits_of(tensor) for name, tensor in part.run(part.live(now())) if name in names}
        return [exported.get(name) for name in names]

    return ResidualGroup(tuple(tensors), "; ".join(sorted({failed[name] for name in names})), owned, inputs, export)
