"""A live module as a loader: published bits land in place, or nothing is touched and the error says why."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.loaders import Through
from torch import nn

from dcr.codecs.patch import Change, Operation
from dcr.errors import DigestMismatch, LayoutError, SchemaError
from dcr.layout import frames
from dcr.layout.frames import Frame, FrameSpec, Layout, Region
from dcr.layout.schema import Schema, TensorSpec
from dcr.loaders.module import ModuleLoader
from dcr.memory.ready import Ready
from dcr.protocol import digest
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


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Any bits, NaNs and denormals included."""
    octets = np.random.default_rng(seed).integers(0, 256, (int(np.prod(shape)), dtype.itemsize), np.uint8)
    return torch.from_numpy(octets).view(dtype).reshape(shape)


def octets(tensor: torch.Tensor) -> list[int]:
    """Row-major bytes."""
    plain = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return plain.view(torch.uint8).tolist() if tensor.numel() else []


def state(model: nn.Module) -> dict[str, list[int]]:
    return {name: octets(tensor) for name, tensor in model.state_dict().items()}


def layout_of(model: nn.Module, frame_elems: int = 7) -> Layout:
    source = ModuleSource(model)
    return Layout(source.schema, tuple(one.spec for one in frames.plan(source.schema, source.shards, frame_elems)))


def bound(model: nn.Module, layout: Layout, **options: list[str]) -> Through:
    loader = Through(ModuleLoader(model, **options))
    loader.bind(layout)
    return loader


def whole(frame: Frame, layout: Layout, trainer: nn.Module) -> Change:
    """A trainer's bits of one frame, all of them."""
    tensors, parts = trainer.state_dict(), []
    for region in frame.spec.regions:
        bits = np.array(octets(tensors[layout.schema.tensors[region.tensor].name]), np.uint8).view(f"u{frame.width}")
        parts += [bits[first : first + length] for first, length in region.runs().tolist()]
    return Change(Operation.OVERWRITE, None, np.concatenate(parts))


def refit(loader: Through, layout: Layout, trainer: nn.Module) -> list[Ready]:
    """All frames prepared, then all installed."""
    readies = [loader.prepare(frame.index, whole(frame, layout, trainer)) for frame in layout.frames]
    for ready in readies:
        loader.install(ready)
    return readies


def odd(seed: int) -> Holds:
    """Tensors that lie in memory in every way that a module's can."""
    fused = random(6, 4, seed=seed + 1)
    model = Holds(
        plain=random(3, 5, seed=seed),
        transposed=random(4, 3, seed=seed + 2).t(),
        sliced=random(6, 8, seed=seed + 3)[1:5:2, 2:7:3],
        offset=random(20, seed=seed + 4)[7:],
        q=fused[:2],
        k=fused[2:],
        scalar=random(dtype=torch.float32, seed=seed + 5),
        empty=torch.empty(0, 3),
        wide=random(5, dtype=torch.float64, seed=seed + 6),
        steps=random(2, dtype=torch.int64, seed=seed + 7),
        mask=random(3, dtype=torch.uint8, seed=seed + 8),
    )
    model.register_buffer("scratch", random(4, seed=seed + 9), persistent=False)
    return model


def straight(model: nn.Module) -> Holds:
    """A module of the same tensors, each in contiguous memory of its own."""
    return Holds(
        **{
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in model.state_dict().items()
        }
    )


# ---------------------------------------------------------------------- refits


def test_a_refit_brings_every_tensor_to_the_published_bits() -> None:
    trainer, engine = straight(odd(0)), odd(100)
    layout = layout_of(trainer)
    refit(bound(engine, layout), layout, trainer)
    assert state(engine) == state(trainer)


def test_a_refit_moves_no_tensor() -> None:
    trainer, engine = straight(odd(0)), odd(100)
    layout = layout_of(trainer)
    before = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in engine.state_dict().items()}
    refit(bound(engine, layout), layout, trainer)
    assert {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in engine.state_dict().items()} == before


