"""What a model consists of in canonical coordinates: ordered tensor specs, and their digest.

Names are Hugging Face checkpoint names; dtypes are torch's names without the prefix.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from dcr.errors import SchemaError
from dcr.views import Lanes

# Element width in bytes of every dtype that can be published.
WIDTHS: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}


def patterns(waive: Sequence[str]) -> tuple[str, ...]:
    """Patterns of names (as in fnmatch), as they are given to `waive`.

    Raises:
        TypeError: one text, each letter of which would be a pattern, or something else that is no sequence of texts.
    """
    if isinstance(waive, str):
        raise TypeError(f"expected a sequence of name patterns, found the text {waive!r}; write waive=[{waive!r}]")
    found = tuple(waive)
    if wrong := [one for one in found if not isinstance(one, str)]:
        raise TypeError(f"expected name patterns such as 'v_head.*', found {wrong[0]!r}")
    return found


class TensorSpec(msgspec.Struct, frozen=True):
    """One canonical tensor: its name, dtype and shape, and the further names under which the trainer ties it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Bytes per element."""
        return WIDTHS[self.dtype]


@dataclass(frozen=True, slots=True)
class Schema:
    """The ordered tensors of a model; `digest` (32 bytes) names this very list.

    numel: elements of all of them; nbytes: of a dense checkpoint.

    Raises:
        SchemaError: an unknown dtype, a negative extent, or a name (or alias) that occurs twice.
    """

    tensors: tuple[TensorSpec, ...]
    digest: bytes = field(init=False)
    numel: int = field(init=False)
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for spec in self.tensors:
            if spec.dtype not in WIDTHS:
                raise SchemaError(f"{spec.name}: dtype {spec.dtype!r} is not one of {', '.join(WIDTHS)}")
            if any(not 0 <= n < 1 << 62 for n in spec.shape) or spec.numel >= 1 << 62:
                raise SchemaError(f"{spec.name}: shape {spec.shape} has a negative extent, or 2^62 elements or more")
            for name in (spec.name, *spec.aliases):
                if name in seen:
                    raise SchemaError(f"the name {name!r} occurs twice; each canonical tensor has one owner")
                seen.add(name)
        object.__setattr__(
            self, "digest", hashlib.blake2b(msgspec.msgpack.encode(self.tensors), digest_size=32).digest()
        )
        object.__setattr__(self, "numel", sum(spec.numel for spec in self.tensors))
        object.__setattr__(self, "nbytes", sum(spec.numel * spec.width for spec in self.tensors))


def keys(tensors: Iterable[TensorSpec]) -> Lanes:
    """The digest keys uint64 [T, 2] of tensors; a key depends on name, dtype and shape only."""
    packed = b"".join(
        hashlib.blake2b(msgspec.msgpack.encode((spec.name, spec.dtype, spec.shape)), digest_size=16).digest()
        for spec in tensors
    )
    return np.frombuffer(packed, "<u8").reshape(-1, 2).astype(np.uint64)
