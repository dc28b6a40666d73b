"""One process at a time writes in a checkpoint directory: a second one is refused by name, readers never are."""

from __future__ import annotations

import fcntl
import gc
import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from support.checkpoints import WEIGHTS, bound, install, install_and_die, load, new_version, own, save, write_all
from support.refits import FAST, Weights, publish

import dcr
from dcr.cli import verify
from dcr.errors import DcrError, LocalError, SchemaError, StateError, StorageRebound
from dcr.loaders import ownership
from dcr.loaders.checkpoint import INDEX, SINGLE, Entry, entries_of
from dcr.loaders.ownership import LOCK
from dcr.loaders.safetensors import SafetensorsLoader
from dcr.testing.conformance.bench import layout_of
from dcr.testing.loaders import Weight

SPAWN = multiprocessing.get_context("spawn")
FORKED = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(params=[1, 2], ids=["single file", "sharded"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    save(tmp_path / "checkpoint", WEIGHTS, request.param)
    return tmp_path / "checkpoint"


@contextmanager
def owning(folder: Path, *, frames: int = 0) -> Iterator[tuple[int, Connection]]:
    """Another process that owns a directory: its id, and a connection that lets it go."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=own, args=(folder, theirs, frames))
    process.start()
    try:
        yield ours.recv(), ours
    finally:
        process.kill()
        process.join()


def dirty(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if ".dcr" in path.name)


# ---------------------------------------------------------------------- a second writer


def test_a_second_process_is_refused_by_name_before_anything_is_changed(folder: Path) -> None:
    with owning(folder) as (process, _):
        before = {path.name: path.stat() for path in folder.iterdir()}
        with pytest.raises(StateError, match=rf"written by process {process} on {socket.gethostname()} \(since .*UTC"):
            bound(folder)
        assert {path.name: path.stat() for path in folder.iterdir()} == before


def test_a_second_process_does_not_touch_what_the_first_is_writing(folder: Path) -> None:
    with owning(folder, frames=2):
        writing = dirty(folder)
        with pytest.raises(StateError, match="is being written by"):
            bound(folder)
        assert dirty(folder) == writing


def test_a_second_loader_of_one_process_is_refused(folder: Path) -> None:
    loader = bound(folder)
    with pytest.raises(StateError, match="another loader of this process"):
        bound(folder)
    install(loader, new_version(loader, 1))


def test_a_binding_that_is_refused_holds_nothing_back(folder: Path) -> None:
    with pytest.raises(SchemaError):
        SafetensorsLoader(folder).bind(layout_of({"other": WEIGHTS["w0"]}))
    assert dirty(folder) == []
    bound(folder)


def test_a_directory_is_free_once_its_owner_has_let_go(folder: Path) -> None:
    with owning(folder) as (_, talk):
        talk.send(None)
        talk.close()
        for process in multiprocessing.active_children():
            process.join()
        assert dirty(folder) == []
        loader = bound(folder)
    install(loader, new_version(loader, 1))


def test_a_directory_is_free_once_its_owner_was_killed(folder: Path) -> None:
    process = SPAWN.Process(target=install_and_die, args=(folder, 2))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(dirty(folder)) >= 2
    loader = bound(folder)
    assert dirty(folder) == [LOCK]
    install(loader, new_version(loader, 1))


def test_a_loader_that_nobody_keeps_holds_nothing_back(folder: Path) -> None:
    bound(folder)
    gc.collect()
    assert dirty(folder) == []
    bound(folder)


def test_a_loader_can_be_bound_again_after_it_was_released(folder: Path) -> None:
    loader = bound(folder)
    for ready in new_version(loader, 1)[:1]:
        loader.install(ready)
    loader.release()
    assert dirty(folder) == []
    with pytest.raises(StateError, match="call bind first"):
        new_version(loader, 1)
    loader.bind(layout_of(WEIGHTS, frame_elems=50))
    before = load(folder)
    install(loader, new_version(loader, 1))
    assert load(folder) != before


def test_a_directory_that_cannot_be_written_in_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, WEIGHTS, 1)
    monkeypatch.setattr("dcr.loaders.ownership.LOCK", f"none/{LOCK}")
    with pytest.raises(LocalError, match="expected a checkpoint directory that this process can write in"):
        bound(tmp_path)


def test_a_file_system_without_locks_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(LocalError, match="without a lock two processes could mix two versions; mount"):
        bound(folder)


# ---------------------------------------------------------------------- a lock that did not hold: hosts that share none


def take_over(folder: Path) -> str:
    """What another host does, whose locks this one does not see."""
    owner = json.loads((folder / LOCK).read_text()) | {"host": "elsewhere", "process": 7, "nonce": "f" * 32}
    (folder / LOCK).write_text(json.dumps(owner))
    return (folder / LOCK).read_text()


@pytest.mark.parametrize("when", ["before", "while"])
def test_an_owner_that_was_replaced_puts_nothing_in_place(folder: Path, when: str) -> None:
    loader, before = bound(folder), load(folder)
    readies = new_version(loader, 1)
    if when == "while":
        for ready in readies:
            loader.install(ready)
    other = take_over(folder)
    with pytest.raises(StorageRebound, match=r"taken over by process 7 on elsewhere"):
        install(loader, readies)
    assert load(folder) == before
    for ready in readies:
        loader.undo(ready)
    loader.finalize()
    assert (load(folder), dirty(folder)) == (before, [LOCK])
    loader.release()
    assert (folder / LOCK).read_text() == other


def test_an_owner_whose_lock_was_removed_puts_nothing_in_place(folder: Path) -> None:
    loader, before = bound(folder), load(folder)
    (folder / LOCK).unlink()
    second = bound(folder)
    with pytest.raises(StorageRebound, match=f"taken over by process {os.getpid()}"):
        install(loader, new_version(loader, 1))
    assert load(folder) == before
    install(second, new_version(second, 2))


def test_two_owners_never_write_one_file(folder: Path) -> None:
    """Each sees its own lock; what the second puts in place is its own files and no others."""
    first = bound(folder)
    for ready in new_version(first, 1):
        first.install(ready)
    begun = {path.name for path in folder.iterdir()}
    (folder / LOCK).unlink()
    second = SafetensorsLoader(folder, fsync=False)
    second._sweep = lambda: None  # type: ignore[method-assign]
    second.bind(layout_of(WEIGHTS, frame_elems=50))
    for ready in new_version(second, 2):
        second.install(ready)
    ours, theirs = ({name for name in begun if name.endswith(".dcr")}, set(dirty(folder)) - begun - {LOCK})
    assert ours
    assert theirs
    assert not ours & theirs


def test_somebody_elses_checkpoint_is_not_replaced(folder: Path) -> None:
    """A trainer saves into the directory between an install and its end."""
    loader = bound(folder)
    for ready in new_version(loader, 1):
        loader.install(ready)
    name = INDEX if (folder / INDEX).exists() else SINGLE
    saved = (folder / name).read_bytes()
    (folder / "copy").write_bytes(saved)
    (folder / "copy").replace(folder / name)
    with pytest.raises(StorageRebound, match="somebody else has written to"):
        loader.finalize()
    assert (folder / name).read_bytes() == saved
    assert dirty(folder) == [LOCK]
    assert {path.name for path in folder.iterdir()} == {LOCK, name, *(entry.file for entry in entries_of(folder))}


# ---------------------------------------------------------------------- forked children


def forked(work: object) -> int:
    """The exit code of a forked child that does something."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()  # type: ignore[operator]
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@FORKED
def test_a_forked_child_is_refused_and_leaves_its_parents_files_alone(folder: Path) -> None:
    loader, before = bound(folder), load(folder)
    readies = new_version(loader, 1)
    for ready in readies[:1]:
        loader.install(ready)
    writing = {name: (folder / name).read_bytes() for name in dirty(folder)}

    def misuse() -> None:
        for call in (
            lambda: loader.install(readies[1]),
            lambda: loader.undo(readies[0]),
            loader.finalize,
            lambda: loader.bind(layout_of(WEIGHTS, frame_elems=50)),
        ):
            with pytest.raises(StateError, match=f"this is process {os.getpid()}, forked from it"):
                call()
        loader.release()

    assert forked(misuse) == 0
    assert {name: (folder / name).read_bytes() for name in dirty(folder)} == writing
    assert load(folder) == before
    for ready in readies[1:]:
        loader.install(ready)
    loader.finalize()
    assert load(folder) != before


@FORKED
def test_a_forked_child_does_not_hold_the_lock_of_a_parent_that_is_gone(folder: Path) -> None:
    (reader, writer), (began, begin) = os.pipe(), os.pipe()
    parent = os.fork()
    if parent == 0:
        owning = bound(folder)
        if os.fork() == 0:
            os.write(begin, b"x")
            os.close(writer)
            os.read(reader, 1)  # until it has been seen that the lock is free
            os._exit(0)
        os.read(began, 1)
        os.kill(os.getpid(), signal.SIGKILL)
        owning.release()
    try:
        os.waitpid(parent, 0)
        bound(folder)
    finally:
        for descriptor in (writer, reader, began, begin):
            os.close(descriptor)


# ---------------------------------------------------------------------- readers, and members of a run


def test_readers_are_not_held_back(folder: Path) -> None:
    before = load(folder)
    with owning(folder, frames=2):
        assert load(folder) == before


@pytest.fixture
def trainer() -> Weights:
    return Weights({name: torch.zeros(5, 8, dtype=torch.bfloat16) for name in WEIGHTS})


async def test_a_member_that_has_left_holds_nothing_back(folder: Path, trainer: Weights, tmp_path: Path) -> None:
    url = f"local://{tmp_path / 'run'}"
    first, second = (dcr.loader(folder, kind="safetensors") for _ in range(2))
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
        await publish(publisher, 1)
        for loader in (first, second, first):
            async with dcr.subscriber(url, loader=loader, member="disk", transport=FAST) as versions:
                with anyio.fail_after(20):
                    if versions.version is None:
                        await (await anext(versions)).install()
                assert LOCK in dirty(folder)
            assert dirty(folder) == []


async def follow(url: str, folder: Path) -> None:
    loader = dcr.loader(folder, kind="safetensors")
    async with dcr.subscriber(url, loader=loader, member="disk", transport=FAST) as versions:
        with anyio.fail_after(20):
            await (await anext(versions)).install()


async def test_a_second_member_of_one_directory_is_told_so(folder: Path, trainer: Weights, tmp_path: Path) -> None:
    url = f"local://{tmp_path / 'run'}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
        await publish(publisher, 1)
        with owning(folder) as (process, _):
            with pytest.raises(DcrError, match=f"is being written by process {process}"):
                await follow(url, folder)
            report = await verify.examine(url, folder)
    assert report.holds is None


def test_what_is_published_reaches_no_file_of_another_owner(tmp_path: Path) -> None:
    """The four tensors of two versions that two processes once mixed."""
    weights = {f"w{n}": Weight("float32", np.zeros(4, np.uint32)) for n in range(4)}
    save(tmp_path, weights, 2)
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=write_all, args=(tmp_path, weights, 1, theirs))
    process.start()
    assert ours.recv() == "installed"
    with pytest.raises(StateError):
        SafetensorsLoader(tmp_path).bind(layout_of(weights))
    ours.send(None)
    process.join()
    assert set(load(tmp_path).values()) == {np.full(4, 1, np.uint32).tobytes()}


@pytest.mark.parametrize("replacements", [1, verify.READS])
def test_a_reader_whose_files_are_removed_meanwhile_reads_again(
    tmp_path: Path, replacements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look at the index and the files that it names, two versions come: the second removes those files."""
    save(tmp_path, WEIGHTS, 2)
    loader, layout, read = bound(tmp_path), layout_of(WEIGHTS, frame_elems=50), entries_of
    steps = iter(range(1, 1 + replacements))

    def entries_of_a_while_ago(folder: Path) -> list[Entry]:
        entries = read(folder)
        if (step := next(steps, None)) is not None:
            for _ in range(2):
                install(loader, new_version(loader, step))
        return entries

    monkeypatch.setattr(verify, "entries_of", entries_of_a_while_ago)
    if replacements == verify.READS:
        with pytest.raises(StateError, match=f"was replaced {replacements} times while it was being read; try again"):
            verify.digest_of(tmp_path, layout, ())
    else:
        assert np.array_equal(verify.digest_of(tmp_path, layout, ()), loader.digest())
    assert next(steps, None) is None


def test_a_lock_file_that_went_before_it_was_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last owner removes it under its lock: whoever had opened it by then would hold the lock of no file."""
    lock, gone = ownership.lock, list[Path]()

    def lock_late(path: Path, descriptor: int) -> None:
        if not gone:
            gone.append(path)
            path.unlink()
        lock(path, descriptor)

    monkeypatch.setattr(ownership, "lock", lock_late)
    owner = ownership.claim(tmp_path)
    owner.require()
    with pytest.raises(StateError, match="another loader of this process"):
        ownership.claim(tmp_path)
    owner.release()
