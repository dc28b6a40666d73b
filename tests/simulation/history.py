"""What must be true of a run, checked from outside: raw bytes of every memory against what the trainer captured.

It shares no arithmetic with dcr: bytes are compared and hashed as numpy sees them, never digested as dcr does. It is
told of every head when it is really swapped, of weights when they are captured, and of each write when it happens.

    (run, version) -> bits     one set of bits for ever, over all members and restarts; the very bits captured for it
    served                     while `may_serve` holds, memory is exactly the committed version that `version` names
    committed                  only committed versions are offered or written, and never while `may_serve` holds
    heads                      one run; terms never fall, versions rise, roots and bits are one to one; a head names a
                               sealed attempt that is whole and has its quorum
    outcomes                   a version that was reported committed was; one reported fenced or outvoted never is
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from support.kept import attempts

from dcr.errors import Fenced, VoteError
from dcr.events import Event
from dcr.layout.frames import Layout
from dcr.protocol import wire
from dcr.protocol.wire import Ack, Chunk, Head, Identity, Leave, MemberRef, Message, Open, Seal
from dcr.testing.memory import MemoryObjects

Octets = NDArray[np.uint8]


class Violation(AssertionError):
    """A property does not hold."""


class Memory:
    """All tensors, by name, as one row of bytes; every name has its own, also where two are tied.

    views: those of a tensor, which make it up one after another.
    """

    def __init__(self, views: Mapping[str, Sequence[Octets]]) -> None:
        names = sorted(views)
        sizes = [sum(view.nbytes for view in views[name]) for name in names]
        ends = np.cumsum(sizes).tolist()
        self._views = [view for name in names for view in views[name]]
        self._spans = {name: slice(end - size, end) for name, size, end in zip(names, sizes, ends, strict=True)}
        self.nbytes = sum(sizes)

    @classmethod
    def of(cls, module: torch.nn.Module) -> Memory:
        """A module's."""
        tensors = module.state_dict().items()
        return cls({name: [tensor.detach().view(torch.uint8).numpy().reshape(-1)] for name, tensor in tensors})

    def read(self) -> Octets:
        """A copy of all bytes."""
        return np.concatenate(self._views)

    def write(self, octets: Octets) -> None:
        first = 0
        for view in self._views:
            view[:] = octets[first : first + view.nbytes]
            first += view.nbytes

    def of_frames(self, layout: Layout) -> list[NDArray[np.bool_]]:
        """For each frame, which bytes belong to it."""
        frames = []
        for frame in layout.frames:
            mask = np.zeros(self.nbytes, bool)
            for region in frame.spec.regions:
                spec = layout.schema.tensors[region.tensor]
                for name in (spec.name, *spec.aliases):
                    for first, length in region.runs().tolist():
                        start = self._spans[name].start + first * spec.width
                        mask[start : start + length * spec.width] = True
            frames.append(mask)
        return frames


def hash_of(octets: Octets) -> str:
    return hashlib.blake2b(octets.tobytes(), digest_size=16).hexdigest()


@dataclass
class Seen:
    """One member's memory as the history sees it.

    rubbish: bytes that something else than dcr has changed since dcr last read all of them: it can not know of these.
    overlooked: those that were rubbish at a write of the version that is being installed, and not read after it.
    """

    name: str
    memory: Memory
    rubbish: NDArray[np.bool_] = field(init=False)
    writes: int = 0
    subscriber: Any = None
    last: tuple[Any, ...] = ()
    overlooked: NDArray[np.bool_] = field(init=False)
    stands_on: NDArray[np.bool_] = field(init=False)  # rubbish that was read as old bits of what is being installed
    was: int | None = None

    def __post_init__(self) -> None:
        self.rubbish = np.zeros(len(self.memory.read()), bool)
        self.stands_on, self.overlooked = self.rubbish.copy(), self.rubbish.copy()


