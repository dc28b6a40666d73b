"""The value maps of sources: which checkpoint dtype a live tensor is published in, and by which cast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from dcr import reference
from dcr.errors import OptionError, SchemaError
from dcr.schema import DTYPES, misfit

CASTS = {("float32", "bfloat16"): reference.F32_BF16, ("float32", "float16"): reference.F32_F16}

# One dtype applies to all float32 parameters; a mapping from name patterns (as in fnmatch) to dtypes says more.
Dtypes = str | torch.dtype | Mapping[str, str | torch.dtype] | None
Named = str | Mapping[str, str] | None


def named_dtypes(dtype: Dtypes, tensors: Sequence[Sequence[str]]) -> Named:
    """The same with dtypes by name, checked against the tensors.

    tensors: the names of each, the one that it is published under first.

    Raises:
        OptionError: it is something else. SchemaError: no such dtype can be published, or a pattern fits no tensor, or
            only a further name of a tied one, so that what it meant would stay as it is; names it.
    """
    if dtype is None or isinstance(dtype, (str, torch.dtype)):
        return None if dtype is None else _name(dtype)
    if not isinstance(dtype, Mapping):
        raise OptionError(
            "expected a dtype such as 'bfloat16' or torch.bfloat16, or a mapping from name patterns to dtypes, such "
            f"as {{'*.weight': 'bfloat16'}}; found {type(dtype).__name__}"
        )
    for pattern in dtype:
        if not any(fnmatchcase(names[0], pattern) for names in tensors):
            raise SchemaError(misfit(f"dtype={{{pattern!r}: ...}}", pattern, tensors))
    return {pattern: _name(wanted) for pattern, wanted in dtype.items()}


def _name(dtype: str | torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SchemaError(f"expected a dtype that can be published ({', '.join(DTYPES)}), found {dtype!r}")
    return name


def canonical_dtype(name: str, have: str, is_parameter: bool, dtype: Named) -> str:
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
