"""What others have named, as a terminal may show it."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with its control characters written out, so that no name can break a line or colour it."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