class History:
    """Collects what happens in one run, and the first thing that should not have."""

    objects: MemoryObjects

    def __init__(self, quorum: int | Literal["all"]) -> None:
        self.now_s: Callable[[], float] = lambda: 0.0
        self.trace: list[tuple[float, str, object]] = []
        self.problem: str | None = None
        self.heads: list[Head] = []
        self.committed: dict[int, Identity] = {}
        self._quorum = quorum
        self._captured: dict[tuple[int, int], Octets] = {}
        self._opened: dict[Identity, Open] = {}
        self._prepared: set[tuple[MemberRef, Identity]] = set()
        self._left: set[MemberRef] = set()
        self._never: dict[tuple[int, int], str] = {}
        self._bits_of_root: dict[bytes, str] = {}
        self._root_of_bits: dict[str, bytes] = {}

    @property
    def term(self) -> int:
        """The head's."""
        return self.heads[-1].term if self.heads else 0

    def note(self, who: str, what: object) -> None:
        """A line of the trace, which a failure shows."""
        self.trace.append((self.now_s(), who, what))

    def fail(self, problem: str) -> None:
        """Keep the first problem."""
        self.note("VIOLATION", problem)
        self.problem = self.problem or problem

    def require(self, cause: BaseException | None = None) -> None:
        """Raises: Violation, with the trace, if there is a problem."""
        if self.problem is not None:
            lines = "\n".join(f"  {at_s:9.4f} {who:12} {_line(what)}" for at_s, who, what in self.trace)
            raise Violation(f"{self.problem}\n{lines}") from cause

    # ------------------------------------------------------------------ the trainer's side

    def captured(self, term: int, version: int, octets: Octets) -> None:
        """These are the trainer's weights at the moment at which it published them as this version."""
        before = self._captured.setdefault((term, version), octets)
        if not np.array_equal(before, octets):
            self.fail(f"term {term} has captured two sets of bits for version {version}")

    def sent(self, message: Message) -> None:
        """A message that a side handed to the transport."""
        match message.header:
            case Open() as opened:
                self._opened[opened.identity] = opened
            case Ack(kind="prepared") as ack:
                self._prepared.add((ack.member, ack.identity))
            case Leave(member=member):
                self.left(member)

    def left(self, member: MemberRef) -> None:
        """A member takes no part any more: it said so, or its link has ended."""
        self._left.add(member)

    def swapped(self, head: Head) -> None:
        """The ledger's head has really become this one."""
        self.note("head", f"term {head.term}: {head.identity}")
        before = self.heads[-1] if self.heads else None
        self.heads.append(head)
        if before is not None:
            if head.run != before.run:
                self.fail(f"the run has become another one: {before.run}, {head.run}")
            if head.term < before.term:
                self.fail(f"the term has fallen from {before.term} to {head.term}")
        if head.identity != (before.identity if before else None):
            self._committed(head, before)
        elif before is not None and head.root != before.root:
            self.fail(f"{head.identity} has got another root")

    def _committed(self, head: Head, before: Head | None) -> None:
        identity = head.identity
        if identity is None:
            return self.fail("the head names nothing any more")
        if before is not None and before.identity is not None and identity.version <= before.identity.version:
            self.fail(f"the head went from {before.identity} to {identity}")
        if identity.term != head.term:
            self.fail(f"{identity} was committed in term {head.term}")
        self.committed[identity.version] = identity
        self._require_whole(identity)
        self._require_quorum(identity)
        octets = self._captured.get((identity.term, identity.version))
        if octets is None:
            return self.fail(f"{identity} was committed and never published")
        bits = hash_of(octets)
        if self._bits_of_root.setdefault(head.root, bits) != bits:
            self.fail(f"{identity}: its root names other bits as well")
        if self._root_of_bits.setdefault(bits, head.root) != head.root:
            self.fail(f"{identity}: its bits have had another root")
        if why := self._never.get((identity.term, identity.version)):
            self.fail(f"{identity} is committed, and was reported as {why}")
        return None

    def _require_whole(self, identity: Identity) -> None:
        attempt = attempts(self.objects).get(identity)
        if attempt is None or attempt.sealed is None:
            return self.fail(f"{identity} was committed and is not sealed")
        seal, frames = wire.parse(attempt.sealed).header, set()
        for chunk in (wire.parse(data).header for data in attempt.chunks):
            if isinstance(chunk, Chunk):
                frames.add((chunk.frame, chunk.digest))
        assert isinstance(seal, Seal)
        if missing := {(ref.frame, ref.digest) for ref in seal.chunks} - frames:
            self.fail(f"{identity} was committed without the chunks of frames {sorted(f for f, _ in missing)}")
        return None

    def _require_quorum(self, identity: Identity) -> None:
        opened = self._opened[identity]
        voted = [ref for ref in opened.members if (ref, identity) in self._prepared]
        asked = [ref for ref in opened.members if ref in voted or ref not in self._left]
        needed = len(asked) if self._quorum == "all" else self._quorum
        if len(voted) < needed:
            self.fail(f"{identity} was committed by {len(voted)} votes of {len(asked)} members; {needed} are needed")

    def ended(self, term: int, version: int, outcome: BaseException | None) -> None:
        """How a refit ended for the user who waited for it."""
        self.note("", f"version {version} of term {term} ended: {outcome!r}")
        committed = self.committed.get(version)
        is_head = committed is not None and committed.term == term
        if outcome is None and not is_head:
            self.fail(f"version {version} of term {term} was reported as committed, and is not")
        if isinstance(outcome, VoteError | Fenced):
            self._never[term, version] = type(outcome).__name__
            if is_head:
                self.fail(f"{committed} is committed, and was reported as {type(outcome).__name__}")

    # ------------------------------------------------------------------ the members' side

    def offered(self, seen: Seen, identity: Identity) -> None:
        """A version was offered to an engine."""
        self._require_committed(identity, f"was offered to {seen.name}")

    def writes(self, seen: Seen, identity: Identity | None) -> None:
        """A frame of a version is about to be written to a member's memory."""
        seen.writes += 1
        if identity is None:
            return self.fail(f"{seen.name}: memory is written although nobody installs a version")
        self._require_committed(identity, f"is being written to {seen.name}")
        if seen.subscriber is not None and seen.subscriber.may_serve:
            self.fail(f"{seen.name} may serve while {identity} is being written")
        return None

    def seeded(self, seen: Seen) -> None:
        """A seed was installed: all of memory had to be read after its last write."""
        seen.rubbish &= ~seen.overlooked
        self.check_memory(seen)

    def _require_committed(self, identity: Identity, what: str) -> None:
        committed = self.committed.get(identity.version)
        if committed is None or committed.term != identity.term:
            self.fail(f"{identity} {what}, and is not committed")

    def check(self, members: Iterable[Seen]) -> None:
        """All members whose label, permission or memory may have changed since the last call."""
        for seen in members:
            subscriber = seen.subscriber
            if subscriber is None or self.problem is not None:
                continue
            now = subscriber.may_serve, subscriber.version, seen.writes
            if now != seen.last:
                seen.last = now
                self.check_memory(seen)

    def check_memory(self, seen: Seen) -> None:
        """One member's memory, byte by byte, if it may serve."""
        subscriber = seen.subscriber
        if subscriber is None or not subscriber.may_serve:
            return
        version = subscriber.version
        identity = self.committed.get(version) if version is not None else None
        if identity is None:
            return self.fail(f"{seen.name} may serve version {version}, which is not committed")
        wanted, held = self._captured[identity.term, identity.version], seen.memory.read()
        if version != seen.was:
            self._installed(seen, wanted)
            seen.was = version
        wrong = (held != wanted) & ~seen.rubbish
        if wrong.any():
            self.fail(
                f"{seen.name} serves version {version} with {np.count_nonzero(wrong)} wrong bytes, first at "
                f"{np.flatnonzero(wrong)[0]}; its hash is {hash_of(held)}, captured was {hash_of(wanted)}"
            )
        seen.rubbish &= held != wanted
        return None

    def _installed(self, seen: Seen, wanted: Octets) -> None:
        """What a delta has overwritten is no rubbish any more, and a delta must not stand on any that it read."""
        before = self.committed.get(seen.was) if seen.was is not None else None
        if before is None:
            return
        changed = self._captured[before.term, before.version] != wanted
        if (seen.stands_on & changed).any():
            self.fail(f"{seen.name}: a delta was installed although the old bits read for it were rubbish")
        seen.rubbish &= ~changed


def _line(what: object) -> str:
    if isinstance(what, Event):
        fields = msgspec.to_builtins(what)
        timeless = {field: value for field, value in fields.items() if not field.endswith("_s") and field != "event"}
        return f"{what.name} {timeless}"
    return str(what)
