"""Canonical bits and live memory: what is kept, and where an engine rank keeps it. Pure."""
