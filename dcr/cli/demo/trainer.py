"""The demo's trainer: policy-gradient steps on the rollouts' samples, and a refit after each.

Started by `dcr.cli.demo.run` as a process of its own; its events go to the parent.
"""

from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import torch

import dcr
from dcr.cli.demo import bits, policy, results, samples, stream
from dcr.cli.demo.orders import TrainerOrder, trainer_order

LEARNING_RATE = 1e-6
WARM_UP_STEPS = 4
TRAINING = "training"  # as user's work


@dataclass(slots=True)
class Learner:
    """The fp32 masters and their optimizer."""

    model: policy.Policy
    optimizer: torch.optim.AdamW
    warm_up: torch.optim.lr_scheduler.LambdaLR

    @classmethod
    def build(cls, size: str) -> "Learner":
        """Fresh weights and AdamW, whose rate rises to 1e-6 over the first steps."""
        model = policy.Policy(policy.SIZES[size])
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
        return cls(model, optimizer, warm_up)

    def forward_backward(self, groups: list[samples.SampleGroup]) -> tuple[float, float, float]:
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


async def train(order: TrainerOrder, emit: stream.Emitter) -> None:
    """Publish the anchor, then take one step per refit: version n ships while the step for n + 1 is computed."""
    torch.manual_seed(order.seed)
    folder = Path(order.folder)
    learner, steps = Learner.build(order.size), list[results.Step]()
    last = order.refits + 1
    source = dcr.source(learner.model, dtype="bfloat16")
    async with dcr.publisher(order.url, source=source, observe=emit) as publisher:
        await publisher.joined(order.members)
        refit = await publisher.publish(version=1)
        for version in range(2, last + 1):
            groups, stale = await gather(folder / "samples", order.members)
            with stream.working(emit, TRAINING, version=version):
                reward, ratio, clipped = await anyio.to_thread.run_sync(learner.forward_backward, groups)
            await publisher.captured()
            with stream.working(emit, TRAINING, version=version):
                await anyio.to_thread.run_sync(learner.step)
            drawn = sum(len(group.rewards) for group in groups)
            steps.append(results.Step(version, reward, ratio, clipped, drawn, stale))
            await refit.committed()
            refit = await publisher.publish(version=version)
        await refit.committed()
        await refit.installed()
    bits.dump(folder / "trainer", learner.model, member="trainer", version=last)
    results.write(folder, "trainer", results.Result(steps=tuple(steps)))


async def gather(folder: Path, count: int, *, poll_s: float = 0.01) -> tuple[list[samples.SampleGroup], int]:
    """The newest `count` groups, as soon as there are that many, and how many older ones were dropped."""
    while True:
        taken = await anyio.to_thread.run_sync(samples.take, folder, count)
        if taken is not None:
            return taken
        await anyio.sleep(poll_s)


def main() -> None:
    """Entry point of the process."""
    order, emit = trainer_order(), stream.Emitter()
    stream.obey_parent()
    torch.set_num_threads(1)
    anyio.run(train, order, emit)


if __name__ == "__main__":
    main()
