"""Counts the files and hops of one weight's path: one publish of one rank, and one install, over a directory.

    python docs/tools/walk.py            the counts, and which files are entered how often
    python docs/tools/walk.py --calls    also each hop, in the order of its first time

What is counted. A trainer and an engine of one weight of 2 MiB run in one process; version 2, in which a tenth of its
elements changed, is traced from the call of `publish` to the return of `install`, in all threads (sys.setprofile). A
call's caller is the function that called or awaited it, or that started its task or its thread.

  - A call *carries* the weight where an argument (not `self`) or the result is, or directly holds, a buffer of at least
    64 KiB. Only the weight's own bits are that large here: its memory, what changed of it, the chunk, the file. A call
    carries a chunk or an answer where an argument or the result is, or directly holds, a `Chunk` or an `Ack`.
  - The *path* is each carrying call with its callers. So what decides, polls, beats or tells is on it only where the
    weight passes through it.
  - A *hop* is a call on the path from one file of dcr/ into another. What is called again from the same file, in a loop
    or for a second chunk, is the same hop. The *files* are those that hops lead from and into.
  - *Files before the first compared byte*: those that the trainer's path has entered when the first call into
    dcr/kernels/ carries the weight. *By all calls*: those that any call of the trainer's end has entered by then.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import count
from opcode import opmap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
import numpy as np
import torch

import dcr
from dcr.protocol.wire import Ack, Chunk

PACKAGE = Path(dcr.__file__).parent
WEIGHT = np.ndarray  # the type that stands for a weight's bits, whatever holds them
CARRIED_BYTES = 1 << 16
SIDE_ELEMS = 1024  # of the weight, along each dimension
DEEP = 3  # how far an argument is looked into
YIELD = opmap["YIELD_VALUE"]
VARIABLE = 0x04 | 0x08  # code flags: *args, **kwargs


@dataclass(eq=False, slots=True)
class Call:
    """One call of a function of dcr/: who made it, at which end, and when it first had what in its hands."""

    number: int
    caller: Call | None
    file: str
    function: str
    end: str
    carries: dict[type, int] = field(default_factory=dict)

    @property
    def hop(self) -> tuple[str, str, str]:
        """What makes two calls the same hop: from which file, into which file and function."""
        return self.caller.file if self.caller else "", self.file, self.function


class Tracer:
    """Records the calls of its own thread, and of those that start while it is on."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.end: ContextVar[str] = ContextVar("end", default="")
        self._now: ContextVar[Call | None] = ContextVar("now", default=None)
        self._numbers = count()
        self._running: dict[FrameType, Call] = {}
        self._files: dict[str, str] = {}

    def __enter__(self) -> Tracer:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, result: Any) -> None:
        if event in ("call", "return") and (file := self._file(frame.f_code)):
            if event == "call":
                self._enter(frame, file)
            else:
                self._leave(frame, result)

    def _enter(self, frame: FrameType, file: str) -> None:
        call = self._running.get(frame)
        if call is None:  # else a coroutine goes on
            call = Call(next(self._numbers), self._now.get(), file, frame.f_code.co_qualname, self.end.get())
            call.carries = dict.fromkeys(_carried(_arguments(frame)), call.number)
            self._running[frame] = call
            self.calls.append(call)
        self._now.set(call)

    def _leave(self, frame: FrameType, result: Any) -> None:
        if (call := self._running.get(frame)) is not None:
            self._now.set(call.caller)
            if frame.f_code.co_code[frame.f_lasti] != YIELD:
                call.carries = dict.fromkeys(_carried([result]), next(self._numbers)) | call.carries
                del self._running[frame]

    def _file(self, code: CodeType) -> str:
        """The file within dcr/; empty for any other."""
        name = code.co_filename
        if name not in self._files:
            path = Path(name)
            self._files[name] = str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else ""
        return self._files[name]


def _arguments(frame: FrameType) -> list[Any]:
    code, values = frame.f_code, frame.f_locals
    named = code.co_argcount + code.co_kwonlyargcount + (code.co_flags & VARIABLE).bit_count()
    return [values.get(name) for name in code.co_varnames[:named] if name not in ("self", "cls")]


def _carried(values: Iterable[Any], deep: int = DEEP) -> Iterator[type]:
    """What of a weight, a chunk and an answer these values are or hold."""
    for value in values:
        if isinstance(value, bytes | bytearray | memoryview | np.ndarray | torch.Tensor):
            size = len(value) if isinstance(value, bytes | bytearray) else value.nbytes
            yield from [WEIGHT] if size >= CARRIED_BYTES else []
        elif isinstance(value, Ack | Chunk):
            yield type(value)
        elif deep:
            yield from _carried(_parts(value), deep - 1)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return list(value[:64])
    if isinstance(value, type):
        return []
    if is_dataclass(value):
        return [getattr(value, part.name, None) for part in fields(value)]
    return [getattr(value, name) for name in value.__struct_fields__] if isinstance(value, msgspec.Struct) else []


