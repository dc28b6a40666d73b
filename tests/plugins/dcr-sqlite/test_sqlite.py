"""The conformance kit over this transport: `pytest test_sqlite.py`."""

import sqlite3
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from dcr_sqlite import THIS, SqliteTransport

import dcr.testing


class TestSqlite(dcr.testing.TransportTests):
    transport = SqliteTransport(poll_s=0.001, fsync=False)

    @pytest.fixture(autouse=True)
    def _somewhere(self, tmp_path):
        self.url = f"sqlite://{tmp_path}/{{run}}.db"

    async def remove_part(self, url, of, part):
        return self._edit(url, of, part, "delete from messages")

    async def truncate_part(self, url, of, part):
        return self._edit(url, of, part, "update messages set data = substr(data, 1, length(data) - 1)")

    def _edit(self, url, of, part, change):
        """Do something to one row; the name by which errors must call it. "chunk" means the second one."""
        kind, number = part.capitalize(), 1 if part == "chunk" else 0
        with closing(sqlite3.connect(urlsplit(url).path)) as file, file:
            at = (of.version, of.term, of.attempt, kind, number)
            file.execute(f"{change} where {THIS} and kind = ? and part = ?", at)
        return f"{kind} {number} of {of}"
