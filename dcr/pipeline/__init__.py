"""Stages joined by bounded queues: the runner, its queues and statistics, and functions as stages."""

from __future__ import annotations

from dcr.pipeline.functions import DROP, Drop, FunctionStage, gather_bare, serve, stage
from dcr.pipeline.queues import Inbox, Outbox, discard
from dcr.pipeline.runner import Pipeline

__all__ = ["DROP", "Drop", "FunctionStage", "Inbox", "Outbox", "Pipeline", "discard", "gather_bare", "serve", "stage"]
