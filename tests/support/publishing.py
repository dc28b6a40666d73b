"""What runs on each rank in the tests of publishers in processes of their own: gloo, and a run in a directory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
import torch.distributed as dist
from simulation import hooks
from simulation.switches import callers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import dcr.blocking
from dcr.errors import DcrError, LocalError, StorageRebound
from dcr.probing.bits import bits_of
from dcr.sources import dtensor
from dcr.sources.dtensor import part_of
from dcr.sources.ranks import TorchGroup
from dcr.testing.faults import FaultyTransport, flip_one_chunk
from support.refits import FAST
from support.sharded import Net, canonical, fsdp, train


class Plain(nn.Module):
    """An engine that holds these tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            owner: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_buffer(last, tensor)


class Side:
    """One rank of a trainer: a sharded net, and its source."""

    def __init__(
        self, layout: Callable[[nn.Module], None], rows: int = 10, out: int = 5, dtype: str | None = None
    ) -> None:
        torch.manual_seed(0)
        self.net = Net(rows, out, tied=False)
        layout(self.net)
        self.source = dtensor.source(self.net, dtype=dtype)
        self.lead = dist.get_rank() == 0

    def publisher(self, folder: Path, *, timeout_s: float = 60.0, **options: Any) -> dcr.blocking.publisher:
        """This rank's publisher, with a group of its own."""
        self.group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        options = {"transport": FAST, "frame_elems": 40, **options}
        return dcr.blocking.publisher(f"local://{folder}", source=self.source, group=self.group, **options)

    @contextmanager
    def engine(self, folder: Path) -> Iterator[Any]:
        """On the first rank, an engine that follows the run; elsewhere nothing."""
        if not self.lead:
            yield None
            return
        specs = self.source.schema.tensors
        self.held = Plain({one.name: torch.zeros(one.shape, dtype=getattr(torch, one.dtype)) for one in specs})
        loader = dcr.loader(self.held)
        with dcr.blocking.subscriber(f"local://{folder}", loader=loader, member="engine", transport=FAST) as versions:
            yield versions

    def full(self) -> dict[str, list[int]]:
        """What is to be published: every whole parameter in the checkpoint's dtype. Collective."""
        tensors = dict(self.net.named_parameters()) | dict(self.net.named_buffers())
        return {spec.name: canonical(tensors[spec.name], spec.dtype) for spec in self.source.schema.tensors}

    def differ(self, versions: Any, full: dict[str, list[int]]) -> list[str]:
        """Install the next version on the first rank: the tensors that are not bit for bit these."""
        if versions is None:
            return []
        next(versions).install()
        held = self.held.state_dict()
        return [name for name, bits in full.items() if bits_of(held[name]).tolist() != bits]

    def collectives(self) -> list[int]:
        """How many collectives each group but the publisher's has run."""
        groups = [group for group in dist.distributed_c10d._world.pg_map if group is not self.group]
        return [group._get_sequence_number_for_group() for group in groups]


