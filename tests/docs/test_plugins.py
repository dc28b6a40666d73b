"""Plugins as somebody else's distributions: installed, found, tested with the kit, and together a refit.

An installation here is what pip leaves behind of a pure Python distribution: its modules, and a dist-info folder with
the metadata and the entry points of its pyproject.toml. So no build backend and no network are needed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, PathDistribution, version
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import torch
from support.bent import kit_tests
from support.refits import FAST, Rollout, Weights, empty_like, publish, require_equal, running, set_bits, state

import dcr
import dcr.testing
from dcr import plugins
from dcr.testing.conformance.setting import Setting

PLUGINS = Path(__file__).parents[1] / "plugins"
PYTEST = ["-m", "pytest", "-q", "-p", "no:asyncio", "-p", "no:cacheprovider", "--rootdir", "."]
DISTRIBUTIONS = sorted(path.parent for path in PLUGINS.glob("*/pyproject.toml"))


def project(distribution: Path) -> dict[str, Any]:
    """The [project] table of a pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((distribution / "pyproject.toml").read_text())["project"]
    return table


def modules(distribution: Path) -> list[str]:
    """The modules that a distribution ships."""
    names: list[str] = tomllib.loads((distribution / "pyproject.toml").read_text())["tool"]["setuptools"]["py-modules"]
    return names


def install(distribution: Path, site: Path) -> Path:
    """Put a distribution into a folder of its own on the way to sys.path; its dist-info."""
    about = project(distribution)
    info = site / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
        + "".join(f"Requires-Dist: {requirement}\n" for requirement in about["dependencies"])
    )
    points = about.get("entry-points", {})
    lines = [f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in one.items()) for group, one in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for module in modules(distribution):
        shutil.copy(distribution / f"{module}.py", site)
    return info


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all distributions installed."""
    folder = tmp_path_factory.mktemp("site")
    for distribution in DISTRIBUTIONS:
        install(distribution, folder)
    return folder


def run(command: list[str], site: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A program in an environment where the distributions are installed; warnings are errors."""
    return subprocess.run(
        [sys.executable, "-P", "-W", "error", *command],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )


# ---------------------------------------------------------------------- what they say


def test_there_is_one_of_each_kind() -> None:
    groups = [group for one in DISTRIBUTIONS for group in project(one).get("entry-points", {"no entry point": {}})]
    assert sorted(groups) == ["dcr.codecs", "dcr.loaders", "dcr.transports", "no entry point"]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda path: path.name)
def test_a_distribution_names_groups_that_dcr_knows(distribution: Path) -> None:
    assert project(distribution).get("entry-points", {}).keys() <= set(plugins.GROUPS)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda path: path.name)
def test_an_installation_has_the_entry_points_of_its_project(distribution: Path, tmp_path: Path) -> None:
    """As pip would leave them: this is what makes the other tests here worth something."""
    found = PathDistribution(install(distribution, tmp_path)).entry_points
    wanted = project(distribution).get("entry-points", {})
    assert {(point.group, point.name, point.value) for point in found} == {
        (group, name, at) for group, points in wanted.items() for name, at in points.items()
    }


def has_backend() -> bool:
    """Whether the build backend of these distributions is installed; before this version it needed a second package."""
    try:
        return int(version("setuptools").partition(".")[0]) >= 71
    except PackageNotFoundError:
        return False


