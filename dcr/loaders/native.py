"""Any engine as a loader: its own loader recorded and certified, then updates in place; the rest reloaded by module."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch

from dcr.codecs.patch import Change
from dcr.errors import SchemaError, StateError
from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import Layout
from dcr.layout.schema import Schema, TensorSpec, patterns
from dcr.layout.views import UNSIGNED, Bits, Lanes
from dcr.loaders.certify import Cast, cast_of, strided
from dcr.loaders.copies import warn_of_copies
from dcr.loaders.engine import Adapter, Memory, Slot, memories_of, slots_of
from dcr.loaders.probe import dtype_of, torch_of
from dcr.loaders.record import Kind, Record, record
from dcr.loaders.reload import Reloads
from dcr.loaders.trial import describe
from dcr.loaders.writable import extent_of, require_writable
from dcr.memory.placement import Place, Placement, wanted
from dcr.memory.ready import Ready
from dcr.probing.bits import bits_of, is_lazy
from dcr.probing.homes import Homes
from dcr.probing.names import hint
from dcr.probing.state import require_named
from dcr.seams import RankWeights

SHADOWED = (Kind.CAST, Kind.LAYER, Kind.MODEL)


class NativeLoader:
    """An engine rank, updated in place wherever that is proven to equal what the engine's own loader would do.

    Tensors that the engine casts, or has to load itself, are kept here in canonical form too: those, and no others.
    waive: patterns (as in fnmatch) of published names that the engine need not take, and of weights here that need not
    be published. partial: True if this is one of several ranks, so that it need not hold everything.
    """

    def __init__(self, engine: Adapter, *, waive: Sequence[str] = (), partial: bool = False) -> None:
        self._engine = engine
        self._waive = patterns(waive)
        self._partial = partial
        self._recorded: tuple[bytes, bytes, Record] | None = None
        self._weights: NativeWeights | None = None
        self._derived: dict[str, object] = {}
        self._look: _Look | None = None

    @property
    def record(self) -> Record:
        """What was found out about the engine's loader."""
        if self._recorded is None:
            raise StateError("nothing is recorded yet; call bind first")
        return self._recorded[2]

    @property
    def reads_base(self) -> bool:
        """See `dcr.seams.Readable`: the parts of one rank of several are no frames."""
        return not self._partial

    def bind(self, layout: Layout) -> RankWeights[Ready]:
        """See `dcr.seams.Loader.bind`. The engine's loader is tried out on stand-ins, unless that is known already."""
        require_named(self._engine.module, self._waive)
        slots = slots_of(self._engine.module, self._waive)
        fingerprint = _digest(_fingerprint(self._engine), [(slot.path, _home(slot.tensor)) for slot in slots])
        known = self._recorded is not None and self._recorded[:2] == (fingerprint, layout.schema.digest)
        waived = {tensor for tensor, spec in enumerate(layout.schema.tensors) if self._waived(spec.name)}
        found = self.record if known else record(self._engine, layout.schema, waived=waived)
        self._require_taken(layout.schema, found, slots)
        memories = memories_of(slots_of(self._engine.module, self._waive))
        self._require_published(layout.schema, memories, found)
        warn_of_copies(self._engine.module)
        require_writable(extent_of(memories[index].path, memories[index].live) for index in sorted(_written(found)))
        self._weights = NativeWeights(self._engine, layout, memories, found, self._partial)
        self._recorded = (fingerprint, layout.schema.digest, found)
        written = [slot for index in _written(found) for slot in memories[index].slots]
        self._derived = {slot.path: _home(slot.tensor) for slot in written if not slot.saved}
        self._look = None
        return self._weights

    def fingerprint(self) -> bytes:
        """See `dcr.seams.Loader.fingerprint`: parameters, persistent buffers, and what else a load writes.

        Other tensors may move: engines replace buffers of their own as they run.
        """
        engine, look = _fingerprint(self._engine), self._look
        if look is not None and look.engine == engine and look.homes.are_left():
            return look.fingerprint
        homes = self._homes()  # noted before all is looked at: what moves meanwhile is noticed at the next look
        slots = slots_of(self._engine.module, self._waive)
        now = {slot.path: _home(slot.tensor) for slot in slots}
        saved = [(slot.path, now[slot.path]) for slot in slots if slot.saved]
        moved = [path for path, home in self._derived.items() if now.get(path) != home]
        fingerprint = _digest(engine, saved, moved)
        self._look = _Look(engine, homes, fingerprint) if homes is not None else None
        return fingerprint

    def finalize(self) -> None:
        """See `dcr.seams.Loader.finalize`: modules that have to be loaded are, or get their old bytes back.

        Raises:
            StateError: nothing is bound.
        """
        if self._weights is None:
            raise StateError("the loader is not bound to a layout yet; call bind first")
        self._weights.finalize()

    def _homes(self) -> Homes | None:
        """Where the weights lie; None if one is in a list or a dict of the engine's, which may become another one."""
        slots = slots_of(self._engine.module, self._waive) if self._derived else []
        derived = [slot for slot in slots if slot.path in self._derived]
        if any(slot.key != slot.name for slot in derived):
            return None
        return Homes(self._engine.module, [(slot.holder, slot.key) for slot in derived])

    # ------------------------------------------------------------------ what is refused

    def _require_taken(self, schema: Schema, found: Record, slots: Sequence[Slot]) -> None:
        """Every published tensor goes somewhere."""
        for spec, verdict in zip(schema.tensors, found.verdicts, strict=True):
            if verdict.kind is Kind.SKIP and not self._partial and not self._waived(spec.name):
                raise SchemaError(
                    f"{spec.name} is published and goes nowhere here: {verdict.reason}; waive it if it may"
                    + hint(spec.name, [slot.path for slot in slots if slot.saved], published=True)
                ) from verdict.error

    def _require_published(self, schema: Schema, memories: Sequence[Memory], found: Record) -> None:
        """Every weight here is written by something that is published."""
        written = {home.memory for home in found.homes} | {m for reload in found.reloads for m in reload.memories}
        written |= {held.memory for held in found.constants}  # a bias that only the first of several ranks adds
        for index, memory in enumerate(memories):
            for slot in memory.slots if index not in written else ():
                if slot.saved and not self._waived(slot.path):
                    raise SchemaError(
                        f"{slot.path} is held here and nothing published goes there: "
                        "it would keep old bits for ever; publish or waive it"
                        + hint(slot.path, [spec.name for spec in schema.tensors], published=False)
                    )

    def _waived(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._waive)


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """A look at where all weights lie, and what came of it: the same again for as long as nothing has moved."""

    engine: bytes
    homes: Homes
    fingerprint: bytes


