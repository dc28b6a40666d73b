"""What is wrong with an attempt is refused by name before a live byte changes: the weights are write-protected here."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import torch
from simulation import hooks
from simulation.switches import callers
from support.loaders import Through
from support.refits import FAST, Rollout, Weights, empty_like, publish, require_equal, running, said, set_bits, state

import dcr
from dcr.errors import (
    DigestMismatch,
    Fenced,
    IncompleteError,
    NotCommittedError,
    Poisoned,
    RankError,
    ReadBackError,
    SchemaError,
    StateError,
    StorageRebound,
    VoteError,
)
from dcr.events import (
    AttemptRefused,
    ChunkRefused,
    ChunkSentAgain,
    ChunksWanted,
    InstallCompleted,
    InstallFailed,
    MemberTimedOut,
)
from dcr.protocol.wire import Ack, Chunk, Head, Header, Identity, Message, Open, Seal
from dcr.testing import FaultyTransport, flip_bit, flip_one_chunk

ELEMS = 1 << 16  # of bf16: 32 pages
Fault = Callable[[Message], Iterable[Message]]


class Protected:
    """A receiver's module whose weights lie in pages of their own; while locked, a write to them kills the process."""

    def __init__(self, trainer: Weights) -> None:
        self._map = mmap.mmap(-1, 2 * ELEMS)
        weights = torch.frombuffer(self._map, dtype=torch.bfloat16)
        weights.copy_(trainer.w)
        self.module = Weights({"w": weights})

    def lock(self) -> None:
        self._protect(mmap.PROT_READ)

    def unlock(self) -> None:
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)

    def _protect(self, how: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(self.module.w.data_ptr())
        assert libc.mprotect(address, ctypes.c_size_t(2 * ELEMS), how) == 0


@pytest.fixture
def trainer() -> Weights:
    rng = np.random.default_rng(11)
    module = Weights({"w": torch.zeros(ELEMS, dtype=torch.bfloat16)})
    set_bits(module.w, np.arange(ELEMS), rng.integers(0, 1 << 16, ELEMS, np.uint16, endpoint=False))
    return module


@pytest.fixture
def protected(trainer: Weights) -> Iterator[Protected]:
    receiver = Protected(trainer)
    yield receiver
    receiver.unlock()


def touch(trainer: Weights, version: int) -> None:
    """Change elements all over the tensor; some of them again and again."""
    index = np.arange(version, ELEMS, 997)
    set_bits(trainer.w, index, state(trainer)["w"][index] + np.uint16(version))


def edited(header: type, version: int, **changes: Any) -> Fault:
    """A fault that replaces fields of every header of a type, of one version."""

    def fault(message: Message) -> Iterable[Message]:
        old: Header = message.header
        if not isinstance(old, header) or old.identity.version != version:
            return (message,)
        body = changes.get("body", lambda body: body)(message.body)
        fields = {name: change(getattr(old, name)) for name, change in changes.items() if name != "body"}
        return (Message(msgspec.structs.replace(old, **fields), body),)

    return fault


def closed_at(header: type, version: int) -> Fault:
    """A fault that closes the link when a header of a type, of one version, is due."""

    def fault(message: Message) -> Iterable[Message]:
        if isinstance(message.header, header) and message.header.identity.version == version:
            raise IncompleteError("the link closed")
        return (message,)

    return fault


def swapped_bodies(version: int) -> Fault:
    """A fault that gives each chunk the body of the one before it."""
    kept: list[Message] = []

    def fault(message: Message) -> Iterable[Message]:
        if not isinstance(message.header, Chunk) or message.header.identity.version != version:
            return (message,)
        kept.append(message)
        return (Message(message.header, kept[-2].body if len(kept) > 1 else message.body),)

    return fault


def other_run(identity: Identity) -> Identity:
    return msgspec.structs.replace(identity, run="another")


def next_version(identity: Identity) -> Identity:
    return msgspec.structs.replace(identity, version=identity.version + 1)


FAULTS: dict[str, tuple[Fault, str]] = {
    "closed before the seal": (closed_at(Seal, 2), "IncompleteError"),
    "closed before a chunk": (closed_at(Chunk, 2), "IncompleteError"),
    "another base version": (edited(Open, 2, base=next_version), "BaseMismatch"),
    "another base digest": (edited(Seal, 2, body=lambda body: flip_bit(body, 3)), "PayloadError"),
    "another target digest": (edited(Seal, 2, body=lambda body: flip_bit(body, 8 * 16 + 3)), "PayloadError"),
    "another sum of old bits": (edited(Seal, 2, body=lambda body: flip_bit(body, 8 * 32 + 3)), "BaseMismatch"),
    "truncated": (edited(Chunk, 2, body=lambda body: body[:-1]), "PayloadError"),
    "flipped": (edited(Chunk, 2, body=lambda body: flip_bit(body, 77)), "PayloadError"),
    "another frame": (edited(Chunk, 2, frame=lambda frame: frame + 1), "PayloadError"),
    "another operation": (edited(Chunk, 2, operation=lambda operation: 0), "PayloadError"),
    "bodies swapped": (swapped_bodies(2), "PayloadError"),
    "a chunk left out of the seal": (edited(Seal, 2, chunks=lambda refs: refs[1:]), "PayloadError"),
    "a chunk that never comes": (edited(Seal, 2, chunks=lambda refs: (*refs, refs[0])), "PayloadError"),
    "a layout of its own": (edited(Open, 2, layout=lambda digest: bytes(32)), "PayloadError"),
}


@pytest.mark.parametrize("what", FAULTS)
async def test_a_faulty_attempt_is_refused_by_name_before_a_weight_changes(
    tmp_path: Path, trainer: Weights, protected: Protected, what: str
) -> None:
    fault, name = FAULTS[what]
    rollout = Rollout(protected.module)
    faulty = FaultyTransport(FAST, on_receive=fault)
    async with (
        running(tmp_path, [rollout], transport=faulty) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST, frame_elems=ELEMS // 4) as publisher,
    ):
        await publisher.joined(1)
        await publish(publisher, 1)
        await rollout.reached(1)
        before = state(protected.module)
        touch(trainer, 2)
        protected.lock()
        with pytest.raises(VoteError, match=name):
            await publish(publisher, 2)
        protected.unlock()
        require_equal(protected.module, before)
        touch(trainer, 3)
        if "closed" not in what:  # a closed link ends the subscriber
            await publish(publisher, 3)
            await rollout.reached(3)
            require_equal(protected.module, state(trainer))


async def test_an_attempt_of_another_run_is_not_even_answered(
    tmp_path: Path, trainer: Weights, protected: Protected
) -> None:
    rollout = Rollout(protected.module)
    faulty = FaultyTransport(FAST, on_receive=edited(Open, 2, identity=other_run))
    async with (
        running(tmp_path, [rollout], transport=faulty) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST, vote_timeout_s=0.3) as publisher,
    ):
        await publisher.joined(1)
        await publish(publisher, 1)
        await rollout.reached(1)
        touch(trainer, 2)
        protected.lock()
        with pytest.raises(VoteError, match="no vote"):
            await publish(publisher, 2)
        protected.unlock()
    assert "RunMismatch" in {event.error for event in rollout.events if isinstance(event, AttemptRefused)}


