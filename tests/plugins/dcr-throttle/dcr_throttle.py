"""A stage between compress and transfer: chunks leave at no more than so many bytes a second."""

import time
from collections.abc import Awaitable, Callable

import anyio

import dcr
from dcr.stages.compress import Parcel


class Throttle:
    """`dcr.publisher(..., stages=[throttle.stage])`. seen: version, frame and size of every chunk that went through."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.seen: list[tuple[int, int, int]] = []
        self.stage = dcr.stage(name="throttle")(self._pace)
        self._clock, self._sleep = clock, sleep
        self._due_s = 0.0

    async def _pace(self, parcel: Parcel) -> Parcel:
        """Wait until the chunks before this one have had their time."""
        now_s = self._clock()
        await self._sleep(max(0.0, self._due_s - now_s))
        self._due_s = max(now_s, self._due_s) + parcel.nbytes / self.bytes_per_s
        self.seen.append((parcel.chunk.identity.version, parcel.chunk.frame, parcel.nbytes))
        return parcel
