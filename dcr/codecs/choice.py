"""Which form a chunk takes: by what it would cost to make, to send and to read.

    N  elements of a frame      K  changed elements      n  elements that a change gives: K, or N if it is dense

A frame without a change is skipped; else its change is sparse, by class or dense. Three stages work beside each other,
and what counts is the slowest; a little of the others is added, for what they take from the rest of the machine:

    encode = n * encode_s      send = bytes / link      decode = n * decode_s
    cost = max(encode, send, decode) + ASIDE * (encode + send + decode)

Seconds per element and bytes start from what is written here, and follow what is measured on the way. As long as too
little was sent to know the link, the level says which one to reckon with. A change that would hold more memory than its
frame is dense whatever it costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from dcr.codecs.codec import CLASSES, FAST, GAPS, RAW

STEP_BITS = 2.1  # of a value, coded
BY_CLASS = 0.72  # what the old bits leave of positions and values
PLANES = 0.75  # what byte planes leave of dense weights
ASIDE = 0.05
LEARN = 0.3  # how far a measurement moves what is believed
ENOUGH_ELEMS = 10_000  # given by a change, to count in full; below a tenth of it a measurement tells what calls cost
ENOUGH_BYTES = 1 << 20  # sent, before the link's rate is believed


@dataclass(frozen=True, slots=True)
class Level:
    """What a user asks for: codecs to choose among, and the link in bytes/s to reckon with.

    slowest: reckon with no faster link than this, also when one is measured: payload counts more than time.
    """

    name: str
    sparse: tuple[str, ...]
    dense: tuple[str, ...]
    link: float
    slowest: float = math.inf


LEVELS = {
    level.name: level
    for level in (
        Level("fast", (FAST.name,), (RAW.name,), link=12.5e9),
        Level("balanced", (GAPS.name, FAST.name), (GAPS.name, RAW.name), link=125e6),
        Level("small", (CLASSES.name, GAPS.name), (GAPS.name,), link=12.5e6, slowest=12.5e6),
    )
}


@dataclass(slots=True)
class Cost:
    """Seconds per element given, to encode and to decode; bytes as a multiple of what the model says."""

    encode_s: float
    decode_s: float
    bytes_factor: float = 1.0


class Chosen(msgspec.Struct, frozen=True, array_like=True):
    """Frames that were treated alike: the form (skip, sparse, class or dense), the codec, and why.

    changed: elements; nbytes: of their bodies.
    """

    form: str
    codec: str
    why: str
    frames: int
    changed: int
    nbytes: int


class Choice(NamedTuple):
    """What was chosen for a frame, and why: in words that are the same for all frames of one kind."""

    form: str
    codec: str
    why: str


# Measured on one core of a Zen 4 server at 1 % of bf16 weights (dense: per element of the frame).
_MEASURED = {
    ("sparse", FAST.name): (2.1e-9, 1.2e-9),
    ("sparse", GAPS.name): (4.4e-9, 2.2e-9),
    ("class", CLASSES.name): (1.6e-8, 2.4e-8),
    ("dense", RAW.name): (0.3e-9, 0.3e-9),
    ("dense", GAPS.name): (1.9e-9, 0.9e-9),
}


@dataclass(eq=False)
class Chooser:
    """Chooses for a publisher's frames, and learns from each. Threads may share it: a lost measurement is no harm."""

    level: Level
    costs: dict[tuple[str, str], Cost] = field(
        default_factory=lambda: {key: Cost(*measured) for key, measured in _MEASURED.items()}
    )
    _sent: tuple[float, float] = (0.0, 0.0)  # bytes and seconds, lately

    @property
    def link(self) -> tuple[float, bool]:
        """The rate in bytes/s to reckon with, and whether it was measured."""
        nbytes, seconds = self._sent
        known = nbytes >= ENOUGH_BYTES and seconds > 0
        rate = nbytes / seconds if known else self.level.link
        return min(self.level.slowest, rate), known and rate <= self.level.slowest

    def is_dense(self, changed: int, numel: int, width: int) -> bool:
        """Whether a frame's change had better be dense; `changed` elements differ from its base."""
        if outgrows(changed, numel, width):
            return True
        sparse = min(self._cost("sparse", name, changed, numel, width) for name in self._names("sparse", based=False))
        return min(self._cost("dense", name, numel, numel, width) for name in self.level.dense) < sparse

    def choose(self, given: int, numel: int, width: int, *, dense: bool, based: bool) -> Choice:
        """The form and codec of a change. based: its old bits are at hand at both ends."""
        kind = "dense" if dense else "sparse"
        names = self._names(kind, based=based)
        found = min(names, key=lambda name: self._cost(_form(kind, name), name, given, numel, width))
        rate, measured = self.link
        why = f"level {self.level.name}"
        if len(names) > 1:
            others = ", ".join(name for name in names if name != found)
            known = "measured" if measured else "assumed"
            why += f": costs less than {others} at about {float(f'{rate / 1e6:.1g}'):g} MB/s, {known}"
        elif not dense and len(names) < len(self.level.sparse):
            why += ": without old bits at both ends"
        return Choice(_form(kind, found), found, why)

    def measured(self, choice: Choice, given: int, numel: int, width: int, *, nbytes: int, encode_s: float) -> None:
        """A chunk was made: so many elements given, bytes and seconds."""
        if given == 0:
            return
        expected = self._bytes(choice.form, choice.codec, given, numel, width)
        cost, weight = self.costs[choice.form, choice.codec], _weight(given)
        cost.encode_s += weight * (encode_s / given - cost.encode_s)
        cost.bytes_factor *= 1 + weight * (nbytes / (expected * cost.bytes_factor) - 1)

    def decoded(self, choice: Choice, given: int, decode_s: float) -> None:
        """A chunk was decoded."""
        if given:
            cost = self.costs[choice.form, choice.codec]
            cost.decode_s += _weight(given) * (decode_s / given - cost.decode_s)

    def sent(self, nbytes: int, seconds: float) -> None:
        """The link took so many bytes in so many seconds."""
        before_bytes, before_s = self._sent
        self._sent = before_bytes * (1 - LEARN / 10) + nbytes, before_s * (1 - LEARN / 10) + seconds

    def _names(self, form: str, *, based: bool) -> Sequence[str]:
        names = self.level.dense if form == "dense" else self.level.sparse
        return [name for name in names if based or name != CLASSES.name]

    def _cost(self, form: str, name: str, given: int, numel: int, width: int) -> float:
        cost = self.costs[form, name]
        nbytes = self._bytes(form, name, given, numel, width) * cost.bytes_factor
        times = given * cost.encode_s, nbytes / self.link[0], given * cost.decode_s
        return max(times) + ASIDE * sum(times)

    def _bytes(self, form: str, name: str, given: int, numel: int, width: int) -> float:
        """What the model says of a body."""
        if form == "dense":
            return given * width * (PLANES if name == GAPS.name else 1.0) + 1
        if name == FAST.name:
            return given * 2 + numel / 255 + 1
        share = min(0.5, given / numel) if numel else 0.5
        bits = -math.log2(share) - (1 - share) / share * math.log2(1 - share) + STEP_BITS if share else 0.0
        return given * bits / 8 * (BY_CLASS if form == "class" else 1.0) + 1


def merged(parts: Sequence[Sequence[Chosen]]) -> tuple[Chosen, ...]:
    """What several ranks chose, alike frames together."""
    found: dict[Choice, Chosen] = {}
    for one in (one for part in parts for one in part):
        kind = Choice(one.form, one.codec, one.why)
        so_far = found.get(kind, Chosen(*kind, 0, 0, 0))
        counts = so_far.frames + one.frames, so_far.changed + one.changed, so_far.nbytes + one.nbytes
        found[kind] = Chosen(*kind, *counts)
    return tuple(found.values())


def outgrows(changed: int, numel: int, width: int) -> bool:
    """Whether a change would hold more memory as positions and bits than its frame does."""
    return changed * (4 + width) >= numel * width


def _weight(given: int) -> float:
    return LEARN * min(1.0, given / ENOUGH_ELEMS) if given >= ENOUGH_ELEMS / 10 else 0.0


def _form(kind: str, name: str) -> str:
    return "class" if name == CLASSES.name else kind
