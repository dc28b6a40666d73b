"""`dcr inspect` on real runs: what it shows, and what its exit code says."""

from __future__ import annotations

import json
from pathlib import Path

import anyio
import numpy as np
import torch
from support.refits import FAST, Rollout, Weights, empty_like, publish, running, set_bits
from typer.testing import CliRunner

import dcr
from dcr.cli import main
from dcr.cli.inspect import Inspection, MemberRow, render


def run_of(folder: Path, *, versions: int = 3, anchor_every: int | None = None) -> str:
    """A run of some versions that change one element each; its URL."""
    trainer = Weights({"w": torch.zeros(100, dtype=torch.bfloat16), "n": torch.zeros(4, dtype=torch.int64)})
    url = f"local://{folder}"

    async def flow() -> None:
        source = dcr.source(trainer)
        async with dcr.publisher(url, source=source, transport=FAST, anchor_every=anchor_every) as publisher:
            for version in range(versions):
                set_bits(trainer.w, np.array([version]), np.array([7], np.uint16))
                await publish(publisher)

    anyio.run(flow)
    return url


def inspected(url: str) -> tuple[int, dict]:
    result = CliRunner().invoke(main, ["inspect", url, "--json"])
    return result.exit_code, json.loads(result.stdout) if result.stdout else {}


def test_versions_are_shown_from_the_head_to_the_anchor(tmp_path: Path) -> None:
    code, report = inspected(run_of(tmp_path))
    assert code == 0
    assert report["head"] == 2
    assert [(row["version"], row["base"], row["changed"]) for row in report["versions"]] == [
        (2, 1, 1),
        (1, 0, 1),
        (0, None, 104),
    ]
    assert report["versions"][0]["density"] == 1 / 104
    assert report["versions"][-1]["dense_nbytes"] == 232


def test_the_table_names_the_anchor_and_the_head(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", run_of(tmp_path)])
    assert result.exit_code == 0
    assert "version 2" in result.stdout
    assert "anchor" in result.stdout


def test_a_missing_piece_is_a_problem_and_named(tmp_path: Path) -> None:
    url = run_of(tmp_path)
    (tmp_path / "seals" / "000000000001.000001.0001").unlink()
    code, report = inspected(url)
    assert code == 1
    assert "seals/000000000001.000001.0001 is missing" in report["problem"]


def test_versions_that_were_removed_behind_an_anchor_are_no_problem(tmp_path: Path) -> None:
    code, report = inspected(run_of(tmp_path, versions=9, anchor_every=2))
    assert code == 0
    assert report["problem"] is None


def test_where_there_is_no_run_nothing_is_made(tmp_path: Path) -> None:
    code, _ = inspected(f"local://{tmp_path}/none")
    assert code == 2
    assert not (tmp_path / "none").exists()


async def test_members_and_what_they_hold_are_shown(tmp_path: Path) -> None:
    trainer = Weights({"w": torch.zeros(9, dtype=torch.bfloat16)})
    rollout = Rollout(empty_like(trainer), "engine-7")
    async with (
        running(tmp_path, [rollout]) as url,
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
    ):
        await publisher.joined(1)
        refit = await publisher.publish(5)
        await refit.installed()
        with anyio.fail_after(5):
            while True:
                code, report = await anyio.to_thread.run_sync(inspected, url)
                if [(one["member"], one["holds"]) for one in report["members"]] == [("engine-7", 5)]:
                    break
                await anyio.sleep(0.01)
    assert code == 0


def test_names_and_problems_cannot_break_a_line_or_colour_it() -> None:
    rows = (MemberRow("a\nmember   forged holds 7\x1b[31m", "1", None),)
    text = render(Inspection("local:///r", "run\x1b[2J", 1, None, 0, 0, (), rows, "a name\nhead     version 9"))
    assert text.splitlines()[0] == r"run      run\x1b[2J at local:///r, term 1"
    assert text.splitlines()[-2:] == [
        r"member   a\nmember   forged holds 7\x1b[31m holds nothing",
        r"PROBLEM  a name\nhead     version 9",
    ]
