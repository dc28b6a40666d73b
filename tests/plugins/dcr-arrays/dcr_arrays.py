"""A loader: an engine whose weights are numpy arrays. `Placement` does the work; this says where the weights lie."""

import hashlib
from dataclasses import dataclass

import numpy as np

from dcr.errors import SchemaError
from dcr.layout.boxes import whole
from dcr.layout.frames import Layout
from dcr.layout.schema import TensorSpec
from dcr.memory.placement import Place, Placement


@dataclass
class Weight:
    """dtype as in a checkpoint; bits: a contiguous unsigned array of the weight's shape."""

    dtype: str
    bits: np.ndarray


Engine = dict[str, Weight]


class ArrayLoader:
    reads_base = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def bind(self, layout: Layout) -> Placement:
        """Everything is checked before anything is kept: a binding that is refused leaves the one before it."""
        specs = layout.schema.tensors
        if missing := self._engine.keys() - {spec.name for spec in specs}:
            raise SchemaError(f"held here and not published: {', '.join(sorted(missing))}")
        weights = [self._find(spec) for spec in specs]
        storages = [weight.bits.reshape(-1) for weight in weights]  # views: no copy
        places = [Place(n, n, whole(spec.shape, _strides(weights[n].bits))) for n, spec in enumerate(specs)]
        return Placement(layout, storages, places)

    def fingerprint(self) -> bytes:
        homes = [(name, weight.bits.ctypes.data, weight.bits.shape) for name, weight in self._engine.items()]
        return hashlib.blake2b(repr(homes).encode(), digest_size=16).digest()

    def finalize(self) -> None:
        """Nothing here is made of the weights."""

    def _find(self, spec: TensorSpec) -> Weight:
        weight = self._engine.get(spec.name)
        if weight is None:
            raise SchemaError(f"{spec.name} is published and has no place here")
        if (weight.dtype, weight.bits.shape) != (spec.dtype, spec.shape):
            raise SchemaError(
                f"{spec.name}: published as {spec.dtype} {spec.shape}, held as {weight.dtype} {weight.bits.shape}"
            )
        if not weight.bits.flags.c_contiguous:
            raise SchemaError(f"{spec.name} is not contiguous")
        return weight


def _strides(bits: np.ndarray) -> list[int]:
    """In elements."""
    return [stride // bits.itemsize for stride in bits.strides]
