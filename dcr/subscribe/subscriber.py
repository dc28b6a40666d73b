"""The subscriber: a rollout engine's end. It fetches, verifies and prepares versions while the one before serves.

Nothing uncommitted is ever in live memory: weights change only within `Version.install`. All work runs in tasks that
the subscriber owns; what its user awaits only waits for them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from inspect import iscoroutinefunction
from types import TracebackType
from urllib.parse import quote

import anyio
import msgspec

from dcr import plugins
from dcr.closing import Contexts, Life
from dcr.errors import LocalError, OptionError, StateError, StorageRebound
from dcr.events import Event, PipelineEvent, SubscriberFailed
from dcr.events.observers import Observer, ignore
from dcr.pipeline.budget import ByteBudget, MiB
from dcr.protocol import machines
from dcr.protocol.wire import Leave, MemberRef, Open
from dcr.seams import BasedCodec, Codec, Loader, Releasing, Transport
from dcr.seams.required import OBSERVER, SECONDS, WHOLE, Rule, instance, judge, optional, require
from dcr.subscribe.attempts import Attempts
from dcr.subscribe.backlog import Backlog, count_lacking
from dcr.subscribe.membership import Membership
from dcr.subscribe.offers import Offers
from dcr.subscribe.prepared import find_codec
from dcr.subscribe.rank import Rank
from dcr.subscribe.version import Version

LEAVE_TIMEOUT_S = 5.0
HOOK = Rule(
    "a function without arguments, which runs in a worker thread and not on the event loop,",
    "engine.recompile",
    lambda value: callable(value) and not iscoroutinefunction(value),
)
FINDER = Rule("a function from a codec's name to the codec", "dcr.subscribe.prepared.find_codec", callable)
MAX_NAME_BYTES = 200  # once quoted: a transport may make a file's name of it, with its own marks behind


class Subscriber:
    """Follows a run and offers its versions; an async context manager, and then an async iterator.

    member: this engine's name among the run's members, printable and at most 200 bytes long once quoted as in a
    URL; no other live engine of the run may have it. transport: None finds one by the URL's scheme. codecs: a
    codec by its name. budget: bytes of encoded chunks in memory, 256 MiB by default. fetch_timeout_s: how long to
    wait for the next piece of an attempt that has begun. workers: threads that decode. after_install: a function
    without arguments that makes anew what this engine keeps of its weights besides them, such as compiled or prepacked
    copies. It is called within each install, in a worker thread, once the weights have been written and read back; an
    error of it undoes the version (but poisons a seed), and it is called again after an undo. It may not change the
    weights: after its first call they are read once more, and a change poisons.

    Raises:
        TypeError: `loader` is none: a bare module, for example. LocalError: `member` is no name. PluginError: the URL's
            scheme is unknown.
    """

    def __init__(
        self,
        url: str,
        *,
        loader: Loader,
        member: str,
        transport: Transport | None = None,
        codecs: Callable[[str], Codec | BasedCodec] = find_codec,
        budget: ByteBudget | None = None,
        fetch_timeout_s: float = 600.0,
        workers: int = 1,
        after_install: Callable[[], object] | None = None,
        observe: Observer = ignore,
    ) -> None:
        require(loader, Loader, "dcr.loader(model)")
        _require_name(member)
        judge(
            codecs=(codecs, FINDER),
            budget=(budget, optional(instance(ByteBudget, "dcr.ByteBudget(256 * dcr.MiB)"))),
            fetch_timeout_s=(fetch_timeout_s, SECONDS),
            workers=(workers, WHOLE),
            after_install=(after_install, optional(HOOK)),
            observe=(observe, OBSERVER),
        )
        self._url = url
        self._transport: Transport = plugins.transport_for(url, transport)
        self._observe = observe
        self._loader = loader
        self._life = Life("subscriber", self._enter)
        self._ref = MemberRef(member, uuid.uuid4().hex)
        self._rank = Rank(
            loader,
            budget=budget or ByteBudget(256 * MiB),
            codecs=codecs,
            timeout_s=fetch_timeout_s,
            workers=workers,
            observe=ignore if observe is ignore else self._of_member,
            after_install=after_install,
        )
        self._member: Membership | None = None
        self._offers: Offers | None = None
        self._taken: Version | None = None
        self._error: Exception | None = None
        self._begun = anyio.Event()

    # ------------------------------------------------------------------ what its user calls

    @property
    def version(self) -> int | None:
        """The version that live memory holds, None if it holds none that is known."""
        holds = self._member.holds if self._member else None
        return holds.version if holds else None

    @property
    def latest(self) -> int | None:
        """The newest committed version that this member has seen, None if none.

        It does not look while it offers a version: `look` does.
        """
        head = self._member.head if self._member else None
        return head.identity.version if head and head.identity else None

    @property
    def behind(self) -> int:
        """How many committed versions this member lacked when it last looked; from an anchor on, if it held none."""
        return self._member.lacks if self._member else 0

    async def look(self) -> int:
        """Look what the run has committed by now, also while a version is offered: how many versions are lacked.

        `latest` and `behind` say it from then on. For scripts that hold a version back until generation can pause.

        Raises:
            StateError: this subscriber is not open. RemoteError, OSError: the run cannot be read.
        """
        self._life.require_open()
        assert self._member is not None
        return await count_lacking(self._member)

    @property
    def may_serve(self) -> bool:
        """True if live memory holds exactly one committed version."""
        if self._member is None or isinstance(self._error, StorageRebound):
            return False
        return self._member.machine.state in machines.MAY_SERVE

    @property
    def offered(self) -> Version | None:
        """The version that was offered last, until it is installed; for whoever gave up the wait that it answered."""
        return None if self._taken is None or self._taken.over else self._taken

    def __aiter__(self) -> Subscriber:
        return self

    async def __anext__(self) -> Version:
        """Wait for the next version to install. A wait that is given up loses nothing: the next one goes on.

        Raises:
            StateError: the version before was not installed: the next one stands on it. Or this subscriber is not open.
        """
        self._life.require_open()
        assert self._offers is not None
        if self.offered is not None:
            raise StateError(
                f"version {self.offered.number} was offered and not installed; install it first: it is `offered`"
            )
        version = await self._offers.take()
        if version is None:
            if self._error is not None:
                raise self._error from None
            raise StopAsyncIteration
        self._taken = version
        return version

    # ------------------------------------------------------------------ life

    async def open(self) -> Subscriber:
        """Join the run; any task may call it, and another one `aclose`. `async with` does both.

        Raises:
            StateError: it was opened before; or there is no event loop of asyncio. Whatever the loader or the transport
                raises.
        """
        await self._life.open()
        return self

    async def aclose(self) -> None:
        """Leave the run; weights do not change any more once this has returned.

        Raises:
            StateError: this is a fork of the subscriber's process; nothing was done.
        """
        await self._life.close()

    async def __aenter__(self) -> Subscriber:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if error is None or self._life.is_here:
            await self.aclose()

    async def _enter(self, contexts: Contexts) -> None:
        if isinstance(self._loader, Releasing):
            contexts.call(self._loader.release)
        run = await contexts.enter(self._transport.open(self._url))
        link = await contexts.enter(run.member(self._ref))
        self._member = Membership(self._ref, run, link, self._rank, self._observe)
        self._offers = offers = Offers(self._member)
        group = await contexts.enter(anyio.create_task_group())
        contexts.call(group.cancel_scope.cancel)
        group.start_soon(self._live, self._member, offers)
        await self._begun.wait()
        if self._error is not None:
            raise self._error

    async def _live(self, member: Membership, offers: Offers) -> None:
        """All of this member's work, in one task: so that leaving comes last, however its user is cancelled."""
        try:
            await self._work(member, offers)
        finally:
            self._begun.set()
            if self._life.is_here:  # else a fork's copy of the loop ends, and the member itself lives on
                with anyio.move_on_after(LEAVE_TIMEOUT_S, shield=True):
                    await member.say(Leave(self._ref))

    async def _work(self, member: Membership, offers: Offers) -> None:
        backlog, attempts = Backlog(member, offers), Attempts(member, offers)
        try:
            await backlog.recognise()
            await member.send(member.join)
            self._begun.set()
            while True:
                await backlog.catch_up()
                message = await member.next()
                if message is not None and isinstance(message.header, Open):
                    await attempts.take(message, message.header)
        except Exception as error:
            self._error = error
            member.emit(SubscriberFailed, type(error).__name__, str(error))
        finally:
            offers.end()

    def _of_member(self, event: Event) -> None:
        """An event of this member's stages, which do not know whose they are."""
        if isinstance(event, PipelineEvent):
            event = msgspec.structs.replace(event, member=self._ref.member)
        self._observe(event)


def _require_name(member: str) -> None:
    if not isinstance(member, str):
        raise OptionError(f"expected a text as the member's name, found {member!r}; write member='rollout-0'")
    if not member or not member.isprintable() or len(quote(member, safe="")) > MAX_NAME_BYTES:
        raise LocalError(
            f"expected a member's name of printable characters, 1 to {MAX_NAME_BYTES} bytes long once quoted as in a "
            f"URL; found {member!r}; write, for example, member='rollout-0'"
        )
