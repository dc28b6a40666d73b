"""Options of the tests with real engines."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real-weights", type=Path, help="a checkpoint folder that tests/engines/real_weights.py made")


@pytest.fixture(scope="session")
def real_weights(request: pytest.FixtureRequest) -> Path:
    """The checkpoint folder; without one, a test that asks for it is skipped."""
    folder: Path | None = request.config.getoption("--real-weights")
    if folder is None:
        pytest.skip("needs --real-weights FOLDER, see docs/engines.md")
    return folder.resolve()
