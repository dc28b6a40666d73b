"""What the parent asks of each process: one JSON struct as its only argument. Unknown keys are refused."""

import sys

import msgspec


class TrainerOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`refits` counts the deltas that follow the anchor; `members` the rollouts to wait for."""

    url: str
    folder: str
    size: str
    seed: int
    refits: int
    members: int


class RolloutOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`last` is the version after which the rollout ends; `fault` is what to break in it, if anything."""

    url: str
    folder: str
    size: str
    seed: int
    member: str
    last: int
    fault: str | None


def trainer_order() -> TrainerOrder:
    """The order that this process was started with. Raises `msgspec.DecodeError` for anything else."""
    return msgspec.json.decode(sys.argv[1], type=TrainerOrder)


def rollout_order() -> RolloutOrder:
    """The order that this process was started with. Raises `msgspec.DecodeError` for anything else."""
    return msgspec.json.decode(sys.argv[1], type=RolloutOrder)
