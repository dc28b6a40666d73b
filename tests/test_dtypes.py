"""Every fixed-width dtype is refitted bit for bit, at every end: random patterns, NaN payloads among them.

The oracle reads bytes with torch, as integers of the element's width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from support.refits import FAST, Weights

import dcr
import dcr.blocking
from dcr.codecs.patch import Change, Operation
from dcr.errors import SchemaError
from dcr.layout import frames
from dcr.layout.frames import Layout
from dcr.layout.schema import DTYPES, Schema, TensorSpec, width_of, words_of
from dcr.loaders.checkpoint import SINGLE, entries_of
from dcr.loaders.module import ModuleLoader
from dcr.loaders.native import NativeLoader
from dcr.loaders.probe import random_tensor
from dcr.loaders.record import Kind
from dcr.loaders.safetensors import SafetensorsLoader
from dcr.probing.bits import bits_of, dtype_of, random_bits
from dcr.sources.module import ModuleSource

IN_FILES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "bfloat16", "float16"),
    *("float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("float8_e8m0fnu", "float4_e2m1fn_x2"),
)
SHAPE = (6, 10)
CODECS = ("raw", "fast", "gaps", "classes")


def words(dtype: str, rng: np.random.Generator, numel: int) -> np.ndarray:
    """Any bits of some elements, as words [numel, words of an element]; a bool has two patterns."""
    shape = (numel, words_of(dtype))
    if dtype == "bool":
        return rng.integers(0, 2, shape, np.uint8)
    return rng.integers(0, 1 << 8 * width_of(dtype), shape, f"u{width_of(dtype)}", endpoint=False)


def tensor(dtype: str, rng: np.random.Generator, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    flat = torch.from_numpy(words(dtype, rng, int(np.prod(shape))).reshape(-1).view(np.uint8).copy())
    return flat.view(getattr(torch, dtype)).reshape(shape)


def movable(held: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that torch can copy with any strides: it has no kernels for uint4 and its like."""
    return held.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(held.dtype.itemsize, held.dtype))


def bytes_of(held: torch.Tensor) -> bytes:
    """Row-major bytes, by copying into fresh memory."""
    plain = torch.empty(held.numel(), dtype=movable(held).dtype)
    plain.copy_(movable(held).reshape(-1))
    return plain.view(torch.uint8).numpy().tobytes()


def model(dtypes: tuple[str, ...], seed: int) -> Weights:
    """A tensor of each dtype, every second one transposed."""
    rng = np.random.default_rng(seed)
    made = {f"of_{dtype}": tensor(dtype, rng) for dtype in dtypes}
    return Weights({name: made[name].t() if number % 2 else made[name] for number, name in enumerate(made)})


def step(weights: Weights, rng: np.random.Generator, share: float) -> None:
    """Give some elements of every tensor other bits, in place."""
    for held in weights.state_dict().values():
        flat = np.frombuffer(bytes_of(held), np.uint8).reshape(held.numel(), held.dtype.itemsize).copy()
        at = np.flatnonzero(rng.random(held.numel()) < share)
        flat[at] = words(dtype_of(held), rng, len(at)).view(np.uint8).reshape(len(at), flat.shape[1])
        to = movable(held)
        to.copy_(torch.from_numpy(flat.reshape(-1)).view(to.dtype).reshape(to.shape))


def refit(trainer: Weights, loader: object, held: Callable[[], Mapping[str, bytes]], url: str, codec: str) -> None:
    """Several versions from a trainer to an engine; after each the two hold the same bytes."""
    rng = np.random.default_rng(7)
    with dcr.blocking.publisher(url, source=dcr.source(trainer), transport=FAST, codec=codec) as publisher:
        publisher.publish(1).committed()
        with dcr.blocking.subscriber(url, loader=loader, member="engine", transport=FAST) as versions:
            next(versions).install()
            for number, share in enumerate((0.05, 0.5, 1.0, 0.0, 0.2), start=2):
                step(trainer, rng, share)
                publisher.publish(number).committed()
                next(versions).install()
                expected = {name: bytes_of(value) for name, value in trainer.state_dict().items()}
                assert held() == expected


@pytest.mark.parametrize("codec", CODECS)
def test_a_module_of_every_dtype_is_refitted_bit_for_bit(tmp_path: Path, codec: str) -> None:
    trainer, engine = model(DTYPES, 1), model(DTYPES, 2)
    pointers = {name: value.data_ptr() for name, value in engine.state_dict().items()}
    loader = dcr.loader(engine)
    refit(
        trainer, loader, lambda: {n: bytes_of(v) for n, v in engine.state_dict().items()}, f"local://{tmp_path}", codec
    )
    assert pointers == {name: value.data_ptr() for name, value in engine.state_dict().items()}


