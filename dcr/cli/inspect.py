"""What `dcr inspect` reports: the versions of a run as they are stored, from the head back to an anchor; its members.

Only openings and seals are read, never the chunks.
"""

from __future__ import annotations

import msgspec

from dcr import plugins
from dcr.cli.text import printable
from dcr.errors import LocalError, RemoteError
from dcr.layout import frames
from dcr.protocol.wire import Identity
from dcr.runs.chain import Stored, anchor_of
from dcr.seams import Store


class NoRun(LocalError):
    """There is nothing at the URL."""


class VersionRow(msgspec.Struct, frozen=True):
    """One stored version. density: changed / all elements; nbytes: of its chunks' bodies; root: of its digests, hex."""

    version: int
    term: int
    attempt: int
    base: int | None
    chunks: int
    changed: int
    density: float
    nbytes: int
    dense_nbytes: int
    root: str


class MemberRow(msgspec.Struct, frozen=True):
    """One member, and the version that it said it holds."""

    member: str
    incarnation: str
    holds: int | None


class Inspection(msgspec.Struct, frozen=True):
    """A run. versions: newest first. problem: why an older one could not be read; None if all was."""

    url: str
    run: str
    term: int
    head: int | None
    tensors: int
    elements: int
    versions: tuple[VersionRow, ...]
    members: tuple[MemberRow, ...]
    problem: str | None


async def examine(url: str) -> Inspection:
    """Read a run.

    Raises:
        NoRun: there is no head. PluginError, LocalError: the URL does not make sense.
    """
    async with plugins.transport_for(url).open(url) as run:
        head, _ = await run.ledger.read()
        if head is None:
            raise NoRun(f"no run at {url}: nothing has been published there, or the path is wrong")
        rows, layout, problem = await _versions(run.store, head.identity)
        joins = await run.members()
    return Inspection(
        url=url,
        run=head.run,
        term=head.term,
        head=head.identity.version if head.identity else None,
        tensors=len(layout.schema.tensors) if layout else 0,
        elements=layout.schema.numel if layout else 0,
        versions=tuple(rows),
        members=tuple(
            MemberRow(one.member.member, one.member.incarnation, one.holds.version if one.holds else None)
            for one in joins
        ),
        problem=problem,
    )


async def _versions(
    store: Store | None, at: Identity | None
) -> tuple[list[VersionRow], frames.Layout | None, str | None]:
    """The versions from the head back to where nobody needs to go, newest first; and what stopped it before."""
    rows: list[VersionRow] = []
    layout, reached_anchor = None, False
    while store is not None and at is not None:
        try:
            link = Stored(*await store.describe(at))
            layout = layout or frames.decode(link.opened.body)
        except RemoteError as error:
            return rows, layout, None if reached_anchor else f"{at}: {error}"
        rows.append(_row(link, layout))
        reached_anchor = reached_anchor or await anchor_of(store, link) is not None
        at = link.open.base
    return rows, layout, None


def _row(link: Stored, layout: frames.Layout) -> VersionRow:
    identity, base, refs = link.open.identity, link.open.base, link.seal.chunks
    changed, elements = sum(ref.changed for ref in refs), layout.schema.numel
    return VersionRow(
        version=identity.version,
        term=identity.term,
        attempt=identity.attempt,
        base=base.version if base else None,
        chunks=len(refs),
        changed=changed,
        density=changed / elements if elements else 0.0,
        nbytes=sum(ref.nbytes for ref in refs),
        dense_nbytes=layout.schema.nbytes,
        root=link.seal.root.hex(),
    )


def render(report: Inspection) -> str:
    """The report as text."""
    lines = [
        f"run      {printable(report.run)} at {report.url}, term {report.term}",
        f"head     {'nothing is committed' if report.head is None else f'version {report.head}'}",
        f"model    {report.tensors:,} tensors, {report.elements:,} elements",
        f"{'version':>10} {'base':>8} {'chunks':>7} {'changed':>14} {'density':>9} {'bytes':>14}  digest",
    ]
    for row in report.versions:
        base = "anchor" if row.base is None else str(row.base)
        lines.append(
            f"{row.version:>10} {base:>8} {row.chunks:>7} {row.changed:>14,} {100 * row.density:>7.3f} % "
            f"{row.nbytes:>14,}  {row.root[:16]}"
        )
    lines += [
        f"member   {printable(joined.member)} holds {'nothing' if joined.holds is None else joined.holds}"
        for joined in report.members
    ]
    if report.problem:
        lines.append(f"PROBLEM  {printable(report.problem)}")
    return "\n".join(lines)
