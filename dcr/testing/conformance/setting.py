"""What the kit for transports is told, and how it opens a run."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal

import pytest

from dcr.protocol.wire import Identity
from dcr.runs import StoredRun, records
from dcr.runs.patience import Patient
from dcr.seams import Transport
from dcr.testing.conformance.scene import LAYOUT, Scene, scene

MiB = 1 << 20
Part = Literal["open", "chunk", "seal"]


class Setting:
    """What the author of a transport says about it.

    transport: the value under test. url: where its runs are; `{run}` becomes a new name for every run.
    wrong_urls: must be refused. backend: the event loop that it runs on. deadline_s: how long a message may take.
    large_body_bytes: of one big chunk. held_bytes: what a link may take that nobody receives, if nothing is stored.
    lost_after_s: a member that vanishes without a word has left after so long; None: that is not tested.
    """

    transport: Transport
    url: str
    wrong_urls: Sequence[str] = ("no scheme at all", "another-scheme://somewhere/run")
    backend: str = "asyncio"
    deadline_s: float = 10.0
    large_body_bytes: int = 8 * MiB
    held_bytes: int = 32 * MiB
    lost_after_s: float | None = None

    def new_url(self) -> str:
        """The URL of a run that nobody has opened yet."""
        return self.url.replace("{run}", uuid.uuid4().hex)

    def scene(self, url: str | None = None) -> AbstractAsyncContextManager[Scene]:
        """A run and its sides."""
        return scene(self.transport, url or self.new_url(), self.deadline_s)

    async def remove_part(self, url: str, of: Identity, part: Part) -> str:
        """For stores: remove the Open, the second Chunk or the Seal of an attempt, and say its name in errors.

        A transport that `dcr.stored` made need not override this.
        """
        async with self._stored_part(url, of, part) as (objects, key):
            await objects.delete([key])
        return key

    async def truncate_part(self, url: str, of: Identity, part: Part) -> str:
        """For stores: cut the Open, the second Chunk or the Seal of an attempt short, and say its name in errors."""
        async with self._stored_part(url, of, part) as (objects, key):
            found = await objects.get(key)
            assert found is not None
            assert found.data is not None
            await objects.put(key, [found.data[:-1]])
        return key

    @asynccontextmanager
    async def _stored_part(self, url: str, of: Identity, part: Part) -> AsyncIterator[tuple[Patient, str]]:
        """The objects of a run, and the key of the one that holds a part."""
        async with self.transport.open(url) as run:
            if not isinstance(run, StoredRun):
                name = type(self).__name__
                pytest.fail(f"{name} has a store: override remove_part and truncate_part, for the {part} of {of}")
            keys = {
                "open": records.layout_key(LAYOUT.digest),
                "chunk": records.pack_key(of, (0, 1)),
                "seal": records.SEALS + records.name_of(of),
            }
            yield run.objects, keys[part]
