"""The demo's three processes: start them, hear their events, and never leave one behind.

A child that fails, or a run that passes its deadline, ends all of them; the reason carries the end of its stderr.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from dcr.cli.demo import events

LONGEST_EVENT_BYTES = 1 << 24
TAIL_LINES = 15


class ChildError(Exception):
    """A child process did not do its part; the message says which, and shows the end of its stderr."""


class Child(msgspec.Struct, frozen=True):
    """One process to start: its name, its module, and the struct that it takes as its argument."""

    member: str
    module: str
    arguments: msgspec.Struct


async def conduct(children: list[Child], folder: Path, hear: Callable[[events.Event], None]) -> None:
    """Run all children to their end; `hear` gets each event as it comes.

    Raises:
        ChildError: a child ended with an error or said something that is not an event.
    """
    failures: list[ChildError] = []

    async def follow(child: Child) -> None:
        try:
            await _follow(child, folder, hear)
        except ChildError as failure:
            failures.append(failure)
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for child in children:
            group.start_soon(follow, child)
    if failures:
        raise failures[0]


async def _follow(child: Child, folder: Path, hear: Callable[[events.Event], None]) -> None:
    async with _started(child, folder) as process:
        if process.stdout is None:
            raise ChildError(f"{child.member} has no standard output")
        lines = BufferedByteReceiveStream(process.stdout)
        while True:
            try:
                line = await lines.receive_until(b"\n", LONGEST_EVENT_BYTES)
            except anyio.IncompleteRead:
                break
            try:
                hear(events.decode(line))
            except msgspec.DecodeError as error:
                raise ChildError(f"{child.member} said {line[:200]!r}, which is not an event: {error}") from error
        status = await process.wait()
    if status != 0:
        raise ChildError(f"{child.member} ended with status {status}; the end of its stderr:\n{tail(folder, child)}")


@contextlib.asynccontextmanager
async def _started(child: Child, folder: Path) -> AsyncIterator[anyio.abc.Process]:
    """The running process; it is killed on the way out, if it still runs, and always waited for."""
    # The child imports exactly what this process imports, from whatever directory it was started in.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-m", child.module, msgspec.json.encode(child.arguments).decode()]
    with _stderr(folder, child).open("wb") as errors:
        process = await anyio.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
        )
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):  # bounded: a killed process ends
            if process.returncode is None:
                process.kill()
            await process.aclose()


def tail(folder: Path, child: Child) -> str:
    """The last lines that a child wrote to its stderr, indented; says so where there are none."""
    path = _stderr(folder, child)
    lines = path.read_text(errors="replace").splitlines()[-TAIL_LINES:] if path.exists() else []
    return "\n".join(f"    {line}" for line in lines) or "    (nothing)"


def _stderr(folder: Path, child: Child) -> Path:
    return folder / f"{child.member}.stderr"
