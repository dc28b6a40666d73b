"""A checkpoint directory of safetensors files as a loader: each version replaces the one before at one instant.

A single `model.safetensors` is written anew beside itself and renamed over it. Of a sharded checkpoint every shard that
a version touches gets a file of a new name, and then the index, which names them, is renamed over the old one. So
whoever opens the directory finds one version or the next, and never a mixture; the files of the version before stay
until the version after, for readers that have read its index already. What a version costs is a copy of the files that
it touches.

    header   u64 size | JSON: name -> dtype, shape, data_offsets        (https://huggingface.co/docs/safetensors)
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr.boxes import Box, Dim
from dcr.errors import SchemaError, StateError
from dcr.frames import Layout
from dcr.patch import Change
from dcr.placement import Place, Placement
from dcr.ready import Ready
from dcr.schema import TensorSpec, patterns, waived
from dcr.views import UNSIGNED, Bits, Lanes

Octets = NDArray[np.uint8]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F4": "float4_e2m1fn_x2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
PACKED = {"F4": 2}  # values per element of torch; a file counts values in the last dimension

MAX_HEADER_BYTES = 1 << 28
GENERATION = re.compile(r"-g(\d{6,})(?=\.safetensors$)")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file; start: its first byte in the file."""

    spec: TensorSpec
    file: str
    start: int


def entries_of(folder: Path, waive: Sequence[str] = ()) -> list[Entry]:
    """The tensors of a checkpoint directory, in the order of their names; waive: as for `SafetensorsLoader`.

    Raises:
        SchemaError: there is no checkpoint, or its index, headers and files do not fit each other.
    """
    index = index_of(folder)
    files = sorted(set(index["weight_map"].values())) if index else [SINGLE]
    found = [entry for file in files for entry in _entries(folder, file, waive)]
    if index:
        held = {entry.spec.name: entry.file for entry in found}
        wrong = sorted(name for name, file in index["weight_map"].items() if held.get(name) != file)
        if wrong or len(held) != len(found):
            raise SchemaError(f"{folder}: its index and files differ about {', '.join(wrong[:3]) or 'some tensors'}")
    return sorted(found, key=lambda entry: entry.spec.name)


def index_of(folder: Path) -> dict[str, Any] | None:
    """The index of a sharded checkpoint; None if it is a single file."""
    if (folder / SINGLE).exists():
        return None
    try:
        index = json.loads((folder / INDEX).read_bytes())
        if all(isinstance(file, str) and Path(file).name == file for file in index["weight_map"].values()):
            return dict(index)
    except (FileNotFoundError, NotADirectoryError):
        held = f"holds neither {SINGLE} nor {INDEX}" if folder.is_dir() else "is no directory"
        raise SchemaError(f"expected a checkpoint of safetensors, but {folder} {held}; save one there first") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchemaError(f"{folder / INDEX} is not an index of safetensors files: {error!r}") from error
    raise SchemaError(f"{folder / INDEX} names files outside of its directory")


