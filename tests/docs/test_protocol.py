"""The diagrams of docs/protocol.md are those of the tables by which both ends move."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def run(page: Path) -> subprocess.CompletedProcess[str]:
    """What the script says of a page."""
    command = [sys.executable, "-W", "error", str(DOCS / "tools" / "machines.py"), "--check", str(page)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_the_page_draws_the_tables() -> None:
    ran = run(DOCS / "protocol.md")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("line", ["VOTING --> SWAPPING: carried", "PREPARED --> SERVING: dropped"])
def test_a_page_that_lacks_a_transition_is_seen(line: str, tmp_path: Path) -> None:
    text = (DOCS / "protocol.md").read_text()
    assert line in text
    page = tmp_path / "protocol.md"
    page.write_text(text.replace(line, ""))
    ran = run(page)
    assert ran.returncode != 0
    assert "differs from the code" in ran.stderr
