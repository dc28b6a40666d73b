"""Samples on their way from the rollouts to the trainer: one file per group, seen whole or not at all.

A file is written under a temporary name and renamed. It is a plain npz of numbers, read without pickle.

Shapes: B sequences, T positions, G generated tokens.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class SampleGroup:
    """The samples of one prompt. The versions are those that drew the first and the last token."""

    tokens: npt.NDArray[np.int64]  # (B, T)
    rewards: npt.NDArray[np.float32]  # (B,)
    logprobs: npt.NDArray[np.float32]  # (B, G)
    start_version: int
    end_version: int


def write(folder: Path, member: str, number: int, group: SampleGroup) -> None:
    """Hand over one group; `number` counts the groups of `member`."""
    draft = folder / f".{member}-{number:06d}.draft"
    with draft.open("wb") as out:
        np.savez(
            out,
            tokens=group.tokens,
            rewards=group.rewards,
            logprobs=group.logprobs,
            versions=np.array([group.start_version, group.end_version], dtype=np.int64),
        )
    draft.rename(folder / f"{member}-{number:06d}.npz")


def read(path: Path) -> SampleGroup:
    """One group. Raises `OSError`, `ValueError` or `KeyError` for anything that `write` did not write."""
    with np.load(path, allow_pickle=False) as held:
        start, end = (int(number) for number in held["versions"])
        return SampleGroup(held["tokens"], held["rewards"], held["logprobs"], start, end)


def take(folder: Path, count: int) -> tuple[list[SampleGroup], int] | None:
    """The `count` newest groups and how many older ones were dropped; None if there are fewer. Removes the files."""
    waiting = sorted(folder.glob("*.npz"), key=lambda path: path.stat().st_mtime_ns)
    if len(waiting) < count:
        return None
    groups = [read(path) for path in waiting[-count:]]
    for path in waiting:
        path.unlink()
    return groups, len(waiting) - count
