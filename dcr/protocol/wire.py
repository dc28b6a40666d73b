"""What crosses a link: typed messages with a bounded header; bulk bytes follow the header, never inside it.

    prefix   magic 4 bytes | header size u32 | body size u64 | crc32 of header u32      (little-endian)
    header   one msgpack-encoded message
    body     for Open the layout, for Chunk the encoded change, for Seal three digests per tensor; else empty

A reader is fed bytes as they come and checks every size before it allocates. The crc finds accidents in headers;
bodies are bound by the digests in Chunk and Seal.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Literal

import msgspec

from dcr import kernels
from dcr.errors import IncompleteError, PayloadError, WireError

MAGIC = b"DCR\x01"
PREFIX = struct.Struct("<4sIQI")
MAX_HEADER_BYTES = 1 << 26
MAX_BODY_BYTES = 1 << 31


class Identity(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Names one attempt at one version, for ever. Two runs never match; lower terms are refused."""

    run: str
    term: int
    version: int
    attempt: int

    def __str__(self) -> str:
        return f"version {self.version} (term {self.term}, attempt {self.attempt})"


class MemberRef(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A member and one life of it: an incarnation is new whenever its process or its engine starts anew."""

    member: str
    incarnation: str


class Head(msgspec.Struct, frozen=True):
    """The run's one record. `identity` is the committed attempt (None before the first); `term` fences publishers."""

    run: str
    term: int
    identity: Identity | None
    root: bytes


class Join(msgspec.Struct, frozen=True, tag="join"):
    """A member asks to be part of the next version; `holds` is what it has installed.

    reads_base: it can decode chunks that need the old bits of their whole frame.
    """

    member: MemberRef
    holds: Identity | None
    reads_base: bool = False


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """A member will not vote any more."""

    member: MemberRef


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Begins an attempt. base None: an anchor, which needs nothing. Body: the layout (dcr.layout.frames.encode)."""

    identity: Identity
    base: Identity | None
    layout: bytes
    members: tuple[MemberRef, ...]


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    """One frame's change. Body: what `codec` made of it.

    changed: elements; operation: dcr.codecs.patch.Operation; digest: of body and these fields; content: the digest sum
    (16 bytes, over all tensors of the frame) of the new bits of the changed elements.
    """

    identity: Identity
    frame: int
    codec: str
    operation: int
    changed: int
    digest: bytes
    content: bytes


class ChunkRef(msgspec.Struct, frozen=True, array_like=True):
    """What a seal says about a chunk: enough to know that nothing is missing and nothing was replaced.

    changed: elements; nbytes: of the body.
    """

    frame: int
    digest: bytes
    content: bytes
    changed: int
    nbytes: int


class Seal(msgspec.Struct, frozen=True, tag="seal"):
    """Completes an attempt. Body: per tensor, 16 bytes each: base digest, target digest, sum of touched old bits."""

    identity: Identity
    base: Identity | None
    chunks: tuple[ChunkRef, ...]
    base_root: bytes
    root: bytes


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The publisher gives an attempt up."""

    identity: Identity
    reason: str


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """The head names this attempt. A hint: the head itself is what counts."""

    identity: Identity


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """A member has prepared (its vote) or installed an attempt; root is the digest it will have, or has.

    pause_s: of "installed": the seconds during which weights were written, on the member's monotonic clock.
    """

    kind: Literal["prepared", "installed"]
    member: MemberRef
    identity: Identity
    root: bytes
    pause_s: float | None = None


class Nack(msgspec.Struct, frozen=True, tag="nack"):
    """A member cannot go on. With `frames`: send these chunks again. Without: it is out of this attempt."""

    member: MemberRef
    identity: Identity
    holds: Identity | None
    reason: str
    frames: tuple[int, ...] = ()


Header = Join | Leave | Open | Chunk | Seal | Abort | Commit | Ack | Nack
_DECODER: msgspec.msgpack.Decoder[Header] = msgspec.msgpack.Decoder(Header)


@dataclass(frozen=True, slots=True)
class Message:
    """A header and its body."""

    header: Header
    body: bytes = b""


def encode(message: Message) -> bytes:
    """A message as bytes; raises as `pieces`."""
    return b"".join(pieces(message))


def pieces(message: Message) -> tuple[bytes, bytes]:
    """A message as what comes before its body, and the body, which is not copied.

    Raises:
        WireError: header or body exceed their caps.
    """
    header = msgspec.msgpack.encode(message.header)
    if len(header) > MAX_HEADER_BYTES or len(message.body) > MAX_BODY_BYTES:
        raise WireError(f"a message of {len(header)} + {len(message.body)} bytes exceeds the caps")
    return PREFIX.pack(MAGIC, len(header), len(message.body), zlib.crc32(header)) + header, message.body


class Reader:
    """Turns bytes, cut anywhere, into messages. Holds at most one unfinished message.

    max_body_bytes: bodies that declare more are refused before anything is allocated.
    """

    def __init__(self, *, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add bytes; the messages that are complete now.

        Raises:
            WireError: the bytes are not messages.
        """
        self._buffer += data
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def finish(self) -> None:
        """The peer closed.

        Raises:
            IncompleteError: it closed within a message.
        """
        if self._buffer:
            raise IncompleteError(f"the stream ended {len(self._buffer)} bytes into a message")

    def _next(self) -> Message | None:
        if len(self._buffer) < PREFIX.size:
            return None
        magic, header_bytes, body_bytes, crc = PREFIX.unpack_from(self._buffer)
        if magic != MAGIC:
            raise WireError(f"expected the magic {MAGIC!r}, found {bytes(magic)!r}: not a dcr stream of this format")
        if header_bytes > MAX_HEADER_BYTES or body_bytes > self._max_body_bytes:
            raise WireError(f"a header of {header_bytes} and a body of {body_bytes} bytes exceed the caps")
        start = PREFIX.size + header_bytes
        if len(self._buffer) < start + body_bytes:
            return None
        with memoryview(self._buffer) as view:
            raw, body = bytes(view[PREFIX.size : start]), bytes(view[start : start + body_bytes])
        del self._buffer[: start + body_bytes]
        if zlib.crc32(raw) != crc:
            raise WireError("a header does not match its crc32: it was changed on the way")
        try:
            return Message(_DECODER.decode(raw), body)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise WireError(f"a header does not decode: {error}") from error


def parse(data: bytes) -> Message:
    """The one message that `data` holds.

    Raises:
        WireError: not a message, or more than one. IncompleteError: it is cut short.
    """
    reader = Reader()
    messages = reader.feed(data)
    reader.finish()
    if len(messages) != 1:
        raise WireError(f"expected one message, found {len(messages)}")
    return messages[0]


def chunk_digest(frame: int, codec: str, operation: int, changed: int, content: bytes, body: bytes) -> bytes:
    """The digest (32 bytes) that binds a chunk's body to what its header says of it."""
    fields = msgspec.msgpack.encode((frame, codec, operation, changed, content))
    return kernels.blake3(fields + kernels.blake3(body))


def check_chunk(chunk: Chunk, body: bytes) -> None:
    """Compare a chunk with its own digest.

    Raises:
        PayloadError: they differ; names the frame.
    """
    found = chunk_digest(chunk.frame, chunk.codec, chunk.operation, chunk.changed, chunk.content, body)
    if found != chunk.digest:
        raise PayloadError(
            f"{chunk.identity}: the chunk of frame {chunk.frame} does not match its digest "
            f"(expected {chunk.digest.hex()[:16]}, found {found.hex()[:16]}): changed on the way, ask for it again"
        )
