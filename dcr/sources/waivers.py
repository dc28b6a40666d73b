"""What a source leaves out by `waive`: each pattern fits something, and all names of a tied tensor or none."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from fnmatch import fnmatchcase

import msgspec
import torch

from dcr.errors import SchemaError
from dcr.layout.schema import misfit, waived
from dcr.probing.state import beyond, extras
from dcr.sources.ranks import Peers


def require_waivable(
    entries: Iterable[tuple[str, Hashable]],
    waive: Sequence[str],
    module: torch.nn.Module | None = None,
    peers: Peers | None = None,
) -> None:
    """Check patterns that are waived against all that a rank could publish. Collective, if there are peers.

    entries: each name, and what all names of one tensor have in common. module: what else its checkpoint holds can be
    waived, too.

    Raises:
        SchemaError: a pattern fits nothing on any rank, or a tied tensor under some of its names only; names it.
    """
    known = list(entries) if waive else []
    unfit = _unfit(waive, [name for name, _ in known])
    if unfit and module is not None:
        unfit = _unfit(unfit, [*beyond(module), *(name for name, _ in extras(module))])
    if peers is not None:  # a stage of a pipeline has some of the names; ranks without patterns have to take part
        unfit = _unfit_everywhere(unfit, peers)
    if unfit:
        raise SchemaError(misfit(f"waive={unfit[0]!r}", unfit[0], [(name,) for name, _ in known]))
    _require_whole(known, waive)


def _unfit(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    known = list(names)
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in known)]


def _unfit_everywhere(unfit: Sequence[str], peers: Peers) -> list[str]:
    ranks = [msgspec.msgpack.decode(data, type=set[str]) for data in peers.gather(msgspec.msgpack.encode(list(unfit)))]
    return sorted(set.intersection(*ranks))


def _require_whole(entries: Sequence[tuple[str, Hashable]], waive: Sequence[str]) -> None:
    left = {key: name for name, key in reversed(entries) if waived(name, waive)}
    for name, key in entries:
        if key in left and not waived(name, waive):
            raise SchemaError(f"{name} is tied to {left[key]}, which is waived: waive all its names, or none of them")
