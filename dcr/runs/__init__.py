"""Runs: what makes a durable run of any `Objects`."""

from __future__ import annotations

from dcr.runs.stored import StoredRun, StoredTransport, stored

__all__ = ["StoredRun", "StoredTransport", "stored"]
