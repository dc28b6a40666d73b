"""One load of an engine on stand-ins, and what is seen of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass, field

import torch

from dcr.errors import SchemaError
from dcr.layout.schema import Schema
from dcr.loaders.engine import Adapter
from dcr.loaders.probe import blank, prefill
from dcr.loaders.standin import Rebound, StandIns
from dcr.loaders.watch import Watch

Make = Callable[[int], torch.Tensor]


@dataclass(slots=True)
class Seen:
    """What a load was seen to do; memories by number.

    written: by operators of this thread. read: by them, before they were written. rebound: slots that the loader gave
    new memory. values_read: operators that took values of a source to Python.
    """

    written: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    rebound: list[str] = field(default_factory=list)
    values_read: set[str] = field(default_factory=set)
    error: Exception | None = None

    def add(self, other: Seen) -> None:
        self.written |= other.written
        self.read |= other.read
        self.rebound += other.rebound
        self.values_read |= other.values_read
        self.error = self.error or other.error


def describe(error: BaseException | None) -> str:
    """An error of somebody else's code in words, even if its own words fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


class Trial:
    """An engine whose tensors lie in stand-ins, and the tensors of a schema to load into it.

    names: under which names each tensor is loaded; narrowed to those that the loader takes.
    """

    def __init__(
        self, engine: Adapter, schema: Schema, stand_ins: StandIns, names: Sequence[tuple[str, ...]] | None = None
    ) -> None:
        self._engine = engine
        self.schema = schema
        self.stand_ins = stand_ins
        self.names = list(names or ((spec.name, *spec.aliases) for spec in schema.tensors))

    @property
    def memories(self) -> range:
        return range(len(self.stand_ins.memories))

    def load(
        self, tensors: Collection[int], make: Make, *, settle: Collection[int] | None = None, look: bool = True
    ) -> Seen:
        """Load some tensors in one call of the loader; with `settle`, then run the post-load steps.

        settle: memories that count as written besides those seen to be. look: False to leave it to `rebound` to look
        for tensors that were replaced, which takes a while where there are many.

        Raises:
            SchemaError: a tensor of the model was replaced by one of another shape or dtype.
        """
        pairs = [(name, value) for t in tensors for value in [make(t)] for name in self.names[t]]
        watch = Watch(self.stand_ins.index, [value for _, value in pairs])
        seen = Seen()
        try:
            with torch.no_grad(), watch:
                self._engine.load(pairs)
        except Exception as error:  # an engine's loader may raise anything
            seen.error = error
        rebound = self._bring_home() if look else ()
        seen.rebound = self._paths(rebound)
        seen.written = watch.written | self._memories_of(rebound)
        if settle is not None and seen.error is None:
            try:
                with torch.no_grad(), watch:
                    self._engine.settle(self.modules_of({*settle, *seen.written}))
            except Exception as error:  # an engine's steps may raise anything
                seen.error = error
            seen.written |= watch.written | self._memories_of(self._bring_home())
        seen.values_read, seen.read = watch.values_read, watch.read
        return seen

    def settle(self, modules: Set[str]) -> Seen:
        """Run the post-load steps of some modules, without a load."""
        watch, seen = Watch(self.stand_ins.index, []), Seen()
        try:
            with torch.no_grad(), watch:
                self._engine.settle(modules)
        except Exception as error:  # an engine's steps may raise anything
            seen.error = error
        seen.written, seen.read = watch.written | self._memories_of(self._bring_home()), watch.read
        return seen

    def rebound(self) -> Seen:
        """What loads did that were not looked at; raises as `load`."""
        rebound = self._bring_home()
        return Seen(self._memories_of(rebound), rebound=self._paths(rebound))

    def fill(self, memories: Iterable[int], seed: int) -> None:
        """Give stand-ins the contents that `prefill` defines."""
        for index in memories:
            self.stand_ins.scratch(index)[:] = prefill(self.stand_ins.memories[index], seed, index)

    def wipe(self, memories: Iterable[int], number: int) -> None:
        """Give stand-ins the contents that `blank` defines."""
        for index in memories:
            self.stand_ins.scratch(index)[:] = blank(self.stand_ins.memories[index], number)

    def idle(self, memories: Iterable[int], number: int, seen: Seen) -> set[int]:
        """Memories that a load has not written, since they were wiped."""
        unseen = {index for index in memories if index not in seen.written}
        fills = {index: blank(self.stand_ins.memories[index], number) for index in unseen}
        return {index for index in unseen if (self.stand_ins.scratch(index) == fills[index]).all()}

    def modules_of(self, memories: Iterable[int]) -> set[str]:
        """The modules that keep tensors in some memories."""
        return {slot.module for index in memories for slot in self.stand_ins.memories[index].slots}

    def scratched(self, known: Collection[int]) -> set[int]:
        """Memories that were written, besides those known."""
        return {index for index in self.memories if index not in known and self.stand_ins.scratched(index)}

    def _bring_home(self) -> Sequence[Rebound]:
        rebound = self.stand_ins.bring_home()
        for one in rebound:
            if not one.fits:
                raise SchemaError(
                    f"loading gives {one.slot.path} another shape, dtype or kind of memory than {one.slot.dtype} "
                    f"{tuple(one.slot.tensor.shape)}: an update in place is not possible"
                )
        return rebound

    def _paths(self, rebound: Sequence[Rebound]) -> list[str]:
        return [] if self._engine.replaces else [one.slot.path for one in rebound]

    def _memories_of(self, rebound: Iterable[Rebound]) -> set[int]:
        return {self.stand_ins.memory_of(one.slot) for one in rebound}
