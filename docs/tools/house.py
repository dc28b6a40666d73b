"""Writes what docs/architecture.md says of the code: the picture of the rooms, and the walks, between its markers.

    python docs/tools/house.py                   write the page anew
    python docs/tools/house.py --check [PAGE]    say whether it, or another, is what it should be

The picture is made of the imports in dcr/, read as source: those within functions count, and those that only a type
checker reads do not. The walks are made of one traced publish and install, see walk.py beside this file.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from walk import Chunk, Walk, between, trace, walks

import dcr

PACKAGE = Path(dcr.__file__).parent
PAGE = Path(__file__).parents[1] / "architecture.md"
PURE = ("layout", "kernels", "codecs", "protocol", "memory")
# Every room may use these, and every end shows its user these: their arrows would hide the others.
NOT_DRAWN = ("errors", "__init__", "_build")
ENDS = ("trainer", "member")
MARK = "<!-- {} {}: written by docs/tools -->"


def rooms() -> dict[str, set[str]]:
    """Each room of dcr/, which is a folder or a module, and the rooms that it imports from."""
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    graph: dict[str, set[str]] = {name: set() for name in names}
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        imported = {name.split(".")[1] for name in _imports(ast.parse(path.read_text())) if name.startswith("dcr.")}
        graph[room] |= (imported & names) - {room}
    return graph


def _imports(tree: ast.AST) -> Iterator[str]:
    """The modules that are imported when the code runs, absolute."""
    if isinstance(tree, ast.If) and isinstance(tree.test, ast.Name) and tree.test.id == "TYPE_CHECKING":
        return
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom) and tree.module:
        yield tree.module
        yield from (f"{tree.module}.{alias.name}" for alias in tree.names)
    for node in ast.iter_child_nodes(tree):
        yield from _imports(node)


def picture(graph: Mapping[str, set[str]]) -> str:
    """The rooms as a diagram. An arrow that follows from others (A to B to C, so A to C) is left out."""
    drawn = {room: targets - set(NOT_DRAWN) for room, targets in graph.items() if room not in NOT_DRAWN}
    arrows = [
        f"    {room} --> {target}"
        for room in sorted(drawn)
        for target in sorted(drawn[room])
        if not any(target in reachable(drawn, other) for other in drawn[room] - {target})
    ]
    pure = ["    subgraph pure", *(f"        {room}" for room in PURE), "    end"]
    return "\n".join(["```mermaid", "flowchart TD", *pure, *arrows, "```"])


def reachable(graph: Mapping[str, set[str]], room: str) -> set[str]:
    """The rooms that a room needs, by itself or through others."""
    reached: set[str] = set()
    ahead = [room]
    while ahead:
        new = graph.get(ahead.pop(), set()) - reached
        reached |= new
        ahead += new
    return reached


def walked() -> dict[str, str]:
    """By marker: the table of counts, and a table of files for each walk."""
    calls = trace()
    paths = walks(calls)
    rows = ["| path of | hops | files | files before the first compared byte |", "|---|---|---|---|"]
    for name, path in paths.items():
        before = path.before if name == "a weight, at the trainer" else ""
        rows.append(f"| {name} | {len(path.hops)} | {len(path.files)} | {before} |")
    return {"counts": "\n".join(rows), "hops by room": _by_room(paths)} | {
        name: _steps(path) for name, path in {**paths, "a chunk": between(calls, Chunk)}.items()
    }


def _by_room(paths: Mapping[str, Walk]) -> str:
    """How many hops of a weight's path lead into each room, most at the trainer first."""
    ends = [Counter(call.file.split("/")[0] for call in paths[f"a weight, at the {end}"].hops) for end in ENDS]
    rows = [f"| `{room}` | {ends[0][room]} | {ends[1][room]} |" for room in ends[0] + ends[1]]
    rows.sort(key=lambda row: [-int(cell) for cell in re.findall(r"\d+", row)])
    return "\n".join(["| hops into | at the trainer | at the member |", "|---|---|---|", *rows])


def _steps(path: Walk) -> str:
    rows = [
        f"| `{file}` | `{function.replace('.<locals>', '')}` | {_purpose(file)} |"
        for file, function in path.files.items()
    ]
    return "\n".join(["| file of `dcr/` | entered by | what it is |", "|---|---|---|", *rows])


def _purpose(file: str) -> str:
    """What a module says of itself: its docstring's first sentence."""
    text = ast.get_docstring(ast.parse((PACKAGE / file).read_text())) or ""
    return re.split(r"\.\s", text.replace("\n", " "), maxsplit=1)[0].rstrip(".").replace("|", "or")


def written(page: str, parts: Mapping[str, str]) -> str:
    """The page with these parts between their markers; raises KeyError for a marker that it lacks."""
    for name, text in parts.items():
        begin, end = MARK.format("begin", name), MARK.format("end", name)
        if begin not in page or end not in page:
            raise KeyError(f"{PAGE.name} has no markers {begin} and {end}")
        before, rest = page.split(begin, 1)
        page = f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end, 1)[1]}"
    return page


def differing(page: str, new: str) -> list[str]:
    """The lines that only one of the two has. Which of two threads' calls came first may vary from run to run."""
    rows = [{re.sub(r"^(\| `[\w/.]+` \|) `.*?` \|", r"\1", line) for line in text.splitlines()} for text in (page, new)]
    return sorted(rows[0] ^ rows[1])


def main() -> None:
    page = (Path(sys.argv[2]) if len(sys.argv) > 2 else PAGE).read_text()
    new = written(page, {"rooms": picture(rooms())} | walked())
    if sys.argv[1:2] != ["--check"]:
        PAGE.write_text(new)
    elif lines := differing(page, new):
        sys.exit(
            "\n".join([*lines, "docs/architecture.md differs from the code: python docs/tools/house.py writes it"])
        )


if __name__ == "__main__":
    main()
