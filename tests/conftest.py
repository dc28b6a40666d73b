"""Profiles of the property tests, and a choice of the kernels' dispatch level for a whole run.

pytest tests/simulation/test_states.py --hypothesis-profile=long --timeout=3600
pytest tests/test_refit.py --level portable
"""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("long", max_examples=10_000)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--level", help="the level of the compiled kernels, such as avx2 or portable; the highest if not given"
    )


def pytest_configure(config: pytest.Config) -> None:
    if level := config.getoption("--level"):
        from dcr import _native

        _native.use_level(level)