def memory(model: nn.Module) -> list[bytes]:
    """All bytes of all storages, gaps between tensors included."""
    return [bytes(tensor.untyped_storage()) for tensor in [*model.parameters(), *model.buffers()]]


def test_a_refit_touches_nothing_between_the_tensors() -> None:
    weight = random(6, 8)
    trainer, engine = Holds(weight=random(2, 2, seed=1)), Holds(weight=weight[1:5:2, 2:7:3])
    layout = layout_of(trainer)
    expected = weight.clone()
    expected[1:5:2, 2:7:3] = trainer.weight
    refit(bound(engine, layout), layout, trainer)
    assert octets(weight) == octets(expected)


def test_buffers_that_are_not_persistent_keep_their_bits() -> None:
    trainer, engine = straight(odd(0)), odd(100)
    layout, before = layout_of(trainer), octets(engine.scratch)
    refit(bound(engine, layout), layout, trainer)
    assert octets(engine.scratch) == before


def test_an_undo_brings_every_byte_of_memory_back() -> None:
    trainer, engine = straight(odd(0)), odd(100)
    layout, before = layout_of(trainer), memory(engine)
    loader = bound(engine, layout)
    for ready in reversed(refit(loader, layout, trainer)):
        loader.undo(ready)
    assert memory(engine) == before


def test_binding_and_preparing_write_nothing() -> None:
    trainer, engine = straight(odd(0)), odd(100)
    layout, before = layout_of(trainer), memory(engine)
    loader = bound(engine, layout)
    for frame in layout.frames:
        loader.prepare(frame.index, Change(Operation.OVERWRITE, None, np.zeros(frame.numel, f"u{frame.width}")))
    assert memory(engine) == before


def test_the_digest_of_engine_and_trainer_agree_after_a_refit() -> None:
    trainer, engine = straight(odd(0)), odd(100)
    layout = layout_of(trainer)
    loader, same = bound(engine, layout), bound(trainer, layout)
    assert (loader.digest() != same.digest()).any()
    refit(loader, layout, trainer)
    digest.require_equal(loader.digest(), same.digest(), layout.schema, "engine and trainer")


def test_parameters_that_need_gradients_are_refitted_in_place() -> None:
    trainer, engine = nn.Linear(3, 2), nn.Linear(3, 2)
    layout = layout_of(trainer)
    refit(bound(engine, layout), layout, trainer)
    assert (state(engine), engine.weight.requires_grad) == (state(trainer), True)


def test_parts_of_one_storage_are_refitted_apart() -> None:
    fused = random(6, 4)
    k, v = octets(fused[2:4]), octets(fused[4:])
    engine = Holds(q=fused[:2], k=fused[2:4], v=fused[4:])
    layout = layout_of(engine, frame_elems=100)
    change = Change(Operation.OVERWRITE, np.arange(3, dtype=np.uint32), np.array([1, 2, 3], np.uint16))
    loader = bound(engine, layout)
    loader.install(loader.prepare(0, change))
    assert (octets(fused[:2])[:6], octets(fused[2:4]), octets(fused[4:])) == ([1, 0, 2, 0, 3, 0], k, v)


# ---------------------------------------------------------------------- tied tensors


def tied() -> Holds:
    weight = random(3, 2)
    return Holds(embed=weight, head=weight)


def test_a_tied_tensor_stays_tied() -> None:
    engine, trainer = tied(), Holds(embed=random(3, 2, seed=5))
    layout = layout_of(tied())
    refit(bound(engine, layout), layout, trainer)
    assert engine.embed.data_ptr() == engine.head.data_ptr()
    assert octets(engine.head) == octets(trainer.embed)


@pytest.fixture
def untied() -> tuple[Holds, Through, Layout]:
    """An engine that keeps apart what the trainer ties."""
    engine, layout = Holds(embed=random(3, 2), head=random(3, 2)), layout_of(tied())
    return engine, bound(engine, layout), layout