async def test_tampered_memory_is_noticed_before_the_first_write_and_healed_by_a_seed(
    tmp_path: Path, trainer: Weights, protected: Protected
) -> None:
    rollout = Rollout(protected.module)
    async with (
        running(tmp_path, [rollout]) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
    ):
        await publisher.joined(1)
        await publish(publisher, 1)
        await rollout.reached(1)
        set_bits(protected.module.w, np.array([2]), np.array([0x1234], np.uint16))  # version 2 changes it
        touch(trainer, 2)
        with pytest.raises(VoteError, match="BaseMismatch"):
            await publish(publisher, 2)
        await rollout.reached(1)
        touch(trainer, 3)
        await publish(publisher, 3)
        await rollout.reached(3)
        require_equal(protected.module, state(trainer))
    assert "trust_lost" in rollout.names()
    assert "seed" in rollout.kinds.values()


async def test_a_corrupt_baseline_is_found_before_a_member_is_blamed(
    tmp_path: Path, trainer: Weights, protected: Protected
) -> None:
    rollout = Rollout(protected.module)
    async with (
        running(tmp_path, [rollout]) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
    ):
        await publisher.joined(1)
        with callers(hooks.BASELINE_FOLD) as baselines:
            await publish(publisher, 1)
        await rollout.reached(1)
        touch(trainer, 2)
        baselines[0].base(0)[2] ^= 1  # an element that version 2 changes
        with pytest.raises(DigestMismatch, match="the baseline: 1 of 1 tensors differ: w"):
            await publish(publisher, 2)
        report = await publish(publisher, 3)
        assert report.is_anchor
        await rollout.reached(3)
        require_equal(protected.module, state(trainer))


