"""What is found out about an engine's own loader: the kind of each tensor, its homes, and what has to be reloaded."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dcr.layout.views import Bits
from dcr.loaders.certify import Home


class Kind(enum.Enum):
    """What a canonical tensor is to an engine rank.

    SKIP: its loader puts no element anywhere. BITS: elements are moved as they are. CAST: to another dtype. TABLE:
    moved, and scattered over many boxes. LAYER: the loader has to run, for its module. MODEL: for the whole model.
    """

    SKIP = "skip"
    BITS = "bits"
    CAST = "cast"
    TABLE = "table"
    LAYER = "layer"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One canonical tensor's kind, and why it has no better one; error: what its loader raised."""

    kind: Kind
    reason: str = ""
    error: Exception | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Reload:
    """Tensors whose loader has to run when one of them changes.

    memories: those that it makes. touched: those that are written meanwhile, these among them. times: how often they
    are loaded: twice where the loader may still remember a part of an earlier load. steady: memories, of those that it
    makes, that every load writes.
    """

    tensors: tuple[int, ...]
    memories: tuple[int, ...]
    touched: tuple[int, ...]
    times: int = 1
    steady: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Constants:
    """Elements of a memory that every load sets to the same bits: padding, mostly."""

    memory: int
    elements: NDArray[np.int64]
    bits: Bits


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What is known of an engine rank for one schema; memories are numbered as in its stand-ins.

    verdicts, names: of each tensor of the schema; names are those under which its loader takes it.
    """

    verdicts: tuple[Verdict, ...]
    homes: tuple[Home, ...]
    constants: tuple[Constants, ...]
    reloads: tuple[Reload, ...]
    names: tuple[tuple[str, ...], ...]
