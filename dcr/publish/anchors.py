"""Whole versions stored beside deltas, and what is removed behind them: on all ranks, after a commit."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import msgspec
import numpy as np

from dcr.errors import RanksLost
from dcr.events import AnchorCompleted, AnchorFailed, AnchorStarted, PruneCompleted, PruneFailed, PruneStarted
from dcr.events.observers import Observer, tell
from dcr.protocol.wire import Identity
from dcr.publish.leader import Leader
from dcr.publish.meeting import Ranks
from dcr.publish.part import Part, Shipped
from dcr.publish.refit import Report
from dcr.publish.retention import Retention
from dcr.seams import Writer
from dcr.stages.compress import Compress


class Anchors:
    """Stores anchors as `retention` asks for them. compress: what encodes the patches of an attempt."""

    def __init__(
        self,
        ranks: Ranks,
        part: Part,
        link: Writer,
        *,
        compress: Callable[[Identity], Compress],
        retention: Retention,
        observe: Observer,
    ) -> None:
        self._ranks = ranks
        self._part = part
        self._link = link
        self._compress = compress
        self._retention = retention
        self._observe = observe

    async def keep(self, report: Report) -> None:
        """Where it is due, store the committed bits whole beside their delta, and remove what nobody needs any more.

        What fails is told by an event, and not raised: the version is committed, and only late joiners read more.
        """
        due, committed = self._retention.count(report.wire_bytes), report.identity
        if not (report.is_anchor or due):
            return
        if not report.is_anchor and not await self._anchor(
            msgspec.structs.replace(committed, attempt=committed.attempt + 1)
        ):
            return
        below = self._retention.anchor(committed.version)
        if below is not None:
            prune = partial(self._prune, version=committed.version, below=below)
            with suppress(RanksLost):  # the next version tells
                await self._ranks.lead(f"prune {committed.version}", prune, type(None))

    async def _anchor(self, identity: Identity) -> bool:
        """Store an anchor of the committed version; whether that went well."""
        version, began_s = identity.version, time.monotonic()
        tell(self._observe, AnchorStarted, version)
        try:
            shipped = await self._store_anchor(identity)
        except Exception as error:
            tell(self._observe, AnchorFailed, version, *_why(error), time.monotonic() - began_s)
            return False
        chunks, wire_bytes = sum(len(one.chunks) for one in shipped), sum(one.wire_bytes for one in shipped)
        tell(self._observe, AnchorCompleted, version, chunks, wire_bytes, time.monotonic() - began_s)
        return True

    async def _prune(self, leader: Leader, *, version: int, below: int) -> None:
        began_s = time.monotonic()
        tell(self._observe, PruneStarted, version, below)
        try:
            await leader.prune(below)
        except Exception as error:
            tell(self._observe, PruneFailed, version, below, *_why(error), time.monotonic() - began_s)
        else:
            tell(self._observe, PruneCompleted, version, below, time.monotonic() - began_s)

    async def _store_anchor(self, identity: Identity) -> list[Shipped]:
        version = identity.version
        await self._ranks.lead(f"open anchor {version}", lambda leader: leader.open_anchor(identity), type(None))
        ship = partial(self._part.ship_whole, self._link, self._compress(identity))
        shipped = await self._ranks.share(f"ship anchor {version}", ship, Shipped)
        refs = [ref for one in shipped for ref in one.chunks]
        lanes = await self._ranks.add(f"anchored {version}", self._part.baseline.lanes)  # of the bits that were sent
        digests = np.zeros_like(lanes), lanes, np.zeros_like(lanes)
        await self._ranks.lead(
            f"seal anchor {version}", lambda leader: leader.seal_anchor(identity, refs, digests), type(None)
        )
        return shipped


def _why(error: Exception) -> tuple[str, str]:
    return type(error).__name__, str(error)
