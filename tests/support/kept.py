"""What a run in memory keeps, seen by its attempts: for tests that look at what was sent, or damage it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dcr.protocol import wire
from dcr.protocol.wire import Head, Identity, Message
from dcr.runs import records
from dcr.runs.records import ABORTS, OPENS, SEALS, messages_of, name_of, pack_key
from dcr.testing.memory import MemoryObjects


class Kept:
    """One attempt. Chunks and seals are wire bytes; what is assigned is written over what was stored."""

    def __init__(self, data: dict[str, bytes], identity: Identity) -> None:
        self._data = data
        self.identity = identity
        self.name = name_of(identity)

    @property
    def opened(self) -> bytes:
        return self._data[OPENS + self.name]

    @property
    def aborted(self) -> bytes | None:
        return self._data.get(ABORTS + self.name)

    @property
    def packs(self) -> list[str]:
        """The keys of its packs."""
        return sorted(key for key in self._data if key.startswith(f"packs/{self.name}/"))

    @property
    def chunks(self) -> list[bytes]:
        return [wire.encode(message) for key in self.packs for message in self.pack(key)]

    def pack(self, key: str) -> list[Message]:
        """The chunks of a pack."""
        return messages_of(records.unseal(self._data[key], key, Any)[0], key)

    def write_pack(self, key: str, chunks: list[bytes]) -> None:
        """Put other chunks into a pack."""
        footer, at = [], 0
        for data in chunks:
            footer.append((wire.parse(data).header.frame, at, len(data)))
            at += len(data)
        self._data[key] = b"".join(records.seal_up(chunks, footer))

    @property
    def sealed(self) -> bytes | None:
        data = self._data.get(SEALS + self.name)
        if data is None:
            return None
        _, sealed = messages_of(records.unseal(data, self.name, Any)[0], self.name)
        return wire.encode(sealed)

    @sealed.setter
    def sealed(self, sealed: bytes) -> None:
        key = SEALS + self.name
        body, parts = records.unseal(self._data[key], key, Any)
        opened, _ = messages_of(body, key)
        self._data[key] = b"".join(records.seal_up([wire.encode(opened), sealed], parts))

    def chunk_key(self, number: int) -> str:
        """The key of the sender's pack of this number."""
        return pack_key(self.identity, (0, number))


def attempts(objects: MemoryObjects) -> Mapping[Identity, Kept]:
    """The attempts that were opened, and are there."""
    opened = [key for key in sorted(objects.data) if key.startswith(OPENS)]
    found = [wire.parse(objects.data[key]).header.identity for key in opened]
    return {identity: Kept(objects.data, identity) for identity in found}


def heads(objects: MemoryObjects) -> list[Head]:
    """The log of heads."""
    keys = [key for key in sorted(objects.data) if key.startswith(records.HEADS)]
    entries = [records.unseal(objects.data[key], key, Any)[0] for key in keys]
    return [records.decode(bytes(entry), "", records.Entry).head for entry in entries]


def clear(objects: MemoryObjects, below: int = 1 << 60) -> None:
    """Remove all that is stored of attempts at versions less than this; the Opens stay."""
    for kept in attempts(objects).values():
        if kept.identity.version < below:
            for key in [*kept.packs, SEALS + kept.name]:
                objects.data.pop(key, None)
