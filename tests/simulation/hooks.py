"""Where the code of each rule lives now: the one file that a move of a room changes for the simulation's switches.

A hook is a public function, method, property or constant, under the name of what it decides. Switches (rules.py,
switches.py) reach dcr only through hooks and through public attributes of what a hook is called with.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Hook:
    """A place in dcr: a module, and the path within it."""

    module: str
    path: str

    @property
    def name(self) -> str:
        """The attribute that a switch replaces."""
        return self.path.rpartition(".")[2]

    @property
    def owner(self) -> Any:
        """The module or the class that has it."""
        owner: Any = import_module(self.module)
        for part in self.path.split(".")[:-1]:
            owner = getattr(owner, part)
        return owner

    @property
    def value(self) -> Any:
        """What is there."""
        return vars(self.owner)[self.name]

    def __str__(self) -> str:
        return f"{self.module}:{self.path}"


# ---------------------------------------------------------------------- the protocol's own bookkeeping

VERDICT = Hook("dcr.protocol.machines", "verdict")
MAY_SERVE = Hook("dcr.protocol.machines", "MAY_SERVE")
REQUIRE_SEALED = Hook("dcr.protocol.receipt", "require_sealed")
VOTES_PREPARE = Hook("dcr.protocol.votes", "Votes.prepare")
VOTES_CARRIED = Hook("dcr.protocol.votes", "Votes.carried")
RECEIPT = Hook("dcr.protocol.receipt", "Receipt.__init__")
RECEIPT_MISSING = Hook("dcr.protocol.receipt", "Receipt.missing")
CHECK_CHUNK = Hook("dcr.protocol.wire", "check_chunk")
ANCHOR_OF = Hook("dcr.runs.chain", "anchor_of")
RECOGNISE_STORED = Hook("dcr.runs.chain", "recognise")

# ---------------------------------------------------------------------- digests and kernels

REQUIRE_EQUAL = Hook("dcr.protocol.digest", "require_equal")
DIGESTS_EQUAL = Hook("dcr.protocol.digest", "equal")
MIX = Hook("dcr.kernels.reference", "mix")
DIGEST = Hook("dcr.kernels", "digest")
SCATTER = Hook("dcr.kernels", "scatter")

# ---------------------------------------------------------------------- a trainer's end

PUBLISH = Hook("dcr.publish", "Publisher.publish")
TAKE_NUMBER = Hook("dcr.publish.numbers", "take")
LEADER_START = Hook("dcr.publish.leader", "Leader.start")
LEADER_SEAL = Hook("dcr.publish.leader", "Leader.seal")
HEADSHIP_REQUIRE = Hook("dcr.publish.headship", "Headship.require")
HEADSHIP_MOVE = Hook("dcr.publish.headship", "Headship.move")
HEADSHIP_READ_BACK = Hook("dcr.publish.headship", "Headship.read_back")
RECOGNISE_HEAD = Hook("dcr.publish.headship", "recognise")
COMMON_BASE = Hook("dcr.publish.flight", "common_base")
KEEP = Hook("dcr.publish.anchors", "Anchors.keep")
REQUIRE_BASELINE = Hook("dcr.publish.part", "Part.require_baseline")
BASELINE_ADOPT = Hook("dcr.memory.baseline", "Baseline.adopt")
BASELINE_HELD = Hook("dcr.memory.baseline", "Baseline.held")
BASELINE_DROP = Hook("dcr.memory.baseline", "Baseline.drop")
BASELINE_FOLD = Hook("dcr.memory.baseline", "Baseline.fold")
CONSTRUCT = Hook("dcr.stages.construct", "Construct.__init__")
DELTA = Hook("dcr.stages.construct", "delta")
AUDIT = Hook("dcr.stages.construct", "audit")
WHOLE_RUN = Hook("dcr.stages.construct", "Whole.run")

# ---------------------------------------------------------------------- a member's end

MEMBER_COMMITTED = Hook("dcr.subscribe.membership", "Membership.committed")
MEMBER_DOUBT = Hook("dcr.subscribe.membership", "Membership.doubt")
MEMBER_VERSION = Hook("dcr.subscribe", "Subscriber.version")
RANK_PREPARE = Hook("dcr.subscribe.rank", "Rank.prepare")
RANK_REQUIRE_ROOT = Hook("dcr.subscribe.rank", "Rank.require_root")
RANK_REQUIRE_FINGERPRINT = Hook("dcr.subscribe.rank", "Rank.require_fingerprint")
RANKS_UNDO = Hook("dcr.engines.ranks", "JointWeights.undo")
RANKS_SUMMED = Hook("dcr.engines.ranks", "summed")
REQUIRE_BASE = Hook("dcr.stages.apply", "require_base")
CHECK_CONTENT = Hook("dcr.stages.apply", "check_content")
UNDO = Hook("dcr.stages.apply", "undo")
PLACEMENT_PREPARE = Hook("dcr.memory.placement", "Placement.prepare")
PLACEMENT_INSTALL = Hook("dcr.memory.placement", "Placement.install")
COPIES_ASTRAY = Hook("dcr.memory.placement", "astray")

# ---------------------------------------------------------------------- a transport

SHOWN_TO_MEMBERS = Hook("dcr.protocol.delivery", "is_current")
