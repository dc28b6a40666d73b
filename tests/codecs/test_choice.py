"""The form of a chunk follows from what it costs: link, density and level decide, and the report says why.

N elements of a frame, K of them changed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.refits import FAST as TRANSPORT
from support.refits import Rollout, Weights, empty_like, publish, require_equal, running, set_bits, state

import dcr
from dcr.codecs.choice import LEVELS, Choice, Chooser, Chosen, merged, outgrows
from dcr.codecs.codec import CLASSES, FAST, GAPS, RAW, named
from dcr.codecs.patch import Operation
from dcr.kernels import read
from dcr.layout.boxes import Box, Dim
from dcr.layout.frames import Layout, Shard, plan
from dcr.layout.schema import WIDTHS, Schema, TensorSpec
from dcr.layout.views import UNSIGNED, Bits
from dcr.memory.baseline import Baseline
from dcr.protocol.digest import zero
from dcr.protocol.wire import Identity
from dcr.stages.compress import Compress, decode
from dcr.stages.construct import Construct, source_table

N = 1 << 20
STEP = Identity("run", 1, 2, 1)
every_level = pytest.mark.parametrize("level", LEVELS)


def chooser(level: str, link: float | None = None) -> Chooser:
    made = Chooser(LEVELS[level])
    if link is not None:
        made.sent(int(link), 1.0)
    return made


def sparse(level: str, link: float | None = None, *, K: int = N // 100, based: bool = False) -> Choice:
    return chooser(level, link).choose(K, N, 2, dense=False, based=based)


# ---------------------------------------------------------------------- the model


def test_without_a_link_rate_balanced_takes_gaps() -> None:
    assert sparse("balanced")[:2] == ("sparse", GAPS.name)
    assert "assumed" in sparse("balanced").why


@pytest.mark.parametrize(("link", "codec"), [(12.5e6, GAPS), (125e6, GAPS), (10e9, FAST)])
def test_balanced_codes_for_a_slow_link_and_stores_for_a_fast_one(link: float, codec: object) -> None:
    chosen = sparse("balanced", link)
    assert named(chosen.codec) is codec
    assert "measured" in chosen.why


def test_a_little_that_was_sent_says_nothing_of_the_link() -> None:
    made = chooser("balanced")
    made.sent(1000, 1e-9)
    assert "assumed" in made.choose(N // 100, N, 2, dense=False, based=False).why


def test_small_goes_by_class_where_both_ends_hold_old_bits() -> None:
    assert sparse("small", 10e9, based=True)[:2] == ("class", CLASSES.name)
    chosen = sparse("small", based=False)
    assert chosen[:2] == ("sparse", GAPS.name)
    assert "without old bits" in chosen.why


def test_fast_stores() -> None:
    assert sparse("fast")[:2] == ("sparse", FAST.name)
    assert chooser("fast").choose(N, N, 2, dense=True, based=False)[:2] == ("dense", RAW.name)


@every_level
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_what_would_outgrow_its_frame_is_dense(level: str, width: int) -> None:
    most = N * width // (4 + width)
    assert outgrows(most + 1, N, width)
    assert not outgrows(most - 1, N, width)
    assert chooser(level).is_dense(most + 1, N, width)
    assert not chooser(level).is_dense(N // 1000, N, width)


def test_a_denser_frame_is_sent_whole_where_reading_it_costs_more_than_the_link_saves() -> None:
    K = N * 3 // 10
    assert chooser("balanced", 50e9).is_dense(K, N, 2)
    assert not chooser("balanced", 12.5e6).is_dense(K, N, 2)


def test_bodies_larger_than_expected_change_the_choice() -> None:
    """Values that cannot be coded: stored, they cost no more than coded ones, and less time."""
    made = chooser("balanced", 125e6)
    gaps, stored = Choice("sparse", GAPS.name, ""), Choice("sparse", FAST.name, "")
    assert made.choose(N // 100, N, 2, dense=False, based=False).codec == GAPS.name
    for _ in range(20):
        made.measured(gaps, 10_000, N, 2, nbytes=40_000, encode_s=0.001)
        made.measured(stored, 10_000, N, 2, nbytes=40_000, encode_s=0.00001)
    assert made.choose(N // 100, N, 2, dense=False, based=False).codec == FAST.name


def test_a_reader_that_is_slow_changes_the_choice() -> None:
    made = chooser("balanced", 1e9)
    for _ in range(20):
        made.decoded(Choice("sparse", FAST.name, ""), 1000, 1e-3)
        made.decoded(Choice("sparse", GAPS.name, ""), 1000, 1e-6)
    assert made.choose(N // 100, N, 2, dense=False, based=False).codec == GAPS.name


def test_small_frames_do_not_tell_what_an_element_costs() -> None:
    """Ten elements take as long as the call; stored ones would seem cheaper than they are for whole frames."""
    made = chooser("balanced", 125e6)
    for _ in range(20):
        made.measured(Choice("sparse", GAPS.name, ""), 10, N, 2, nbytes=60, encode_s=50e-6)
    assert made.choose(N // 100, N, 2, dense=False, based=False).codec == GAPS.name


def test_nothing_and_everything_can_be_chosen_for() -> None:
    for level in LEVELS:
        made = chooser(level)
        for K in (0, 1, N):
            made.measured(made.choose(K, N, 2, dense=False, based=True), K, N, 2, nbytes=1, encode_s=0.0)
        made.choose(0, 0, 2, dense=True, based=False)
        made.is_dense(1, 1, 2)


def test_alike_frames_of_several_ranks_are_counted_together() -> None:
    one, other = Chosen("sparse", "gaps", "why", 2, 20, 200), Chosen("skip", "", "nothing changed", 1, 0, 0)
    assert merged([(one, other), (one,), ()]) == (Chosen("sparse", "gaps", "why", 4, 40, 400), other)


# ---------------------------------------------------------------------- chunks


class Ends:
    """One tensor before and after a step."""

    def __init__(self, old: Bits, new: Bits, dtype: str) -> None:
        schema = Schema((TensorSpec("w", dtype, (len(old),)),))
        self.plan = plan(schema, [Shard(0, 0, Box(0, 0, (Dim(len(old), 1, 1),)))])
        self.layout = Layout(schema, tuple(one.spec for one in self.plan))
        self.old, self.new = old, new
        self.baseline = Baseline(self.layout)
        self.baseline.adopt({0: read(source_table(self.plan[0], [old]))}, STEP, zero(1))

    def encode(self, compress: Compress) -> tuple[int, bool]:
        """The size of the chunk, and whether it is dense; it is decoded and compared."""
        construct = Construct(self.baseline, self.plan, [self.new], is_dense=compress.is_dense)
        patch = construct.patch(0)
        assert patch is not None
        chunk, body = compress.encode(patch)
        change = decode(chunk, body, self.layout, named, lambda _: self.old).change
        found, at = self.old.copy(), slice(None) if change.positions is None else change.positions
        if change.operation is Operation.STEP:
            found[at] += change.values
        else:
            found[at] = change.values
        np.testing.assert_array_equal(found, self.new)
        return len(body), change.positions is None


def compress(codec: object) -> Compress:
    return Compress(STEP, codec, Operation.STEP, dcr.ByteBudget(1 << 30), reads_base=True)


@every_level
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "float32", "int64"])
@pytest.mark.parametrize("density", [0.001, 0.1, 0.2, 0.33, 0.5, 0.9, 1.0])
def test_no_chunk_is_larger_than_the_frame_and_a_hundredth(level: str, dtype: str, density: float) -> None:
    """Random positions, random bits: nothing to save."""
    random, width = np.random.default_rng(0), WIDTHS[dtype]
    size = 1 << 16
    old: Bits = np.frombuffer(random.bytes(size * width), UNSIGNED[width])
    new = old.copy()
    at = np.flatnonzero(random.random(size) < density)
    new[at] ^= np.maximum(np.frombuffer(random.bytes(len(at) * width), UNSIGNED[width]), UNSIGNED[width].type(1))
    nbytes, dense = Ends(old, new, dtype).encode(compress(chooser(level)))
    assert nbytes <= 1.01 * size * width
    assert dense or density < 0.9


def test_a_chunk_that_is_sent_again_is_the_same_whatever_was_learned_meanwhile() -> None:
    random = np.random.default_rng(1)
    old = random.integers(0, 1 << 16, N, np.uint16)
    new = old.copy()
    new[::100] += 1
    ends, made = Ends(old, new, "bfloat16"), chooser("balanced")
    stage = compress(made)
    patch = Construct(ends.baseline, ends.plan, [new]).patch(0)
    assert patch is not None
    first = stage.encode(patch)
    assert first[0].codec == GAPS.name
    made.sent(1 << 40, 1.0)
    assert compress(made).encode(patch)[0].codec == FAST.name
    assert stage.encode(patch) == first
    assert sum(one.frames for one in stage.chosen) == 1


async def test_the_report_says_what_was_chosen_and_why(tmp_path: Path) -> None:
    trainer = Weights({f"w{index}": torch.zeros(1000, dtype=torch.bfloat16) for index in range(3)})
    rollout = Rollout(empty_like(trainer))
    async with (
        running(tmp_path, [rollout]) as url,
        dcr.publisher(
            url, source=dcr.source(trainer), transport=TRANSPORT, codec="small", frame_elems=1000
        ) as publisher,
    ):
        await publisher.joined(1)
        report = await publish(publisher, 1)
        assert [(one.form, one.frames, one.changed) for one in report.chosen] == [("dense", 3, 3000)]
        await rollout.reached(1)
        set_bits(trainer.w0, np.arange(0, 1000, 10), np.ones(100, np.uint16))
        set_bits(trainer.w1, np.arange(1000), np.ones(1000, np.uint16))
        report = await publish(publisher, 2)
        forms = {one.form: one for one in report.chosen}
        assert {form: (one.frames, one.changed) for form, one in forms.items()} == {
            "class": (1, 100),
            "dense": (1, 1000),
            "skip": (1, 0),
        }
        assert sum(one.nbytes for one in report.chosen) == report.wire_bytes
        assert "level small" in forms["class"].why
        await rollout.reached(2)
        require_equal(rollout.module, state(trainer))
