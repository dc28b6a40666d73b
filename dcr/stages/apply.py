"""Apply: changes to absolute bits that are ready, and from there into live memory, with an undo."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from dcr import kernels
from dcr.codecs.patch import Operation
from dcr.errors import BaseMismatch, DigestMismatch, IncompleteError, PayloadError, Poisoned
from dcr.layout.frames import Layout
from dcr.layout.views import Lanes
from dcr.memory.placement import canonical_table
from dcr.pipeline import Inbox, Outbox, serve
from dcr.protocol import digest
from dcr.protocol.wire import Message, Seal
from dcr.seams import Batching, LiveWeights, Undoable
from dcr.stages.compress import Unpacked


class Prepare:
    """Changes in, ready frames out: old bits gathered, values absolute, sums compared. Writes nothing."""

    name = "prepare"
    workers = 1

    def __init__(self, weights: LiveWeights[Any]) -> None:
        self._weights = weights

    async def run(self, inbox: Inbox[Unpacked], outbox: Outbox[Undoable]) -> None:
        """See `dcr.seams.Stage`."""
        await serve(inbox, outbox, self.prepare)

    def prepare(self, unpacked: Unpacked) -> Undoable:
        """One frame, ready.

        Raises:
            BaseMismatch: live memory does not hold the bits that the change starts from.
            PayloadError: the decoded bits are not those that were sealed.
        """
        ready: Undoable = self._weights.prepare(unpacked.chunk.frame, unpacked.change)
        check_content(unpacked, ready)
        return ready


class Write:
    """Ready frames in, written frames out: for a member that is being seeded, which has no undo."""

    name = "write"
    workers = 1

    def __init__(self, weights: LiveWeights[Any]) -> None:
        self._weights = weights

    async def run(self, inbox: Inbox[Undoable], outbox: Outbox[int]) -> None:
        """See `dcr.seams.Stage`."""
        await serve(inbox, outbox, self.write)

    def write(self, ready: Undoable) -> int:
        """Write one frame and read it back; its number."""
        self._weights.install(ready)
        return ready.frame


class Inspect:
    """Changes of an anchor in; their digest is summed up and they are let go."""

    name = "inspect"
    workers = 1

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._lanes = digest.zero(len(layout.schema.tensors))
        self._frames: set[int] = set()

    async def run(self, inbox: Inbox[Unpacked], outbox: Outbox[int]) -> None:
        """See `dcr.seams.Stage`."""
        await serve(inbox, outbox, self.inspect)

    def inspect(self, unpacked: Unpacked) -> int:
        """Digest one frame; its number.

        Raises:
            PayloadError: it is not dense, or its bits are not those that were sealed.
        """
        frame = self._layout.frames[unpacked.chunk.frame]
        if unpacked.change.positions is not None:
            raise PayloadError(f"{unpacked.chunk.identity}: frame {frame.index} of an anchor is not complete")
        sums = kernels.digest(canonical_table(frame, unpacked.change.values), frame.keys)
        if digest.total(sums) != unpacked.chunk.content:
            raise PayloadError(f"{unpacked.chunk.identity}: frame {frame.index} decodes to other bits than were sealed")
        self._lanes[list(frame.tensors)] += sums
        self._frames.add(frame.index)
        return frame.index

    def verify(self, sealed: Message) -> Lanes:
        """Compare with the seal; the target digest. Raises as `verify`."""
        seal = sealed.header
        assert isinstance(seal, Seal)
        _, target, _ = sealed_digests(seal, sealed.body, self._layout)
        _require_all(seal, self._layout, self._frames)
        digest.require_equal(self._lanes, target, self._layout.schema, f"{seal.identity}: fetched and sealed digests")
        return target


def check_content(unpacked: Unpacked, ready: Undoable) -> None:
    """Compare the absolute bits with the chunk's content digest; raises as `Prepare.prepare`."""
    chunk = unpacked.chunk
    if digest.total(ready.new_sums) == chunk.content:
        return
    if unpacked.change.operation is Operation.OVERWRITE and not unpacked.from_base:
        raise PayloadError(f"{chunk.identity}: frame {chunk.frame} decodes to other bits than were sealed")
    raise BaseMismatch(f"{chunk.identity}: frame {chunk.frame} does not start from the bits that live memory holds")


def sealed_digests(seal: Seal, body: bytes, layout: Layout) -> tuple[Lanes, Lanes, Lanes]:
    """Base, target and touched-old digests [T, 2] of a seal.

    Raises:
        PayloadError: the body does not fit the layout, or the roots in the seal.
    """
    tensors = len(layout.schema.tensors)
    if len(body) != 3 * 16 * tensors:
        raise PayloadError(f"{seal.identity}: its seal has {len(body)} bytes of digests, {48 * tensors} were expected")
    base, target, touched = np.split(digest.unpack(body), 3)
    if digest.root(base) != seal.base_root or digest.root(target) != seal.root:
        raise PayloadError(f"{seal.identity}: the digests in its seal do not match their roots")
    return base, target, touched


