"""The demo's trainer: policy-gradient steps on the rollouts' samples, and a refit after each.

Started by `dcr.cli.demo.run` as a process of its own; tells the parent what it measured as events.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import torch

import dcr
from dcr.cli.demo import bits, events, policy, samples
from dcr.cli.demo.orders import TrainerOrder, trainer_order

LEARNING_RATE = 1e-6
WARM_UP_STEPS = 4


@dataclass(slots=True)
class Learner:
    """The fp32 masters and their optimizer."""

    model: policy.Policy
    optimizer: torch.optim.AdamW
    warm_up: torch.optim.lr_scheduler.LambdaLR
    computing: events.SpanLog = field(default_factory=events.SpanLog)

    @classmethod
    def build(cls, size: str) -> "Learner":
        """Fresh weights and AdamW, whose rate rises to 1e-6 over the first steps."""
        model = policy.Policy(policy.SIZES[size])
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
        return cls(model, optimizer, warm_up)

    def forward_backward(self, groups: list[samples.Group]) -> tuple[float, float, float]:
        """Gradients of the mean loss; returns the means of reward, importance ratio and clipped share."""
        self.optimizer.zero_grad(set_to_none=True)
        totals = torch.zeros(3)
        for group in groups:
            tokens, behaviour = torch.from_numpy(group.tokens), torch.from_numpy(group.logprobs)
            rewards = policy.reward(tokens, self.model.sizes.prompt)
            if not torch.equal(rewards, torch.from_numpy(group.rewards)):
                raise ValueError(f"rewards {group.rewards} do not follow from the tokens, which earn {rewards}")
            loss, ratio, clipped = policy.loss(self.model(tokens), tokens, behaviour, policy.advantage(rewards))
            (loss / len(groups)).backward()  # type: ignore[no-untyped-call]
            totals += torch.tensor((float(rewards.mean()), ratio, clipped))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        reward, ratio, clipped = (totals / len(groups)).tolist()
        return reward, ratio, clipped

    def step(self) -> None:
        """Move the masters; the bits that the next version will name."""
        self.optimizer.step()
        self.warm_up.step()


async def train(order: TrainerOrder, emit: events.Emitter) -> None:
    """Publish the anchor, then take one step per refit: version n ships while the step for n + 1 is computed."""
    torch.manual_seed(order.seed)
    folder = Path(order.folder)
    learner = Learner.build(order.size)
    last = order.refits + 1
    source = dcr.source(learner.model, dtype="bfloat16")
    async with dcr.publisher(order.url, source=source) as publisher, anyio.create_task_group() as tasks:
        emit(events.Started("trainer", policy.parameters_total(learner.model)))
        await publisher.joined(order.members)
        refit, committed = await ship(publisher, 1, learner, emit, tasks)
        for version in range(2, last + 1):
            groups, stale = await gather(folder / "samples", order.members)
            with learner.computing.running():
                reward, ratio, clipped = await anyio.to_thread.run_sync(learner.forward_backward, groups)
            await publisher.captured()
            with learner.computing.running():
                await anyio.to_thread.run_sync(learner.step)
            drawn = sum(len(group.rewards) for group in groups)
            emit(events.Stepped(version, reward, ratio, clipped, drawn, stale, learner.computing.take()))
            await committed.wait()
            refit, committed = await ship(publisher, version, learner, emit, tasks)
        await committed.wait()
        await refit.installed()
    bits.dump(folder / "trainer", learner.model, member="trainer", version=last)
    emit(events.Dumped("trainer", last, str(folder / "trainer"), 0))


async def gather(folder: Path, count: int, *, poll_s: float = 0.01) -> tuple[list[samples.Group], int]:
    """The newest `count` groups, as soon as there are that many, and how many older ones were dropped."""
    while True:
        taken = await anyio.to_thread.run_sync(samples.take, folder, count)
        if taken is not None:
            return taken
        await anyio.sleep(poll_s)


async def ship(
    publisher: dcr.Publisher, version: int, learner: Learner, emit: events.Emitter, tasks: anyio.abc.TaskGroup
) -> tuple[dcr.Refit, anyio.Event]:
    """Publish a version and report on it beside the training; the event is set once that is done."""
    start, done = time.monotonic(), anyio.Event()
    refit = await publisher.publish(version=version)

    async def watch() -> None:
        report = await refit.committed()
        emit(describe(report, (start, time.monotonic()), learner.computing.take()))
        done.set()

    tasks.start_soon(watch)
    return refit, done


def describe(report: dcr.Report, shipping: events.Span, computing: tuple[events.Span, ...]) -> events.Committed:
    """The report of a refit as an event."""
    return events.Committed(
        version=report.version,
        density=report.density,
        changed=report.changed,
        wire_bytes=report.wire_bytes,
        dense_bytes=report.dense_bytes,
        sent_again_bytes=report.sent_again,
        stages={
            stage.name: events.StageTime(stage.busy_s, stage.blocked_in_s, stage.blocked_out_s, stage.items)
            for stage in report.stages.stages
        },
        bottleneck=report.stages.bottleneck,
        captured_s=report.captured_s,
        shipping=shipping,
        computing=computing,
    )


def main() -> None:
    """Entry point of the process."""
    order, emit = trainer_order(), events.Emitter()
    events.obey_parent()
    torch.set_num_threads(1)
    anyio.run(train, order, emit)


if __name__ == "__main__":
    main()
