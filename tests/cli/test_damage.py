"""`dcr inspect` and `dcr verify` over damaged runs and checkpoints: one line that says what is wrong, no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.refits import FAST, Weights, publish, set_bits
from typer.testing import CliRunner

import dcr
from dcr.cli import main
from dcr.loaders.checkpoint import INDEX, SINGLE

CLI = CliRunner()
NAMES = {
    "plain": torch.bfloat16,
    "λ.weight": torch.float8_e5m2,
    "a b\n\x1b[31mred": torch.int64,
    "{braces} %s": torch.complex64,
}


def weights(seed: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((3, 4), seed).to(dtype) for name, dtype in NAMES.items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three versions, and a checkpoint of the last."""
    folder = tmp_path_factory.mktemp("made")
    trainer = Weights({"w": torch.zeros(100, dtype=torch.bfloat16), "n": torch.zeros(4, dtype=torch.int64)})

    async def flow() -> None:
        async with dcr.publisher(f"local://{folder}/run", source=dcr.source(trainer), transport=FAST) as publisher:
            for version in range(3):
                set_bits(trainer.w, np.array([version]), np.array([7], np.uint16))
                await publish(publisher)

    anyio.run(flow)
    (folder / "checkpoint").mkdir()
    save_file(dict(trainer.state_dict()), folder / "checkpoint" / SINGLE)
    return folder


def call(*arguments: str) -> tuple[int, str]:
    """The exit code and what was said; whatever is raised but an exit fails the test."""
    result = CLI.invoke(main, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result.exit_code, result.output


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scribble(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 0x5A for byte in path.read_bytes()))


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "removed": Path.unlink,
    "cut": cut,
    "emptied": lambda path: path.write_bytes(b"") and None,
    "scribbled": scribble,
    "a folder": replace_by_folder,
}


def files(made: Path) -> Iterator[Path]:
    return (path for path in sorted(made.joinpath("run").rglob("*")) if path.is_file())


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_with_any_damaged_file_is_told_of_or_shown(made: Path, tmp_path: Path, damage: str) -> None:
    codes: dict[str, set[int]] = {"inspect": set(), "verify": set()}
    for number, path in enumerate(files(made)):
        copy = tmp_path / str(number)
        shutil.copytree(made, copy)
        DAMAGES[damage](copy / path.relative_to(made))
        for command, more in (("inspect", []), ("verify", ["--checkpoint", str(copy / "checkpoint")])):
            code, said = call(command, f"local://{copy}/run", *more)
            assert said.strip()
            codes[command].add(code)
    assert codes["inspect"] > {0}, "some files are hints, and others are noticed"
    assert codes["verify"] > {0}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_told_of_by_name(made: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(made / "checkpoint", tmp_path / "checkpoint")
    DAMAGES[damage](tmp_path / "checkpoint" / SINGLE)
    code, said = call("verify", f"local://{made}/run", "--checkpoint", str(tmp_path / "checkpoint"))
    assert code == 2
    assert SINGLE in said


def test_a_missing_shard_is_told_of_by_name(made: Path, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "gone.safetensors"}}))
    code, said = call("verify", f"local://{made}/run", "--checkpoint", str(tmp_path))
    assert (code, "gone.safetensors is missing" in said) == (2, True)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_url_of_what_is_no_directory_is_told_of(made: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("no run")
    more = ["--checkpoint", str(made / "checkpoint")] if command == "verify" else []
    code, said = call(command, f"local://{tmp_path}/file", *more)
    assert code == 2
    assert f"{tmp_path}/file" in said
    assert said.startswith(f"dcr {command}: ")


def test_odd_names_and_dtypes_are_shown_on_one_line(tmp_path: Path) -> None:
    url = f"local://{tmp_path}/run"

    async def flow() -> None:
        source = dcr.source(weights(1), kind="probe", export=lambda tensors: tensors.items())
        async with dcr.publisher(url, source=source, transport=FAST) as publisher:
            await publish(publisher)

    anyio.run(flow)
    (tmp_path / "checkpoint").mkdir()
    for seed, code in ((1, 0), (2, 1)):
        save_file(weights(seed), tmp_path / "checkpoint" / SINGLE)
        assert call("verify", url, "--checkpoint", str(tmp_path / "checkpoint"))[0] == code
    _, said = call("verify", url, "--checkpoint", str(tmp_path / "checkpoint"))
    assert said.count("\n") == 1
    assert said.strip().isprintable()