@pytest.mark.parametrize("disorder", ["reversed", "doubled"])
async def test_order_and_repetition_of_chunks_do_not_matter(
    tmp_path: Path, trainer: Weights, protected: Protected, disorder: str
) -> None:
    kept: list[Message] = []

    def fault(message: Message) -> Iterable[Message]:
        if isinstance(message.header, Chunk) and disorder == "doubled":
            return (message, message)
        if isinstance(message.header, Chunk):
            kept.append(message)
            return ()
        if isinstance(message.header, Seal):
            late, kept[:] = kept[::-1], []
            return (message, *late)
        return (message,)

    rollout = Rollout(protected.module)
    async with (
        running(tmp_path, [rollout], transport=FaultyTransport(FAST, on_receive=fault)) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST, frame_elems=ELEMS // 4) as publisher,
    ):
        await publisher.joined(1)
        for version in (1, 2, 3):
            touch(trainer, version)
            await publish(publisher, version)
            await rollout.reached(version)
            require_equal(protected.module, state(trainer))


async def test_a_flipped_chunk_is_named_asked_for_again_and_then_right(
    tmp_path: Path, trainer: Weights, protected: Protected
) -> None:
    rollout = Rollout(protected.module)
    seen: list[dcr.Event] = []
    async with (
        running(tmp_path, [rollout], transport=FaultyTransport(FAST, on_receive=flip_one_chunk(2))) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST, observe=seen.append) as publisher,
    ):
        await publisher.joined(1)
        await publish(publisher, 1)
        await rollout.reached(1)
        touch(trainer, 2)
        report = await publish(publisher, 2)
        await rollout.reached(2)
        require_equal(protected.module, state(trainer))
    assert report.sent_again > 0
    refused = [event for event in rollout.events if isinstance(event, ChunkRefused | AttemptRefused)]
    assert [(event.frame, event.error) for event in refused] == [(0, "PayloadError")]
    assert [event.frames for event in seen if isinstance(event, ChunksWanted)] == [(0,)]
    assert [event.frame for event in seen if isinstance(event, ChunkSentAgain)] == [0]


async def test_a_sealed_version_that_is_not_committed_is_never_installed(
    tmp_path: Path, trainer: Weights, protected: Protected
) -> None:
    good, silent = Rollout(protected.module, "good"), Rollout(empty_like(trainer, torch.clone), "silent")
    mute = FaultyTransport(FAST, on_send=lambda message: () if isinstance(message.header, Ack) else (message,))
    url = f"local://{tmp_path}"
    async with (
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST, vote_timeout_s=0.5) as publisher,
        anyio.create_task_group() as group,
    ):
        await publish(publisher, 1)
        group.start_soon(good.run, url)
        group.start_soon(lambda: silent.run(url, transport=mute))
        await publisher.joined(2)
        touch(trainer, 2)
        protected.lock()
        with pytest.raises(VoteError, match="silent: no vote"):
            await publish(publisher, 2)
        assert "prepare_completed" in good.names()
        assert 2 not in good.kinds
        protected.unlock()
        touch(trainer, 3)
        await publish(publisher, 3)  # the silent member is not asked any more
        await good.reached(3)
        require_equal(protected.module, state(trainer))
        group.cancel_scope.cancel()


