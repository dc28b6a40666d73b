"""The conformance kits over these objects, and over the runs that are made of them: `pytest test_sqlite.py`."""

import pytest
from dcr_sqlite import open_objects

import dcr
import dcr.testing


class TestSqliteObjects(dcr.testing.ObjectsTests):
    @pytest.fixture(autouse=True)
    def _somewhere(self, tmp_path):
        self.open_objects = lambda: open_objects(f"sqlite://{tmp_path}/objects.db", fsync="no")


class TestSqlite(dcr.testing.TransportTests):
    transport = dcr.stored(open_objects, poll_s=0.001, idle_s=0.01, stale_s=2.0, pack_s=0.0)
    lost_after_s = 3.0

    @pytest.fixture(autouse=True)
    def _somewhere(self, tmp_path):
        self.url = f"sqlite://{tmp_path}/{{run}}.db?fsync=no"
