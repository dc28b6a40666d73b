"""Whether an engine's memory may be written: a mapping that may only be read ends the process at the first write."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dcr.errors import LayoutError
from dcr.layout.views import Bits

MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class Extent:
    """The memory of one tensor: its name, and the addresses of its first byte and of the one after its last."""

    name: str
    start: int
    stop: int


def extent_of(name: str, memory: Bits) -> Extent:
    """The memory under a flat array."""
    start = int(memory.__array_interface__["data"][0])
    return Extent(name, start, start + memory.nbytes)


def require_writable(extents: Iterable[Extent], maps: Path = MAPS) -> None:
    """Check that memory may be written, as the system's list of mappings says; without such a list nothing is said.

    The list is read once, in one pass.

    Raises:
        LayoutError: some of it may only be read; names the tensor and the file.
    """
    locked = _locked(maps)
    starts = [first for first, _, _ in locked]
    for extent in extents:
        # the last mapping that begins before the memory ends is the only one that can reach into it from the left
        at = bisect_right(starts, extent.stop - 1) - 1
        if extent.stop > extent.start and at >= 0 and locked[at][1] > extent.start:
            raise LayoutError(
                f"{extent.name} lies in memory that may only be read ({locked[at][2] or 'an anonymous mapping'}), so "
                "no version can be installed there; copy it first (tensor.data = tensor.clone()), or load the "
                "weights without mapping their file"
            )


def _locked(maps: Path) -> list[tuple[int, int, str]]:
    """Mappings that may not be written, by ascending address: the first byte, the one after the last, the file."""
    try:
        lines = maps.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    locked = []
    for line in lines:
        span, permissions, _, _, _, *file = line.split(None, 5)
        if "w" not in permissions:
            first, _, last = span.partition("-")
            locked.append((int(first, 16), int(last, 16), ascii(file[0])[1:-1] if file else ""))
    return locked
