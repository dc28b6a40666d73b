"""docs/architecture.md says what the code does: its picture is made of the imports, its walks of a traced refit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TOOLS = DOCS / "tools"


def run(page: Path) -> subprocess.CompletedProcess[str]:
    """What the script says of a page."""
    command = [sys.executable, "-W", "error", str(TOOLS / "house.py"), "--check", str(page)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ)


def test_the_page_is_what_the_code_says() -> None:
    ran = run(DOCS / "architecture.md")
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("pattern", "other"),
    [
        (r"^    pipeline --> seams\n", ""),
        (r"^\| `publish/flight.py` \|.*\n", ""),
        (r"^\| a weight, at the member \| \d+", "| a weight, at the member | 999"),
    ],
    ids=["an arrow", "a file of a walk", "a count"],
)
def test_a_page_that_says_anything_else_is_seen(pattern: str, other: str, tmp_path: Path) -> None:
    text = (DOCS / "architecture.md").read_text()
    page = tmp_path / "architecture.md"
    page.write_text(re.sub(pattern, other, text, count=1, flags=re.MULTILINE))
    assert page.read_text() != text
    ran = run(page)
    assert ran.returncode != 0
    assert "differs from the code" in ran.stderr
