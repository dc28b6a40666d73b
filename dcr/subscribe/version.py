"""A version as its subscriber's user sees it."""

from __future__ import annotations

import os
from typing import Literal

import anyio

from dcr.closing import outwait, require_process
from dcr.errors import StateError
from dcr.protocol.wire import Identity


class Version:
    """A committed version, ready to be installed: `install` is the only moment at which weights change.

    kind: "delta" (prepared, with an undo) or "seed" (this member held no version that leads here: a whole version is
    written where live memory differs from it, without an undo). Both are fetched and verified before they are offered;
    a seed that differs in more than fits beside the model is read from the run while it is written. changed: elements
    that will be written; None for a seed. identity, number: of the version that is written; where the files of a seed
    that is read while it is written have been removed, since there is something newer, that is written, and they are of
    that from then on.
    """

    def __init__(self, identity: Identity, kind: Literal["delta", "seed"], changed: int | None) -> None:
        self.identity = identity
        self.kind = kind
        self.changed = changed
        self.installed = False
        self._pid = os.getpid()
        self._wanted = anyio.Event()
        self._answered = anyio.Event()
        self._error: Exception | None = None
        self._closed = False

    @property
    def over(self) -> bool:
        """It is installed, or cannot be any more."""
        return self.installed or self._closed

    @property
    def number(self) -> int:
        return self.identity.version

    async def install(self) -> None:
        """Write it, read it back, and report it installed. After an error that is not `Poisoned`, try again.

        A cancellation waits until the write has ended: weights do not change after this call has returned.

        Raises:
            ReadBackError: memory did not keep what was written; it was undone, the version before still serves.
            Poisoned: live memory may hold half a version: do not serve; the next version offered seeds it anew.
            StorageRebound: a weight was replaced since it was bound: do not serve; subscribe anew.
            StateError: it is installed already, or the subscriber was closed.
        """
        require_process("subscriber", self._pid)
        if self.installed or self._wanted.is_set():
            raise StateError(f"version {self.number} {'is' if self.installed else 'is being'} installed already")
        if self._closed:
            raise StateError(f"version {self.number} can not be installed any more: its subscriber has ended")
        answered = self._answered = anyio.Event()
        self._wanted.set()
        await outwait(answered)
        if self._error is not None:
            raise self._error

    async def wanted(self) -> None:
        """For the subscriber: wait until somebody calls install."""
        await self._wanted.wait()

    def answer(self, error: Exception | None) -> None:
        """For the subscriber: how it went."""
        self._error, self.installed = error, error is None
        self._wanted = anyio.Event()
        self._answered.set()

    def close(self) -> None:
        """For the subscriber: nobody will install it any more."""
        self._closed = True
        if self._wanted.is_set():
            self.answer(StateError(f"the subscriber ended while version {self.number} was being installed"))