async def test_a_quorum_commits_without_the_members_that_do_not_answer(tmp_path: Path, trainer: Weights) -> None:
    good, silent = (Rollout(empty_like(trainer, torch.clone), name) for name in ("good", "silent"))
    mute = FaultyTransport(FAST, on_send=lambda message: () if isinstance(message.header, Ack) else (message,))
    url, options, seen = f"local://{tmp_path}", {"vote_timeout_s": 1.0, "quorum": 1}, list[dcr.Event]()
    async with (
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST, observe=seen.append, **options) as publisher,
        anyio.create_task_group() as group,
    ):
        group.start_soon(good.run, url)
        group.start_soon(lambda: silent.run(url, transport=mute))
        await publisher.joined(2)
        report = await publish(publisher, 1)
        assert report.members == {"good": "prepared", "silent": "no vote within 1 s"}
        late = [(event.version, event.member, event.timeout_s) for event in seen if isinstance(event, MemberTimedOut)]
        assert late == [(1, "silent", 1.0)]
        await silent.reached(1)  # it follows the head all the same
        require_equal(silent.module, state(trainer))
        group.cancel_scope.cancel()


@pytest.mark.parametrize("round_trips", [0, 1])
async def test_ends_that_are_cancelled_in_the_middle_close(tmp_path: Path, trainer: Weights, round_trips: int) -> None:
    for attempt in range(20):
        rollout = Rollout(empty_like(trainer))
        async with (
            running(tmp_path / str(attempt), [rollout]) as url,
            dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
        ):
            await publisher.joined(1)
            await publish(publisher, 1)
            if round_trips:
                await rollout.reached(1)


async def test_an_error_of_the_user_leaves_the_ends_as_it_is(tmp_path: Path, trainer: Weights) -> None:
    url = f"local://{tmp_path}"
    with pytest.raises(ZeroDivisionError):
        async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST):
            raise ZeroDivisionError
    loader = dcr.loader(empty_like(trainer))
    with pytest.raises(ZeroDivisionError):
        async with dcr.subscriber(url, loader=loader, member="m", transport=FAST):
            raise ZeroDivisionError


class Breaking(Through):
    """A loader that fails while it writes: at the n-th frame, and while it undoes, if asked."""

    def __init__(self, module: torch.nn.Module, *, at: int, times: int = 1, undo: bool = True) -> None:
        super().__init__(dcr.loader(module))
        self._at, self._times, self._undo = at, times, undo
        self._frames = 0

    def install(self, ready: Any) -> None:
        self._frames += 1
        super().install(ready)
        if self._frames > self._at and self._times:
            self._frames, self._times = 0, self._times - 1
            raise ReadBackError("a test says that memory did not keep its bits")

    def undo(self, ready: Any) -> None:
        if not self._undo:
            self._undo = True
            raise ReadBackError("a test says that the undo failed")
        super().undo(ready)


@pytest.mark.parametrize("at", range(4))
async def test_an_installation_that_fails_half_way_is_undone_and_may_be_tried_again(
    tmp_path: Path, trainer: Weights, at: int
) -> None:
    receiver = empty_like(trainer, torch.clone)
    url = f"local://{tmp_path}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST, frame_elems=ELEMS // 4) as publisher:
        await publish(publisher, 1)
        before = state(trainer)
        loader, seen = Breaking(receiver, at=at), list[dcr.Event]()
        async with dcr.subscriber(url, loader=loader, member="m", transport=FAST, observe=seen.append) as versions:
            assert versions.version == 1
            touch(trainer, 2)
            await publisher.joined(1)
            refit = await publisher.publish(2)
            version = await anext(versions)
            with pytest.raises(ReadBackError):
                await version.install()
            require_equal(receiver, before)
            assert versions.may_serve
            assert versions.version == 1
            await version.install()
            require_equal(receiver, state(trainer))
            assert said(await refit.installed()) == {"m": "installed"}
            with pytest.raises(StateError, match="installed already"):
                await version.install()
    failed = [
        (event.version, event.kind, event.live, event.error) for event in seen if isinstance(event, InstallFailed)
    ]
    assert failed == [(2, "delta", "undone", "ReadBackError")]
    assert [event.version for event in seen if isinstance(event, InstallCompleted)] == [2]


