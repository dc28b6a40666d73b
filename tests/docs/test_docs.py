"""Every block of the pages under docs/ runs as it stands: as a program of its own, in an empty directory.

A Python block that begins with a comment `# name.py: ...` is a file that the shell block behind it runs. Blocks of
docs/plugins.md are quoted from tests/plugins, and run by tests/docs/test_plugins.py; bytes of docs/format.md are
compared by tests/codecs/test_format.py; what needs vLLM is run where it is installed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
ELSEWHERE = {"plugins.md", "format.md"}
# How a console script of an environment is called where only its interpreter is known.
SCRIPTS = {"torchrun": "-m torch.distributed.run", "dcr": '-c "from dcr.cli import main; main()"'}


class Block(NamedTuple):
    page: str
    language: str
    text: str

    @property
    def title(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0].removeprefix('# ')}"

    @property
    def file(self) -> str | None:
        """The name under which a shell block expects it."""
        named = re.match(r"# (\w+\.py): ", self.text)
        return named[1] if named else None


BLOCKS = [
    Block(page.name, language, text)
    for page in sorted(DOCS.glob("*.md"))
    if page.name not in ELSEWHERE
    for language, text in BLOCK.findall(page.read_text())
]
PYTHON = [block for block in BLOCKS if block.language == "python" and "vllm" not in block.text]
PROGRAMS = [block for block in PYTHON if block.file is None]
SHELL = [block for block in BLOCKS if block.language == "sh" and "engines/bin" not in block.text]


def run(command: list[str], folder: Path) -> None:
    ran = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip(), "an example shows something"


def test_every_block_says_what_it_is() -> None:
    """So that none escapes the tests here: a language, and of a program, a title."""
    assert [block.title for block in BLOCKS if block.language not in ("python", "sh", "toml", "mermaid")] == []
    assert [block.title for block in PYTHON if not block.text.startswith("# ")] == []


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.title)
def test_a_program_of_a_page_runs_as_it_stands(block: Block, tmp_path: Path) -> None:
    if "transformers" in block.text:
        pytest.importorskip("transformers")
    (tmp_path / "example.py").write_text(block.text)
    run([sys.executable, "-W", "error", "example.py"], tmp_path)


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.title)
def test_the_commands_of_a_page_run_as_they_stand(block: Block, tmp_path: Path) -> None:
    for file in (other for other in PYTHON if other.page == block.page and other.file):
        (tmp_path / str(file.file)).write_text(file.text)
    interpreter = shlex.quote(sys.executable)
    functions = [f'{name}() {{ {interpreter} {how} "$@"; }}' for name, how in SCRIPTS.items()]
    run(["bash", "-euc", "\n".join([*functions, block.text])], tmp_path)


def test_each_file_of_a_page_is_run_by_its_commands() -> None:
    files = {(block.page, block.file) for block in PYTHON if block.file}
    assert files
    assert files == {(block.page, file) for block in SHELL for file in re.findall(r"\b\w+\.py\b", block.text)}
