"""The ranks of one publisher: how they do a step together, and how all learn of an error on one.

A step is work that each rank does, and then a meeting at which every rank gives its word: the result, or the error.
While a rank works it comes to the meeting once in BEAT_S all the same, with the word that it is still at it. So an
error on one rank stops the others within a beat, a rank that died is noticed while others work, and no meeting lasts
longer than a beat unless a rank is lost; how long that is waited for is up to the group. With its words the first rank
says how many calls of `publish` it has skipped (`dcr.publish.turns`); who waits to hear that shortens the beat.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import anyio
import msgspec

from dcr import errors
from dcr.errors import DcrError, RanksLost, StateError
from dcr.layout.views import Lanes
from dcr.publish.leader import Leader
from dcr.seams import Group

BEAT_S = 1.0
HURRIED_S = 0.02
LEAVE_S = 5.0

T = TypeVar("T")


class Alone:
    """A group of one."""

    rank = 0
    world = 1

    async def gather(self, data: bytes) -> list[bytes]:
        """See `dcr.seams.Group.gather`."""
        return [data]

    async def add(self, lanes: Lanes) -> Lanes:
        """See `dcr.seams.Group.add`."""
        return lanes


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says at a meeting. data: the result; error: its type's name and its text. skipped: calls, so far."""

    step: str
    state: Literal["working", "done", "failed", "left"]
    data: bytes = b""
    error: tuple[str, str] = ("", "")
    skipped: int = 0


class _Task:
    """A rank's own work in a step. due: set when the others are to hear of it before the beat is over."""

    def __init__(self, step: str) -> None:
        self.due = anyio.Event()
        self.ended = False
        self.error: Exception | None = None
        self.word = _Word(step, "working")

    async def run(self, work: Callable[[], Awaitable[Any]]) -> None:
        step = self.word.step
        try:
            self.word = _Word(step, "done", msgspec.msgpack.encode(await work()))
        except Exception as error:
            self.error, self.word = error, _failed(step, error)
        self.ended = True
        self.due.set()

    async def beat(self, seconds: float) -> None:
        """Wait until the others are to hear of it."""
        with anyio.move_on_after(seconds):
            await self.due.wait()
        if not self.ended:
            self.due = anyio.Event()


