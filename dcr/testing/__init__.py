"""Faults for tests: a transport that does to messages what networks and disks do."""

from __future__ import annotations

from dcr.testing.faults import FaultyTransport, flip_bit, flip_one_chunk

__all__ = ["FaultyTransport", "flip_bit", "flip_one_chunk"]
