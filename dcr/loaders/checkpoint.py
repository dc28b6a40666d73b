"""What lies in a checkpoint directory of safetensors files: read from its index and headers, and refused by name.

    header   u64 size | JSON: name -> dtype, shape, data_offsets        (https://huggingface.co/docs/safetensors)

Everything is read as somebody else's file: cut short, or made to mislead.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr.errors import SchemaError
from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import Layout
from dcr.layout.schema import WIDTHS, TensorSpec, waived
from dcr.layout.views import UNSIGNED, Bits
from dcr.memory.placement import Place, Placement
from dcr.probing.names import hint

Octets = NDArray[np.uint8]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The format's dtypes that can be published, by torch's names.
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
SUB_BYTE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
MAX_HEADER_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file.

    spec: its dtype is the file's own word where it cannot be published. width: bytes of its elements, 0 in that case.
    start: its first byte in the file.
    """

    spec: TensorSpec
    width: int
    file: str
    start: int
    nbytes: int


def entries_of(folder: Path) -> list[Entry]:
    """The tensors of a checkpoint directory, in the order of their names.

    Raises:
        SchemaError: there is no checkpoint, or its index, headers and files do not fit each other.
    """
    index = index_of(folder)
    where = index["weight_map"] if index else None
    if where is not None:
        _require_files(folder, where)
    files = [SINGLE] if where is None else sorted(set(where.values()))
    entries = [entry for file in files for entry in _entries(folder / file)]
    if where is not None:
        _require_agreement(folder, where, entries)
    return sorted(entries, key=lambda entry: entry.spec.name)


def index_of(folder: Path) -> dict[str, Any] | None:
    """The index of a sharded checkpoint; None if it is a single file."""
    path = folder / INDEX
    try:
        if (folder / SINGLE).exists():
            return None
        index = _parse(path.read_bytes())
        where = index["weight_map"]
        files = [file for file in where.values() if not isinstance(file, str) or Path(file).name != file]
    except (FileNotFoundError, NotADirectoryError):
        state = f"holds neither {SINGLE} nor {INDEX}" if folder.is_dir() else "is no directory"
        raise SchemaError(f"expected a checkpoint of safetensors, but {folder} {state}; save one there first") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SchemaError(f"{path} is not an index of safetensors files: {error!r}; copy it anew") from error
    if files:
        raise SchemaError(f"{path} names {files[0]!r}, expected the name of a file in its directory")
    for name in (*where, *where.values()):
        _require_text(path, name)
    return dict(index)


def placement_of(
    folder: Path, layout: Layout, entries: Sequence[Entry], places: Sequence[Place], written: Mapping[str, Octets]
) -> Placement:
    """Where the tensors of a layout lie in the files, read-only; in `written` where a file is there."""
    files = {entry.file for entry in entries}
    octets = {file: written[file] if file in written else _mapped(folder / file) for file in files}
    return Placement(layout, [_bits(octets[entry.file], entry) for entry in entries], places)


def match(folder: Path, layout: Layout, entries: Sequence[Entry], waive: Sequence[str]) -> list[Place]:
    """The place of each published tensor among the entries.

    Raises:
        SchemaError: one has none or another dtype or shape, or a tensor of the files is neither published nor waived.
    """
    rest = {entry.spec.name: number for number, entry in enumerate(entries)}
    places: list[Place] = []
    for tensor, spec in enumerate(layout.schema.tensors):
        numbers = [rest.pop(name) for name in (spec.name, *spec.aliases) if name in rest]
        if not numbers:
            raise SchemaError(
                f"{spec.name} is published and is not in the checkpoint"
                + hint(spec.name, [entry.spec.name for entry in entries], published=True)
            )
        for number in numbers:
            _require_same(folder, spec, entries[number])
            places.append(Place(tensor, number, Box(0, 0, (Dim(spec.numel, 1, 1),))))
    for name, number in rest.items():
        if not waived(name, waive):
            raise SchemaError(_unpublished(folder, entries[number]))
    return places


def stamp_of(folder: Path) -> str:
    """What tells that a file of the checkpoint is another one, was written to, or is gone.

    Raises:
        SchemaError: there is no checkpoint.
    """
    index = index_of(folder)
    files = [INDEX, *sorted(set(index["weight_map"].values()))] if index else [SINGLE]
    return repr([(file, _stat(folder / file)) for file in files])


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


# ---------------------------------------------------------------------- an index and its files


def _require_files(folder: Path, where: Mapping[str, str]) -> None:
    missing = sorted({file for file in where.values() if not (folder / file).exists()})
    if missing:
        names = sorted(name for name, file in where.items() if file == missing[0])
        raise SchemaError(
            f"{folder / missing[0]} is missing: {INDEX} expects {_listed(names)} in it"
            f"{f', and {len(missing) - 1} more files are missing' if missing[1:] else ''}; copy the checkpoint anew"
        )


def _require_agreement(folder: Path, where: Mapping[str, str], entries: Sequence[Entry]) -> None:
    counts = Counter(entry.spec.name for entry in entries)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        files = ", ".join(entry.file for entry in entries if entry.spec.name == twice[0])
        raise SchemaError(f"{folder}: {twice[0]} lies in {files}, expected in one file only; save the checkpoint anew")
    homes = {entry.spec.name: entry.file for entry in entries}
    if astray := sorted(name for name, file in where.items() if homes.get(name) != file):
        name = astray[0]
        home = f"in {homes[name]}" if name in homes else "in none of its files"
        raise SchemaError(
            f"{folder}: {INDEX} expects {name} in {where[name]}, and it is {home} "
            f"({len(astray)} tensors differ so); save the checkpoint anew"
        )
    if extra := sorted(homes.keys() - where.keys()):
        raise SchemaError(f"{folder}: {INDEX} does not know {_listed(extra)} of {homes[extra[0]]}; save it anew")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more tensors"