def test_what_is_tied_at_the_trainer_reaches_every_copy_here(untied: tuple[Holds, Through, Layout]) -> None:
    engine, loader, layout = untied
    trainer = Holds(embed=random(3, 2, seed=5))
    refit(loader, layout, trainer)
    assert octets(engine.embed) == octets(engine.head) == octets(trainer.embed)
    assert engine.embed.data_ptr() != engine.head.data_ptr()


@pytest.mark.parametrize("name", ["embed", "head"])
def test_a_copy_that_went_astray_is_noticed(untied: tuple[Holds, Through, Layout], name: str) -> None:
    engine, loader, _ = untied
    engine.get_parameter(name).view(torch.int16)[2, 1] ^= 1
    with pytest.raises(DigestMismatch, match="differ between two copies"):
        loader.digest()
    change = Change(Operation.STEP, np.array([5], np.uint32), np.array([1], np.uint16))
    assert loader.prepare(0, change).copies_agree is False


def test_a_tensor_held_only_under_an_alias_is_found() -> None:
    engine, trainer = Holds(head=random(3, 2)), Holds(embed=random(3, 2, seed=5))
    layout = layout_of(tied())
    refit(bound(engine, layout), layout, trainer)
    assert octets(engine.head) == octets(trainer.embed)


def test_what_is_tied_here_and_published_apart_is_refused() -> None:
    layout = layout_of(Holds(embed=random(3, 2), head=random(3, 2)))
    with pytest.raises(SchemaError, match="head and embed are tied here but published apart"):
        bound(tied(), layout)


# ---------------------------------------------------------------------- refusals

PUBLISHED = {"layer_0_weight": (4, 2), "layer_1_weight": (4, 2), "norm": (3,)}


def engine_of(**shapes: tuple[int, ...]) -> Holds:
    return Holds(**{name: random(*shape) for name, shape in shapes.items()})


def test_a_published_tensor_without_a_place_is_refused_with_near_names() -> None:
    layout = layout_of(engine_of(**PUBLISHED))
    engine = engine_of(layer_O_weight=(4, 2), layer_1_weight=(4, 2), norm=(3,))
    with pytest.raises(
        SchemaError, match=r"^layer_0_weight is published .*; near names here: layer_O_weight, layer_1_"
    ):
        bound(engine, layout)


def test_a_published_tensor_unlike_any_here_is_refused_without_a_hint() -> None:
    layout = layout_of(engine_of(**PUBLISHED, zzz=(2,)))
    with pytest.raises(SchemaError, match=r"^zzz is published and has no place here$"):
        bound(engine_of(**PUBLISHED), layout)


def test_another_shape_is_refused() -> None:
    engine = engine_of(**{**PUBLISHED, "layer_1_weight": (2, 4)})
    with pytest.raises(
        SchemaError, match=r"layer_1_weight: published as bfloat16 \(4, 2\), held here as bfloat16 \(2, 4\)"
    ):
        bound(engine, layout_of(engine_of(**PUBLISHED)))


def test_another_dtype_is_refused_even_of_the_same_width() -> None:
    engine = engine_of(**PUBLISHED)
    engine.norm = nn.Parameter(random(3, dtype=torch.float16), requires_grad=False)
    with pytest.raises(SchemaError, match=r"norm: published as bfloat16 .* held here as float16"):
        bound(engine, layout_of(engine_of(**PUBLISHED)))


def test_a_copy_of_another_shape_is_refused() -> None:
    engine = Holds(embed=random(3, 2), head=random(2, 3))
    with pytest.raises(SchemaError, match=r"held here as bfloat16 \(2, 3\)"):
        bound(engine, layout_of(tied()))


def test_a_weight_that_is_not_published_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"extra is held here and not published.*publish or waive it"):
        bound(engine_of(**PUBLISHED, extra=(2,)), layout_of(engine_of(**PUBLISHED)))


