"""The demo does what it says: its three endings for real, and its audit on files that are wrong in known ways."""

import io
import re
from functools import partial
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest
import torch

from dcr.cli import demo
from dcr.cli.demo import audit, bits, policy, processes, rows, samples, screen, stream
from dcr.cli.demo.orders import RolloutOrder
from dcr.events import (
    Event,
    InstallCompleted,
    PublishCompleted,
    PublishStarted,
    StageCompleted,
    UserWorkCompleted,
    UserWorkStarted,
)

TINY = policy.SIZES["tiny"]


# The audit


def dump(folder: Path, tensors: dict[str, np.ndarray], *, version: int = 3) -> Path:
    held = [(name, f"u{bits.itemsize}", bits.shape, bits) for name, bits in tensors.items()]
    audit.write_dump(folder, member=folder.name, version=version, tensors=held)
    return folder


def weights() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    return {
        "a": draw.integers(0, 1 << 16, (5, 7), dtype=np.uint16),
        "b": draw.integers(0, 1 << 32, (11,), dtype=np.uint32),
        "c": draw.integers(0, 1 << 8, (2, 3, 4), dtype=np.uint8),
    }


def test_audit_of_equal_bits_finds_nothing(tmp_path: Path) -> None:
    verdict = audit.audit(dump(tmp_path / "trainer", weights()), dump(tmp_path / "rollout", weights()))
    assert verdict.differences == ()
    assert (verdict.tensors, verdict.elements, verdict.bytes) == (3, 35 + 11 + 24, 70 + 44 + 24)


@pytest.mark.parametrize(("tensor", "index", "bit"), [("a", 0, 0), ("a", 34, 15), ("b", 10, 31), ("c", 13, 4)])
def test_audit_names_tensor_index_and_bits_of_a_flipped_bit(tmp_path: Path, tensor: str, index: int, bit: int) -> None:
    broken = weights()
    before = int(broken[tensor].flat[index])
    broken[tensor].flat[index] = before ^ (1 << bit)
    verdict = audit.audit(dump(tmp_path / "trainer", weights()), dump(tmp_path / "rollout", broken))
    (difference,) = verdict.differences
    assert (difference.tensor, difference.index, difference.count) == (tensor, index, 1)
    assert int(difference.expected, 16) == before
    assert int(difference.found, 16) == before ^ (1 << bit)
    assert f"{tensor}[{index}]" in str(difference)


def test_audit_tells_minus_zero_from_zero_and_nans_apart(tmp_path: Path) -> None:
    trainer = {"w": np.array([0x0000, 0x7FC0], dtype=np.uint16)}
    receiver = {"w": np.array([0x8000, 0x7FC1], dtype=np.uint16)}
    (difference,) = audit.audit(dump(tmp_path / "t", trainer), dump(tmp_path / "r", receiver)).differences
    assert (difference.index, difference.count, difference.expected, difference.found) == (0, 2, "0x0000", "0x8000")


def test_audit_names_missing_unexpected_and_reshaped_tensors(tmp_path: Path) -> None:
    held = weights()
    held["d"] = held.pop("a")
    held["c"] = held["c"].reshape(4, 6)
    verdict = audit.audit(dump(tmp_path / "trainer", weights()), dump(tmp_path / "rollout", held))
    assert {difference.tensor for difference in verdict.differences} == {"a", "c", "d"}


def test_audit_refuses_another_version(tmp_path: Path) -> None:
    trainer, receiver = dump(tmp_path / "t", weights(), version=4), dump(tmp_path / "r", weights(), version=3)
    assert [difference.tensor for difference in audit.audit(trainer, receiver).differences] == ["(version)"]


def test_audit_refuses_a_short_file(tmp_path: Path) -> None:
    trainer, receiver = dump(tmp_path / "t", weights()), dump(tmp_path / "r", weights())
    (receiver / "bits").write_bytes((receiver / "bits").read_bytes()[:-1])
    with pytest.raises(ValueError, match="holds 23 of the 24 elements of c"):
        audit.audit(trainer, receiver)


