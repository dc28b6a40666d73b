"""The `dcr` command: a demonstration, what is installed, and what is slow. Starting it imports no torch."""

from __future__ import annotations

import sys
from enum import StrEnum
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import typer

from dcr.cli.text import printable
from dcr.errors import DcrError, LocalError

main = typer.Typer(
    name="dcr",
    help="Keep rollout engines bit-identical to a trainer by moving only the bits that changed.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Fault(StrEnum):
    """What `dcr demo --inject-fault` damages, to show that it is noticed."""

    weights = "weights"
    wire = "wire"


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dcr {version('dcr')}")
        raise typer.Exit


@main.callback()
def start(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Keep rollout engines bit-identical to a trainer by moving only the bits that changed."""


@main.command("demo")
def run_demo(
    refits: Annotated[int, typer.Option(min=1, help="How many versions to publish and install.")] = 12,
    inject_fault: Annotated[
        Fault | None, typer.Option(help="Flip a bit of live weights or on the wire: it must be noticed.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the model and of its training.")] = 0,
) -> None:
    """Train a small model, keep two engines bit-identical to it, and compare every byte at the end."""
    from dcr.cli import demo

    try:
        code = demo.run(refits=refits, inject_fault=inject_fault.value if inject_fault else None, seed=seed)
    except DcrError as error:
        typer.echo(f"dcr demo: {type(error).__name__}: {error}", err=True)
        code = 2  # 1 means that the audit found a difference
    raise typer.Exit(code)


@main.command("plugins")
def list_plugins(as_json: AsJson = False) -> None:
    """List the installed transports, loaders, sources and codecs, without importing any."""
    from dcr.plugins import GROUPS, installed

    found = {group: installed(group) for group in GROUPS}
    if as_json:
        _print_json({group: [plugin._asdict() for plugin in plugins] for group, plugins in found.items()})
        return
    for group, plugins in found.items():
        typer.echo(group)
        for plugin in plugins:
            typer.echo(f"  {plugin.name:<16} {plugin.value:<40} from {plugin.distribution}")
        if not plugins:
            typer.echo("  (none)")


@main.command("doctor")
def run_doctor(as_json: AsJson = False) -> None:
    """Say which kernels run here, what is slow, and why. Fails only if something cannot work at all."""
    from dcr.cli.doctor import examine, render

    report = examine()
    if as_json:
        _print_json(report)
    else:
        typer.echo(render(report))
    raise typer.Exit(0 if report.healthy else 1)


@main.command("inspect")
def inspect_run(
    url: Annotated[str, typer.Argument(metavar="RUN", help="The run's URL, such as local:///path/to/run.")],
    as_json: AsJson = False,
) -> None:
    """Show a run's versions, their density, bytes and digests, and its members.

    Exit code: 0 if every version up to the head can be read; 1 if a stored piece is missing or damaged; 2 if there is
    no such run.
    """
    from dcr.cli.inspect import NoRun, examine, render

    try:
        report = anyio.run(examine, url)
    except (DcrError, OSError) as error:
        raise _failure("inspect", error, 2 if isinstance(error, NoRun | LocalError | OSError) else 1) from None
    if as_json:
        _print_json(report)
    else:
        typer.echo(render(report))
    raise typer.Exit(0 if report.problem is None else 1)


@main.command("dismiss")
def dismiss_member(
    url: Annotated[str, typer.Argument(metavar="RUN", help="The run's URL, such as local:///path/to/run.")],
    member: Annotated[str, typer.Argument(help="The name of a member that is known to be dead.")],
) -> None:
    """Take a dead member out of a run, so that no vote waits for it.

    Exit code: 0 if it was counted until now; 1 if no member of this name was; 2 if there is no such run.
    """
    from dcr.cli.dismiss import dismiss

    try:
        lives, others = anyio.run(dismiss, url, member)
    except (DcrError, OSError) as error:
        raise _failure("dismiss", error, 2) from None
    if lives:
        typer.echo(f"{printable(member)} takes no part in {url} any more")
        return
    there = ", ".join(map(printable, others)) or "none"
    typer.echo(f"dcr dismiss: no member of {url} is called {printable(member)}; there are: {there}", err=True)
    raise typer.Exit(1)


@main.command("verify")
def verify_checkpoint(
    url: Annotated[str, typer.Argument(metavar="RUN", help="The run's URL, such as local:///path/to/run.")],
    checkpoint: Annotated[Path, typer.Option(help="A directory of safetensors files.")],
    waive: Annotated[list[str] | None, typer.Option(help="Tensors of the checkpoint that are not published.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a checkpoint on disk is the run's newest version, byte for byte.

    Exit code: 0 if it is; 1 if it is another version or none; 2 if there is no such run or checkpoint.
    """
    from dcr.cli.verify import examine, render

    try:
        report = anyio.run(partial(examine, waive=tuple(waive or ())), url, checkpoint)
    except (DcrError, OSError) as error:
        raise _failure("verify", error, 2) from None
    if as_json:
        _print_json(report)
    else:
        typer.echo(render(report))
    raise typer.Exit(1 if report.differing else 0)


def _failure(command: str, error: Exception, code: int) -> typer.Exit:
    """Say what went wrong, in one line; the exit to raise."""
    typer.echo(f"dcr {command}: {printable(str(error))}", err=True)
    return typer.Exit(code)


def _print_json(document: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")
