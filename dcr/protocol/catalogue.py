"""Outlines of stored attempts: what a path to a version is planned with."""

from __future__ import annotations

from typing import Literal

import msgspec

from dcr.protocol.wire import Identity, Message, Open, Seal


class Outline(msgspec.Struct, frozen=True, array_like=True):
    """One stored attempt. layout: its digest; root: of the sealed bits; nbytes: of its chunks."""

    identity: Identity
    base: Identity | None
    kind: Literal["delta", "anchor", "squash"]
    layout: bytes
    root: bytes
    nbytes: int


def outline_of(opened: Message, sealed: Message) -> Outline:
    """The outline of a sealed attempt."""
    header, seal = opened.header, sealed.header
    assert isinstance(header, Open)
    assert isinstance(seal, Seal)
    nbytes = sum(ref.nbytes for ref in seal.chunks)
    return Outline(
        header.identity, header.base, "anchor" if header.base is None else "delta", header.layout, seal.root, nbytes
    )
