"""What a member says to its workers and what they answer: one message for each call, over a socket.

prefix   magic 4 bytes | header size u32 | body size u64      (little-endian)
header   one msgpack-encoded request or answer, typed
body     bind: the layout; prepare: positions, then values; answers: digest sums
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec
import numpy as np

from dcr.errors import WireError
from dcr.layout.frames import Region

MAGIC = b"DCRW"
PREFIX = struct.Struct("<4sIQ")
MAX_HEADER_BYTES = 1 << 28
MAX_BODY_BYTES = 1 << 34
FIRST_BYTES = 1 << 26  # allocated for what a prefix announces; more only once that much has come

Buffer = bytes | memoryview


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A worker's first words: the key that it was told, and which rank it is, of how many."""

    key: bytes
    rank: int
    world: int


class Bind(msgspec.Struct, frozen=True, tag="bind"):
    pass


class Fingerprint(msgspec.Struct, frozen=True, tag="fingerprint"):
    pass


class Mark(msgspec.Struct, frozen=True, tag="mark"):
    pass


class Awake(msgspec.Struct, frozen=True, tag="awake"):
    """Whether it is awake; answered by an error if not."""


class Digest(msgspec.Struct, frozen=True, tag="digest"):
    pass


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """ticket: the caller's name for what will be ready. width: bytes per value; positions None: all elements."""

    ticket: int
    frame: int
    operation: int
    width: int
    positions: int | None


class Install(msgspec.Struct, frozen=True, tag="install"):
    tickets: tuple[int, ...]


class Undo(msgspec.Struct, frozen=True, tag="undo"):
    ticket: int


class Finalize(msgspec.Struct, frozen=True, tag="finalize"):
    pass


Request = Bind | Fingerprint | Mark | Awake | Digest | Prepare | Install | Undo | Finalize


class Call(msgspec.Struct, frozen=True):
    """A request, and the tickets of what the caller has let go of."""

    request: Request
    forget: tuple[int, ...] = ()


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It is done; digests are in the body."""


class Parts(msgspec.Struct, frozen=True, tag="parts"):
    """The parts of the weights that `bind` returned."""

    regions: tuple[Region, ...]


class Shared(msgspec.Struct, frozen=True, tag="shared"):
    """What `prepare` returned, but for the sums: old and then new ones are in the body."""

    parts: tuple[int, ...]
    changed: int
    nbytes: int
    copies_agree: bool


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """What was raised: the name of one of dcr's errors, or of any other."""

    kind: str
    message: str


Answer = Done | Parts | Shared | Failed


def octets(array: np.ndarray[Any, Any]) -> memoryview:
    """The bytes of an array, in place where it is contiguous."""
    return np.ascontiguousarray(array).view(np.uint8).data


def send(connection: socket.socket, header: Hello | Call | Answer, *body: Buffer) -> None:
    """Send a message.

    Raises:
        OSError: the connection does not take it.
    """
    packed = msgspec.msgpack.encode(header)
    connection.sendall(PREFIX.pack(MAGIC, len(packed), sum(len(piece) for piece in body)) + packed)
    for piece in body:
        connection.sendall(piece)


def receive(connection: socket.socket, kind: Any) -> tuple[Any, memoryview]:
    """The next message, whose header is of this kind, and its body.

    Raises:
        WireError: it is not such a message. OSError: the connection has ended, or nothing came in time.
    """
    magic, header_bytes, body_bytes = PREFIX.unpack(_exactly(connection, PREFIX.size))
    if magic != MAGIC or header_bytes > MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
        raise WireError(f"not a message between a member and its ranks: {magic!r}, {header_bytes} + {body_bytes} bytes")
    try:
        header = msgspec.msgpack.decode(_exactly(connection, header_bytes), type=kind)
    except msgspec.MsgspecError as error:
        raise WireError(f"a message between a member and its ranks does not decode: {error}") from error
    return header, _exactly(connection, body_bytes)


def _exactly(connection: socket.socket, size: int) -> memoryview:
    """The next `size` bytes, received in place; memory is touched, and grows, as they come."""
    data, filled = np.empty(min(size, FIRST_BYTES), np.uint8), 0
    while filled < size:
        if filled == len(data):
            data, came = np.empty(min(size, 2 * filled), np.uint8), data
            data[:filled] = came
        count = connection.recv_into(data[filled:].data)
        if not count:
            raise ConnectionResetError("the connection was closed")
        filled += count
    return data.data
