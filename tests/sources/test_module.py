"""A module as a source: every parameter and persistent buffer once, whatever its strides, bit for bit.

The oracle copies a tensor to contiguous memory with torch and reads its bytes.
"""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from dcr import kernels
from dcr.errors import SchemaError, StorageRebound
from dcr.layout.schema import WIDTHS
from dcr.layout.views import Table, rows_of
from dcr.probing.bits import bits_of
from dcr.sources import dtensor, memory, zero
from dcr.sources.module import ModuleSource


class Holds(nn.Module):
    """A module of given tensors: floating ones as parameters, the others as persistent buffers."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(name, tensor)


def counted(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Every element with bits of its own."""
    numel = int(np.prod(shape))
    width = dtype.itemsize
    octets = torch.arange(1, numel * width + 1, dtype=torch.int64).to(torch.uint8)
    return octets.view(dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    """Row-major bits."""
    plain = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return plain.view(torch.uint8).numpy().view(f"u{tensor.element_size()}").tolist() if tensor.numel() else []


def published(source: ModuleSource) -> dict[str, list[int]]:
    """What the source publishes, by name."""
    storages, found = source.storages(), {}
    for shard in source.shards:
        table = Table((storages[shard.storage],), rows_of([(0, 0, shard.box)]))
        found[source.schema.tensors[shard.tensor].name] = kernels.read(table, shard.kind).tolist()
    return found


ODD = {
    "plain": counted(3, 4),
    "transposed": counted(3, 4).t(),
    "sliced": counted(6, 8)[1:5:2, 2:7:3],
    "offset": counted(20)[7:],
    "permuted": counted(2, 3, 4).permute(2, 0, 1),
    "expanded": counted(1, 4).expand(3, 4),
    "scalar": counted()[()],
    "one": counted(1, 1),
    "empty": counted(0, 3),
}


@pytest.mark.parametrize("name", ODD)
def test_a_tensor_is_published_in_row_major_order_whatever_its_strides(name: str) -> None:
    source = ModuleSource(Holds(weight=ODD[name]))
    assert published(source) == {"weight": bits(ODD[name])}
    assert source.schema.tensors[0].shape == tuple(ODD[name].shape)


@pytest.mark.parametrize("dtype", WIDTHS)
def test_every_dtype_is_published_in_its_own_bits(dtype: str) -> None:
    octets = counted(2, 8, dtype=torch.uint8)
    tensor = (octets % 2).bool() if dtype == "bool" else octets.view(getattr(torch, dtype))
    source = ModuleSource(Holds(weight=tensor))
    assert (source.schema.tensors[0].dtype, published(source)) == (dtype, {"weight": bits(tensor)})


def test_all_names_of_the_state_dict_are_published_and_no_others() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Sequential(nn.BatchNorm1d(3), nn.Embedding(4, 2))})
    model["a"].register_buffer("scratch", torch.zeros(2), persistent=False)
    source = ModuleSource(model)
    assert {name for spec in source.schema.tensors for name in (spec.name, *spec.aliases)} == set(model.state_dict())


def test_a_buffer_that_is_not_persistent_may_come_and_go() -> None:
    model = Holds(weight=counted(2))
    source = ModuleSource(model)
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    assert list(published(source)) == ["weight"]


def test_a_tied_tensor_is_published_once_under_its_first_name() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    (spec,) = ModuleSource(model).schema.tensors
    assert (spec.name, spec.aliases) == ("embed.weight", ("head.weight",))


def test_parameters_over_the_same_memory_are_tied_too() -> None:
    memory = counted(4)
    (spec,) = ModuleSource(Holds(a=memory, b=memory.view(4))).schema.tensors
    assert (spec.name, spec.aliases) == ("a", ("b",))


def test_a_module_used_twice_is_tied_under_both_names() -> None:
    shared = nn.Linear(2, 2, bias=False)
    (spec,) = ModuleSource(nn.ModuleDict({"x": shared, "y": shared})).schema.tensors
    assert (spec.name, spec.aliases) == ("x.weight", ("y.weight",))


def test_empty_tensors_are_not_tied_to_each_other() -> None:
    assert [spec.name for spec in ModuleSource(Holds(a=counted(0), b=counted(0))).schema.tensors] == ["a", "b"]


def test_views_of_one_storage_are_tensors_of_their_own() -> None:
    fused = counted(6, 2)
    source = ModuleSource(Holds(q=fused[:2], k=fused[2:]))
    assert published(source) == {"q": bits(fused[:2]), "k": bits(fused[2:])}


