"""Whether what a user gave has the members of a protocol, before anything is done with it."""

from __future__ import annotations


def require(given: object, protocol: type, wrap: str) -> None:
    """Refuse what lacks a member of a protocol. wrap: what to write where a torch module was given bare.

    Raises:
        TypeError: says what was found, and what it lacks or how to wrap it.
    """
    names = [name for name in vars(protocol) if not name.startswith("_")]
    lacks = [name for name in names if not hasattr(given, name)]
    if not lacks:
        return
    kind, found = protocol.__name__.lower(), type(given).__name__
    if _is_module(given):
        raise TypeError(f"expected a {kind}, found a torch.nn.Module ({found}); wrap it: {wrap}")
    raise TypeError(
        f"expected a {kind}, found {found}, which has no {', '.join(lacks)}; "
        f"make one, such as {wrap}, or one of your own (dcr.seams.{protocol.__name__})"
    )


def _is_module(given: object) -> bool:
    """By name: torch need not have been imported here."""
    return any(kind.__name__ == "Module" and kind.__module__.startswith("torch.nn.") for kind in type(given).__mro__)
