"""The baseline: the trainer's copy of the last committed canonical bits, and what lies over it.

A version in flight is an overlay of patches. The baseline moves only after the head did (`fold`); giving a version up
drops the overlay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from dcr import kernels
from dcr.codecs.patch import Patch
from dcr.errors import StateError
from dcr.layout.frames import Layout
from dcr.layout.views import Bits, Lanes
from dcr.memory.placement import canonical_table
from dcr.protocol import digest
from dcr.protocol.wire import Identity


class Baseline:
    """Committed bits per frame, their digest, and the overlay of the version in flight. Not thread-safe.

    Frames that another rank owns are never held here; `lanes` sums over those that are.

    identity: the version whose bits these are; None before the first commit, when frames are empty.
    lanes: digest uint64 [T, 2] of those bits.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.identity: Identity | None = None
        self.lanes: Lanes = digest.zero(len(layout.schema.tensors))
        self._frames: list[Bits | None] = [None] * len(layout.frames)
        self._overlay: dict[int, Patch] = {}

    def base(self, frame: int) -> Bits | None:
        """The committed bits [N] of a frame, borrowed until the next `fold`."""
        return self._frames[frame]

    def adopt(self, frames: Mapping[int, Bits], identity: Identity, lanes: Lanes) -> None:
        """Take bits of frames, and their digest, that are known to be those of a committed version."""
        self._frames = [frames.get(frame) for frame in range(len(self._frames))]
        self.identity, self.lanes = identity, lanes
        self._overlay.clear()

    def clear(self) -> None:
        """Forget all bits: the next version is an anchor."""
        self._frames, self.identity = [None] * len(self._frames), None
        self.lanes = digest.zero(len(self.lanes))
        self._overlay.clear()

    def hold(self, patch: Patch) -> None:
        """Add to the overlay, before a byte of it leaves."""
        if patch.frame.index in self._overlay:
            raise StateError(
                f"frame {patch.frame.index} was captured twice in one version; feed each frame to construct once"
            )
        self._overlay[patch.frame.index] = patch

    def held(self, frame: int) -> Patch | None:
        """The overlay's patch of a frame, to send it again; None if the version in flight does not touch it."""
        return self._overlay.get(frame)

    def patches(self) -> Iterator[Patch]:
        """The overlay, in frame order."""
        return (self._overlay[frame] for frame in sorted(self._overlay))

    def target(self) -> tuple[Lanes, Lanes]:
        """Digests [T, 2]: of the bits with the overlay applied; and of the old bits that the overlay replaces."""
        lanes, touched = self.lanes.copy(), np.zeros_like(self.lanes)
        for patch in self._overlay.values():
            tensors = list(patch.frame.tensors)
            touched[tensors] += patch.old_sums
            lanes[tensors] += patch.new_sums - patch.old_sums
        return lanes, touched

    def rescan(self) -> Lanes:
        """Digest [T, 2] of the committed bits, recomputed from memory. Runs in a worker thread."""
        lanes = digest.zero(len(self.layout.schema.tensors))
        for frame, bits in zip(self.layout.frames, self._frames, strict=True):
            if bits is not None:
                lanes[list(frame.tensors)] += kernels.digest(canonical_table(frame, bits), frame.keys)
        return lanes

    def drop(self) -> None:
        """Give the version in flight up."""
        self._overlay.clear()

    def fold(self, identity: Identity) -> None:
        """The head names `identity`: move the baseline to it, from the overlay's absolute bits. In a worker thread."""
        self.lanes, _ = self.target()
        for frame, patch in self._overlay.items():
            base = self._frames[frame]
            if base is None or patch.positions is None:
                self._frames[frame] = patch.bits
            else:
                kernels.scatter(canonical_table(patch.frame, base), patch.positions, patch.bits)
        self.identity = identity
        self._overlay = {}