def test_the_storages_are_the_live_memory() -> None:
    model = Holds(weight=torch.zeros(4, dtype=torch.bfloat16))
    source = ModuleSource(model)
    with torch.no_grad():
        model.weight.view(torch.int16)[2] = 77
    assert published(source) == {"weight": [0, 0, 77, 0]}


def test_a_source_leaves_storages_as_free_to_be_resized_as_they_were() -> None:
    """What offloads by resizing (FSDP1, many trainers) goes on as before."""
    model = Holds(weight=counted(4))
    source = ModuleSource(model)
    assert published(source) == {"weight": bits(counted(4))}
    storage = model.weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    assert storage.resizable()


def test_reading_a_tensors_bits_leaves_its_storage_as_free_to_be_resized_as_it_was() -> None:
    tensor = counted(4)
    assert (bits_of(tensor).tolist(), tensor.untyped_storage().resizable()) == (bits(counted(4)), True)


def test_bits_keep_the_memory_that_they_are_read_from() -> None:
    found = bits_of(counted(1 << 16))
    torch.zeros(1 << 16, dtype=torch.bfloat16)
    assert found.tolist() == bits(counted(1 << 16))


@pytest.mark.parametrize("kind", ["conjugated", "negated"])
def test_bits_of_a_lazy_view_are_those_that_it_stands_for(kind: str) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    view = numbers.conj() if kind == "conjugated" else numbers.conj().imag
    assert bits_of(view).tolist() == bits(view.resolve_conj().resolve_neg().clone())


def test_a_model_of_nothing_is_refused() -> None:
    with pytest.raises(SchemaError, match="ReLU has neither parameters nor persistent buffers"):
        ModuleSource(nn.ReLU())


class Wrapped(torch.Tensor):
    """A tensor that is more than dense memory."""


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.complex64).conj(), torch.eye(2).to_sparse()],
    ids=["meta", "conjugated", "sparse"],
)
def test_a_tensor_of_another_kind_is_refused_by_name(tensor: torch.Tensor) -> None:
    model = Holds(fine=counted(2))
    model.register_buffer("odd", tensor)
    with pytest.raises(SchemaError, match=r"^odd: "):
        ModuleSource(model)


def test_a_subclass_of_tensor_is_refused() -> None:
    model = Holds(fine=counted(2))
    model.register_buffer("odd", torch.zeros(2).as_subclass(Wrapped))
    with pytest.raises(SchemaError, match="found Wrapped"):
        ModuleSource(model)


def test_a_source_is_made_whatever_torchs_default_device() -> None:
    model = Holds(weight=counted(4))
    with torch.device("meta"):
        source = ModuleSource(model)
        found = published(source)
    assert found == {"weight": bits(counted(4))}


def test_sources_of_one_process_import_nothing_of_torchs_distributed_tensors() -> None:
    """That takes seconds, and a loader of a module in every engine shares these rooms."""
    code = "import sys, dcr.sources.module; raise SystemExit('torch.distributed.tensor' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def misaligned() -> torch.Tensor:
    """Four floats that begin one byte into their memory."""
    return torch.frombuffer(bytearray(32), dtype=torch.float32, count=4, offset=1)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.quint8)


def freed() -> torch.Tensor:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (misaligned, "no multiple of its 4 bytes per element"),
        (nested, "publish what it consists of"),
        (quantised, "publish the model that it was made of"),
        (freed, "holds 0 bytes of the 16"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_memory_that_cannot_be_read_is_refused_by_name(make: Callable[[], torch.Tensor], said: str) -> None:
    model = Holds(fine=counted(2))
    model.register_buffer("odd", make())
    with pytest.raises(SchemaError, match=f"^odd: .*{said}"):
        ModuleSource(model)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_parameter_that_is_not_initialised_is_refused() -> None:
    with pytest.raises(SchemaError, match="not initialised yet"):
        ModuleSource(nn.LazyLinear(2))


def test_two_widths_in_one_storage_are_tensors_of_their_own() -> None:
    memory = counted(8)
    wide = memory.view(torch.float32)[2:]
    source = ModuleSource(Holds(a=memory[:4], b=wide))
    assert published(source) == {"a": bits(memory[:4]), "b": bits(wide)}


# ---------------------------------------------------------------------- casts

SPECIALS = np.array(
    [
        *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x3F800000, 0x3F808000, 0x3F818000),
        *(0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF, 0x7F800000, 0xFF800000, 0x387FC000, 0x33000000),
        *(0x33000001, 0x477FEFFF, 0x477FF000, 0x00008000, 0x00018000),
    ],
    np.uint32,
)


