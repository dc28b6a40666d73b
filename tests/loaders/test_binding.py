"""Nothing but dcr's errors comes out of a binding, whatever memory a model has and whatever its loader does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from dcr.errors import DcrError, SchemaError
from dcr.layout.frames import Layout
from dcr.layout.schema import Schema, TensorSpec
from dcr.loaders.native import NativeLoader
from dcr.testing.hostile import Model, ToyEngine, nothing, one_by_one, parameter


class Speechless(Exception):
    """An error that cannot be written down."""

    def __str__(self) -> str:
        raise ValueError("no words")

    __repr__ = __str__


MEMORY: dict[str, Callable[[], torch.Tensor]] = {
    "dense": lambda: torch.zeros(4),
    "expanded": lambda: torch.zeros(1).expand(4),
    "overlapping": lambda: torch.zeros(7).as_strided((2, 2), (2, 1)),
    "in steps": lambda: torch.zeros(12).as_strided((2, 2), (6, 2)),
    "a part of an odd storage": lambda: torch.zeros(33, dtype=torch.uint8)[1:],
    "off its alignment": lambda: torch.from_numpy(np.zeros(33, np.uint8)[1:].view(np.float32)),
    "of no elements": lambda: torch.zeros(0),
    "of no dimensions": lambda: torch.zeros(()),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
    "sparse": lambda: torch.zeros(2, 2).to_sparse(),
    "elsewhere": lambda: torch.zeros(4, device="meta"),
    "quantised": lambda: torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8),
    "conjugated": lambda: torch.zeros(4, dtype=torch.complex64).conj(),
    "the halves of pairs": lambda: torch.zeros(4, dtype=torch.complex64).imag,
    "in pairs of words": lambda: torch.zeros(4, dtype=torch.complex128),
    "not yet there": torch.nn.parameter.UninitializedParameter,
}


def _raise(error: Exception) -> None:
    raise error


LOADS: dict[str, Callable[[dict[str, Any], torch.Tensor], Any]] = {
    "copies": lambda held, tensor: held["w"].copy_(tensor),
    "copies what does not fit": lambda held, tensor: held["w"].copy_(tensor.reshape(-1)[:2]),
    "copies all but one": lambda held, tensor: held["w"].data.view(-1)[1:].copy_(tensor.reshape(-1)[1:]),
    "replaces": lambda held, tensor: held.update(w=tensor),
    "replaces by what is elsewhere": lambda held, tensor: held.update(w=tensor.to("meta")),
    "replaces by what is sparse": lambda held, tensor: held.update(w=tensor.to_sparse()),
    "replaces by another dtype": lambda held, tensor: held.update(w=tensor.double()),
    "replaces by nothing": lambda held, tensor: held.update(w=None),
    "deletes": lambda held, tensor: held.pop("w"),
    "rebinds": lambda held, tensor: setattr(held["w"], "data", tensor.float()),
    "raises a KeyError": lambda held, tensor: _raise(KeyError("w")),
    "raises what has no words": lambda held, tensor: _raise(Speechless()),
}
PUBLISHED: dict[str, tuple[str, ...]] = {"float32": (), "uint8": ("*",), "complex128": ()}  # and what is waived


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.filterwarnings("ignore")  # torch's own, about what is done to it here
def test_a_binding_is_made_or_refused_in_words_of_dcr(memory: str, loads: str) -> None:
    for published, waive in PUBLISHED.items():
        model = torch.nn.Module()
        model.register_buffer("w", MEMORY[memory]())
        shape = (0,) if memory == "not yet there" else (2, 3) if memory == "nested" else tuple(model.w.shape)

        def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
            LOADS[loads](model._buffers, tensor)

        loader = NativeLoader(ToyEngine(model, one_by_one(load)), waive=waive)
        try:
            loader.bind(Layout(Schema((TensorSpec("w", published, shape),)), ()))
        except DcrError as error:
            assert str(error)  # noqa: PT017 - a binding may also succeed
        else:
            assert len(loader.record.verdicts) == 1


def _copies(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    parameter(model, name).copy_(tensor)


def _fails(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    raise KeyError(f"{name}_packed")


def _bind(engine: ToyEngine) -> None:
    NativeLoader(engine).bind(Layout(Schema((TensorSpec("w", "bfloat16", (4,)),)), ()))


def _settling(model: torch.nn.Module, modules: Set[str]) -> None:
    raise RuntimeError("a kernel is missing")


def test_what_a_loader_raises_is_the_cause_of_a_refusal_that_names_the_tensor() -> None:
    with pytest.raises(SchemaError, match=r"w is published and goes nowhere here.*w_packed") as raised:
        _bind(ToyEngine(Model(w=(4,)), one_by_one(_fails)))
    assert isinstance(raised.value.__cause__, KeyError)


def test_what_a_post_load_step_raises_is_the_cause_of_a_refusal() -> None:
    with pytest.raises(SchemaError, match="a kernel is missing") as raised:
        _bind(ToyEngine(Model(w=(4,)), one_by_one(_copies), _settling))
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_what_a_fingerprint_raises_is_the_cause_of_a_refusal() -> None:
    class Unknown(ToyEngine):
        def fingerprint(self) -> bytes:
            raise AttributeError("parallel_config")

    with pytest.raises(SchemaError, match=r"fingerprint.*parallel_config") as raised:
        _bind(Unknown(Model(w=(4,)), one_by_one(_copies), nothing))
    assert isinstance(raised.value.__cause__, AttributeError)


def test_a_model_is_recorded_whatever_torchs_default_device_is() -> None:
    engine = ToyEngine(Model(w=(4,)), one_by_one(_copies))
    with _default_device("meta"):
        _bind(engine)


def test_a_model_is_recorded_whatever_torchs_default_dtype_is() -> None:
    engine = ToyEngine(Model(w=(4,)), one_by_one(_copies))
    torch.set_default_dtype(torch.float64)
    try:
        _bind(engine)
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def _default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)
