"""What an install has to bring up to date besides moved elements: modules that the engine has to load, and constants.

A module is loaded on stand-ins by the engine's own loader, from canonical bits that are kept here, and what comes out
is copied to live memory. So live pointers stay, a load that fails has changed nothing, and the old bytes are the undo.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dcr.errors import BaseMismatch, DigestMismatch, ReadBackError, StateError
from dcr.layout.schema import Schema
from dcr.layout.views import Bits
from dcr.loaders.attributes import Attributes
from dcr.loaders.engine import Adapter, Memory, Octets
from dcr.loaders.record import Record, Reload
from dcr.loaders.standin import StandIns
from dcr.loaders.trial import Seen, Trial


@dataclass(slots=True, eq=False)
class _Module:
    """A reload at work.

    dirty: a tensor of it was written since it was last loaded; undone: and has its old bits again. known: a digest of
    what the last load left, None before the first. astray: it was seen to be something else. checked: it was looked
    at for the version that is being prepared. before: its memories, `known`, and what the engine's modules kept beside
    tensors, before that version.
    """

    reload: Reload
    dirty: bool = False
    undone: bool = False
    known: bytes | None = None
    astray: bool = False
    checked: bool = False
    before: tuple[dict[int, Octets], bytes | None, Attributes] | None = None


class Reloads:
    """The modules of a record that have to be loaded, and its constants, over live memories.

    canonical: the tensor to load for a number of the schema.
    """

    def __init__(
        self,
        engine: Adapter,
        schema: Schema,
        memories: Sequence[Memory],
        record: Record,
        canonical: Callable[[int], torch.Tensor],
    ) -> None:
        self._engine, self._schema, self._memories, self._record = engine, schema, memories, record
        self._canonical = canonical
        self._modules = [_Module(reload) for reload in record.reloads]
        self._of_tensor: dict[int, list[_Module]] = defaultdict(list)
        for module in self._modules:
            for tensor in module.reload.tensors:
                self._of_tensor[tensor].append(module)
        self._kept: list[_Module] = []  # those with something `before`
        self._settled = False
        self._spots = [_spot(held.elements) for held in record.constants]
        self._overwritten: list[Bits] | None = None  # constants' elements, as they were before

    def begin(self) -> None:
        """A version is prepared: the one before is installed everywhere, and will not be undone."""
        self._overwritten = None
        for module in self._kept:
            module.before = None
        self._kept.clear()

    def check(self, tensors: Set[int]) -> None:
        """Before some tensors are written: the modules they belong to are what the last load left.

        Raises:
            BaseMismatch: somebody else has written to one. Once it is said, what comes next may heal it.
        """
        for module in self._of(tensors):
            if not module.checked and not module.astray and not self._is_known(module):
                raise BaseMismatch(self._said(module))
            module.checked = True

    def wrote(self, tensors: Set[int], *, undone: bool) -> None:
        """Canonical bits of some tensors are new, or old again."""
        for module in self._of(tensors):
            module.dirty, module.undone = True, undone
        if undone and self._overwritten is not None:
            for held, spot, old in zip(self._record.constants, self._spots, self._overwritten, strict=True):
                self._bits(held.memory)[spot] = old
            self._overwritten, self._settled = None, False

    def finalize(self) -> None:
        """Load what is dirty, or give it its old bytes back; see `dcr.seams.Loader.finalize`."""
        for module in self._modules:
            if module.undone and module.before is not None:
                contents, known, attributes = module.before
                self._write(module, contents)
                module.known = known
                attributes.restore()
            elif not module.undone and (module.dirty or module.astray or module.known is None):
                attributes = self._attributes(module.reload)
                contents = self._loaded(module.reload, attributes)
                if module.before is None:
                    module.before = {i: self._memories[i].live.copy() for i in contents}, module.known, attributes
                    self._kept.append(module)
                self._write(module, contents)
            module.dirty = module.undone = module.checked = False

    def set_constants(self) -> None:
        """Constants beside the weights are what a load leaves there: once, and if they were changed."""
        if self._settled and self._constant():
            return
        old = [self._bits(held.memory)[held.elements] for held in self._record.constants]
        for held, spot in zip(self._record.constants, self._spots, strict=True):
            self._bits(held.memory)[spot] = held.bits
        self._overwritten, self._settled = old if self._overwritten is None else self._overwritten, True

    def require_known(self) -> None:
        """Everything is as it was left here.

        Raises:
            DigestMismatch: it is not.
        """
        for module in self._modules:
            if not self._is_known(module):
                raise DigestMismatch(self._said(module))
        if self._settled and not self._constant():
            raise DigestMismatch("constants beside the weights are not what the engine's loader leaves there")

    def _of(self, tensors: Set[int]) -> list[_Module]:
        """The modules that some tensors belong to; it costs what is asked of, not what there is."""
        if not self._of_tensor:
            return []
        return list(dict.fromkeys(module for tensor in sorted(tensors) for module in self._of_tensor.get(tensor, ())))

    def _attributes(self, reload: Reload) -> Attributes:
        """What the modules that a reload writes to keep beside tensors."""
        names = {slot.module for index in reload.touched for slot in self._memories[index].slots}
        return Attributes(self._engine.module.get_submodule(name) for name in names | {""})

    def _loaded(self, reload: Reload, attributes: Attributes) -> dict[int, Octets]:
        """What the engine's own loader makes of some memories; attributes are put back if it fails."""
        slots = [slot for index in reload.touched for slot in self._memories[index].slots]
        with StandIns(slots) as stand_ins:
            for index, memory in enumerate(stand_ins.memories):
                stand_ins.scratch(index)[:] = memory.live
            trial = Trial(self._engine, self._schema, stand_ins, self._record.names)
            seen = self._load(trial, reload, attributes)
            idle = {i for i in reload.steady if self._is_live(stand_ins, reload, i)}
            idle = {i for i in idle if reload.touched.index(i) not in seen.written}
            for index in idle:  # nobody was seen to write it: it may be the same by chance, or by a thread
                stand_ins.scratch(reload.touched.index(index))[:] = ~self._memories[index].live
            if idle:
                self._load(trial, reload, attributes)
                self._require_written(stand_ins, reload, idle)
            return {i: stand_ins.scratch(reload.touched.index(i)) for i in reload.memories}

    def _load(self, trial: Trial, reload: Reload, attributes: Attributes) -> Seen:
        """Load the tensors of a reload, as often as they need; attributes are put back if that fails."""
        total = Seen()
        for _ in range(reload.times):
            total.add(trial.load(reload.tensors, self._canonical, settle=trial.memories))
            if total.error is not None:
                attributes.restore()
                raise total.error
        return total

    def _is_live(self, stand_ins: StandIns, reload: Reload, index: int) -> bool:
        return np.array_equal(stand_ins.scratch(reload.touched.index(index)), self._memories[index].live)

    def _require_written(self, stand_ins: StandIns, reload: Reload, memories: Set[int]) -> None:
        """A loader that has stopped to take tensors would leave an older version in silence."""
        for index in memories:
            live = self._memories[index].live
            if np.array_equal(stand_ins.scratch(reload.touched.index(index)), ~live):
                names = ", ".join(self._schema.tensors[tensor].name for tensor in reload.tensors[:3])
                raise StateError(
                    f"expected the engine's loader to write {self._memories[index].path} when it loads {names}, as it "
                    "did when it was tried out; it writes nothing any more: start the engine anew"
                )

    def _write(self, module: _Module, contents: dict[int, Octets]) -> None:
        for index, octets in contents.items():
            live = self._memories[index].live
            live[:] = octets
            if not np.array_equal(live, octets):
                raise ReadBackError(f"{self._memories[index].path} did not keep the bytes that were loaded")
        module.known, module.astray = self._stored(module.reload), False

    def _is_known(self, module: _Module) -> bool:
        module.astray = module.known is not None and module.known != self._stored(module.reload)
        return not module.astray

    def _stored(self, reload: Reload) -> bytes:
        total = hashlib.blake2b(digest_size=16)
        for index in reload.memories:
            total.update(self._memories[index].live.data)
        return total.digest()

    def _constant(self) -> bool:
        pairs = zip(self._record.constants, self._spots, strict=True)
        return all(np.array_equal(self._bits(held.memory)[spot], held.bits) for held, spot in pairs)

    def _bits(self, memory: int) -> Bits:
        return self._memories[memory].bits(self._memories[memory].live)

    def _said(self, module: _Module) -> str:
        names = ", ".join(self._schema.tensors[tensor].name for tensor in module.reload.tensors[:3])
        return f"{names}: memory is not what the engine's loader left there"


def _spot(elements: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Ascending elements as a slice where they are one run: each install compares all constants, without a copy."""
    first, last = int(elements[0]), int(elements[-1])
    return slice(first, last + 1) if last - first + 1 == len(elements) else elements
