"""Members that are known to be gone: their places in a run are given up for them."""

from __future__ import annotations

from dcr.protocol.wire import Leave, Message
from dcr.seams import Run


async def dismiss(run: Run, member: str) -> int:
    """Leave a run in the name of every life of a member; how many there were.

    Raises:
        RemoteError, OSError: the run could not be told.
    """
    lives = [join.member for join in await run.members() if join.member.member == member]
    for ref in lives:
        async with run.member(ref) as link:
            await link.send(Message(Leave(ref)))
    return len(lives)