def floats(words: NDArray[np.uint32]) -> torch.Tensor:
    return torch.from_numpy(words.view(np.float32).copy())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_fp32_masters_are_published_as_torch_casts_them(dtype: str) -> None:
    words = np.concatenate([SPECIALS, np.random.default_rng(7).integers(0, 1 << 32, 20_000, np.uint32)])
    weight = floats(words[~np.isnan(words.view(np.float32))])
    source = ModuleSource(Holds(weight=weight), dtype=dtype)
    assert source.schema.tensors[0].dtype == dtype
    assert published(source)["weight"] == bits(weight.to(getattr(torch, dtype)))


@pytest.mark.parametrize(("dtype", "nan"), [("bfloat16", 0x7FC0), ("float16", 0x7E00)])
def test_every_nan_is_published_as_one_pattern(dtype: str, nan: int) -> None:
    words = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7FA00000], np.uint32)
    assert published(ModuleSource(Holds(weight=floats(words)), dtype=dtype)) == {"weight": [nan] * len(words)}


def test_a_cast_tensor_is_read_through_its_strides() -> None:
    weight = torch.arange(12, dtype=torch.float32).reshape(3, 4)[:, 1:].t()
    assert published(ModuleSource(Holds(weight=weight), dtype="bfloat16"))["weight"] == bits(weight.to(torch.bfloat16))


def dtypes(source: ModuleSource) -> dict[str, str]:
    return {spec.name: spec.dtype for spec in source.schema.tensors}


def mixed() -> Holds:
    model = Holds(
        weight=torch.zeros(2),
        bias=torch.zeros(2),
        narrow=torch.zeros(2, dtype=torch.float16),
        steps=torch.zeros((), dtype=torch.int64),
    )
    model.register_buffer("score", torch.zeros(2))
    return model


def test_without_a_dtype_every_tensor_keeps_its_own() -> None:
    assert dtypes(ModuleSource(mixed())) == {
        "weight": "float32",
        "bias": "float32",
        "narrow": "float16",
        "steps": "int64",
        "score": "float32",
    }


def test_one_dtype_applies_to_float32_parameters_only() -> None:
    assert dtypes(ModuleSource(mixed(), dtype="bfloat16")) == {
        "weight": "bfloat16",
        "bias": "bfloat16",
        "narrow": "float16",
        "steps": "int64",
        "score": "float32",
    }


def test_the_first_pattern_that_fits_counts_and_what_fits_none_stays() -> None:
    found = dtypes(ModuleSource(mixed(), dtype={"bi*": "float32", "[bw]*": "bfloat16", "sc*": "float16"}))
    assert found == {"weight": "bfloat16", "bias": "float32", "narrow": "float16", "steps": "int64", "score": "float16"}


@pytest.mark.parametrize(("pattern", "wanted"), [("narrow", "bfloat16"), ("steps", "int32"), ("weight", "float64")])
def test_a_cast_that_is_not_known_is_refused_by_name(pattern: str, wanted: str) -> None:
    with pytest.raises(SchemaError, match=f"^{pattern}: no cast from .* to {wanted}; known: float32 to bfloat16"):
        ModuleSource(mixed(), dtype={pattern: wanted})


def test_a_dtype_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(SchemaError, match=r"bfloat16, .*found 'bf16'"):
        ModuleSource(mixed(), dtype={"weight": "bf16"})


def test_one_dtype_that_no_parameter_can_be_cast_to_is_refused() -> None:
    with pytest.raises(SchemaError, match="no cast from float32 to float8_e4m3fn"):
        ModuleSource(mixed(), dtype="float8_e4m3fn")


# ---------------------------------------------------------------------- rebound storage


def replace(model: Holds) -> None:
    model.weight = nn.Parameter(model.weight.detach().clone())


def rebind(model: Holds) -> None:
    model.weight.data = model.weight.data.clone()


def offload(model: Holds) -> None:
    """Freed, and allocated again somewhere else."""
    storage, kept = model.weight.untyped_storage(), model.weight.detach().clone()
    storage.resize_(0)
    model.taken = torch.zeros(4, 4, dtype=torch.bfloat16)
    storage.resize_(kept.untyped_storage().nbytes())
    model.weight.data.copy_(kept)


