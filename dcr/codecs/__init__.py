"""Patches, and how they become bytes. Pure."""
