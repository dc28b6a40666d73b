"""The example of docs/sources.md runs as it stands, and its table names the models that are tested."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from published_models import MODELS

PAGE = (Path(__file__).parent.parent / "docs" / "sources.md").read_text()


def test_the_exporters_example_runs(tmp_path: Path) -> None:
    (example,) = (block for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if block[0] == "#")
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, "-W", "error", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "arithmetic" in done.stdout or "random bits" in done.stdout


def test_the_table_has_every_model() -> None:
    assert re.findall(r"^\| ([^|]+) \| [\d.]+ \|", PAGE, re.M) == [model.name for model in MODELS]
