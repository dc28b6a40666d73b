"""The protocols that join the rooms. Whatever has these members fits; nothing need be imported to implement them."""

from __future__ import annotations

from dcr.seams.codec import BasedCodec, Codec
from dcr.seams.loader import (
    Batching,
    Engine,
    FrameReader,
    LiveWeights,
    Loader,
    RankReady,
    RankWeights,
    Readable,
    Releasing,
    Serving,
    Undoable,
    Watching,
)
from dcr.seams.objects import Entry, Found, Objects
from dcr.seams.source import Copy, Group, Replicated, Residual, Source, Twins
from dcr.seams.stage import Stage
from dcr.seams.transport import Ledger, Link, Run, Store, Transport, Writer

__all__ = [
    "BasedCodec",
    "Batching",
    "Codec",
    "Copy",
    "Engine",
    "Entry",
    "Found",
    "FrameReader",
    "Group",
    "Ledger",
    "Link",
    "LiveWeights",
    "Loader",
    "Objects",
    "RankReady",
    "RankWeights",
    "Readable",
    "Releasing",
    "Replicated",
    "Residual",
    "Run",
    "Serving",
    "Source",
    "Stage",
    "Store",
    "Transport",
    "Twins",
    "Undoable",
    "Watching",
    "Writer",
]