def test_a_dump_of_masters_equals_a_dump_of_the_serving_copy_until_a_bit_flips(tmp_path: Path) -> None:
    masters = policy.Policy(TINY)
    serving = policy.to_serving(policy.Policy(TINY))
    serving.load_state_dict(masters.state_dict())
    bits.dump(tmp_path / "trainer", masters, member="trainer", version=1)
    bits.dump(tmp_path / "equal", serving, member="equal", version=1)
    bits.flip(serving, seed=0)
    bits.dump(tmp_path / "flipped", serving, member="flipped", version=1)
    assert audit.audit(tmp_path / "trainer", tmp_path / "equal").differences == ()
    assert audit.audit(tmp_path / "trainer", tmp_path / "flipped").differences != ()


# The policy


def test_generation_with_a_cache_draws_from_the_distribution_of_a_whole_forward() -> None:
    torch.manual_seed(0)
    serving = policy.to_serving(policy.Policy(TINY))
    group = policy.Decoding(serving, torch.Generator().manual_seed(1))
    while not group.done:
        group.step()
    with torch.no_grad():
        everywhere = serving(group.tokens).float()[:, TINY.prompt - 1 : -1].log_softmax(-1)
    whole = everywhere.gather(2, group.tokens[:, TINY.prompt :, None])[:, :, 0]
    assert float((whole - group.logprobs).abs().max()) < 0.05  # bf16 sums in another order


def test_the_reward_is_the_share_of_ascending_tokens() -> None:
    tokens = torch.tensor([[9, 1, 2, 3, 4], [9, 9, 9, 9, 9], [0, 5, 4, 8, 7]])
    assert policy.reward(tokens, 2).tolist() == [1.0, 0.0, pytest.approx(1 / 3)]


def test_the_loss_raises_the_probability_of_the_better_sample() -> None:
    torch.manual_seed(0)
    model, tokens = policy.Policy(TINY), torch.randint(TINY.vocab, (2, 8))
    with torch.no_grad():
        behaviour = model(tokens)[:, 3:-1].log_softmax(-1).gather(2, tokens[:, 4:, None])[:, :, 0]
    loss, ratio, clipped = policy.loss(model(tokens), tokens, behaviour, torch.tensor([1.0, -1.0]))
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-2).step()
    with torch.no_grad():
        moved = model(tokens)[:, 3:-1].log_softmax(-1).gather(2, tokens[:, 4:, None])[:, :, 0] - behaviour
    assert (ratio, clipped) == (pytest.approx(1.0), 0.0)
    assert moved[0].sum() > 0 > moved[1].sum()


# Samples, events, rows


def test_taking_samples_prefers_the_newest_and_removes_all(tmp_path: Path) -> None:
    def group(version: int) -> samples.SampleGroup:
        return samples.SampleGroup(
            np.full((4, 6), version, np.int64), np.ones(4, np.float32), np.zeros((4, 3), np.float32), version, version
        )

    samples.write(tmp_path, "rollout-0", 1, group(1))
    assert samples.take(tmp_path, 2) is None
    samples.write(tmp_path, "rollout-0", 2, group(2))
    samples.write(tmp_path, "rollout-1", 1, group(3))
    taken = samples.take(tmp_path, 2)
    assert taken is not None
    assert {held.start_version for held in taken[0]} == {2, 3}
    assert taken[1] == 1
    assert list(tmp_path.iterdir()) == []


def test_overlap_counts_only_what_lies_in_the_window() -> None:
    assert stream.overlap_s((1.0, 3.0), [(0.0, 1.5), (2.0, 2.25), (2.5, 9.0), (10.0, 11.0)]) == 1.25


def published(version: int, shipping: stream.Span) -> list[Event]:
    """What a trainer's publisher tells of one version: its begin, one stage, its commit."""
    start_s, end_s = shipping
    base = version - 1 or None
    worked = StageCompleted(end_s, "construct", version, None, 1, 1, 0, 0.1, 0.0, 0.0, 0.1)
    committed = PublishCompleted(end_s, version, 1, 1, base, 1000, 10, 1, 100, 2000, 0, 0.1, end_s - start_s)
    return [PublishStarted(start_s, version), worked, committed]