# ---------------------------------------------------------------------- one file


def _entries(path: Path) -> Iterator[Entry]:
    """The tensors of one file, from its header."""
    try:
        length = path.stat().st_size
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            _require_header(path, size, length)
            header = _parse(file.read(size))
        about = {name: _read(path, name, tensor) for name, tensor in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SchemaError(f"{path} is not a safetensors file: {error!r}; copy it anew") from error
    data, end, before = 8 + size, 0, ""
    for name, (spec, width, first, last) in sorted(about.items(), key=lambda item: item[1][2:]):
        if first < end and last > first:
            raise SchemaError(f"{path}: {name} begins at byte {data + first}, within {before}; save the file anew")
        if data + last > length:
            raise SchemaError(
                f"{path} is cut short: {name} ends at byte {data + last}, the file at {length}; copy it anew"
            )
        yield Entry(spec, width, path.name, data + first, last - first)
        if last > end:
            end, before = last, name


def _require_header(path: Path, size: int, length: int) -> None:
    if length < 8:
        raise SchemaError(f"{path} is cut short: it has {length} bytes, expected 8 and a header; copy it anew")
    if size > MAX_HEADER_BYTES:
        raise SchemaError(f"{path}: a header of {size} bytes; at most {MAX_HEADER_BYTES} are read")
    if 8 + size > length:
        raise SchemaError(
            f"{path} is cut short: its header ends at byte {8 + size}, the file at {length}; copy it anew"
        )


def _parse(data: bytes) -> dict[str, Any]:
    """A JSON object whose members have different names.

    Raises:
        ValueError: it is no such thing.
    """
    document = json.loads(data, object_pairs_hook=_distinct)
    if not isinstance(document, dict):
        raise ValueError(f"expected a JSON object, found {type(document).__name__}")
    return document


def _distinct(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"{name!r} occurs twice")
        members[name] = value
    return members


def _read(path: Path, name: str, about: Mapping[str, Any]) -> tuple[TensorSpec, int, int, int]:
    """One tensor of a header: its spec, its elements' width, and its first and last byte in the data."""
    _require_text(path, name)
    dtype, shape, (first, last) = about["dtype"], about["shape"], about["data_offsets"]
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in (*shape, first, last)):
        raise ValueError(
            f"{name}: expected a dtype, a shape and two offsets, found {dtype!r}, {shape!r}, {first, last}"
        )
    if last < first:
        raise SchemaError(f"{path}: {name} ends at byte {last} of the data, before it begins at {first}")
    spec, width = _spec(name, dtype, tuple(shape))
    bits = SUB_BYTE_BITS.get(dtype, 8 * width)
    if bits and 8 * (last - first) != math.prod(shape) * bits:
        raise SchemaError(
            f"{path}: {name} takes {last - first} bytes at {first} of the data, "
            f"expected {math.prod(shape) * bits / 8:g} for {dtype} {list(shape)}"
        )
    return spec, width, first, last


def _spec(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[TensorSpec, int]:
    """A tensor's spec, and its elements' width in bytes: 0 if they cannot be published."""
    known = DTYPES.get(dtype, "")
    if dtype == "F4":  # the format counts values, torch the bytes that hold two each
        if not shape or shape[-1] % 2:
            return TensorSpec(name, "F4 in rows that end within a byte", shape), 0
        shape = (*shape[:-1], shape[-1] // 2)
    width = WIDTHS.get(known, 0)
    return TensorSpec(name, known if width else dtype, shape), width


def _require_text(path: Path, name: str) -> None:
    """Names cross to peers as UTF-8; JSON can spell what has no such form (a lone surrogate)."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise SchemaError(
            f"{path}: the name {name!r} is no text ({error.reason}); save the checkpoint under another name"
        ) from None


def _unpublished(folder: Path, entry: Entry) -> str:
    name = entry.spec.name
    if entry.width:
        return f"{name} is in the checkpoint and not published: it would keep old bits; publish or waive it"
    return (
        f"{folder / entry.file}: {name} has dtype {entry.spec.dtype}, which is not one of {', '.join(DTYPES)}; "
        f"to leave it as it lies, write waive=[{name!r}]"
    )


def _require_same(folder: Path, spec: TensorSpec, entry: Entry) -> None:
    if not entry.width or (entry.spec.dtype, entry.spec.shape) != (spec.dtype, spec.shape):
        raise SchemaError(
            f"{spec.name}: published as {spec.dtype} {spec.shape}, "
            f"in {folder / entry.file} it is {entry.spec.dtype} {entry.spec.shape}"
        )
    if entry.start % spec.width:
        raise SchemaError(
            f"{folder / entry.file}: {entry.spec.name} begins at byte {entry.start}, expected a multiple of its "
            f"elements' {spec.width} bytes; write the file anew with safetensors"
        )


def _mapped(path: Path) -> Octets:
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise SchemaError(f"{path} was removed or emptied while it was being read: {error}; read it again") from error


def _bits(octets: Octets, entry: Entry) -> Bits:
    """An entry's elements; none of what can not be published, which nobody asks for."""
    if not entry.width:
        return octets[:0]
    bits: Bits = octets[entry.start : entry.start + entry.nbytes].view(UNSIGNED[entry.width])
    return bits
