"""The kit for transports over the built-in ones, what importing the kits brings along, and the slow transport."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from dcr.errors import LocalError
from dcr.protocol.wire import Head, MemberRef, Message, encode
from dcr.testing import LatencyTransport, MemoryTransport, TransportTests
from dcr.testing.conformance.scene import attempt, identity, send_all
from dcr.transports.local import LocalTransport


class TestMemory(TransportTests):
    url = "memory:///{run}"
    lost_after_s = 0.3

    @pytest.fixture(autouse=True)
    def _anew(self) -> None:
        self.transport = MemoryTransport()


class TestLocal(TransportTests):
    transport = LocalTransport(poll_s=0.001, stale_s=2.0, fsync=False)
    lost_after_s = 3.0

    @pytest.fixture(autouse=True)
    def _anew(self, tmp_path: Path) -> None:
        self.url = f"local://{tmp_path}/{{run}}"


# ---------------------------------------------------------------------- imports


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import dcr.testing", {"pytest", "torch", "hypothesis"}),
        ("from dcr.testing import MemoryTransport, FaultyTransport, LatencyTransport", {"pytest", "torch"}),
        ("from dcr.testing import TransportTests, CodecTests, LoaderTests", {"torch", "hypothesis"}),
    ],
)
def test_importing_brings_no_more_than_is_needed(code: str, absent: set[str], tmp_path: Path) -> None:
    shown = f"{code}\nimport sys\nprint(*sorted({absent} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", shown], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    import dcr.testing

    with pytest.raises(AttributeError, match="has no attribute 'StageTests'"):
        dcr.testing.StageTests  # noqa: B018


def test_the_kits_do_not_collect_themselves() -> None:
    import dcr.testing

    assert not [name for name in dcr.testing.__all__ if name.startswith("Test")]


# ---------------------------------------------------------------------- the slow transport


class Clock:
    """Sleeps that return at once, and are written down."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)


async def _sent(clock: Clock, messages: list[Message], **speed: float) -> list[Message]:
    """Send messages over a slow link, and receive as many."""
    transport = LatencyTransport(MemoryTransport(), sleep=clock.sleep, **speed)
    async with (
        transport.open("memory:///run") as run,
        run.sender() as sender,
        run.member(MemberRef("m", "1")) as member,
    ):
        await run.ledger.swap(Head("kit", 1, None, b""), (await run.ledger.read())[1])
        await send_all(sender, messages)
        return [await member.receive() for _ in messages]


async def test_every_send_takes_the_delay_and_its_size_over_the_rate() -> None:
    clock, messages = Clock(), attempt(identity(), [b"", bytes(5000)])
    await _sent(clock, messages, delay_s=2.0, bytes_per_s=100.0)
    assert clock.slept_s == [2.0 + len(encode(message)) / 100.0 for message in messages]


async def test_without_a_rate_every_send_takes_the_delay() -> None:
    clock = Clock()
    await _sent(clock, attempt(identity()), delay_s=0.5)
    assert clock.slept_s == [0.5] * 5


async def test_a_slow_link_changes_nothing_of_what_it_carries() -> None:
    messages = attempt(identity(), [b"one", bytes(5000)])
    assert await _sent(Clock(), messages, delay_s=1.0, bytes_per_s=10.0) == messages


async def test_a_slow_link_carries_one_message_at_a_time() -> None:
    going, most = [0], [0]

    async def sleep(seconds: float) -> None:
        going[0] += 1
        most[0] = max(most[0], going[0])
        await anyio.lowlevel.checkpoint()
        going[0] -= 1

    opened, *chunks, _ = attempt(identity(), [b"1", b"2", b"3"])
    transport = LatencyTransport(MemoryTransport(), delay_s=1.0, sleep=sleep)
    async with transport.open("memory:///run") as run, run.sender() as sender:
        await sender.send(opened)
        async with anyio.create_task_group() as group:
            for chunk in chunks:
                group.start_soon(sender.send, chunk)
    assert most == [1]


async def test_two_slow_links_do_not_wait_for_each_other() -> None:
    both = anyio.Event()
    waiting: list[float] = []

    async def sleep(seconds: float) -> None:
        waiting.append(seconds)
        if len(waiting) == 2:
            both.set()
        with anyio.fail_after(5):
            await both.wait()

    transport = LatencyTransport(MemoryTransport(), delay_s=1.0, sleep=sleep)
    async with anyio.create_task_group() as group:
        for name in ("one", "other"):
            group.start_soon(_open_an_attempt, transport, f"memory:///{name}")
    assert waiting == [1.0, 1.0]


async def _open_an_attempt(transport: LatencyTransport, url: str) -> None:
    async with transport.open(url) as run, run.sender() as sender:
        await sender.send(attempt(identity())[0])


@pytest.mark.parametrize("speed", [{"delay_s": -1.0}, {"bytes_per_s": 0.0}, {"bytes_per_s": -5.0}])
def test_a_speed_that_makes_no_sense_is_refused(speed: dict[str, float]) -> None:
    with pytest.raises(LocalError, match="expected delay_s >= 0 and bytes_per_s > 0"):
        LatencyTransport(MemoryTransport(), **speed)


class SlowKit(TransportTests):
    """The kit over a slow link. It is not collected: it is no Test by name."""

    url = "memory:///{run}"
    transport = LatencyTransport(MemoryTransport(), delay_s=0.001, bytes_per_s=1e8)


@pytest.mark.parametrize(
    ("test", "args"),
    [
        ("messages_arrive_in_order_while_more_are_being_sent", ()),
        ("a_send_of_the_sender_cancelled_at_any_await_is_whole_or_nothing", ("scope",)),
        ("a_send_of_a_member_cancelled_at_any_await_is_whole_or_nothing", ("task",)),
        ("a_run_lists_its_members_and_what_they_hold", ()),
        ("a_stored_attempt_outlives_its_links", ()),
        ("of_many_swaps_at_once_exactly_one_wins", ()),
    ],
)
def test_a_slow_transport_passes_the_kit(test: str, args: tuple[str, ...]) -> None:
    getattr(SlowKit(), f"test_{test}")(*args)