def raw_bytes(folder: Path) -> dict[str, bytes]:
    """The bytes of each tensor of a file, by its header."""
    whole = (folder / SINGLE).read_bytes()
    return {entry.spec.name: whole[entry.start : entry.start + entry.nbytes] for entry in entries_of(folder)}


@pytest.mark.parametrize("codec", CODECS)
def test_a_directory_of_every_dtype_of_its_format_is_refitted_bit_for_bit(tmp_path: Path, codec: str) -> None:
    trainer, rng, folder = model(IN_FILES, 1), np.random.default_rng(2), tmp_path / "checkpoint"
    folder.mkdir()
    save_file(
        {name: tensor(dtype_of(value), rng, tuple(value.shape)) for name, value in trainer.state_dict().items()},
        folder / SINGLE,
    )
    loader = dcr.loader(folder, kind="safetensors")
    refit(trainer, loader, lambda: raw_bytes(folder), f"local://{tmp_path}/run", codec)
    with safe_open(folder / SINGLE, "pt") as opened:
        assert sorted(opened.keys()) == sorted(trainer.state_dict())


def test_a_packed_dtype_of_a_file_has_the_shape_that_torch_gives_it(tmp_path: Path) -> None:
    save_file({"w": tensor("float4_e2m1fn_x2", np.random.default_rng(0), (3, 5))}, tmp_path / SINGLE)
    assert b'"shape":[3,10]' in (tmp_path / SINGLE).read_bytes()
    (entry,) = entries_of(tmp_path)
    assert (entry.spec.dtype, entry.spec.shape) == ("float4_e2m1fn_x2", (3, 5))


def unknown(folder: Path) -> None:
    """A checkpoint with a tensor of a dtype that no table knows beside one of a usual dtype."""
    header = (
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"odd":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[8,11]}}'
    )
    padded = header + b" " * (-len(header) % 8)
    (folder / SINGLE).write_bytes(len(padded).to_bytes(8, "little") + padded + bytes(8) + b"abc")


def layout_of(source: ModuleSource, frame_elems: int = 7) -> Layout:
    return Layout(source.schema, tuple(frame.spec for frame in frames.plan(source.schema, source.shards, frame_elems)))


def test_an_unknown_dtype_of_a_file_is_refused_by_name_with_what_to_write(tmp_path: Path) -> None:
    unknown(tmp_path)
    with pytest.raises(SchemaError, match=r"odd has dtype F6_E2M3.*waive=\['odd'\]"):
        SafetensorsLoader(tmp_path).bind(layout_of(ModuleSource(Weights({"w": torch.zeros(2)}))))


def test_an_unknown_dtype_of_a_file_that_is_waived_is_left_as_it_lies(tmp_path: Path) -> None:
    unknown(tmp_path)
    loader = SafetensorsLoader(tmp_path, waive=["odd"], fsync=False)
    weights = loader.bind(layout_of(ModuleSource(Weights({"w": torch.zeros(2)}))))
    weights.install(weights.prepare(0, Change(Operation.OVERWRITE, None, np.array([1, 2], np.uint32))))
    loader.finalize()
    assert raw_bytes(tmp_path) == {"w": np.array([1, 2], "<u4").tobytes(), "odd": b"abc"}


def test_a_dtype_of_two_words_has_elements_of_its_own_shape_and_is_counted_in_words() -> None:
    spec = TensorSpec("w", "complex128", (3, 4))
    assert (spec.shape, spec.width, spec.numel, Schema((spec,)).nbytes) == ((3, 4), 8, 24, 12 * 16)


def test_the_words_of_an_element_stand_side_by_side_the_real_part_first() -> None:
    trainer = Weights(
        {"w": torch.complex(torch.arange(6.0), -torch.arange(6.0)).to(torch.complex128).reshape(2, 3).t()}
    )
    engine = Weights({"w": torch.zeros(3, 2, dtype=torch.complex128)})
    layout = layout_of(ModuleSource(trainer))
    loader = ModuleLoader(engine)
    weights = loader.bind(layout)
    values = np.stack([np.array([0, 3, 1, 4, 2, 5.0]), -np.array([0, 3, 1, 4, 2, 5.0])], axis=1).reshape(-1).view("u8")
    first = 0
    for frame in layout.frames:
        weights.install(
            weights.prepare(frame.index, Change(Operation.OVERWRITE, None, values[first : first + frame.numel]))
        )
        first += frame.numel
    assert torch.equal(engine.w, trainer.w)


