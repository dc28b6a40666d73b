"""How changes become bytes: codecs, found through the entry-point group dcr.codecs by the name that chunks carry."""

from __future__ import annotations

from typing import Protocol

from dcr.codecs.patch import Change, Operation
from dcr.layout.views import Bits


class Codec(Protocol):
    """A change of one frame, to bytes and back. Pure. One that needs the base is a `BasedCodec`."""

    @property
    def name(self) -> str:
        """What the chunk header says; a receiver finds the codec by it."""
        ...

    @property
    def needs_base(self) -> bool:
        """True if decoding needs the frame's old bits."""
        ...

    def encode(self, change: Change, numel: int) -> bytes:
        """Bytes of a change of a frame of numel elements."""
        ...

    def decode(self, body: bytes, *, operation: Operation, changed: int, numel: int, width: int) -> Change:
        """The inverse.

        Raises:
            PayloadError: the body does not decode to `changed` values within the frame.
        """
        ...


class BasedCodec(Protocol):
    """As `Codec`, for chunks that mean something only beside the frame's old bits: needs_base is True.

    It is used between ends that both hold them; a frame without a base, or a dense change, goes by another codec.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs_base(self) -> bool: ...

    def encode(self, change: Change, numel: int, *, base: Bits) -> bytes:
        """Bytes of a change of a frame whose old bits are base [N]."""
        ...

    def decode(self, body: bytes, *, operation: Operation, changed: int, numel: int, width: int, base: Bits) -> Change:
        """The inverse.

        Raises:
            PayloadError: the body does not decode to `changed` values within the frame.
            BaseMismatch: it does not fit these old bits.
        """
        ...
