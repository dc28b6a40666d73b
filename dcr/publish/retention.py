"""When a publisher stores the committed bits whole, and which versions nobody needs after that."""

from __future__ import annotations

from typing import Literal

# Commits between two anchors, where deltas decide: fewer would write more anchors than deltas, with more a joiner would
# read for ever.
EARLIEST, LATEST = 20, 1000


class Retention:
    """Counts the deltas behind the newest anchor, which every joiner has to read.

    every: an anchor after so many commits, and nothing before the last but one is kept; "auto": once the deltas take as
    many bytes as the anchor would; None: none, and everything is kept. dense_bytes: of a whole version.
    """

    def __init__(self, every: int | Literal["auto"] | None, dense_bytes: int) -> None:
        self._every = every
        self._dense_bytes = dense_bytes
        self._commits = 0
        self._deltas = 0
        self._delta_bytes = 0
        self._anchor: int | None = None

    def count(self, delta_bytes: int) -> bool:
        """Take note of a committed version; whether an anchor is to be stored beside it, if it is none."""
        self._commits += 1
        self._deltas += 1
        self._delta_bytes += delta_bytes
        if self._every is None:
            return False
        if self._every != "auto":
            return self._commits % self._every == 0
        enough = self._deltas >= EARLIEST and self._delta_bytes >= self._dense_bytes
        return enough or self._deltas >= LATEST

    def anchor(self, version: int) -> int | None:
        """Take note of a stored anchor; the version before which nothing has to be kept, None if all has."""
        before, self._anchor = self._anchor, version
        self._deltas = self._delta_bytes = 0
        return None if self._every is None else before
