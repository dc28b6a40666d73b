"""The kernels in use: compiled ones, or the numpy reference where dcr was deliberately built without.

`dcr.kernels.verbs` says what each does and how many bytes it moves. `dcr.kernels.reference` defines what those compute
that take a table, so any number of tensors is one call and one pass over memory; `streams`, `exponents` and `hashing`
define those that code streams. The compiled ones release the GIL, check every row and position again, and raise before
anything is written. Which implementation runs is decided by the build and never falls back: a compiled module that does
not load is an error. No environment variable is read.
"""

from __future__ import annotations

from typing import Final

from dcr.kernels import checked
from dcr.kernels.reference import F32_BF16, F32_F16, NONE, OVERWRITE, SOURCE_WIDTH, STEP, TARGET_WIDTH, XOR
from dcr.kernels.verbs import Kernels

__all__ = [
    "F32_BF16",
    "F32_F16",
    "IMPLEMENTATION",
    "NONE",
    "OVERWRITE",
    "SOURCE_WIDTH",
    "STEP",
    "TARGET_WIDTH",
    "XOR",
    "Kernels",
    "capture",
    "check_ascending",
    "compare",
    "describe",
    "digest",
    "digest_at",
    "gaps_of",
    "gather",
    "merge",
    "of_planes",
    "pack",
    "planes_of",
    "positions_of",
    "prepare",
    "read",
    "scatter",
    "select",
    "split",
    "symbols_of",
    "unpack",
    "values_of",
]

try:
    from dcr._build import NATIVE
except ModuleNotFoundError as error:
    raise ImportError(
        "dcr has not been built in this checkout: run `pip install .` (or `pip install --no-build-isolation -e .`), "
        "or follow the comment at the top of CMakeLists.txt; `-C cmake.define.DCR_NATIVE=OFF` does without a compiler"
    ) from error

IMPLEMENTATION: Final = "compiled" if NATIVE else "reference"


def _of_this_build() -> Kernels:
    if not NATIVE:
        return checked
    from dcr.kernels import compiled

    return compiled


_used = _of_this_build()
read = _used.read
compare = _used.compare
capture = _used.capture
gather = _used.gather
prepare = _used.prepare
scatter = _used.scatter
digest = _used.digest
digest_at = _used.digest_at
check_ascending = _used.check_ascending
select = _used.select
gaps_of = _used.gaps_of
positions_of = _used.positions_of
symbols_of = _used.symbols_of
values_of = _used.values_of
planes_of = _used.planes_of
of_planes = _used.of_planes
pack = _used.pack
unpack = _used.unpack
blake3 = _used.blake3
split = _used.split
merge = _used.merge


def describe() -> dict[str, str]:
    """Which implementation is in use, at which instruction set level, and why."""
    if not NATIVE:
        return {"implementation": IMPLEMENTATION, "level": "numpy", "reason": "dcr was built with DCR_NATIVE=OFF"}
    from dcr import _native

    found = _native.features()
    reason = f"of {', '.join(found['levels'])} on this machine; built by {found['compiler']}"
    return {"implementation": IMPLEMENTATION, "level": found["level"], "reason": reason}