async def test_a_member_that_can_not_undo_is_poisoned_by_name_and_seeded_anew(tmp_path: Path, trainer: Weights) -> None:
    receiver = empty_like(trainer, torch.clone)
    url = f"local://{tmp_path}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST, frame_elems=ELEMS // 4) as publisher:
        await publish(publisher, 1)
        loader, seen = Breaking(receiver, at=2, undo=False), list[dcr.Event]()
        async with dcr.subscriber(url, loader=loader, member="m", transport=FAST, observe=seen.append) as versions:
            touch(trainer, 2)
            await publisher.joined(1)
            refit = await publisher.publish(2)
            version = await anext(versions)
            with pytest.raises(Poisoned):
                await version.install()
            assert not versions.may_serve
            assert "poisoned" in (await refit.installed())["m"].said
            seed = await anext(versions)
            assert (seed.kind, seed.number) == ("seed", 2)
            await seed.install()
            assert versions.may_serve
            require_equal(receiver, state(trainer))
    failed = [(event.version, event.live, event.error) for event in seen if isinstance(event, InstallFailed)]
    assert failed == [(2, "poisoned", "Poisoned")]
    assert [(event.version, event.kind) for event in seen if isinstance(event, InstallCompleted)] == [(2, "seed")]


async def test_a_version_must_be_installed_before_the_next_one_is_offered(tmp_path: Path, trainer: Weights) -> None:
    url = f"local://{tmp_path}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
        await publish(publisher, 1)
        loader = dcr.loader(empty_like(trainer))
        async with dcr.subscriber(url, loader=loader, member="m", transport=FAST) as versions:
            version = await anext(versions)
            with pytest.raises(StateError, match="not installed"):
                await anext(versions)
        with pytest.raises(StateError, match="ended"):
            await version.install()


async def test_a_later_publisher_fences_the_one_before(tmp_path: Path, trainer: Weights) -> None:
    url = f"local://{tmp_path}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as zombie:
        await publish(zombie, 1)
        async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
            touch(trainer, 2)
            with pytest.raises(Fenced):
                await publish(zombie, 2)
            with pytest.raises(StateError, match="cannot go on"):
                await zombie.publish(3)
            with pytest.raises(StateError, match="version 1 is not new"):
                await publisher.publish(1)
            report = await publish(publisher, 3)
            assert not report.is_anchor


async def test_a_restarted_trainer_goes_on_from_the_head_if_it_holds_its_bits(tmp_path: Path, trainer: Weights) -> None:
    rollout = Rollout(empty_like(trainer))
    async with running(tmp_path, [rollout]) as url:
        for start in (1, 3):
            async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
                await publisher.joined(1)
                for version in (start, start + 1):
                    touch(trainer, version)
                    held = state(trainer)
                    await publish(publisher, version)
                    await rollout.reached(version)
                    require_equal(rollout.module, held)


async def test_a_restarted_trainer_with_other_weights_publishes_an_anchor(tmp_path: Path, trainer: Weights) -> None:
    rollout = Rollout(empty_like(trainer))
    async with running(tmp_path, [rollout]) as url:
        async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
            await publish(publisher, 1)
            await rollout.reached(1)
        touch(trainer, 5)
        async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
            report = await publish(publisher)
            assert report.is_anchor
            assert report.version == 2
            await rollout.reached(2)
            require_equal(rollout.module, state(trainer))


async def test_two_runs_in_two_directories_never_mix(tmp_path: Path, trainer: Weights) -> None:
    other = empty_like(trainer)
    rollouts = [Rollout(empty_like(trainer)), Rollout(empty_like(trainer))]
    async with (
        running(tmp_path / "a", rollouts[:1]) as one,
        running(tmp_path / "b", rollouts[1:]) as two,
        dcr.publisher(one, source=dcr.source(trainer), transport=FAST) as first,
        dcr.publisher(two, source=dcr.source(other), transport=FAST) as second,
    ):
        await publish(first, 1)
        await publish(second, 1)
        for rollout in rollouts:
            await rollout.reached(1)
        require_equal(rollouts[0].module, state(trainer))
        require_equal(rollouts[1].module, state(other))


