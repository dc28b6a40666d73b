"""What each process leaves at its end, in a file: what its events do not tell."""

from pathlib import Path

import msgspec


class Step(msgspec.Struct, frozen=True):
    """One optimizer step. reward, ratio, clipped: means over the samples it took; stale: groups too old to be taken."""

    version: int
    reward: float
    ratio: float
    clipped: float
    samples: int
    stale: int


class Result(msgspec.Struct, frozen=True):
    """What one process did: the trainer's steps; samples that a rollout generated; a fault put in on purpose."""

    steps: tuple[Step, ...] = ()
    samples: int = 0
    fault: str | None = None


def write(folder: Path, member: str, result: Result) -> None:
    """Leave the result of one process."""
    _path(folder, member).write_bytes(msgspec.json.encode(result))


def read(folder: Path, member: str) -> Result:
    """The result of a process that has ended. Raises `OSError` or `msgspec.DecodeError` where there is none."""
    return msgspec.json.decode(_path(folder, member).read_bytes(), type=Result)


def _path(folder: Path, member: str) -> Path:
    return folder / f"{member}.result.json"
