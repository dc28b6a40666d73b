"""A checkpoint directory of safetensors files as a loader: each version replaces the one before at one instant.

A single `model.safetensors` is written anew beside itself and renamed over it. Of a sharded checkpoint every shard that
a version touches gets a file of a new name, and then the index, which names them, is renamed over the old one. So
whoever opens the directory finds one version or the next, and never a mixture; the files of the version before stay
until the version after, for readers that have read its index already. What a version costs is a copy of the files that
it touches. From `bind` to `release` no other process may write here; names of new files carry the owner's nonce, so
that even where that fails no owner ever puts another's file in place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dcr.codecs.patch import Change
from dcr.errors import StateError, StorageRebound
from dcr.layout.frames import Layout
from dcr.layout.schema import patterns
from dcr.layout.views import Bits, Lanes
from dcr.loaders import replacement
from dcr.loaders.checkpoint import INDEX, SINGLE, entries_of, index_of, match, placement_of, stamp_of
from dcr.loaders.ownership import Ownership, claim
from dcr.loaders.replacement import Copy
from dcr.memory.placement import Placement
from dcr.memory.ready import Ready

GENERATION = re.compile(r"-g(\d{6,})-[0-9a-f]{8}(?=\.safetensors$)")
TEMPORARY = ".dcr"


class SafetensorsLoader:
    """A checkpoint directory, matched to published tensors by name; read by memory map, never changed in place.

    waive: patterns (as in fnmatch) of tensors in the files that need not be published; they stay as they lie there.
    fsync: False where a version may be lost with the host.

    Raises:
        SchemaError: there is no checkpoint. TypeError: `waive` is no sequence.
    """

    reads_base = True

    def __init__(self, folder: str | Path, *, waive: Sequence[str] = (), fsync: bool = True) -> None:
        self._folder = Path(folder)
        index_of(self._folder)
        self._waive = patterns(waive)
        self._fsync = fsync
        self._ownership: Ownership | None = None
        self._placement: Placement | None = None  # over the files that readers see
        self._written: Placement | None = None  # over those that are being written
        self._pending: dict[str, Copy] = {}
        self._unseen: set[int] = set()  # frames whose bits in pending files are not those that readers see
        self._seen: set[int] = set()  # frames whose last installation readers see
        self._old: set[str] = set()
        self._first = self._stamp = ""  # of the files as they were found, and as they were left here

    # ------------------------------------------------------------------ the seam

    def bind(self, layout: Layout) -> SafetensorsLoader:
        """See `dcr.seams.Loader.bind`; takes the directory for this process.

        Raises:
            StateError: another process writes here.
        """
        ownership = self._ownership or claim(self._folder)
        try:
            ownership.require()
            stamp = stamp_of(self._folder)
            entries = entries_of(self._folder)
            places = match(self._folder, layout, entries, self._waive)
            placement = placement_of(self._folder, layout, entries, places, {})
        except BaseException:
            if self._ownership is None:
                ownership.release()
            raise
        self._drop()
        self._ownership, self._placement = ownership, placement
        self._layout, self._entries, self._places = layout, entries, places
        if stamp != self._stamp:
            self._first = self._stamp = stamp
            self._old = set()
        self._seen = set()
        self._sweep()
        return self

    def release(self) -> None:
        """See `dcr.seams.Releasing.release`: lets other processes write in the directory, until the next `bind`."""
        ownership, self._ownership, self._placement = self._ownership, None, None
        if ownership is not None and ownership.is_here:  # a forked child leaves its parent's files alone
            self._drop()
            ownership.release()

    def fingerprint(self) -> bytes:
        """See `dcr.seams.Loader.fingerprint`: it changes if somebody else writes to the directory."""
        stamp = stamp_of(self._folder)
        first = self._first if stamp == self._stamp else stamp
        return hashlib.blake2b(first.encode(), digest_size=16).digest()

    def prepare(self, frame: int, change: Change) -> Ready:
        """See `dcr.seams.LiveWeights.prepare`."""
        return self._bound.prepare(frame, change)

    def read(self, frame: int) -> Bits:
        """See `dcr.seams.FrameReader.read`."""
        return self._bound.read(frame)

    def install(self, ready: Ready) -> None:
        """See `dcr.seams.LiveWeights.install`: into files that nobody sees until `finalize`.

        Raises:
            StateError, StorageRebound: as `dcr.loaders.ownership.Ownership.require`.
        """
        written = self._next(ready)
        self._seen.discard(ready.frame)
        self._unseen.add(ready.frame)
        written.install(ready)

    def undo(self, ready: Ready) -> None:
        """See `dcr.seams.LiveWeights.undo`: as `install`; nothing is written for what no file holds."""
        if ready.frame in self._unseen:
            self._next(ready).undo(ready)
            self._unseen.discard(ready.frame)
        elif ready.frame in self._seen:
            written = self._next(ready)
            self._unseen.add(ready.frame)
            written.undo(ready)

    def finalize(self) -> None:
        """See `dcr.seams.Loader.finalize`: here a version becomes the one that the directory holds."""
        if not self._pending:
            return
        self._owned.require_here()
        if not self._unseen:
            self._drop()  # all of it was undone
            return
        try:
            for copy in self._pending.values():
                copy.close(self._fsync)
            self._put_in_place()
        except BaseException:
            self._drop()  # the index names the old files still: what comes next begins with them
            raise
        self._sync_folder()

    def digest(self) -> Lanes:
        """See `dcr.seams.LiveWeights.digest`."""
        return self._bound.digest()

    # ------------------------------------------------------------------ files

    def _next(self, ready: Ready) -> Placement:
        """Where the version that is being installed lies: a copy of every file with a tensor of this frame."""
        assert self._bound
        ownership = self._owned
        tensors = set(self._layout.frames[ready.frame].tensors)
        wanted = {self._entries[place.storage].file for place in self._places if place.tensor in tensors}
        for file in sorted(wanted - self._pending.keys()):
            ownership.require()
            self._pending[file] = Copy(self._folder / file, self._temporary(file))
            self._written = None
        if self._written is None:
            octets = {file: copy.octets for file, copy in self._pending.items()}
            self._written = placement_of(self._folder, self._layout, self._entries, self._places, octets)
        return self._written

    def _put_in_place(self) -> None:
        """Put finished copies where readers look for them, at one instant.

        Raises:
            StorageRebound: somebody else has written here since this loader did.
        """
        index = index_of(self._folder)
        names = {file: file if index is None else self._next_name(file) for file in self._pending}
        if index is None:
            self._require_unchanged()
            self._pending[SINGLE].move(self._folder / SINGLE)
        else:
            for file, name in names.items():
                self._pending[file].move(self._folder / name)
            index["weight_map"] = {name: names.get(file, file) for name, file in index["weight_map"].items()}
            self._replace_index(json.dumps(index, indent=2).encode())
        self._go_on(names)

    def _replace_index(self, data: bytes) -> None:
        temporary = self._temporary(INDEX)
        replacement.write(self._folder / INDEX, temporary, data, fsync=self._fsync)
        try:
            self._sync_folder()  # the files that it names are there whenever it is
            self._require_unchanged()
            temporary.replace(self._folder / INDEX)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def _go_on(self, names: dict[str, str]) -> None:
        """Go on from the files that readers see now; those of the version before the last one are removed."""
        self._seen |= self._unseen
        self._pending, self._written, self._unseen = {}, None, set()
        for file in self._old:
            (self._folder / file).unlink(missing_ok=True)
        self._old = {file for file, name in names.items() if file != name}
        self._entries = [replace(entry, file=names.get(entry.file, entry.file)) for entry in self._entries]
        self._stamp = stamp_of(self._folder)
        self._placement = placement_of(self._folder, self._layout, self._entries, self._places, {})

    def _require_unchanged(self) -> None:
        self._owned.require()
        if stamp_of(self._folder) != self._stamp:
            raise StorageRebound(
                f"somebody else has written to {self._folder} since this loader did: the new version is not there; "
                "let nobody else write there, then subscribe anew"
            )

    def _temporary(self, file: str) -> Path:
        return self._folder / f".{file}.{self._owned.owner.nonce[:8]}{TEMPORARY}"

    def _next_name(self, file: str) -> str:
        """The name of a file's next generation; another owner's has another one."""
        match = GENERATION.search(file)
        stem = file[: match.start()] if match else file.removesuffix(".safetensors")
        return f"{stem}-g{int(match[1]) + 1 if match else 1:06d}-{self._owned.owner.nonce[:8]}.safetensors"

    def _sync_folder(self) -> None:
        if self._fsync:
            descriptor = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _sweep(self) -> None:
        """Remove what an owner left behind that was killed, and files of versions before the last."""
        files = {entry.file for entry in self._entries} | self._old
        for path in self._folder.iterdir():
            unfinished = path.name.startswith(".") and path.name.endswith(TEMPORARY)
            outdated = GENERATION.search(path.name) is not None and path.name not in files
            if unfinished or outdated:
                path.unlink(missing_ok=True)

    def _drop(self) -> None:
        for copy in self._pending.values():
            copy.drop()
        self._pending, self._written, self._unseen = {}, None, set()

    @property
    def _bound(self) -> Placement:
        if self._placement is None:
            raise StateError("the loader is not bound to a layout yet; call bind first")
        return self._placement

    @property
    def _owned(self) -> Ownership:
        if self._ownership is None:
            raise StateError("the loader is not bound to a layout yet; call bind first")
        self._ownership.require_here()
        return self._ownership
