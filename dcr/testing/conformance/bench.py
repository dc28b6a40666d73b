"""An engine under test: what it should hold, changes that move this on, and comparisons with its memory.

N  elements of a frame      K  changed elements
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcr.codecs.patch import Change, Operation
from dcr.kernels import reference
from dcr.layout import boxes, frames
from dcr.layout.frames import Frame, Layout, Shard
from dcr.layout.schema import WIDTHS, Schema, TensorSpec, keys
from dcr.layout.views import UNSIGNED, Bits, Lanes, Positions
from dcr.memory.ready import Ready
from dcr.seams import LiveWeights, Loader


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One weight of an engine: dtype as in a checkpoint, and its bits, an unsigned array of the weight's shape."""

    dtype: str
    bits: Bits


class Bench:
    """An engine, its loader, and what the engine should hold: `held`, flat bits by name, which changes move on."""

    def __init__(
        self, weights: Mapping[str, Weight], engine: Any, loader: Loader, raw: Callable[[], Mapping[str, bytes]]
    ) -> None:
        self.weights = dict(weights)
        self.engine = engine
        self.loader = loader
        self.held = {name: weight.bits.reshape(-1).copy() for name, weight in weights.items()}
        self._raw = raw
        self._before = dict(raw())
        self._rng = np.random.default_rng(11)

    def bind(self, layout: Layout) -> None:
        self.live: LiveWeights[Any] = self.loader.bind(layout)
        self.layout = layout

    def frames(self) -> range:
        return range(len(self.layout.frames))

    def schema_names(self) -> list[str]:
        return [spec.name for spec in self.layout.schema.tensors]

    # ------------------------------------------------------------------ changes; each moves `held` on

    def changes(self, operation: Operation) -> Iterator[tuple[int, Change]]:
        """A change of every frame."""
        return (self.change(frame, operation) for frame in self.frames())

    def change(self, frame: int, operation: Operation, share: float = 0.5) -> tuple[int, Change]:
        """New bits for a share of a frame's elements."""
        return self.change_at(frame, operation, np.flatnonzero(self._rng.random(self._numel(frame)) < share))

    def change_at(self, frame: int, operation: Operation, where: Any) -> tuple[int, Change]:
        """New bits [K] at given positions [K] of a frame."""
        positions: Positions = np.array(where, np.uint32)
        old = self.dense(frame)
        new = old.copy()
        new[positions] = any_bits(self._rng, self.layout.frames[frame].spec.dtype, (len(positions),))
        values = {
            Operation.OVERWRITE: new,
            Operation.XOR: new ^ old,
            Operation.STEP: new - old,
        }[operation]
        self._hold(frame, new)
        return frame, Change(operation, positions, values[positions])

    def whole(self, frame: int) -> tuple[int, Change]:
        """New bits for all elements of a frame."""
        new = any_bits(self._rng, self.layout.frames[frame].spec.dtype, (self._numel(frame),))
        self._hold(frame, new)
        return frame, Change(Operation.OVERWRITE, None, new)

    def prepare(self, *changes: tuple[int, Change]) -> list[Ready]:
        return [self.live.prepare(frame, change) for frame, change in changes]

    def refit(self, *changes: tuple[int, Change]) -> None:
        """Everything prepared, then everything installed."""
        for ready in self.prepare(*changes):
            self.live.install(ready)
        self.loader.finalize()

    def dense(self, frame: int) -> Bits:
        """The bits [N] of a frame that the engine should hold."""
        bits: Bits = np.concatenate([self.held[name][first:end] for name, first, end in self._runs(frame)])
        return bits

    # ------------------------------------------------------------------ comparisons

    def require_held(self, what: str) -> None:
        """Memory holds what it should: every weight, and all else as before."""
        _require_same(self._raw(), self._before | {name: bits.tobytes() for name, bits in self.held.items()}, what)

    def require_unwritten(self, what: str) -> None:
        """Memory holds what it held at first."""
        _require_same(self._raw(), self._before, what)

    def require_digest(self, when: str) -> None:
        """The loader's digest is the sum over what should be held."""
        found = self.live.digest()
        wanted = np.zeros_like(found)
        for tensor, (spec, key) in enumerate(self._keyed()):
            bits = self.held[spec.name]
            wanted[tensor] = _mixed(key, np.arange(len(bits)), bits)
        wrong = [spec.name for index, (spec, _) in enumerate(self._keyed()) if (found[index] != wanted[index]).any()]
        assert not wrong, f"{when}, the digest of {', '.join(wrong)} is not the reference's"

    def require_sums(self, what: str, found: Lanes, frame: int, positions: Positions, dense: Bits) -> None:
        """Sums [tensors of the frame, 2] are those of some elements [K] of a frame that holds `dense` [N]."""
        names, index = self._canonical(frame)
        keyed = {spec.name: key for spec, key in self._keyed()}
        for row, tensor in enumerate(self.layout.frames[frame].tensors):
            name = self.schema_names()[tensor]
            own = positions[names[positions] == name]
            wanted = _mixed(keyed[name], index[own], dense[own])
            assert np.array_equal(found[row], wanted), f"the sum of {what} bits of {name} is not the reference's"

    # ------------------------------------------------------------------

    def _numel(self, frame: int) -> int:
        return self.layout.frames[frame].numel

    def _runs(self, frame: int) -> Iterator[tuple[str, int, int]]:
        """The canonical runs of a frame in numbering order: tensor, first element, end."""
        one: Frame = self.layout.frames[frame]
        for region in one.spec.regions:
            for first, length in region.runs().tolist():
                yield self.layout.schema.tensors[region.tensor].name, first, first + length

    def _hold(self, frame: int, new: Bits) -> None:
        at = 0
        for name, first, end in self._runs(frame):
            self.held[name][first:end] = new[at : at + end - first]
            at += end - first

    def _canonical(self, frame: int) -> tuple[Any, Any]:
        """The tensor's name [N] and the canonical index [N] of each element of a frame."""
        runs = list(self._runs(frame))
        names = np.concatenate([np.full(end - first, name, object) for name, first, end in runs])
        return names, np.concatenate([np.arange(first, end) for _, first, end in runs])

    def _keyed(self) -> Iterator[tuple[TensorSpec, Lanes]]:
        return zip(self.layout.schema.tensors, keys(self.layout.schema.tensors), strict=True)


