"""What one engine rank has fetched and verified and not written yet, and how it reads an attempt's messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from dcr import plugins
from dcr.errors import IncompleteError, PayloadError
from dcr.layout.views import Lanes
from dcr.protocol.wire import Chunk, Identity, Message
from dcr.seams import BasedCodec, Codec, Undoable
from dcr.stages.compose import Union

Receive = Callable[[], Awaitable[Message]]
AskAgain = Callable[[Chunk, PayloadError], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a member votes for: the digest it will have, and all that must be written to get there."""

    identity: Identity
    root: bytes
    target: Lanes
    readies: list[Undoable]

    @property
    def changed(self) -> int:
        """Elements that will be written."""
        return sum(ready.changed for ready in self.readies)


@dataclass(frozen=True, slots=True)
class Seed:
    """A whole version, fetched and verified, to be written over whatever live memory holds.

    anchor: where live memory differs from an anchor. deltas: what those after it change, which can be prepared once the
    anchor is written; None if there are none. seals: of the deltas.
    """

    identity: Identity
    root: bytes
    anchor: Prepared
    deltas: Union | None
    seals: Sequence[Message]


class Overfull(Exception):
    """What is to be prepared would take more memory than the model."""


def reader(messages: AsyncIterator[Message], identity: Identity) -> Receive:
    """The messages of a stored attempt, one at a time."""

    async def receive() -> Message:
        try:
            return await anext(messages)
        except StopAsyncIteration:
            raise IncompleteError(f"{identity}: the store ended before the attempt was complete") from None

    return receive


def find_codec(name: str) -> Codec | BasedCodec:
    """An installed codec."""
    codec: Codec | BasedCodec = plugins.load("dcr.codecs", name)
    return codec