class NativeWeights(Placement):
    """An engine rank's weights, placed as its record says, and the modules that its own loader has to load.

    shadows: canonical bits of the tensors that the engine does not hold as they are.
    """

    def __init__(
        self, engine: Adapter, layout: Layout, memories: Sequence[Memory], found: Record, partial: bool
    ) -> None:
        self._schema = layout.schema
        self.shadows: dict[int, Bits] = {}
        places: list[Place] = []
        storages = [memory.bits(memory.live) for memory in memories]
        homes: dict[int, list[Place]] = defaultdict(list)
        for home in found.homes:
            cast = cast_of(layout.schema.tensors[home.tensor], memories[home.memory])
            homes[home.tensor].append(Place(home.tensor, home.memory, home.box, cast=cast))
        for tensor, (spec, verdict) in enumerate(zip(layout.schema.tensors, found.verdicts, strict=True)):
            if verdict.kind in SHADOWED or (verdict.kind is Kind.SKIP and not partial):
                self.shadows[tensor] = np.zeros(spec.numel, UNSIGNED[spec.width])
                places += _shadow_places(tensor, spec, len(storages), homes[tensor])
                storages.append(self.shadows[tensor])
            places += homes[tensor]
        super().__init__(layout, storages, places, partial=partial)
        self._reloads = Reloads(engine, layout.schema, memories, found, self.canonical)
        self._undone = False
        for place in places:
            if isinstance(place.cast, Cast):
                self._recall(place, storages[place.storage], place.cast)

    def prepare(self, index: int, change: Change) -> Ready:
        """See `dcr.seams.LiveWeights.prepare`.

        Raises:
            BaseMismatch: a module that the engine loads is not as its last load left it.
        """
        self._reloads.begin()
        ready = super().prepare(index, change)
        self._reloads.check(self.touched(ready))
        return ready

    def install(self, ready: Ready) -> None:
        """See `dcr.seams.LiveWeights.install`."""
        self._reloads.wrote(self.touched(ready), undone=False)
        super().install(ready)

    def undo(self, ready: Ready) -> None:
        """See `dcr.seams.LiveWeights.undo`."""
        self._reloads.wrote(self.touched(ready), undone=True)
        super().undo(ready)
        self._undone = True

    def finalize(self) -> None:
        """Load what has to be loaded, or give it its old bytes back."""
        self._reloads.finalize()
        if not self._undone:
            self._reloads.set_constants()
        self._undone = False

    def digest(self) -> Lanes:
        """See `dcr.seams.LiveWeights.digest`."""
        self._reloads.require_known()
        return super().digest()

    def canonical(self, tensor: int) -> torch.Tensor:
        """A copy of one shadow, as a tensor: a loader may change what it is given, or keep it."""
        spec = self._schema.tensors[tensor]
        return torch_of(self.shadows[tensor].copy(), dtype_of(spec)).reshape(spec.shape)

    def _recall(self, place: Place, storage: Bits, cast: Cast) -> None:
        """What the canonical bits behind a cast may have been; if the cast lost some, the digest will say so."""
        stored = strided(storage, place.box, "here")
        back = bits_of(torch_of(np.ascontiguousarray(stored).reshape(-1), cast.target).to(cast.source))
        strided(self.shadows[place.tensor], place.box, "there")[...] = back.reshape(stored.shape)


def _written(found: Record) -> set[int]:
    """The memories that an install, or a reload, writes."""
    moved = {home.memory for home in found.homes} | {held.memory for held in found.constants}
    return moved | {index for reload in found.reloads for index in reload.touched}


def _shadow_places(tensor: int, spec: TensorSpec, storage: int, homes: Sequence[Place]) -> list[Place]:
    """The places of a shadow: what its casts hold, or all of it."""
    runs = wanted(homes).get(tensor)
    spans = [(0, spec.numel)] if runs is None else [(start, count) for start, count in runs.tolist()]
    return [Place(tensor, storage, Box(start, start, (Dim(count, 1, 1),))) for start, count in spans]


def _fingerprint(engine: Adapter) -> bytes:
    try:
        return engine.fingerprint()
    except Exception as error:  # an adapter may raise anything
        raise SchemaError(f"expected a fingerprint of the engine, which raises {describe(error)}") from error


def _digest(*facts: object) -> bytes:
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()


def _home(tensor: torch.Tensor) -> tuple[object, ...]:
    storage, dtype = tensor.untyped_storage().data_ptr(), str(tensor.dtype)
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), dtype, is_lazy(tensor)