class Ranks:
    """What the ranks of a publisher do together. Every rank takes the same steps in the same order.

    leader: on the first rank, which alone knows the members and moves the head; None on the others. lost: why they
    cannot meet any more, None if they can. received_bytes: what other ranks' words held, in all. skipped: calls that
    the first rank has skipped since the version under way began, as far as this rank has heard.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.leader: Leader | None = None
        self.lost: RanksLost | None = None
        self.received_bytes = 0
        self.skipped = 0
        self._task: _Task | None = None
        self._hurried = 0  # how many wait for the next word
        self._heard = anyio.Event()

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world(self) -> int:
        return self._group.world

    @property
    def leads(self) -> bool:
        """Whether this is the first rank, which decides for all."""
        return self._group.rank == 0

    async def share(self, step: str, work: Callable[[], Awaitable[T]], kind: type[T]) -> list[T]:
        """Every rank works; all results in rank order, on every rank. kind: what results decode to.

        Raises: the error of the lowest rank that failed, on every rank; work that still goes on elsewhere is cancelled.
            RanksLost: the ranks could not meet.
        """
        if self.world == 1:
            return [await work()]
        words = await self._step(step, work)
        decoder = msgspec.msgpack.Decoder(kind)
        return [decoder.decode(word.data) for word in words]

    async def decide(self, step: str, work: Callable[[], Awaitable[T]], kind: type[T]) -> T:
        """The first rank works, all learn the result; raises as `share`."""
        if self.world == 1:
            return await work()
        words = await self._step(step, work if self.leads else _nothing)
        return msgspec.msgpack.decode(words[0].data, type=kind)

    async def lead(self, step: str, work: Callable[[Leader], Awaitable[T]], kind: type[T]) -> T:
        """The leader works, all learn the result; raises as `share`."""

        async def led() -> T:
            assert self.leader is not None, "only the first rank works"
            return await work(self.leader)

        return await self.decide(step, led, kind)

    async def add(self, step: str, lanes: Lanes) -> Lanes:
        """The sum over ranks; raises as `share`."""
        if self.world == 1:
            return lanes
        await self._step(step, _nothing)
        self.received_bytes += lanes.nbytes * (self.world - 1)
        return await self._meeting(lambda: self._group.add(lanes))

    def hurry(self) -> None:
        """Meet now, if a step is being taken."""
        if self._task is not None:
            self._task.due.set()

    @contextmanager
    def hurrying(self) -> Iterator[None]:
        """Meet more often for a while."""
        self._hurried += 1
        self.hurry()
        try:
            yield
        finally:
            self._hurried -= 1

    async def heard(self) -> None:
        """Wait for the next words of the others."""
        await self._heard.wait()

    def tell_heard(self) -> None:
        """Wake whoever waits in `heard`."""
        self._heard.set()
        self._heard = anyio.Event()

    async def __aenter__(self) -> Ranks:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        """Take no further step; the others learn it at once, if they meet soon."""
        if self.world > 1 and self.lost is None:
            await self._say_goodbye("the end", "the publisher was closed")

    async def _step(self, step: str, work: Callable[[], Awaitable[Any]]) -> list[_Word]:
        task, words, lost = _Task(step), list[_Word](), list[RanksLost]()
        self._task = task
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(task.run, work)
            try:
                while not words or any(word.state == "working" for word in words):
                    await task.beat(HURRIED_S if self._hurried else BEAT_S)
                    words = await self._gather(task.word)
                    if _trouble(words):
                        break
            except RanksLost as error:
                lost.append(error)
            except anyio.get_cancelled_exc_class():
                await self._say_goodbye(step, "the publisher was closed")
                raise
            tasks.cancel_scope.cancel()
        self._task = None
        if lost:
            raise lost[0]
        if trouble := _trouble(words):
            rank, told = trouble
            if isinstance(told, RanksLost):
                self.lost = told
            if rank == self.rank and task.error is not None:
                raise task.error
            raise told from task.error
        return words

    async def _gather(self, word: _Word) -> list[_Word]:
        mine = msgspec.msgpack.encode(msgspec.structs.replace(word, skipped=self.skipped))
        data = await self._meeting(lambda: self._group.gather(mine))
        self.received_bytes += sum(map(len, data)) - len(mine)
        words = [msgspec.msgpack.decode(said, type=_Word) for said in data]
        if not self.leads:
            self.skipped = words[0].skipped
        self.tell_heard()
        return words

    async def _meeting(self, meet: Callable[[], Awaitable[T]]) -> T:
        """A meeting that has begun is held to its end, though for no more than LEAVE_S if this task is cancelled.

        Raises:
            RanksLost: it was not held.
        """
        if self.lost is not None:
            raise RanksLost(str(self.lost)) from self.lost
        results, failures = list[T](), list[Exception]()
        ended, shield = anyio.Event(), anyio.CancelScope(shield=True)

        async def hold() -> None:
            with shield:
                try:
                    results.append(await meet())
                except Exception as error:
                    failures.append(error)
            ended.set()

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(hold)
                try:
                    await ended.wait()
                except anyio.get_cancelled_exc_class():
                    shield.deadline = anyio.current_time() + LEAVE_S
                    raise
        finally:
            if not results:
                why = repr(failures[0]) if failures else "it did not wait"
                self.lost = RanksLost(
                    f"rank {self.rank} of {self.world} could not meet the others ({why}): "
                    "start all ranks anew, with a new group"
                )
        if self.lost is not None:
            raise self.lost from failures[0]
        return results[0]

    async def _say_goodbye(self, step: str, reason: str) -> None:
        word = _Word(step, "left", error=("RanksLost", reason))
        with anyio.move_on_after(LEAVE_S, shield=True):
            try:
                await self._gather(word)
            except RanksLost:
                return
        self.lost = self.lost or RanksLost(f"rank {self.rank} has left: {reason}")


async def _nothing() -> None:
    """The work of a rank that only listens."""


def _failed(step: str, error: Exception) -> _Word:
    return _Word(step, "failed", error=(type(error).__name__, str(error)))


def _trouble(words: list[_Word]) -> tuple[int, DcrError] | None:
    """The lowest rank that is in trouble, and the error as the others see it. The same on all ranks."""
    for rank, word in enumerate(words):
        if word.state in ("failed", "left"):
            return rank, errors.of_rank(rank, *word.error)
    for rank, word in enumerate(words):
        if word.step != words[0].step:
            text = f"rank {rank} is at {word.step!r} while rank 0 is at {words[0].step!r}"
            return rank, StateError(f"{text}: every rank must publish the same versions in the same order")
    return None
