"""The kit for engine adapters: subclass `EngineTests`, say how to make and load an engine; pytest collects it.

Every test works on real memory: what a refit leaves is compared, byte by byte over every tensor that the model keeps,
with a second engine that its own loader loaded from the new checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch

from dcr.codecs.patch import Change, Operation
from dcr.errors import DigestMismatch
from dcr.layout import frames
from dcr.layout.boxes import row_major, whole
from dcr.layout.frames import Frame, Layout, Shard
from dcr.layout.schema import Schema
from dcr.layout.views import Bits, Lanes
from dcr.loaders.engine import Adapter, Memory, Pairs, memories_of, slots_of
from dcr.loaders.native import NativeLoader
from dcr.loaders.probe import dtype_of, random_tensor, torch_of
from dcr.loaders.record import Kind
from dcr.memory.ready import Ready
from dcr.probing.bits import bits_of

OPERATIONS = pytest.mark.parametrize("operation", list(Operation), ids=lambda operation: operation.name.lower())


class EngineTests:
    """What has to hold for every engine that a `NativeLoader` drives.

    refits: how many follow each other in the longest test. frame_elems: elements of a frame. waive: as the loader's.
    """

    refits: int = 5
    frame_elems: int = 50
    waive: Sequence[str] = ()

    # ------------------------------------------------------------------ what the author says

    def make(self) -> Adapter:
        """An engine that has not loaded anything yet."""
        pytest.fail(f"{type(self).__name__}: override make, which makes an engine")

    def schema(self) -> Schema:
        """The tensors of its checkpoint."""
        pytest.fail(f"{type(self).__name__}: override schema, which says what a checkpoint holds")

    def native(self, pairs: Pairs) -> Adapter:
        """An engine that its own loader has loaded from a checkpoint, in the most ordinary way there is."""
        engine = self.make()
        with torch.no_grad():
            engine.load(pairs)
            engine.settle({slot.module for slot in slots_of(engine.module)})
        return engine

    def kinds(self) -> Mapping[str, Kind]:
        """What tensors must be, by name; those not named must be BITS."""
        return {}

    # ------------------------------------------------------------------ recording

    def test_recording_leaves_every_byte_and_every_pointer(self) -> None:
        world = self._world()
        before, pointers = world.memory(), world.pointers()
        world.bind()
        assert (world.memory() == before, world.pointers() == pointers) == (True, True)

    def test_every_tensor_gets_its_kind(self) -> None:
        world = self._world()
        world.bind()
        wanted = {spec.name: self.kinds().get(spec.name, Kind.BITS) for spec in world.schema.tensors}
        found = {
            spec.name: verdict.kind
            for spec, verdict in zip(world.schema.tensors, world.loader.record.verdicts, strict=True)
        }
        assert found == wanted

    # ------------------------------------------------------------------ refits

    @OPERATIONS
    def test_a_refit_leaves_what_the_native_loader_would(self, operation: Operation) -> None:
        world = self._seeded()
        world.refit(operation, 0.2)
        world.require_native("a refit")

    def test_a_refit_of_whole_frames_leaves_what_the_native_loader_would(self) -> None:
        world = self._seeded()
        world.refit(Operation.OVERWRITE, 1.0)
        world.require_native("a refit of whole frames")

    def test_refits_follow_one_another_and_nothing_moves(self) -> None:
        world = self._seeded()
        pointers = world.pointers()
        for number in range(self.refits):
            world.refit([Operation.XOR, Operation.STEP][number % 2], 0.01 + 0.1 * number)
            world.require_native(f"refit {number}")
        assert world.pointers() == pointers

    def test_a_refit_of_one_tensor_leaves_what_the_native_loader_would(self) -> None:
        world = self._seeded()
        count = len(world.schema.tensors)
        for tensor in range(0, count, max(1, count // 12)):
            world.refit(Operation.STEP, 0.5, only=tensor)
            world.require_native(f"a refit of {world.schema.tensors[tensor].name}")

    # ------------------------------------------------------------------ faults

    @OPERATIONS
    def test_an_undo_restores_every_byte(self, operation: Operation) -> None:
        world = self._seeded()
        before = world.memory()
        readies = world.prepare(operation, 0.3)
        world.install(readies)
        world.undo(readies)
        assert world.memory() == before

    def test_an_installation_that_ends_anywhere_is_undone(self) -> None:
        world = self._seeded()
        before = world.memory()
        readies = world.prepare(Operation.XOR, 0.3)
        for end in range(0, len(readies), max(1, len(readies) // 12)):
            for ready in readies[:end]:
                world.live.install(ready)
            world.undo(readies[:end])
            assert world.memory() == before, f"an undo after {end} of {len(readies)} frames leaves other bytes"

    def test_what_was_undone_can_be_installed(self) -> None:
        world = self._seeded()
        readies = world.prepare(Operation.STEP, 0.3)
        world.install(readies)
        world.undo(readies)
        world.install(readies)
        world.require_native("an install after an undo")

    def test_memory_that_was_tampered_with_is_noticed_before_anything_is_written(self) -> None:
        """Every element of the checkpoint counts: a flipped bit of any is seen in the sums, or in the digest."""
        world = self._seeded()
        expected = world.live.digest()
        for index in range(len(world.written())):
            world.flip(index)
            assert world.notices(expected), f"a flipped bit of {world.written()[index]} is not noticed"
            world.flip(index)
        assert not world.notices(expected)

    # ------------------------------------------------------------------

    def _world(self) -> World:
        return World(self.native, self.schema(), self.waive, self.frame_elems)

    def _seeded(self) -> World:
        """An engine that holds a version: every element was written once."""
        world = self._world()
        world.bind()
        world.refit(Operation.OVERWRITE, 1.0)
        return world


class World:
    """An engine, a loader for it, and the checkpoint that it should hold: `held`, flat bits of each tensor."""

    def __init__(
        self, native: Callable[[Pairs], Adapter], schema: Schema, waive: Sequence[str] = (), frame_elems: int = 50
    ) -> None:
        self._load = native
        self._frame_elems = frame_elems
        self._rng = np.random.default_rng(3)
        self.schema = schema
        self.held = [bits_of(random_tensor(spec, 77, number)).copy() for number, spec in enumerate(schema.tensors)]
        self.engine = self._native()
        self.loader = NativeLoader(self.engine, waive=waive)

    def bind(self) -> None:
        shards = [Shard(t, t, whole(spec.shape, row_major(spec.shape))) for t, spec in enumerate(self.schema.tensors)]
        self.layout = Layout(
            self.schema, tuple(one.spec for one in frames.plan(self.schema, shards, self._frame_elems))
        )
        self.live = self.loader.bind(self.layout)

    # ------------------------------------------------------------------ changes; each moves `held` on

    def prepare(self, operation: Operation, share: float, only: int | None = None) -> list[Ready]:
        """New finite bits for a share of all elements, or of one tensor's, prepared frame by frame."""
        new = [
            bits_of(random_tensor(spec, int(self._rng.integers(1 << 30)), t))
            for t, spec in enumerate(self.schema.tensors)
        ]
        changed = [
            self._rng.random(len(bits)) < (share if only in (None, t) else 0.0) for t, bits in enumerate(self.held)
        ]
        after = [np.where(where, one, old) for where, one, old in zip(changed, new, self.held, strict=True)]
        readies = [
            self.live.prepare(
                frame.index, _change(operation, self._dense(frame, self.held), self._dense(frame, after), share)
            )
            for frame in self.layout.frames
        ]
        self.held = after
        return readies

    def install(self, readies: Sequence[Ready]) -> None:
        for ready in readies:
            self.live.install(ready)
        self.loader.finalize()

    def undo(self, readies: Sequence[Ready]) -> None:
        for ready in reversed(readies):
            self.live.undo(ready)
        self.loader.finalize()

    def refit(self, operation: Operation, share: float, only: int | None = None) -> None:
        self.install(self.prepare(operation, share, only))

    def flip(self, index: int) -> None:
        """Change a bit of one memory that holds elements of the checkpoint."""
        octets = {memory.path: memory.live for memory in self._memories()}[self.written()[index]]
        octets[0] ^= 1

    def notices(self, expected: Lanes) -> bool:
        """True if live memory is not what it was, by its digest."""
        try:
            return not np.array_equal(self.live.digest(), expected)
        except DigestMismatch:
            return True

    # ------------------------------------------------------------------ comparisons

    def written(self) -> list[str]:
        """The memories that hold elements of the checkpoint, or are made of them."""
        record, memories = self.loader.record, self._memories()
        numbers = {home.memory for home in record.homes} | {m for reload in record.reloads for m in reload.memories}
        return [memories[number].path for number in sorted(numbers)]

    def memory(self) -> dict[str, bytes]:
        """All bytes of all tensors of the engine, and of what lies between them."""
        return {memory.path: memory.live.tobytes() for memory in self._memories()}

    def pointers(self) -> dict[str, int]:
        return {slot.path: slot.tensor.data_ptr() for slot in slots_of(self.engine.module)}

    def require_native(self, what: str) -> None:
        """Memory is what an engine's own loader makes of the checkpoint that should be held."""
        found, wanted = self.memory(), {m.path: m.live.tobytes() for m in memories_of(slots_of(self._native().module))}
        wrong = sorted(path for path in found.keys() | wanted.keys() if found.get(path) != wanted.get(path))
        assert not wrong, f"{what} leaves other bytes than the engine's own loader in {', '.join(wrong)}"

    def _native(self) -> Adapter:
        """An engine that its own loader has loaded from the checkpoint that should be held."""
        pairs = []
        for spec, bits in zip(self.schema.tensors, self.held, strict=True):
            tensor = torch_of(bits.copy(), dtype_of(spec)).reshape(spec.shape)
            pairs += [(name, tensor) for name in (spec.name, *spec.aliases)]
        return self._load(pairs)

    def _memories(self) -> list[Memory]:
        return memories_of(slots_of(self.engine.module))

    def _dense(self, frame: Frame, held: Sequence[Bits]) -> Bits:
        runs = [held[r.tensor][first : first + n] for r in frame.spec.regions for first, n in r.runs().tolist()]
        dense: Bits = np.concatenate(runs)
        return dense


def _change(operation: Operation, old: Bits, new: Bits, share: float) -> Change:
    if share == 1.0:
        return Change(Operation.OVERWRITE, None, new)
    positions = np.flatnonzero(old != new).astype(np.uint32)
    values = {Operation.OVERWRITE: new, Operation.XOR: new ^ old, Operation.STEP: new - old}[operation]
    return Change(operation, positions, values[positions])