class SafetensorsLoader:
    """A checkpoint directory, matched to published tensors by name; read by memory map, never changed in place.

    waive: patterns (as in fnmatch) of tensors in the files that need not be published, of any dtype. fsync: False where
    a version may be lost with the host. sweep: False to remove nothing that an installation left behind.

    Raises:
        SchemaError: there is no checkpoint. TypeError: `waive` is no sequence.
    """

    def __init__(
        self, folder: str | Path, *, waive: Sequence[str] = (), fsync: bool = True, sweep: bool = True
    ) -> None:
        self._folder = Path(folder)
        index_of(self._folder)
        self._waive = patterns(waive)
        self._fsync = fsync
        self._sweeps = sweep
        self._placement: Placement | None = None  # over the files that readers see
        self._written: Placement | None = None  # over those that are being written
        self._pending: dict[str, _Copy] = {}
        self._old: set[str] = set()
        self._first = self._stamp = ""  # of the files as they were found, and as they were left here

    # ------------------------------------------------------------------ the seam

    def bind(self, layout: Layout) -> None:
        """See `dcr.seams.Loader.bind`."""
        entries = entries_of(self._folder, self._waive)
        places = _places(layout, entries, self._waive)
        self._drop()
        self._placement = Placement(layout, self._storages(entries), places)
        self._layout, self._entries, self._places = layout, entries, places
        self._files = {entry.file for entry in entries}
        if (stamp := self._stat()) != self._stamp:
            self._first = self._stamp = stamp
        if self._sweeps:
            self._sweep()

    def epoch(self) -> bytes:
        """See `dcr.seams.Loader.epoch`: it changes if somebody else writes to the directory."""
        stamp = self._stat()
        first = self._first if stamp == self._stamp else stamp
        return hashlib.blake2b(first.encode(), digest_size=16).digest()

    def prepare(self, frame: int, change: Change) -> Ready:
        """See `dcr.seams.Loader.prepare`."""
        return self._bound.prepare(frame, change)

    def read(self, frame: int) -> Bits:
        """See `dcr.seams.Readable.read`."""
        return self._bound.read(frame)

    def install(self, ready: Ready) -> None:
        """See `dcr.seams.Loader.install`: into files that nobody sees until `settle`."""
        self._next(ready).install(ready)

    def undo(self, ready: Ready) -> None:
        """See `dcr.seams.Loader.undo`: as `install`."""
        self._next(ready).undo(ready)

    def settle(self) -> None:
        """See `dcr.seams.Loader.settle`: here a version becomes the one that the directory holds."""
        if not self._pending:
            return
        try:
            for copy in self._pending.values():
                copy.close(self._fsync)
            renamed = self._rename()
        except BaseException:
            self._drop()  # the index names the old files still: what comes next begins with them
            raise
        self._pending, self._written = {}, None
        for file in self._old:
            (self._folder / file).unlink(missing_ok=True)
        self._old = {file for file, now in renamed.items() if file != now}
        self._entries = [_moved(entry, renamed) for entry in self._entries]
        self._files = {entry.file for entry in self._entries}
        self._stamp = self._stat()
        self._placement = Placement(self._layout, self._storages(self._entries), self._places)

    def digest(self) -> Lanes:
        """See `dcr.seams.Loader.digest`."""
        return self._bound.digest()

    # ------------------------------------------------------------------ files

    def _storages(self, entries: Sequence[Entry]) -> list[Bits]:
        """The tensors of some files, read-only; of those that are being written, their copies."""
        maps: dict[str, Octets] = {file: copy.octets for file, copy in self._pending.items()}
        for file in {entry.file for entry in entries} - maps.keys():
            maps[file] = np.memmap(self._folder / file, np.uint8, "r")
        return [_bits(maps[entry.file], entry) for entry in entries]

    def _next(self, ready: Ready) -> Placement:
        """Where the version that is being installed lies: a copy of every file with a tensor of this frame."""
        assert self._bound
        tensors = set(self._layout.frames[ready.frame].tensors)
        wanted = {self._entries[place.storage].file for place in self._places if place.tensor in tensors}
        if missing := wanted - self._pending.keys():
            for file in sorted(missing):
                self._pending[file] = _Copy(self._folder / file, self._folder / f".{file}.dcr")
            self._written = None
        if self._written is None:
            self._written = Placement(self._layout, self._storages(self._entries), self._places)
        return self._written

    def _rename(self) -> dict[str, str]:
        """Put finished copies where readers look for them, at one instant; the new name of each file."""
        index = index_of(self._folder)
        if index is None:
            (self._folder / f".{SINGLE}.dcr").replace(self._folder / SINGLE)
            self._sync_folder()
            return {SINGLE: SINGLE}
        renamed = {file: _next_name(file) for file in self._pending}
        for file, name in renamed.items():
            (self._folder / f".{file}.dcr").replace(self._folder / name)
        index["weight_map"] = {name: renamed.get(file, file) for name, file in index["weight_map"].items()}
        temporary = self._folder / f".{INDEX}.dcr"
        with temporary.open("wb") as out:
            out.write(json.dumps(index, indent=2).encode())
            out.flush()
            if self._fsync:
                os.fsync(out.fileno())
        self._sync_folder()
        temporary.replace(self._folder / INDEX)
        self._sync_folder()
        return renamed

    def _sync_folder(self) -> None:
        if self._fsync:
            descriptor = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _stat(self) -> str:
        """What tells that a file of the checkpoint is another one, or was written to."""
        index = index_of(self._folder)
        files = [INDEX, *sorted(set(index["weight_map"].values()))] if index else [SINGLE]
        stats = [(file, (self._folder / file).stat()) for file in files]
        return repr([(file, stat.st_ino, stat.st_size, stat.st_mtime_ns) for file, stat in stats])

    def _sweep(self) -> None:
        """Remove what an installation left behind that did not end, and files of versions before the last."""
        for path in self._folder.iterdir():
            unfinished = path.name.startswith(".") and path.name.endswith(".dcr")
            outdated = GENERATION.search(path.name) is not None and path.name not in self._files | self._old
            if unfinished or outdated:
                path.unlink(missing_ok=True)

    def _drop(self) -> None:
        for copy in self._pending.values():
            copy.drop()
        self._pending, self._written = {}, None

    @property
    def _bound(self) -> Placement:
        if self._placement is None:
            raise StateError("the loader is not bound to a layout yet; call bind first")
        return self._placement


