"""Any exporter as a source: run it over numbered stand-ins, and read off where each canonical element comes from.

An exporter is a function from some of a rank's tensors to canonical ones. It is run group by group on stand-ins, never
on the weights: a few times on tensors whose values count the group's elements in digits that their dtype holds exactly
(which gives an index map, and `dcr.fit` its boxes), then twice on random bits. A canonical tensor has a map only if
both times each of its bytes was where the boxes said. The rest is exported anew whenever its inputs change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
import torch
import torch.distributed as dist

from dcr import coverage, reference
from dcr.errors import SchemaError
from dcr.schema import Schema
from dcr.sources.bits import bits_of
from dcr.sources.certificate import Found, Maps, cast_of, certified
from dcr.sources.mapped import MappedSource, Piece, covered, demoted, shared, stored, united
from dcr.sources.peers import Peers
from dcr.sources.residual import Group
from dcr.sources.standins import Export, StandIns, base_of
from dcr.sources.tensors import Tied, named, tied
from dcr.views import Bits

GROUP_ELEMS = 1 << 24


def source(
    weights: torch.nn.Module | Mapping[str, torch.Tensor],
    *,
    export: Export,
    groups: Sequence[Sequence[str]] | None = None,
    maps: Maps | None = None,
    group: dist.ProcessGroup | None = None,
) -> MappedSource:
    """The source that an exporter defines. Collective over the process group's ranks.

    weights: this rank's tensors, as a module or by name. export: may be called on any one group; it may use
    collectives, and then has to yield a canonical tensor on every rank that holds a part of it. groups: names of
    tensors that are exported together, alike on all ranks (a rank may lack some of them); None for an exporter that
    takes each tensor by itself and without collectives. maps: declared maps, taken instead of what digits would show,
    and certified alike.

    Raises:
        SchemaError: the exporter fails on a group, exports a name twice, or ranks disagree.
    """
    peers = Peers(group)
    local = _tensors(weights)
    parts = list(_stand_ins(_grouped(local, groups), export, peers))
    found = _by_name(one for part in parts for one in certified(part, maps))
    schema = united([one.spec for one in found.values()], peers)
    _require_known(maps or (), schema)
    failed = demoted({name: one.reason for name, one in found.items() if one.reason}, peers)
    index = {one.name: position for position, one in enumerate(local)}
    pieces = _pieces(schema, [one for one in found.values() if one.spec.name not in failed], index)
    owned = shared(pieces, schema, peers)
    for tensor in coverage.uncovered(schema, covered(schema, owned, peers)):
        failed.setdefault(schema.tensors[tensor].name, "over all ranks, not each of its elements is held once")
    return MappedSource(
        schema,
        [piece for piece in owned if schema.tensors[piece.tensor].name not in failed],
        lambda: _tensors(weights),
        residual=_residual(schema, found, failed, parts, peers),
        peers=peers,
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


def _tensors(weights: torch.nn.Module | Mapping[str, torch.Tensor]) -> list[Tied]:
    if isinstance(weights, torch.nn.Module):
        return tied(named(weights))
    return tied((name, tensor.detach(), True) for name, tensor in weights.items())


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


def _stand_ins(groups: Iterable[list[Tied]], export: Export, peers: Peers) -> Iterator[StandIns]:
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
        yield StandIns(number, some, export, sum(totals[: peers.rank]), sum(totals), base)


def _by_name(found: Iterable[Found]) -> dict[str, Found]:
    by_name: dict[str, Found] = {}
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


def _pieces(schema: Schema, found: Iterable[Found], index: Mapping[str, int]) -> list[Piece]:
    """The boxes, from the live storages on."""
    number = {spec.name: position for position, spec in enumerate(schema.tensors)}
    pieces = []
    for one in found:
        for position, box in one.boxes:
            local = one.part.tensors[position]
            cast = cast_of(local, one.spec) or reference.NONE
            pieces += [Piece(number[one.spec.name], index[local.name], part, cast) for part in stored(local, box)]
    return pieces


def _residual(
    schema: Schema,
    found: Mapping[str, Found],
    failed: Mapping[str, str],
    parts: Sequence[StandIns],
    peers: Peers,
) -> list[Group]:
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
        _group(tensors, schema, failed, parts[number], rank == peers.rank)
        for (number, rank), tensors in sorted(together.items())
    ]


def _group(tensors: Sequence[int], schema: Schema, failed: Mapping[str, str], part: StandIns, owned: bool) -> Group:
    names = [schema.tensors[tensor].name for tensor in tensors]

    def inputs() -> Sequence[Bits]:
        return [bits_of(one.tensor) for one in part.tensors]

    def export() -> Sequence[Bits] | None:
        exported = {name: bits_of(tensor) for name, tensor in part.run(part.live()) if name in names}
        return [exported[name] for name in names] if owned else None

    return Group(tuple(tensors), "; ".join(sorted({failed[name] for name in names})), owned, inputs, export)
