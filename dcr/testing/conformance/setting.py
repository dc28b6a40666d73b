"""What the kit for transports is told, and how it opens a run."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal

import pytest

from dcr.seams import Transport
from dcr.testing.conformance.scene import Scene, scene
from dcr.wire import Identity

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
        """For stores: remove the Open, the second Chunk or the Seal of an attempt, and say its name in errors."""
        pytest.fail(f"{type(self).__name__} has a store: override remove_part to take the {part} of {of} from {url}")

    async def truncate_part(self, url: str, of: Identity, part: Part) -> str:
        """For stores: cut the Open, the second Chunk or the Seal of an attempt short, and say its name in errors."""
        pytest.fail(f"{type(self).__name__} has a store: override truncate_part to cut the {part} of {of} in {url}")
