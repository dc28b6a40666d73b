"""A synchronous face for trainers and engines without an event loop: the same ends, run in a thread of their own.

with dcr.blocking.publisher("local:///run", source=dcr.source(model)) as publisher:
    refit = publisher.publish(version=1)
    publisher.captured()
    refit.committed()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from dcr.publish import Answer, Report
from dcr.publish import Publisher as AsyncPublisher
from dcr.publish import Refit as AsyncRefit
from dcr.subscribe import Subscriber as AsyncSubscriber
from dcr.subscribe import Version as AsyncVersion


class Refit:
    """`dcr.Refit`; every call blocks."""

    def __init__(self, portal: BlockingPortal, refit: AsyncRefit) -> None:
        self._portal = portal
        self._refit = refit
        self.version = refit.version

    def captured(self) -> None:
        """See `dcr.Refit.captured`."""
        self._portal.call(self._refit.captured)

    def committed(self) -> Report:
        """See `dcr.Refit.committed`."""
        return self._portal.call(self._refit.committed)

    def installed(self) -> Mapping[str, Answer]:
        """See `dcr.Refit.installed`."""
        return self._portal.call(self._refit.installed)


class publisher:  # noqa: N801 - reads as a function, as dcr.publisher does
    """`dcr.publisher` as a plain context manager; it takes the same arguments."""

    def __init__(self, url: str, **options: Any) -> None:
        self._publisher = AsyncPublisher(url, **options)
        self._stack = ExitStack()

    def publish(self, version: int | None = None) -> Refit:
        """See `dcr.Publisher.publish`."""
        return Refit(self._portal, self._portal.call(self._publisher.publish, version))

    def captured(self) -> None:
        """See `dcr.Publisher.captured`."""
        self._portal.call(self._publisher.captured)

    def joined(self, members: int) -> None:
        """See `dcr.Publisher.joined`."""
        self._portal.call(self._publisher.joined, members)

    def dismiss(self, member: str) -> bool:
        """See `dcr.Publisher.dismiss`."""
        return self._portal.call(self._publisher.dismiss, member)

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
        self._portal, self._stack = _entered(self._publisher)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, at)


class Version:
    """`dcr.Version`; install blocks."""

    def __init__(self, portal: BlockingPortal, version: AsyncVersion) -> None:
        self._portal = portal
        self._version = version
        self.number = version.number
        self.identity = version.identity
        self.kind = version.kind
        self.changed = version.changed

    def install(self) -> None:
        """See `dcr.Version.install`."""
        self._portal.call(self._version.install)


class subscriber:  # noqa: N801
    """`dcr.subscriber` as a plain context manager and iterator; it takes the same arguments."""

    def __init__(self, url: str, **options: Any) -> None:
        self._subscriber = AsyncSubscriber(url, **options)
        self._stack = ExitStack()

    @property
    def version(self) -> int | None:
        """See `dcr.Subscriber.version`."""
        return self._subscriber.version

    @property
    def may_serve(self) -> bool:
        """See `dcr.Subscriber.may_serve`."""
        return self._subscriber.may_serve

    def __iter__(self) -> Iterator[Version]:
        return self

    def __next__(self) -> Version:
        try:
            return Version(self._portal, self._portal.call(self._subscriber.__anext__))
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> subscriber:
        self._portal, self._stack = _entered(self._subscriber)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, at)


def _entered(end: AsyncPublisher | AsyncSubscriber) -> tuple[BlockingPortal, ExitStack]:
    """An event loop in a thread, with the end entered in it; leaving the stack leaves both."""
    with ExitStack() as stack:
        portal = stack.enter_context(start_blocking_portal())
        entered: AbstractContextManager[Any] = portal.wrap_async_context_manager(end)
        stack.enter_context(entered)
        return portal, stack.pop_all()