def worked(member: str | None, span: stream.Span) -> list[Event]:
    return [
        UserWorkStarted(span[0], "work", None, member),
        UserWorkCompleted(span[1], "work", None, member, span[1] - span[0]),
    ]


def test_a_row_is_complete_once_every_process_has_spoken_and_its_shares_follow_from_the_spans() -> None:
    tally = rows.Tally(("x", "y"))
    events = [
        *worked("x", (10.0, 12.0)),
        InstallCompleted(15.0, "x", 2, "delta", 0.005, 0.01),
        UserWorkStarted(11.0, "work", None, None),  # which has not ended when the version is committed
        *published(2, (10.0, 14.0)),
    ]
    assert [tally.take(event) for event in events] == [None] * len(events)
    row = tally.take(InstallCompleted(15.0, "y", 2, "delta", 0.005, 0.02))
    assert row is not None
    assert (row.training_share, row.generating_share, row.pause_s) == (0.75, 0.25, 0.02)
    assert (row.ship_s, row.reduction) == (4.0, 20.0)


def test_plain_text_says_anchor_and_marks_the_bottleneck() -> None:
    tally, out = rows.Tally(("x",)), io.StringIO()
    with screen.opened(out) as shown:
        for version in (1, 2):
            for event in published(version, (0.0, 1.0)):
                tally.take(event)
            row = tally.take(InstallCompleted(2.0, "x", version, "delta", 0.0, 0.0))
            assert row is not None
            shown.row(row)
    heading, first, second = out.getvalue().splitlines()
    assert "pause" in heading
    assert "anchor" in first
    assert "construct 100*" in second
    assert "1.00 %" in second


# Processes


def test_a_child_that_fails_is_named_with_the_end_of_its_stderr(tmp_path: Path) -> None:
    broken = RolloutOrder("nowhere://x", str(tmp_path), "no such size", 0, "rollout-0", 1, None)
    child = processes.Child("rollout-0", "dcr.cli.demo.rollout", broken)
    with pytest.raises(processes.ChildError, match=r"rollout-0 ended with status 1[\s\S]*KeyError: 'no such size'"):
        anyio.run(partial(processes.conduct, deadline_s=60.0), [child], tmp_path, lambda event: None)


def test_a_line_that_is_no_event_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        stream.decode(b'{"type": "nonsense"}')


# The whole


def test_every_bit_is_equal_after_refits_beside_generation(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.run(refits=3, size="tiny") == 0
    shown = capfd.readouterr().out
    assert len(re.findall(r"^ +[234] +\d+\.\d\d % ", shown, flags=re.M)) == 3
    assert "rollout-0, version 4: all " in shown
    assert "rollout-1, version 4: all " in shown


def test_a_bit_flipped_in_live_weights_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.run(refits=2, size="tiny", inject_fault="weights") == 1
    shown = capfd.readouterr().out
    flipped = re.search(r"flipped bit \d+ of (\S+) in live memory", shown)
    assert flipped is not None
    assert f"  {flipped[1]}: trainer 0x" in shown
    assert "that is the injected fault, found as intended" in shown
    assert "rollout-0, version 3: all " in shown


def test_a_bit_flipped_in_live_weights_that_nobody_finds_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "compare", lambda folder, shown: demo.EQUAL)
    assert demo.run(refits=1, size="tiny", inject_fault="weights") == 2
    assert "the audit found no difference" in capfd.readouterr().out


def test_a_bit_flipped_on_the_wire_is_refused_and_sent_again(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.run(refits=2, size="tiny", inject_fault="wire") == 0
    shown = capfd.readouterr().out
    assert re.search(r"^rollout-1 refused: version 2, frame \d+: PayloadError: ", shown, flags=re.M)
    assert re.search(r"^trainer sent \S+ \S+ of version 2 again$", shown, flags=re.M)
    assert "rollout-1, version 3: all " in shown


def test_a_run_past_its_deadline_ends_and_names_its_phase(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.run(refits=2, size="tiny", deadline_s=0.2) == 2
    assert "failed in phase: starting three processes" in capfd.readouterr().out


def test_an_unknown_fault_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.run(inject_fault="gremlins") == 2
    assert "gremlins" in capfd.readouterr().out
