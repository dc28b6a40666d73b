"""Pipelines in the right order: a type checker accepts every line, and infers what goes in and comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_type

from dcr import DROP, FunctionStage, Inbox, Outbox, Pipeline, stage
from dcr.codecs.patch import Operation, Patch
from dcr.memory.baseline import Baseline
from dcr.pipeline import Drop
from dcr.pipeline.budget import ByteBudget
from dcr.protocol.wire import ChunkRef, Identity
from dcr.seams import Codec, Link, Stage
from dcr.stages.compress import Compress, Parcel
from dcr.stages.construct import Construct
from dcr.stages.transfer import Transfer


@stage
def text(number: int) -> str:
    return str(number)


@stage
async def encoded(value: str) -> bytes:
    return value.encode()


@stage(workers=2)
def sized(value: bytes) -> float | Drop:
    return float(len(value)) if value else DROP


@stage(workers=2, name="later")
async def awaited(value: bytes) -> float:
    return float(len(value))


class Pairs:
    """A stage without dcr's help."""

    name = "pairs"

    async def run(self, inbox: Inbox[str], outbox: Outbox[bytes]) -> None:
        async for value in inbox:
            await outbox.send(value.encode() * 2)


assert_type(text, FunctionStage[int, str])
assert_type(encoded, FunctionStage[str, bytes])
assert_type(sized, FunctionStage[bytes, float])
assert_type(awaited, FunctionStage[bytes, float])

assert_type(Pipeline(text), Pipeline[int, str])
assert_type(Pipeline(text, encoded), Pipeline[int, bytes])
assert_type(Pipeline(text, Pairs()), Pipeline[int, bytes])
assert_type(Pipeline(text, encoded, sized), Pipeline[int, float])
assert_type(Pipeline(text, encoded, awaited, depth=4), Pipeline[int, float])


async def run(ship: Pipeline[int, bytes], results: list[bytes]) -> None:
    await ship.run([1, 2], into=results.append)


def shipping(baseline: Baseline, link: Link, codec: Codec, identity: Identity, mine: Sequence[Stage[Any, Any]]) -> None:
    """The stages that dcr brings, with one's own between them."""
    construct = Construct(baseline, [], [])
    compress = Compress(identity, codec, Operation.STEP, ByteBudget(1))

    @stage
    def keep(patch: Patch) -> Patch | Drop:
        return patch if patch.changed else DROP

    assert_type(Pipeline(construct, compress, Transfer(link)), Pipeline[int, ChunkRef])
    assert_type(Pipeline(construct, keep, compress, Transfer(link)), Pipeline[int, ChunkRef])
    assert_type(Pipeline(construct, compress), Pipeline[int, Parcel])
    some: Pipeline[int, ChunkRef] = Pipeline(construct, compress, *mine, Transfer(link))
    del some
