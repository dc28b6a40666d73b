"""Changes of a frame, as a test of a codec wants them: scattered, whole, and of patterns that arithmetic would bend.

N  elements of a frame      K  changed elements
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dcr.codecs.patch import Change, Operation
from dcr.layout.views import UNSIGNED, Bits, Positions

Numbers = Sequence[int] | NDArray[np.integer[Any]]


def sparse(operation: Operation, width: int, positions: Numbers, values: Numbers) -> Change:
    """Values [K] at positions [K]."""
    where: Positions = np.array(positions, np.uint32)
    return Change(operation, where, np.array(values, UNSIGNED[width]))


def scattered(operation: Operation, width: int, numel: int, *, share: float, seed: int = 0) -> Change:
    """A share of a frame's elements, with small steps, large ones, and zeros among them."""
    rng = np.random.default_rng(seed)
    positions = np.flatnonzero(rng.random(numel) < share)
    values = random_bits(width, len(positions), seed)
    small = rng.integers(0, 5, len(positions)).astype(UNSIGNED[width])
    kinds = rng.integers(0, 3, len(positions))
    return sparse(operation, width, positions, np.select([kinds == 0, kinds == 1], [small, ~small], values))


def whole(values: Bits) -> Change:
    """All values [N] of a frame."""
    return Change(Operation.OVERWRITE, None, values)


def random_bits(width: int, count: int, seed: int = 0) -> Bits:
    """Any bits."""
    bits: Bits = np.frombuffer(np.random.default_rng(seed).bytes(width * count), UNSIGNED[width]).copy()
    return bits


def old_bits(width: int, numel: int) -> Bits:
    """The old bits of a frame, the same at both ends."""
    return np.resize(random_bits(width, 4099, seed=1), numel)


def special_patterns(width: int) -> list[int]:
    """Patterns of float32 or float64 that arithmetic would change: -0.0, denormals, infinities, payloads of NaNs."""
    bits, mantissa = 8 * width, 23 if width == 4 else 52
    sign, exponent = 1 << bits - 1, (1 << bits - 1) - (1 << mantissa)
    unsigned = [0, 1, 2, (1 << mantissa) - 1, 1 << mantissa, exponent - 1, exponent]
    payloads = [exponent | payload for payload in (1, 2, 1 << mantissa - 1, (1 << mantissa) - 1)]
    return [pattern | high for pattern in (*unsigned, *payloads) for high in (0, sign)]


def describe(change: Change) -> tuple[bytes | None, bytes]:
    """The bytes of a change's arrays."""
    return None if change.positions is None else change.positions.tobytes(), change.values.tobytes()
