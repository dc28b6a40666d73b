"""The order of a pipeline's stages is checked by the type checker, as the README promises: mypy, as users run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def refused(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What mypy says about the files beside this one: per file, a message for each line that it refuses."""
    config = tmp_path_factory.mktemp("mypy") / "mypy.ini"
    config.write_text("[mypy]\nstrict = True\n")
    cache = request.config.cache.mkdir("mypy-of-snippets")  # type: ignore[union-attr]
    options = ["--config-file", str(config), "--cache-dir", str(cache), "--hide-error-context", "--no-error-summary"]
    files = [str(HERE / name) for name in ("right_order.py", "wrong_order.py")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *files], cwd=config.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, dict[int, str]] = {}
    for path, line, message in re.findall(r"^(.+?):(\d+): error: (.*)$", done.stdout, re.MULTILINE):
        found.setdefault(Path(path).name, {}).setdefault(int(line), message)
    return found


def test_the_right_order_is_accepted(refused: dict[str, dict[int, str]]) -> None:
    assert refused.get("right_order.py", {}) == {}


def test_every_wrong_order_is_refused_and_nothing_else(refused: dict[str, dict[int, str]]) -> None:
    lines = (HERE / "wrong_order.py").read_text().splitlines()
    marked = [number for number, line in enumerate(lines, start=1) if line.endswith("# refused")]
    assert sorted(refused.get("wrong_order.py", {})) == marked
