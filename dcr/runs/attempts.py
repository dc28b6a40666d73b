"""The stored attempts of a run: their records, their outlines, and removing what nobody needs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Set
from contextlib import suppress

import msgspec

from dcr.errors import DcrError, IncompleteError, WireError
from dcr.protocol import wire
from dcr.protocol.catalogue import Outline, outline_of
from dcr.protocol.delivery import Part
from dcr.protocol.wire import Chunk, Identity, Message, Open, Seal
from dcr.runs.patience import Patient
from dcr.runs.records import (
    ABORTS,
    CATALOGUE,
    OPENS,
    PACKS,
    SEALS,
    decode,
    layout_key,
    message_of,
    messages_of,
    name_of,
    order_of,
    pack_key,
    part_of,
    seal_up,
    unseal,
)

Frames = list[tuple[int, int, int]]  # of each message of a pack: frame, offset, size


class StoredAttempts:
    """What a run keeps, as a `dcr.seams.Store`."""

    def __init__(self, objects: Patient) -> None:
        self.objects = objects
        self._layouts: dict[bytes, bytes] = {}  # the last one or two: the layout travels once per digest
        self._catalogue: dict[Identity, Outline] = {}
        self._tag: bytes | None = None

    # ------------------------------------------------------------------ reading

    async def newest(self) -> int:
        """See `dcr.seams.Store.newest`."""
        names = [entry.key.removeprefix(OPENS) for entry in await self.objects.list_all(OPENS)]
        return max((order[0] for name in names if (order := order_of(name)) is not None), default=-1)

    async def outlines(self, after: int, to: int) -> list[Outline]:
        """See `dcr.seams.Store.outlines`. The catalogue is a hint: the seals say what it does not."""
        known = {one.identity: one for one in await self._look_up()}
        if max((identity.version for identity in known), default=-1) < to:
            known = {one.identity: one for one in await self._survey(known, after)}
        return [known[identity] for identity in sorted(known) if after < identity.version <= to]

    async def describe(self, identity: Identity) -> tuple[Message, Message]:
        """See `dcr.seams.Store.describe`."""
        opened, sealed, _ = await self._record(identity)
        return opened, sealed

    async def read(self, identity: Identity, frames: Collection[int] | None = None) -> AsyncGenerator[Message, None]:
        """See `dcr.seams.Store.read`."""
        opened, sealed, parts = await self._record(identity)
        assert isinstance(sealed.header, Seal)
        yield opened
        missing = {ref.frame for ref in sealed.header.chunks}
        missing &= missing if frames is None else set(frames)
        for part in parts:
            for message in await self.read_pack(identity, part, frames):
                assert isinstance(message.header, Chunk)
                missing.discard(message.header.frame)
                yield message
        if missing:
            raise IncompleteError(f"{identity}: its packs lack the sealed chunks of frames {sorted(missing)[:8]}")
        yield sealed

    async def read_open(self, identity: Identity) -> Message | None:
        """The Open of an attempt with its layout; None if it was removed."""
        key = OPENS + name_of(identity)
        found = await self.objects.get(key)
        return None if found is None else await self._with_layout(message_of(found.data or b"", key))

    async def read_seal(self, identity: Identity) -> list[Message]:
        """The seal of an attempt, and nothing else."""
        return [(await self._record(identity))[1]]

    async def read_pack(self, identity: Identity, part: Part, frames: Collection[int] | None = None) -> list[Message]:
        """The chunks in a pack; only those of some frames, if they are given.

        Raises:
            IncompleteError: it is missing or cut short. WireError: it is damaged. Both name it.
        """
        key = pack_key(identity, part)
        found = await self.objects.get(key)
        if found is None or found.data is None:
            raise IncompleteError(f"{key} is missing: it was removed, or never written")
        body, entries = unseal(found.data, key, Frames)
        wanted = [(at, size) for frame, at, size in entries if frames is None or frame in frames]
        messages = [message_of(body[at : at + size], key) for at, size in wanted]
        for message in messages:
            if not isinstance(message.header, Chunk) or message.header.identity != identity:
                raise WireError(f"{key} holds a message that is no chunk of {identity}: it is damaged")
        return messages

    async def read_abort(self, identity: Identity) -> Message | None:
        """What the publisher said when it gave an attempt up; None if nothing is there any more."""
        key = ABORTS + name_of(identity)
        found = await self.objects.get(key)
        return None if found is None else message_of(found.data or b"", key)

    # ------------------------------------------------------------------ writing

    async def write_open(self, message: Message) -> bool:
        """Store an Open, and its layout unless that is there; False if the attempt was opened before."""
        header = message.header
        assert isinstance(header, Open)
        if header.layout not in self._layouts:
            await self.objects.put(layout_key(header.layout), seal_up([message.body]), absent=True)
            self._keep_layout(header.layout, message.body)
        data = wire.encode(Message(header))
        return await self.objects.put(OPENS + name_of(header.identity), [data], absent=True)

    async def write_pack(self, identity: Identity, part: Part, messages: list[tuple[int, tuple[bytes, bytes]]]) -> bool:
        """Store chunks, which are given with their frames; False if there is a pack of that name."""
        pieces, entries, at = list[bytes](), Frames(), 0
        for frame, (head, body) in messages:
            pieces += [head, body]
            entries.append((frame, at, len(head) + len(body)))
            at += len(head) + len(body)
        return await self.objects.put(pack_key(identity, part), seal_up(pieces, entries), absent=True)

    async def write_seal(self, opened: Message, sealed: Message, parts: Collection[Part]) -> None:
        """Store the seal of an attempt, with its Open and the packs that hold its chunks."""
        assert isinstance(sealed.header, Seal)
        pieces = [wire.encode(Message(opened.header)), wire.encode(sealed)]
        await self.objects.put(SEALS + name_of(sealed.header.identity), seal_up(pieces, sorted(parts)))

    async def write_abort(self, message: Message, identity: Identity) -> None:
        """Store that an attempt is given up; where there is no room for that, its chunks make some."""
        try:
            await self.objects.put(ABORTS + name_of(identity), [wire.encode(message)])
        except OSError:
            await self.remove_packs(identity)
            await self.objects.put(ABORTS + name_of(identity), [wire.encode(message)])

    async def withdraw(self, identity: Identity) -> None:
        """Remove the seal and the chunks of an attempt."""
        await self.objects.delete([SEALS + name_of(identity)])
        await self.remove_packs(identity)

    async def remove_packs(self, identity: Identity) -> None:
        """Remove the chunks of an attempt."""
        await self.objects.delete([pack_key(identity, part) for part in await self.stored_parts(identity)])

    async def stored_parts(self, identity: Identity) -> set[Part]:
        """The packs of an attempt that are there, whoever wrote them."""
        entries = await self.objects.list_all(f"{PACKS}{name_of(identity)}/")
        return {part for entry in entries if (part := part_of(entry.key)) is not None}

    async def prune(self, keep: Set[Identity], below: int) -> None:
        """See `dcr.seams.Store.prune`. The Open of the newest attempt stays: it says which number was the last."""
        kept = {name_of(identity) for identity in keep}
        names = sorted((order, entry.key.removeprefix(OPENS)) for entry in await self.objects.list_all(OPENS)
                       if (order := order_of(entry.key.removeprefix(OPENS))) is not None)  # fmt: skip
        for (version, _, _), name in names:
            if version < below and name not in kept:
                packs = [entry.key for entry in await self.objects.list_all(f"{PACKS}{name}/")]
                # invariant: an attempt is unsealed before any of it goes, and its Open goes last, so a sweep that was
                # cut short is taken up again by the next one
                await self.objects.delete([SEALS + name])
                await self.objects.delete([*packs, ABORTS + name])
                if name != names[-1][1]:
                    await self.objects.delete([OPENS + name])
        await self.catalogue()

    async def catalogue(self, *new: Outline) -> None:
        """Write the catalogue anew, with an outline more. It is a hint, so what fails is told by nothing."""
        with suppress(DcrError, OSError):
            known = {one.identity: one for one in (*self._catalogue.values(), *new)}
            outlines = await self._survey(known, -1)
            self._catalogue = {one.identity: one for one in outlines}
            await self.objects.put(CATALOGUE, [msgspec.msgpack.encode(outlines)])

    # ------------------------------------------------------------------ within

    async def _record(self, identity: Identity) -> tuple[Message, Message, list[Part]]:
        key = SEALS + name_of(identity)
        found = await self.objects.get(key)
        if found is None or found.data is None:
            raise IncompleteError(f"{key} is missing: {identity} was removed, given up, or never sealed")
        body, parts = unseal(found.data, key, list[Part])
        messages = messages_of(body, key)
        if [type(message.header) for message in messages] != [Open, Seal]:
            raise WireError(f"{key} does not hold an Open and a Seal: it is damaged")
        opened, sealed = messages
        if getattr(opened.header, "identity", None) != identity:
            raise IncompleteError(f"{key} is of another run than {identity}")
        return await self._with_layout(opened), sealed, parts

    async def _with_layout(self, opened: Message) -> Message:
        header = opened.header
        if not isinstance(header, Open):
            raise WireError(f"expected an Open, found {type(header).__name__}: the record is damaged")
        if header.layout not in self._layouts:
            key = layout_key(header.layout)
            found = await self.objects.get(key)
            if found is None or found.data is None:
                raise IncompleteError(f"{key} is missing: the layout of {header.identity} was removed")
            self._keep_layout(header.layout, bytes(unseal(found.data, key, tuple[()])[0]))
        return Message(header, self._layouts[header.layout])

    def _keep_layout(self, digest: bytes, body: bytes) -> None:
        self._layouts = {**dict(list(self._layouts.items())[-1:]), digest: body}

    async def _look_up(self) -> list[Outline]:
        """What the catalogue says now; nothing if there is none, or it cannot be understood."""
        found = await self.objects.get(CATALOGUE, unless=self._tag)
        if found is not None and found.data is not None:
            with suppress(WireError):
                outlines: list[Outline] = decode(found.data, CATALOGUE, list[Outline])
                self._catalogue, self._tag = {one.identity: one for one in outlines}, found.tag
        return list(self._catalogue.values())

    async def _survey(self, known: dict[Identity, Outline], after: int) -> list[Outline]:
        """Outlines of the sealed attempts beyond a version, by what is stored; those known are not read again."""
        first = f"{after + 1:012d}" if after >= 0 else ""
        sealed = {entry.key.removeprefix(SEALS) for entry in await self.objects.list_all(SEALS, after=SEALS + first)}
        given_up = {
            entry.key.removeprefix(ABORTS) for entry in await self.objects.list_all(ABORTS, after=ABORTS + first)
        }
        names = {name_of(identity): one for identity, one in known.items()}
        found = [names.get(name) or await self._outline(name) for name in sorted(sealed - given_up) if order_of(name)]
        return [one for one in found if one is not None]

    async def _outline(self, name: str) -> Outline | None:
        """The outline of an attempt, made of its seal; None if that is gone, or not one."""
        with suppress(DcrError):
            found = await self.objects.get(SEALS + name)
            if found is not None and found.data is not None:
                opened, sealed = messages_of(unseal(found.data, name, list[Part])[0], name)
                return outline_of(opened, sealed)
        return None
