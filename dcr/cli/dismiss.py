"""What `dcr dismiss` does: a member that is known to be dead is taken out of a run."""

from __future__ import annotations

from dcr import plugins
from dcr.cli.inspect import NoRun
from dcr.publish import dismissal


async def dismiss(url: str, member: str) -> tuple[int, list[str]]:
    """Leave a run in a member's name; how many lives of it there were, and the names of those that stay.

    Raises:
        NoRun: there is no head. PluginError, LocalError: the URL does not make sense.
    """
    async with plugins.transport_for(url).open(url) as run:
        if (await run.ledger.read())[0] is None:
            raise NoRun(f"no run at {url}: nothing has been published there, or the path is wrong")
        lives = await dismissal.dismiss(run, member)
        return lives, sorted(join.member.member for join in await run.members())
