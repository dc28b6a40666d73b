"""What kernels do: the verbs that each implementation has. No implementation here.

    B  rows of a table      N  elements of a table      K  changed elements      T  tensors      n  bytes of a stream

Each of the first group takes a table, so any number of tensors is one call, and makes one pass over memory. The second
group codes streams.

Bytes moved, with b bytes per stored element and c after the value map:

    read       N (b + c)                  gather     K (4 + b), and each cache line touched
    compare    N (b + c) + 2 K (4 + 2 c)  scatter    2 K (4 + b), and each cache line touched, both ways
    capture    as compare + K (4 + 2 c)
    digest     N b                        digest_at  K (4 + c)
    select     K 4 + K' 12              prepare    K (4 + 3 b), and each cache line touched

    gaps_of, positions_of    5 K          pack       2 n read, what it gives written
    symbols_of, values_of    K (1 + c)    unpack     what it takes + n
    split, merge             N c + 2 K (4 + c)
    planes_of, of_planes     2 N c                blake3     n
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dcr.kernels.reference import NONE
from dcr.kernels.streams import Octets
from dcr.layout.views import Bits, Lanes, Positions, Runs, Table


class Kernels(Protocol):
    """One implementation of all kernels."""

    def read(self, table: Table, kind: int = NONE) -> Bits:
        """The table's elements, dense, in numbering order: bits [N], after the value map.

        Raises:
            LayoutError: the table's rows do not fit its storages, or `kind` does not fit their width.
        """
        ...

    def compare(self, table: Table, base: Bits, kind: int = NONE) -> tuple[Positions, Bits]:
        """Positions [K] at which the table (after the value map) differs from base [N], and its new bits [K] there.

        Besides the result it allocates as much again, in blocks, and never anything of size N.

        Raises:
            LayoutError: as for `read`, or `base` is not N contiguous elements of the width after the value map.
        """
        ...

    def capture(
        self, table: Table, keys: Lanes, base: Bits, kind: int = NONE
    ) -> tuple[Positions, Bits, Bits, Lanes, Lanes]:
        """What differs from base [N]: positions [K], new and old bits [K], and the digest sums [T, 2] of new and old.

        The keys [T, 2] are indexed by column TENSOR. It allocates what `compare` does.

        Raises:
            LayoutError: as for `compare`, or a row names a tensor that has no key.
        """
        ...

    def gather(self, table: Table, positions: Positions) -> Bits:
        """The bits [K] at the given positions.

        Raises:
            LayoutError: as for `read`, or positions do not ascend strictly, or leave the table.
        """
        ...

    def prepare(
        self, table: Table, keys: Lanes, positions: Positions, values: Bits, operation: int
    ) -> tuple[Bits, Bits, Lanes, Lanes]:
        """What values [K] make of the bits at the given positions, before anything is written.

        operation: OVERWRITE, XOR or STEP. Returns the new and the old bits [K], and the digest sums [T, 2] of either;
        keys [T, 2] are indexed by column TENSOR.

        Raises:
            LayoutError: as for `gather`, or `values` differ in number or width, a row names a tensor that has no key,
                or there is no such operation.
        """
        ...

    def scatter(self, table: Table, positions: Positions, bits: Bits) -> int:
        """Write bits [K] at the given positions, read them back; the number of positions that do not hold their bits.

        Reading starts when all is written, so boxes that claim one element are noticed.

        Raises:
            LayoutError: as for `gather`, or `bits` differ in number or width, or a storage with rows is read-only.
                Nothing has been written.
        """
        ...

    def digest(self, table: Table, keys: Lanes, kind: int = NONE) -> Lanes:
        """Digest sums [T, 2] over all elements of a table; keys [T, 2] are indexed by column TENSOR.

        Raises:
            LayoutError: as for `read`, or a row names a tensor that has no key.
        """
        ...

    def digest_at(self, table: Table, keys: Lanes, positions: Positions, bits: Bits) -> Lanes:
        """Digest sums [T, 2] over given positions [K], as if they held bits [K], of any width; no storage is read.

        Raises:
            LayoutError: as for `gather`, or a row names a tensor that has no key.
        """
        ...

    def check_ascending(self, positions: Positions, numel: int) -> None:
        """Check positions [K].

        Raises:
            LayoutError: they do not ascend strictly, or leave a frame of N elements.
        """
        ...

    def select(self, positions: Positions, runs: Runs) -> tuple[Positions, Positions]:
        """Those positions [K] that lie in runs [R, 2] of (start, count): their indices [K'], and their numbers [K']
        counted over the runs one after another.

        Raises:
            LayoutError: positions do not ascend strictly, or runs do not ascend, overlap, or hold 2^32 elements or
                more.
        """
        ...

    def gaps_of(self, positions: Positions) -> Octets:
        """Byte gaps of ascending positions [K]: K bytes and one more for every full 255 of a gap.

        Raises:
            LayoutError: positions do not ascend strictly.
        """
        ...

    def positions_of(self, gaps: Octets, changed: int, numel: int) -> Positions:
        """The inverse of `gaps_of`: positions [K], ascending, below N.

        Raises:
            PayloadError: the stream does not hold `changed` gaps, ends within one, or leaves the frame.
        """
        ...

    def symbols_of(self, values: Bits) -> tuple[Octets, Bits]:
        """Step symbols [K] in a byte each, and the values that need an escape."""
        ...

    def values_of(self, symbols: Octets, exceptions: Octets, width: int) -> Bits:
        """The inverse of `symbols_of`: values [K]; exceptions are the bytes of the escaped ones.

        Raises:
            PayloadError: there are more or fewer exceptions than escapes.
        """
        ...

    def planes_of(self, values: Bits) -> Octets:
        """The bytes of elements [N] by significance: octets [width, N], lowest first."""
        ...

    def of_planes(self, planes: Sequence[Octets]) -> Bits:
        """The inverse of `planes_of`: elements [N] of as many bytes as there are planes [N]."""
        ...

    def pack(self, data: Octets) -> Octets:
        """A stream [n], Huffman-coded; nothing where that saves less than a fiftieth of it."""
        ...

    def unpack(self, packed: Octets, size: int) -> Octets:
        """The inverse of `pack`: a stream [size].

        Raises:
            PayloadError: the bytes are not a complete code and four bit streams that end with the last symbol; nothing
                is allocated that they cannot hold.
        """
        ...

    def blake3(self, data: bytes | memoryview) -> bytes:
        """The BLAKE3 hash (32 bytes) of bytes [n]."""
        ...

    def split(self, base: Bits, cuts: Octets, positions: Positions, values: Bits) -> tuple[Positions, Bits, list[int]]:
        """A change [K] by class of its old bits [N]: numbers within the class, values, and how many there are of each.

        Raises:
            LayoutError: positions do not ascend strictly, or leave the frame, or cuts do not ascend.
        """
        ...

    def merge(
        self, base: Bits, cuts: Octets, counts: Sequence[int], ranks: Positions, values: Bits
    ) -> tuple[Positions, Bits]:
        """The inverse of `split`: positions [K], ascending, and values [K].

        Raises:
            BaseMismatch: base has no such elements.
        """
        ...
