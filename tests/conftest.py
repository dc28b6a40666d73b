"""Profiles of the property tests: `pytest tests/test_states.py --hypothesis-profile=long --timeout=3600`."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("long", max_examples=10_000)
