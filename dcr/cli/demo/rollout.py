"""One rollout of the demo: generates with its serving copy, and installs each version as it is committed.

Started by `dcr.cli.demo.run` as a process of its own; its events go to the parent.
"""

from pathlib import Path

import anyio
import anyio.to_thread
import torch

import dcr
from dcr import plugins
from dcr.cli.demo import bits, policy, results, samples, stream
from dcr.cli.demo.orders import RolloutOrder, rollout_order
from dcr.testing import FaultyTransport, flip_one_chunk

FIRST_DELTA = 2
DECODING = "decoding"  # as user's work


class ServingModel:
    """The serving copy and its generation, one decode step at a time; `pause` is held by whoever uses the weights."""

    def __init__(self, order: RolloutOrder, emit: stream.Emitter) -> None:
        torch.manual_seed(order.seed)  # other weights than the trainer's: the anchor has to replace them all
        self.model = policy.to_serving(policy.Policy(policy.SIZES[order.size]))
        self.pause = anyio.Lock()
        self.version = 0
        self.groups = 0
        self._emit = emit
        self._member = order.member
        self._samples = Path(order.folder) / "samples"
        self._generator = torch.Generator().manual_seed(order.seed)

    async def generate(self) -> None:
        """Decode group after group, for as long as nobody cancels it."""
        while True:
            start_version = self.version
            group = policy.Decoding(self.model, self._generator)
            while not group.done:
                async with self.pause:
                    with stream.working(self._emit, DECODING, member=self._member):
                        await anyio.to_thread.run_sync(group.step)
                    end_version = self.version
            self.groups += 1
            await anyio.to_thread.run_sync(self._hand_over, group, start_version, end_version)

    def _hand_over(self, group: policy.Decoding, start_version: int, end_version: int) -> None:
        earned = policy.reward(group.tokens, self.model.sizes.prompt)
        held = samples.SampleGroup(
            group.tokens.numpy(), earned.numpy(), group.logprobs.numpy(), start_version, end_version
        )
        samples.write(self._samples, self._member, self.groups, held)


async def serve(order: RolloutOrder, emit: stream.Emitter) -> None:
    """Follow the trainer up to the last version, then write down every bit that is held."""
    engine, folder = ServingModel(order, emit), Path(order.folder)
    async with (
        dcr.subscriber(
            order.url,
            loader=dcr.loader(engine.model),
            member=order.member,
            transport=flipping(order.url) if order.fault == "wire" else None,
            observe=emit,
        ) as versions,
        anyio.create_task_group() as tasks,
    ):
        async for version in versions:
            await install(version, engine)
            if version.number == order.last:
                break
            if engine.groups == 0 and version.number == 1:
                tasks.start_soon(engine.generate)
        tasks.cancel_scope.cancel()
    flipped = bits.flip(engine.model, seed=order.seed) if order.fault == "weights" else None
    bits.dump(folder / order.member, engine.model, member=order.member, version=engine.version)
    result = results.Result(samples=engine.groups * engine.model.sizes.group, fault=flipped)
    results.write(folder, order.member, result)


def flipping(url: str) -> FaultyTransport:
    """The run's transport, with one bit flipped in the first chunk of the first delta that comes over it."""
    return FaultyTransport(plugins.transport_for(url), on_receive=flip_one_chunk(FIRST_DELTA))


async def install(version: dcr.Version, engine: ServingModel) -> None:
    """Move the live weights to a prepared version; only the scatter happens while generation is paused."""
    async with engine.pause:
        await version.install()
        engine.version = version.number


def main() -> None:
    """Entry point of the process."""
    order, emit = rollout_order(), stream.Emitter()
    stream.obey_parent()
    torch.set_num_threads(1)
    anyio.run(serve, order, emit)


if __name__ == "__main__":
    main()
