"""An engine's weights: loaders, found through the entry-point group dcr.loaders, of one rank or of one of several."""

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

    parts: which parts the sums are of, as indices into what `RankLoader.bind` returned.
    """

    @property
    def parts(self) -> Sequence[int]: ...


Frame = TypeVar("Frame", bound=Undoable)
Share = TypeVar("Share", bound=RankReady)


class Loader(Protocol[Frame]):
    """A member's weights, seen by what can be done to them. Calls run in worker threads, one at a time."""

    def bind(self, layout: Layout) -> None:
        """Fix where each frame's elements go. Called once per layout, before anything else, mutates no weight.

        Raises:
            SchemaError: a published tensor has no place here, a weight here is not published, or dtypes differ.
        """
        ...

    def epoch(self) -> bytes:
        """A fingerprint of where all weights lie; when it changes, what was bound is no longer true."""
        ...

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

    def settle(self) -> None:
        """After the last install or undo of a version: bring what is made of the weights up to date with them.

        Raises: whatever goes wrong; the frames are then undone, and this is called again.
        """
        ...

    def digest(self) -> Lanes:
        """Digest uint64 [T, 2] of the layout's tensors, recomputed from memory.

        Raises:
            DigestMismatch: copies of one tensor differ.
        """
        ...


@runtime_checkable
class Readable(Protocol):
    """What a loader has besides if it can read frames whole: only then do chunks reach it that need the base."""

    def read(self, frame: int) -> Bits:
        """The bits [N] of a frame in live memory, in the frame's own numbering. May run beside other calls."""
        ...


@runtime_checkable
class Batching(Protocol):
    """What a loader has besides if many frames in one call are faster than one after another: a round trip each."""

    def install_all(self, readies: Sequence[Any]) -> None:
        """As `Loader.install` for each of them, in order, but for settling; after an error any may be written."""
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


@runtime_checkable
class Labelling(Protocol):
    """What a loader has besides if its engine says which version makes what it generates."""

    def label(self, version: int) -> None:
        """Show the version that live memory holds: once it is recognised, installed, or held again by an undo."""
        ...


@runtime_checkable
class Releasing(Protocol):
    """What a loader has besides if binding takes what others then have to do without, a lock for instance."""

    def release(self) -> None:
        """Give it back: the member that it was bound for has left. The next `bind` takes it anew."""
        ...


class RankLoader(Protocol[Share]):
    """One of several ranks of a member, which `dcr.engines.ranks.Ranks` joins; as `Loader`, but for what it says here.

    A part is a region of one tensor that this rank holds, all of it; two of its parts share no element.
    """

    def bind(self, layout: Layout) -> Sequence[Region]:
        """See `Loader.bind`; the parts that this rank holds."""
        ...

    def epoch(self) -> bytes: ...

    def prepare(self, frame: int, change: Change) -> Share:
        """See `Loader.prepare`; what lies elsewhere is left out."""
        ...

    def install(self, ready: Share) -> None: ...

    def undo(self, ready: Share) -> None: ...

    def settle(self) -> None: ...

    def digest(self) -> Lanes:
        """Digest uint64 [parts, 2], recomputed from memory: of each part, under the key of its tensor.

        Raises:
            DigestMismatch: copies of one part differ within this rank.
        """
        ...
