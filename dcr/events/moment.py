"""The form of every event: a frozen struct with the time it happened, tagged with its name."""

from __future__ import annotations

import re

import msgspec


def _tag(struct: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", struct).lower()


class Moment(msgspec.Struct, frozen=True, gc=False, tag_field="event", tag=_tag):  # gc: no field refers to an event
    """Something happened. at_s: time.monotonic() of its process then; what took time had ended."""

    at_s: float

    @property
    def name(self) -> str:
        """What it is called in JSON: "publish_completed" of a `PublishCompleted`."""
        return str(self.__struct_config__.tag)
