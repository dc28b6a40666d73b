"""A schema is what both ends agree on first: its digest must differ whenever a name, a dtype or a shape does."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from dcr.errors import SchemaError
from dcr.layout.schema import DTYPES, Schema, TensorSpec, keys, width_of, words_of

EMBED = TensorSpec("embed.weight", "bfloat16", (8, 4), ("lm_head.weight",))
NORM = TensorSpec("norm.weight", "float32", (4,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_are_those_of_torch(dtype: str) -> None:
    assert getattr(torch, dtype).itemsize == width_of(dtype) * words_of(dtype)


def test_sizes_are_summed_per_tensor_in_its_own_dtype() -> None:
    schema = Schema((EMBED, NORM))
    assert (schema.numel, schema.nbytes) == (36, 8 * 4 * 2 + 4 * 4)


def test_a_tensor_without_dimensions_has_one_element() -> None:
    assert TensorSpec("scale", "float32", ()).numel == 1


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(SchemaError, match=r"norm\.weight: dtype 'quint8'"):
        Schema((TensorSpec("norm.weight", "quint8", (4,)),))


def test_a_negative_extent_is_refused() -> None:
    with pytest.raises(SchemaError, match="negative extent"):
        Schema((TensorSpec("norm.weight", "float32", (-2, -2)),))


def test_a_tensor_past_63_bits_of_elements_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"norm\.weight"):
        Schema((TensorSpec("norm.weight", "float32", (1 << 40, 1 << 40)),))


@pytest.mark.parametrize(
    "other",
    [
        TensorSpec("embed.weight", "float32", (1,)),
        TensorSpec("lm_head.weight", "bfloat16", (8, 4)),
        TensorSpec("other", "float32", (1,), ("embed.weight",)),
        TensorSpec("other", "float32", (1,), ("other",)),
    ],
    ids=["two owners", "an alias published again", "an owner as alias", "its own alias"],
)
def test_a_name_has_one_owner(other: TensorSpec) -> None:
    with pytest.raises(SchemaError, match="occurs twice"):
        Schema((EMBED, other))


def test_equal_schemas_have_equal_digests() -> None:
    assert Schema((EMBED, NORM)).digest == Schema((msgspec.structs.replace(EMBED), NORM)).digest


@pytest.mark.parametrize(
    "tensors",
    [
        (NORM, EMBED),
        (EMBED,),
        (EMBED, msgspec.structs.replace(NORM, name="norm.bias")),
        (EMBED, msgspec.structs.replace(NORM, dtype="int32")),
        (EMBED, msgspec.structs.replace(NORM, shape=(2, 2))),
        (msgspec.structs.replace(EMBED, aliases=()), NORM),
    ],
    ids=["order", "a tensor less", "name", "dtype", "shape", "aliases"],
)
def test_the_digest_names_this_very_list(tensors: tuple[TensorSpec, ...]) -> None:
    assert Schema(tensors).digest != Schema((EMBED, NORM)).digest


def test_keys_are_one_pair_of_words_per_tensor() -> None:
    found = keys((EMBED, NORM))
    assert (found.shape, found.dtype) == ((2, 2), np.uint64)


def test_a_key_does_not_depend_on_the_tensors_beside_it_or_its_aliases() -> None:
    alone = keys((msgspec.structs.replace(EMBED, aliases=()),))
    assert keys((NORM, EMBED))[1].tolist() == alone[0].tolist()


@pytest.mark.parametrize("change", [{"name": "x"}, {"dtype": "int32"}, {"shape": (4, 1)}], ids=str)
def test_a_key_depends_on_name_dtype_and_shape(change: dict[str, object]) -> None:
    one, other = keys((NORM, msgspec.structs.replace(NORM, **change)))
    assert (one != other).all()


def test_keys_of_no_tensors_are_empty() -> None:
    assert keys(()).shape == (0, 2)
