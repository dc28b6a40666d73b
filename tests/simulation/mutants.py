"""Runs, each aimed at one rule of the protocol that is switched off."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dcr.codecs.patch import Operation
from simulation import rules, switches
from simulation.history import Violation
from simulation.storms import Fault
from simulation.switches import Switch
from simulation.worlds import Arm, Break, Corrupt, Kill, Plan, Publish, Rebind, Restart, Start, Step, Wait, World

SOON, LATER = Wait(300), Wait(6000)
HEAD, W, Z = 8, 40, 70  # a byte of each tensor: the first frame, the second, the third
FIRST = (Publish(), LATER)
LIVE = "in calm weather"
LOST_SWAPS = (Arm(Fault("publisher", "swap", "fail")),) * 3


def at(*places: int) -> Publish:
    return Publish("at", at=places)


def arm(who: str, where: str, what: str, kind: str = "", amount: int = 0, *, spared: int = 0, name: str = "") -> Arm:
    return Arm(Fault(who, where, what, kind, spared, amount, name))


@dataclass(frozen=True)
class Case:
    """A rule that only these switches together take out, what happens to a run, and what the history then says.

    also_off: checks behind the rule, without which a run that broke it would end, or never end, before a wrong bit.
    """

    rule: str
    held_by: tuple[Switch, ...]
    steps: tuple[Step, ...]
    finding: str
    plan: Plan
    accident: Switch = switches.nothing_happens
    also_off: tuple[Switch, ...] = ()

    def finds(self, *switched_off: Switch) -> str | None:
        """The violation that the history finds in this run."""
        with switches.off([self.accident, *switched_off]):
            try:
                World(replace(self.plan, steps=self.steps)).run()
            except Violation as violation:
                return str(violation)
        return None


ONE = Plan((), engines=1, loaded=True, operation=Operation.OVERWRITE)
STEP = replace(ONE, operation=Operation.STEP)
TWO = replace(ONE, engines=2)
ANY = replace(TWO, quorum=1)
EMPTY = replace(ONE, loaded=False)
BUSY = replace(ONE, busy=1000)
LATE = replace(ONE, late=1)
RANKS = replace(ONE, ranks=2)
WRONG = "wrong bytes"
NOT_COMMITTED = "is not committed"

CASES = (
    Case(
        "a version is installed after its commit",
        (rules.installed_after_the_commit,),
        (*FIRST, arm("publisher", "swap", "stall", amount=3000), at(Z), LATER),
        NOT_COMMITTED,
        ONE,
    ),
    Case(
        "joiners follow the head, not seals",
        (rules.the_head_is_followed,),
        (*FIRST, arm("publisher", "swap", "stall", amount=9000), at(Z), SOON, Start(1), LATER),
        NOT_COMMITTED,
        LATE,
    ),
    Case(
        "a commit names an attempt, and its number is its own",
        (rules.a_commit_names_the_attempt, rules.numbers_go_on_after_a_restart),
        (
            *FIRST,
            arm("publisher", "swap", "stall", amount=9000),
            arm("member", "receive", "lose", "Abort", name="engine 1"),
            at(Z),
            SOON,
            Restart("zombie"),
            arm("member", "receive", "lose", "Open", name="engine 1"),
            at(W),
            Wait(9000),
        ),
        NOT_COMMITTED,
        ANY,
    ),
    Case(
        "an identity is used once",
        (rules.numbers_go_on_after_an_abort,),
        (*FIRST, arm("member", "send", "lose", "Ack"), at(Z), at(W), Wait(9000)),
        "has captured two sets of bits",
        ONE,
    ),
    Case(
        "a vote is for one attempt and its bits",
        (rules.votes_name_the_attempt, rules.votes_name_the_bits),
        (
            *FIRST,
            *LOST_SWAPS,
            arm("publisher", "receive", "echo", "Ack", spared=1),
            arm("member", "send", "lose", "Ack", spared=1, name="engine 1"),
            at(Z),
            at(W),
            Wait(20000),
        ),
        "was committed by 1 votes of 2",
        TWO,
    ),
    Case(
        "a vote is that of one life of a member",
        (rules.votes_name_the_incarnation,),
        (*FIRST, arm("member", "send", "lose", "Ack"), at(Z), LATER),
        "was committed by 1 votes of 2",
        replace(TWO, alike=True),
    ),
    Case(
        "a quorum is waited for",
        (rules.a_quorum_is_waited_for,),
        (*FIRST, arm("member", "send", "lose", "Ack"), at(Z), LATER),
        "was committed by",
        TWO,
    ),
    Case(
        "a swap is compared: a superseded publisher's late one fails",
        (rules.a_swap_is_compared,),
        (*FIRST, arm("publisher", "swap", "stall", amount=3000), at(Z), SOON, Restart("zombie"), LATER),
        "the term has fallen",
        ONE,
    ),
    Case(
        "a swap without an answer is read back",
        (rules.a_refused_swap_is_read_back,),
        (*FIRST, arm("publisher", "swap", "vanish"), at(Z), LATER),
        "was reported as Fenced",
        ONE,
    ),
    Case(
        "a swap that was refused is read back",
        (rules.a_refused_swap_is_read_back,),
        (*FIRST, arm("publisher", "swap", "retried"), at(Z), LATER),
        "was reported as Fenced",
        ONE,
    ),
    Case(
        "a superseded publisher publishes nothing more",
        (
            rules.the_head_is_read_first,
            rules.transports_show_the_heads_term,
            rules.members_refuse_lower_terms,
            rules.a_swap_is_compared,
        ),
        (*FIRST, Restart("zombie"), SOON, replace(at(Z), zombie=True), LATER),
        "the term has fallen",
        ONE,
    ),
    Case(
        "a version is complete when it holds what the seal lists",
        (rules.chunks_are_counted, rules.touched_old_bits_are_compared, rules.targets_are_compared),
        (*FIRST, arm("member", "receive", "lose", "Chunk"), at(W, Z), LATER),
        WRONG,
        ONE,
    ),
    Case(
        "a delta stands on the version that it starts from",
        (
            rules.base_versions_are_compared,
            rules.base_digests_are_compared,
            rules.touched_old_bits_are_compared,
            rules.targets_are_compared,
        ),
        (
            *FIRST,
            arm("member", "receive", "lose", "Open", name="engine 1"),
            arm("member", "receive", "lose", "Commit", name="engine 1"),
            at(W, Z),
            LATER,
            at(Z),
            LATER,
        ),
        WRONG,
        ANY,
    ),
    Case(
        "the bits that a delta touches are those that it starts from",
        (rules.touched_old_bits_are_compared, rules.contents_match_their_digest, rules.targets_are_compared),
        (*FIRST, Corrupt(at=(Z,)), at(Z), LATER),
        "the old bits read for it were rubbish",
        STEP,
    ),
    Case(
        "a chunk's body is the one that was sent",
        (rules.bodies_match_their_digest, rules.contents_match_their_digest, rules.targets_are_compared),
        (*FIRST, arm("member", "receive", "flip", "Chunk", -1), at(Z), LATER),
        WRONG,
        ONE,
    ),
    Case(
        "a chunk belongs to the attempt",
        (
            rules.chunks_name_the_attempt,
            rules.chunks_are_the_sealed_ones,
            rules.touched_old_bits_are_compared,
            rules.targets_are_compared,
        ),
        (*FIRST, *LOST_SWAPS, arm("member", "receive", "echo", "Chunk", 1), at(Z), at(W, Z), Wait(20000)),
        WRONG,
        ONE,
    ),
    Case(
        "what is sent again is what was captured and sealed",
        (rules.captured_bits_are_sent_again, rules.chunks_are_the_sealed_ones, rules.targets_are_compared),
        (*FIRST, arm("member", "receive", "flip", "Chunk", -1), at(Z), at(Z + 1), LATER),
        WRONG,
        ONE,
    ),
    Case(
        "what is written is absolute",
        (rules.what_is_written_is_absolute,),
        (*FIRST, at(Z), SOON, Corrupt(at=(Z,)), LATER),
        WRONG,
        BUSY,
    ),
    Case(
        "a failed installation is undone",
        (rules.a_failed_installation_is_undone,),
        (*FIRST, Break(), at(Z), LATER),
        WRONG,
        ONE,
    ),
    Case(
        "all frames of it are undone",
        (rules.all_frames_are_undone,),
        (*FIRST, Break(frame=1), at(W, Z), LATER),
        WRONG,
        ONE,
    ),
    Case(
        "an undo that failed poisons",
        (rules.an_undo_that_failed_is_told,),
        (*FIRST, Break(and_then="undo"), at(Z), LATER),
        WRONG,
        ONE,
    ),
    Case(
        "a poisoned member does not serve",
        (rules.a_poisoned_member_does_not_serve,),
        (*FIRST, Break(and_then="undo"), at(Z), LATER),
        "may serve version None",
        ONE,
    ),
    Case(
        "a member that writes does not serve",
        (rules.a_member_that_writes_does_not_serve,),
        (*FIRST, at(Z), LATER),
        "may serve",
        ONE,
    ),
    Case(
        "a label follows the installation",
        (rules.a_label_follows_the_installation,),
        (*FIRST, at(Z), LATER),
        WRONG,
        BUSY,
    ),
    Case(
        "memory in doubt is read",
        (rules.memory_in_doubt_is_read,),
        (*FIRST, Corrupt(at=(Z,)), at(Z), LATER),
        LIVE,
        ONE,
    ),
    Case(
        "a seed's chunks are those that were stored",
        (
            rules.bodies_match_their_digest,
            rules.contents_match_their_digest,
            rules.targets_are_compared,
            rules.what_was_seeded_is_read,
        ),
        (*FIRST, Start(1), arm("member", "store", "flip", "Chunk", -1), LATER),
        WRONG,
        LATE,
    ),
    Case(
        "what was seeded is read",
        (rules.what_was_seeded_is_read,),
        (
            *FIRST,
            at(W),
            LATER,
            Start(1),
            Wait(1500),
            Corrupt(1, at=(Z,)),
            LATER,
        ),  # where the anchor has what memory had
        WRONG,
        replace(LATE, loaded=True, busy=3000),
    ),
    Case(
        "weights are recognised by their bits",
        (rules.weights_are_recognised_by_their_bits,),
        (*FIRST, at(Z), LATER, Start(1), LATER),
        WRONG,
        LATE,
    ),
    Case(
        "so is a memory that was left half-written",
        (rules.weights_are_recognised_by_their_bits,),
        (*FIRST, Break(and_then="dies"), at(W, Z), LATER),
        WRONG,
        ONE,
    ),
    Case(
        "an anchor is held if its bits are",
        (rules.an_anchor_is_held_if_its_bits_are,),
        FIRST,
        WRONG,
        EMPTY,
    ),
    Case(
        "copies are compared before a write",
        (rules.copies_are_compared_before_a_write,),
        (*FIRST, Corrupt(at=(HEAD,)), at(HEAD), LATER),
        "the old bits read for it were rubbish",
        ONE,
    ),
    Case(
        "copies are compared in a scan",
        (rules.copies_are_compared_in_a_scan,),
        (*FIRST, Corrupt(at=(HEAD,)), Kill(), LATER),
        WRONG,
        ONE,
    ),
    Case(
        "an installation that fails on one rank is undone on all",
        (rules.all_ranks_are_undone,),
        (*FIRST, Break(rank=1), at(Z, Z + 10), LATER),
        WRONG,
        RANKS,
    ),
    Case(
        "ranks compare what they share before a write",
        (rules.ranks_compare_what_they_share,),
        (*FIRST, Corrupt(at=(HEAD,)), at(HEAD), LATER),
        "the old bits read for it were rubbish",
        RANKS,
    ),
    Case(
        "ranks compare what they share in a scan",
        (rules.ranks_compare_what_they_share,),
        (*FIRST, Corrupt(at=(HEAD,)), Kill(), LATER),
        WRONG,
        RANKS,
    ),
    Case(
        "what ranks share is counted once",
        (rules.what_ranks_share_is_counted_once,),
        FIRST,
        "still busy",  # with seeds that never have the right digest
        RANKS,
    ),
    Case(
        "storages stay where they were bound",
        (rules.storages_stay_where_they_were_bound,),
        (*FIRST, Rebind(), at(Z), LATER),
        WRONG,
        ONE,
    ),
    Case(
        "so they do for a seed",
        (rules.storages_stay_where_they_were_bound,),
        (Publish(), Wait(500), Rebind(), LATER),
        WRONG,
        replace(BUSY, loaded=False),
    ),
    Case(
        "positions and bits are words of their own in a digest",
        (rules.positions_and_bits_are_words_of_their_own,),
        (*FIRST, Corrupt(at=(66 + 4 + 2,), mask=1), Kill(), LATER),
        WRONG,
        ONE,
        switches.digests_in_numpy,
    ),
    Case(
        "a restarted trainer compares its bits with the head",
        (rules.a_restarted_trainer_compares_its_bits, rules.a_version_opens_on_the_heads_digest),
        (*FIRST, at(Z), LATER, Restart("closed", "earlier"), SOON, at(W), LATER),
        LIVE,
        ONE,
    ),
    Case(
        "a base digest is the sender's own",
        (rules.a_base_digest_is_the_trainers_own,),
        (*FIRST, at(Z), LATER, Restart("closed", "earlier"), SOON, at(W), LATER),
        WRONG,
        ONE,
        also_off=(rules.a_restarted_trainer_compares_its_bits,),
    ),
    Case(
        "the baseline moves after the head",
        (rules.the_baseline_moves_after_the_head, rules.a_version_opens_on_the_heads_digest),
        (*FIRST, *LOST_SWAPS, at(Z), at(W), Wait(20000)),
        LIVE,
        ONE,
    ),
    Case(
        "so do the baseline's bits under its digest",
        (rules.so_do_its_bits,),
        (*FIRST, *LOST_SWAPS, at(Z), at(W), Wait(20000)),
        WRONG,
        ONE,
    ),
    Case(
        "a refusal sends the publisher to its own memory first",
        (rules.a_refusal_sends_the_publisher_to_its_own_memory,),
        (*FIRST, at(Z), LATER),
        LIVE,
        ONE,
        switches.a_bit_of_the_baseline_rots,
    ),
    Case(
        "an anchor holds the bits of one version",
        (rules.anchors_are_made_between_commits, rules.an_anchor_has_its_versions_root),
        (*FIRST, at(Z), Wait(1500), at(HEAD, W, Z), Wait(2000), Start(), LATER),
        WRONG,
        Plan((), engines=0, late=1, anchor_every=1),
        also_off=(rules.contents_match_their_digest, rules.what_was_seeded_is_read),
    ),
    Case(
        "captured weights are audited",
        (rules.captured_weights_are_audited,),
        (*FIRST, at(W), LATER, at(Z), LATER),
        "its root names other bits",
        ONE,
        switches.a_compare_misses_a_change,
    ),
)