def folder() -> Path:
    """A new folder that all ranks know; it is removed when the first rank ends."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names, src=0)
    if dist.get_rank() == 0:
        Finalize(None, shutil.rmtree, (names[0],), exitpriority=1)
    return Path(str(names[0]))


def trained(layout: Callable[[nn.Module], None], rows: int, out: int, dtype: str | None = None) -> dict[str, Any]:
    """Real steps, each published while nobody touches the weights, and followed by an engine."""
    side, where = Side(layout, rows, out, dtype), folder()
    differ, reports, spent = [], [], []
    with (
        callers(hooks.BASELINE_FOLD) as baselines,
        side.publisher(where) as publisher,
        side.engine(where) as versions,
    ):
        for version in (1, 2, 3):
            publisher.captured()
            train(side.net, steps=2, lr=1e-4)
            before = side.collectives()
            refit = publisher.publish(version)
            refit.captured()
            report = refit.committed()
            spent.append(sum(side.collectives()) - sum(before))
            differ += side.differ(versions, side.full())
            reports.append((report.is_anchor, report.chunks, report.changed, report.elements))
        gathered_bytes = report.gathered_bytes
    owned = sum(shard.box.numel for shard in side.source.shards)
    (baseline,) = baselines
    frames = map(baseline.base, range(len(baseline.layout.frames)))
    held = sum(len(bits) for bits in frames if bits is not None)
    return {
        "differ": differ,
        "reports": reports,
        "collectives": spent,
        "gathered_bytes": gathered_bytes,
        "owned": owned,
        "held": held,
    }


def all_of(cases: dict[str, tuple[Any, ...]]) -> dict[str, dict[str, Any]]:
    """Several layouts in one world, and a run in which things go wrong."""
    return {name: trained(*case) for name, case in cases.items()} | {"faulty": faulty()}


# ---------------------------------------------------------------------- what goes wrong


class Failing:
    """A stage that does something once a chunk of a version comes."""

    name = "failing"
    workers = 1

    def __init__(self, version: int, act: Callable[[], None]) -> None:
        self.version, self.act = version, act

    async def run(self, inbox: Any, outbox: Any) -> None:
        async for parcel in inbox:
            if parcel.chunk.identity.version == self.version:
                parcel.release()
                self.act()
            await outbox.send(parcel)


def _fail() -> None:
    raise ValueError("on purpose")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def faulty() -> dict[str, Any]:
    """One rank's stage fails in version 2, one rank's chunk is corrupted in version 3; then all ranks start anew."""
    side, where, rank = Side(fsdp), folder(), dist.get_rank()
    told, differ, again = "", [], {}
    on_send = flip_one_chunk(3)
    options = {"transport": FaultyTransport(FAST, on_send=on_send), "stages": [Failing(2, _fail)]} if rank == 1 else {}
    with side.publisher(where, anchor_every=2, **options) as publisher, side.engine(where) as versions:
        for version in (1, 2, 3, 4):
            train(side.net, steps=1)
            try:
                report = publisher.publish(version).committed()
            except (DcrError, ValueError) as error:
                told = f"{type(error).__name__}: {error}"
            else:
                differ += side.differ(versions, side.full())
                again[version] = report.sent_again
    with side.publisher(where) as publisher, side.engine(where) as versions:
        resumed = publisher.version
        differ += side.differ(versions, side.full())
        train(side.net, steps=1)
        report = publisher.publish().committed()
        differ += side.differ(versions, side.full())
    return {
        "told": told,
        "again": again,
        "differ": differ,
        "resumed": resumed,
        "goes_on_with": (report.version, report.is_anchor),
    }


def killed(where: str, doomed: int, silent: bool) -> None:
    """One rank dies (or hangs) in version 2, while it ships; what the others say of it, and of the next version."""
    side, rank = Side(fsdp), dist.get_rank()
    stage = Failing(2, (lambda: time.sleep(60)) if silent else _die)
    publisher = side.publisher(Path(where), timeout_s=3.0 if silent else 60.0, stages=[stage] if rank == doomed else [])
    publisher.__enter__()
    publisher.publish(1).committed()
    train(side.net, steps=1)
    said, began_s = [], time.monotonic()
    for version in (2, 3):
        try:
            publisher.publish(version).committed()
        except DcrError as error:
            said.append(type(error).__name__)
    record = {"said": said, "waited_s": time.monotonic() - began_s}
    (Path(where) / f"rank-{rank}.json").write_text(json.dumps(record))
    os._exit(0)  # torch would wait for the rank that is lost


# ---------------------------------------------------------------------- copies, and storage that moves


def ignored(net: nn.Module) -> None:
    """FSDP2 is told to leave one parameter alone: every rank holds it whole, and nobody keeps it alike."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net, mesh=mesh, ignored_params={net.up.weight})


def untied(net: nn.Module) -> None:
    """Two names of one parameter, replicated."""
    net.head = nn.Linear(6, 7)
    net.head.weight = net.embed.weight


def part(side: Side) -> None:
    """Rank 2 alone changes its copy by one bit."""
    if dist.get_rank() == 2:
        local_bits(side.net.up.weight)[13] ^= 1


def untie(side: Side) -> None:
    """On every rank the second name gets memory of its own, with another bit in it."""
    other = side.net.embed.weight.detach().clone()
    local_bits(other)[5] ^= 1
    side.net.head.weight = nn.Parameter(other)


def retie(side: Side) -> None:
    side.net.head.weight = nn.Parameter(side.net.embed.weight.detach().clone())


def join(side: Side) -> None:
    """All have rank 0's copy again."""
    dist.broadcast(side.net.up.weight.data, src=0)


def local_bits(tensor: torch.Tensor) -> Any:
    return part_of(tensor).detach().view(torch.int32).view(-1)


