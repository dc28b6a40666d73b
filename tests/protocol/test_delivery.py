"""What a member is shown next: of any records in any order of events, never twice, never before its Open."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dcr.protocol import delivery
from dcr.protocol.delivery import Posted, Shown, after, step
from dcr.protocol.wire import Head, Identity

FIRST, SECOND = (Identity("run", 1, version, 1) for version in (1, 2))
HEAD = Head("run", 1, None, b"")


def at(head: Head, term: int, identity: Identity | None) -> Head:
    return Head(head.run, term, identity, b"")


def shown_of(head: Head | None, posted: list[Posted], shown: Shown | None = None) -> tuple[list[delivery.Step], Shown]:
    """All steps that come, one after another."""
    steps, shown = [], shown or Shown()
    while (found := step(shown, head, posted)) is not None:
        steps.append(found)
        shown = after(shown, found)
        assert len(steps) < 100, "the same is shown for ever"
    return steps, shown


def test_nothing_is_shown_of_a_run_without_a_head() -> None:
    assert step(Shown(), None, [Posted(FIRST)]) is None


def test_an_attempt_is_shown_from_its_open_to_its_seal() -> None:
    steps, _ = shown_of(HEAD, [Posted(FIRST, ((0, 0), (1, 0)), sealed=True)])
    assert steps == [
        delivery.Open(FIRST),
        delivery.Pack(FIRST, (0, 0)),
        delivery.Pack(FIRST, (1, 0)),
        delivery.Seal(FIRST),
    ]


def test_a_pack_that_comes_after_the_seal_is_shown() -> None:
    _, shown = shown_of(HEAD, [Posted(FIRST, ((0, 0),), sealed=True)])
    steps, _ = shown_of(HEAD, [Posted(FIRST, ((0, 0), (0, 1)), sealed=True)], shown)
    assert steps == [delivery.Pack(FIRST, (0, 1))]


def test_the_commit_follows_the_seal_and_then_the_next_attempt() -> None:
    posted = [Posted(FIRST, ((0, 0),), sealed=True), Posted(SECOND)]
    _, shown = shown_of(HEAD, posted[:1])
    steps, _ = shown_of(at(HEAD, 1, FIRST), posted, shown)
    assert steps == [delivery.Commit(FIRST), delivery.Open(SECOND)]


def test_a_slow_member_is_shown_all_of_its_attempt_before_the_one_that_was_opened_meanwhile() -> None:
    shown = after(Shown(), delivery.Open(FIRST))
    steps, _ = shown_of(at(HEAD, 1, FIRST), [Posted(FIRST, ((0, 0),), sealed=True), Posted(SECOND)], shown)
    assert [type(one).__name__ for one in steps] == ["Pack", "Seal", "Commit", "Open"]


def test_an_attempt_that_is_given_up_ends_without_its_chunks() -> None:
    shown = after(Shown(), delivery.Open(FIRST))
    steps, shown = shown_of(HEAD, [Posted(FIRST, ((0, 0),), aborted=True)], shown)
    assert steps == [delivery.Abort(FIRST)]
    assert shown.follows is None


def test_a_later_term_ends_what_is_followed_before_anything_of_that_term() -> None:
    shown, of_two = after(Shown(), delivery.Open(FIRST)), Identity("run", 2, 2, 1)
    steps, _ = shown_of(at(HEAD, 2, None), [Posted(FIRST), Posted(of_two)], shown)
    assert [type(one).__name__ for one in steps] == ["Abort", "Open"]
    assert steps[1] == delivery.Open(of_two)


def test_a_later_term_does_not_end_what_has_become_the_version() -> None:
    shown = after(Shown(), delivery.Open(FIRST))
    steps, _ = shown_of(at(HEAD, 2, FIRST), [Posted(FIRST, ((0, 0),), sealed=True)], shown)
    assert [type(one).__name__ for one in steps] == ["Pack", "Seal", "Commit"]


def test_the_commit_of_what_is_followed_waits_for_its_seal() -> None:
    shown = after(Shown(), delivery.Open(FIRST))
    assert step(shown, at(HEAD, 1, FIRST), [Posted(FIRST)]) is None


def test_what_was_removed_ends_unless_it_was_sealed() -> None:
    shown = after(Shown(), delivery.Open(FIRST))
    assert step(shown, HEAD, []) == delivery.Abort(FIRST, "it was removed")
    assert step(after(shown, delivery.Seal(FIRST)), HEAD, []) is None


def test_what_is_not_beyond_the_head_is_not_opened() -> None:
    anchor = Identity("run", 1, 1, 2)
    steps, _ = shown_of(at(HEAD, 1, FIRST), [Posted(FIRST, sealed=True), Posted(anchor)])
    assert steps == [delivery.Commit(FIRST)]


PARTS = st.tuples(st.integers(0, 2), st.integers(0, 3))
IDENTITIES = st.builds(Identity, st.just("run"), st.integers(1, 3), st.integers(0, 4), st.integers(1, 2))
RECORDS = st.builds(
    Posted, IDENTITIES, st.frozensets(PARTS).map(lambda one: tuple(sorted(one))), st.booleans(), st.booleans()
)
HEADS = st.builds(Head, st.just("run"), st.integers(1, 3), st.none() | IDENTITIES, st.just(b""))
SHOWN = st.builds(
    Shown, st.none() | IDENTITIES, st.frozensets(PARTS), st.booleans(), st.none() | IDENTITIES, st.none() | IDENTITIES
)


@given(SHOWN, HEADS, st.lists(RECORDS, max_size=5, unique_by=lambda record: record.identity))
def test_whatever_the_records_say_showing_comes_to_an_end(shown: Shown, head: Head, posted: list[Posted]) -> None:
    shown_of(head, posted, shown)


@given(HEADS, st.lists(RECORDS, max_size=5, unique_by=lambda record: record.identity))
def test_nothing_of_a_lower_term_or_given_up_is_opened(head: Head, posted: list[Posted]) -> None:
    for one in shown_of(head, posted)[0]:
        if isinstance(one, delivery.Open):
            assert one.identity.term >= head.term
            assert not {record.identity: record for record in posted}[one.identity].aborted


class Publishing(RuleBasedStateMachine):
    """A run whose records grow as publishers make them, and a member that looks whenever it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = HEAD
        self.posted: dict[int, list[Posted]] = {1: []}
        self.shown = Shown()
        self.opens: list[Identity] = []
        self.packs: list[tuple[Identity, delivery.Part]] = []
        self.seals: list[Identity] = []
        self.commits: list[Identity] = []
        self.version = 0

    @property
    def last(self) -> Posted | None:
        return self.posted[self.head.term][-1] if self.posted[self.head.term] else None

    def replace(self, **changes: object) -> None:
        record = self.posted[self.head.term].pop()
        values = {name: getattr(record, name) for name in ("identity", "packs", "sealed", "aborted")}
        self.posted[self.head.term].append(Posted(**(values | changes)))

    @rule()
    def open(self) -> None:
        self.version += 1
        self.posted[self.head.term].append(Posted(Identity("run", self.head.term, self.version, 1)))
        del self.posted[self.head.term][:-4]

    @precondition(lambda self: self.last is not None and not self.last.aborted)
    @rule(writer=st.integers(0, 2))
    def pack(self, writer: int) -> None:
        parts = self.last.packs
        self.replace(packs=tuple(sorted((*parts, (writer, len(parts))))))

    @precondition(lambda self: self.last is not None and not self.last.aborted)
    @rule()
    def seal(self) -> None:
        self.replace(sealed=True)

    @precondition(lambda self: self.last is not None and self.head.identity != self.last.identity)
    @rule()
    def abort(self) -> None:
        self.replace(aborted=True)

    @precondition(lambda self: self.last is not None and self.last.sealed and not self.last.aborted)
    @rule()
    def commit(self) -> None:
        self.head = at(self.head, self.head.term, self.last.identity)

    @rule()
    def restart(self) -> None:
        self.head = at(self.head, self.head.term + 1, self.head.identity)
        self.posted[self.head.term] = []

    @rule(times=st.integers(1, 6))
    def look(self, times: int) -> None:
        for _ in range(times):
            terms = {self.head.term} | ({self.shown.last.term} if self.shown.last else set())
            records = [record for term in sorted(terms) for record in self.posted[term]]
            found = step(self.shown, self.head, records)
            if found is None:
                return
            self.shown = after(self.shown, found)
            self._note(found)

    def _note(self, found: delivery.Step) -> None:
        match found:
            case delivery.Open(identity=identity):
                self.opens.append(identity)
            case delivery.Pack(identity=identity, part=part):
                assert identity == self.opens[-1], "chunks of an attempt that is not the one opened last"
                self.packs.append((identity, part))
            case delivery.Seal(identity=identity):
                assert identity == self.opens[-1], "the seal of an attempt that is not the one opened last"
                self.seals.append(identity)
            case delivery.Abort(identity=identity):
                assert identity == self.opens[-1], "the end of an attempt that is not the one opened last"
            case delivery.Commit(identity=identity):
                self.commits.append(identity)

    @invariant()
    def each_is_shown_once(self) -> None:
        for shown in (self.opens, self.packs, self.seals, self.commits):
            assert len(set(shown)) == len(shown), f"shown twice: {shown}"

    @invariant()
    def versions_never_go_back(self) -> None:
        for shown in (self.opens, self.commits):
            versions = [identity.version for identity in shown]
            assert versions == sorted(versions)

    def teardown(self) -> None:
        """Whoever looks for long enough has seen what there is: the head, and all of the attempt that is live."""
        for _ in range(100):
            self.look(1)
        if self.head.identity is not None:
            assert self.commits[-1] == self.head.identity
        last = self.last
        floor = self.head.identity.version if self.head.identity else -1
        if last is not None and last.identity.version > floor and not last.aborted:
            assert self.opens[-1] == last.identity
            assert {part for identity, part in self.packs if identity == last.identity} == set(last.packs)
            assert (last.identity in self.seals) == last.sealed


TestPublishing = Publishing.TestCase
