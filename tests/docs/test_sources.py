"""The table of docs/sources.md names the models that are tested."""

from __future__ import annotations

import re
from pathlib import Path

from support.published_models import MODELS

PAGE = (Path(__file__).parents[2] / "docs" / "sources.md").read_text()


def test_the_table_has_every_model() -> None:
    assert re.findall(r"^\| ([^|]+) \| [\d.]+ \|", PAGE, re.M) == [model.name for model in MODELS]
