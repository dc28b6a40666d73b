"""The audit: every tensor of every receiver against the trainer, on integer views.

Rule of this file: it does not trust dcr. It reads plain files of raw bits that each process wrote by itself and
compares them as integers, so -0.0, NaN payloads and denormals count. No torch here.

Shapes: N elements of one tensor.
"""

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt


class DumpedTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor in a dump: N elements of `width` bytes at `offset` (bytes) in the bits file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    width: int
    offset: int
    elements: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one process holds of a version."""

    member: str
    version: int
    entries: tuple[DumpedTensor, ...]


class Difference(msgspec.Struct, frozen=True):
    """A tensor that is not the trainer's. `index` is the first flat element index that differs; bits are hex."""

    tensor: str
    reason: str
    index: int | None = None
    count: int = 0
    expected: str = ""
    found: str = ""

    def __str__(self) -> str:
        if self.index is None:
            return f"{self.tensor}: {self.reason}"
        return f"{self.tensor}[{self.index}]: trainer {self.expected}, receiver {self.found} ({self.count} differ)"


class AuditResult(msgspec.Struct, frozen=True):
    """The result for one receiver."""

    member: str
    version: int
    tensors: int
    elements: int
    bytes: int
    differences: tuple[Difference, ...]


def write_dump(
    folder: Path, *, member: str, version: int, tensors: list[tuple[str, str, tuple[int, ...], npt.NDArray[np.generic]]]
) -> None:
    """Write (name, dtype name, shape, integer view of N elements) of each tensor; the manifest comes last."""
    folder.mkdir(parents=True)
    entries: list[DumpedTensor] = []
    offset = 0
    with (folder / "bits").open("wb") as out:
        for name, dtype, shape, bits in tensors:
            flat = np.ascontiguousarray(bits).reshape(-1)
            entries.append(DumpedTensor(name, dtype, shape, flat.itemsize, offset, flat.size))
            out.write(flat.data)
            offset += flat.nbytes
    (folder / "manifest.json").write_bytes(msgspec.json.encode(Manifest(member, version, tuple(entries))))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a dump. Raises `OSError` or `msgspec.DecodeError` where there is none."""
    return msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)


def read_bits(folder: Path, entry: DumpedTensor) -> npt.NDArray[np.unsignedinteger]:
    """The N elements of one tensor as unsigned integers of its width. Raises `ValueError` on a short file."""
    bits = np.fromfile(folder / "bits", dtype=f"<u{entry.width}", count=entry.elements, offset=entry.offset)
    if bits.size != entry.elements:
        raise ValueError(f"{folder}/bits holds {bits.size} of the {entry.elements} elements of {entry.name}")
    return bits


def audit(trainer: Path, receiver: Path) -> AuditResult:
    """Compare every tensor of one receiver's dump with the trainer's. Costs one pass over both files."""
    theirs, ours = read_manifest(trainer), read_manifest(receiver)
    held = {entry.name: entry for entry in ours.entries}
    differences = []
    for entry in theirs.entries:
        mirror = held.pop(entry.name, None)
        found = (
            Difference(entry.name, "the receiver does not hold this tensor")
            if mirror is None
            else _compare(trainer, entry, receiver, mirror)
        )
        if found is not None:
            differences.append(found)
    differences += [Difference(name, "the trainer does not hold this tensor") for name in held]
    if theirs.version != ours.version:
        differences.append(
            Difference("(version)", f"the trainer dumped version {theirs.version}, the receiver {ours.version}")
        )
    return AuditResult(
        member=ours.member,
        version=ours.version,
        tensors=len(theirs.entries),
        elements=sum(entry.elements for entry in theirs.entries),
        bytes=sum(entry.elements * entry.width for entry in theirs.entries),
        differences=tuple(differences),
    )


def _compare(trainer: Path, entry: DumpedTensor, receiver: Path, mirror: DumpedTensor) -> Difference | None:
    if (entry.dtype, entry.shape, entry.width) != (mirror.dtype, mirror.shape, mirror.width):
        return Difference(
            entry.name, f"the trainer has {entry.dtype}{entry.shape}, the receiver {mirror.dtype}{mirror.shape}"
        )
    want, have = read_bits(trainer, entry), read_bits(receiver, mirror)
    differing = np.flatnonzero(want != have)
    if not differing.size:
        return None
    index, digits = int(differing[0]), 2 * entry.width
    return Difference(
        tensor=entry.name,
        reason="bits differ",
        index=index,
        count=int(differing.size),
        expected=f"0x{int(want[index]):0{digits}x}",
        found=f"0x{int(have[index]):0{digits}x}",
    )