async def test_a_swap_without_an_answer_is_read_back(tmp_path: Path, trainer: Weights) -> None:
    class Forgetful(FaultyTransport):
        """Its ledger swaps, and then says that it failed."""

        def open(self, url: str) -> Any:
            return _Forgetting(FAST.open(url))

    class _Forgetting:
        def __init__(self, opened: Any) -> None:
            self._opened = opened

        async def __aenter__(self) -> Any:
            run = await self._opened.__aenter__()
            swap = run.ledger.swap

            async def forgetful(head: Any, tag: bytes) -> bool:
                swapped = await swap(head, tag)
                if head.identity is not None and head.identity.version == 2:
                    raise TimeoutError("no answer")
                return swapped

            run.ledger.swap = forgetful
            return run

        async def __aexit__(self, *error: Any) -> None:
            await self._opened.__aexit__(*error)

    url = f"local://{tmp_path}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=Forgetful(FAST)) as publisher:
        for version in (1, 2, 3):
            touch(trainer, version)
            await publish(publisher, version)
        rollout = Rollout(empty_like(trainer))
        async with running(tmp_path, [rollout]):
            await rollout.reached(3)
        require_equal(rollout.module, state(trainer))


async def test_an_error_of_a_version_that_nobody_asked_about_is_told_by_the_next_publish(
    tmp_path: Path, trainer: Weights
) -> None:
    url = f"local://{tmp_path}"
    fail = FaultyTransport(FAST, on_send=closed_at(Seal, 2))
    async with dcr.publisher(url, source=dcr.source(trainer), transport=fail) as publisher:
        await publisher.publish(1)
        await publisher.publish(2)
        with pytest.raises(IncompleteError):
            await publisher.publish(3)
        report = await publish(publisher, 3)
        assert report.version == 3


