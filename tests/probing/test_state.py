"""What a checkpoint holds besides parameters and buffers is refused by name at every end, unless it is waived."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dcr
from dcr.errors import OptionError, SchemaError, StorageRebound
from dcr.layout import frames
from dcr.layout.frames import Layout
from dcr.layout.schema import Schema, TensorSpec
from dcr.loaders.module import ModuleLoader
from dcr.loaders.native import NativeLoader
from dcr.probing.state import beyond, require_named
from dcr.sources.megatron import Geometry
from dcr.sources.module import ModuleSource


class Extra(nn.Linear):
    """A layer with extra state; reading it is counted, since it may cost."""

    reads = 0

    def get_extra_state(self) -> Any:
        self.reads += 1
        return {"amax": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        raise NotImplementedError


class Packed(nn.Module):
    """A layer whose weight is in its checkpoint, and is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.packed = torch.ones(3)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = self.packed


class Overridden(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict(*args, **kwargs) | {kwargs.get("prefix", "") + "added": torch.ones(1)}


def hooked() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_state_dict_post_hook(
        lambda module, saved, prefix, metadata: saved.__setitem__(prefix + "born_in_a_hook", module.weight * 2)
    )
    return layer


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})


LAYERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "extra state": (lambda: Extra(2, 2), "_extra_state"),
    "what a class adds": (Packed, "packed"),
    "what a hook adds": (hooked, "born_in_a_hook"),
    "a state_dict of its own": (lambda: Overridden(2, 2), "added"),
    "packed weights of a quantised model": (quantised, "0._packed_params._packed_params"),
}


def inside(layer: nn.Module) -> nn.Module:
    return nn.ModuleDict({"norm": nn.LayerNorm(2), "part": layer})


@pytest.mark.parametrize("kind", LAYERS)
def test_a_source_refuses_what_it_does_not_publish_by_name(kind: str) -> None:
    make, name = LAYERS[kind]
    with pytest.raises(
        SchemaError, match=rf"part\.{name} is in this module's state_dict.*waive=\['part\.{name}'\]"
    ) as told:
        ModuleSource(inside(make()), waive=[] if kind != "packed weights of a quantised model" else QUANTISED[:-1])
    assert "publish" in str(told.value)


# names of a quantised layer that come before its weights
QUANTISED = ["part.0.scale", "part.0.zero_point", "part.0._packed_params.dtype", "part.0._packed_params._packed_params"]


def exported(module: nn.Module, **options: Any) -> Any:
    return dcr.source(module, kind="probe", export=lambda tensors: tensors.items(), **options)


def of_megatron(module: nn.Module, **options: Any) -> Any:
    rules = [(r"norm\.(?P<leaf>weight|bias)", "whole", ["norm.{leaf}"]), (r"part\.(?P<leaf>\w+)", "whole", ["{leaf}"])]
    sizes = Geometry(query_heads=1, kv_groups=1, vocab_size=1)
    return dcr.source(module, kind="megatron", geometry=sizes, rules=rules, **options)


EXPORTERS = {"probe": exported, "megatron": of_megatron}
exporters = pytest.mark.parametrize("source", EXPORTERS.values(), ids=list(EXPORTERS))


@exporters
@pytest.mark.parametrize("kind", [kind for kind in LAYERS if "quantised" not in kind])
def test_a_source_with_an_exporter_refuses_what_the_exporter_is_not_given(kind: str, source: Any) -> None:
    make, name = LAYERS[kind]
    with pytest.raises(SchemaError, match=rf"part\.{name} is in this module's state_dict.*waive=\['part\.{name}'\]"):
        source(inside(make()))
    published = source(inside(make()), waive=[f"part.{name}"]).schema.tensors
    assert "norm.weight" in {spec.name for spec in published}


class Silent(nn.Linear):
    """A layer that can have extra state, and has none yet, as Megatron-core's and Transformer Engine's."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra


@exporters
@pytest.mark.parametrize("nothing", [None, torch.empty(0, dtype=torch.uint8)], ids=["none", "empty"])
def test_extra_state_that_is_none_is_no_obstacle_until_there_is_some(nothing: Any, source: Any) -> None:
    model = inside(Silent(2, 2))
    model["part"].extra = nothing
    made = source(model)
    made.storages()
    model["part"].extra = torch.ones(1)
    with pytest.raises(StorageRebound, match=r"part\._extra_state.*was none when the source was made"):
        made.storages()


class Wrapper(nn.Module):
    """As Megatron-core's DistributedDataParallel: its state dict is that of the model in it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)


@pytest.mark.parametrize("waive", [[], ["*._extra_state"]])
def test_layers_in_a_wrapper_that_leaves_itself_out_are_judged_by_their_paths(waive: list[str]) -> None:
    model = Wrapper(inside(Silent(2, 2)))
    of_megatron(model, waive=waive).storages()
    model.module["part"].extra = torch.ones(1)
    if waive:
        of_megatron(model, waive=waive)
    else:
        with pytest.raises(SchemaError, match=r"module\.part\._extra_state is in this module's"):
            of_megatron(model)


MAPPINGS = {"probe": {"export": lambda tensors: tensors.items()}, "zero": {}}


