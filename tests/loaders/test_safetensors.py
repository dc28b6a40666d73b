"""A checkpoint directory as a loader: whole versions only, byte for byte, whoever reads and whatever is killed."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from safetensors import safe_open
from support.checkpoints import WEIGHTS, bound, install, install_and_die, load, new_version, save
from support.refits import FAST, Weights, publish
from typer.testing import CliRunner

import dcr
from dcr import cli
from dcr.errors import SchemaError
from dcr.loaders.checkpoint import INDEX, SINGLE, entries_of
from dcr.loaders.safetensors import SafetensorsLoader
from dcr.memory.ready import Ready
from dcr.seams import Loader
from dcr.testing import LoaderTests
from dcr.testing.conformance.bench import layout_of
from dcr.testing.loaders import Weight


class Checkpoints(LoaderTests):
    """The kit, over directories."""

    dtypes = ("bfloat16", "float32", "int64", "uint8")
    shards = 1

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folders = (tmp_path / f"checkpoint-{n}" for n in range(100))

    def make(self, weights: Mapping[str, Weight]) -> tuple[Any, Loader]:
        folder = next(self.folders)
        save(folder, weights, self.shards)
        return folder, SafetensorsLoader(folder, fsync=False)

    def raw(self, engine: Path) -> Mapping[str, bytes]:
        return load(engine)

    def pointers(self, engine: Path) -> Mapping[str, int]:
        return {entry.spec.name: entry.start for entry in entries_of(engine)}

    def write(self, engine: Path, name: str, bits: Any) -> None:
        (entry,) = [entry for entry in entries_of(engine) if entry.spec.name == name]
        with (engine / entry.file).open("r+b") as file:
            file.seek(entry.start)
            file.write(bits.tobytes())

    def move(self, engine: Path, name: str) -> None:
        (entry,) = [entry for entry in entries_of(engine) if entry.spec.name == name]
        copy = engine / "copy"
        copy.write_bytes((engine / entry.file).read_bytes())
        copy.replace(engine / entry.file)


class TestSingleFile(Checkpoints):
    pass


class TestSharded(Checkpoints):
    shards = 3


# ---------------------------------------------------------------------- one version or the next


@pytest.fixture(params=[1, 2], ids=["single file", "sharded"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    save(tmp_path / "checkpoint", WEIGHTS, request.param)
    return tmp_path / "checkpoint"


def test_nothing_is_seen_of_a_version_until_all_of_it_is_there(folder: Path) -> None:
    loader, before = bound(folder), load(folder)
    readies = new_version(loader, 1)
    for ready in readies:
        loader.install(ready)
        assert load(folder) == before
    loader.finalize()
    assert load(folder) != before


def test_a_reader_that_has_read_the_index_can_finish(folder: Path) -> None:
    before = load(folder)
    index = folder / INDEX
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {SINGLE}
    opened = {file: (folder / file).open("rb") for file in files}
    loader = bound(folder)
    install(loader, new_version(loader, 1))
    assert all((folder / file).exists() for file in files)
    (folder / "old").mkdir()
    for file, handle in opened.items():
        (folder / "old" / file).write_bytes(handle.read())
        handle.close()
    if index.exists():
        (folder / "old" / INDEX).write_text(json.dumps({"weight_map": _where(folder, files)}))
    assert load(folder / "old") == before


def _where(folder: Path, files: set[str]) -> dict[str, str]:
    found = {}
    for file in files:
        with safe_open(folder / file, "np") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    return found


def test_no_more_than_two_versions_of_files_are_kept(folder: Path) -> None:
    loader = bound(folder)
    counts = []
    for step in range(1, 5):
        install(loader, new_version(loader, step))
        counts.append(len(list(folder.iterdir())))
    assert counts == counts[:1] * 4


def test_shards_that_a_version_does_not_touch_keep_their_files(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save(folder, WEIGHTS, 4)
    loader = bound(folder)
    before = {entry.spec.name: (entry.file, (folder / entry.file).stat().st_ino) for entry in entries_of(folder)}
    install(loader, [ready for ready in new_version(loader, 1) if ready.frame == 0])
    after = {entry.spec.name: (entry.file, (folder / entry.file).stat().st_ino) for entry in entries_of(folder)}
    regions = layout_of(WEIGHTS, frame_elems=50).frames[0].spec.regions
    touched = {layout_of(WEIGHTS, frame_elems=50).schema.tensors[region.tensor].name for region in regions}
    assert {name for name in before if before[name] != after[name]} == touched
    assert len(touched) < len(WEIGHTS)


@pytest.mark.parametrize("at", range(8))
def test_a_failure_at_any_rename_leaves_the_version_before_or_the_new_one(
    folder: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, before = bound(folder), load(folder)
    readies = new_version(loader, 1)
    after = {name: bytes(_moved(readies, name, held)) for name, held in before.items()}
    calls = iter(range(100))
    replace = Path.replace

    def failing(self: Path, target: Path) -> Path:
        if next(calls) == at:
            raise OSError("no space left, says a test")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    for ready in readies:
        loader.install(ready)
    try:
        loader.finalize()
    except OSError:
        assert load(folder) == before
        monkeypatch.undo()
        for ready in reversed(readies):
            loader.undo(ready)
        loader.finalize()
        assert load(folder) == before
        install(loader, readies)
    assert load(folder) == after


def _moved(readies: list[Ready], name: str, held: bytes) -> bytes:
    """What a tensor should hold after a version."""
    layout = layout_of(WEIGHTS, frame_elems=50)
    bits = np.frombuffer(held, np.uint16).copy()
    for ready in readies:
        first = 0
        for region in layout.frames[ready.frame].spec.regions:
            for start, length in region.runs().tolist():
                if layout.schema.tensors[region.tensor].name == name:
                    write = ready.writes[0]
                    inside = (write.positions >= first) & (write.positions < first + length)
                    bits[start + write.positions[inside] - first] = write.bits[inside]
                first += length
    return bits.tobytes()


@pytest.mark.parametrize("frames", [1, 4])
def test_a_process_that_is_killed_while_it_installs_leaves_the_version_before(folder: Path, frames: int) -> None:
    before = load(folder)
    process = multiprocessing.get_context("spawn").Process(target=install_and_die, args=(folder, frames))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert load(folder) == before
    loader = bound(folder)
    assert not [path for path in folder.iterdir() if path.name.endswith(".dcr")]
    install(loader, new_version(loader, 1))
    assert load(folder) != before


# ---------------------------------------------------------------------- what is refused


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=f"holds neither {SINGLE} nor {INDEX}"):
        bound(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:20],
        lambda data: (1 << 40).to_bytes(8, "little") + data[8:],
        lambda data: data[:-2],
        lambda data: data.replace(b'"BF16"', b'"BF17"'),
        lambda data: data.replace(b'"data_offsets"', b'"data_offset_"'),
        lambda data: data.replace(b"[5,8]", b"[5,9]"),
        lambda data: data.replace(b'"shape":[5,8]', b'"shape":"5,8"'),
    ],
    ids=["empty", "cut", "huge header", "short data", "dtype", "no offsets", "shape", "shape of another kind"],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: Any) -> None:
    save(tmp_path, WEIGHTS, 1)
    (tmp_path / SINGLE).write_bytes(damage((tmp_path / SINGLE).read_bytes()))
    with pytest.raises(SchemaError, match=SINGLE):
        bound(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        '{"weight_map": {"w0": 3}}',
        '{"weight_map": {"w0": "../model-00001-of-00002.safetensors"}}',
        '{"weight_map": {"w0": "model-00002-of-00002.safetensors"}}',
    ],
    ids=["no json", "a list", "no file", "outside", "another file"],
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path, index: str) -> None:
    save(tmp_path, WEIGHTS, 2)
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(SchemaError):
        bound(tmp_path)


def test_a_tensor_that_is_not_published_can_be_waived(tmp_path: Path) -> None:
    more = Weight("float32", np.zeros(3, np.uint32))
    save(tmp_path, WEIGHTS | {"rope.inv_freq": more}, 1)
    with pytest.raises(SchemaError, match=r"rope\.inv_freq is in the checkpoint and not published"):
        bound(tmp_path)
    bound(tmp_path, waive=["*.inv_freq"])


# ---------------------------------------------------------------------- as a member of a run


@pytest.fixture
def trainer() -> Weights:
    return Weights(
        {f"w{n}": torch.randn(40, 8, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3)}
    )


async def test_a_directory_follows_a_run_and_is_verified(tmp_path: Path, trainer: Weights) -> None:
    checkpoint, url = tmp_path / "checkpoint", f"local://{tmp_path / 'run'}"
    checkpoint.mkdir()
    save(checkpoint, {name: Weight("bfloat16", np.zeros((40, 8), np.uint16)) for name in trainer.state_dict()}, 1)
    loader = dcr.loader(checkpoint, kind="safetensors")
    runner = CliRunner()
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
        await publish(publisher, 1)
        async with dcr.subscriber(url, loader=loader, member="disk", transport=FAST) as versions:
            for version in (1, 2, 3):
                if version > 1:
                    with torch.no_grad():
                        trainer.w1[version] += 1
                    await publisher.joined(1)
                    await publisher.publish(version)
                with anyio.fail_after(20):
                    await (await anext(versions)).install()
                assert load(checkpoint) == {
                    name: tensor.view(torch.uint8).numpy().tobytes() for name, tensor in trainer.state_dict().items()
                }
    verify = ["verify", url, "--checkpoint", str(checkpoint)]
    same = await anyio.to_thread.run_sync(runner.invoke, cli.main, verify)
    assert (same.exit_code, "is version 3" in same.output) == (0, True), same.output
    Checkpoints().write(checkpoint, "w1", trainer.state_dict()["w1"].view(torch.int16).numpy().view(np.uint16) ^ 1)
    other = await anyio.to_thread.run_sync(runner.invoke, cli.main, [*verify, "--json"])
    assert (other.exit_code, json.loads(other.output)["differing"]) == (1, ["w1"])


def test_a_checkpoint_cannot_be_verified_without_a_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.main, ["verify", f"local://{tmp_path / 'none'}", "--checkpoint", str(tmp_path)])
    assert result.exit_code == 2
