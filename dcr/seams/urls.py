"""The URL of a run: what it may be, and the path in it. Two that differ must not be one run without a word."""

from __future__ import annotations

import re
from urllib.parse import unquote

from dcr.errors import LocalError, OptionError, PluginError

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^?#]*)(\?[^#]*)?(#.*)?")
ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


def scheme_of(url: object) -> str:
    """The scheme, in lower case.

    Raises:
        OptionError: it is no text. LocalError: it has what a URL cannot mean: white space at an end, control
            characters, or a fragment. PluginError: it has no scheme.
    """
    if not isinstance(url, str):
        raise OptionError(f"expected a URL as text, such as 'local:///path/to/run', found {url!r}")
    if url != url.strip() or any(not char.isprintable() for char in url):
        raise LocalError(
            f"expected a URL of printable characters with no space at either end, found {url!r}: "
            "what reads URLs drops some of the others, so that two runs would be one"
        )
    parts = URL.fullmatch(url)
    if parts is None:
        raise PluginError(f"expected a URL with a scheme, such as local:///path/to/run, found {url!r}")
    if parts[5]:
        raise LocalError(
            f"expected a URL without a fragment, found {parts[5]!r} in {url!r}: it would name the same run as without; "
            "write %23 for a # that belongs to the path"
        )
    return parts[1].lower()


def path_of(url: str, scheme: str) -> str:
    """The path in a URL of the form scheme:///path, decoded.

    Raises:
        LocalError: the URL has another form, or its path can be read in two ways; says which.
    """
    expected = f"expected a URL such as {scheme}:///path/to/run"
    if scheme_of(url) != scheme:
        raise LocalError(f"{expected}, found {url!r}")
    parts = URL.fullmatch(url)
    assert parts is not None
    _, host, path, query, _ = parts.groups()
    if host:
        raise LocalError(f"{expected}, found the host {host!r} in {url!r}: write three slashes before the path")
    if query is not None:
        raise LocalError(f"{expected}, found {query!r} in {url!r}: write %3F for a ? that belongs to the path")
    if not path.strip("/"):
        raise LocalError(f"{expected}, found no path in {url!r}")
    if escape := ESCAPE.search(path):
        raise LocalError(f"{expected}, found a % that begins no escape ({path[escape.start() :][:8]!r}): write %25")
    try:
        decoded = unquote(path, errors="strict")
    except UnicodeDecodeError:
        raise LocalError(f"{expected}, found escapes that are no UTF-8 in {url!r}") from None
    if decoded.count("/") != path.count("/") or not decoded.isprintable():
        raise LocalError(f"{expected}, found an escaped slash or control character in {url!r}")
    if {".", ".."} & set(decoded.split("/")):
        raise LocalError(f"{expected}, found a '.' or '..' in {url!r}: write the path that it leads to")
    return decoded
