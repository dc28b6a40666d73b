"""Real ends over a real directory, for tests: modules with any bits in them, and comparison as integers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import torch

import dcr
from dcr.events import Event
from dcr.layout.schema import WIDTHS
from dcr.transports.local import LocalTransport

FAST = LocalTransport(poll_s=0.001, fsync=False)
UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


class Weights(torch.nn.Module):
    """A module that holds given tensors: floating ones as parameters, the others as persistent buffers."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if tensor.dtype.is_floating_point:
                self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's elements in row-major order, as unsigned integers."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    flat.copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().view(f"u{tensor.element_size()}")


def set_bits(tensor: torch.Tensor, index: np.ndarray, values: np.ndarray) -> None:
    """Write bit patterns at row-major indices, whatever the strides."""
    flat = bits(tensor).copy()
    flat[index] = values
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(flat.view(np.uint8)).view(tensor.dtype).reshape(tensor.shape))


def require_equal(module: torch.nn.Module, expected: dict[str, np.ndarray]) -> None:
    """Every tensor of a module has exactly these bits."""
    held = state(module)
    assert held.keys() == expected.keys()
    for name, wanted in expected.items():
        differing = np.flatnonzero(held[name] != wanted)
        assert not len(differing), f"{name}: {len(differing)} elements differ, first at {differing[0]}"


def state(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """A copy of all bits of a module."""
    return {name: bits(tensor).copy() for name, tensor in module.state_dict().items()}


def random_bits(rng: np.random.Generator, numel: int, dtype: str) -> np.ndarray:
    """Any bit pattern: NaN payloads, -0.0, infinities, denormals included; bool has only two."""
    width = WIDTHS[dtype]
    if dtype == "bool":
        return rng.integers(0, 2, numel, np.uint8)
    return rng.integers(0, 1 << 8 * width, numel, f"u{width}", endpoint=False) if numel else np.zeros(0, f"u{width}")


class Rollout:
    """A subscriber in a task: installs every version that comes, and keeps its events."""

    def __init__(self, module: torch.nn.Module, member: str = "rollout") -> None:
        self.module = module
        self.member = member
        self.events: list[Event] = []
        self.kinds: dict[int, str] = {}
        self.version: int | None = None
        self.error: Exception | None = None
        self._changed = anyio.Event()

    async def run(self, url: str, **options: object) -> None:
        loader = options.pop("loader", None) or dcr.loader(self.module)
        options.setdefault("transport", FAST)
        try:
            async with dcr.subscriber(
                url, loader=loader, member=self.member, observe=self.events.append, **options
            ) as versions:
                self.subscriber = versions
                self._tell(versions.version)
                async for version in versions:
                    self.kinds[version.number] = version.kind
                    await version.install()
                    self._tell(version.number)
        except Exception as error:  # told to whoever waits
            self.error = error
            self._tell(self.version)

    def _tell(self, version: int | None) -> None:
        self.version = version
        self._changed.set()
        self._changed = anyio.Event()

    async def reached(self, version: int) -> None:
        """Wait until live memory holds this version."""
        with anyio.fail_after(20):
            while self.version is None or self.version < version:
                if self.error is not None:
                    raise self.error
                await self._changed.wait()

    def names(self) -> list[str]:
        """The names of its events."""
        return [event.name for event in self.events]


@asynccontextmanager
async def running(folder: Path, rollouts: Sequence[Rollout], **options: object) -> AsyncIterator[str]:
    """Rollouts that follow a run; its URL."""
    url = f"local://{folder}"
    async with anyio.create_task_group() as group:
        for rollout in rollouts:
            group.start_soon(lambda rollout=rollout: rollout.run(url, **options))
        yield url
        group.cancel_scope.cancel()


def said(answers: Mapping[str, dcr.Answer]) -> dict[str, str]:
    """What each member said of an installation."""
    return {member: answer.said for member, answer in answers.items()}


async def publish(publisher: dcr.Publisher, version: int | None = None) -> dcr.Report:
    """Publish, and wait for the commit."""
    return await (await publisher.publish(version=version)).committed()


def zeros(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros of its dtype and shape: torch cannot fill tensors of some dtypes."""
    return torch.zeros(tensor.nbytes, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)


def empty_like(module: torch.nn.Module, fill: Callable[[torch.Tensor], torch.Tensor] = zeros) -> Weights:
    """A module of the same names, shapes and dtypes, with other contents and its own memory."""
    return Weights({name: fill(tensor) for name, tensor in module.state_dict().items()})


def weights(value: float) -> Weights:
    """A module of eight elements of one value."""
    return Weights({"w": torch.full((8,), value)})
