"""A trainer that moves its weights between two versions goes on; what cannot be bound is an error of `publish`.

Both orders in which scripts of one process call the two ends are tried: nobody waits for a version that will not come.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch
from support.publishing import Plain
from support.refits import FAST
from torch import nn

import dcr.blocking
from dcr.errors import CopiesDiffer, StorageRebound
from dcr.probing.bits import bits_of
from dcr.publish.part import Part
from dcr.sources import probe, zero
from dcr.sources.module import ModuleSource
from dcr.testing.memory import MemoryTransport

pytestmark = pytest.mark.timeout(60)
Weights = dict[str, torch.Tensor]


def halves(tensors: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        yield from zip((f"{name}.0", f"{name}.1"), tensor.chunk(2), strict=True)


def computed(tensors: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, tensor + 1) for name, tensor in tensors.items())


class Trainer:
    """Two tensors, published in one of several ways; `full` is what an engine must hold."""

    def __init__(self, kind: str) -> None:
        self.net = nn.ParameterDict({"a": nn.Parameter(torch.randn(4, 3)), "b": nn.Parameter(torch.randn(6))})
        self.kind = kind
        match kind:
            case "module":
                self.source: Any = ModuleSource(self.net)
            case "zero":
                parts = {name: zero.Partition(tensor.data.view(-1), tuple(tensor.shape), 0) for name, tensor in self}
                self.parts = {name: part.tensor for name, part in parts.items()}
                self.source = zero.source(parts)
            case "probe":
                self.source = probe.source(self.net, export=halves)
            case "residual":
                self.source = probe.source(self.net, export=computed)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())

    @property
    def tensors(self) -> Weights:
        return self.parts if hasattr(self, "parts") else dict(self.net.named_parameters())

    def step(self) -> None:
        """A step, and then every weight to another place."""
        for tensor in self.tensors.values():
            tensor.data = tensor.data * 1.01 + 0.001

    def full(self) -> Weights:
        tensors = {name: tensor.detach() for name, tensor in self.tensors.items()}
        exports = {"probe": halves, "residual": computed}
        found = dict(exports[self.kind](tensors)) if self.kind in exports else tensors
        shapes = {spec.name: spec.shape for spec in self.source.schema.tensors}
        return {name: tensor.reshape(shapes[name]).clone() for name, tensor in found.items()}


def asked(refit: dcr.blocking.BlockingRefit, install: Callable[[], None]) -> None:
    refit.committed()
    install()


def installed(refit: dcr.blocking.BlockingRefit, install: Callable[[], None]) -> None:
    install()
    refit.committed()


@pytest.mark.parametrize("order", [asked, installed])
@pytest.mark.parametrize("kind", ["module", "zero", "probe", "residual"])
def test_weights_that_move_at_each_step_are_published_and_refused_at_publish_if_they_become_others(
    kind: str, order: Callable[[Any, Any], None], tmp_path: Path
) -> None:
    trainer = Trainer(kind)
    engine = Plain({name: torch.zeros_like(tensor) for name, tensor in trainer.full().items()})
    url, ends = f"local://{tmp_path}", dcr.blocking
    with ends.publisher(url, source=trainer.source, transport=FAST) as publisher:
        loader = dcr.loader(engine)
        with ends.subscriber(url, loader=loader, member="engine", transport=FAST) as versions:
            for version in (1, 2, 3):
                trainer.step()
                if version == 2:
                    name, tensor = next(iter(trainer))
                    kept, tensor.data = tensor.data, tensor.data.bfloat16()
                    for _ in range(2):
                        with pytest.raises(StorageRebound, match=rf"^{name}: expected torch\.float32"):
                            publisher.publish(version)
                    tensor.data = kept
                order(publisher.publish(version), lambda: next(versions).install())
                held = {name: bits_of(tensor).tolist() for name, tensor in engine.state_dict().items()}
                assert held == {name: bits_of(tensor).tolist() for name, tensor in trainer.full().items()}


def test_a_weight_that_became_a_lazy_view_of_its_own_memory_is_refused(tmp_path: Path) -> None:
    """Its address, shape, strides and dtype are what they were, and its memory holds other bits than it shows."""
    trainer = Trainer("module")
    with dcr.blocking.publisher(f"local://{tmp_path}", source=trainer.source, transport=FAST) as publisher:
        publisher.publish(1).committed()
        trainer.net.a.data = torch._neg_view(trainer.net.a.data)
        with pytest.raises(StorageRebound, match=r"^a: a lazily conjugated or negated view"):
            publisher.publish(2)


def test_tied_names_that_parted_are_compared_and_published_while_they_are_alike(tmp_path: Path) -> None:
    net = nn.ParameterDict({"a": nn.Parameter(torch.zeros(6))})
    net["b"] = net.a
    with dcr.blocking.publisher(f"local://{tmp_path}", source=ModuleSource(net), transport=FAST) as publisher:
        publisher.publish(1).committed()
        net["b"] = nn.Parameter(net.a.detach().clone())
        publisher.publish(2).committed()
        with torch.no_grad():
            net.b[3] = -0.0
        with pytest.raises(CopiesDiffer, match="a and b are published as one tensor"):
            publisher.publish(3).committed()
        with torch.no_grad():
            net.a[3] = -0.0
        assert publisher.publish(4).committed().changed == 1


class Kept(list[Any]):
    """Storages that can be asked whether anybody keeps them."""


@pytest.mark.parametrize("fails", [False, True], ids=["captured", "given up"])
def test_no_storage_is_kept_between_two_versions(tmp_path: Path, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source, lent = ModuleSource(nn.Linear(3, 3)), list[weakref.ref[Kept]]()
    borrow = source.storages

    def lend() -> Kept:
        storages = Kept(borrow())
        lent.append(weakref.ref(storages))
        return storages

    source.storages = lend  # type: ignore[method-assign]
    with dcr.blocking.publisher(f"local://{tmp_path}", source=source, transport=FAST) as publisher:
        if fails:
            monkeypatch.setattr(Part, "look", fail)
        refit = publisher.publish(1)
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            refit.committed()
        refit = None  # its error's traceback
        gc.collect()
        assert lent
        assert [storages() for storages in lent] == [None] * len(lent)


async def fail(part: Part) -> None:
    raise ZeroDivisionError


class Held:
    """A source that is bound once a test says so."""

    def __init__(self, source: ModuleSource) -> None:
        self._source = source
        self.schema, self.shards, self.residual = source.schema, source.shards, source.residual
        self.asked, self.may = threading.Event(), threading.Event()

    def storages(self) -> Any:
        self.asked.set()
        assert self.may.wait(30)
        return self._source.storages()


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("version", [7, None], ids=["the same number", "no number"])
async def test_a_publish_that_was_given_up_is_returned_for_its_number_and_else_the_next_version_begins(
    version: int | None,
) -> None:
    source = Held(ModuleSource(nn.Linear(2, 2)))
    async with dcr.publisher("memory:///run", source=source, transport=MemoryTransport()) as publisher:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publisher.publish, version)
                await anyio.to_thread.run_sync(source.asked.wait)
                scope.cancel()
        source.may.set()
        refit = await publisher.publish(version)
        assert refit.version == (1 if version is None else version)
        assert (await refit.committed()).is_anchor == (version is not None)  # without, version 0 is its base
