"""These are distributions of somebody else: `test_plugin_distributions.py` runs their tests, with them installed."""

collect_ignore_glob = ["*"]
