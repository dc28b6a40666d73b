"""A transformers model on one host as a loader: published under checkpoint names, as `from_pretrained` takes them.

What `from_pretrained` does to a checkpoint (fusing experts, splitting and permuting, casting, tying heads) is recorded
by running that very code; updates then go in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from logging import ERROR
from typing import Any

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig, PreTrainedModel
from transformers.utils import logging

from dcr.errors import OptionError, SchemaError
from dcr.loaders.engine import Pairs
from dcr.loaders.native import NativeLoader
from dcr.probing.names import unwrapping


class TransformersEngine:
    """See `dcr.loaders.engine.Adapter`."""

    replaces = True  # from_pretrained makes new parameters of what it converted

    def __init__(self, model: PreTrainedModel) -> None:
        self.module: torch.nn.Module = model
        self._model = model

    def load(self, pairs: Pairs) -> None:
        """The part of `from_pretrained` that begins when the checkpoint's tensors have been read.

        Raises:
            SchemaError: transformers has no place for some of the tensors, or could not convert them.
        """
        mapping: Any = get_model_conversion_mapping(self._model)
        config = LoadStateDictConfig(weight_mapping=mapping, device_map={"": torch.device("cpu")})
        found, _ = convert_and_load_state_dict_in_model(self._model, dict(pairs), config)
        for what in ("unexpected_keys", "mismatched_keys", "conversion_errors", "error_msgs"):
            if wrong := getattr(found, what):
                raise SchemaError(f"transformers reports {what.replace('_', ' ')}: {sorted(map(str, wrong))[:3]}")
        with _quiet():
            self._model.tie_weights(missing_keys=found.missing_keys, recompute_mapping=False)

    def settle(self, modules: Set[str]) -> None:
        """Nothing is made of weights once they are loaded."""

    def fingerprint(self) -> bytes:
        """The version, the model's class and its configuration."""
        return f"{transformers.__version__} {type(self._model)} {self._model.config.to_json_string()}".encode()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings that a checkpoint seems corrupted, as stand-ins for tied weights do. Errors are still said."""
    before = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def loader(model: PreTrainedModel, *, waive: Sequence[str] = ()) -> NativeLoader:
    """A loader for a model in host memory; waive: as in `dcr.loaders.native.NativeLoader`.

    Raises:
        OptionError: this is no model of transformers, or `waive` is no sequence.
    """
    if not isinstance(model, PreTrainedModel):
        raise OptionError(
            f"expected a model of transformers (PreTrainedModel), found {type(model).__name__}"
            + (unwrapping(model) or "; any other torch module is dcr.loader(model)")
        )
    return NativeLoader(TransformersEngine(model), waive=waive)
