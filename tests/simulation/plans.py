"""Plans drawn by hypothesis: which steps, which faults, how often. Smaller ones come first, so failures shrink."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from dcr.codecs.patch import Operation
from simulation.storms import WHATS, Fault
from simulation.worlds import Arm, Break, Corrupt, Kill, Plan, Publish, Rebind, Restart, Start, Step, Wait

SEEDS = st.integers(0, 7)
ENGINES = st.integers(0, 2)
TICKS = st.sampled_from([0, 1, 3, 10, 30, 100, 1000, 6000])


def _faults(who: str, at: str, kinds: tuple[str, ...] = ("",)) -> st.SearchStrategy[Fault]:
    return st.builds(
        Fault,
        who=st.just(who),
        at=st.just(at),
        what=st.sampled_from(WHATS[at]),
        kind=st.sampled_from(kinds),
        spared=st.integers(0, 4),
        amount=st.one_of(st.sampled_from([1, 10, 100, 1000, 6000]), st.integers(0, 4000)),
    )


FAULTS = st.one_of(
    _faults("publisher", "send", ("Chunk", "Seal", "Open", "Abort", "Commit")),
    _faults("publisher", "receive", ("Ack", "Nack", "Join", "Leave")),
    _faults("member", "send", ("Ack", "Nack", "Join", "Leave")),
    _faults("member", "receive", ("Chunk", "Seal", "Open", "Abort", "Commit")),
    _faults("member", "store", ("Open", "Chunk", "Seal")),
    *(
        _faults(who, at)
        for who in ("publisher", "member")
        for at in ("read", "swap")
        if (who, at) != ("member", "swap")
    ),
)
STEPS: Mapping[type, st.SearchStrategy[Any]] = {
    Publish: st.builds(
        Publish,
        st.sampled_from(["some", "some", "return", "part", "none", "all"]),
        SEEDS,
        st.sampled_from([1, 3, 40]),
        st.sampled_from([False, False, False, True]),
    ),
    Wait: st.builds(Wait, TICKS),
    Arm: st.builds(Arm, FAULTS),
    Kill: st.builds(Kill, ENGINES, st.booleans(), st.sampled_from(["kept", "lost"]), TICKS),
    Restart: st.builds(
        Restart,
        st.sampled_from(["closed", "killed", "zombie"]),
        st.sampled_from(["same", "earlier", "other"]),
        SEEDS,
    ),
    Start: st.builds(Start, ENGINES),
    Break: st.builds(
        Break, ENGINES, st.integers(0, 3), st.sampled_from(["", "undo", "dies"]), st.sampled_from([None, 0, 1])
    ),
    Corrupt: st.builds(Corrupt, ENGINES, SEEDS, st.sampled_from([1, 4, 100])),
    Rebind: st.builds(Rebind, ENGINES),
}
ALL = (Publish, Wait, Publish, Wait, Arm, Arm, Kill, Restart, Start, Break, Corrupt, Rebind)


def steps(kinds: tuple[type, ...] = ALL) -> st.SearchStrategy[Step]:
    """One step of some kinds; one that is named twice comes twice as often."""
    return st.sampled_from(kinds).flatmap(STEPS.__getitem__)


def plans(kinds: tuple[type, ...] = ALL, **fixed: Any) -> st.SearchStrategy[Plan]:
    """Plans of these kinds of steps. fixed: what is the same in all of them."""
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "steps": st.lists(steps(kinds), min_size=1, max_size=12).map(tuple),
        "seed": st.integers(0, 1000),
        "engines": st.integers(1, 2),
        "late": st.integers(0, 1),
        "loaded": st.booleans(),
        "busy": st.sampled_from([0, 0, 10, 100]),
        "codec": st.sampled_from(["raw", "gaps"]),
        "operation": st.sampled_from(Operation),
        "trainer_ranks": st.sampled_from([1, 1, 2]),
        "ranks": st.sampled_from([1, 1, 2]),
        "quorum": st.sampled_from(["all", "all", 1]),
        "anchor_every": st.sampled_from([None, None, 1, 2]),
    }
    return st.builds(
        Plan,
        **{name: fixed.get(name, how) for name, how in drawn.items() if name not in fixed},
        **{name: st.just(value) for name, value in fixed.items()},
    )