def test_a_persistent_buffer_that_is_not_published_is_refused() -> None:
    engine = engine_of(**PUBLISHED)
    engine.register_buffer("score", torch.zeros(2))
    with pytest.raises(SchemaError, match="score is held here and not published"):
        bound(engine, layout_of(engine_of(**PUBLISHED)))


@pytest.mark.parametrize("pattern", ["extra", "ex*", "[!ln]*"])
def test_a_waived_weight_need_not_be_published_and_keeps_its_bits(pattern: str) -> None:
    trainer, engine = engine_of(**PUBLISHED), engine_of(**PUBLISHED, extra=(2,))
    before, layout = octets(engine.extra), layout_of(trainer)
    refit(bound(engine, layout, waive=[pattern]), layout, trainer)
    assert octets(engine.extra) == before


def test_a_waiver_does_not_cover_other_names() -> None:
    with pytest.raises(SchemaError, match="extra is held here"):
        bound(engine_of(**PUBLISHED, extra=(2,)), layout_of(engine_of(**PUBLISHED)), waive=["ext", "x*"])


def test_a_waived_name_that_is_published_is_refitted() -> None:
    trainer, engine = engine_of(norm=(3,)), Holds(norm=random(3, seed=9))
    layout = layout_of(trainer)
    refit(bound(engine, layout, waive=["*"]), layout, trainer)
    assert state(engine) == state(trainer)


def test_an_expanded_tensor_is_refused() -> None:
    engine = Holds(weight=random(1, 4).expand(3, 4))
    with pytest.raises(LayoutError, match="weight is expanded"):
        bound(engine, layout_of(Holds(weight=random(3, 4))))


def test_a_window_over_itself_is_refused() -> None:
    engine = Holds(weight=random(6).as_strided((3, 3), (1, 1)))
    with pytest.raises(LayoutError, match="no memory of its own"):
        bound(engine, layout_of(Holds(weight=random(3, 3))))


OVERLAPS: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {
    "a part of the other": lambda m: {"a": m, "b": m[1:3]},
    "one element": lambda m: {"a": m[:5], "b": m[4:]},
    "strided": lambda m: {"a": m[::2], "b": m[4:6]},
    "the same, transposed": lambda m: {"a": m.view(2, 4), "b": m.view(2, 4).t()},
    "the same, reshaped": lambda m: {"a": m, "b": m.view(4, 2)},
}


@pytest.mark.parametrize("kind", OVERLAPS)
def test_tensors_that_share_part_of_their_memory_are_refused(kind: str) -> None:
    engine = Holds(**OVERLAPS[kind](random(8)))
    with pytest.raises(LayoutError, match=r"(a and b|b and a) share part of their memory"):
        bound(engine, layout_of(straight(engine)))


def test_interleaved_tensors_that_share_nothing_are_accepted() -> None:
    memory = random(8)
    trainer, engine = Holds(a=random(4, seed=1), b=random(4, seed=2)), Holds(a=memory[::2], b=memory[1::2])
    layout = layout_of(trainer)
    refit(bound(engine, layout), layout, trainer)
    assert state(engine) == state(trainer)


def test_the_tensors_that_overlap_are_named_among_interleaved_ones() -> None:
    memory = random(6)
    engine = Holds(a=memory[0::2], b=memory[1::2], c=memory[3:4])
    with pytest.raises(LayoutError, match=r"(b and c|c and b) share part of their memory"):
        bound(engine, layout_of(straight(engine)))


def test_two_widths_in_one_storage_are_refused() -> None:
    memory = random(8)
    engine = Holds(a=memory.view(torch.float32), b=memory[2:])
    with pytest.raises(SchemaError, match="share memory but not an element width"):
        bound(engine, layout_of(straight(engine)))