def test_an_exporter_may_move_tensors_that_cannot_count() -> None:
    rng = np.random.default_rng(0)
    weights = {"scale": tensor("float8_e8m0fnu", rng), "packed": tensor("float4_e2m1fn_x2", rng)}

    def export(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in tensors.items():
            yield from ((f"{name}.{part}", rows) for part, rows in zip("ab", value.chunk(2), strict=True))

    source = dcr.source(weights, kind="probe", export=export)
    assert not source.residual
    assert sorted(spec.name for spec in source.schema.tensors) == ["packed.a", "packed.b", "scale.a", "scale.b"]


class Various(transformers.PreTrainedModel):
    """A model of transformers with a tensor of every dtype beside a layer."""

    config_class = transformers.PretrainedConfig

    def __init__(self, config: transformers.PretrainedConfig, seed: int) -> None:
        super().__init__(config)
        rng = np.random.default_rng(seed)
        self.layer = torch.nn.Linear(4, 4)
        for dtype in DTYPES:
            made = tensor(dtype, rng)
            if made.is_floating_point():
                self.register_parameter(f"of_{dtype}", torch.nn.Parameter(made, requires_grad=False))
            else:
                self.register_buffer(f"of_{dtype}", made)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: everything has its bits."""


@pytest.fixture
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("codec", CODECS)
def test_a_model_of_transformers_of_every_dtype_is_refitted_bit_for_bit(tmp_path: Path, codec: str) -> None:
    trainer, engine = (Various(transformers.PretrainedConfig(), seed) for seed in (1, 2))
    pointers = {name: value.data_ptr() for name, value in engine.state_dict().items()}
    loader = dcr.loader(engine, kind="transformers")
    held = lambda: {n: bytes_of(v) for n, v in engine.state_dict().items()}  # noqa: E731
    refit(trainer, loader, held, f"local://{tmp_path}", codec)
    assert pointers == {name: value.data_ptr() for name, value in engine.state_dict().items()}
    kinds = {verdict.kind for verdict in loader.record.verdicts}
    assert kinds == {Kind.BITS}, [(s, v) for s, v in zip(engine.state_dict(), loader.record.verdicts, strict=False)]


class ByName:
    """An engine whose loader copies by name."""

    replaces = False

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def load(self, pairs: Sequence[tuple[str, torch.Tensor]]) -> None:
        own = self.module.state_dict()
        for name, value in pairs:
            if own[name].dtype == value.dtype:
                movable(own[name]).copy_(movable(value))
            else:
                own[name].copy_(value)

    def settle(self, modules: object) -> None:
        """Nothing to do."""

    def fingerprint(self) -> bytes:
        return b"by name"


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_engine_that_copies_takes_every_dtype_as_bits(dtype: str) -> None:
    shape = (4, 6)  # more elements than a bool has patterns, in several digits
    engine = Weights({"w": tensor(dtype, np.random.default_rng(0), shape)})
    before = bytes_of(engine.w)
    loader = NativeLoader(ByName(engine))
    loader.bind(Layout(Schema((TensorSpec("w", dtype, shape),)), ()))
    assert [verdict.kind for verdict in loader.record.verdicts] == [Kind.BITS]
    assert bytes_of(engine.w) == before


def test_a_scale_that_an_engine_keeps_in_another_dtype_is_what_its_own_copy_makes() -> None:
    engine = Weights({"w": torch.zeros(300, dtype=torch.float32)})
    spec = TensorSpec("w", "float8_e8m0fnu", (300,))
    loader = NativeLoader(ByName(engine))
    trainer = Weights({"w": tensor("float8_e8m0fnu", np.random.default_rng(1), (300,))})
    layout = layout_of(ModuleSource(trainer), 300)
    assert layout.schema.tensors == (spec,)
    weights = loader.bind(layout)
    patterns = np.resize(np.arange(255, dtype=np.uint8), 300)  # all but the one that is no number
    weights.install(weights.prepare(0, Change(Operation.OVERWRITE, None, patterns)))
    loader.finalize()
    expected = torch.from_numpy(patterns).view(torch.float8_e8m0fnu).to(torch.float32)
    assert torch.equal(engine.w.view(torch.int32), expected.view(torch.int32))


NARROW = [dtype for dtype in DTYPES if width_of(dtype) <= 2 and dtype != "bool"]


@pytest.mark.parametrize("dtype", NARROW)
def test_both_places_that_probe_try_every_finite_pattern(dtype: str) -> None:
    width = width_of(dtype)
    every = np.arange(1 << 8 * width, dtype=np.uint32).astype(f"u{width}")
    values = torch.from_numpy(every.view(np.uint8)).view(getattr(torch, dtype))
    finite = (
        every[torch.isfinite(values.float()).numpy()] if values.is_floating_point() and "x2" not in dtype else every
    )
    numel = 40 << 8 * width  # each pattern is missed with e^-40
    of_sources = np.unique(random_bits(numel, dtype, (3,)))
    of_loaders = np.unique(bits_of(random_tensor(TensorSpec("w", dtype, (numel,)), 3, 0)))
    assert np.array_equal(of_sources, finite)
    assert np.array_equal(of_loaders, finite)
