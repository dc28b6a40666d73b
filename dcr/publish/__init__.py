"""A trainer's end: what captures its weights, ships what changed, collects votes and moves the head."""

from __future__ import annotations

from dcr.publish.publisher import Publisher
from dcr.publish.refit import Answer, Refit, Report, ResidualTensors

__all__ = ["Answer", "Publisher", "Refit", "Report", "ResidualTensors"]
