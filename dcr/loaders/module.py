"""A live torch module on one host as a loader: updates go in place, pointers never change."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from dcr.errors import SchemaError
from dcr.layout.frames import Layout
from dcr.layout.schema import patterns, waived
from dcr.loaders.copies import warn_of_copies
from dcr.loaders.writable import extent_of, require_writable
from dcr.memory.placement import Place, Placement
from dcr.probing.homes import Homes
from dcr.probing.names import hint
from dcr.probing.state import require_named
from dcr.probing.tensors import Tied, named, require_module, require_separate, storages_of, tensors_of


class ModuleLoader:
    """All parameters and persistent buffers of a module in host memory, matched to published tensors by name.

    A tensor that is published under several names, and not tied here, gets every copy. waive: patterns (as in
    fnmatch) of names that are held here and need not be published; what only they name may be of any kind.

    Raises:
        TypeError: this is no module, or `waive` is no sequence.
    """

    reads_base = True

    def __init__(self, module: torch.nn.Module, *, waive: Sequence[str] = ()) -> None:
        require_module(module)
        self._module = module
        self._waive = patterns(waive)
        self._look: tuple[Homes, bytes] | None = None  # where weights lay, and the fingerprint of that
        self._published: frozenset[str] = frozenset()

    def bind(self, layout: Layout) -> Placement:
        """See `dcr.seams.Loader.bind`."""
        published = {name for spec in layout.schema.tensors for name in (spec.name, *spec.aliases)}
        require_named(self._module, self._waive)
        tensors = tensors_of(self._module, self._waive, published)
        storages, index = storages_of(tensors)
        require_separate(tensors)
        by_name = {name: number for number, tied in enumerate(tensors) for name in tied.names}
        places: list[Place] = []
        owner: dict[int, str] = {}
        for tensor, spec in enumerate(layout.schema.tensors):
            found = sorted({by_name[name] for name in (spec.name, *spec.aliases) if name in by_name})
            if not found:
                raise SchemaError(
                    f"{spec.name} is published and has no place here{hint(spec.name, by_name, published=True)}"
                )
            for number in found:
                tied = tensors[number]
                if number in owner:
                    raise SchemaError(f"{spec.name} and {owner[number]} are tied here but published apart")
                owner[number] = spec.name
                if tied.dtype != spec.dtype or tuple(tied.tensor.shape) != spec.shape:
                    raise SchemaError(
                        f"{spec.name}: published as {spec.dtype} {spec.shape}, "
                        f"held here as {tied.dtype} {tuple(tied.tensor.shape)}"
                    )
                places.append(Place(tensor, index[number], tied.box()))
        self._require_published(tensors, owner)
        require_writable(extent_of(tensors[number].name, storages[index[number]]) for number in owner)
        warn_of_copies(self._module)
        placement = Placement(layout, storages, places)
        self._published = frozenset(published)
        return placement

    def fingerprint(self) -> bytes:
        """See `dcr.seams.Loader.fingerprint`."""
        if self._look is not None and self._look[0].are_left():
            return self._look[1]
        noted = Homes(self._module)  # before all is looked at: what moves meanwhile is noticed at the next look
        homes = [(tied.names, tied.home) for tied in tensors_of(self._module, self._waive, self._published)]
        fingerprint = hashlib.blake2b(repr(homes).encode(), digest_size=16).digest()
        self._look = noted, fingerprint
        return fingerprint

    def finalize(self) -> None:
        """See `dcr.seams.Loader.finalize`: nothing here is made of the weights."""

    def _require_published(self, tensors: Sequence[Tied], owner: dict[int, str]) -> None:
        for number, tied in enumerate(tensors):
            if number not in owner:
                raise SchemaError(
                    f"{tied.name} is held here and not published: it would keep old bits for ever; "
                    f"publish or waive it{self._waived_in_part(tied)}{hint(tied.name, owner.values(), published=False)}"
                )

    def _waived_in_part(self, tied: Tied) -> str:
        """Other names of a tensor that are waived: not enough, since it is one tensor under all of them."""
        others = [
            name for name, tensor, _ in named(self._module) if waived(name, self._waive) and _same(tensor, tied.tensor)
        ]
        return f" (it is tied to {others[0]}, which is waived: waive all its names)" if others else ""


def _same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and (tensor.data_ptr(), tensor.shape) == (other.data_ptr(), other.shape)
