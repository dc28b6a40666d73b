"""The wire: any message comes back however it is cut, and whatever is no message is refused before it is believed."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
import zlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.errors import IncompleteError, PayloadError, WireError
from dcr.protocol import wire
from dcr.protocol.wire import (
    MAX_HEADER_BYTES,
    PREFIX,
    Abort,
    Ack,
    Chunk,
    ChunkRef,
    Commit,
    Header,
    Identity,
    Join,
    Leave,
    MemberRef,
    Message,
    Nack,
    Open,
    Reader,
    Seal,
)

examples = settings(deadline=None, max_examples=100)
TEXT = st.text("az\x00é☃\U0001f40c", max_size=12)
NUMBERS = st.integers(0, 1 << 63)
IDENTITIES = st.builds(Identity, TEXT, NUMBERS, NUMBERS, NUMBERS)
MEMBERS = st.builds(MemberRef, TEXT, TEXT)
BYTES = st.binary(max_size=40)
FRAMES = st.lists(NUMBERS, max_size=4).map(tuple)
HEADERS = {
    Join: st.builds(Join, MEMBERS, st.none() | IDENTITIES),
    Leave: st.builds(Leave, MEMBERS),
    Open: st.builds(Open, IDENTITIES, st.none() | IDENTITIES, BYTES, st.lists(MEMBERS, max_size=3).map(tuple)),
    Chunk: st.builds(Chunk, IDENTITIES, NUMBERS, TEXT, NUMBERS, NUMBERS, BYTES, BYTES),
    Seal: st.builds(
        Seal,
        IDENTITIES,
        st.none() | IDENTITIES,
        st.lists(st.builds(ChunkRef, NUMBERS, BYTES, BYTES, NUMBERS, NUMBERS), max_size=3).map(tuple),
        BYTES,
        BYTES,
    ),
    Abort: st.builds(Abort, IDENTITIES, TEXT),
    Commit: st.builds(Commit, IDENTITIES),
    Ack: st.builds(
        Ack, st.sampled_from(["prepared", "installed"]), MEMBERS, IDENTITIES, BYTES, st.none() | st.floats(0, 1e6)
    ),
    Nack: st.builds(Nack, MEMBERS, IDENTITIES, st.none() | IDENTITIES, TEXT, FRAMES),
}
MESSAGES = st.builds(Message, st.one_of(*HEADERS.values()), BYTES)
IDENTITY = Identity("run", 1, 2, 3)
SAMPLE = Message(Abort(IDENTITY, "why"), b"body")


def framed(header: bytes, body: bytes = b"", *, magic: bytes = wire.MAGIC, crc: int | None = None) -> bytes:
    """A message of any header bytes, with a prefix that fits them."""
    return PREFIX.pack(magic, len(header), len(body), zlib.crc32(header) if crc is None else crc) + header + body


def test_every_kind_of_header_is_covered() -> None:
    assert set(HEADERS) == set(Header.__args__)


@pytest.mark.parametrize("kind", HEADERS, ids=lambda kind: kind.__name__)
@examples
@given(data=st.data())
def test_a_message_comes_back(kind: type, data: st.DataObject) -> None:
    message = Message(data.draw(HEADERS[kind]), data.draw(BYTES))
    assert wire.parse(wire.encode(message)) == message


@examples
@given(st.lists(MESSAGES, max_size=4), st.data())
def test_messages_come_back_in_order_however_the_bytes_are_cut(messages: list[Message], data: st.DataObject) -> None:
    stream = b"".join(map(wire.encode, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader, found = Reader(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[start:end])
    reader.finish()
    assert found == messages


def test_a_message_is_given_out_as_soon_as_its_last_byte_is_there() -> None:
    reader, data = Reader(), wire.encode(SAMPLE)
    assert [reader.feed(bytes([byte])) for byte in data] == [[]] * (len(data) - 1) + [[SAMPLE]]


def test_the_prefix_is_magic_sizes_and_checksum() -> None:
    data = wire.encode(SAMPLE)
    header = data[20:-4]
    assert data[:20] == b"DCR\x01" + struct.pack("<IQI", len(header), 4, zlib.crc32(header))
    assert data[-4:] == b"body"


def test_a_body_is_never_part_of_the_header() -> None:
    small, big = (wire.encode(Message(SAMPLE.header, bytes(size))) for size in (0, 1000))
    assert len(big) - len(small) == 1000


# ---------------------------------------------------------------------- cut short


@pytest.mark.parametrize("size", range(1, len(wire.encode(SAMPLE))))
def test_a_message_cut_short_is_incomplete(size: int) -> None:
    with pytest.raises(IncompleteError, match=f"ended {size} bytes into a message"):
        wire.parse(wire.encode(SAMPLE)[:size])


def test_a_stream_may_end_between_messages() -> None:
    reader = Reader()
    reader.feed(wire.encode(SAMPLE))
    reader.finish()


def test_no_bytes_are_no_message() -> None:
    with pytest.raises(WireError, match="found 0"):
        wire.parse(b"")


def test_two_messages_are_not_one() -> None:
    with pytest.raises(WireError, match="found 2"):
        wire.parse(wire.encode(SAMPLE) * 2)


def test_bytes_after_a_message_are_not_ignored() -> None:
    with pytest.raises(IncompleteError):
        wire.parse(wire.encode(SAMPLE) + b"\0")


# ---------------------------------------------------------------------- changed on the way


@pytest.mark.parametrize("at", range(20, len(wire.encode(SAMPLE)) - 4))
def test_a_flipped_bit_in_a_header_is_refused(at: int) -> None:
    for bit in range(8):
        data = bytearray(wire.encode(SAMPLE))
        data[at] ^= 1 << bit
        with pytest.raises(WireError, match="crc32"):
            wire.parse(bytes(data))


@pytest.mark.parametrize("at", range(20))
def test_a_flipped_bit_in_a_prefix_is_refused(at: int) -> None:
    for bit in range(8):
        data = bytearray(wire.encode(SAMPLE))
        data[at] ^= 1 << bit
        with pytest.raises((WireError, IncompleteError)):
            wire.parse(bytes(data))


@pytest.mark.parametrize("magic", [b"DCR\x02", b"dcr\x01", b"HTTP"])
def test_another_format_is_refused_by_its_magic(magic: bytes) -> None:
    with pytest.raises(WireError, match="expected the magic"):
        Reader().feed(framed(b"", magic=magic))


@settings(deadline=None, max_examples=300)
@given(MESSAGES, st.data())
def test_mutated_bytes_are_refused_or_are_messages(message: Message, data: st.DataObject) -> None:
    mutated = bytearray(wire.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(mutated)))
        mutated[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    with contextlib.suppress(WireError, IncompleteError):
        assert isinstance(wire.parse(bytes(mutated)), Message)


@settings(deadline=None, max_examples=300)
@given(MESSAGES, st.data())
def test_a_mutated_header_with_a_checksum_that_fits_is_refused_or_a_message(
    message: Message, data: st.DataObject
) -> None:
    header = bytearray(msgspec.msgpack.encode(message.header))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(header)))
        header[at : at + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=5))
    try:
        found = wire.parse(framed(bytes(header)))
    except WireError:
        return
    assert wire.parse(wire.encode(found)) == found


# ---------------------------------------------------------------------- headers that are no messages

COMMIT = {"type": "commit", "identity": ["run", 1, 2, 3]}


def parse_header(fields: object) -> Header:
    return wire.parse(framed(msgspec.msgpack.encode(fields))).header


def test_a_header_of_the_right_fields_is_a_message() -> None:
    assert parse_header(COMMIT) == Commit(IDENTITY)


def test_fields_that_a_later_version_adds_are_skipped() -> None:
    assert parse_header({**COMMIT, "later": [1, {"x": 2}]}) == Commit(IDENTITY)


@pytest.mark.parametrize(
    "fields",
    [
        None,
        [],
        {},
        "commit",
        {**COMMIT, "type": "comit"},
        {"type": "commit"},
        {"identity": COMMIT["identity"]},
        {**COMMIT, "identity": ["run", 1, 2]},
        {**COMMIT, "identity": ["run", 1, 2, "3"]},
        {**COMMIT, "identity": ["run", 1, 2, 3.5]},
        {**COMMIT, "identity": ["run", None, 2, 3]},
        {**COMMIT, "identity": [b"run", 1, 2, 3]},
        {"type": "ack", "kind": "maybe", "member": ["a", "b"], "identity": COMMIT["identity"], "root": b""},
    ],
    ids=[
        *("null", "list", "empty", "text", "unknown type", "a field less", "no type", "short identity"),
        *("text for a number", "fraction", "null for a number", "bytes for text", "unknown vote"),
    ],
)
def test_a_header_of_other_fields_is_refused(fields: object) -> None:
    with pytest.raises(WireError, match="does not decode"):
        parse_header(fields)


def test_text_that_is_no_utf8_is_refused() -> None:
    header = msgspec.msgpack.encode(COMMIT).replace(b"\xa3run", b"\xa3r\xffn")
    with pytest.raises(WireError, match="does not decode"):
        wire.parse(framed(header))


def test_deep_nesting_is_refused() -> None:
    header = msgspec.msgpack.encode({**COMMIT, "later": None}).replace(
        b"\xa5later\xc0", b"\xa5later" + b"\x91" * 100_000 + b"\xc0"
    )
    with pytest.raises(WireError):
        wire.parse(framed(header))


# ---------------------------------------------------------------------- sizes


def test_a_header_above_the_cap_is_refused_from_its_prefix_alone() -> None:
    with pytest.raises(WireError, match="exceed the caps"):
        Reader().feed(PREFIX.pack(wire.MAGIC, MAX_HEADER_BYTES + 1, 0, 0))


def test_a_body_above_the_readers_cap_is_refused_from_its_prefix_alone() -> None:
    with pytest.raises(WireError, match="exceed the caps"):
        Reader(max_body_bytes=100).feed(PREFIX.pack(wire.MAGIC, 10, 101, 0))


def test_a_body_at_the_cap_is_accepted() -> None:
    assert Reader(max_body_bytes=4).feed(wire.encode(SAMPLE)) == [SAMPLE]


def test_a_body_of_any_size_is_refused_without_a_readers_cap() -> None:
    with pytest.raises(WireError, match="exceed the caps"):
        Reader().feed(PREFIX.pack(wire.MAGIC, 10, (1 << 64) - 1, 0))


def test_a_declared_size_takes_no_memory_before_its_bytes_arrive() -> None:
    reader = Reader()
    tracemalloc.start()
    try:
        assert reader.feed(PREFIX.pack(wire.MAGIC, MAX_HEADER_BYTES, wire.MAX_BODY_BYTES, 0)) == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 16
    finally:
        tracemalloc.stop()


def test_a_header_above_the_cap_is_not_sent() -> None:
    header = Abort(IDENTITY, "x" * MAX_HEADER_BYTES)
    with pytest.raises(WireError, match="exceeds the caps"):
        wire.encode(Message(header))


# ---------------------------------------------------------------------- chunks

BODY = bytes(range(64))
FIELDS = {"frame": 3, "codec": "gaps", "operation": 2, "changed": 9, "content": b"c" * 16}
CHUNK = Chunk(IDENTITY, digest=wire.chunk_digest(**FIELDS, body=BODY), **FIELDS)


def test_a_chunks_digest_is_what_the_format_says() -> None:
    """As another implementation of BLAKE3 has it: what versions of this library have to agree on."""
    assert CHUNK.digest.hex() == "2d5834d9b5a0865c346a889420187fffa12e75c8348548f4411f088eeda62303"


def test_a_chunk_that_is_whole_is_accepted() -> None:
    wire.check_chunk(CHUNK, BODY)


def test_every_flipped_bit_of_a_chunks_body_is_noticed() -> None:
    for at in range(8 * len(BODY)):
        body = bytearray(BODY)
        body[at // 8] ^= 1 << at % 8
        with pytest.raises(PayloadError, match="frame 3"):
            wire.check_chunk(CHUNK, bytes(body))


@pytest.mark.parametrize("body", [BODY[:-1], BODY + b"\0", b""], ids=["shorter", "longer", "none"])
def test_a_body_of_another_size_is_noticed(body: bytes) -> None:
    with pytest.raises(PayloadError):
        wire.check_chunk(CHUNK, body)


@pytest.mark.parametrize(
    "change",
    [{"frame": 4}, {"codec": "raw"}, {"operation": 1}, {"changed": 8}, {"content": b"d" * 16}, {"digest": b"e" * 32}],
    ids=lambda change: next(iter(change)),
)
def test_a_body_under_another_header_is_noticed(change: dict[str, object]) -> None:
    with pytest.raises(PayloadError, match="does not match its digest"):
        wire.check_chunk(msgspec.structs.replace(CHUNK, **change), BODY)


def test_a_chunk_may_be_sent_again_in_another_attempt() -> None:
    wire.check_chunk(msgspec.structs.replace(CHUNK, identity=Identity("run", 1, 2, 4)), BODY)


def test_an_identity_reads_as_version_term_and_attempt() -> None:
    assert str(IDENTITY) == "version 2 (term 1, attempt 3)"
