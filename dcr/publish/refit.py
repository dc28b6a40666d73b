"""One refit as its publisher's user sees it: a handle to wait on, and the report of what happened."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Set
from dataclasses import dataclass

import anyio

from dcr.closing import require_process
from dcr.codecs.choice import Chosen
from dcr.errors import StateError
from dcr.events.observers import Summary
from dcr.protocol.wire import Identity, MemberRef


@dataclass(frozen=True, slots=True)
class ResidualTensors:
    """Tensors that have no map and are converted by their own export. reason: why; nbytes: of the checkpoint."""

    names: tuple[str, ...]
    reason: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """What one committed version cost, over all ranks of its publisher; times and stages are this rank's.

    base: what it starts from, None: an anchor. elements: all of them; changed: those that differ from the base (all,
    for an anchor). wire_bytes: encoded chunks as sent, those sent again included; dense_bytes: a whole checkpoint.
    residual: the tensors without a map, and residual_bytes: of those that were converted for this version.
    gathered_bytes: what this rank received from other ranks of the publisher: records of chunks and digests, never
    weights. captured_s: from publish until the weights had been read; wall_s: from publish to commit. chosen: the forms
    in which frames went, and why. stages: statistics of the pipeline. members: what each one answered.
    """

    identity: Identity
    base: Identity | None
    elements: int
    changed: int
    chunks: int
    wire_bytes: int
    dense_bytes: int
    residual: tuple[ResidualTensors, ...]
    residual_bytes: int
    gathered_bytes: int
    sent_again: int
    captured_s: float
    wall_s: float
    chosen: tuple[Chosen, ...]
    stages: Summary
    members: Mapping[str, str]

    @property
    def version(self) -> int:
        return self.identity.version

    @property
    def is_anchor(self) -> bool:
        """Whether it needs no other version."""
        return self.base is None

    @property
    def density(self) -> float:
        """Changed elements / all elements."""
        return self.changed / self.elements if self.elements else 0.0

    @property
    def residual_share(self) -> float:
        """Bytes of tensors without a map / bytes of a whole checkpoint."""
        return sum(one.nbytes for one in self.residual) / self.dense_bytes if self.dense_bytes else 0.0

    @property
    def reduction(self) -> float:
        """Dense bytes / wire bytes."""
        return self.dense_bytes / self.wire_bytes if self.wire_bytes else float("inf")

    def __str__(self) -> str:
        what = "anchor" if self.is_anchor else f"density {100 * self.density:.3f} %"
        residual = f"residual {100 * self.residual_share:.2f} %, " if self.residual else ""
        less = f"{self.reduction:.1f} x less than dense" if self.wire_bytes else "nothing changed"
        return (
            f"version {self.version}: {what}, {residual}{self.wire_bytes:,} bytes on the wire "
            f"({less}), {self.wall_s:.3f} s; {self.stages}"
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What a member said of the installation of a version.

    said: "installed"; or why not, such as "left" or "behind". pause_s: the seconds within its installation during which
    weights were written; None if it did not install it, or did not say.
    """

    said: str
    pause_s: float | None = None

    def __str__(self) -> str:
        return self.said if self.pause_s is None else f"{self.said}, paused for {self.pause_s:.6f} s"


