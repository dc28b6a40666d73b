"""What a publisher's options may be, and the parts that they name."""

from __future__ import annotations

from typing import Any, Literal

from dcr import plugins
from dcr.codecs.choice import LEVELS, Chooser
from dcr.codecs.patch import Operation
from dcr.errors import OptionError, StateError
from dcr.pipeline.budget import ByteBudget
from dcr.publish.meeting import Alone
from dcr.seams import BasedCodec, Codec, Group
from dcr.seams.required import (
    OBSERVER,
    QUORUM,
    SECONDS,
    STAGES,
    WHOLE,
    Rule,
    instance,
    is_whole,
    judge,
    optional,
    require,
)

ANCHORS = Rule(
    "'auto', None or a whole number of 1 or more", "100", lambda every: every in ("auto", None) or is_whole(every, 1)
)
WhenBusy = Literal["wait", "skip"]
WHEN_BUSY = Rule("'wait' or 'skip'", "'skip'", lambda what: what in ("wait", "skip"))
NAME = Rule("a member's name as text", "'rollout-0'", lambda name: isinstance(name, str))
MAX_VERSION = (1 << 63) - 1  # numbers travel as integers of 64 bits


RULES = {
    "operation": instance(Operation, "dcr.Operation.STEP"),
    "budget": optional(instance(ByteBudget, "dcr.ByteBudget(256 * dcr.MiB)")),
    "quorum": QUORUM,
    "vote_timeout_s": SECONDS,
    "stages": STAGES,
    "frame_elems": WHOLE,
    "anchor_every": ANCHORS,
    "when_busy": WHEN_BUSY,
    "workers": WHOLE,
    "observe": OBSERVER,
}


def judge_options(**given: Any) -> None:
    """Refuse options of a publisher that are not what they may be."""
    judge(**{name: (value, RULES[name]) for name, value in given.items()})


def require_number(version: int) -> None:
    if isinstance(version, bool) or not isinstance(version, int):
        raise OptionError(f"expected an int as the version's number, found {version!r}; write publish(version=3)")
    if not 0 <= version <= MAX_VERSION:
        raise StateError(f"expected a version's number from 0 to {MAX_VERSION}, found {version}")


def group_of(group: Any) -> Group:
    """What the user gave, as a group; torch is imported only if it is torch's."""
    if group is None:
        return Alone()
    if type(group).__module__.startswith("torch."):
        from dcr.sources.ranks import TorchGroup

        return TorchGroup(group)
    require(group, Group, "torch.distributed.new_group()")
    chosen: Group = group
    return chosen


def encoder_of(codec: str | Codec | BasedCodec) -> Codec | BasedCodec | Chooser:
    if not isinstance(codec, str):
        require(codec, Codec, "'balanced'")
        return codec
    if codec in LEVELS:
        return Chooser(LEVELS[codec])
    named: Codec | BasedCodec = plugins.load("dcr.codecs", codec)
    return named
