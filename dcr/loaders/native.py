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
from dcr.layout.frames import Layout, Region
from dcr.layout.schema import Schema, TensorSpec, patterns
from dcr.layout.views import UNSIGNED, Bits, Lanes
from dcr.loaders.certify import Cast, cast_of, strided
from dcr.loaders.copies import warn_of_copies
from dcr.loaders.engine import Engine, Memory, Slot, memories_of, slots_of
from dcr.loaders.probe import dtype_of, torch_of
from dcr.loaders.record import Kind, Record, record
from dcr.loaders.reload import Reloads
from dcr.loaders.trial import describe
from dcr.loaders.writable import extent_of, require_writable
from dcr.memory.placement import Place, Placement, wanted
from dcr.memory.ready import Ready
from dcr.memory.strips import Runs
from dcr.probing.bits import bits_of, is_lazy
from dcr.sources.homes import Homes
from dcr.sources.names import hint
from dcr.sources.state import require_named

SHADOWED = (Kind.CAST, Kind.LAYER, Kind.MODEL)


class NativeLoader:
    """An engine rank, updated in place wherever that is proven to equal what the engine's own loader would do.

    Tensors that the engine casts, or has to load itself, are kept here in canonical form too: those, and no others.
    waive: patterns (as in fnmatch) of published names that the engine need not take, and of weights here that need not
    be published. partial: True if this is one of several ranks, so that it need not hold everything.
    """

    def __init__(self, engine: Engine, *, waive: Sequence[str] = (), partial: bool = False) -> None:
        self._engine = engine
        self._waive = patterns(waive)
        self._partial = partial
        self._recorded: tuple[bytes, bytes, Record] | None = None
        self._binding: _Binding | None = None
        self._derived: dict[str, object] = {}
        self._look: _Look | None = None
        self._undone = False

    @property
    def record(self) -> Record:
        """What was found out about the engine's loader."""
        if self._recorded is None:
            raise StateError("nothing is recorded yet; call bind first")
        return self._recorded[2]

    @property
    def wanted(self) -> dict[int, Runs]:
        """The canonical runs [R, 2] (start, count) of each tensor that this rank needs."""
        return wanted(self._bound.places)

    @property
    def parts(self) -> list[Region]:
        """The regions that this rank holds; its sums are of them if it is one of several."""
        return self._bound.placement.parts

    # ------------------------------------------------------------------ the seam

    def bind(self, layout: Layout) -> None:
        """See `dcr.seams.Loader.bind`. The engine's loader is tried out on stand-ins, unless that is known already."""
        require_named(self._engine.module, self._waive)
        slots = slots_of(self._engine.module, self._waive)
        epoch = _digest(_fingerprint(self._engine), [(slot.path, _home(slot.tensor)) for slot in slots])
        known = self._recorded is not None and self._recorded[:2] == (epoch, layout.schema.digest)
        waived = {tensor for tensor, spec in enumerate(layout.schema.tensors) if self._waived(spec.name)}
        found = self.record if known else record(self._engine, layout.schema, waived=waived)
        self._require_taken(layout.schema, found, slots)
        memories = memories_of(slots_of(self._engine.module, self._waive))
        self._require_published(layout.schema, memories, found)
        warn_of_copies(self._engine.module)
        require_writable(extent_of(memories[index].path, memories[index].live) for index in sorted(_written(found)))
        self._binding = _Binding(self._engine, layout, memories, found, self._partial)
        self._recorded = (epoch, layout.schema.digest, found)
        written = [slot for index in _written(found) for slot in memories[index].slots]
        self._derived = {slot.path: _home(slot.tensor) for slot in written if not slot.saved}
        self._look = None

    def epoch(self) -> bytes:
        """See `dcr.seams.Loader.epoch`: parameters, persistent buffers, and what else a load writes.

        Other tensors may move: engines replace buffers of their own as they run.
        """
        fingerprint, look = _fingerprint(self._engine), self._look
        if look is not None and look.fingerprint == fingerprint and look.homes.are_left():
            return look.epoch
        homes = self._homes()  # noted before all is looked at: what moves meanwhile is noticed at the next look
        slots = slots_of(self._engine.module, self._waive)
        now = {slot.path: _home(slot.tensor) for slot in slots}
        saved = [(slot.path, now[slot.path]) for slot in slots if slot.saved]
        moved = [path for path, home in self._derived.items() if now.get(path) != home]
        epoch = _digest(fingerprint, saved, moved)
        self._look = _Look(fingerprint, homes, epoch) if homes is not None else None
        return epoch

    def prepare(self, frame: int, change: Change) -> Ready:
        """See `dcr.seams.Loader.prepare`.

        Raises:
            BaseMismatch: a module that the engine loads is not as its last load left it.
        """
        self._bound.reloads.begin()
        ready = self._bound.placement.prepare(frame, change)
        self._bound.reloads.check(self._bound.placement.touched(ready))
        return ready

    def read(self, frame: int) -> Bits:
        """See `dcr.seams.Readable.read`."""
        return self._bound.placement.read(frame)

    def install(self, ready: Ready) -> None:
        """See `dcr.seams.Loader.install`."""
        self._bound.reloads.wrote(self._bound.placement.touched(ready), undone=False)
        self._bound.placement.install(ready)

    def undo(self, ready: Ready) -> None:
        """See `dcr.seams.Loader.undo`."""
        self._bound.reloads.wrote(self._bound.placement.touched(ready), undone=True)
        self._bound.placement.undo(ready)
        self._undone = True

    def settle(self) -> None:
        """See `dcr.seams.Loader.settle`: modules that have to be loaded are, or get their old bytes back."""
        self._bound.reloads.settle()
        if not self._undone:
            self._bound.reloads.set_constants()
        self._undone = False

    def digest(self) -> Lanes:
        """See `dcr.seams.Loader.digest`."""
        self._bound.reloads.require_known()
        return self._bound.placement.digest()

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

    @property
    def _bound(self) -> _Binding:
        if self._binding is None:
            raise StateError("the loader is not bound to a layout yet; call bind first")
        return self._binding


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """A look at where all weights lie, and what came of it: the same again for as long as nothing has moved."""

    fingerprint: bytes
    homes: Homes
    epoch: bytes