def layout_of(weights: Mapping[str, Weight], frame_elems: int = 7) -> Layout:
    """The layout of a trainer that publishes these weights, in frames of so many elements."""
    specs = tuple(TensorSpec(name, weight.dtype, weight.bits.shape) for name, weight in weights.items())
    dense = [boxes.whole(spec.shape, boxes.row_major(spec.shape)) for spec in specs]
    shards = [Shard(index, index, box) for index, box in enumerate(dense)]
    schema = Schema(specs)
    return Layout(schema, tuple(one.spec for one in frames.plan(schema, shards, frame_elems)))


def any_bits(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Bits:
    """Any bits; a bool has only two."""
    count, width = int(np.prod(shape)), WIDTHS[dtype]
    octets = np.frombuffer(rng.bytes(width * count), UNSIGNED[width])
    bits: Bits = (octets & octets.dtype.type(1) if dtype == "bool" else octets).reshape(shape).copy()
    return bits


def _mixed(key: Lanes, index: Any, bits: Bits) -> Any:
    return reference.mix(key, index.astype(np.uint64), bits.astype(np.uint64))


def _require_same(found: Mapping[str, bytes], expected: Mapping[str, bytes], what: str) -> None:
    assert found.keys() == expected.keys(), f"after {what}, memory has {sorted(found)}, not {sorted(expected)}"
    for name, wanted in expected.items():
        if found[name] != wanted:
            octets = [np.frombuffer(one, np.uint8) for one in (found[name], wanted)]
            assert len(octets[0]) == len(octets[1]), f"after {what}, {name} has another size"
            wrong = np.flatnonzero(octets[0] != octets[1])
            raise AssertionError(f"after {what}, {len(wrong)} bytes of {name} are wrong, first number {wrong[0]}")
