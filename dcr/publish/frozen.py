"""Tensors that must not change: said by name, left out of deltas, and looked at one slice per version.

A slice of them is compared with what was published, and another one with the next version, so that all are seen within
SLICES versions. A slice in which something changed is the next one again, until it is as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from dcr.errors import OptionError, SchemaError
from dcr.layout.frames import Shard
from dcr.layout.schema import Schema, misfit
from dcr.layout.views import Bits
from dcr.seams import Copy, Residual, Source, Twins

SLICES = 64
T = TypeVar("T")


def frozen_tensors(patterns: Sequence[str], schema: Schema) -> frozenset[int]:
    """The tensors that fit some name patterns (as in fnmatch), as indices into a schema.

    Raises:
        OptionError: these are no patterns. SchemaError: one fits no tensor; or of a tied one, a further name fits and
            the first does not, so that it would not be frozen.
    """
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise OptionError(f"expected a sequence of name patterns, found {patterns!r}; write frozen=['model.base.*']")
    found: set[int] = set()
    for pattern in patterns:
        fits = {number for number, spec in enumerate(schema.tensors) if fnmatchcase(spec.name, pattern)}
        if not fits:
            names = [(spec.name, *spec.aliases) for spec in schema.tensors]
            raise SchemaError(misfit(f"frozen={pattern!r}", pattern, names))
        found |= fits
    for number, spec in enumerate(schema.tensors):
        for pattern in () if number in found else patterns:
            if any(fnmatchcase(name, pattern) for name in spec.aliases):
                raise SchemaError(misfit(f"frozen={pattern!r}", pattern, [(spec.name, *spec.aliases)]))
    return frozenset(found)


def slice_of(items: Sequence[T], turn: int) -> Sequence[T]:
    """Those that are looked at in one of min(SLICES, how many there are) turns."""
    return items[turn % min(SLICES, len(items)) :: SLICES] if items else items


class FrozenSource:
    """A source of which some tensors must not change.

    frozen: these, as indices into the schema.
    """

    def __init__(self, source: Source, patterns: Sequence[str]) -> None:
        self._source = source
        self.schema: Schema = source.schema
        self.shards: Sequence[Shard] = source.shards
        self.residual: Sequence[Residual] = source.residual
        self.copies: Sequence[Copy] = getattr(source, "copies", ())
        self.twins: Sequence[Twins] = getattr(source, "twins", ())
        self.frozen = frozen_tensors(patterns, source.schema)

    def storages(self) -> Sequence[Bits]:
        """See `dcr.seams.Source.storages`."""
        return self._source.storages()
