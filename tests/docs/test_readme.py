"""What the README says is run as it stands: every Python block, and the set-up commands by way of `.ci/run`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```$", README, re.M | re.S) for line in block.splitlines()]
CI = (ROOT / ".ci" / "run").read_text()


def test_the_readme_has_an_example_for_each_kind_of_user() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda source: source.splitlines()[0].removeprefix("# "))
def test_an_example_runs_as_it_stands(example: str, tmp_path: Path) -> None:
    """As a script in an empty directory; a warning is an error there too."""
    _run(example, tmp_path)


def test_an_example_that_names_a_directory_runs_again(tmp_path: Path) -> None:
    named = [example for example in EXAMPLES if "tempfile.gettempdir" in example]
    assert named
    for example in 2 * named:
        _run(example, tmp_path)


def _run(example: str, folder: Path) -> None:
    script = folder / "example.py"
    script.write_text(example)
    process = subprocess.run(
        [sys.executable, "-W", "error", script.name],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip(), "an example shows something"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda source: source.splitlines()[0].removeprefix("# "))
def test_an_example_is_short(example: str) -> None:
    assert len([line for line in example.splitlines() if line.strip()]) <= 25


@pytest.mark.parametrize("name", ["TEST", "DEMO", "PLAIN"])
def test_the_set_up_commands_are_those_that_ci_runs(name: str) -> None:
    (run,) = re.findall(rf'^{name}="(.*)"$', CI, flags=re.MULTILINE)
    assert run in COMMANDS
    assert re.search(rf'"\${name}\b', CI.split(f'{name}="', 1)[1]), f"{name} is stated but never run"


def test_every_set_up_command_of_the_readme_is_run_by_ci() -> None:
    pip = [command for command in COMMANDS if command.startswith("pip install")]
    assert len(pip) == len(set(pip)) == 3
    assert [command for command in pip if f'="{command}"' not in CI] == []


def test_the_map_names_every_module_and_nothing_else() -> None:
    """The map's first column, `path`, against the files of the package."""
    section = README.split("## Map of the files", 1)[1].split("\n## ", 1)[0]
    mapped = set(re.findall(r"`(dcr/[\w/.]+)`", section))
    missing = {path for path in mapped if not (ROOT / path).exists()}
    assert missing == set()
    files = {path.relative_to(ROOT) for path in (ROOT / "dcr").rglob("*.py") if path.name != "_build.py"}
    folders = {Path(path) for path in mapped if path.endswith("/")}
    unmapped = {str(p) for p in files if str(p) not in mapped and not folders.intersection(p.parents)}
    assert unmapped == set()
