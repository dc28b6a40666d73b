"""A rank behind a session: written only while it is open, and its model does not run meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcr.errors import Poisoned, ReadBackError, StateError
from dcr.loaders.session import Guarded, Session


class Recording:
    """A rank that notes what is asked of it, and fails when it is told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: str | None = None
        self.parts: list[Any] = []
        for name in ("prepare", "digest", "install", "undo", "finalize"):
            setattr(self, name, lambda *args, name=name: self._note(name))

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise ReadBackError("a test says so")


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def run(model: torch.nn.Module) -> None:
    model(torch.zeros(1, 2))


def test_nothing_is_written_outside_of_a_session(model: torch.nn.Module) -> None:
    rank = Recording()
    session = Session(model)
    weights = Guarded(rank, session)
    ready = object()
    with pytest.raises(StateError, match="no weight update session is open"):
        weights.install(ready)
    weights.undo(ready)
    session.finalize(rank.finalize)
    assert rank.calls == []


def test_what_was_written_in_a_session_is_not_undone_outside_of_it(model: torch.nn.Module) -> None:
    rank = Recording()
    session = Session(model)
    weights = Guarded(rank, session)
    ready = object()
    session.open()
    weights.install(ready)
    session.finalize(rank.finalize)
    weights.undo(ready)
    assert rank.calls == ["install", "finalize", "undo"]
    session.close()
    with pytest.raises(StateError):
        weights.undo(ready)
    assert rank.calls == ["install", "finalize", "undo"]


def test_what_only_reads_needs_no_session(model: torch.nn.Module) -> None:
    rank = Recording()
    session = Session(model)
    weights = Guarded(rank, session)
    weights.prepare()
    weights.digest()
    assert rank.calls == ["prepare", "digest"]


def test_the_model_does_not_run_while_a_session_is_open(model: torch.nn.Module) -> None:
    session = Session(model)
    run(model)
    session.open()
    session.open()  # a second time changes nothing
    with pytest.raises(Poisoned, match="must not run"):
        run(model)
    session.close()
    run(model)


def test_a_session_with_a_failed_write_closes_only_after_an_undo(model: torch.nn.Module) -> None:
    rank = Recording()
    session = Session(model)
    weights = Guarded(rank, session)
    session.open()
    rank.fails = "install"
    with pytest.raises(ReadBackError):
        weights.install(object())
    with pytest.raises(Poisoned, match="half a version"):
        session.close()
    with pytest.raises(Poisoned):
        run(model)
    weights.undo(object())
    session.close()
    run(model)
