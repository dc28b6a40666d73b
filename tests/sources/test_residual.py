"""A residual group notices each change of what its export reads."""

from __future__ import annotations

import numpy as np
import pytest

from dcr.sources import residual
from dcr.sources.residual import ResidualGroup, fingerprint


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_a_flipped_bit_anywhere_changes_the_fingerprint(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "SLICE_ELEMS", 7)
    inputs = [np.zeros(20, f"u{width}"), np.zeros(3, np.uint16)]
    seen = {fingerprint(inputs)}
    for memory in inputs:
        for i in range(len(memory)):
            memory[i] ^= 1
            seen.add(fingerprint(inputs))
            memory[i] ^= 1
    assert len(seen) == 1 + 20 + 3
    assert fingerprint(inputs) in seen


def test_a_group_converts_what_its_inputs_hold_now() -> None:
    memory = np.array([1, 2], np.uint16)
    group = ResidualGroup((4,), "adds one", True, lambda: [memory], lambda: [memory + np.uint16(1)])
    before = group.fingerprint()
    memory[1] = 9
    assert group.fingerprint() != before
    assert [bits.tolist() for bits in group.convert() or ()] == [[2, 10]]
