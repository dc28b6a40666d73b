"""A refit through four plugins, as a program: what is installed is found by URL scheme, codec name and loader kind.

usage: refit.py sqlite:///path/to/run.db
"""

import sys

import anyio
import numpy as np
import torch
from dcr_arrays import Weight
from dcr_throttle import Throttle

import dcr

SHAPES = {"embed": (64, 16), "layer_0": (16, 48), "layer_1": (16, 48), "norm": (16,)}
VERSIONS = 4


def trainer() -> torch.nn.ParameterDict:
    """bfloat16 weights of any bits."""
    rng = np.random.default_rng(5)
    bits = {name: rng.integers(0, 1 << 16, shape, np.uint16, endpoint=False) for name, shape in SHAPES.items()}
    weights = {name: torch.from_numpy(one).view(torch.bfloat16) for name, one in bits.items()}
    return torch.nn.ParameterDict({name: torch.nn.Parameter(one, requires_grad=False) for name, one in weights.items()})


def engine() -> dict[str, Weight]:
    return {name: Weight("bfloat16", np.zeros(shape, np.uint16)) for name, shape in SHAPES.items()}


async def train(url: str, weights: torch.nn.ParameterDict, throttle: Throttle, states: dict[int, bytes]) -> None:
    rng = np.random.default_rng(6)
    options = {"codec": "deflate", "stages": [throttle.stage], "frame_elems": 256}
    async with dcr.publisher(url, source=dcr.source(weights), **options) as publisher:
        await publisher.joined(1)
        for version in range(1, VERSIONS + 1):
            states[version] = b"".join(octets(weights[name]) for name in sorted(SHAPES))
            report = await (await publisher.publish(version)).committed()
            print(f"version {version}: {report.changed} of {report.elements} elements, {report.members}")
            assert report.chunks == len([1 for seen, _, _ in throttle.seen if seen == version])
            for weight in weights.values():
                bits = weight.view(torch.int16).view(-1)
                index = torch.from_numpy(rng.permutation(len(bits))[: len(bits) // 10])
                bits[index] ^= torch.from_numpy(rng.integers(1, 1 << 15, len(index), np.int16))


async def serve(url: str, held: dict[str, Weight], states: dict[int, bytes]) -> None:
    async with dcr.subscriber(url, loader=dcr.loader(held, kind="arrays"), member="arrays") as versions:
        async for version in versions:
            await version.install()
            assert b"".join(held[name].bits.tobytes() for name in sorted(SHAPES)) == states[version.number]
            print(f"version {version.number}: every byte is the trainer's")
            if version.number == VERSIONS:
                return


def octets(weight: torch.Tensor) -> bytes:
    return weight.detach().view(torch.int16).numpy().tobytes()


async def main(url: str) -> None:
    throttle, states = Throttle(bytes_per_s=1e6), dict[int, bytes]()
    async with anyio.create_task_group() as group:
        group.start_soon(serve, url, engine(), states)
        group.start_soon(train, url, trainer(), throttle, states)


anyio.run(main, sys.argv[1])
