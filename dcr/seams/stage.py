"""What a pipeline consists of: stages of any make."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from dcr.pipeline import Inbox, Outbox

In = TypeVar("In", contravariant=True)
Out = TypeVar("Out", covariant=True)


class Stage(Protocol[In, Out]):
    """One step of a pipeline. Optional attributes: workers (tasks it runs), depth (of its outbox)."""

    @property
    def name(self) -> str:
        """What statistics and errors call it."""
        ...

    async def run(self, inbox: Inbox[In], outbox: Outbox[Out]) -> None:
        """Take items until the inbox is exhausted; raise to stop the whole pipeline."""
        ...
