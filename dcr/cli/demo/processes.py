"""The demo's three processes: start them, hear their events, and never leave one behind.

A child that fails, or a run that passes its deadline, ends all of them; the reason carries the end of its stderr.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import anyio.abc
import msgspec
from anyio.streams.buffered import BufferedByteReceiveStream

from dcr.cli.demo import stream
from dcr.events import Event

LONGEST_EVENT_BYTES = 1 << 24
TAIL_LINES = 40
STACKS_S = 0.5  # for a child to write down what it is doing


class ChildError(Exception):
    """A child process did not do its part; the message says which, and shows the end of its stderr."""


class Child(msgspec.Struct, frozen=True):
    """One process to start: its name, its module, and the struct that it takes as its argument."""

    member: str
    module: str
    arguments: msgspec.Struct


async def conduct(children: list[Child], folder: Path, hear: Callable[[Event], None], *, deadline_s: float) -> None:
    """Run all children to their end; `hear` gets each event as it comes.

    Raises:
        ChildError: a child ended with an error, said something that is not an event, or still ran at the deadline.
    """
    failures: list[ChildError] = []
    running: dict[str, anyio.abc.Process] = {}
    late: list[Child] = []

    async def follow(child: Child) -> None:
        try:
            async with _started(child, folder) as process:
                running[child.member] = process
                await _listen(child, process, hear)
                status = await process.wait()
                del running[child.member]
            if status != 0 and not late:
                raise ChildError(f"{child.member} ended with status {status}; it said last:\n{tail(folder, child)}")
        except ChildError as failure:
            failures.append(failure)
            group.cancel_scope.cancel()

    async def expire() -> None:
        await anyio.sleep(deadline_s)
        late.extend(child for child in children if child.member in running)
        for process in running.values():
            process.send_signal(signal.SIGUSR1)  # ends a child that has not come as far as to answer it
        await anyio.sleep(STACKS_S)
        said = "\n".join(f"{child.member}:\n{tail(folder, child)}" for child in late)
        failures.append(ChildError(f"no end after {deadline_s:g} s; what runs, and what it said last:\n{said}"))
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(expire)
        async with anyio.create_task_group() as followers:
            for child in children:
                followers.start_soon(follow, child)
        if not late:
            group.cancel_scope.cancel()
    if failures:
        raise failures[0]


async def _listen(child: Child, process: anyio.abc.Process, hear: Callable[[Event], None]) -> None:
    """Hear events until the child says no more."""
    if process.stdout is None:
        raise ChildError(f"{child.member} has no standard output")
    lines = BufferedByteReceiveStream(process.stdout)
    while True:
        try:
            line = await lines.receive_until(b"\n", LONGEST_EVENT_BYTES)
        except anyio.IncompleteRead:
            return
        try:
            hear(stream.decode(line))
        except msgspec.DecodeError as error:
            raise ChildError(f"{child.member} said {line[:200]!r}, which is not an event: {error}") from error


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
