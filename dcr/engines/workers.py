"""Ranks in processes of their own: a socket to each worker, over which its loader and its weights are called.

    K  changed elements of a frame      P  parts of a rank

The worker connects and serves (`serve`), the member's process calls (`Worker`): one request, one answer, in turn. What
is prepared stays in the worker; the caller holds a handle, and what it has let go of is freed with the next request.
A change crosses decoded, so that it is decoded once per member and not once per rank. Whoever may open the socket is
trusted with the weights: keep its directory private.
"""

from __future__ import annotations

import hmac
import itertools
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dcr import errors
from dcr.codecs.patch import Change, Operation
from dcr.engines.calls import (
    Answer,
    Awake,
    Bind,
    Buffer,
    Call,
    Digest,
    Done,
    Failed,
    Finalize,
    Fingerprint,
    Hello,
    Install,
    Mark,
    Parts,
    Prepare,
    Request,
    Shared,
    Undo,
    octets,
    receive,
    send,
)
from dcr.errors import LocalError, RankError, StateError, WireError
from dcr.layout import frames
from dcr.layout.frames import Layout, Region
from dcr.layout.views import UNSIGNED, Lanes
from dcr.protocol import digest
from dcr.seams import Loader, RankReady, RankWeights, Watching
from dcr.seams.required import SECONDS, WHOLE, judge

_TICKETS = itertools.count()  # unique in this process: weights that are bound anew never name what is still kept


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Share:
    """A handle to what a worker has ready; see `dcr.seams.RankReady`."""

    ticket: int
    frame: int
    parts: tuple[int, ...]
    changed: int
    nbytes: int
    old_sums: Lanes
    new_sums: Lanes
    copies_agree: bool

    @property
    def number(self) -> int:
        return self.frame


class Worker:
    """The loader of a rank that lies behind a socket; see `dcr.seams.Loader`. It closes the socket.

    Raises:
        RankError: by every call, if the worker is gone, does not answer within timeout_s, or failed in a way that is
            not one of dcr's errors.
    """

    def __init__(self, connection: socket.socket, *, rank: int, timeout_s: float = 600.0) -> None:
        judge(timeout_s=(timeout_s, SECONDS))
        connection.settimeout(timeout_s)
        self._connection = connection
        self._rank = rank
        self._lock = threading.Lock()  # while a member is seeded, frames are prepared beside those that are written
        self._let_go: deque[int] = deque()

    def bind(self, layout: Layout) -> RemoteWeights:
        """See `dcr.seams.Loader.bind`."""
        answer, _ = self._call(Bind(), frames.encode(layout))
        assert isinstance(answer, Parts)
        return RemoteWeights(answer.regions, self._call, self._let_go)

    def fingerprint(self) -> bytes:
        """See `dcr.seams.Loader.fingerprint`."""
        _, body = self._call(Fingerprint())
        return bytes(body)

    def finalize(self) -> None:
        """See `dcr.seams.Loader.finalize`."""
        self._call(Finalize())

    def mark(self) -> bytes:
        """See `dcr.seams.Watching.mark`."""
        _, body = self._call(Mark())
        return bytes(body)

    def require_awake(self) -> None:
        """See `dcr.seams.Watching.require_awake`."""
        self._call(Awake())

    def close(self) -> None:
        """Let the worker go; it stops serving."""
        self._connection.close()

    def _call(self, request: Request, *body: Buffer) -> tuple[Answer, memoryview]:
        try:
            with self._lock:
                forget = tuple(self._let_go.popleft() for _ in range(len(self._let_go)))
                send(self._connection, Call(request, forget), *body)
                answer, data = receive(self._connection, Answer)
        except (OSError, WireError) as error:
            self.close()  # an answer may still come: what is asked next would take it for its own
            verb = type(request).__name__.lower()
            raise RankError(f"rank {self._rank} is gone ({verb}: {type(error).__name__}: {error})") from error
        if isinstance(answer, Failed):
            raise errors.of_rank(self._rank, answer.kind, answer.message)
        return answer, data


