"""What a newcomer writes by mistake is refused before anything happens, by a message that says what to write."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.refits import said

import dcr
import dcr.blocking
from dcr.engines.ranks import Ranks
from dcr.engines.workers import Worker, accept
from dcr.errors import DcrError, LocalError, OptionError, PluginError, SchemaError, StateError
from dcr.events import Event, MemberDoubled, MemberJoined, MemberLeft
from dcr.loaders.engine import Pairs
from dcr.loaders.native import NativeLoader
from dcr.testing.memory import MemoryTransport
from dcr.transports.local import LocalTransport


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


@pytest.mark.parametrize("dtype", ["bf16", torch.qint8, {"layer.*": "bf16"}])
def test_a_dtype_that_cannot_be_published_is_refused_with_those_that_can(dtype: Any) -> None:
    with pytest.raises(SchemaError, match=r"bfloat16, float16, .*found (torch.qint8|'bf16')"):
        dcr.source(Net(), dtype=dtype)


# ---------------------------------------------------------------------- ends


def test_a_bare_module_is_no_source() -> None:
    with pytest.raises(TypeError, match=r"found a torch\.nn\.Module \(Net\); wrap it: dcr\.source\(model\)"):
        dcr.publisher("local:///nowhere", source=Net())


def test_a_bare_module_is_no_loader() -> None:
    with pytest.raises(TypeError, match=r"found a torch\.nn\.Module \(Net\); wrap it: dcr\.loader\(model\)"):
        dcr.subscriber("local:///nowhere", loader=Net(), member="a")


def test_what_lacks_a_member_of_the_protocol_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(TypeError, match="found str, which has no schema, shards, residual, storages"):
        dcr.publisher("local:///nowhere", source="model")
    with pytest.raises(TypeError, match="found ModuleSource, which has no bind, fingerprint, finalize"):
        dcr.subscriber("local:///nowhere", loader=dcr.source(Net()), member="a")


@pytest.mark.parametrize("kind", ["module", "transformers"])
def test_a_loader_of_what_is_no_model_is_refused_at_once(kind: str) -> None:
    with pytest.raises(TypeError, match=r"expected a .*found str"):
        dcr.loader("not a model", kind=kind)


def test_a_source_of_what_is_no_module_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, .*found str"):
        dcr.source("not a model")


def test_a_checkpoint_directory_that_is_missing_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"/none is no directory; save one there first"):
        dcr.loader(tmp_path / "none", kind="safetensors")


@pytest.mark.parametrize("member", ["", "a\nb", "x" * 201, "é" * 34, "\ud800"])
def test_a_name_that_a_transport_may_not_bear_is_refused(member: str) -> None:
    with pytest.raises(LocalError, match="of printable characters, 1 to 200 bytes long"):
        dcr.subscriber("local:///nowhere", loader=dcr.loader(Net()), member=member)


def test_a_member_without_a_text_as_its_name_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a text as the member's name, found 3"):
        dcr.subscriber("local:///nowhere", loader=dcr.loader(Net()), member=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("member", ["a/b", "..", "%2F", "é" * 33, "x" * 200])
def test_every_other_name_is_borne_by_a_directory(member: str, tmp_path: Path) -> None:
    url, trainer, engine = f"local://{tmp_path}/run", Net(), Net()
    with (
        dcr.blocking.publisher(url, source=dcr.source(trainer)) as publisher,
        dcr.blocking.subscriber(url, loader=dcr.loader(engine), member=member) as versions,
    ):
        publisher.joined(1)
        refit = publisher.publish(version=1)
        next(versions).install()
        assert said(refit.installed()) == {member: "installed"}
    assert [path.name for path in tmp_path.glob("run/packs/*")] == ["000000000001.000001.0001"]


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
    with pytest.raises(TypeError, match=r"expected 'all' or a number of members as quorum, found .*; write quorum=2"):
        dcr.publisher("local:///nowhere", source=dcr.source(Net()), quorum=quorum)


SECONDS = "a number of seconds above 0"
PUBLISHERS = {
    "operation": (1, "a value of Operation"),
    "budget": (1 << 20, "a value of ByteBudget, or None,"),
    "vote_timeout_s": (0, SECONDS),
    "stages": ("stage", "a list of stages"),
    "frame_elems": (0, "a whole number of 1 or more"),
    "anchor_every": (1.5, "'auto', None or a whole number of 1 or more"),
    "workers": (0, "a whole number of 1 or more"),
    "observe": (None, "a function that takes an event"),
}
SUBSCRIBERS = {
    "codecs": ("fast", "a function from a codec's name to the codec"),
    "budget": (0.5, "a value of ByteBudget, or None,"),
    "fetch_timeout_s": ("600", SECONDS),
    "workers": (True, "a whole number of 1 or more"),
    "observe": (3, "a function that takes an event"),
}


@pytest.mark.parametrize("ends", [dcr, dcr.blocking], ids=["dcr", "blocking"])
@pytest.mark.parametrize("option", PUBLISHERS)
def test_an_option_of_a_publisher_is_judged_where_it_is_given(option: str, ends: Any) -> None:
    wrong, expected = PUBLISHERS[option]
    with pytest.raises(OptionError, match=rf"expected {expected}.* as {option}, found .*; write {option}="):
        ends.publisher("local:///nowhere", source=dcr.source(Net()), **{option: wrong})


@pytest.mark.parametrize("ends", [dcr, dcr.blocking], ids=["dcr", "blocking"])
@pytest.mark.parametrize("option", SUBSCRIBERS)
def test_an_option_of_a_subscriber_is_judged_where_it_is_given(option: str, ends: Any) -> None:
    (wrong, expected), loader = SUBSCRIBERS[option], dcr.loader(Net())
    with pytest.raises(OptionError, match=rf"expected {expected} as {option}, found .*; write {option}="):
        ends.subscriber("local:///nowhere", loader=loader, member="a", **{option: wrong})


@pytest.mark.parametrize(("option", "wrong"), [("anchor_every", -3), ("vote_timeout_s", float("nan")), ("stages", [3])])
def test_a_number_out_of_range_or_a_list_of_something_else_is_no_option(option: str, wrong: Any) -> None:
    with pytest.raises(OptionError, match=rf" as {option}, found "):
        dcr.publisher("local:///nowhere", source=dcr.source(Net()), **{option: wrong})


@pytest.mark.parametrize("option", ["group", "codec", "transport"])
def test_a_part_without_its_verbs_is_refused_with_what_it_lacks(option: str) -> None:
    with pytest.raises(OptionError, match=rf"expected a {option}, found int, which has no "):
        dcr.publisher("local:///nowhere", source=dcr.source(Net()), **{option: 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: LocalTransport(poll_s=0), "poll_s"),
        (lambda: LocalTransport(stale_s="30"), "stale_s"),  # type: ignore[arg-type]
        (lambda: LocalTransport(fsync="no"), "fsync"),  # type: ignore[arg-type]
        (lambda: dcr.stage(workers=0)(print), "workers"),
        (lambda: Worker(None, rank=0, timeout_s=0), "timeout_s"),  # type: ignore[arg-type]
        (lambda: accept(None, 0, b""), "world"),  # type: ignore[arg-type]
        (lambda: dcr.connect("local:///nowhere", role="trainer").__aenter__().send(None), "role"),  # type: ignore[arg-type]
        (lambda: dcr.stage(3), "function"),  # type: ignore[call-overload]
        (lambda: dcr.Pipeline(print), "stages"),  # type: ignore[call-overload]
        (lambda: dcr.Pipeline(dcr.stage(print), depth=-1), "depth"),
        (lambda: dcr.ByteBudget("1 GB"), "limit"),  # type: ignore[arg-type]
        (lambda: dcr.ByteBudget(1e9), "limit"),  # type: ignore[arg-type]
    ],
)
def test_what_stands_beside_the_ends_judges_its_options_too(make: Callable[[], object], option: str) -> None:
    with pytest.raises(OptionError, match=rf"^expected .* as {option}, found .*; write {option}="):
        make()


# ---------------------------------------------------------------------- URLs

URLS = {
    "#1": r"found '#1' in .*: it would name the same run as without; write %23",
    "?1": r"found '\?1' in .*: write %3F",
    "\n": "no space at either end",
    "\t1": "of printable characters",
    " ": "no space at either end",
    "%": "found a % that begins no escape",
    "%2Fa": "found an escaped slash",
    "%0a": "found an escaped slash or control character",
    "%ff": "found escapes that are no UTF-8",
    "/../b": r"found a '\.' or '\.\.'",
    "/%2e/b": r"found a '\.' or '\.\.'",
}


@pytest.mark.parametrize("transport", [LocalTransport(), MemoryTransport()], ids=["local", "memory"])
@pytest.mark.parametrize("end", URLS)
async def test_what_a_url_cannot_mean_is_refused(end: str, transport: Any, tmp_path: Path) -> None:
    url = f"{'local' if isinstance(transport, LocalTransport) else 'memory'}://{tmp_path}/run{end}"
    for open_run in (
        lambda: dcr.publisher(url, source=dcr.source(Net()), transport=transport).open(),
        lambda: dcr.subscriber(url, loader=dcr.loader(Net()), member="a", transport=transport).open(),
        lambda: dcr.connect(url, role="sender", transport=transport).__aenter__(),
    ):
        with pytest.raises(LocalError, match=URLS[end]):
            await open_run()
    assert list(tmp_path.iterdir()) == []  # noqa: ASYNC240


@pytest.mark.parametrize(
    ("url", "why"),
    [("local://host/run", "found the host 'host' in .*: write three slashes"), ("local://", "found no path")],
)
async def test_a_host_or_no_path_is_no_run(url: str, why: str) -> None:
    with pytest.raises(LocalError, match=why):
        await dcr.publisher(url, source=dcr.source(Net())).open()


@pytest.mark.parametrize("url", ["/runs/a", "runs/a", "C:\\runs", "local:/runs/a", "local://[/a"])
async def test_what_is_no_url_is_an_error_of_dcrs(url: str) -> None:
    with pytest.raises(DcrError, match=r"local:///path/to/run"):
        await dcr.publisher(url, source=dcr.source(Net())).open()


async def test_an_escape_stands_for_its_character(tmp_path: Path) -> None:
    for name in ("a%23b", "a b", "%C3%A9", "a%25"):
        async with dcr.publisher(f"local://{tmp_path}/{name}", source=dcr.source(Net())):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a b", "a#b", "a%", "é"]  # noqa: ASYNC240


# ---------------------------------------------------------------------- waived names


def test_one_text_is_no_sequence_of_patterns(tmp_path: Path) -> None:
    save_file(Net().state_dict(), tmp_path / "model.safetensors")
    for make in (
        lambda waive: dcr.loader(Net(), waive=waive),
        lambda waive: dcr.loader(tmp_path, kind="safetensors", waive=waive),
        lambda waive: dcr.loader(None, kind="vllm", waive=waive),
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
        dcr.loader(Net(), kind="huggingface")


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
            return dcr.blocking.subscriber(url, loader=dcr.loader(Net()), member=name)

        with follow("a") as first, follow("b"):
            publisher.joined(2)
            assert not [event for event in seen if isinstance(event, MemberDoubled)]
            with follow("a") as second:
                publisher.joined(3)
                refit = publisher.publish()
                for versions in (first, second):
                    next(versions).install()  # which they say by joining anew
                refit.committed()
                while len([event for event in seen if isinstance(event, MemberJoined)]) < 5:
                    time.sleep(0.01)
    assert [event.member for event in seen if isinstance(event, MemberDoubled)] == ["a"]


def test_a_member_that_left_and_comes_again_is_no_second_one(tmp_path: Path) -> None:
    url, trainer, seen = f"local://{tmp_path}/run", Net(), list[Event]()
    with dcr.blocking.publisher(url, source=dcr.source(trainer), observe=seen.append) as publisher:
        for _ in range(2):
            with dcr.blocking.subscriber(url, loader=dcr.loader(Net()), member="a"):
                publisher.joined(1)
            while publisher.members:
                time.sleep(0.01)
    kinds = [type(event) for event in seen if isinstance(event, MemberJoined | MemberLeft | MemberDoubled)]
    assert kinds == 2 * [MemberJoined, MemberLeft]