def share(model: Holds) -> None:
    """Into a flat buffer, as trainers keep them: another offset in a storage of two."""
    flat = torch.cat([torch.zeros(1, dtype=torch.bfloat16), model.weight.detach().reshape(-1), model.bias.detach()])
    model.weight.data, model.bias.data = flat[1:17].view(4, 4), flat[17:]


def reorder(model: Holds) -> None:
    weight = model.weight
    del model.weight
    model.weight = weight


@pytest.mark.parametrize("move", [replace, rebind, offload, share, reorder], ids=lambda f: f.__name__)
def test_storage_that_moved_is_bound_again(move: Callable[[Holds], None]) -> None:
    model = Holds(weight=counted(4, 4), bias=counted(4))
    source = ModuleSource(model)
    shards = source.shards
    for _ in range(3):
        move(model)
        with torch.no_grad():
            model.weight.view(torch.int16).add_(1)
        assert published(source) == {"weight": bits(model.weight), "bias": bits(model.bias)}
        assert source.shards is shards


def test_a_source_keeps_no_memory_that_the_trainer_gave_up() -> None:
    model = Holds(weight=torch.zeros(1 << 12, dtype=torch.bfloat16))
    source = ModuleSource(model)
    source.storages()
    storage = weakref.ref(model.weight.untyped_storage())
    rebind(model)
    assert storage() is None


def test_memory_lives_for_as_long_as_it_is_borrowed() -> None:
    model = Holds(weight=counted(1 << 12))
    borrowed = ModuleSource(model).storages()
    model.weight.data = torch.zeros(1 << 12, dtype=torch.bfloat16)
    assert borrowed[0].tolist() == bits(counted(1 << 12))


def restride(model: Holds) -> None:
    model.weight.data = model.weight.data.t()


def reshape(model: Holds) -> None:
    model.weight.data = model.weight.data.view(2, 8)


def cut(model: Holds) -> None:
    model.weight.data = model.weight.data[:2]


def reinterpret(model: Holds) -> None:
    model.weight.data = model.weight.data.view(torch.float16)


def free(model: Holds) -> None:
    model.weight.untyped_storage().resize_(0)


def shorten(model: Holds) -> None:
    model.weight.untyped_storage().resize_(8)


def empty(model: Holds) -> None:
    model.weight = nn.Parameter(torch.empty(4, 4, dtype=torch.bfloat16, device="meta"))


def scatter(model: Holds) -> None:
    model.weight = nn.Parameter(model.weight.detach().to_sparse())


def add(model: Holds) -> None:
    model.more = nn.Parameter(torch.zeros(2))


def add_buffer(model: Holds) -> None:
    model.register_buffer("more", torch.zeros(2))


def remove(model: Holds) -> None:
    del model.weight


def tie(model: Holds) -> None:
    model.bias = model.weight


def rename(model: Holds) -> None:
    model.other = model.weight
    del model.weight


CHANGES = {
    restride: r"weight: expected .* with strides \(4, 1\)",
    reshape: r"weight: expected torch.bfloat16 \(4, 4\)",
    cut: r"weight: expected torch.bfloat16 \(4, 4\).* found torch.bfloat16 \(2, 4\)",
    reinterpret: r"weight: .* found torch.float16",
    free: "weight: its storage holds 0 bytes",
    shorten: "weight: its storage holds 8 bytes",
    empty: "weight: .* meta",
    scatter: "weight: .*sparse",
    add: "more was added",
    add_buffer: "more was added",
    remove: "weight is gone",
    tie: r"bias: expected torch.bfloat16 \(4,\)",
    rename: "weight is gone",
}


@pytest.mark.parametrize(("change", "said"), CHANGES.items(), ids=lambda f: getattr(f, "__name__", ""))
def test_a_tensor_that_became_another_is_refused_by_name_until_it_is_back(
    change: Callable[[Holds], None], said: str
) -> None:
    model = Holds(weight=counted(4, 4), bias=counted(4))
    source = ModuleSource(model)
    change(model)
    for _ in range(2):
        with pytest.raises(StorageRebound, match=said):
            source.storages()
    for name in [name for name, _ in (*model.named_parameters(), *model.named_buffers())]:
        delattr(model, name)
    model.weight, model.bias = nn.Parameter(counted(4, 4)), nn.Parameter(counted(4))
    assert published(source) == {"weight": bits(counted(4, 4)), "bias": bits(counted(4))}


