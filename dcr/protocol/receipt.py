"""What a member has received of one attempt, and whether that is whole. No IO, no clock."""

from __future__ import annotations

from collections.abc import Mapping

from dcr.errors import BaseMismatch, IncompleteError, PayloadError, RunMismatch
from dcr.protocol.wire import Chunk, ChunkRef, Identity, Open, Seal


class Receipt:
    """What a member has of one attempt; complete when it holds exactly what the seal lists.

    holds: the version that its live memory holds, or None.

    Raises:
        RunMismatch: another run, or a term below the head's. BaseMismatch: a delta from a version not held.
    """

    def __init__(self, opened: Open, *, run: str, term: int, holds: Identity | None) -> None:
        identity = opened.identity
        if identity.run != run:
            raise RunMismatch(f"expected run {run}, found {identity.run}: check that both ends use one URL")
        if identity.term < term:
            raise RunMismatch(f"{identity} is of a superseded publisher: the head is at term {term}; stop the old one")
        if opened.base is not None and opened.base != holds:
            raise BaseMismatch(f"{identity} starts from {opened.base}, this member holds {holds or 'nothing'}")
        if holds is not None and identity.version <= holds.version:
            raise BaseMismatch(f"{identity} is not newer than {holds}, which is held")
        self.identity = identity
        self.base = opened.base
        self._chunks: dict[int, Chunk] = {}
        self._seal: Seal | None = None

    def chunk(self, chunk: Chunk) -> bool:
        """Take note of a verified chunk; False if it was held already (a duplicate is harmless).

        Raises:
            RunMismatch: of another attempt. PayloadError: unlike one received or sealed.
        """
        self._same(chunk.identity)
        held = self._chunks.get(chunk.frame)
        if held is not None and held.digest != chunk.digest:
            raise PayloadError(f"{self.identity}: two different chunks for frame {chunk.frame}")
        if self._seal is not None:
            require_sealed(chunk, {ref.frame: ref for ref in self._seal.chunks})
        self._chunks[chunk.frame] = chunk
        return held is None

    def seal(self, seal: Seal) -> None:
        """Take note of the seal.

        Raises:
            RunMismatch: of another attempt. PayloadError: it lists other chunks than those received.
        """
        self._same(seal.identity)
        if seal.base != self.base:
            raise PayloadError(f"{self.identity}: its seal starts from {seal.base}, its opening from {self.base}")
        if len({ref.frame for ref in seal.chunks}) != len(seal.chunks):
            raise PayloadError(f"{self.identity}: its seal lists a frame twice")
        sealed = {ref.frame: ref for ref in seal.chunks}
        for chunk in self._chunks.values():
            require_sealed(chunk, sealed)
        self._seal = seal

    @property
    def missing(self) -> frozenset[int] | None:
        """Frames that the seal lists and that have not come; None before the seal."""
        return None if self._seal is None else frozenset(ref.frame for ref in self._seal.chunks) - self._chunks.keys()

    @property
    def complete(self) -> bool:
        return self.missing == frozenset()

    def require_complete(self) -> Seal:
        """The seal.

        Raises:
            IncompleteError: there is none, or chunks that it lists are missing; names them.
        """
        if self._seal is None:
            raise IncompleteError(f"{self.identity}: the link closed before the seal; {len(self._chunks)} chunks came")
        if missing := self.missing:
            raise IncompleteError(f"{self.identity}: the chunks of frames {sorted(missing)[:8]} are missing")
        return self._seal

    def _same(self, identity: Identity) -> None:
        if identity != self.identity:
            raise RunMismatch(
                f"expected {self.identity} of run {self.identity.run}, found {identity} of {identity.run}"
            )


def require_sealed(chunk: Chunk, sealed: Mapping[int, ChunkRef]) -> None:
    """A chunk is the one that the seal lists for its frame.

    Raises:
        PayloadError: it is another, or its frame is not listed.
    """
    ref = sealed.get(chunk.frame)
    if ref is None or (ref.digest, ref.content, ref.changed) != (chunk.digest, chunk.content, chunk.changed):
        raise PayloadError(f"{chunk.identity}: the chunk of frame {chunk.frame} is not the sealed one")
