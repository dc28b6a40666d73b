"""Inference engines as loaders, and members of several ranks."""