class _Binding:
    """A record put to use for one layout.

    shadows: canonical bits of the tensors that the engine does not hold as they are.
    """

    def __init__(
        self, engine: Engine, layout: Layout, memories: Sequence[Memory], found: Record, partial: bool
    ) -> None:
        self.layout, self.memories, self.record = layout, memories, found
        self.shadows: dict[int, Bits] = {}
        self.places: list[Place] = []
        storages = [memory.bits(memory.live) for memory in memories]
        homes: dict[int, list[Place]] = defaultdict(list)
        for home in found.homes:
            cast = cast_of(layout.schema.tensors[home.tensor], memories[home.memory])
            homes[home.tensor].append(Place(home.tensor, home.memory, home.box, cast=cast))
        for tensor, (spec, verdict) in enumerate(zip(layout.schema.tensors, found.verdicts, strict=True)):
            if verdict.kind in SHADOWED or (verdict.kind is Kind.SKIP and not partial):
                self.shadows[tensor] = np.zeros(spec.numel, UNSIGNED[spec.width])
                self.places += _shadow_places(tensor, spec, len(storages), homes[tensor])
                storages.append(self.shadows[tensor])
            self.places += homes[tensor]
        self.placement = Placement(layout, storages, self.places, partial=partial)
        self.reloads = Reloads(engine, layout.schema, memories, found, self.canonical)
        for place in self.places:
            if isinstance(place.cast, Cast):
                self._recall(place, storages[place.storage], place.cast)

    def canonical(self, tensor: int) -> torch.Tensor:
        """A copy of one shadow, as a tensor: a loader may change what it is given, or keep it."""
        spec = self.layout.schema.tensors[tensor]
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


def _fingerprint(engine: Engine) -> bytes:
    try:
        return engine.fingerprint()
    except Exception as error:  # an adapter may raise anything
        raise SchemaError(f"expected a fingerprint of the engine, which raises {describe(error)}") from error


def _digest(*facts: object) -> bytes:
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).digest()


def _home(tensor: torch.Tensor) -> tuple[object, ...]:
    storage, dtype = tensor.untyped_storage().data_ptr(), str(tensor.dtype)
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), dtype, is_lazy(tensor)


class NativeRank:
    """One of several ranks of an engine, as `dcr.engines.ranks.Ranks` joins them; otherwise as `NativeLoader`."""

    def __init__(self, engine: Engine, *, waive: Sequence[str] = ()) -> None:
        self._loader = NativeLoader(engine, waive=waive, partial=True)
        self.epoch, self.prepare, self.install = self._loader.epoch, self._loader.prepare, self._loader.install
        self.undo, self.settle, self.digest = self._loader.undo, self._loader.settle, self._loader.digest

    @property
    def record(self) -> Record:
        """See `NativeLoader.record`."""
        return self._loader.record

    @property
    def wanted(self) -> dict[int, Runs]:
        """See `NativeLoader.wanted`."""
        return self._loader.wanted

    def bind(self, layout: Layout) -> Sequence[Region]:
        """See `dcr.seams.RankLoader.bind`."""
        self._loader.bind(layout)
        return self._loader.parts
