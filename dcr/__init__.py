"""Delta-compressed refit: keep rollout engines bit-identical to a trainer by moving only the bits that changed.

A trainer publishes (`publisher`, `source`), rollout engines follow (`subscriber`, `loader`); `Pipeline` and `stage`
build flows of one's own; `dcr.blocking` gives publisher and subscriber a synchronous face.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

from dcr import plugins
from dcr.codecs.patch import Operation, Patch
from dcr.errors import DcrError
from dcr.events import Event
from dcr.events.observers import Summary
from dcr.pipeline import DROP, FunctionStage, Inbox, Outbox, Pipeline, stage
from dcr.pipeline.budget import ByteBudget, GiB, MiB
from dcr.protocol.wire import MemberRef
from dcr.publish import Answer, Publisher, Refit, Report
from dcr.publish.frozen import FrozenSource
from dcr.runs import stored
from dcr.seams.required import Rule, judge
from dcr.subscribe import Subscriber, Version

if TYPE_CHECKING:
    from dcr.seams import Link, Loader, Source, Transport

__all__ = [
    "DROP",
    "Answer",
    "ByteBudget",
    "DcrError",
    "Event",
    "FunctionStage",
    "GiB",
    "Inbox",
    "MiB",
    "Operation",
    "Outbox",
    "Patch",
    "Pipeline",
    "Publisher",
    "Refit",
    "Report",
    "Subscriber",
    "Summary",
    "Version",
    "connect",
    "loader",
    "publisher",
    "source",
    "stage",
    "stored",
    "subscriber",
]

# What else some kinds are called.
SOURCES = {"fsdp": "dtensor", "fsdp2": "dtensor", "tp": "dtensor", "deepspeed": "zero", "ddp": "zero"}
LOADERS = {"huggingface": "transformers", "hf": "transformers", "checkpoint": "safetensors"}

publisher = Publisher
subscriber = Subscriber


def source(weights: Any, *, kind: str = "module", frozen: Sequence[str] | None = None, **options: Any) -> Source:
    """A trainer's weights as a source; `kind` names a plugin of dcr.sources, which takes the options.

    "module": one process (`dcr.sources.module`). "dtensor": FSDP2 and tensor parallel. "zero": DeepSpeed. "megatron":
    Megatron-core. "probe": whatever has an exporter. docs/sources.md says which to take.
    frozen: patterns of names (as in fnmatch) of tensors that must not change, such as those below an adapter: deltas do
    not hold them, and a change of one is an error (`dcr.errors.FrozenChanged`) within 64 versions.
    """
    made: Source = plugins.load("dcr.sources", kind, called=SOURCES)(weights, **options)
    return made if frozen is None else FrozenSource(made, frozen)


def loader(engine: Any, *, kind: str = "module", **options: Any) -> Loader:
    """Make the loader of an engine's weights; `kind` names a plugin of dcr.loaders, which takes the options.

    "module": a torch module on one host (`dcr.loaders.module.ModuleLoader`). "transformers", "vllm": such an engine.
    "safetensors": a checkpoint directory, given by its path.
    """
    made: Loader = plugins.load("dcr.loaders", kind, called=LOADERS)(engine, **options)
    return made


@asynccontextmanager
async def connect(
    url: str, *, role: Literal["sender", "member"], member: str = "", transport: Transport | None = None
) -> AsyncIterator[Link]:
    """A bare link to a run, for a pipeline of one's own. `member` names a member's side."""
    judge(role=(role, Rule("'sender' or 'member'", "'sender'", ("sender", "member").__contains__)))
    chosen = plugins.transport_for(url, transport)
    async with chosen.open(url) as run:
        side: AbstractAsyncContextManager[Link] = (
            run.sender() if role == "sender" else run.member(MemberRef(member, ""))
        )
        async with side as link:
            yield link
