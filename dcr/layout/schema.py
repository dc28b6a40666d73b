"""What a model consists of in canonical coordinates: ordered tensor specs, and their digest.

Names are Hugging Face checkpoint names; dtypes are torch's names without the prefix.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import msgspec
import numpy as np

from dcr.errors import OptionError, SchemaError
from dcr.layout.views import Lanes

# Bytes per element of the dtypes whose element is one word, an unsigned integer of 1, 2, 4 or 8 bytes. An element of
# float4_e2m1fn_x2 is the byte that torch keeps, with two values in it.
WIDTHS: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
}
# The same for those that only reserve memory: torch has no kernels for them, and keeps an element of uint4 in a byte.
SHELLS: dict[str, int] = {
    **{f"{kind}{bits}": 1 for kind in ("uint", "int") for bits in range(1, 8)},
    **dict.fromkeys(("bits1x8", "bits2x4", "bits4x2", "bits8"), 1),
    "bits16": 2,
}
# The dtypes whose element is two words of 8 bytes, the real part first. Canonical indices, boxes, positions and digests
# count words, so that everything that moves bits knows words only; a shape stays the tensor's own.
PAIRS = frozenset({"complex128"})
DTYPES = (*WIDTHS, *SHELLS, *PAIRS)


def width_of(dtype: str) -> int:
    """Bytes per word of a dtype that can be published."""
    return 8 if dtype in PAIRS else WIDTHS.get(dtype) or SHELLS[dtype]


def words_of(dtype: str) -> int:
    """Words per element of a dtype that can be published."""
    return 2 if dtype in PAIRS else 1


def patterns(waive: Sequence[str]) -> tuple[str, ...]:
    """Patterns of names (as in fnmatch), as they are given to `waive`.

    Raises:
        OptionError: one text, each letter of which would be a pattern, or something else that is no sequence of texts.
    """
    if isinstance(waive, str):
        raise OptionError(f"expected a sequence of name patterns, found the text {waive!r}; write waive=[{waive!r}]")
    found = tuple(waive)
    if wrong := [one for one in found if not isinstance(one, str)]:
        raise OptionError(f"expected name patterns such as 'v_head.*', found {wrong[0]!r}")
    return found


def waived(name: str, waive: Sequence[str]) -> bool:
    """Whether a name fits one of some patterns."""
    return any(fnmatchcase(name, pattern) for pattern in waive)


def misfit(option: str, pattern: str, tensors: Iterable[Sequence[str]]) -> str:
    """Why a pattern fits no tensor, or only a further name of a tied one, which is published under its first.

    option: what its user wrote. tensors: the names of each, the one that it is published under first.
    """
    first = ""
    for owner, *others in tensors:
        first = first or owner
        for name in others:
            if fnmatchcase(name, pattern):
                return f"{option} fits {name}, which is tied to {owner} and published under that name; write {owner!r}"
    return f"{option} fits no tensor; names here are {first!r} and the like"


def require_text(name: str) -> None:
    """Check that a name can be sent as UTF-8.

    Raises:
        SchemaError: it cannot; shows it.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise SchemaError(
            f"the name {name!a} is no valid text ({error.reason} at {error.start}); rename the module or tensor"
        ) from None


class TensorSpec(msgspec.Struct, frozen=True):
    """One canonical tensor: its name, dtype and shape, and the further names under which the trainer ties it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Words in it: its elements, or twice as many of a dtype in PAIRS."""
        return math.prod(self.shape) * words_of(self.dtype)

    @property
    def width(self) -> int:
        """Bytes per word."""
        return width_of(self.dtype)


@dataclass(frozen=True, slots=True)
class Schema:
    """The ordered tensors of a model; `digest` (32 bytes) names this very list.

    numel: words of all of them; nbytes: of a dense checkpoint.

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
            if spec.dtype not in DTYPES:
                raise SchemaError(f"{spec.name}: dtype {spec.dtype!r} is not one of {', '.join(DTYPES)}")
            if any(not 0 <= n < 1 << 62 for n in spec.shape) or spec.numel >= 1 << 62:
                raise SchemaError(f"{spec.name}: shape {spec.shape} has a negative extent, or 2^62 elements or more")
            for name in (spec.name, *spec.aliases):
                require_text(name)
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
