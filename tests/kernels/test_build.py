"""Which kernels run is decided by the build, said aloud, and never guessed."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import numpy as np
import pytest

import dcr
from dcr import _native, kernels
from dcr.errors import LayoutError
from dcr.kernels import reference
from dcr.layout.boxes import Box, Dim
from dcr.layout.views import Table, rows_of


def loaded_again() -> ModuleType:
    """A second copy of dcr.kernels, run against whatever `sys.modules` holds now."""
    spec = importlib.util.spec_from_file_location("kernels_again", kernels.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """dcr.kernels as in a build with DCR_NATIVE=OFF."""
    build = ModuleType("dcr._build")
    build.__dict__["NATIVE"] = False
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "dcr._build", build)
        return loaded_again()


def test_the_compiled_kernels_are_in_use() -> None:
    assert kernels.IMPLEMENTATION == "compiled"


def test_the_highest_level_is_in_use_unless_another_is_asked_for() -> None:
    features = _native.features()
    assert features["level"] == features["levels"][-1]


def test_describe_names_implementation_level_and_reason() -> None:
    described = kernels.describe()
    assert described["implementation"] == "compiled"
    assert described["level"] in _native.features()["levels"]
    assert _native.features()["compiler"] in described["reason"]


def test_kernels_and_reference_have_the_same_kinds() -> None:
    assert (kernels.NONE, kernels.F32_BF16, kernels.F32_F16) == (reference.NONE, reference.F32_BF16, reference.F32_F16)


def test_a_build_without_kernels_says_so(without_native: ModuleType) -> None:
    assert without_native.IMPLEMENTATION == "reference"
    assert without_native.describe()["reason"] == "dcr was built with DCR_NATIVE=OFF"


def test_a_build_without_kernels_computes_and_refuses_the_same(without_native: ModuleType) -> None:
    table = Table((np.arange(9, dtype=np.uint16),), rows_of([(0, 0, Box(1, 0, (Dim(8, 1, 1),)))]))
    positions, bits = np.array([2, 5], np.uint32), np.array([70, 71], np.uint16)
    assert without_native.scatter(table, positions, bits) == 0
    assert without_native.compare(table, np.arange(1, 9, dtype=np.uint16))[0].tolist() == [2, 5]
    for wrong in (positions[::-1], positions + np.uint32(4)):
        with pytest.raises(LayoutError):
            without_native.scatter(table, wrong, bits)


def test_an_extension_that_does_not_load_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dcr, "_native")
    monkeypatch.delattr(kernels, "compiled")
    monkeypatch.delitem(sys.modules, "dcr.kernels.compiled")
    monkeypatch.setitem(sys.modules, "dcr._native", None)
    with pytest.raises(ImportError, match="_native"):
        loaded_again()


def test_a_checkout_that_was_never_built_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dcr._build", None)
    with pytest.raises(ImportError, match="pip install"):
        loaded_again()
