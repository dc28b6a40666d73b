"""How the demo shows what it measured: a table that grows on a terminal, plain lines elsewhere."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from dcr.cli.demo.rows import Row


class Screen(Protocol):
    """Where the demo shows things."""

    def say(self, text: str) -> None:
        """A line of its own."""
        ...

    def phase(self, text: str) -> None:
        """What is going on now; replaces what was said before."""
        ...

    def row(self, row: Row) -> None:
        """One more version."""
        ...

    def settle(self) -> None:
        """No more rows and phases will come; what is said from now on stands below them."""
        ...


HEADINGS = {
    "version": 8,
    "density": 9,
    "wire": 12,
    "reduction": 11,
    "stages, busy ms": 50,
    "ship": 9,
    "overlap train": 15,
    "gen": 7,
    "pause": 10,
}
LEGEND = (
    "stages: time spent working, * the bottleneck. ship: from publish to the commit. overlap: share of that time in",
    "which a training step / a decode step was in progress (no step follows the last version). pause: the longest time",
    "for which a rollout could not decode, which is the install.",
)


def size(nbytes: float) -> str:
    """Bytes in the largest binary unit that keeps it above one."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def share(value: float | None) -> str:
    """A share in percent."""
    return "-" if value is None else f"{100 * value:.0f} %"


def cells(row: Row) -> tuple[str, ...]:
    """The texts of one row, in the order of the headings."""
    return (
        f"{row.version}",
        "anchor" if row.anchor else f"{100 * row.density:.2f} %",
        size(row.committed.wire_bytes),
        f"{row.reduction:.1f}x",
        " ".join(
            f"{stage.stage} {1000 * stage.busy_s:.0f}{'*' if stage.stage == row.bottleneck else ''}"
            for stage in row.stages
        ),
        f"{1000 * row.ship_s:.0f} ms",
        share(row.training_share),
        share(row.generating_share),
        "-" if row.anchor else f"{1000 * row.pause_s:.1f} ms",
    )


class Plain:
    """Lines of plain text, each written at once; phases are not shown, rows speak for themselves."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._headed = False

    def say(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def phase(self, text: str) -> None:
        del text

    def row(self, row: Row) -> None:
        if not self._headed:
            self._headed = True
            self.say(_line(tuple(HEADINGS)))
        self.say(_line(cells(row)))

    def settle(self) -> None:
        pass


def _line(texts: tuple[str, ...]) -> str:
    return "".join(text.rjust(width) for text, width in zip(texts, HEADINGS.values(), strict=True))


class Terminal:
    """A table that grows, with a spinner below it that names the phase."""

    def __init__(self, console: Console, live: Live) -> None:
        self._console, self._live = console, live
        self._table = Table(box=None, pad_edge=False)
        for heading in HEADINGS:
            self._table.add_column(heading, justify="right")
        self._spinner = Spinner("dots")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def phase(self, text: str) -> None:
        self._spinner.update(text=text)
        self._show()

    def row(self, row: Row) -> None:
        self._table.add_row(*cells(row))
        self._show()

    def _show(self) -> None:
        parts = [self._table] if self._table.row_count else []
        self._live.update(Group(*parts, self._spinner))

    def settle(self) -> None:
        self._live.update(self._table if self._table.row_count else "")  # without the spinner
        self._live.stop()


@contextlib.contextmanager
def opened(out: TextIO | None = None) -> Iterator[Screen]:
    """The screen that suits `out` (standard output by default)."""
    out = sys.stdout if out is None else out
    if not out.isatty():
        yield Plain(out)
        return
    console = Console(file=out)
    with Live(console=console, refresh_per_second=8) as live:
        terminal = Terminal(console, live)
        try:
            yield terminal
        finally:
            terminal.settle()