def test_a_look_that_finds_nothing_moved_leaves_the_collector_alone() -> None:
    """Objects of 20,000 tensors that live on would set it off, at ten times the cost of the look."""
    source = ModuleSource(nn.ModuleList([nn.Linear(2, 2) for _ in range(500)]))
    source.storages()
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        borrowed = source.storages()
        assert (len(borrowed), gc.get_count()[0] - before < 100) == (1000, True)
    finally:
        gc.enable()


def test_looking_for_what_moved_makes_nothing_anew_of_what_stayed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleList([nn.Linear(2, 2) for _ in range(50)])
    source = ModuleSource(model)
    before = source.storages()
    judged: list[str] = []
    monkeypatch.setattr(memory, "require_plain", lambda name, tensor: judged.append(name))
    model[7].weight.data = model[7].weight.data.clone()
    after = source.storages()
    assert judged == ["7.weight"]
    assert sum(one is not other for one, other in zip(before, after, strict=True)) == 1


def test_a_step_in_place_is_no_change_of_tensors() -> None:
    model = nn.Linear(3, 3)
    source = ModuleSource(model)
    model(torch.ones(1, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert published(source) == {name: bits(tensor) for name, tensor in model.state_dict().items()}


def tied_model() -> nn.ModuleDict:
    """A head whose weight is the embedding's."""
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3)})
    model["head"].weight = model["embed"].weight
    return model


SOURCES = {"module": ModuleSource, "dtensor": dtensor.source, "zero": zero.source}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("waive", [["head.weight"], ["head.*"], ["embed.*"]])
def test_a_tied_tensor_is_not_waived_under_one_of_its_names(make: Callable[..., Any], waive: list[str]) -> None:
    kept, left = ("head", "embed") if waive == ["embed.*"] else ("embed", "head")
    with pytest.raises(SchemaError, match=f"^{kept}.weight is tied to {left}.weight, which is waived: .*all its names"):
        make(tied_model(), waive=waive)


def test_parameters_over_the_same_memory_are_waived_together() -> None:
    memory = counted(4)
    with pytest.raises(SchemaError, match=r"^a is tied to b, which is waived"):
        ModuleSource(Holds(a=memory, b=memory.view(4), c=counted(1)), waive=["b"])
    source = ModuleSource(Holds(a=memory, b=memory, c=counted(1)), waive=["[ab]"])
    assert [spec.name for spec in source.schema.tensors] == ["c"]


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_a_waived_pattern_that_fits_nothing_is_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(SchemaError, match=r"^waive='v_haed.\*' fits no tensor; names here are 'embed.weight' and the "):
        make(tied_model(), waive=["head.bias", "v_haed.*"])


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_a_dtype_for_a_further_name_of_a_tied_tensor_says_its_first(make: Callable[..., Any]) -> None:
    said = r"^dtype=\{'head.weight': ...\} fits head.weight, which is tied to embed.weight .*; write 'embed.weight'"
    with pytest.raises(SchemaError, match=said):
        make(tied_model(), dtype={"head.weight": "bfloat16"})


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("dtype", [{"head.*": "bfloat16"}, {"head.*": "bfloat16", "embed.*": "float16"}])
def test_a_dtype_that_fits_some_tensors_and_a_further_name_of_another_is_refused(
    make: Callable[..., Any], dtype: dict[str, str]
) -> None:
    said = r"^dtype=\{'head.\*': ...\} fits head.weight, which is tied to embed.weight .*; write 'embed.weight'"
    with pytest.raises(SchemaError, match=said):
        make(tied_model(), dtype=dtype)


def test_names_of_a_tied_tensor_may_get_one_dtype_by_two_patterns() -> None:
    for patterns in ({"head.*": "bfloat16", "embed.*": "bfloat16"}, {"embed.*": "bfloat16"}, {"*.weight": "bfloat16"}):
        assert dtypes(ModuleSource(tied_model(), dtype=patterns))["embed.weight"] == "bfloat16"


def test_a_dtype_for_no_tensor_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"^dtype=\{'haed': ...\} fits no tensor; names here are 'embed.weight'"):
        ModuleSource(tied_model(), dtype={"haed": "bfloat16"})


def test_two_modules_alike_have_one_schema() -> None:
    model = nn.Linear(3, 3)
    assert ModuleSource(model).schema.digest == ModuleSource(copy.deepcopy(model)).schema.digest
