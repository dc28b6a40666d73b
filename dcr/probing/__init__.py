"""Tensors as bits and numbered stand-ins: what sources and loaders share."""