@pytest.mark.parametrize(("first", "second"), [(slice(0, 5), slice(4, 8)), (slice(0, 4), slice(0, 8))], ids=str)
def test_storages_that_overlap_are_refused(first: slice, second: slice) -> None:
    """Torch makes two storages of one piece of memory when it is handed over twice."""
    memory = np.zeros(8, np.float32)
    engine = Holds(a=torch.from_numpy(memory[first]), b=torch.from_numpy(memory[second]))
    with pytest.raises(LayoutError, match="share"):
        bound(engine, layout_of(straight(engine)))


@pytest.mark.parametrize("tensor", [torch.zeros(3, device="meta"), torch.eye(2).to_sparse()], ids=["meta", "sparse"])
def test_memory_of_another_kind_is_refused(tensor: torch.Tensor) -> None:
    engine = engine_of(**PUBLISHED)
    engine.register_buffer("odd", tensor)
    with pytest.raises(SchemaError, match=r"^odd: expected a dense tensor in host memory"):
        bound(engine, layout_of(engine_of(**PUBLISHED)))


def test_a_region_of_part_of_a_tensor_is_bound_to_that_part() -> None:
    schema = Schema((TensorSpec("weight", "bfloat16", (4, 4)),))
    layout = Layout(schema, (FrameSpec("bfloat16", (Region(0, 1, ((4, 4), (2, 1))),)),))
    engine = Holds(weight=torch.zeros(4, 4, dtype=torch.bfloat16).t())
    loader = bound(engine, layout)
    loader.install(loader.prepare(0, Change(Operation.OVERWRITE, None, np.arange(1, 9, dtype=np.uint16))))
    expected = np.zeros((4, 4), np.uint16)
    expected[:, 1:3] = np.arange(1, 9).reshape(4, 2)
    assert engine.weight.view(torch.int16).tolist() == expected.tolist()


def test_a_layout_that_was_refused_leaves_the_binding_as_it_was() -> None:
    trainer, engine = Holds(weight=random(3)), Holds(weight=random(3, seed=5))
    layout = layout_of(trainer)
    loader = bound(engine, layout)
    with pytest.raises(SchemaError):
        loader.bind(layout_of(Holds(other=random(3))))
    refit(loader, layout, trainer)
    assert state(engine) == state(trainer)


# ---------------------------------------------------------------------- the fingerprint of storages


def test_a_refit_and_a_step_in_place_leave_the_fingerprint() -> None:
    trainer, engine = nn.Linear(3, 2), nn.Linear(3, 2)
    layout = layout_of(trainer)
    loader = bound(engine, layout)
    before = loader.fingerprint()
    refit(loader, layout, trainer)
    with torch.no_grad():
        engine.weight += 1
    assert loader.fingerprint() == before


def replace(model: nn.Linear) -> None:
    model.weight = nn.Parameter(model.weight.detach().clone())


def rebind(model: nn.Linear) -> None:
    model.weight.data = model.weight.data.clone()


def restride(model: nn.Linear) -> None:
    model.weight.data = model.weight.data.as_strided((2, 2), (1, 2))


def shift(model: nn.Linear) -> None:
    model.weight.data = model.weight.data.view(-1)[1:]


def reinterpret(model: nn.Linear) -> None:
    model.weight.data = model.weight.data.view(torch.int32)


def add(model: nn.Linear) -> None:
    model.register_buffer("more", torch.zeros(1))


def tie(model: nn.Linear) -> None:
    model.bias = model.weight


@pytest.mark.parametrize(
    "change", [replace, rebind, restride, shift, reinterpret, add, tie], ids=lambda change: change.__name__
)
def test_memory_that_moves_changes_the_fingerprint(change: Callable[[nn.Linear], None]) -> None:
    engine = nn.Linear(2, 2).requires_grad_(False)
    kept = engine.weight.data  # so that its memory is not used again
    loader = ModuleLoader(engine)
    before = loader.fingerprint()
    change(engine)
    assert loader.fingerprint() != before
    assert kept is not None
