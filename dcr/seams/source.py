"""A trainer's weights: sources, found through the entry-point group dcr.sources; and the ranks of a publisher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from dcr.layout.frames import Shard
from dcr.layout.schema import Schema
from dcr.layout.views import Bits, Lanes


class Residual(Protocol):
    """Tensors without a map: their export does arithmetic, so it has to run; one group, exported together."""

    @property
    def tensors(self) -> Sequence[int]:
        """The group, as indices into the schema."""
        ...

    @property
    def reason(self) -> str:
        """Why they have no map, for the report."""
        ...

    @property
    def owned(self) -> bool:
        """Whether this rank publishes them: true on one rank."""
        ...

    def fingerprint(self) -> bytes:
        """A digest of the bits, on this rank, that the export reads; if it stays on all ranks, so does the result."""
        ...

    def convert(self) -> Sequence[Bits | None] | None:
        """Run the export of this group: canonical bits, flat and unsigned, one array per tensor.

        None for what this rank does not make; who owns the group makes all of it. What several ranks make is compared,
        and the owner's is published. It may be collective: once any rank's fingerprint changed, every rank calls it,
        group by group in one order.
        """
        ...


class Copy(msgspec.Struct, frozen=True):
    """This rank's copy of regions that other ranks hold as well, and each publishes in part.

    key: names these regions and their holders, alike on all of them. shards: the regions, in one order on all.
    """

    key: bytes
    shards: tuple[Shard, ...]


class Twins(msgspec.Struct, frozen=True):
    """Regions that this rank holds twice, and publishes as one: names of the two tensors, and the shards of either."""

    names: tuple[str, str]
    one: tuple[Shard, ...]
    other: tuple[Shard, ...]


class Replicated(Protocol):
    """What a source says besides where elements have several homes: they are compared before each version."""

    @property
    def copies(self) -> Sequence[Copy]: ...

    @property
    def twins(self) -> Sequence[Twins]: ...


class Source(Protocol):
    """A trainer rank's weights: schema, shard map, and integer views of its storages.

    The schema is the whole model's and the same on all ranks. Shards are those that this rank owns: over all ranks they
    and the residual groups hold each canonical element once. All ranks list the same groups in the same order.
    """

    @property
    def schema(self) -> Schema: ...

    @property
    def shards(self) -> Sequence[Shard]:
        """The shard map; Shard.storage indexes `storages()`."""
        ...

    @property
    def residual(self) -> Sequence[Residual]:
        """What has no map. Often empty."""
        ...

    def storages(self) -> Sequence[Bits]:
        """The live storages, as flat unsigned arrays, borrowed for one capture: hold the sequence until its end.

        Called before each version, in a thread: what moved is looked up again. Arrays that stayed are the same objects.

        Raises:
            StorageRebound: a weight is no longer what the shard map says.
        """
        ...


class Group(Protocol):
    """The ranks of one publisher. Every rank makes the same calls in the same order, one at a time.

    A call that fails, or is cancelled, ends the group: its members can no longer know what the others know.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    async def gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, in rank order, on every rank. Sizes may differ.

        Raises: anything, if a rank is lost or does not come in time.
        """
        ...

    async def add(self, lanes: Lanes) -> Lanes:
        """The sum over ranks of uint64 arrays of one shape, wrapping around, on every rank.

        Raises: as `gather`.
        """
        ...
