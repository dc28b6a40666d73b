"""The blocking ends: opened and closed by any thread, waits with a limit, interruptions, and forks of their process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anyio.from_thread import BlockingPortal
from support.refits import FAST, Weights, require_equal, set_bits, state, weights

import dcr.blocking
from dcr.errors import DcrError, OptionError, StateError, TimedOut
from dcr.publish.part import Part


def publisher_of(url: str, module: Weights, **options: Any) -> dcr.blocking.publisher:
    return dcr.blocking.publisher(url, source=dcr.source(module), transport=FAST, **options)


def subscriber_of(url: str, module: Weights, **options: Any) -> dcr.blocking.subscriber:
    return dcr.blocking.subscriber(url, loader=dcr.loader(module), member="m", transport=FAST, **options)


def change(module: Weights, number: int) -> None:
    set_bits(module.w, np.array([number]), np.array([0x7FC00000 + number], np.uint32))


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Weights, dcr.blocking.publisher, Weights, dcr.blocking.subscriber]]:
    trainer, engine, url = weights(1), weights(0), f"local://{tmp_path}"
    with publisher_of(url, trainer) as publisher, subscriber_of(url, engine) as versions:
        publisher.joined(1)
        yield trainer, publisher, engine, versions


# ---------------------------------------------------------------------- opening and closing


def test_an_end_is_opened_and_closed_by_any_thread_and_its_thread_ends(tmp_path: Path) -> None:
    trainer, engine, threads = weights(1), weights(0), set(threading.enumerate())
    publisher, versions = publisher_of(f"local://{tmp_path}", trainer), subscriber_of(f"local://{tmp_path}", engine)

    def enter() -> None:
        assert publisher.open() is publisher
        assert versions.open() is versions

    opener = threading.Thread(target=enter)
    opener.start()
    opener.join()
    publisher.joined(1)
    refit = publisher.publish(1)
    versions.next().install()
    assert refit.installed()["m"].said == "installed"
    require_equal(engine, state(trainer))
    for end in (versions, publisher):
        end.close()
        end.close()
    assert not [one for one in set(threading.enumerate()) - threads if one.name.startswith("dcr")]


@pytest.mark.parametrize("make", [publisher_of, subscriber_of])
def test_an_end_that_is_not_open_or_open_already_says_so(make: Callable[..., Any], tmp_path: Path) -> None:
    end = make(f"local://{tmp_path}", weights(1))
    use = end.publish if make is publisher_of else end.next
    with pytest.raises(StateError, match=r"is not open: use it within `with`, or call its open\(\) first"):
        use()
    with end, pytest.raises(StateError, match="was opened before"):
        end.open()
    with pytest.raises(StateError, match="was closed: make a new one"):
        use()


def test_an_end_that_cannot_be_opened_leaves_no_thread(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    threads = set(threading.enumerate())
    with pytest.raises(OSError, match="file"):
        publisher_of(f"local://{tmp_path}/file", weights(1)).open()
    assert not [one for one in set(threading.enumerate()) - threads if one.name.startswith("dcr")]


# ---------------------------------------------------------------------- waits with a limit


def test_each_wait_has_a_limit_and_a_later_call_goes_on(ends: Any) -> None:
    trainer, publisher, engine, versions = ends
    with pytest.raises(TimedOut, match=r"waited 0\.01 s for 2 members to take part, which goes on: call again"):
        publisher.joined(2, timeout_s=0.01)
    with pytest.raises(TimeoutError, match="for the next version"):
        versions.next(timeout_s=0.01)
    first = publisher.publish(1)
    version = versions.next(timeout_s=60)
    with pytest.raises(TimedOut, match="for version 1 to be installed"):
        first.installed(timeout_s=0.01)
    change(trainer, 2)
    second = publisher.publish(2)  # its vote waits until version 1 is installed
    with pytest.raises(TimedOut, match="for version 2 to be committed"):
        second.committed(timeout_s=0.01)
    second.captured(timeout_s=60)
    version.install()
    versions.next(timeout_s=60).install()
    assert second.committed(timeout_s=60).version == 2
    assert second.installed(timeout_s=60)["m"].said == first.installed(timeout_s=0)["m"].said == "installed"
    require_equal(engine, state(trainer))


@pytest.mark.parametrize("timeout_s", [-1, "1", float("nan"), True])
def test_a_limit_is_a_number_of_seconds(ends: Any, timeout_s: Any) -> None:
    with pytest.raises(OptionError, match="expected a number of seconds of 0 or more, or None, as timeout_s, found"):
        ends[3].next(timeout_s=timeout_s)


# ---------------------------------------------------------------------- interruptions


class Interrupted(BaseException):
    """What a signal's handler raises in a wait, as KeyboardInterrupt."""


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Interrupt a blocking call: its wait for the result raises, at once or after its work is done."""

    start = BlockingPortal.start_task_soon

    def interrupt(call: Callable[[], object], *, done: bool = False) -> None:
        def started(*args: Any, **options: Any) -> Any:
            future = start(*args, **options)

            def result() -> Any:
                if done:
                    wait([future])
                raise Interrupted

            future.result = result  # type: ignore[method-assign, assignment]
            return future

        with monkeypatch.context() as patch:
            patch.setattr(BlockingPortal, "start_task_soon", started)
            with pytest.raises(Interrupted):
                call()

    return interrupt


def test_a_version_whose_wait_was_interrupted_is_offered_again(ends: Any, interrupt: Any) -> None:
    trainer, publisher, engine, versions = ends
    interrupt(versions.next)  # before there is one
    refit = publisher.publish(1)
    interrupt(versions.next, done=True)
    next(versions).install()
    assert refit.installed()["m"].said == "installed"
    require_equal(engine, state(trainer))


def test_an_interrupted_install_returns_once_the_weights_are_whole(ends: Any, interrupt: Any) -> None:
    trainer, publisher, engine, versions = ends
    refit = publisher.publish(1)
    interrupt(next(versions).install)
    require_equal(engine, state(trainer))
    assert refit.installed()["m"].said == "installed"


def test_an_interrupted_publish_or_wait_leaves_the_publisher_usable(ends: Any, interrupt: Any) -> None:
    trainer, publisher, engine, versions = ends
    first = publisher.publish(1)
    interrupt(lambda: publisher.joined(5))
    interrupt(first.installed)
    next(versions).install()
    change(trainer, 3)
    interrupt(lambda: publisher.publish(2))
    assert publisher.publish(2).committed().version == 2
    next(versions).install()
    require_equal(engine, state(trainer))


def test_a_publish_that_was_interrupted_once_it_had_begun_returns_when_repeated(ends: Any, interrupt: Any) -> None:
    publisher = ends[1]
    interrupt(lambda: publisher.publish(1), done=True)
    assert publisher.publish(1).committed().version == 1
    with pytest.raises(StateError, match="version 1 is not new"):
        publisher.publish(1)


# ---------------------------------------------------------------------- forks

FORKED = """
import os, sys, warnings
import torch
import dcr.blocking
warnings.simplefilter("ignore", DeprecationWarning)
trainer, engine, url = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2), "local://" + sys.argv[1]
publisher = dcr.blocking.publisher(url, source=dcr.source(trainer))
versions = dcr.blocking.subscriber(url, loader=dcr.loader(engine), member="m")
with publisher, versions:
    publisher.joined(1)
    refit = publisher.publish(1)
    refit.committed()
    if (child := os.fork()) == 0:
        calls = [publisher.publish, publisher.captured, refit.installed, versions.next, versions.close, publisher.close]
        for call in calls:
            try:
                call()
            except dcr.DcrError as error:
                assert f"belongs to process {os.getppid()}, and this is process {os.getpid()}" in str(error), error
            else:
                print("no error of", call)
        sys.exit(7)
    print("the child's status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    next(versions).install()
    print({member: answer.said for member, answer in refit.installed().items()}, publisher.members)
    print(publisher.publish(2).committed().version)
    next(versions).install()
"""


def test_a_fork_that_uses_or_leaves_its_parents_ends_is_told_and_does_nothing_to_them(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-P", "-c", FORKED, str(tmp_path)], capture_output=True, text=True, timeout=90, check=False
    )
    assert process.stdout.splitlines() == ["the child's status 7", "{'m': 'installed'} ['m']", "2"], process.stderr
    assert process.returncode == 0


def test_a_fork_that_leaves_without_an_error_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with publisher_of(f"local://{tmp_path}", weights(1)) as publisher:
        pid = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: pid + 1)
            with pytest.raises(StateError, match=f"belongs to process {pid}, and this is process {pid + 1}"):
                publisher.__exit__(None, None, None)
            publisher.__exit__(SystemExit, SystemExit(), None)
        assert publisher.publish(1).committed().version == 1
    gc.collect()


# ---------------------------------------------------------------------- errors that are told


async def fail(*args: Any) -> None:
    raise ZeroDivisionError("on purpose")


def test_a_version_that_fails_while_nobody_waits_for_it_is_logged(
    ends: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = ends[1]
    monkeypatch.setattr(Part, "ship", fail)
    refit = publisher.publish(1)
    while not caplog.records:
        threading.Event().wait(0.001)
    (record,) = caplog.records
    assert record.name == "dcr"
    assert "version 1 was given up (ZeroDivisionError: on purpose); committed() raises this" in record.getMessage()
    with pytest.raises(ZeroDivisionError):
        refit.committed()


def test_an_error_that_was_raised_is_not_raised_again_where_it_is_not_asked_for(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = ends[1]
    with monkeypatch.context() as patch:
        patch.setattr(Part, "ship", fail)
        refit = publisher.publish(1)
        with pytest.raises(ZeroDivisionError):
            refit.committed()
    publisher.captured()
    refit.captured()
    with pytest.raises(ZeroDivisionError):  # there is nothing else to return
        refit.installed()
    assert publisher.publish(2).committed().version == 2


def test_what_ends_a_use_of_an_end_is_raised_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(KeyError), publisher_of(f"local://{tmp_path}", weights(1)) as publisher:  # noqa: PT012
        publisher.publish(1)
        raise KeyError
    assert issubclass(TimedOut, DcrError)
