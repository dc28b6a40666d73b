"""Pipelines in the wrong order: a type checker refuses every line that is marked, and no other."""

from __future__ import annotations

from dcr import Pipeline, stage
from dcr.codecs.patch import Operation
from dcr.memory.baseline import Baseline
from dcr.pipeline.budget import ByteBudget
from dcr.protocol.wire import Identity
from dcr.seams import Codec, Link
from dcr.stages.compress import Compress
from dcr.stages.construct import Construct
from dcr.stages.transfer import Transfer


@stage
def text(number: int) -> str:
    return str(number)


@stage
async def encoded(value: str) -> bytes:
    return value.encode()


@stage(workers=2)
async def awaited(value: bytes) -> float:
    return float(len(value))


right = Pipeline(text, encoded)
two = Pipeline(encoded, text)  # refused
three = Pipeline(text, awaited, encoded)  # refused
skipped = Pipeline(text, awaited)  # refused
twice = Pipeline(text, encoded, encoded)  # refused


async def run(numbers: list[int], strings: list[str]) -> None:
    await right.run(numbers)
    await right.run(strings)  # refused
    await right.run(numbers, into=strings.append)  # refused


def shipping(baseline: Baseline, link: Link, codec: Codec, identity: Identity) -> None:
    construct, transfer = Construct(baseline, [], []), Transfer(link)
    compress = Compress(identity, codec, Operation.STEP, ByteBudget(1))
    right = Pipeline(construct, compress, transfer)
    swapped = Pipeline(construct, transfer, compress)  # refused
    without = Pipeline(construct, transfer)  # refused
    backwards = Pipeline(transfer, compress, construct)  # refused
    del right, swapped, without, backwards
