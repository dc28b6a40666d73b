"""Loaders, found through the entry-point group dcr.loaders, bind an engine's live weights to a layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from dcr.codecs.patch import Change
from dcr.layout.frames import Layout, Region
from dcr.layout.views import Bits, Lanes


class Undoable(Protocol):
    """One frame that a loader has prepared: all that is left is to write it.

    old_sums, new_sums: digest sums [tensors of the frame, 2] over the elements that the change names.
    copies_agree: False if a copy of some element held other old bits than the first.
    """

    @property
    def frame(self) -> int: ...

    @property
    def number(self) -> int:
        """Its frame's number: what events say of it."""
        ...

    @property
    def changed(self) -> int:
        """Elements that will be written."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes."""
        ...

    @property
    def old_sums(self) -> Lanes: ...

    @property
    def new_sums(self) -> Lanes: ...

    @property
    def copies_agree(self) -> bool: ...


class RankReady(Undoable, Protocol):
    """The share of one rank in a frame. Its sums are [parts of the frame that it holds, 2].

    parts: which parts the sums are of, as indices into `RankWeights.parts`.
    """

    @property
    def parts(self) -> Sequence[int]: ...


Frame = TypeVar("Frame", bound=Undoable)
Share = TypeVar("Share", bound=RankReady)


class LiveWeights(Protocol[Frame]):
    """A member's weights, bound to a layout. Calls run in worker threads, one at a time, but for `read`."""

    def prepare(self, frame: int, change: Change) -> Frame:
        """Read the old bits of what will be touched and resolve the change to absolute bits. Writes nothing.

        One version may have several changes of a frame, of disjoint elements; all are prepared before any is installed.
        """
        ...

    def install(self, ready: Frame) -> None:
        """Write absolute bits and read them back.

        Raises:
            ReadBackError: memory does not hold what was written.
        """
        ...

    def undo(self, ready: Frame) -> None:
        """Write the old bits back, and read them back.

        Raises:
            ReadBackError: as for install.
        """
        ...

    def digest(self) -> Lanes:
        """Digest uint64 [T, 2] of the layout's tensors, recomputed from memory.

        Raises:
            DigestMismatch: copies of one tensor differ.
        """
        ...


class RankWeights(LiveWeights[Share], Protocol[Share]):
    """The weights of one rank of several; `prepare` leaves out what lies on other ranks.

    parts: the regions that this rank holds, each all of it; two parts share no element. `digest` is uint64 [parts, 2]:
    of each part, under the key of its tensor.
    """

    @property
    def parts(self) -> Sequence[Region]: ...


class Loader(Protocol):
    """Binds an engine's weights to a layout. Calls run in worker threads, one at a time.

    Where it is one of several ranks, which `dcr.engines.ranks.Ranks` joins, `bind` returns `RankWeights`.
    """

    def bind(self, layout: Layout) -> LiveWeights[Any]:
        """Fix where each frame's elements go. Called once per layout, before anything else, mutates no weight.

        Raises:
            SchemaError: a published tensor has no place here, a weight here is not published, or dtypes differ.
        """
        ...

    def fingerprint(self) -> bytes:
        """A fingerprint of the storages of all weights; when it changes, what was bound is no longer true."""
        ...

    def finalize(self) -> None:
        """Run the post-load steps, after the last install or undo of a version: make anew what is made of the weights.

        Raises: whatever goes wrong; the frames are then undone, and this is called again.
        """
        ...


@runtime_checkable
class Readable(Protocol):
    """What a loader has besides if the weights that it binds can be read a frame at a time (`FrameReader`).

    reads_base: True. Chunks that need their base reach such members only.
    """

    @property
    def reads_base(self) -> bool: ...


class FrameReader(Protocol):
    """Live weights that can be read a frame at a time."""

    def read(self, frame: int) -> Bits:
        """The bits [N] of a frame in live memory, in the frame's own numbering. May run beside other calls."""
        ...


@runtime_checkable
class Batching(Protocol):
    """What live weights have besides if many frames in one call are faster than one by one: a round trip each."""

    def install_all(self, readies: Sequence[Any]) -> None:
        """As `LiveWeights.install` for each of them, in order; after an error any may be written."""
        ...


@runtime_checkable
class Watching(Protocol):
    """What a loader has besides if it sees what others do to its weights: a sleep of the engine, a reload."""

    def mark(self) -> bytes:
        """A mark that is another one whenever somebody else may have written the weights since."""
        ...

    def require_awake(self) -> None:
        """The weights may be written now.

        Raises:
            StateError: the engine sleeps, so that what is written would be lost.
        """
        ...


class Engine(Protocol):
    """An engine that generates beside its weights. Its calls are awaited in the event loop of the subscriber."""

    async def pause(self) -> None:
        """Stop generating. Pauses nest: it goes on when it has been resumed as often."""
        ...

    async def resume(self) -> None:
        """Go on generating, unless somebody else has paused it."""
        ...

    async def flush(self) -> None:
        """Drop what was computed with weights that are no more, before it goes on.

        Raises: whatever goes wrong; what was computed with old weights may still be used then.
        """
        ...

    async def label(self, version: int) -> None:
        """Show the version that live memory holds: once it is recognised, installed, or held again by an undo.

        While it is paused it may show it when it is resumed.
        """
        ...


@runtime_checkable
class Serving(Protocol):
    """What a loader has besides if its engine generates: it is paused while it is bound, and labelled."""

    @property
    def engine(self) -> Engine: ...


@runtime_checkable
class Releasing(Protocol):
    """What a loader has besides if binding takes what others then have to do without, a lock for instance."""

    def release(self) -> None:
        """Give it back: the member that it was bound for has left. The next `bind` takes it anew."""
        ...
