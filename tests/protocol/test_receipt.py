"""What a member has of one attempt: complete when it holds exactly what the seal lists."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr.errors import BaseMismatch, IncompleteError, PayloadError, RunMismatch
from dcr.protocol.receipt import Receipt
from dcr.protocol.wire import Chunk, ChunkRef, Identity, Open, Seal

RUN = "run"
VERSION_1, VERSION_2 = Identity(RUN, 1, 1, 1), Identity(RUN, 1, 2, 1)
ROOT = b"r" * 32


def chunk(frame: int, content: bytes = b"c", digest: bytes | None = None, identity: Identity = VERSION_2) -> Chunk:
    return Chunk(identity, frame, "gaps", 2, 5, digest or bytes([frame]) * 32, content)


def seal(*chunks: Chunk, identity: Identity = VERSION_2, base: Identity | None = VERSION_1) -> Seal:
    return Seal(identity, base, tuple(ChunkRef(c.frame, c.digest, c.content, c.changed, 0) for c in chunks), b"", ROOT)


def receipt(
    *,
    identity: Identity = VERSION_2,
    base: Identity | None = VERSION_1,
    holds: Identity | None = VERSION_1,
    term: int = 1,
) -> Receipt:
    return Receipt(Open(identity, base, b"layout", ()), run=RUN, term=term, holds=holds)


def test_it_is_complete_when_it_holds_what_the_seal_lists() -> None:
    one = receipt()
    one.chunk(chunk(0))
    one.chunk(chunk(3))
    one.seal(seal(chunk(3), chunk(0)))
    assert (one.complete, one.require_complete()) == (True, seal(chunk(3), chunk(0)))


def test_chunks_without_a_seal_are_not_complete() -> None:
    one = receipt()
    one.chunk(chunk(0))
    assert (one.complete, one.missing) == (False, None)
    with pytest.raises(IncompleteError, match="before the seal; 1 chunks came"):
        one.require_complete()


def test_missing_chunks_are_named() -> None:
    one = receipt()
    one.chunk(chunk(1))
    one.seal(seal(chunk(0), chunk(1), chunk(7)))
    assert (one.complete, one.missing) == (False, {0, 7})
    with pytest.raises(IncompleteError, match=r"frames \[0, 7\] are missing"):
        one.require_complete()


def test_a_version_without_changes_is_complete_at_its_seal() -> None:
    one = receipt()
    one.seal(seal())
    assert one.complete


def test_a_duplicate_is_harmless() -> None:
    one = receipt()
    assert [one.chunk(chunk(0)), one.chunk(chunk(0))] == [True, False]
    one.seal(seal(chunk(0)))
    assert one.complete


def test_a_duplicate_does_not_make_up_for_a_missing_chunk() -> None:
    one = receipt()
    one.seal(seal(chunk(0), chunk(1)))
    one.chunk(chunk(0))
    one.chunk(chunk(0))
    assert one.missing == {1}


def test_two_different_chunks_of_one_frame_are_refused() -> None:
    one = receipt()
    one.chunk(chunk(0))
    with pytest.raises(PayloadError, match="two different chunks for frame 0"):
        one.chunk(chunk(0, digest=b"x" * 32))


@pytest.mark.parametrize(
    "sealed",
    [seal(chunk(1)), seal(), seal(chunk(0, digest=b"x" * 32)), seal(chunk(0, content=b"x"))],
    ids=["another frame", "none", "another body", "other content"],
)
def test_a_chunk_that_was_not_sealed_is_refused(sealed: Seal) -> None:
    one = receipt()
    one.chunk(chunk(0))
    with pytest.raises(PayloadError, match="frame 0 is not the sealed one"):
        one.seal(sealed)


@pytest.mark.parametrize(
    "late", [chunk(1), chunk(0, digest=b"x" * 32), chunk(0, content=b"x")], ids=["frame", "body", "content"]
)
def test_a_chunk_that_was_not_sealed_is_refused_after_the_seal_too(late: Chunk) -> None:
    one = receipt()
    one.seal(seal(chunk(0)))
    with pytest.raises(PayloadError, match="is not the sealed one"):
        one.chunk(late)


def test_a_refused_chunk_does_not_complete_an_attempt() -> None:
    one = receipt()
    one.seal(seal(chunk(0)))
    with pytest.raises(PayloadError):
        one.chunk(chunk(0, digest=b"x" * 32))
    assert not one.complete


def test_a_seal_that_lists_a_frame_twice_is_refused() -> None:
    with pytest.raises(PayloadError, match="lists a frame twice"):
        receipt().seal(seal(chunk(0), chunk(0)))


@pytest.mark.parametrize("base", [None, Identity(RUN, 1, 0, 1)], ids=["no base", "another base"])
def test_a_seal_from_another_base_than_the_opening_is_refused(base: Identity | None) -> None:
    with pytest.raises(PayloadError, match="its seal starts from"):
        receipt().seal(seal(base=base))


OTHERS = [Identity("other", 1, 2, 1), Identity(RUN, 2, 2, 1), Identity(RUN, 1, 3, 1), Identity(RUN, 1, 2, 2)]


@pytest.mark.parametrize("identity", OTHERS, ids=["run", "term", "version", "attempt"])
def test_a_chunk_of_another_attempt_is_refused(identity: Identity) -> None:
    with pytest.raises(RunMismatch, match="expected version 2"):
        receipt().chunk(chunk(0, identity=identity))


@pytest.mark.parametrize("identity", OTHERS, ids=["run", "term", "version", "attempt"])
def test_a_seal_of_another_attempt_is_refused(identity: Identity) -> None:
    with pytest.raises(RunMismatch, match="expected version 2"):
        receipt().seal(seal(identity=identity))


def test_an_attempt_of_another_run_is_refused() -> None:
    with pytest.raises(RunMismatch, match="expected run run, found other"):
        receipt(identity=Identity("other", 1, 2, 1))


def test_an_attempt_of_a_superseded_publisher_is_refused() -> None:
    with pytest.raises(RunMismatch, match="superseded publisher: the head is at term 2"):
        receipt(term=2)


def test_an_attempt_of_a_later_term_than_the_heads_is_accepted() -> None:
    assert receipt(identity=Identity(RUN, 3, 2, 1)).identity.term == 3


@pytest.mark.parametrize(
    "holds",
    [None, Identity(RUN, 1, 0, 1), Identity(RUN, 1, 1, 2), Identity(RUN, 2, 1, 1), Identity("other", 1, 1, 1)],
    ids=["nothing", "an older version", "another attempt", "another term", "another run"],
)
def test_a_delta_from_a_version_that_is_not_held_is_refused(holds: Identity | None) -> None:
    with pytest.raises(BaseMismatch, match="starts from version 1"):
        receipt(holds=holds)


@pytest.mark.parametrize("holds", [VERSION_2, Identity(RUN, 1, 3, 1)], ids=["the same", "a newer one"])
def test_an_anchor_that_is_not_newer_than_what_is_held_is_refused(holds: Identity) -> None:
    with pytest.raises(BaseMismatch, match="not newer"):
        receipt(base=None, holds=holds)


def test_a_delta_that_goes_back_is_refused() -> None:
    with pytest.raises(BaseMismatch, match="not newer"):
        receipt(base=VERSION_2, holds=VERSION_2)


@pytest.mark.parametrize("holds", [None, VERSION_1], ids=["nothing", "an older version"])
def test_an_anchor_needs_no_base(holds: Identity | None) -> None:
    assert receipt(base=None, holds=holds).base is None


@settings(deadline=None, max_examples=200)
@given(st.sets(st.integers(0, 5)), st.lists(st.integers(0, 5), max_size=12), st.integers(0, 12))
def test_in_any_order_it_is_complete_exactly_when_the_sets_are_equal(
    sealed: set[int], coming: list[int], when: int
) -> None:
    one, foreign = receipt(), False
    events: list[Any] = [chunk(frame) for frame in coming]
    events.insert(when, seal(*map(chunk, sealed)))
    for event in events:
        try:
            one.seal(event) if isinstance(event, Seal) else one.chunk(event)
        except PayloadError:
            foreign = True
            break
    assert foreign == (not set(coming) <= sealed)
    assert foreign or one.complete == (set(coming) == sealed)
