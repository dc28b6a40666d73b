"""`dcr demo`: the library's main job, for real, on one machine.

A trainer process trains a small transformer on the samples of two rollout processes, and every optimizer step
reaches them as a refit while they generate. No network, no download. The map of the package:

    policy, samples        the model with its task; samples on their way to the trainer
    trainer, rollout       the processes; `orders` is what they are asked, `results` what they leave, and `stream`
                           how their events come: those of dcr itself
    processes              their lives: started, heard, ended
    rows, screen           what was measured, and how it is shown
    bits, audit            the comparison at the end, which does not trust dcr
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio

from dcr.cli.demo import audit, processes, results, screen
from dcr.cli.demo.orders import RolloutOrder, TrainerOrder
from dcr.cli.demo.rows import Tally
from dcr.events import AttemptRefused, ChunkRefused, Event, PublishCompleted

MEMBERS = ("rollout-0", "rollout-1")
FAULTS = ("weights", "wire")
EQUAL, DIFFERENT, FAILED = 0, 1, 2


def run(
    *,
    refits: int = 12,
    inject_fault: str | None = None,
    seed: int = 0,
    size: str = "small",
    deadline_s: float = 300.0,
) -> int:
    """Run the demo; print what it measures. Returns 0 if every bit is equal at the end.

    refits: deltas to ship after the anchor, at least 1.
    inject_fault: "weights" flips a bit of a receiver's live weights, which the audit has to find; "wire" flips one
        of a frame under way, which has to be refused and sent again.
    size: "small" (25 million elements) or "tiny" (for tests).
    deadline_s: seconds after which everything is ended.

    Returns 1 if the audit found a difference, and 2 if a process failed, the deadline passed, or a fault went
    unnoticed.
    """
    with screen.opened() as shown:
        if inject_fault not in (None, *FAULTS):
            shown.say(f"there is no fault {inject_fault!r}; expected one of {', '.join(FAULTS)}")
            return FAILED
        if refits < 1:
            shown.say(f"refits is {refits}; expected 1 or more")
            return FAILED
        start, tally = time.monotonic(), Tally(MEMBERS)
        with tempfile.TemporaryDirectory(prefix="dcr-demo-") as folder:
            children = order(Path(folder), refits=refits, fault=inject_fault, seed=seed, size=size)
            conduct = partial(processes.conduct, deadline_s=deadline_s)
            try:
                anyio.run(conduct, children, Path(folder), listener(tally, shown))
            except processes.ChildError as failure:
                shown.settle()
                shown.say(f"failed in phase: {tally.phase}\n{failure}")
                return FAILED
            shown.settle()
            summarise(tally, Path(folder), shown)
            code = compare(Path(folder), shown)
        shown.say(f"total {time.monotonic() - start:.1f} s")
    if inject_fault == "wire" and not tally.refusals:
        shown.say("a bit was to be flipped on the wire, but nobody refused anything")
        return FAILED
    if inject_fault == "weights" and code == EQUAL:
        shown.say("a bit was to be flipped in live weights, but the audit found no difference")
        return FAILED
    if inject_fault == "weights":
        shown.say("that is the injected fault, found as intended: without one every bit is equal, and the status 0")
    return code


def order(folder: Path, *, refits: int, fault: str | None, seed: int, size: str) -> list[processes.Child]:
    """The three processes; a fault goes into the last rollout."""
    (folder / "samples").mkdir()
    url = f"local://{folder}/run"
    trainer = TrainerOrder(url, str(folder), size, seed, refits, len(MEMBERS))
    children = [processes.Child("trainer", "dcr.cli.demo.trainer", trainer)]
    for number, member in enumerate(MEMBERS, start=1):
        broken = fault if member == MEMBERS[-1] else None
        rollout = RolloutOrder(url, str(folder), size, seed + number, member, refits + 1, broken)
        children.append(processes.Child(member, "dcr.cli.demo.rollout", rollout))
    return children


def listener(tally: Tally, shown: screen.Screen) -> Callable[[Event], None]:
    """What to do with each event: count it, and show what it completes."""

    def hear(event: Event) -> None:
        row = tally.take(event)
        match event:
            case ChunkRefused():
                what = f"version {event.version}, frame {event.frame}"
                shown.say(f"{event.member} refused: {what}: {event.error}: {event.reason}")
            case AttemptRefused():
                shown.say(f"{event.member} refused: version {event.version}: {event.error}: {event.reason}")
            case PublishCompleted() if event.sent_again_bytes:
                shown.say(f"trainer sent {screen.size(event.sent_again_bytes)} of version {event.version} again")
            case _:
                pass
        if row is not None:
            shown.row(row)
        shown.phase(tally.phase)

    return hear


def summarise(tally: Tally, folder: Path, shown: screen.Screen) -> None:
    """The whole run in a few lines."""
    rows, rollouts = tally.deltas, {member: results.read(folder, member) for member in MEMBERS}
    for member, rollout in rollouts.items():
        if rollout.fault is not None:
            shown.say(f"{member}: {rollout.fault}")
    wire, dense = (sum(getattr(row.committed, name) for row in rows) for name in ("wire_bytes", "dense_bytes"))
    beside, alone = tally.decode_rates()
    shipping_s = sum(row.ship_s for row in rows)
    shown.say("")
    for line in screen.LEGEND:
        shown.say(line)
    shown.say(
        f"{len(rows)} refits of {rows[-1].committed.total_elems:,} elements: "
        f"{screen.size(wire)} instead of {screen.size(dense)} "
        f"({dense / wire:.1f}x less), mean density {100 * sum(row.density for row in rows) / len(rows):.2f} %"
    )
    shown.say(
        f"under way {shipping_s:.2f} s in all; meanwhile a training step was in progress "
        f"{screen.share(sum((row.training_share or 0) * row.ship_s for row in rows) / shipping_s)} of the time, "
        f"a decode step {screen.share(sum((row.generating_share or 0) * row.ship_s for row in rows) / shipping_s)}"
    )
    shown.say(
        f"decode steps per second: {beside:.0f} while a refit was under way, {alone:.0f} while none was; "
        f"longest pause {1000 * max(row.pause_s for row in rows):.1f} ms"
    )
    steps = results.read(folder, "trainer").steps
    shown.say(
        f"{len(steps)} optimizer steps on {sum(step.samples for step in steps)} samples of "
        f"{sum(rollout.samples for rollout in rollouts.values())} generated; "
        f"mean reward {sum(step.reward for step in steps) / len(steps):.3f}, "
        f"importance ratio {sum(step.ratio for step in steps) / len(steps):.4f}"
    )


def compare(folder: Path, shown: screen.Screen) -> int:
    """The audit of every receiver against the trainer, on integer views."""
    shown.say("")
    different = False
    for member in MEMBERS:
        verdict = audit.audit(folder / "trainer", folder / member)
        if not verdict.differences:
            shown.say(
                f"{member}, version {verdict.version}: all {verdict.tensors} tensors equal the trainer's, "
                f"{verdict.elements:,} elements, bit for bit"
            )
            continue
        different = True
        shown.say(
            f"{member}, version {verdict.version}: {len(verdict.differences)} of {verdict.tensors} tensors differ"
        )
        for difference in verdict.differences:
            shown.say(f"  {difference}")
    return DIFFERENT if different else EQUAL
