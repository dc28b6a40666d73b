"""Every error that dcr raises on purpose.

One small tree. A message says what was expected, what was found, and what to do next.
Errors that a peer caused derive from `RemoteError`, those of the caller from `LocalError`.
"""


class DcrError(Exception):
    """Root of all errors raised by dcr."""


class LocalError(DcrError):
    """The caller, or this process, did something that is not allowed."""


class RemoteError(DcrError):
    """What arrived from outside (a peer, a file, a link) is not acceptable."""


class SchemaError(LocalError):
    """Tensors, names, dtypes or shapes do not fit what was declared."""


class LayoutError(LocalError):
    """A box or a region does not fit its storage, or two of them claim one element."""


class BudgetError(LocalError):
    """A lease was asked for that the byte budget can never grant."""


class StateError(LocalError):
    """The call is not legal in the present state; the message names both."""


class OptionError(LocalError, TypeError):
    """An argument is not what it may be; the message says what may be written."""


class TimedOut(LocalError, TimeoutError):
    """What was waited for has not come in time; the wait can be taken up again."""


class PluginError(LocalError):
    """An entry point is missing, ambiguous, or failed to load."""


class StorageRebound(LocalError):
    """A weight no longer is what it was, or no longer lives where it lived, when its map was made."""


class CopiesDiffer(LocalError):
    """Ranks, or names on one rank, that hold the same elements hold different bits of them."""


class FrozenChanged(LocalError):
    """A tensor that was said to be frozen holds other bits than were published."""


class RankError(LocalError):
    """Another rank of this publisher or of this member failed, or its process is gone."""


class WireError(RemoteError):
    """Bytes that are not a valid message: truncated, oversized, flipped, or of another version."""


class PayloadError(RemoteError):
    """A chunk does not match the digest in its seal, or does not decode."""


class IncompleteError(RemoteError):
    """A link closed, or a seal arrived, before everything that was promised."""


class RunMismatch(RemoteError):
    """A message belongs to another run, or to a term that has been superseded."""


class BaseMismatch(RemoteError):
    """The version or the bits that a delta starts from are not the ones held here."""


class DigestMismatch(RemoteError):
    """Two digests that must agree do not."""


class VoteError(RemoteError):
    """Not enough members prepared an attempt; the version was given up."""


class NotCommittedError(RemoteError):
    """The head could not be moved, and it is known that it was not: the version was given up."""


class Fenced(RemoteError):
    """Another publisher took a later term: this one may no longer move the head."""


class RanksLost(RemoteError):
    """The ranks of this publisher cannot meet any more: one died, left, or did not come in time."""


class Unavailable(RemoteError):
    """Where a run is kept has not answered for as long as was waited; what it keeps is as it was, so try again."""


class Denied(RemoteError):
    """Where a run is kept has refused what this process shows as its credentials: another try would not help."""


class Poisoned(DcrError):
    """A member may hold half a version; it must not serve until it has been seeded again."""


class ReadBackError(DcrError):
    """Live memory did not hold what was just written to it."""


def of_rank(rank: int, kind: str, text: str) -> DcrError:
    """An error that another rank raised, as it is raised here: of the same type, if that is one of dcr's."""
    known = globals().get(kind)
    if isinstance(known, type) and issubclass(known, DcrError):
        return known(f"rank {rank}: {text}")
    return RankError(f"rank {rank}: {kind}: {text}")


class StaleCopyWarning(UserWarning):
    """An engine computes with a copy of its weights that no install reaches."""
