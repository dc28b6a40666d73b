"""These are distributions of somebody else: `tests/docs/test_plugins.py` runs their tests, with them installed."""

collect_ignore_glob = ["*"]
