"""One rollout of the demo: generates with its serving copy, and installs each version as it is committed.

Started by `dcr.cli.demo.run` as a process of its own; tells the parent what it measured as events.
"""

import time
from pathlib import Path

import anyio
import anyio.to_thread
import torch

import dcr
from dcr import plugins
from dcr.cli.demo import bits, events, policy, samples
from dcr.cli.demo.orders import RolloutOrder, rollout_order
from dcr.testing import FaultyTransport, flip_one_chunk

FIRST_DELTA = 2


class Engine:
    """The serving copy and its generation, one decode step at a time; `pause` is held by whoever uses the weights."""

    def __init__(self, order: RolloutOrder) -> None:
        torch.manual_seed(order.seed)  # other weights than the trainer's: the anchor has to replace them all
        self.model = policy.to_serving(policy.Policy(policy.SIZES[order.size]))
        self.pause = anyio.Lock()
        self.version = 0
        self.groups = 0
        self.generating = events.SpanLog()
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
                    with self.generating.running():
                        await anyio.to_thread.run_sync(group.step)
                    end_version = self.version
            self.groups += 1
            await anyio.to_thread.run_sync(self._hand_over, group, start_version, end_version)

    def _hand_over(self, group: policy.Decoding, start_version: int, end_version: int) -> None:
        earned = policy.reward(group.tokens, self.model.sizes.prompt)
        held = samples.Group(group.tokens.numpy(), earned.numpy(), group.logprobs.numpy(), start_version, end_version)
        samples.write(self._samples, self._member, self.groups, held)


async def serve(order: RolloutOrder, emit: events.Emitter) -> None:
    """Follow the trainer up to the last version, then write down every bit that is held."""
    engine, folder = Engine(order), Path(order.folder) / order.member

    def observe(event: dcr.Event) -> None:
        if event.name == "refused":
            what = f"version {event.version}" + ("" if event.frame is None else f", frame {event.frame}")
            emit(events.Refused(order.member, f"{what}: {event.detail}"))

    async with dcr.subscriber(
        order.url,
        loader=dcr.loader("module", engine.model),
        member=order.member,
        transport=flipping(order.url) if order.fault == "wire" else None,
        observe=observe,
    ) as versions:
        emit(events.Started(order.member, policy.parameters_total(engine.model)))
        async with anyio.create_task_group() as tasks:
            async for version in versions:
                await install(version, engine, order.member, emit)
                if version.number == order.last:
                    break
                if engine.groups == 0 and version.number == 1:
                    tasks.start_soon(engine.generate)
            tasks.cancel_scope.cancel()
    if order.fault == "weights":
        emit(events.Noted(order.member, bits.flip(engine.model, seed=order.seed)))
    bits.dump(folder, engine.model, member=order.member, version=engine.version)
    emit(events.Dumped(order.member, engine.version, str(folder), engine.groups * engine.model.sizes.group))


def flipping(url: str) -> FaultyTransport:
    """The run's transport, with one bit flipped in the first chunk of the first delta that comes over it."""
    return FaultyTransport(plugins.transport_for(url), on_receive=flip_one_chunk(FIRST_DELTA))


async def install(version: dcr.Version, engine: Engine, member: str, emit: events.Emitter) -> None:
    """Move the live weights to a prepared version; only the scatter happens while generation is paused."""
    asked = time.monotonic()
    async with engine.pause:
        start = time.monotonic()
        await version.install()
        end = time.monotonic()
        engine.version = version.number
    emit(events.Installed(member, version.number, end - start, start - asked, engine.generating.take()))


def main() -> None:
    """Entry point of the process."""
    order, emit = rollout_order(), events.Emitter()
    events.obey_parent()
    torch.set_num_threads(1)
    anyio.run(serve, order, emit)


if __name__ == "__main__":
    main()
