"""Options of the tests with real engines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real-weights", type=Path, help="a checkpoint folder that tests/engines/real_weights.py made")


@pytest.fixture(scope="session")
def real_weights(request: pytest.FixtureRequest) -> Path:
    """The checkpoint folder; without one, a test that asks for it is skipped."""
    folder: Path | None = request.config.getoption("--real-weights")
    if folder is None:
        pytest.skip("needs --real-weights FOLDER, see docs/engines.md")
    return folder.resolve()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM needs to run here, and its workers to find the tests' patch."""
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # there may be fewer cores than ranks, and others at work on them
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(HERE))
