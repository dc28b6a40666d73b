"""Ranks in processes of their own: what happens when one is killed, is another one, or talks nonsense."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.mortal import work
from support.refits import FAST, publish
from support.tensor_parallel import SPECS, ToyRank, fill, touched, toys, trainer_of, values

import dcr
from dcr.engines import calls, workers
from dcr.engines.ranks import Ranks
from dcr.errors import LocalError, Poisoned, RankError, SchemaError, WireError
from dcr.memory.ready import Ready

REGION = dcr.layout.frames.Region(0, 0, ((60, 1),))


@pytest.fixture
def processes() -> Iterator[list[Any]]:
    started: list[Any] = []
    yield started
    for process in started:
        process.kill()
        process.join()
        process.close()


def start(processes: list[Any], folder: Path, dies_at: dict[int, int], world: int = 2) -> list[workers.Worker]:
    spawn = multiprocessing.get_context("spawn")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "ranks"))
        listener.listen()
        for rank in range(world):
            process = spawn.Process(target=work, args=(str(folder / "ranks"), rank, world, dies_at.get(rank, -1)))
            process.start()
            processes.append(process)
        return workers.accept(listener, world, b"key", timeout_s=60)


@pytest.mark.parametrize("dies_at", [0, 3])
async def test_a_member_whose_worker_is_killed_while_it_installs_never_serves(
    tmp_path: Path, processes: list[Any], dies_at: int
) -> None:
    trainer = trainer_of(values(1))
    url = f"local://{tmp_path / 'run'}"
    ranks = start(processes, tmp_path, {1: dies_at})
    try:
        async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST, frame_elems=33) as publisher:
            await publish(publisher, 1)
            async with dcr.subscriber(url, loader=Ranks(ranks), member="m", transport=FAST) as versions:
                assert versions.version == 1
                fill(trainer, touched(values(1), 2))
                await publisher.joined(1)
                refit = await publisher.publish(2)
                version = await anext(versions)
                with pytest.raises(Poisoned):
                    await version.install()
                assert not versions.may_serve
                assert "poisoned" in (await refit.installed())["m"].said
                seed = await anext(versions)
                with pytest.raises(RankError, match="rank 1 is gone"):
                    await seed.install()
                assert not versions.may_serve
    finally:
        for rank in ranks:
            rank.close()


async def test_a_member_whose_worker_is_killed_before_a_version_refuses_it_and_ends(
    tmp_path: Path, processes: list[Any]
) -> None:
    trainer = trainer_of(values(1))
    url = f"local://{tmp_path / 'run'}"
    ranks = start(processes, tmp_path, {})
    try:
        async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST, quorum=0) as publisher:
            await publish(publisher, 1)
            async with dcr.subscriber(url, loader=Ranks(ranks), member="m", transport=FAST) as versions:
                await publisher.joined(1)
                os.kill(processes[0].pid, signal.SIGKILL)
                processes[0].join()
                fill(trainer, touched(values(1), 2))
                report = await publish(publisher, 2)
                assert "rank 0 is gone" in report.members["m"]
                with pytest.raises(RankError, match="rank 0 is gone"):
                    await anext(versions)
    finally:
        for rank in ranks:
            rank.close()


# ------------------------------------------------------------------ who connects


def connect(address: Path, hello: calls.Hello | bytes) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(address))
    if isinstance(hello, bytes):
        connection.sendall(hello)
    else:
        calls.send(connection, hello)
    return connection


@pytest.mark.parametrize(
    ("hellos", "said"),
    [
        ([calls.Hello(b"other", 0, 2)], "another key"),
        ([calls.Hello(b"key", 0, 3)], "found rank 0 of 3"),
        ([calls.Hello(b"key", 2, 2)], "found rank 2 of 2"),
        ([calls.Hello(b"key", 1, 2), calls.Hello(b"key", 1, 2)], "found rank 1 of 2"),
        ([calls.Hello(b"key", 1, 2)], "1 of 2 ranks connected"),
        ([b"GET / HTTP/1.1\r\n\r\n"], "not a message"),
    ],
)
def test_who_does_not_belong_to_the_member_is_refused(tmp_path: Path, hellos: list[Any], said: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "ranks"))
        listener.listen()
        connections = [connect(tmp_path / "ranks", hello) for hello in hellos]
        with pytest.raises(RankError, match=said):
            workers.accept(listener, 2, b"key", timeout_s=0.2)
        for connection in connections:
            connection.close()


def served(loader: Any) -> workers.Worker:
    here, there = socket.socketpair()
    told = {"key": b"key", "rank": 0, "world": 1}
    threading.Thread(target=workers.serve, args=(there, loader), kwargs=told, daemon=True).start()
    calls.receive(here, calls.Hello)
    return workers.Worker(here, rank=0, timeout_s=0.2)


def test_an_error_of_a_rank_keeps_its_kind() -> None:
    class Refusing:
        def bind(self, layout: Any) -> list[Any]:
            raise SchemaError("w has no place here")

        def fingerprint(self) -> bytes:
            raise ZeroDivisionError("by zero")

    worker = served(Refusing())
    with pytest.raises(SchemaError, match="rank 0: w has no place here"):
        worker.bind(dcr.layout.frames.Layout(dcr.layout.schema.Schema(SPECS), ()))
    with pytest.raises(RankError, match="rank 0: ZeroDivisionError: by zero"):
        worker.fingerprint()
    worker.close()


def test_a_rank_that_does_not_answer_is_given_up() -> None:
    gone = threading.Event()

    class Silent:
        def fingerprint(self) -> bytes:
            gone.wait(5)
            return b"late"

    worker = served(Silent())
    with pytest.raises(RankError, match="rank 0 is gone"):
        worker.fingerprint()
    gone.set()
    with pytest.raises(RankError, match="rank 0 is gone"):  # the late answer is nobody's
        worker.fingerprint()


def test_what_is_let_go_of_is_freed_in_the_worker() -> None:
    kept: list[Any] = []

    class Keeping(ToyRank):
        def prepare(self, frame: int, change: Any) -> Ready:
            ready = super().prepare(frame, change)
            kept.append(weakref.ref(ready.writes[0].bits))
            return ready

    (rank,) = toys(1, values(1))
    rank.__class__ = Keeping
    worker = served(rank)
    layout = dcr.layout.frames.Layout(
        dcr.layout.schema.Schema(SPECS[:1]), (dcr.layout.frames.FrameSpec("bfloat16", (REGION,)),)
    )
    share = worker.bind(layout).prepare(
        0, dcr.codecs.patch.Change(dcr.Operation.OVERWRITE, None, np.zeros(60, np.uint16))
    )
    worker.fingerprint()
    assert kept[0]() is not None
    del share
    worker.fingerprint()
    assert kept[0]() is None
    worker.close()


def test_a_worker_stops_when_a_request_is_not_one() -> None:
    here, there = socket.socketpair()
    here.sendall(b"x" * 16)
    with here, pytest.raises(WireError, match="not a message"):
        workers.serve(there, object(), key=b"", rank=0, world=1)


needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")


@pytest.mark.parametrize(
    ("host", "begins"),
    [
        ("127.0.0.1", "tcp:127.0.0.1:"),
        pytest.param("::1", "tcp:[::1]:", marks=needs_ipv6),
        ("localhost", "tcp:localhost:"),
    ],
)
def test_workers_reach_a_host_by_name_and_by_either_kind_of_address(host: str, begins: str) -> None:
    with workers.listening(host) as (listener, address):
        assert address.startswith(begins)
        with workers.connect(address) as connection:
            calls.send(connection, calls.Hello(b"key", 0, 1))
            (rank,) = workers.accept(listener, 1, b"key", timeout_s=60)
            rank.close()


@needs_ipv6
def test_a_listener_of_a_name_is_reached_by_either_kind_of_address() -> None:
    with workers.listening("localhost") as (_, address):
        port = address.rpartition(":")[2]
        for host in ("127.0.0.1", "[::1]"):
            workers.connect(f"tcp:{host}:{port}").close()


@pytest.mark.parametrize("host", ["", "[::1]", "tcp://here", "no such name", "192.0.2.1", "\ud800", 7])
def test_a_host_that_is_none_is_refused_by_name(host: Any) -> None:
    with pytest.raises(LocalError, match="expected a name or an address of this host"), workers.listening(host):
        pass


# ------------------------------------------------------------------ messages


@pytest.mark.parametrize("first", [1, 7, 64, 1 << 20])
def test_a_message_that_outgrows_what_was_allocated_first_arrives_whole(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr(calls, "FIRST_BYTES", first)
    here, there = socket.socketpair()
    body = np.random.default_rng(0).integers(0, 256, 100_001, np.uint8)
    with here, there:
        sender = threading.Thread(target=calls.send, args=(there, calls.Done(), calls.octets(body)))
        sender.start()
        answer, received = calls.receive(here, calls.Answer)
        sender.join()
    assert answer == calls.Done()
    assert bytes(received) == body.tobytes()