@pytest.mark.skipif(not has_backend(), reason="no setuptools of version 71 or later is installed")
def test_pip_leaves_the_same(site: Path, tmp_path: Path) -> None:
    name = "dcr_sqlite-0.1.0.dist-info"
    shutil.copytree(PLUGINS / "dcr-sqlite", tmp_path / "source")
    quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    ran = subprocess.run(
        [sys.executable, *quiet, "--no-build-isolation", "--target", str(tmp_path / "site"), str(tmp_path / "source")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    ours, pips = (PathDistribution(folder / name) for folder in (site, tmp_path / "site"))
    assert ours.metadata["Name"] == pips.metadata["Name"]
    assert set(ours.entry_points) == set(pips.entry_points)
    assert (tmp_path / "site" / "dcr_sqlite.py").read_bytes() == (site / "dcr_sqlite.py").read_bytes()


# ---------------------------------------------------------------------- what they do


def test_they_are_listed_beside_the_built_in_ones(site: Path, tmp_path: Path) -> None:
    ran = run(["-c", "from dcr.cli import main; main()", "plugins"], site, tmp_path)
    assert ran.returncode == 0, ran.stderr
    for name in ("sqlite", "deflate", "arrays", "dcr-sqlite", "dcr-deflate", "dcr-arrays", "local", "gaps", "module"):
        assert name in ran.stdout


def test_together_they_carry_a_refit_bit_exactly(site: Path, tmp_path: Path) -> None:
    ran = run([str(PLUGINS / "refit.py"), f"sqlite://{tmp_path}/run.db"], site, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("every byte is the trainer's") == 4, ran.stdout


def test_each_passes_the_kit_of_its_kind(site: Path, tmp_path: Path) -> None:
    """As its author runs it: without a plugin of pytest, and with no configuration."""
    for path in PLUGINS.glob("*/test_*.py"):
        shutil.copy(path, tmp_path)
    ran = run(
        ["-m", "pytest", "-q", "-p", "no:asyncio", "-p", "no:cacheprovider", "--rootdir", ".", "."], site, tmp_path
    )
    assert ran.returncode == 0, ran.stdout
    assert " passed" in ran.stdout.splitlines()[-1]


def test_a_distribution_that_is_broken_does_not_pass_the_kit(site: Path, tmp_path: Path) -> None:
    """A compare-and-set that does not compare."""
    broken = tmp_path / "site"
    shutil.copytree(site, broken)
    source = (broken / "dcr_sqlite.py").read_text()
    (broken / "dcr_sqlite.py").write_text(
        source.replace('"insert or ignore" if absent', '"insert or replace" if absent')
    )
    shutil.copy(PLUGINS / "dcr-sqlite" / "test_sqlite.py", tmp_path)
    ran = run([*PYTEST, "test_sqlite.py", "-k", "stale_tag"], broken, tmp_path)
    assert ran.returncode == 1, ran.stdout
    assert "test_a_stale_tag_is_refused" in ran.stdout
    assert "a swap with a stale tag succeeded" in ran.stdout


# ---------------------------------------------------------------------- a stage of one's own


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await anyio.lowlevel.checkpoint()


@pytest.fixture
def throttle(site: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stage of dcr-throttle at a thousand bytes a second, on a clock of its own."""
    monkeypatch.syspath_prepend(site)
    from dcr_throttle import Throttle

    clock = Time()
    made = Throttle(1000.0, clock=clock, sleep=clock.sleep)
    made.clock = clock
    return made


async def test_a_stage_between_compress_and_transfer_sees_every_chunk(throttle: Any, tmp_path: Path) -> None:
    trainer = Weights({"w": torch.zeros(5000, dtype=torch.bfloat16)})
    rollout = Rollout(empty_like(trainer))
    async with (
        running(tmp_path, [rollout]) as url,
        dcr.publisher(
            url, source=dcr.source(trainer), transport=FAST, frame_elems=500, stages=[throttle.stage]
        ) as publisher,
    ):
        await publisher.joined(1)
        for version in (1, 2, 3):
            set_bits(trainer.w, np.arange(version, 5000, 250), np.full(20, version, np.uint16))
            report = await publish(publisher, version)
            seen = [(frame, nbytes) for at, frame, nbytes in throttle.seen if at == version]
            assert sorted(frame for frame, _ in seen) == list(range(10))
            assert (len(seen), sum(nbytes for _, nbytes in seen)) == (report.chunks, report.wire_bytes)
            await rollout.reached(version)
            require_equal(rollout.module, state(trainer))


async def test_the_stage_lets_no_more_than_its_rate_through(throttle: Any, tmp_path: Path) -> None:
    trainer = Weights({"w": torch.zeros(5000, dtype=torch.bfloat16)})
    set_bits(trainer.w, np.arange(5000), np.random.default_rng(0).integers(0, 1 << 16, 5000, np.uint16))
    options: dict[str, Any] = {"transport": FAST, "frame_elems": 500, "stages": [throttle.stage], "codec": "raw"}
    async with dcr.publisher(f"local://{tmp_path}", source=dcr.source(trainer), **options) as publisher:
        await publish(publisher, 1)
    before_the_last = sum(nbytes for _, _, nbytes in throttle.seen[:-1])
    assert throttle.clock.now_s == pytest.approx(before_the_last / 1000.0)


async def test_a_stage_that_drops_a_chunk_fails_its_version(tmp_path: Path) -> None:
    @dcr.stage
    def lose_one(parcel: Any) -> Any:
        return dcr.DROP if parcel.chunk.frame == 1 else parcel

    trainer = Weights({"w": torch.zeros(2000, dtype=torch.bfloat16)})
    options: dict[str, Any] = {"transport": FAST, "frame_elems": 500, "stages": [lose_one]}
    async with dcr.publisher(f"local://{tmp_path}", source=dcr.source(trainer), **options) as publisher:
        with pytest.raises(dcr.DcrError, match=r"dropped the chunks of frames \[1\]"):
            await publish(publisher, 1)


# ---------------------------------------------------------------------- the page about them

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
QUOTED = re.findall(r"^<!-- (part|all) of (\S+) -->\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
EXAMPLES = re.findall(r"(?<! -->\n)^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_every_code_block_of_the_page_is_quoted_or_run() -> None:
    assert PAGE.count("\n```") == 2 * (len(QUOTED) + len(EXAMPLES))
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("name", sorted({name for kind, name, _ in QUOTED if kind == "all"}))
def test_a_file_is_quoted_word_for_word(name: str) -> None:
    (quoted,) = [text for kind, of, text in QUOTED if (kind, of) == ("all", name)]
    assert quoted == (PLUGINS / name).read_text()


@pytest.mark.parametrize("name", sorted({name for kind, name, _ in QUOTED if kind == "part"}))
def test_the_parts_of_a_file_are_all_of_it_in_order(name: str) -> None:
    parts = [text.strip("\n") for kind, of, text in QUOTED if (kind, of) == ("part", name)]
    assert "\n\n\n".join(parts) + "\n" == (PLUGINS / name).read_text()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda path: path.name)
def test_the_page_quotes_every_distribution(distribution: Path) -> None:
    quoted = {name for _, name, _ in QUOTED}
    assert {f"{distribution.name}/{module}.py" for module in modules(distribution)} <= quoted


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda source: source.splitlines()[0].removeprefix("# "))
def test_an_example_of_the_page_runs_as_it_stands(example: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", example],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip(), "an example shows something"


def test_every_test_that_the_page_names_is_in_the_kit() -> None:
    """`a_join_...` and `..._is_heard_...` are parts of names; every one fits some test, and every test fits one."""
    section = PAGE.split("## What each guarantee is for", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    patterns = [name.replace("...", "*") for row in rows for name in re.findall(r"`([^`]+)`", row)]
    tests = {name.removeprefix("test_") for name in kit_tests(dcr.testing.TransportTests)}
    assert [pattern for pattern in patterns if not any(fnmatchcase(test, pattern) for test in tests)] == []
    assert [test for test in sorted(tests) if not any(fnmatchcase(test, pattern) for pattern in patterns)] == []


def test_the_page_says_what_can_be_set() -> None:
    settings = {name for name in Setting.__annotations__ if not name.startswith("_")}
    table = PAGE.split("| attribute | default |", 1)[1].split("\n\n", 1)[0]
    assert set(re.findall(r"`(\w+)`[,|]? ", table)) >= settings