class Refit:
    """A version on its way. Every wait raises the error that ended it, if one did.

    skipped: the publisher was busy, so nothing was captured: a later version carries these changes too.
    seen: whether somebody has been told how it ended. waiting: how many wait for it now.
    """

    def __init__(self, version: int, *, skipped: bool = False) -> None:
        self.version = version
        self.skipped = skipped
        self.seen = False
        self.waiting = 0
        self.was_bound = False
        self.was_captured = False
        self._bound = anyio.Event()
        self._pid = os.getpid()
        self._captured = anyio.Event()
        self._ended = anyio.Event()
        self._installed = anyio.Event()
        self._report: Report | None = None
        self._error: Exception | None = None
        self._abandoned: Exception | None = None
        self._late: dict[MemberRef, Answer] = {}
        self._awaited: set[MemberRef] = set()
        if skipped:
            self._captured.set()
            self.fail(
                StateError(
                    f"version {version} was skipped, since another was under way: nothing was captured, and a later "
                    "version carries its changes; look at `skipped` before you wait for it"
                )
            )

    async def bound(self) -> None:
        """For the publisher: wait until every rank has taken its weights as they lie now."""
        await self._until(self._bound)
        if not self.was_bound:
            self._raise_error()

    async def captured(self) -> None:
        """Wait until the weights have been read: they may change from now on.

        An error that ended the version is not raised here once somebody has been told of it.
        """
        await self._until(self._captured)
        if not self.seen and not self.skipped:
            self._raise_error()

    async def committed(self) -> Report:
        """Wait until the head names this version."""
        await self._until(self._ended)
        self._raise_error()
        self.seen = True
        assert self._report is not None
        return self._report

    async def installed(self) -> Mapping[str, Answer]:
        """Wait until every member that prepared it has answered for its installation; what each one said, by name.

        "installed"; or why not, such as "left" or "behind" (it did not hold the base, was not asked, and catches up):
        such a member does not serve this version.
        """
        report = await self.committed()
        await self._until(self._installed)
        if self._abandoned is not None:
            raise self._abandoned
        voted = {member: Answer(said) for member, said in report.members.items()}
        return voted | {ref.member: answer for ref, answer in self._late.items()}

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def mark_bound(self) -> None:
        """For the publisher."""
        self.was_bound = True
        self._bound.set()

    def mark_captured(self) -> None:
        """For the publisher."""
        self.was_captured = True
        self._captured.set()

    def finish(self, report: Report, awaited: Set[MemberRef] | None) -> None:
        """For the publisher: the head names it; these members are still to install it, None if that is not known."""
        self._report, self._awaited = report, set((awaited or set()) - self._late.keys())
        self._ended.set()
        if awaited is None:
            self._abandoned = StateError("members answer for installations to the publisher's first rank: ask there")
        if not self._awaited:
            self._installed.set()

    def give_up(self, error: Exception) -> None:
        """For the publisher: fail; an error that nobody waits for is logged as well.

        Whoever waits for a member to install the version would never learn of it.
        """
        error.add_note(f"publishing version {self.version}")
        if not self.waiting:
            logging.getLogger("dcr").warning(
                "version %d was given up (%s: %s); committed() raises this, or the next publish() does",
                self.version,
                type(error).__name__,
                error,
            )
        self.fail(error)

    def fail(self, error: Exception) -> None:
        """For the publisher: it was given up. What has been committed stays so."""
        if self._ended.is_set():
            return
        self._error = error
        for event in (self._bound, self._captured, self._ended, self._installed):
            event.set()

    def answer(self, member: MemberRef, answer: Answer) -> None:
        """For the publisher: a member installed it, failed to, or left; it may be faster than `finish`."""
        if answer.said != "left" or member not in self._late:  # who has answered may leave
            self._late[member] = answer
        self._awaited.discard(member)
        if self._ended.is_set() and not self._awaited:
            self._installed.set()

    def hold(self, member: MemberRef, version: int) -> None:
        """For the publisher: a member holds this version or a later one, and will not answer for this one any more."""
        if member in self._awaited and version >= self.version:
            passed = f"passed over: it installed version {version} instead"
            self.answer(member, Answer("installed" if version == self.version else passed))

    def abandon(self, error: Exception) -> None:
        """For the publisher: nobody will be heard any more."""
        if self._ended.is_set() and not self._installed.is_set():
            self._abandoned = error
            self._installed.set()

    @property
    def settled(self) -> bool:
        """Every member that prepared it has answered."""
        return self._installed.is_set()

    async def _until(self, event: anyio.Event) -> None:
        """Wait for an event; where it has happened, without a chance to be cancelled: a wait of 0 s then succeeds."""
        require_process("publisher", self._pid)
        if not event.is_set():
            self.waiting += 1
            try:
                await event.wait()
            finally:
                self.waiting -= 1

    def _raise_error(self) -> None:
        if self._error is not None:
            self.seen = True
            raise self._error