class Slow(Through):
    """A loader that waits, in its thread, before it writes."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(dcr.loader(module))

    def install(self, ready: Any) -> None:
        threading.Event().wait(0.2)
        super().install(ready)


class Moving(Through):
    """A loader whose engine replaces a weight as soon as it is bound."""

    def __init__(self, module: Weights) -> None:
        super().__init__(dcr.loader(module))
        self._module = module

    def bind(self, layout: Any) -> Any:
        bound = super().bind(layout)
        self._module._parameters["w"] = torch.nn.Parameter(self._module.w.detach().clone(), requires_grad=False)
        return bound


async def test_a_weight_that_is_replaced_while_it_is_bound_is_noticed(tmp_path: Path, trainer: Weights) -> None:
    url = f"local://{tmp_path}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
        await publish(publisher, 1)
        with pytest.raises(StorageRebound):
            async with dcr.subscriber(url, loader=Moving(empty_like(trainer)), member="m", transport=FAST) as versions:
                await (await anext(versions)).install()


@pytest.mark.parametrize("become", [torch._neg_view, torch.Tensor.to_sparse], ids=["lazy", "sparse"])
async def test_a_weight_that_has_no_memory_of_its_own_any_more_counts_as_replaced(
    tmp_path: Path, trainer: Weights, become: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    url, receiver = f"local://{tmp_path}", empty_like(trainer)
    async with (
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
        dcr.subscriber(url, loader=dcr.loader(receiver), member="m", transport=FAST) as versions,
    ):
        await publish(publisher, 1)
        version = await anext(versions)
        receiver._parameters["w"] = torch.nn.Parameter(become(receiver.w.detach().float()), requires_grad=False)
        with pytest.raises(StorageRebound, match=r"w: .* replaced since the loader was bound"):
            await version.install()
        assert not versions.may_serve


class Dying(Through):
    """A loader that cannot say where weights lie, once it is told so."""

    def __init__(self, module: Weights) -> None:
        super().__init__(dcr.loader(module))
        self.dead = False

    def fingerprint(self) -> bytes:
        if self.dead:
            raise RankError("rank 1 is gone")
        return super().fingerprint()


async def test_whoever_installs_learns_what_ended_the_subscriber(tmp_path: Path, trainer: Weights) -> None:
    url, loader = f"local://{tmp_path}", Dying(empty_like(trainer))
    async with (
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
        dcr.subscriber(url, loader=loader, member="m", transport=FAST) as versions,
    ):
        await publish(publisher, 1)
        await (await anext(versions)).install()
        await publish(publisher, 2)
        version = await anext(versions)
        loader.dead = True
        with pytest.raises(RankError, match="rank 1 is gone"):
            await version.install()


@pytest.mark.parametrize("how", ["scope", "native"])
async def test_no_weight_changes_after_a_cancelled_install_has_returned(
    tmp_path: Path, trainer: Weights, how: str
) -> None:
    receiver = empty_like(trainer, torch.clone)
    url = f"local://{tmp_path}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
        await publish(publisher, 1)
        async with dcr.subscriber(url, loader=Slow(receiver), member="m", transport=FAST) as versions:
            touch(trainer, 2)
            await publish(publisher, 2)
            version = await anext(versions)
            if how == "scope":
                with anyio.move_on_after(0.05):
                    await version.install()
            else:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await version.install()
            assert version.installed
            require_equal(receiver, state(trainer))


async def test_a_chunk_that_was_sent_again_leaves_a_version_that_joiners_can_read(
    tmp_path: Path, trainer: Weights
) -> None:
    rollout = Rollout(empty_like(trainer))
    async with (
        running(tmp_path, [rollout]) as url,
        dcr.publisher(
            url, source=dcr.source(trainer), transport=FaultyTransport(FAST, on_send=flip_one_chunk(1))
        ) as publisher,
    ):
        await publisher.joined(1)
        report = await publish(publisher, 1)
        assert report.sent_again
        await rollout.reached(1)
        require_equal(rollout.module, state(trainer))


async def test_what_others_put_into_the_run_directory_is_not_taken_for_the_runs(
    tmp_path: Path, trainer: Weights
) -> None:
    for folder in ("opens", "packs", "seals", "aborts", "live/members"):
        (tmp_path / folder / ".snapshot").mkdir(parents=True)
        (tmp_path / folder / ".DS_Store").write_bytes(b"x")
    rollout = Rollout(empty_like(trainer))
    async with (
        running(tmp_path, [rollout]) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
    ):
        await publisher.joined(1)
        await publish(publisher, 1)
        await rollout.reached(1)
        require_equal(rollout.module, state(trainer))


async def test_installations_are_heard_beside_an_anchor_and_a_later_version(tmp_path: Path, trainer: Weights) -> None:
    rollout = Rollout(empty_like(trainer))
    async with (
        running(tmp_path, [rollout]) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST, anchor_every=1) as publisher,
    ):
        await publisher.joined(1)
        refits = []
        for version in (1, 2, 3):
            touch(trainer, version)
            refits.append(await publisher.publish(version))
            await refits[-1].committed()
        with anyio.fail_after(10):
            for refit in refits:
                assert (await refit.installed())["rollout"].said in ("installed", "behind")
    with pytest.raises(StateError, match="was closed"):
        await publisher.publish(4)


async def test_a_negated_view_is_refused(trainer: Weights) -> None:
    module = torch.nn.Module()
    module.register_buffer("b", torch.zeros(3, dtype=torch.complex64).conj().imag)
    with pytest.raises(SchemaError, match="resolve_neg"):
        dcr.source(module)


async def test_a_head_that_cannot_be_moved_gives_the_version_up_and_the_next_one_goes_on(
    tmp_path: Path, trainer: Weights
) -> None:
    def full(head: Head) -> None:
        if head.identity is not None and head.identity.version == 2:
            raise OSError(28, "No space left on device")

    url, transport = f"local://{tmp_path}", FaultyTransport(FAST, on_swap=full)
    async with dcr.publisher(url, source=dcr.source(trainer), transport=transport) as publisher:
        await publish(publisher, 1)
        touch(trainer, 2)
        with pytest.raises(NotCommittedError, match="No space left"):
            await publish(publisher, 2)
        assert (await publish(publisher, 3)).version == 3
