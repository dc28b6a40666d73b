"""What may import what: the pure rooms stay pure, imports point up the map, nothing starts torch before it is needed.

The rooms are read as source (ast), so an import hidden in a function counts too.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

import dcr

PACKAGE = Path(dcr.__file__).parent
README = Path(__file__).parent.parent / "README.md"
TESTS = Path(__file__).parent
APART = {"support", "simulation", "engines", "plugins", "fuzz", "native", "typing"}

# Every module of these folders is pure, because of where it is.
PURE_ROOMS = ("layout", "kernels", "codecs", "protocol", "memory")
PURE = {"numpy", "msgspec"}
# Besides each other, the errors and what all may use. `kernels` picks from the compiled module, and asks the build
# whether there is one.
ALSO = {"codecs": {"zstandard"}, "kernels": {"dcr._native", "dcr._build"}}
MOST_NAMES = 28
MOST_LINES = 400
# Standard modules with a file, a clock, a process, a thread or chance behind them.
IMPURE = {
    *("asyncio", "concurrent", "ctypes", "datetime", "fcntl", "glob", "importlib", "io", "mmap", "multiprocessing"),
    *("os", "pathlib", "pickle", "queue", "random", "secrets", "select", "selectors", "shutil", "signal", "socket"),
    *("sqlite3", "ssl", "subprocess", "tempfile", "threading", "time", "urllib", "uuid"),
}
# Only these may name torch, and only when somebody asks for them.
TORCH_ROOMS = (
    *("probing", "sources", "loaders", "engines", "cli/demo"),
    *("testing/engines", "testing/hostile", "testing/stateful"),
)


def _sources(room: str) -> list[Path]:
    """The files of one room, which is a module or a folder."""
    module, folder = PACKAGE / f"{room}.py", PACKAGE / room
    return [module] if module.exists() else sorted(folder.rglob("*.py"))


def _imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, absolute; a name taken from `dcr` itself counts as a room."""
    package = ["dcr", *path.relative_to(PACKAGE).parent.parts]
    for node in _executed(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names) if module == "dcr" else (module,)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker reads."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            yield from _executed(node)


