"""What `dcr verify` reports: which version of a run a checkpoint on disk holds, byte for byte."""

from __future__ import annotations

from pathlib import Path

import anyio.to_thread
import msgspec
import numpy as np

from dcr import plugins
from dcr.cli.inspect import NoRun
from dcr.cli.text import printable
from dcr.errors import DigestMismatch, LocalError, RemoteError, SchemaError, StateError
from dcr.layout import frames
from dcr.layout.frames import Layout
from dcr.layout.views import Lanes
from dcr.loaders.checkpoint import entries_of, match, placement_of, stamp_of
from dcr.protocol import digest
from dcr.protocol.wire import Identity
from dcr.runs.chain import Stored
from dcr.seams import Store
from dcr.stages.apply import sealed_digests

READS = 5  # how often a checkpoint is read that is another one each time


class Verification(msgspec.Struct, frozen=True):
    """A checkpoint beside a run.

    head: the run's newest version. holds: the version that the checkpoint is, None if it is none that is stored.
    differing: the tensors that are not those of the head. waived: names that were not compared.
    """

    url: str
    checkpoint: str
    head: int
    holds: int | None
    root: str
    differing: tuple[str, ...]
    waived: tuple[str, ...]


async def examine(url: str, folder: Path, *, waive: tuple[str, ...] = ()) -> Verification:
    """Read a checkpoint whole and compare its digests with those of the run's stored versions, newest first.

    Raises:
        NoRun: nothing is committed, or nothing is stored. SchemaError: the checkpoint is of another model.
        RemoteError: the newest version cannot be read.
    """
    async with plugins.transport_for(url).open(url) as run:
        head, _ = await run.ledger.read()
        if head is None or head.identity is None or run.store is None:
            raise NoRun(f"no stored version at {url}: nothing has been committed there, or the path is wrong")
        newest = Stored(*await run.store.describe(head.identity))
        layout = frames.decode(newest.opened.body)
        found = await anyio.to_thread.run_sync(digest_of, folder, layout, waive)
        root = digest.root(found)
        holds = await _version_of(run.store, head.identity, root)
    _, target, _ = sealed_digests(newest.seal, newest.sealed.body, layout)
    differing = np.flatnonzero((found != target).any(axis=1)).tolist()
    names = tuple(layout.schema.tensors[tensor].name for tensor in differing)
    return Verification(url, str(folder), head.identity.version, holds, root.hex(), names, waive)


def digest_of(folder: Path, layout: Layout, waive: tuple[str, ...]) -> Lanes:
    """The digests of a checkpoint that its owner may be replacing meanwhile: of one version or the next."""
    for _ in range(READS):
        stamp = stamp_of(folder)
        try:
            return _read(folder, layout, waive)
        except SchemaError:
            if stamp_of(folder) == stamp:
                raise
    raise StateError(f"{folder} was replaced {READS} times while it was being read; try again")


def _read(folder: Path, layout: Layout, waive: tuple[str, ...]) -> Lanes:
    entries = entries_of(folder)
    placement = placement_of(folder, layout, entries, match(folder, layout, entries, waive), {})
    try:
        return placement.digest()
    except DigestMismatch as error:
        raise LocalError(f"{folder} holds two names of one tensor with different bits: {error}") from error


async def _version_of(store: Store, at: Identity | None, root: bytes) -> int | None:
    """The newest stored version with this digest."""
    while at is not None:
        try:
            link = Stored(*await store.describe(at))
        except RemoteError:
            return None
        if link.seal.root == root:
            return at.version
        at = link.open.base
    return None


def render(report: Verification) -> str:
    """The report as text."""
    if not report.differing:
        return f"{report.checkpoint} is version {report.head}, the head of {report.url}, in every byte"
    names = ", ".join(map(printable, report.differing[:5])) + (" and others" if len(report.differing) > 5 else "")
    what = "is no stored version" if report.holds is None else f"is version {report.holds}"
    return (
        f"{report.checkpoint} {what} of {report.url}, whose head is {report.head}: "
        f"{len(report.differing)} tensors differ: {names}"
    )