class RemoteWeights:
    """The weights of a rank that lies behind a socket; see `dcr.seams.RankWeights`.

    ask: sends a request and returns its answer. let_go: takes the tickets of what need not be kept there any more.
    """

    def __init__(
        self, parts: Sequence[Region], ask: Callable[..., tuple[Answer, memoryview]], let_go: deque[int]
    ) -> None:
        self.parts = parts
        self._ask = ask
        self._let_go = let_go

    def prepare(self, frame: int, change: Change) -> Share:
        """See `dcr.seams.LiveWeights.prepare`."""
        ticket, positions = next(_TICKETS), change.positions
        count = None if positions is None else len(positions)
        request = Prepare(ticket, frame, change.operation, change.values.itemsize, count)
        body = [] if positions is None else [octets(positions)]
        answer, sums = self._ask(request, *body, octets(change.values))
        assert isinstance(answer, Shared)
        old, new = np.split(digest.unpack(sums), 2)
        share = Share(ticket, frame, answer.parts, answer.changed, answer.nbytes, old, new, answer.copies_agree)
        weakref.finalize(share, self._let_go.append, ticket).atexit = False
        return share

    def install(self, ready: Share) -> None:
        """See `dcr.seams.LiveWeights.install`."""
        self.install_all([ready])

    def install_all(self, readies: Sequence[Share]) -> None:
        """See `dcr.seams.Batching.install_all`."""
        self._ask(Install(tuple(ready.ticket for ready in readies)))

    def undo(self, ready: Share) -> None:
        """See `dcr.seams.LiveWeights.undo`."""
        self._ask(Undo(ready.ticket))

    def digest(self) -> Lanes:
        """See `dcr.seams.RankWeights`."""
        _, body = self._ask(Digest())
        return digest.unpack(body)


@contextmanager
def listening(host: str | None = None) -> Iterator[tuple[socket.socket, str]]:
    """A socket for workers to connect to, and its address for `connect`: a file that only this user can open.

    host: a name or address (IPv4 or IPv6) of this host under which workers on other hosts reach it; then it is a TCP
    socket, at a free port: of that address alone if it is one, of all of this host's addresses if it is a name.

    Raises:
        LocalError: `host` is no name or address of this host.
    """
    if host is not None:
        with _tcp_listener(host) as listener:
            yield listener, f"tcp:{_bracketed(host)}:{listener.getsockname()[1]}"
        return
    with TemporaryDirectory(prefix="dcr-") as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/ranks")
        listener.listen()
        yield listener, f"unix:{folder}/ranks"


def connect(address: str, *, timeout_s: float = 60.0) -> socket.socket:
    """A connection to an address that `listening` gave.

    Raises:
        OSError: nobody listens there.
    """
    kind, _, place = address.partition(":")
    if kind == "tcp":
        host, _, port = place.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(place)
    connection.settimeout(None)
    return connection


