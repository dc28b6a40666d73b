"""Whether what a user gave has the members of a protocol, or is what an option may be, before it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from dcr.errors import OptionError


@dataclass(frozen=True, slots=True)
class Rule:
    """What an option may be. says: in words, after "expected"; example: of it, after "write option="."""

    says: str
    example: str
    holds: Callable[[Any], bool]


def judge(**options: tuple[object, Rule]) -> None:
    """Refuse the first option that does not keep its rule.

    Raises:
        OptionError: says what was expected and found, and an example of what to write.
    """
    for name, (value, rule) in options.items():
        if not rule.holds(value):
            raise OptionError(f"expected {rule.says} as {name}, found {value!r}; write {name}={rule.example}")


def is_whole(value: object, least: int) -> bool:
    """Whether a value is a whole number, of Python's or numpy's, and no less than `least`; a bool is none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def is_number(value: object) -> bool:
    """Whether a value is a number that can be compared; a bool or a NaN is none."""
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) == float(value)


def instance(kind: type, example: str) -> Rule:
    """A value of a class."""
    return Rule(f"a value of {kind.__name__}", example, lambda value: isinstance(value, kind))


def optional(rule: Rule) -> Rule:
    """What keeps the rule, or None."""
    return Rule(f"{rule.says}, or None,", rule.example, lambda value: value is None or rule.holds(value))


def _are_stages(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return False
    return all(callable(getattr(stage, "run", None)) for stage in value)


WHOLE = Rule("a whole number of 1 or more", "4", lambda value: is_whole(value, 1))
COUNT = Rule("a whole number of 0 or more", "2", lambda value: is_whole(value, 0))
SECONDS = Rule("a number of seconds above 0", "60.0", lambda value: is_number(value) and value > 0)
WAIT = Rule("a number of seconds of 0 or more, or None,", "60.0", lambda value: value is None or _is_wait(value))
QUORUM = Rule("'all' or a number of members", "2", lambda value: value == "all" or is_whole(value, 0))
OBSERVER = Rule("a function that takes an event", "print", callable)
STAGES = Rule("a list of stages, each with an async run(inbox, outbox),", "[dcr.stage(function)]", _are_stages)
FLAG = Rule("True or False", "True", lambda value: isinstance(value, bool))


def _is_wait(value: object) -> bool:
    return is_number(value) and float(value) >= 0  # type: ignore[arg-type]


def require(given: object, protocol: type, wrap: str) -> None:
    """Refuse what lacks a member of a protocol. wrap: what to write where a torch module was given bare.

    Raises:
        OptionError: says what was found, and what it lacks or how to wrap it.
    """
    names = [name for name in vars(protocol) if not name.startswith("_")]
    lacks = [name for name in names if not hasattr(given, name)]
    if not lacks:
        return
    kind, found = protocol.__name__.lower(), type(given).__name__
    if _is_module(given):
        raise OptionError(f"expected a {kind}, found a torch.nn.Module ({found}); wrap it: {wrap}")
    raise OptionError(
        f"expected a {kind}, found {found}, which has no {', '.join(lacks)}; "
        f"make one, such as {wrap}, or one of your own (dcr.seams.{protocol.__name__})"
    )


def _is_module(given: object) -> bool:
    """By name: torch need not have been imported here."""
    return any(kind.__name__ == "Module" and kind.__module__.startswith("torch.nn.") for kind in type(given).__mro__)
