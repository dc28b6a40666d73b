"""From events to what is shown: one row per version, once every process has spoken about it. Pure.

Rule of this file: every number is measured or follows from measured ones. A share is of the time in which a version
was under way, from `publish` to its commit; spans of different processes are on one clock.
"""

from dataclasses import dataclass, field

from dcr.cli.demo.events import Committed, Dumped, Event, Installed, Refused, Span, Started, Stepped, overlap_s


@dataclass(frozen=True, slots=True)
class Row:
    """One version. Shares are 0 to 1; `None` where there is nothing to measure, as for the anchor."""

    version: int
    committed: Committed
    training_share: float | None
    generating_share: float | None
    pause_s: float
    waited_s: float

    @property
    def anchor(self) -> bool:
        """The first version has no base: everything is sent."""
        return self.version == 1

    @property
    def ship_s(self) -> float:
        """From `publish` to the commit."""
        return self.committed.shipping[1] - self.committed.shipping[0]

    @property
    def reduction(self) -> float:
        """Dense bytes / wire bytes."""
        return self.committed.dense_bytes / self.committed.wire_bytes


@dataclass(slots=True)
class Tally:
    """Collects the events of one run."""

    members: tuple[str, ...]
    phase: str = "starting three processes"
    elements: int = 0
    samples: int = 0
    rows: list[Row] = field(default_factory=list)
    steps: list[Stepped] = field(default_factory=list)
    refusals: list[Refused] = field(default_factory=list)
    dumps: dict[str, Dumped] = field(default_factory=dict)
    _started: set[str] = field(default_factory=set)
    _committed: dict[int, Committed] = field(default_factory=dict)
    _installed: dict[int, dict[str, Installed]] = field(default_factory=dict)
    _computing: list[Span] = field(default_factory=list)
    _generating: dict[str, list[Span]] = field(default_factory=dict)

    def take(self, event: Event) -> Row | None:
        """Account for an event; returns a version's row when this event completed it."""
        match event:
            case Started():
                self._started.add(event.member)
                self.elements = event.elements
                if len(self._started) == 1 + len(self.members):
                    self.phase = "seeding the rollouts with the anchor"
            case Stepped():
                self.steps.append(event)
                self._computing += event.computing
                self.phase = f"version {event.version}: on its way"
            case Committed():
                self.phase = f"version {event.version}: being installed"
                self._committed[event.version] = event
                self._computing += event.computing
                return self._complete(event.version)
            case Installed():
                self._installed.setdefault(event.version, {})[event.member] = event
                self._generating.setdefault(event.member, []).extend(event.generating)
                return self._complete(event.version)
            case Refused():
                self.refusals.append(event)
            case Dumped():
                self.phase = "writing down the bits of every process"
                self.dumps[event.member] = event
                self.samples += event.samples
            case _:
                pass
        return None

    def _complete(self, version: int) -> Row | None:
        committed, installed = self._committed.get(version), self._installed.get(version, {})
        if committed is None or set(installed) != set(self.members):
            return None
        self.phase = f"version {version + 1}: training step"
        row = Row(
            version=version,
            committed=committed,
            training_share=None if version == 1 else self._share(committed.shipping, [self._computing]),
            generating_share=None if version == 1 else self._share(committed.shipping, [*self._generating.values()]),
            pause_s=max(event.pause_s for event in installed.values()),
            waited_s=max(event.waited_s for event in installed.values()),
        )
        self.rows.append(row)
        return row

    @staticmethod
    def _share(window: Span, logs: list[list[Span]]) -> float:
        """Mean share over the processes."""
        length_s = window[1] - window[0]
        return sum(overlap_s(window, spans) for spans in logs) / (length_s * len(logs)) if logs and length_s else 0.0

    @property
    def deltas(self) -> list[Row]:
        """The rows of all versions but the anchor."""
        return [row for row in self.rows if not row.anchor]

    def decode_rates(self) -> tuple[float, float]:
        """Decode steps per second of all rollouts together, while a delta was under way and while none was."""
        if not self.deltas:
            return 0.0, 0.0
        windows = [row.committed.shipping for row in self.deltas]
        start, end = windows[0][0], windows[-1][1]
        ends = [span[1] for spans in self._generating.values() for span in spans if start <= span[1] <= end]
        beside = sum(any(window[0] <= at <= window[1] for window in windows) for at in ends)
        shipping_s = sum(window[1] - window[0] for window in windows)
        rest_s = end - start - shipping_s
        return (
            beside / shipping_s if shipping_s else 0.0,
            (len(ends) - beside) / rest_s if rest_s > 0 else 0.0,
        )