def verify(sealed: Message, layout: Layout, held: Lanes, readies: Iterable[Undoable]) -> Lanes:
    """Before a vote: that what is ready leads from the bits held here to those sealed. Returns the target digest.

    held: digest [T, 2] of live memory.

    Raises:
        IncompleteError: an anchor without some frame. BaseMismatch: other old bits. DigestMismatch: other new bits.
    """
    seal = sealed.header
    assert isinstance(seal, Seal)
    base, target, touched = sealed_digests(seal, sealed.body, layout)
    old, reached, frames = np.zeros_like(held), held.copy(), set[int]()
    for ready in readies:
        tensors = list(layout.frames[ready.frame].tensors)
        old[tensors] += ready.old_sums
        reached[tensors] += ready.new_sums - ready.old_sums
        frames.add(ready.frame)
        if seal.base is not None and not ready.copies_agree:
            raise BaseMismatch(f"{seal.identity}: two copies of a tensor in frame {ready.frame} differ in live memory")
    if seal.base is not None:
        require_base(seal, layout, held=held, base=base, old=old, touched=touched)
    else:
        _require_all(seal, layout, frames)
    digest.require_equal(reached, target, layout.schema, f"{seal.identity}: prepared and sealed digests")
    return target


def verify_chain(seals: Sequence[Message], layout: Layout, held: Lanes, readies: Iterable[Undoable]) -> Lanes:
    """Before a chain of deltas is offered as one: that each starts where the one before it ends, the first from the
    bits held here, and that what is ready leads to the last. Returns the target digest.

    Raises:
        BaseMismatch: other old bits. DigestMismatch: other new bits, or a link that does not fit the one before it.
    """
    at, reached, last = held, held.copy(), ""
    for sealed in seals:
        seal = sealed.header
        assert isinstance(seal, Seal)
        base, target, _ = sealed_digests(seal, sealed.body, layout)
        what = f"{seal.identity}: {f'what {last} leads to' if last else 'held'} and base digests"
        digest.require_equal(at, base, layout.schema, what)
        at, last = target, str(seal.identity)
    for ready in readies:
        if not ready.copies_agree:
            raise BaseMismatch(f"two copies of a tensor in frame {ready.frame} differ in live memory")
        reached[list(layout.frames[ready.frame].tensors)] += ready.new_sums - ready.old_sums
    digest.require_equal(reached, at, layout.schema, f"{last}: prepared and sealed digests")
    return at


def _require_all(seal: Seal, layout: Layout, frames: set[int]) -> None:
    if missing := set(range(len(layout.frames))) - frames:
        raise IncompleteError(f"{seal.identity}: an anchor without frames {sorted(missing)[:8]}")


def require_base(seal: Seal, layout: Layout, *, held: Lanes, base: Lanes, old: Lanes, touched: Lanes) -> None:
    """A delta stands on the bits held here: on their digest, and on the sums of those that it touches.

    Raises:
        BaseMismatch: it does not; names the tensors that differ.
    """
    try:
        digest.require_equal(held, base, layout.schema, f"{seal.identity}: held and base digests")
        digest.require_equal(old, touched, layout.schema, f"{seal.identity}: sums of touched old bits")
    except DigestMismatch as error:
        raise BaseMismatch(str(error)) from None


def install(weights: LiveWeights[Any], readies: Sequence[Undoable], finalize: Callable[[], None]) -> float:
    """Write everything that is ready and read it back; what fails half-way is undone. Runs in one worker thread.

    finalize: brings what is made of the weights up to date, once they are written, or undone. Returns the seconds from
    the first write until it has.

    Raises:
        Exception: what went wrong; live memory is as before.
        Poisoned: it went wrong and could not be undone.
    """
    begun: list[Undoable] = []
    began_s = time.monotonic()
    try:
        if isinstance(weights, Batching):
            begun += readies
            weights.install_all(readies)
        else:
            for ready in readies:
                begun.append(ready)
                weights.install(ready)
        finalize()
    except BaseException as error:
        undo(weights, begun, finalize, error)
        raise
    return time.monotonic() - began_s


def undo(
    weights: LiveWeights[Any], begun: Sequence[Undoable], finalize: Callable[[], None], cause: BaseException
) -> None:
    """Write the old bits back over every frame whose installation has begun, last first.

    Raises:
        Poisoned: that failed as well.
    """
    try:
        for ready in reversed(begun):
            weights.undo(ready)
        finalize()
    except BaseException as error:
        error.add_note(f"while undoing an installation that failed with {cause!r}")
        raise Poisoned(
            "an installation failed and could not be undone: live memory may hold half a version; "
            "do not serve, the next version offered seeds it anew"
        ) from error
