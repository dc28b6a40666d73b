"""The objects of a run: their keys and what they hold.

    heads/<number>              the head with its check; created once by whoever comes first, never removed
    layouts/<digest>            a layout, once however many attempts have it
    opens/<attempt>             the Open of an attempt, without the layout
    packs/<attempt>/<pack>      chunks as wire messages, and a footer: of each its frame, offset and size
    seals/<attempt>             Open (without the layout) and Seal, and in the footer the packs that hold its chunks
    aborts/<attempt>            the Abort of an attempt that was given up
    live/newest                 a number of a head that exists                                                  (hint)
    live/catalogue              an outline of every stored attempt                                              (hint)
    live/bells/<term>           the attempts that the publisher of a term has opened last, with their packs
    live/members/<link>         what one link says for its members, and its sign of life
    live/writers                there once a publisher of several ranks has written

An attempt's name is its version, term and attempt number in figures of fixed width, so that keys sort by version.
A record ends with its footer's size, a check over everything before, and a mark: what was cut short is noticed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from dcr.errors import IncompleteError, RemoteError, WireError
from dcr.protocol import wire
from dcr.protocol.delivery import Part, Posted
from dcr.protocol.wire import Head, Identity, MemberRef, Message

HEADS, LAYOUTS, OPENS, PACKS, SEALS, ABORTS = "heads/", "layouts/", "opens/", "packs/", "seals/", "aborts/"
NEWEST, CATALOGUE, BELLS, MEMBERS, WRITERS = (
    "live/newest",
    "live/catalogue",
    "live/bells/",
    "live/members/",
    "live/writers",
)
TAIL = struct.Struct("<II4s")  # footer size, crc32 of all before the tail, mark
MARK = b"dcr."


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A head as it is stored. nonce: tells a second try of one append from another's append of the same head."""

    head: Head
    nonce: bytes


class Mailbox(msgspec.Struct, array_like=True):
    """What one link says for its members: messages, each under a number.

    link: another one for each link. beat: changes while it lives. term: the highest that it has seen.
    """

    link: bytes = b""
    beat: int = 0
    term: int = -1
    said: list[tuple[int, bytes]] = []


def name_of(identity: Identity) -> str:
    """The name of an attempt within a run."""
    return f"{identity.version:012d}.{identity.term:06d}.{identity.attempt:04d}"


def order_of(name: str) -> tuple[int, int, int] | None:
    """Version, term and attempt of a name; None if it is no attempt's."""
    numbers = name.split(".")
    if len(numbers) != 3 or not all(number.isascii() and number.isdigit() for number in numbers):
        return None
    version, term, attempt = map(int, numbers)
    return version, term, attempt


def head_key(number: int) -> str:
    return f"{HEADS}{number:012d}"


def layout_key(digest: bytes) -> str:
    return LAYOUTS + digest.hex()


def pack_key(identity: Identity, part: Part) -> str:
    return f"{PACKS}{name_of(identity)}/{part[0]:04d}-{part[1]:08d}"


def part_of(key: str) -> Part | None:
    """The pack that a key names; None if it is none's."""
    writer, _, number = key.rpartition("/")[2].partition("-")
    return (int(writer), int(number)) if writer.isdigit() and number.isdigit() else None


def bell_key(term: int) -> str:
    return f"{BELLS}{term:06d}"


def mailbox_key(ref: MemberRef) -> str:
    return f"{MEMBERS}{quote(ref.member, safe='')}.{quote(ref.incarnation, safe='')}"


# ---------------------------------------------------------------------- records with a check


def seal_up(pieces: Sequence[bytes], footer: Any = ()) -> list[bytes]:
    """Pieces, a footer behind them, and the check of both."""
    packed = msgspec.msgpack.encode(footer)
    crc = 0
    for piece in (*pieces, packed):
        crc = zlib.crc32(piece, crc)
    return [*pieces, packed, TAIL.pack(len(packed), crc, MARK)]


def unseal(data: bytes, key: str, footer: Any) -> tuple[memoryview, Any]:
    """What a record holds, and its footer of a type.

    Raises:
        IncompleteError: it is cut short. WireError: it is damaged. Both name it.
    """
    if len(data) < TAIL.size or data[-len(MARK) :] != MARK:
        raise IncompleteError(f"{key} is cut short: it does not end as it was written")
    size, crc, _ = TAIL.unpack(data[-TAIL.size :])
    body = memoryview(data)[: -TAIL.size]
    if zlib.crc32(body) != crc or size > len(body):
        raise WireError(f"{key} is damaged: its bytes do not match their check")
    split = len(body) - size
    return body[:split], decode(bytes(body[split:]), key, footer)


def decode(data: bytes, key: str, kind: Any) -> Any:
    """A value of a type from msgpack.

    Raises:
        WireError: it is none; names the key.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(
            f"{key} is not what is kept under that name ({error}): it is damaged, or another program's; "
            "start a run elsewhere"
        ) from error


def messages_of(data: bytes | memoryview, key: str) -> list[Message]:
    """The messages in a row of bytes; what is wrong with them names the key."""
    reader = wire.Reader()
    try:
        messages = reader.feed(bytes(data))
        reader.finish()
    except RemoteError as error:
        error.add_note(f"in {key}")
        raise
    return messages


def message_of(data: bytes | memoryview, key: str) -> Message:
    """The only message in a row of bytes."""
    messages = messages_of(data, key)
    if len(messages) != 1:
        raise WireError(f"{key}: expected one message, found {len(messages)}")
    return messages[0]


def encode_bell(posted: Sequence[Posted]) -> bytes:
    return msgspec.msgpack.encode(list(posted))


def decode_bell(data: bytes, key: str) -> list[Posted]:
    bell: list[Posted] = decode(data, key, list[Posted])
    return bell