def trace() -> list[Call]:
    """The calls of version 2, of both ends."""
    with Tracer() as tracer:
        start = asyncio.run(_run(tracer))
    return tracer.calls[start:]


async def _run(tracer: Tracer) -> int:
    """Publish and install two versions; where the calls of the second begin."""
    torch.manual_seed(1)
    weights, engine = (torch.nn.Linear(SIDE_ELEMS, SIDE_ELEMS, bias=False, dtype=torch.bfloat16) for _ in range(2))
    start, loader = 0, dcr.loader(engine)
    with tempfile.TemporaryDirectory() as folder:
        url = f"local://{folder}/run"
        tracer.end.set("trainer")
        async with dcr.publisher(url, source=dcr.source(weights)) as publisher:
            tracer.end.set("member")
            async with dcr.subscriber(url, loader=loader, member="rollout-0") as versions:
                await publisher.joined(1)
                for number in (1, 2):
                    start = len(tracer.calls)
                    tracer.end.set("trainer")
                    refit = await publisher.publish(number)
                    tracer.end.set("member")
                    version = await anext(versions)
                    await version.install()
                    await refit.installed()
                    await asyncio.sleep(0.5)  # what is said behind an install has been said
                    with torch.no_grad():
                        weights.weight.view(torch.int16)[torch.rand(SIDE_ELEMS, SIDE_ELEMS) < 0.1] ^= 3
    return start


@dataclass(frozen=True, slots=True)
class Walk:
    """A path. hops: in order, each once; before: its files until a byte was compared; all_before: all calls' files."""

    hops: list[Call]
    files: dict[str, str]
    before: int = 0
    all_before: int = 0


def walk(calls: list[Call], end: str, carried: type = WEIGHT) -> Walk:
    """The path of what is carried, at one end. Its files, in order, and the function by which each is entered."""
    at_end = [call for call in calls if call.end == end]
    carrying = [call for call in at_end if carried in call.carries]
    path = {call for last in carrying for call in _chain(last, calls[0].number)}
    hops: dict[tuple[str, str, str], Call] = {}
    for call in sorted(path, key=lambda call: call.number):
        if call.hop[0] != call.file:
            hops.setdefault(call.hop, call)
    ordered = list(hops.values())
    first = next((call.number for call in carrying if call.file.startswith("kernels/")), 0)
    before = [call for call in ordered if call.number < first]
    return Walk(ordered, _files(ordered), len(_files(before)), len({c.file for c in at_end if c.number < first}))


def between(calls: list[Call], carried: type) -> Walk:
    """The path of the weight while it is also what is carried: from the first such call to the last, at both ends."""
    numbers = [call.carries[carried] for call in calls if carried in call.carries]
    within = [
        (at, call)
        for call in calls
        for kind, at in call.carries.items()
        if kind in (carried, WEIGHT) and min(numbers) <= at <= max(numbers)
    ]
    within.sort(key=lambda item: item[0])
    files: dict[str, str] = {}
    for _, call in within:
        files.setdefault(call.file, call.function)
    return Walk([], files)


def _chain(call: Call | None, since: int) -> Iterator[Call]:
    """A call and its callers, as far as they were made in what is traced."""
    while call is not None and call.number >= since:
        yield call
        call = call.caller


def _files(hops: list[Call]) -> dict[str, str]:
    """The files of a path in the order in which it enters them, and by which function."""
    files: dict[str, str] = {}
    for call in hops:
        if call.caller:
            files.setdefault(call.caller.file, call.caller.function)
        files.setdefault(call.file, call.function)
    return files


def walks(calls: list[Call]) -> dict[str, Walk]:
    """What is counted: each end's path of the weight, and of the answer."""
    return {
        "a weight, at the trainer": walk(calls, "trainer"),
        "a weight, at the member": walk(calls, "member"),
        "an answer, at the member": walk(calls, "member", Ack),
        "an answer, at the trainer": walk(calls, "trainer", Ack),
    }


def main() -> None:
    print(f"{'path of':28}{'hops':>6}{'files':>7}{'before the first compared byte':>34}{'by all calls':>14}")
    paths = walks(trace())
    for name, path in paths.items():
        before = f"{path.before:34}{path.all_before:14}" if name == "a weight, at the trainer" else ""
        print(f"{name:28}{len(path.hops):6}{len(path.files):7}{before}")
    for name, path in paths.items():
        entered = Counter(call.file for call in path.hops)
        print(f"\n{name}: " + ", ".join(f"{file} {entered[file]}" for file in path.files))
        if "--calls" in sys.argv:
            print(*(f"  {call.hop[0]} -> {call.file} {call.function}" for call in path.hops), sep="\n")


if __name__ == "__main__":
    main()