def parted(
    layout: Callable[[nn.Module], None], step: Callable[[Side], None], mend: Callable[[Side], None]
) -> dict[str, Any]:
    """Copies that part in version 2, and agree again in version 3; the heads that there were, and who was told what."""
    side, where = Side(layout), folder()
    told, differ, objects = "", [], list[int]()
    with side.publisher(where) as publisher, side.engine(where) as versions:
        for version, act in ((1, lambda _: None), (2, step), (3, mend)):
            act(side)
            dist.barrier()
            before = sum(1 for path in where.rglob("*") if "2" in path.name)
            refit = publisher.publish(version)
            try:
                refit.committed()
            except DcrError as error:
                told = f"{type(error).__name__}: {error}"
                objects += [before, sum(1 for path in where.rglob("*") if "2" in path.name)]
            else:
                differ += side.differ(versions, side.full())
    return {"told": told, "differ": differ, "objects": objects, "version": publisher.version}


def copies() -> dict[str, dict[str, Any]]:
    return {
        "ignored": parted(ignored, part, join),
        "replicated": parted(lambda net: None, part, join),
        "names": parted(untied, untie, retie),
    }


def offload(net: nn.Module) -> None:
    """Every shard to another place, as trainers do that keep weights elsewhere during a rollout."""
    for tensor in (*net.parameters(), *net.buffers()):
        local = part_of(tensor)
        local.data = local.data.clone()


def narrow(net: nn.Module) -> None:
    """Rank 1's shard of one tensor becomes another dtype."""
    if dist.get_rank() == 1:
        local = part_of(net.up.weight)
        local.data = local.data.bfloat16()


def moved() -> dict[str, Any]:
    """A trainer that moves its weights at each step; in version 3 rank 1 moves them into what cannot be published."""
    side, where = Side(fsdp), folder()
    told, differ, anchors = "", [], list[bool]()
    with side.publisher(where) as publisher, side.engine(where) as versions:
        for version in (1, 2, 3, 4):
            publisher.captured()
            train(side.net, steps=1)
            offload(side.net)
            if version == 3:
                kept = part_of(side.net.up.weight).data.clone()
                narrow(side.net)
                with pytest.raises(StorageRebound) as caught:
                    publisher.publish(version)
                told = str(caught.value)
                part_of(side.net.up.weight).data = kept
            refit = publisher.publish(version)
            if version == 4:  # the other order: the engine installs before the trainer asks
                differ += side.differ(versions, side.full())
            anchors.append(refit.committed().is_anchor)
            if version != 4:
                differ += side.differ(versions, side.full())
    return {"told": told, "differ": differ, "anchors": anchors}


# ---------------------------------------------------------------------- memory

MiB = 1 << 20


def _peak() -> int:
    """The most memory that this process has held since it was last reset, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _reset() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def sharded_model(tensors: int, elems: int) -> nn.Module:
    """A model of bf16 tensors, of which each rank makes its shard and nothing else."""
    world, net = dist.get_world_size(), nn.Module()
    mesh = init_device_mesh("cpu", (world,))
    tile = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 16, MiB, np.uint16)).view(torch.bfloat16)
    for index in range(tensors):
        local = tile.repeat(elems // MiB // world)
        weight = DTensor.from_local(local, mesh, [Shard(0)])
        net.register_parameter(f"w{index}", nn.Parameter(weight, requires_grad=False))
    return net


def peaks(tensors: int, elems: int, budget_bytes: int) -> list[dict[str, int]]:
    """What each version takes on this rank, above what it held before the first."""
    net, where = sharded_model(tensors, elems), folder()
    group = dist.new_group()
    options = {"transport": FAST, "budget": dcr.ByteBudget(budget_bytes), "source": dtensor.source(net)}
    rows = []
    with dcr.blocking.publisher(f"local://{where}", group=group, **options) as publisher:
        start = _reset()
        for version, stride in enumerate((None, 100, 20), start=1):
            for weight in net.parameters() if stride else ():
                weight.to_local().view(torch.int16)[version::stride] ^= 5
            _reset()
            report = publisher.publish(version).committed()
            rows.append({"bytes": _peak() - start, "changed": report.changed, "gathered": report.gathered_bytes})
    return rows


def grouped() -> dict[str, Any]:
    """What a process group does as a `dcr.seams.Group`."""
    rank = dist.get_rank()
    lanes = np.array([[2**64 - 1, rank], [0, 0]], np.uint64)
    facts: dict[str, Any] = {}

    async def meet() -> None:
        group = TorchGroup(dist.new_group())
        assert (group.rank, group.world) == (rank, 2)
        datas = [b"\x01" * 1000 * rank, b"", b"x" + b"\x01" * rank]
        facts["gathered"] = [await group.gather(data) for data in datas]
        facts["added"] = (await group.add(lanes)).tolist()

    anyio.run(meet)
    try:
        TorchGroup(dist.group.WORLD)
    except LocalError as error:
        facts["refused"] = str(error)
    return facts
