"""Transports, loaders, sources and codecs are found by entry point and imported one at a time.

The built-in ones register the same way as anybody else's, so nothing here knows their names. Listing what is
installed reads metadata only; a plugin is imported when it is asked for, and no other is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from dcr.errors import PluginError
from dcr.seams import Transport, urls
from dcr.seams.required import require

GROUPS = ("dcr.transports", "dcr.loaders", "dcr.sources", "dcr.codecs")


class Plugin(NamedTuple):
    """One entry point: its name, the distribution that offers it, and the object it points at."""

    name: str
    distribution: str
    value: str


def installed(group: str) -> list[Plugin]:
    """What the installed distributions offer in one group, sorted by name; none of it is imported.

    Raises:
        PluginError: dcr has no such group.
    """
    return sorted(Plugin(point.name, _distribution(point), point.value) for point in _points(group))


def load(group: str, name: str, *, called: Mapping[str, str] | None = None) -> Any:
    """Import one plugin and return the object that its entry point names.

    called: what else plugins are called; it is suggested, and never taken.

    Raises:
        PluginError: there is no such group; nobody offers the name, or more than one distribution does; or the
            import failed, in which case the failure is the cause.
    """
    offers = [point for point in _points(group) if point.name == name]
    if not offers:
        raise PluginError(_unknown(group, name, called or {}))
    if len(offers) > 1:
        raise PluginError(_ambiguous(group, name, offers))
    (point,) = offers
    try:
        return point.load()
    except Exception as cause:  # a plugin is somebody else's code: it may fail in any way
        raise PluginError(_broken(group, point, cause)) from cause


def transport_for(url: str, given: Any = None) -> Any:
    """The transport that was given for a URL, or else the one that its scheme names.

    Raises:
        PluginError: as `load`. Else as `dcr.seams.urls.scheme_of`.
    """
    scheme = urls.scheme_of(url)
    if given is None:
        return load("dcr.transports", scheme)
    require(given, Transport, "dcr.transports.local.LocalTransport()")
    return given


def _points(group: str) -> Sequence[EntryPoint]:
    if group not in GROUPS:
        raise PluginError(f"dcr has no plugin group {group!r}; its groups are {', '.join(GROUPS)}")
    return tuple(entry_points(group=group))


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "(unknown distribution)"


def _unknown(group: str, name: str, called: Mapping[str, str]) -> str:
    names = sorted({point.name for point in _points(group)})
    message = f"{group} has no plugin {name!r}; installed: {', '.join(names) or 'none at all'}."
    if near := [called[name]] if name in called else get_close_matches(name, names):
        message += f" Did you mean {' or '.join(near)}?"
    elif elsewhere := [other for other in GROUPS if other != group and name in {p.name for p in _points(other)}]:
        message += f" There is a plugin of that name in {' and '.join(elsewhere)}."
    kind = group.removeprefix("dcr.").removesuffix("s")
    return message + (
        f" To add a {kind}, pip install a distribution that registers {name!r} "
        f"under the entry point group {group} (`dcr plugins` lists what is there)"
    )


def _ambiguous(group: str, name: str, offers: Sequence[EntryPoint]) -> str:
    claims = " and ".join(sorted(f"{_distribution(point)} ({point.value})" for point in offers))
    return f"{group} has more than one plugin {name!r}, and dcr does not choose: {claims}. Uninstall all but one"


def _broken(group: str, point: EntryPoint, cause: Exception) -> str:
    message = (
        f"the plugin {point.name!r} of {group} ({point.value}, from {_distribution(point)}) failed to load: "
        f"{type(cause).__name__}: {cause}"
    )
    if isinstance(cause, ModuleNotFoundError) and cause.name:
        missing = cause.name.partition(".")[0]
        if extra := _extra(point, missing):
            return f"{message}. Install {_distribution(point)} with its extra: '{_distribution(point)}[{extra}]'"
        return f"{message}. Install the distribution that provides the module {missing!r}"
    return message


def _extra(point: EntryPoint, missing: str) -> str | None:
    """The extra of the plugin's own distribution that brings a missing module (of the same name as its package)."""
    for requirement in (point.dist.requires if point.dist is not None else None) or ():
        package = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"""extra\s*==\s*['"]([^'"]+)['"]""", requirement)
        if package and extra and _normal(package[0]) == _normal(missing):
            return extra[1]
    return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
