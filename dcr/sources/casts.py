"""The value maps of sources: which checkpoint dtype a live tensor is published in, and by which cast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch

from dcr.errors import OptionError, SchemaError
from dcr.kernels import reference
from dcr.layout.schema import DTYPES, misfit

CASTS = {("float32", "bfloat16"): reference.F32_BF16, ("float32", "float16"): reference.F32_F16}

# One dtype applies to all float32 parameters; a mapping from name patterns (as in fnmatch) to dtypes says more.
Dtypes = str | torch.dtype | Mapping[str, str | torch.dtype] | None
Named = str | Mapping[str, str] | None


def named_dtypes(dtype: Dtypes, tensors: Sequence[Sequence[str]]) -> Named:
    """The same with dtypes by name, checked against the tensors.

    tensors: the names of each, the one that it is published under first.

    Raises:
        OptionError: it is something else. SchemaError: no such dtype can be published, or a pattern fits no tensor, or
            a tied one is to be published in another dtype under a further name than under its first; names it.
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
    asked = {pattern: _name(wanted) for pattern, wanted in dtype.items()}
    for names in tensors:
        for alias in names[1:]:
            fit = _first_fit(alias, asked)
            if fit is not None and asked[fit] != asked.get(_first_fit(names[0], asked) or ""):
                raise SchemaError(misfit(f"dtype={{{fit!r}: ...}}", fit, [(names[0], alias)]))
    return asked


def _first_fit(name: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def _name(dtype: str | torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SchemaError(f"expected a dtype that can be published ({', '.join(DTYPES)}), found {dtype!r}")
    return name


def canonical_dtype(name: str, have: str, is_parameter: bool, dtype: Named) -> str:
    """The dtype that a tensor of dtype `have` is published in."""
    if isinstance(dtype, str):
        return dtype if is_parameter and have == "float32" else have
    pattern = _first_fit(name, dtype or {})
    return have if dtype is None or pattern is None else dtype[pattern]


def kind(name: str, have: str, wanted: str) -> int:
    """The value map from one dtype to another, as in `dcr.kernels.reference`.

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
