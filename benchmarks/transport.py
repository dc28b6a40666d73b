"""What a run over the local transport costs while nothing happens: python benchmarks/transport.py [--json FILE]

    idle     CPU of a publisher and of its members beside a number of kept versions, as parts of one core
    news     from the Open to the last member that has taken the seal

Members are links of their own; all of them share one process, apart from the publisher's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import anyio.to_thread

from dcr.protocol.wire import Head, Join, MemberRef, Message, Seal
from dcr.testing.conformance.scene import attempt, identity, send_all
from dcr.transports.local import LocalTransport

TRANSPORT = LocalTransport(fsync=False)


async def _keep(url: str, versions: int) -> None:
    """Fill a run with committed versions."""
    async with TRANSPORT.open(url) as run, run.sender() as sender:
        await run.ledger.swap(Head("kit", 1, None, b""), b"0")
        for version in range(1, versions + 1):
            base = identity(version - 1) if version > 1 else None
            await send_all(sender, attempt(identity(version), [b"x"], base))
            await run.ledger.swap(Head("kit", 1, identity(version), b"root"), (await run.ledger.read())[1])


async def _follow(url: str, members: int, seconds: float, talk: Connection) -> None:
    """Be members: take an attempt, idle, and take another. Sends the CPU seconds, and when each had the seal."""
    seals: list[float] = []
    taken = anyio.Semaphore(0)

    async def be(name: str) -> None:
        ref = MemberRef(name, "1")
        async with TRANSPORT.open(url) as run, run.member(ref) as link:
            await link.send(Message(Join(ref, None)))
            for _ in range(2):
                while not isinstance((await link.receive()).header, Seal):
                    pass
                seals.append(time.monotonic())
                taken.release()

    async with anyio.create_task_group() as group:
        for number in range(members):
            group.start_soon(be, f"member-{number}")
        await anyio.sleep(2.0)
        talk.send("ready")
        for _ in range(members):
            await taken.acquire()
        talk.send("taken")
        seals.clear()
        await anyio.sleep(2.0)
        talk.send("idle")
        began_s = time.process_time()
        await anyio.sleep(seconds)
        talk.send(time.process_time() - began_s)
    talk.send(seals)


def _members(url: str, members: int, seconds: float, talk: Connection) -> None:
    anyio.run(_follow, url, members, seconds, talk)


async def _lead(url: str, versions: int, seconds: float, talk: Connection) -> dict[str, float]:
    async with TRANSPORT.open(url) as run, run.sender() as sender:
        await anyio.to_thread.run_sync(talk.recv)
        await send_all(sender, attempt(identity(versions + 1), [b"x"], identity(versions)))
        await anyio.to_thread.run_sync(talk.recv)  # a version that is committed before a member looks is not shown
        await run.ledger.swap(Head("kit", 1, identity(versions + 1), b"root"), (await run.ledger.read())[1])
        await anyio.to_thread.run_sync(talk.recv)
        began_s = time.process_time()
        members_s = await anyio.to_thread.run_sync(talk.recv)
        own_s = time.process_time() - began_s
        opened_s = time.monotonic()
        await send_all(sender, attempt(identity(versions + 2), [b"x"], identity(versions + 1)))
        seals = await anyio.to_thread.run_sync(talk.recv)
        del run
    news = [seal - opened_s for seal in seals]
    return {"publisher": own_s / seconds, "members": members_s / seconds, "first": min(news), "last": max(news)}


def measure(members: int, versions: int, seconds: float) -> dict[str, float]:
    """One run, in a folder of its own."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        url = f"local://{folder}/run"
        anyio.run(_keep, url, versions)
        ours, theirs = context.Pipe()
        process = context.Process(target=_members, args=(url, members, seconds, theirs))
        process.start()
        found = anyio.run(_lead, url, versions, seconds, ours)
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rounds = [measure(given.members, given.versions, given.seconds) for _ in range(given.rounds)]
    found = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    found["member"] = found["members"] / given.members
    print(f"{given.members} members, {given.versions} kept versions, {given.rounds} rounds of {given.seconds:g} s idle")
    print(f"publisher {found['publisher']:.4f} core, each member {found['member']:.4f} core")
    print(f"from the Open to the seal at the first member {found['first']:.3f} s, at the last {found['last']:.3f} s")
    if given.json:
        common = {"workload": f"{given.members} members, {given.versions} kept versions", "density": 0.0, "threads": 1}
        units = {"publisher": "core", "member": "core", "first": "s", "last": "s"}
        rows = [
            {"metric": "local_idle_cpu" if unit == "core" else "local_news", **common, "variant": name}
            | {"value": found[name], "unit": unit}
            for name, unit in units.items()
        ]
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
