"""Writes the diagrams of docs/protocol.md from the tables that both ends are driven by, between the page's markers.

`python docs/tools/machines.py` writes the page anew; with `--check [PAGE]` it says whether that, or another page, is
what it should be.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from house import differing, written

from dcr.protocol.machines import ATTEMPT, MAY_SERVE, MEMBER

PAGE = Path(__file__).parents[1] / "protocol.md"
Table = Mapping[Any, Mapping[Any, Any]]


def diagram(table: Table, *, marked: frozenset[enum.Enum] = frozenset()) -> str:
    """A table as a state diagram of mermaid; marked: states that are drawn as those in which a member may serve."""
    states = list(table)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {states[0].name}"]
    for state, events in table.items():
        lines += [f"    {state.name} --> {after.name}: {event.value}" for event, after in events.items()]
        if not events:
            lines.append(f"    {state.name} --> [*]")
    if marked:
        lines.append("    classDef serves fill:#d5ecd4,color:#000")
        lines.append(f"    class {','.join(state.name for state in states if state in marked)} serves")
    return "\n".join([*lines, "```"])


def main() -> None:
    parts = {"an attempt": diagram(ATTEMPT), "a member": diagram(MEMBER, marked=MAY_SERVE)}
    page = (Path(sys.argv[2]) if len(sys.argv) > 2 else PAGE).read_text()
    new = written(page, parts)
    if sys.argv[1:2] != ["--check"]:
        PAGE.write_text(new)
    elif lines := differing(page, new):
        sys.exit("\n".join([*lines, "docs/protocol.md differs from the code: python docs/tools/machines.py writes it"]))


if __name__ == "__main__":
    main()
