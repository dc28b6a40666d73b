"""Plugins are found through real metadata: each test puts fake distributions on sys.path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dcr.errors import PluginError
from dcr.plugins import GROUPS, installed, load, transport_for

Distribute = Callable[..., None]


@pytest.fixture
def distribute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Distribute:
    """Install a fake distribution: its metadata, its entry points and its modules."""

    def put(name: str, entry_points: str, *, requires: str = "", **modules: str) -> None:
        site = tmp_path / name
        info = site / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}")
        (info / "entry_points.txt").write_text(entry_points)
        for module, source in modules.items():
            (site / f"{module}.py").write_text(source)
            monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(site)

    return put


def test_load_returns_the_object_that_the_entry_point_names(distribute: Distribute) -> None:
    distribute("fake-pigeon", "[dcr.transports]\npigeon = pigeon_post:transport\n", pigeon_post="transport = 'coo'")
    assert load("dcr.transports", "pigeon") == "coo"


def test_listing_imports_nothing(distribute: Distribute) -> None:
    distribute("fake-bomb", "[dcr.loaders]\nbomb = bomb_module:go\n", bomb_module="raise RuntimeError('imported')")
    assert ("bomb", "fake-bomb", "bomb_module:go") in installed("dcr.loaders")
    assert "bomb_module" not in sys.modules


def test_loading_one_plugin_does_not_import_its_neighbour(distribute: Distribute) -> None:
    points = "[dcr.loaders]\ngood = good_module:go\nbomb = next_bomb:go\n"
    distribute("fake-pair", points, good_module="go = 1", next_bomb="raise RuntimeError('imported')")
    assert load("dcr.loaders", "good") == 1
    assert "next_bomb" not in sys.modules


def test_a_name_belongs_to_its_group_only(distribute: Distribute) -> None:
    distribute("fake-codec", "[dcr.codecs]\nmorse = morse_code:CODEC\n", morse_code="CODEC = 1")
    with pytest.raises(PluginError, match=r"There is a plugin of that name in dcr\.codecs"):
        load("dcr.transports", "morse")


def test_an_unknown_name_lists_what_is_installed_and_what_to_do(distribute: Distribute) -> None:
    distribute("fake-pigeon", "[dcr.transports]\npigeon = pigeon_post:transport\n")
    with pytest.raises(PluginError) as error:
        load("dcr.transports", "zeppelin")
    message = str(error.value)
    assert "no plugin 'zeppelin'" in message
    assert f"installed: {', '.join(plugin.name for plugin in installed('dcr.transports'))}." in message
    assert "pigeon" in message
    assert "pip install a distribution that registers 'zeppelin'" in message
    assert "Did you mean" not in message


def test_a_near_miss_is_suggested(distribute: Distribute) -> None:
    distribute("fake-pigeon", "[dcr.transports]\npigeon = pigeon_post:transport\n")
    with pytest.raises(PluginError, match=r"Did you mean pigeon\?"):
        load("dcr.transports", "pidgeon")


def test_two_distributions_with_one_name_are_both_named(distribute: Distribute) -> None:
    distribute("fake-first", "[dcr.sources]\nsame = first_module:a\n", first_module="a = 1")
    distribute("fake-second", "[dcr.sources]\nsame = second_module:b\n", second_module="b = 2")
    with pytest.raises(PluginError, match=r"fake-first \(first_module:a\) and fake-second \(second_module:b\)"):
        load("dcr.sources", "same")


def test_one_distribution_found_twice_is_one_offer(distribute: Distribute, monkeypatch: pytest.MonkeyPatch) -> None:
    distribute("fake-once", "[dcr.sources]\nonce = once_module:a\n", once_module="a = 1")
    monkeypatch.setattr(sys, "path", [*sys.path, sys.path[0]])
    assert load("dcr.sources", "once") == 1


def test_a_failing_import_is_the_cause(distribute: Distribute) -> None:
    distribute("fake-broken", "[dcr.loaders]\nbroken = broken_module:go\n", broken_module="raise ValueError('no GPU')")
    with pytest.raises(
        PluginError, match=r"broken_module:go, from fake-broken\) failed to load: ValueError: no GPU"
    ) as error:
        load("dcr.loaders", "broken")
    assert isinstance(error.value.__cause__, ValueError)


def test_a_missing_attribute_is_a_plugin_error(distribute: Distribute) -> None:
    distribute("fake-empty", "[dcr.loaders]\nempty = empty_module:nothing\n", empty_module="")
    with pytest.raises(PluginError, match="failed to load: AttributeError"):
        load("dcr.loaders", "empty")


def test_a_missing_module_names_the_extra_that_brings_it(distribute: Distribute) -> None:
    distribute(
        "fake-cloud",
        "[dcr.transports]\ncloud = cloud_module:transport\n",
        requires="Requires-Dist: Absent_Client>=2; extra == 'cloud'\nProvides-Extra: cloud\n",
        cloud_module="import absent_client.api",
    )
    with pytest.raises(PluginError, match=r"with its extra: 'fake-cloud\[cloud\]'"):
        load("dcr.transports", "cloud")


def test_a_missing_module_that_no_extra_brings_is_named(distribute: Distribute) -> None:
    distribute("fake-bare", "[dcr.transports]\nbare = bare_module:t\n", bare_module="import absent_client")
    with pytest.raises(PluginError, match=r"distribution that provides the module 'absent_client'$"):
        load("dcr.transports", "bare")


def test_an_unknown_group_lists_the_groups() -> None:
    with pytest.raises(PluginError, match=r"no plugin group 'dcr\.kernels'.*dcr\.transports, dcr\.loaders"):
        load("dcr.kernels", "cpu")


def test_the_scheme_of_a_url_names_its_transport(distribute: Distribute) -> None:
    distribute("fake-scheme", "[dcr.transports]\nballoon = balloon_post:transport\n", balloon_post="transport = 'up'")
    assert transport_for("balloon://anywhere/run-1") == "up"


@pytest.mark.parametrize("url", ["/just/a/path", "", "run-17"])
def test_a_url_without_a_scheme_is_refused_with_an_example(url: str) -> None:
    with pytest.raises(PluginError, match="such as local:///path/to/run"):
        transport_for(url)


@pytest.mark.parametrize("group", GROUPS)
def test_the_built_in_plugins_register_through_entry_points_and_load(group: str) -> None:
    own = [plugin for plugin in installed(group) if plugin.distribution == "dcr"]
    assert own
    for plugin in own:
        assert load(group, plugin.name) is not None
