"""An engine's end: what fetches, verifies and prepares versions beside generation, and offers them to be installed."""

from __future__ import annotations

from dcr.subscribe.subscriber import Subscriber
from dcr.subscribe.version import Version

__all__ = ["Subscriber", "Version"]