def _module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def _graph() -> dict[str, set[str]]:
    """Which modules of dcr each one imports; a name taken from a folder is its module, where it is one."""
    paths = {_module(path): path for path in PACKAGE.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        names: set[str] = set()
        for node in _executed(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {f"{alias.name}." for alias in node.names}
        graph[module] = {name if name in paths else name.rpartition(".")[0] for name in names} & paths.keys()
    # The compiled module and what the build says stand outside the rooms.
    return {module: imported - {module, "dcr"} for module, imported in graph.items()}


def _rows() -> dict[str, int]:
    """Where in the README's map each module or folder stands, counted from its top."""
    section = README.read_text().split("## Map of the files", 1)[1].split("\n## ", 1)[0]
    lines = enumerate(section.splitlines())
    return {path: row for row, line in lines for path in re.findall(r"`(dcr/[\w/.]+)`", line)}


def _row(rows: dict[str, int], module: str) -> int:
    """A room's row; the package's own where it is a public name that is imported."""
    room = "/".join(module.split(".")[:2])
    return rows.get(f"{room}.py") or rows.get(f"{room}/") or rows["dcr/__init__.py"]


def _allowed(room: str, module: str) -> bool:
    top, _, rest = module.partition(".")
    extra = ALSO.get(room, set())
    if top == "dcr":
        return rest.partition(".")[0] in ("errors", *PURE_ROOMS) or module in extra
    return top in PURE | extra or (top in sys.stdlib_module_names and top not in IMPURE)


@pytest.mark.parametrize("room", PURE_ROOMS)
def test_a_pure_room_imports_only_pure_things(room: str) -> None:
    files = _sources(room)
    assert len(files) > 1, f"the room dcr/{room} does not exist"
    assert {module for path in files for module in _imports(path) if not _allowed(room, module)} == set()


def test_every_room_stands_in_the_map() -> None:
    rows = _rows()
    rooms = {f"dcr/{path.name}/" for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    files = {f"dcr/{path.name}" for path in PACKAGE.glob("*.py")} - {"dcr/_build.py"}
    assert rooms | files == set(rows)


def test_imports_point_up_the_map() -> None:
    """So there is no cycle of rooms, and who reads from the top meets nothing that was not explained."""
    rows, down = _rows(), set()
    for path in PACKAGE.rglob("*.py"):
        room = _module(path)
        modules = {module for module in _imports(path) if module.partition(".")[0] == "dcr"} - ALSO["kernels"]
        down |= {(room, module) for module in modules if _row(rows, module) > _row(rows, room)}
    assert down == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = _graph()
    while ends := {module for module, imported in graph.items() if not imported}:
        graph = {module: imported - ends for module, imported in graph.items() if module not in ends}
    assert graph == {}


def test_the_package_has_few_names_and_short_files() -> None:
    names = {path.name for path in PACKAGE.iterdir()} - {"__pycache__", "_build.py"}
    assert len({name for name in names if not name.endswith(".so")}) <= MOST_NAMES
    lines = {_module(path): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {module: count for module, count in lines.items() if count > MOST_LINES} == {}


def test_only_sources_and_loaders_name_torch() -> None:
    exempt = {path for room in TORCH_ROOMS for path in _sources(room)}
    others = set(PACKAGE.rglob("*.py")) - exempt
    assert {
        str(p.relative_to(PACKAGE)) for p in others if any(m.partition(".")[0] == "torch" for m in _imports(p))
    } == set()


@pytest.mark.parametrize(
    ("source", "modules"),
    [
        ("import torch.nn", {"torch.nn"}),
        ("def f():\n    from torch import nn", {"torch"}),
        ("from dcr import errors, plugins", {"dcr.errors", "dcr.plugins"}),
        ("from .errors import DcrError", {"dcr.errors"}),
    ],
)
def test_the_reader_of_imports_sees_every_form(source: str, modules: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: source)
    assert set(_imports(PACKAGE / "anything.py")) == modules


@pytest.mark.parametrize("module", ["torch", "anyio", "time", "os.path", "dcr.publish", "zstandard", "dcr._native"])
def test_the_rule_for_pure_rooms_denies(module: str) -> None:
    assert not _allowed("layout", module)


@pytest.mark.parametrize(
    "command",
    [
        ["-c", "import dcr"],
        ["-c", "import dcr.transports.local"],
        ["-c", "import dcr.blocking"],
        ["-c", "from dcr.cli import main; main()", "--help"],
        ["-c", "from dcr.cli import main; main()", "plugins"],
        ["-c", "from dcr.cli import main; main()", "doctor"],
    ],
    ids=" ".join,
)
def test_starts_without_torch(command: list[str], tmp_path: Path) -> None:
    """In a directory of its own, so that the installed package is what is imported."""
    process = subprocess.run(
        [sys.executable, "-X", "importtime", *command], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr
    imported = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert "dcr" in imported
    assert {name for name in imported if name.partition(".")[0] == "torch"} == set()


def test_the_package_under_test_is_the_installed_one() -> None:
    """pytest puts no checkout on sys.path here; an editable install says so in its metadata."""
    installed = distribution("dcr")
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    editable = origin.get("dir_info", {}).get("editable", False)
    assert editable or Path(str(installed.locate_file("dcr"))) == PACKAGE


def test_what_tests_share_is_imported_from_its_package() -> None:
    """A module beside the tests would be imported under a name of nobody's, such as `rows`, from any test's folder."""
    beside = {path for path in TESTS.rglob("*.py") if path.relative_to(TESTS).parts[0] not in APART}
    assert {str(path) for path in beside if not re.fullmatch(r"test_\w+\.py|conftest\.py", path.name)} == set()
