"""The value maps of sources: which checkpoint dtype a live tensor is published in, and by which cast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from dcr import reference
from dcr.errors import SchemaError

CASTS = {("float32", "bfloat16"): reference.F32_BF16, ("float32", "float16"): reference.F32_F16}

# One name applies to all float32 parameters; a mapping from name patterns (as in fnmatch) to dtypes says more.
Dtypes = str | Mapping[str, str] | None


def require_matches(dtype: Dtypes, names: Sequence[str]) -> None:
    """A pattern that fits no name is a mistake: what it meant stays as it is.

    Raises:
        SchemaError: names the pattern.
    """
    for pattern in () if dtype is None or isinstance(dtype, str) else dtype:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SchemaError(f"the pattern {pattern!r} fits no tensor; names here are {names[0]!r} and the like")


def canonical_dtype(name: str, have: str, is_parameter: bool, dtype: Dtypes) -> str:
    """The dtype that a tensor of dtype `have` is published in."""
    if isinstance(dtype, str):
        return dtype if is_parameter and have == "float32" else have
    for pattern, wanted in (dtype or {}).items():
        if fnmatchcase(name, pattern):
            return wanted
    return have


def kind(name: str, have: str, wanted: str) -> int:
    """The value map from one dtype to another, as in `dcr.reference`.

    Raises:
        SchemaError: there is none; names the tensor.
    """
    if wanted == have:
        return reference.NONE
    try:
        return CASTS[have, wanted]
    except KeyError:
        known = ", ".join(f"{one} to {other}" for one, other in CASTS)
        raise SchemaError(f"{name}: no cast from {have} to {wanted}; known: {known}") from None
