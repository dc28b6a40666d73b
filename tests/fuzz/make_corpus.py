"""Writes the corpus of tests/fuzz: what the encoders make of small changes, in the layout of decoders.cpp.

python tests/fuzz/make_corpus.py
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from dcr.kernels import exponents, streams
from dcr.layout.views import UNSIGNED

CORPUS = Path(__file__).parent / "corpus"
POSITIONS, VALUES, PACKED, CLASSES = range(4)


def inputs() -> dict[str, bytes]:
    """Every input of the corpus, by file name."""
    random = np.random.default_rng(0)
    made = {}
    for mean in (1, 30, 300, 3000):
        positions = (np.cumsum(random.geometric(1 / mean, 200)) - 1).astype(np.uint32)
        gaps, numel = streams.gaps_of(positions), int(positions[-1]) + 1
        made[f"gaps-{mean}"] = _input(POSITIONS, len(positions), numel, gaps.tobytes())
        packed = streams.pack(gaps)
        if len(packed):
            made[f"packed-gaps-{mean}"] = _input(PACKED, len(gaps), 0, packed.tobytes())
    for log, width in enumerate((1, 2, 4, 8)):
        steps = random.geometric(0.3, 150) * random.choice([-1, 1], 150)
        steps[::20] *= 10_000
        symbols, exceptions = streams.symbols_of(steps.astype(f"i{width}").view(UNSIGNED[width]))
        made[f"symbols-{width}"] = _input(VALUES, len(symbols), log, symbols.tobytes() + exceptions.tobytes())
    for name, skew in (("steps", 0.5), ("long", 0.05)):
        data = (random.geometric(skew, 1500) % 256).astype(np.uint8)
        made[f"packed-{name}"] = _input(PACKED, len(data), 0, streams.pack(data).tobytes())
    cuts = np.array([100, 115, 125], np.uint8)
    for log, width in enumerate((1, 2, 4, 8)):
        base = np.frombuffer(random.bytes(300 * width), UNSIGNED[width])
        positions = np.flatnonzero(random.random(300) < 0.15).astype(np.uint32)
        ranks, _, counts = exponents.split(base, cuts, positions, base[positions])
        head = cuts.tobytes() + bytes(counts[:-1])
        made[f"classes-{width}"] = _input(CLASSES, len(positions), log, head + ranks.tobytes() + base.tobytes())
    return made


def _input(decoder: int, first: int, second: int, stream: bytes) -> bytes:
    return struct.pack("<BII", decoder, first, second) + stream


if __name__ == "__main__":
    CORPUS.mkdir(exist_ok=True)
    for name, data in inputs().items():
        (CORPUS / name).write_bytes(data)