def _tcp_listener(host: str) -> socket.socket:
    """A listening socket, at a free port."""
    try:
        if not isinstance(host, str) or not host or host != host.strip("[]/ "):
            raise ValueError("not a name and not an address")
        family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        if _is_address(host):
            return socket.create_server(place, family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", 0), family=family)
    except (OSError, ValueError) as error:  # ValueError: what cannot be encoded as a name
        raise LocalError(
            f"expected a name or an address of this host, found host={host!r} ({error}); "
            'write, for example, host="10.0.0.5", host="::1" or host="node-7", without scheme, brackets and port'
        ) from error


def _is_address(host: str) -> bool:
    try:
        socket.getaddrinfo(host, 0, flags=socket.AI_NUMERICHOST)
    except OSError:
        return False
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def hang_up(connection: socket.socket) -> None:
    """End a connection that another thread may be waiting on."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def accept(
    listener: socket.socket, world: int, key: bytes, *, timeout_s: float = 60.0, answer_s: float = 600.0
) -> list[Worker]:
    """Wait for `world` workers to connect; in the order of their ranks. answer_s: how long each has for one answer.

    Raises:
        RankError: not all came within timeout_s, or two claim one rank, or one has another key or world.
    """
    judge(world=(world, WHOLE), timeout_s=(timeout_s, SECONDS), answer_s=(answer_s, SECONDS))
    listener.settimeout(timeout_s)
    connected: dict[int, socket.socket] = {}
    with ExitStack() as failed:
        while len(connected) < world:
            try:
                connection, _ = listener.accept()
                failed.enter_context(connection)
                connection.settimeout(timeout_s)
                hello, _ = receive(connection, Hello)
            except (OSError, WireError) as error:
                raise RankError(f"{len(connected)} of {world} ranks connected: {error}") from error
            if not hmac.compare_digest(hello.key, key):
                raise RankError(
                    "a process with another key connected: it is of another engine; "
                    "give each engine an address of its own"
                )
            if hello.world != world or hello.rank in connected or not 0 <= hello.rank < world:
                raise RankError(f"expected {world} ranks, each once; found rank {hello.rank} of {hello.world}")
            connected[hello.rank] = connection
        failed.pop_all()
    return [Worker(connected[rank], rank=rank, timeout_s=answer_s) for rank in range(world)]


def serve(connection: socket.socket, loader: Loader, *, key: bytes, rank: int, world: int) -> None:
    """Serve one rank until the connection is closed; runs in a thread of the worker.

    Raises:
        WireError: what came is not a request.
    """
    served = _Served(loader)
    with connection:
        send(connection, Hello(key, rank, world))
        while True:
            try:
                call, body = receive(connection, Call)
                served.forget(call.forget)
                send(connection, *served.answer(call.request, body))
            except OSError:
                return


class _Served:
    """A loader, the weights that it has bound, and what of them is ready, by ticket."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._weights: RankWeights[Any] | None = None
        self._readies: dict[int, RankReady] = {}

    def forget(self, tickets: Sequence[int]) -> None:
        """Let go of what was ready under some tickets."""
        for ticket in tickets:
            self._readies.pop(ticket, None)

    def answer(self, request: Request, body: memoryview) -> tuple[Answer, bytes]:
        """Do what is asked; what went wrong is an answer, too: the caller decides what follows from it."""
        try:
            if isinstance(request, Bind | Fingerprint | Finalize | Mark | Awake):
                return self._of_loader(request, body)
            if self._weights is None:
                raise StateError("the rank is not bound to a layout yet; call bind first")
            return self._of_weights(self._weights, request, body)
        except Exception as error:
            return Failed(type(error).__name__, str(error)), b""

    def _of_loader(
        self, request: Bind | Fingerprint | Finalize | Mark | Awake, body: memoryview
    ) -> tuple[Answer, bytes]:
        watching = self._loader if isinstance(self._loader, Watching) else None
        match request:
            case Bind():
                weights: Any = self._loader.bind(frames.decode(body))
                self._weights = weights
                return Parts(tuple(weights.parts)), b""
            case Fingerprint():
                return Done(), self._loader.fingerprint()
            case Mark():
                return Done(), watching.mark() if watching is not None else b""
            case Finalize():
                self._loader.finalize()
            case Awake():
                if watching is not None:
                    watching.require_awake()
        return Done(), b""

    def _of_weights(
        self, weights: RankWeights[Any], request: Digest | Prepare | Install | Undo, body: memoryview
    ) -> tuple[Answer, bytes]:
        match request:
            case Digest():
                return Done(), digest.pack(weights.digest())
            case Prepare(ticket=ticket, frame=frame):
                ready: RankReady = weights.prepare(frame, _change(request, body))
                self._readies[ticket] = ready
                sums = digest.pack(ready.old_sums) + digest.pack(ready.new_sums)
                return Shared(tuple(ready.parts), ready.changed, ready.nbytes, ready.copies_agree), sums
            case Install(tickets=tickets):
                for ticket in tickets:
                    weights.install(self._readies[ticket])
            case Undo(ticket=ticket):
                weights.undo(self._readies[ticket])
        return Done(), b""


def _change(request: Prepare, body: memoryview) -> Change:
    positions, cut = None, 0
    if request.positions is not None:
        positions = np.frombuffer(body, np.uint32, request.positions)
        cut = positions.nbytes
    values = np.frombuffer(body, UNSIGNED[request.width], offset=cut)
    return Change(Operation(request.operation), positions, values if values.flags.aligned else values.copy())
