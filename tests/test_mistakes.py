"""What a newcomer writes by mistake is refused before anything happens, by a message that says what to write."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from refits import said
from safetensors.torch import save_file

import dcr
import dcr.blocking
from dcr.errors import LocalError, PluginError, SchemaError, StateError
from dcr.loaders.engine import Pairs
from dcr.loaders.native import NativeLoader
from dcr.observe import Event
from dcr.subscribe.ranks import Ranks


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)


class Engine:
    """Of the three verbs of a native engine, none is called here."""

    replaces = False
    module = Net()

    def load(self, pairs: Pairs) -> None: ...


# ---------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, {"layer.*": torch.bfloat16}])
def test_a_dtype_is_given_by_name_or_as_torchs(dtype: Any) -> None:
    source = dcr.source(Net(), dtype=dtype)
    assert [spec.dtype for spec in source.schema.tensors] == ["bfloat16", "bfloat16"]


def test_what_is_no_dtype_is_refused_with_how_to_write_one() -> None:
    with pytest.raises(TypeError, match=r"such as 'bfloat16' or torch\.bfloat16.*found int"):
        dcr.source(Net(), dtype=16)


@pytest.mark.parametrize("dtype", ["bf16", torch.complex64, {"layer.*": "bf16"}])
def test_a_dtype_that_cannot_be_published_is_refused_with_those_that_can(dtype: Any) -> None:
    with pytest.raises(SchemaError, match=r"bfloat16, float16, .*found (torch.complex64|'bf16')"):
        dcr.source(Net(), dtype=dtype)


# ---------------------------------------------------------------------- ends


def test_a_bare_module_is_no_source() -> None:
    with pytest.raises(TypeError, match=r"found a torch\.nn\.Module \(Net\); wrap it: dcr\.source\(model\)"):
        dcr.publisher("local:///nowhere", source=Net())


def test_a_bare_module_is_no_loader() -> None:
    with pytest.raises(TypeError, match=r'found a torch\.nn\.Module \(Net\); wrap it: dcr\.loader\("module", model\)'):
        dcr.subscriber("local:///nowhere", loader=Net(), member="a")


def test_what_lacks_a_member_of_the_protocol_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(TypeError, match="found str, which has no schema, shards, residual, storages"):
        dcr.publisher("local:///nowhere", source="model")
    with pytest.raises(TypeError, match="expected a loader, found ModuleSource, which has no bind, epoch, prepare"):
        dcr.subscriber("local:///nowhere", loader=dcr.source(Net()), member="a")


@pytest.mark.parametrize("kind", ["module", "transformers"])
def test_a_loader_of_what_is_no_model_is_refused_at_once(kind: str) -> None:
    with pytest.raises(TypeError, match=r"expected a .*found str"):
        dcr.loader(kind, "not a model")


def test_a_source_of_what_is_no_module_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, .*found str"):
        dcr.source("not a model")


def test_a_checkpoint_directory_that_is_missing_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"/none is no directory; save one there first"):
        dcr.loader("safetensors", tmp_path / "none")


@pytest.mark.parametrize("member", ["", "a\nb", "x" * 201, "é" * 34, "\ud800"])
def test_a_name_that_a_transport_may_not_bear_is_refused(member: str) -> None:
    with pytest.raises(LocalError, match="of printable characters, 1 to 200 bytes long"):
        dcr.subscriber("local:///nowhere", loader=dcr.loader("module", Net()), member=member)


def test_a_member_without_a_text_as_its_name_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a text as the member's name, found 3"):
        dcr.subscriber("local:///nowhere", loader=dcr.loader("module", Net()), member=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("member", ["a/b", "..", "%2F", "é" * 33, "x" * 200])
def test_every_other_name_is_borne_by_a_directory(member: str, tmp_path: Path) -> None:
    url, trainer, engine = f"local://{tmp_path}/run", Net(), Net()
    with (
        dcr.blocking.publisher(url, source=dcr.source(trainer)) as publisher,
        dcr.blocking.subscriber(url, loader=dcr.loader("module", engine), member=member) as versions,
    ):
        publisher.joined(1)
        refit = publisher.publish(version=1)
        next(versions).install()
        assert said(refit.installed()) == {member: "installed"}
    assert [path.parent for path in tmp_path.rglob("*.chunk")] == [tmp_path / "run/attempts/000000000001.000001.0001"]


# ---------------------------------------------------------------------- versions


@pytest.mark.parametrize("version", ["3", 2.0, True])
def test_a_version_is_an_int_and_nothing_is_used_up_by_another(version: Any, tmp_path: Path) -> None:
    with dcr.blocking.publisher(f"local://{tmp_path}/run", source=dcr.source(Net())) as publisher:
        with pytest.raises(TypeError, match=r"expected an int .*; write publish\(version=3\)"):
            publisher.publish(version=version)
        assert publisher.publish().committed().version == 0


@pytest.mark.parametrize("version", [-1, 1 << 63])
def test_a_number_out_of_range_is_refused_and_not_used_up(version: int, tmp_path: Path) -> None:
    with dcr.blocking.publisher(f"local://{tmp_path}/run", source=dcr.source(Net())) as publisher:
        with pytest.raises(StateError, match="from 0 to 9223372036854775807"):
            publisher.publish(version=version)
        assert publisher.publish(version=(1 << 63) - 1).committed().version == (1 << 63) - 1


# ---------------------------------------------------------------------- options


def test_a_path_is_no_url(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"such as 'local:///path/to/run', found PosixPath"):
        dcr.publisher(tmp_path, source=dcr.source(Net()))  # type: ignore[arg-type]


@pytest.mark.parametrize("quorum", ["most", -1, 0.5, True])
def test_a_quorum_is_all_or_a_number_of_members(quorum: Any) -> None:
    with pytest.raises(TypeError, match="expected a quorum of 'all' or a number of members"):
        dcr.publisher("local:///nowhere", source=dcr.source(Net()), quorum=quorum)


# ---------------------------------------------------------------------- waived names


def test_one_text_is_no_sequence_of_patterns(tmp_path: Path) -> None:
    save_file(Net().state_dict(), tmp_path / "model.safetensors")
    for make in (
        lambda waive: dcr.loader("module", Net(), waive=waive),
        lambda waive: dcr.loader("safetensors", tmp_path, waive=waive),
        lambda waive: dcr.loader("vllm", None, waive=waive),
        lambda waive: NativeLoader(Engine(), waive=waive),  # type: ignore[arg-type]
        lambda waive: Ranks([None], waive=waive),  # type: ignore[list-item]
    ):
        with pytest.raises(TypeError, match=r"write waive=\['v_head'\]"):
            make("v_head")
        with pytest.raises(TypeError, match=r"expected name patterns such as .*, found 3"):
            make([3])


# ---------------------------------------------------------------------- plugins


def test_another_name_of_a_kind_leads_to_it() -> None:
    with pytest.raises(PluginError, match=r"installed: [\w, ]+\. Did you mean dtensor\? To add a source, pip"):
        dcr.source(Net(), kind="fsdp")
    with pytest.raises(PluginError, match=r"Did you mean transformers\? To add a loader, pip"):
        dcr.loader("huggingface", Net())


# ---------------------------------------------------------------------- what is no mistake


def test_a_version_in_which_nothing_changed_says_so(tmp_path: Path) -> None:
    with dcr.blocking.publisher(f"local://{tmp_path}/run", source=dcr.source(Net())) as publisher:
        assert "x less than dense)" in str(publisher.publish().committed())
        assert ", 0 bytes on the wire (nothing changed), " in str(publisher.publish().committed())


# ---------------------------------------------------------------------- two of one name


def test_a_second_live_member_of_one_name_is_warned_of_once(tmp_path: Path) -> None:
    url, trainer, seen = f"local://{tmp_path}/run", Net(), list[Event]()
    with dcr.blocking.publisher(url, source=dcr.source(trainer), observe=seen.append) as publisher:

        def follow(name: str) -> dcr.blocking.subscriber:
            return dcr.blocking.subscriber(url, loader=dcr.loader("module", Net()), member=name)

        with follow("a") as first, follow("b"):
            publisher.joined(2)
            assert not [event for event in seen if event.name == "doubled"]
            with follow("a") as second:
                publisher.joined(3)
                refit = publisher.publish()
                for versions in (first, second):
                    next(versions).install()  # which they say by joining anew
                refit.committed()
                while len([event for event in seen if event.name == "joined"]) < 5:
                    time.sleep(0.01)
    doubled = [event for event in seen if event.name == "doubled"]
    assert [event.member for event in doubled] == ["a"]
    assert "two engines have one name; give each its own" in str(doubled[0].detail)


def test_a_member_that_left_and_comes_again_is_no_second_one(tmp_path: Path) -> None:
    url, trainer, seen = f"local://{tmp_path}/run", Net(), list[Event]()
    with dcr.blocking.publisher(url, source=dcr.source(trainer), observe=seen.append) as publisher:
        for _ in range(2):
            with dcr.blocking.subscriber(url, loader=dcr.loader("module", Net()), member="a"):
                publisher.joined(1)
            while publisher.members:
                time.sleep(0.01)
    assert [event.name for event in seen if event.name in ("joined", "left", "doubled")] == 2 * ["joined", "left"]
