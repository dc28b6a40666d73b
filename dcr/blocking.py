"""A synchronous face for trainers and engines without an event loop: the same ends, run in a thread of their own.

with dcr.blocking.publisher("local:///run", source=dcr.source(model)) as publisher:
    refit = publisher.publish(version=1)
    publisher.captured()
    refit.committed()

A wait that is given up, by its timeout_s or by KeyboardInterrupt, loses nothing: a later one goes on with it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from dcr.closing import is_process, require_process
from dcr.errors import StateError, TimedOut
from dcr.protocol.wire import Identity
from dcr.publish import Answer, Publisher, Refit, Report
from dcr.publish.options import WhenBusy
from dcr.seams.required import WAIT, judge
from dcr.subscribe import Subscriber, Version

T = TypeVar("T")


class Loop:
    """An event loop in a thread, in which an end lives from its opening to its close.

    The thread is a daemon, so that a program which forgets to close an end can exit; a run survives that, as it
    survives a kill.
    """

    def __init__(self, end: Publisher | Subscriber) -> None:
        self._end = end
        self._kind = type(end).__name__.lower()
        self._portal: BlockingPortal | None = None
        self._thread: threading.Thread | None = None
        self._pid: int | None = None

    def open(self) -> None:
        """Start the thread and open the end in it; raises what that raises."""
        require_process(self._kind, self._pid)
        if self._thread is not None:
            raise StateError(f"this {self._kind} was opened before, and can be opened once: make a new one")
        self._pid, started = os.getpid(), Future[BlockingPortal]()
        self._thread = threading.Thread(target=anyio.run, args=(_serve, started), name=f"dcr.{self._kind}", daemon=True)
        self._thread.start()
        self._portal = started.result()
        try:
            self.call(self._end.open)
        except BaseException:
            self._stop()
            raise

    def close(self, error: BaseException | None = None) -> None:
        """Close the end and stop the thread. error: what ends the end's use, if it is an error: nothing is waited for.

        Raises: what closing raises; StateError: this is a fork of the end's process, and nothing was done; unless an
            error is on its way.
        """
        if error is not None and not is_process(self._pid):
            return
        require_process(self._kind, self._pid)
        if self._portal is None:
            return
        try:
            self.call(self._end.__aexit__, type(error) if error else None, error, None)
        finally:
            self._stop()

    def call(self, call: Callable[..., Awaitable[T]], *args: Any, timeout_s: float | None = None, what: str = "") -> T:
        """Call in the loop and wait for the result; returns or raises only once the call has ended.

        Raises: what the call raises. StateError: the end is not open here. TimedOut: there was no result within
            timeout_s. What interrupts the wait, such as KeyboardInterrupt, once the call has been cancelled.
        """
        judge(timeout_s=(timeout_s, WAIT))
        require_process(self._kind, self._pid)
        if self._portal is None:
            raise StateError(
                f"this {self._kind} was closed: make a new one"
                if self._thread
                else f"this {self._kind} is not open: use it within `with`, or call its open() first"
            )
        ended = threading.Event()

        async def run() -> T:
            try:
                with anyio.move_on_after(timeout_s):
                    return await call(*args)
            finally:
                ended.set()
            raise TimedOut(f"waited {timeout_s:g} s for {what}, which goes on: call again to go on waiting for it")

        future = self._portal.start_task_soon(run)
        try:
            return future.result()
        except BaseException:
            if not future.done():  # the wait was interrupted: weights may be being written until the call has ended
                future.cancel()
                ended.wait()
            raise

    def _stop(self) -> None:
        portal, self._portal = self._portal, None
        if portal is not None and self._thread is not None:
            portal.start_task_soon(portal.stop, True)
            self._thread.join()


async def _serve(started: Future[BlockingPortal]) -> None:
    async with BlockingPortal() as portal:
        started.set_result(portal)
        await portal.sleep_until_stopped()


class BlockingRefit:
    """`dcr.Refit`; every call blocks, for no longer than timeout_s where that is given."""

    def __init__(self, loop: Loop, refit: Refit) -> None:
        self._loop = loop
        self._refit = refit
        self.version = refit.version
        self.skipped = refit.skipped

    def captured(self, *, timeout_s: float | None = None) -> None:
        """See `dcr.Refit.captured`."""
        self._wait(self._refit.captured, timeout_s, "captured")

    def committed(self, *, timeout_s: float | None = None) -> Report:
        """See `dcr.Refit.committed`."""
        return self._wait(self._refit.committed, timeout_s, "committed")

    def installed(self, *, timeout_s: float | None = None) -> Mapping[str, Answer]:
        """See `dcr.Refit.installed`."""
        return self._wait(self._refit.installed, timeout_s, "installed")

    def _wait(self, call: Callable[[], Awaitable[T]], timeout_s: float | None, state: str) -> T:
        return self._loop.call(call, timeout_s=timeout_s, what=f"version {self.version} to be {state}")


class publisher:  # noqa: N801 - reads as a function, as dcr.publisher does
    """`dcr.publisher` as a plain context manager; it takes the same arguments."""

    def __init__(self, url: str, **options: Any) -> None:
        self._publisher = Publisher(url, **options)
        self._loop = Loop(self._publisher)
        self._begun: Refit | None = None  # by a call that was interrupted before it returned

    def open(self) -> publisher:
        """See `dcr.Publisher.open`."""
        self._loop.open()
        return self

    def close(self) -> None:
        """See `dcr.Publisher.aclose`."""
        self._loop.close()

    def publish(self, version: int | None = None, *, when_busy: WhenBusy | None = None) -> BlockingRefit:
        """See `dcr.Publisher.publish`."""
        if self._begun is None or self._begun.version != version:
            self._loop.call(self._begin, version, when_busy)
        refit, self._begun = self._begun, None
        assert refit is not None
        return BlockingRefit(self._loop, refit)

    async def _begin(self, version: int | None, when_busy: WhenBusy | None) -> None:
        self._begun = await self._publisher.publish(version, when_busy=when_busy)

    def captured(self, *, timeout_s: float | None = None) -> None:
        """See `dcr.Publisher.captured`."""
        self._loop.call(self._publisher.captured, timeout_s=timeout_s, what="the last version to be captured")

    def joined(self, members: int, *, timeout_s: float | None = None) -> None:
        """See `dcr.Publisher.joined`."""
        self._loop.call(self._publisher.joined, members, timeout_s=timeout_s, what=f"{members} members to take part")

    def dismiss(self, member: str) -> bool:
        """See `dcr.Publisher.dismiss`."""
        return self._loop.call(self._publisher.dismiss, member)

    @property
    def members(self) -> list[str]:
        """See `dcr.Publisher.members`."""
        return self._publisher.members

    @property
    def version(self) -> int | None:
        """See `dcr.Publisher.version`."""
        return self._publisher.version

    @property
    def head(self) -> int | None:
        """See `dcr.Publisher.head`."""
        return self._publisher.head

    def __enter__(self) -> publisher:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.close(error)


class BlockingVersion:
    """`dcr.Version`; install blocks."""

    def __init__(self, loop: Loop, version: Version) -> None:
        self._loop = loop
        self._version = version
        self.kind = version.kind
        self.changed = version.changed

    @property
    def identity(self) -> Identity:
        """See `dcr.Version`."""
        return self._version.identity

    @property
    def number(self) -> int:
        """See `dcr.Version`."""
        return self._version.number

    def install(self) -> None:
        """See `dcr.Version.install`."""
        self._loop.call(self._version.install)


class subscriber:  # noqa: N801
    """`dcr.subscriber` as a plain context manager and iterator; it takes the same arguments."""

    def __init__(self, url: str, **options: Any) -> None:
        self._subscriber = Subscriber(url, **options)
        self._loop = Loop(self._subscriber)
        self._given: Version | None = None

    def open(self) -> subscriber:
        """See `dcr.Subscriber.open`."""
        self._loop.open()
        return self

    def close(self) -> None:
        """See `dcr.Subscriber.aclose`."""
        self._loop.close()

    @property
    def version(self) -> int | None:
        """See `dcr.Subscriber.version`."""
        return self._subscriber.version

    @property
    def latest(self) -> int | None:
        """See `dcr.Subscriber.latest`."""
        return self._subscriber.latest

    @property
    def behind(self) -> int:
        """See `dcr.Subscriber.behind`."""
        return self._subscriber.behind

    def look(self, *, timeout_s: float | None = None) -> int:
        """See `dcr.Subscriber.look`."""
        return self._loop.call(self._subscriber.look, timeout_s=timeout_s, what="a look at the run")

    @property
    def may_serve(self) -> bool:
        """See `dcr.Subscriber.may_serve`."""
        return self._subscriber.may_serve

    def next(self, *, timeout_s: float | None = None) -> BlockingVersion:
        """Wait for the next version to install, for no longer than timeout_s; `next(versions)` waits without a limit.

        Raises:
            TimedOut: none was offered in time. StopIteration: there will be none. Else as `dcr.Subscriber`.
        """
        version = self._subscriber.offered
        if version is None or version is self._given:  # else the wait that it answered was interrupted
            try:
                version = self._loop.call(self._subscriber.__anext__, timeout_s=timeout_s, what="the next version")
            except StopAsyncIteration:
                raise StopIteration from None
        self._given = version
        return BlockingVersion(self._loop, version)

    def __iter__(self) -> Iterator[BlockingVersion]:
        return self

    def __next__(self) -> BlockingVersion:
        return self.next()

    def __enter__(self) -> subscriber:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.close(error)
