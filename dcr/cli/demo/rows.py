"""From events to what is shown: one row per version, once every process has spoken about it. Pure.

Rule of this file: every number is measured or follows from measured ones. A share is of the time in which a version
was under way, from `publish` to its commit; spans of different processes are on one clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dcr.cli.demo.stream import Span, overlap_s
from dcr.events import (
    AttemptRefused,
    ChunkRefused,
    Event,
    InstallCompleted,
    MemberJoined,
    PublishCompleted,
    PublishStarted,
    StageCompleted,
    UserWorkCompleted,
    UserWorkFailed,
    UserWorkStarted,
)


@dataclass(frozen=True, slots=True)
class Row:
    """One version. Shares are 0 to 1; `None` where there is nothing to measure, as for the anchor."""

    committed: PublishCompleted
    shipping: Span
    stages: tuple[StageCompleted, ...]
    training_share: float | None
    generating_share: float | None
    pause_s: float

    @property
    def version(self) -> int:
        return self.committed.version

    @property
    def anchor(self) -> bool:
        """The first version has no base: everything is sent."""
        return self.committed.base is None

    @property
    def density(self) -> float:
        """Changed elements / all elements."""
        return self.committed.changed_elems / self.committed.total_elems

    @property
    def ship_s(self) -> float:
        """From `publish` to the commit."""
        return self.shipping[1] - self.shipping[0]

    @property
    def reduction(self) -> float:
        """Dense bytes / wire bytes."""
        return self.committed.dense_bytes / self.committed.wire_bytes

    @property
    def bottleneck(self) -> str:
        """The stage whose workers were busy for the longest time each."""
        return max(self.stages, key=lambda stage: stage.busy_s / stage.workers).stage


@dataclass(slots=True)
class Tally:
    """Collects the events of one run."""

    members: tuple[str, ...]
    phase: str = "starting three processes"
    rows: list[Row] = field(default_factory=list)
    refusals: list[ChunkRefused | AttemptRefused] = field(default_factory=list)
    _joined: set[str] = field(default_factory=set)
    _began_s: dict[int, float] = field(default_factory=dict)
    _stages: dict[int, list[StageCompleted]] = field(default_factory=dict)
    _committed: dict[int, PublishCompleted] = field(default_factory=dict)
    _installed: dict[int, dict[str, InstallCompleted]] = field(default_factory=dict)
    _spans: dict[str | None, list[Span]] = field(default_factory=dict)  # of work; the trainer is None
    _working_since: dict[str | None, float] = field(default_factory=dict)

    def take(self, event: Event) -> Row | None:
        """Account for an event; returns a version's row when this event completed it."""
        match event:
            case MemberJoined():
                self._joined.add(event.member)
                if not self._began_s and len(self._joined) == len(self.members):
                    self.phase = "seeding the rollouts with the anchor"
            case PublishStarted():
                self._began_s[event.version] = event.at_s
                if event.version > 1:
                    self.phase = f"version {event.version}: on its way"
            case StageCompleted(member=None, version=int(version)) if version not in self._committed:
                self._stages.setdefault(version, []).append(event)
            case PublishCompleted():
                self.phase = f"version {event.version}: being installed"
                self._committed[event.version] = event
                return self._complete(event.version)
            case InstallCompleted():
                self._installed.setdefault(event.version, {})[event.member] = event
                return self._complete(event.version)
            case ChunkRefused() | AttemptRefused():
                self.refusals.append(event)
            case UserWorkStarted():
                self._working_since[event.member] = event.at_s
            case UserWorkCompleted() | UserWorkFailed():
                self._working_since.pop(event.member, None)
                self._spans.setdefault(event.member, []).append((event.at_s - event.duration_s, event.at_s))
            case _:
                pass
        return None

    def _complete(self, version: int) -> Row | None:
        committed, installed = self._committed.get(version), self._installed.get(version, {})
        if committed is None or set(installed) != set(self.members):
            return None
        self.phase = f"version {version + 1}: training step"
        shipping = (self._began_s[version], committed.at_s)
        row = Row(
            committed=committed,
            shipping=shipping,
            stages=tuple(self._stages[version]),
            training_share=None if committed.base is None else self._share(shipping, [None]),
            generating_share=None if committed.base is None else self._share(shipping, self.members),
            pause_s=max(event.duration_s for event in installed.values()),
        )
        self.rows.append(row)
        return row

    def _share(self, window: Span, workers: Sequence[str | None]) -> float:
        """Mean share over the processes; work that has not ended yet counts up to the end of the window."""
        covered_s = 0.0
        for worker in workers:
            since_s = self._working_since.get(worker, window[1])
            covered_s += overlap_s(window, [*self._spans.get(worker, ()), (since_s, window[1])])
        length_s = window[1] - window[0]
        return covered_s / (length_s * len(workers)) if length_s else 0.0

    @property
    def deltas(self) -> list[Row]:
        """The rows of all versions but the anchor."""
        return [row for row in self.rows if not row.anchor]

    def decode_rates(self) -> tuple[float, float]:
        """Decode steps per second of all rollouts together, while a delta was under way and while none was."""
        if not self.deltas:
            return 0.0, 0.0
        windows = [row.shipping for row in self.deltas]
        start, end = windows[0][0], windows[-1][1]
        ends = [span[1] for member in self.members for span in self._spans.get(member, ()) if start <= span[1] <= end]
        beside = sum(any(window[0] <= at <= window[1] for window in windows) for at in ends)
        shipping_s = sum(window[1] - window[0] for window in windows)
        rest_s = end - start - shipping_s
        return (
            beside / shipping_s if shipping_s else 0.0,
            (len(ends) - beside) / rest_s if rest_s > 0 else 0.0,
        )