@pytest.mark.parametrize("kind", MAPPINGS)
@pytest.mark.parametrize("value", [{"amax": 1}, None, b"", 1.0])
def test_what_is_no_tensor_in_a_mapping_is_refused_by_name_unless_it_is_waived(kind: str, value: Any) -> None:
    weights = {"w": torch.ones(2), "fc._extra_state": value}
    with pytest.raises(SchemaError, match=r"fc\._extra_state: expected Tensor.* found .*waive=\['fc\._extra_state'\]"):
        dcr.source(weights, kind=kind, **MAPPINGS[kind])
    made = dcr.source(weights, kind=kind, waive=["*_extra_state"], **MAPPINGS[kind])
    assert [spec.name for spec in made.schema.tensors] == ["w"]
    made.storages()


@pytest.mark.parametrize("kind", MAPPINGS)
@pytest.mark.parametrize("given", [None, [("w", torch.ones(2))], {3: torch.ones(2)}])
def test_what_is_no_mapping_from_texts_is_refused(kind: str, given: Any) -> None:
    with pytest.raises((OptionError, SchemaError), match=r"tensors by name|mapping from names"):
        dcr.source(given, kind=kind, **MAPPINGS[kind])


@exporters
def test_waived_tensors_are_not_given_to_an_exporter(source: Any) -> None:
    model = inside(nn.Linear(2, 2))
    model.register_parameter("value_head", nn.Parameter(torch.ones(3)))
    made = source(model, waive=["value_*"])
    assert not [spec.name for spec in made.schema.tensors if "value" in spec.name]
    made.storages()
    with pytest.raises(SchemaError, match=r"waive='value_x\*' fits"):
        source(model, waive=["value_x*"])


@pytest.mark.parametrize("kind", LAYERS)
def test_a_loader_refuses_what_is_not_published_by_name(kind: str) -> None:
    make, name = LAYERS[kind]
    engine = inside(make())
    own = nn.ModuleDict({"norm": nn.LayerNorm(2)})
    source = ModuleSource(own)
    layout = Layout(source.schema, tuple(frame.spec for frame in frames.plan(source.schema, source.shards)))
    waive = ["part.weight", "part.bias", "part.scale", *QUANTISED[:-1]]
    with pytest.raises(SchemaError, match=rf"part\.{name} is in this module's state_dict"):
        ModuleLoader(engine, waive=waive).bind(layout)


@pytest.mark.filterwarnings("ignore::dcr.errors.StaleCopyWarning")
@pytest.mark.parametrize("kind", LAYERS)
def test_what_is_waived_is_left_as_it_is(kind: str) -> None:
    make, _ = LAYERS[kind]
    source = ModuleSource(inside(make()), waive=["part.*"])
    assert [spec.name for spec in source.schema.tensors] == ["norm.weight", "norm.bias"]
    layout = Layout(source.schema, tuple(frame.spec for frame in frames.plan(source.schema, source.shards)))
    ModuleLoader(inside(make()), waive=["part.*"]).bind(layout)


class Copying:
    """An engine whose loader copies by name."""

    replaces = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def load(self, pairs: Any) -> None:
        own = dict(self.module.named_parameters())
        for name, tensor in pairs:
            own[name].data.copy_(tensor)

    def settle(self, modules: Any) -> None:
        """Nothing to do."""

    def fingerprint(self) -> bytes:
        return b"copying"


@pytest.mark.parametrize("waive", [[], ["_extra_state"]], ids=["refused", "waived"])
def test_a_loader_over_an_engine_of_its_own_refuses_it_too(waive: list[str]) -> None:
    specs = (TensorSpec("weight", "float32", (2, 2)), TensorSpec("bias", "float32", (2,)))
    loader = NativeLoader(Copying(Extra(2, 2)), waive=waive)
    if waive:
        loader.bind(Layout(Schema(specs), ()))
        return
    with pytest.raises(SchemaError, match=r"_extra_state is in this module's state_dict"):
        loader.bind(Layout(Schema(specs), ()))


def test_extra_state_is_told_by_its_class_and_not_asked_for() -> None:
    layer = Extra(2, 2)
    assert beyond(inside(layer)) == {"part._extra_state": "extra state (get_extra_state)"}
    assert layer.reads == 0


def test_pre_hooks_are_not_run() -> None:
    layer, calls = Extra(2, 2), []
    layer.register_state_dict_pre_hook(lambda *given: calls.append(given))
    assert list(beyond(layer)) == ["_extra_state"]
    assert not calls


def test_plain_layers_are_told_without_running_anything_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("dcr.probing.state.saved_by", lambda module: calls.append("saved") or {})
    require_named(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2), nn.MultiheadAttention(2, 1)))
    assert not calls


def test_a_hook_that_renames_what_is_published_adds_nothing() -> None:
    layer = nn.Linear(2, 2)

    def rename(module: nn.Module, saved: Any, prefix: str, metadata: Any) -> None:
        saved["kernel"] = saved.pop("weight")
        saved["first_row"] = saved["kernel"][:1]

    layer.register_state_dict_post_hook(rename)
    assert [spec.name for spec in ModuleSource(layer).schema.tensors] == ["weight", "bias"]


def test_a_hook_that_fails_is_told_by_its_module() -> None:
    layer = nn.Linear(2, 2)
    layer.register_state_dict_post_hook(lambda *given: 1 / 0)
    with pytest.raises(SchemaError, match=r"part: what its checkpoint holds cannot be told.*ZeroDivisionError"):
        ModuleSource(inside(layer))


def test_a_waived_tensor_of_a_source_may_be_of_any_kind() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", torch.eye(2).to_sparse())
    assert [spec.name for spec in dcr.source(model, waive=["odd"]).schema.tensors] == ["weight", "bias"]
