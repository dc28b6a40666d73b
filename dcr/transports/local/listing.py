"""The attempts in a run's directory, listed anew only when something was added or removed. Blocking."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from dcr.transports.local.files import attempt_folders, order

# A file system's clock ticks: two changes within one tick leave one time, so a list counts only if it was made later.
TICK_S = 0.1


class Listing:
    """The folders of all attempts, by version. A run may keep thousands, and a reader asks version by version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp: tuple[int, int, int] | None = None
        self._seen_s = 0.0
        self._listed_s = float("-inf")
        self._versions: Mapping[int, Sequence[Path]] = {}

    def at(self, version: int) -> Sequence[Path]:
        """The folders of the attempts at a version."""
        return self._now().get(version, ())

    def newest(self) -> int:
        """The highest version of which there is an attempt; -1 if there is none."""
        return max(self._now(), default=-1)

    def _now(self) -> Mapping[int, Sequence[Path]]:
        stamp, now_s = stamp_of(self._folder), time.monotonic()
        if stamp != self._stamp:
            self._stamp, self._seen_s = stamp, now_s
        if self._listed_s < self._seen_s + TICK_S:
            versions: dict[int, list[Path]] = defaultdict(list)
            for folder in attempt_folders(self._folder):
                versions[order(folder.name)[0]].append(folder)
            self._versions, self._listed_s = versions, now_s
        return self._versions


def stamp_of(folder: Path) -> tuple[int, int, int]:
    """What changes whenever a name is added or removed; zeros if there is no folder."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_nlink
