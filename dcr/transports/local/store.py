"""Sealed attempts, as their directories."""

from __future__ import annotations

import shutil
from collections.abc import AsyncGenerator, Set
from pathlib import Path

import anyio.to_thread

from dcr.transports.local.files import TEMPORARY, attempt_folders, chunk_names, folder_name, load, order
from dcr.transports.local.listing import Listing
from dcr.wire import Identity, Message, Open


class FileStore:
    """Committed versions, as their attempts' directories."""

    def __init__(self, root: Path) -> None:
        self._attempts = root / "attempts"
        self._listing = Listing(self._attempts)

    async def describe(self, identity: Identity) -> tuple[Message, Message]:
        """See `dcr.seams.Store.describe`."""
        folder = self._attempts / folder_name(identity)
        opened = await anyio.to_thread.run_sync(load, folder / "open")
        sealed = await anyio.to_thread.run_sync(load, folder / "seal")
        return opened, sealed

    async def read(self, identity: Identity) -> AsyncGenerator[Message, None]:
        """See `dcr.seams.Store.read`."""
        folder = self._attempts / folder_name(identity)
        yield await anyio.to_thread.run_sync(load, folder / "open")
        for name in await anyio.to_thread.run_sync(chunk_names, folder):
            yield await anyio.to_thread.run_sync(load, folder / name)
        yield await anyio.to_thread.run_sync(load, folder / "seal")

    async def attempts(self, version: int) -> list[Identity]:
        """See `dcr.seams.Store.attempts`."""
        return await anyio.to_thread.run_sync(self._attempts_at, version)

    async def newest(self) -> int:
        """See `dcr.seams.Store.newest`."""
        return await anyio.to_thread.run_sync(self._listing.newest)

    async def prune(self, keep: Set[Identity], below: int) -> None:
        """See `dcr.seams.Store.prune`."""
        await anyio.to_thread.run_sync(self._prune, {folder_name(identity) for identity in keep}, below)

    def _attempts_at(self, version: int) -> list[Identity]:
        found = []
        for folder in self._listing.at(version):
            if (folder / "seal").exists() and not (folder / "abort").exists():
                header = load(folder / "open").header
                assert isinstance(header, Open)
                found.append(header.identity)
        return found

    def _prune(self, keep: Set[str], below: int) -> None:
        folders = sorted(attempt_folders(self._attempts), key=lambda path: order(path.name))
        for folder in folders:
            if order(folder.name)[0] < below and folder.name not in keep:
                if folder == folders[-1]:
                    _empty(folder)  # its name says which number was the last
                    continue
                gone = folder.with_name(folder.name + TEMPORARY)
                folder.rename(gone)
                shutil.rmtree(gone)


def _empty(folder: Path) -> None:
    """Remove what is in a folder, its opening first: then the rest is of no attempt any more."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name != "open"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