class _Copy:
    """A copy of a file that is being written, as a shared memory map."""

    def __init__(self, source: Path, target: Path) -> None:
        self._target = target
        shutil.copyfile(source, target)
        self._file = target.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), 0)
        self.octets = np.frombuffer(self._map, np.uint8)

    def close(self, fsync: bool) -> None:
        """Everything is in the file, and on the disk if asked."""
        if fsync:
            self._map.flush()
            os.fsync(self._file.fileno())
        self._file.close()

    def drop(self) -> None:
        self._file.close()
        self._target.unlink(missing_ok=True)


def _entries(folder: Path, file: str, waive: Sequence[str]) -> Iterator[Entry]:
    """The tensors of one file, from its header."""
    path = folder / file
    try:
        with path.open("rb") as handle:
            size = int.from_bytes(handle.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise SchemaError(f"{path}: a header of {size} bytes; at most {MAX_HEADER_BYTES} are read")
            header = json.loads(handle.read(size))
        length = path.stat().st_size
        for name, about in header.items():
            if name != "__metadata__":
                yield _entry(path, name, about, 8 + size, length, waive)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchemaError(f"{path} is not a safetensors file: {error!r}") from error


def _entry(path: Path, name: str, about: dict[str, Any], data: int, length: int, waive: Sequence[str]) -> Entry:
    first, last = about["data_offsets"]
    spec = _spec(path, name, about, last - first, waive)
    if last - first != spec.numel * spec.width or first < 0 or data + last > length:
        raise SchemaError(f"{path}: {name} takes {last - first} bytes at {first}, expected {spec.numel * spec.width}")
    if (data + first) % spec.width:
        raise SchemaError(f"{path}: {name} is not aligned to its elements; write the file anew with safetensors")
    return Entry(spec, path.name, data + first)


def _spec(path: Path, name: str, about: dict[str, Any], size: int, waive: Sequence[str]) -> TensorSpec:
    """A tensor as torch has it; one of an unknown dtype is bytes that are left as they lie, if it is waived."""
    dtype, shape = DTYPES.get(about["dtype"]), tuple(int(n) for n in about["shape"])
    if dtype is None and waived(name, waive):
        return TensorSpec(name, "uint8", (size,))
    if dtype is None:
        raise SchemaError(
            f"{path}: {name} has dtype {about['dtype']}, which is not one of {', '.join(DTYPES)}; "
            f"to leave it as it lies, write waive=[{name!r}]"
        )
    packed = PACKED.get(about["dtype"], 1)
    if packed > 1 and not (shape and shape[-1] % packed == 0):
        raise SchemaError(f"{path}: {name} is {about['dtype']} {shape}: {packed} values share a byte, in whole bytes")
    return TensorSpec(name, dtype, (*shape[:-1], shape[-1] // packed) if packed > 1 else shape)


def _places(layout: Layout, entries: Sequence[Entry], waive: Sequence[str]) -> list[Place]:
    by_name = {entry.spec.name: number for number, entry in enumerate(entries)}
    places: list[Place] = []
    for tensor, spec in enumerate(layout.schema.tensors):
        found = [by_name.pop(name) for name in (spec.name, *spec.aliases) if name in by_name]
        if not found:
            raise SchemaError(f"{spec.name} is published and is not in the checkpoint")
        for number in found:
            held = entries[number].spec
            if (held.dtype, held.shape) != (spec.dtype, spec.shape):
                raise SchemaError(
                    f"{spec.name}: published as {spec.dtype} {spec.shape}, in the checkpoint {held.dtype} {held.shape}"
                )
            places.append(Place(tensor, number, Box(0, 0, (Dim(spec.numel, 1, 1),))))
    for name in by_name:
        if not waived(name, waive):
            raise SchemaError(
                f"{name} is in the checkpoint and not published: it would keep old bits; publish or waive it"
            )
    return places


def _bits(octets: Octets, entry: Entry) -> Bits:
    bits: Bits = octets[entry.start : entry.start + entry.spec.numel * entry.spec.width].view(
        UNSIGNED[entry.spec.width]
    )
    return bits


def _next_name(file: str) -> str:
    """The name of a file's next generation."""
    found = GENERATION.search(file)
    if found is None:
        return f"{file.removesuffix('.safetensors')}-g000001.safetensors"
    return file[: found.start()] + f"-g{int(found[1]) + 1:06d}" + file[found.end() :]


def _moved(entry: Entry, renamed: dict[str, str]) -> Entry:
    return Entry(entry.spec, renamed.get(entry.file, entry.file), entry.start)
