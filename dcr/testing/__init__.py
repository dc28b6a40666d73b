"""For tests: a transport in memory, ones that are faulty or slow, and kits that test plugins.

The kits (`ObjectsTests`, `TransportTests`, `CodecTests`, `LoaderTests`) import pytest, so they are imported when they
are asked for.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dcr.testing.faults import FaultyTransport, flip_bit, flip_one_chunk
from dcr.testing.latency import LatencyTransport
from dcr.testing.memory import MemoryTransport

if TYPE_CHECKING:
    from dcr.testing.codecs import CodecTests
    from dcr.testing.loaders import LoaderTests
    from dcr.testing.transports import ObjectsTests, TransportTests

__all__ = [
    "CodecTests",
    "FaultyTransport",
    "LatencyTransport",
    "LoaderTests",
    "MemoryTransport",
    "ObjectsTests",
    "TransportTests",
    "flip_bit",
    "flip_one_chunk",
]

_KITS = {
    "CodecTests": "codecs",
    "LoaderTests": "loaders",
    "ObjectsTests": "transports",
    "TransportTests": "transports",
}


def __getattr__(name: str) -> Any:
    if name not in _KITS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"{__name__}.{_KITS[name]}"
    _explain_assertions(module, f"{__name__}.conformance")
    return getattr(import_module(module), name)


def _explain_assertions(*modules: str) -> None:
    """Have pytest show the values in failed assertions of modules, as it does for the author's own tests."""
    import pytest

    pytest.register_assert_rewrite(*(module for module in modules if module not in sys.modules))
