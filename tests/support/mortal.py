"""Worker processes that die while they install; processes that are started anew import this module by its name."""

from __future__ import annotations

import os
import signal
import socket

from dcr.engines import workers
from dcr.memory.ready import Ready
from support.tensor_parallel import SPECS, ToyRank, values


class Mortal(ToyRank):
    """A rank whose process is killed while it installs the n-th frame: the frame is written by half."""

    dies_at = -1

    def install(self, ready: Ready) -> None:
        if self.installs == self.dies_at:
            (write, *_) = ready.writes
            half = len(write.bits) // 2
            self.held[write.home].memory[write.positions[:half]] = write.bits[:half]
            os.kill(os.getpid(), signal.SIGKILL)
        super().install(ready)


def work(address: str, rank: int, world: int, dies_at: int) -> None:
    """A worker process: an engine rank with the weights of version 1, and its server."""
    mortal = Mortal(rank, world)
    mortal.dies_at = dies_at
    mortal.fill(SPECS, values(1))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        workers.serve(connection, mortal, key=b"key", rank=rank, world=world)
