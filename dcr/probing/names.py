"""Why a name of one end has no match at the other: wrappers that change names, what to write then, and near names.

torch.compile      _orig_mod.w                          weight norm      parametrizations.w.original0, w_g
data parallel      module.w                             PEFT             base_model.model.w, base_layer, lora_A
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Wrapper:
    """What wraps modules and so changes their names.

    pattern, bare: what it makes of a name, and what was there before. sure: the pattern means nothing else. trainer,
    engine: what to write at either end to get the plain names.
    """

    kind: str
    pattern: re.Pattern[str]
    bare: str
    sure: bool
    trainer: str
    engine: str


MERGED = "publish the merged model: dcr.source(model.merge_and_unload()) (of a copy, to go on with the adapter)"
NORMED = (
    "publish a copy after torch.nn.utils.parametrize.remove_parametrizations(layer, name), or what it computes, by an "
    'exporter (kind="probe")'
)
WRAPPERS = (
    _Wrapper(
        "torch.compile",
        re.compile(r"(^|\.)_orig_mod\."),
        r"\1",
        True,
        "dcr.source(model._orig_mod), or compile in place, with model.compile()",
        "dcr.loader(model._orig_mod), or compile in place, with model.compile()",
    ),
    _Wrapper(
        "data parallel",
        re.compile(r"^module\."),
        "",
        False,
        "dcr.source(model.module)",
        "dcr.loader(model.module)",
    ),
    _Wrapper(
        "activation checkpointing",
        re.compile(r"(^|\.)_checkpoint_wrapped_module\."),
        r"\1",
        True,
        'an exporter that yields the plain names (kind="probe"), or checkpoint within the layers',
        "dcr.loader(model) of a model without the wrapper",
    ),
    _Wrapper(
        "a parametrization (weight norm)",
        re.compile(r"(^|\.)parametrizations\.(\w+)\.original\d*$"),
        r"\1\2",
        True,
        NORMED,
        "torch.nn.utils.parametrize.remove_parametrizations(layer, name) in the engine's model",
    ),
    _Wrapper(
        "weight norm, spectral norm or pruning",
        re.compile(r"(^|\.)(weight|bias|weight_[hi]h_l\d+)_(g|v|u|orig|mask)$"),
        r"\1\2",
        False,
        "publish a copy after torch.nn.utils.remove_weight_norm(layer) (remove_spectral_norm, prune.remove)",
        "torch.nn.utils.remove_weight_norm(layer) (remove_spectral_norm, prune.remove) in the engine's model",
    ),
    _Wrapper(
        "PEFT",
        re.compile(r"^base_model\.model\."),
        "",
        True,
        MERGED,
        "give the loader the model that PEFT wraps, after model.merge_and_unload()",
    ),
    _Wrapper(
        "PEFT",
        re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+)\."),
        ".",
        True,
        MERGED,
        "give the loader the model that PEFT wraps, after model.merge_and_unload()",
    ),
    _Wrapper(
        "PEFT",
        re.compile(r"\.lora_(A|B|embedding_A|embedding_B|magnitude_vector)(\.\w+)?(\.weight)?$"),
        ".weight",
        True,
        MERGED,
        "give the loader the model that PEFT wraps, after model.merge_and_unload()",
    ),
)


def hint(name: str, others: Iterable[str], *, published: bool) -> str:
    """What to say behind an error about a name that the other end has not: it begins with "; ", or is empty.

    others: all names of the other end. published: True if the name is the trainer's and the others the engine's.
    """
    known = list(others)
    if name in known:  # something else is wrong with it
        return ""
    bare, wrappers = _stripped(name)
    same = [(other, theirs) for other in known for plain, theirs in [_stripped(other)] if plain == bare]
    other, theirs = min(same, key=lambda match: len(match[1]), default=("", []))
    said = _remedies([one for one in wrappers if one not in theirs and (other or one.sure)], published)
    said += _remedies([one for one in theirs if one not in wrappers], not published)
    if said:
        match = f"; {other} here is the same tensor" if other and published else f"; it is published as {other}"
        return (match if other else "") + "".join(said)
    near = difflib.get_close_matches(name, known, n=3)
    return f"; near names {'here' if published else 'published'}: {', '.join(near)}" if near else ""


def unwrapping(given: object) -> str:
    """What to write instead of a wrapped model; it begins with "; ", or is empty where nothing shows a wrapper."""
    if type(given).__name__.startswith("Peft"):
        return "; pass model.merge_and_unload()"
    for attribute in ("_orig_mod", "module"):
        if getattr(given, attribute, None) is not None:
            return f"; pass model.{attribute}"
    return ""


def _stripped(name: str) -> tuple[str, list[_Wrapper]]:
    """A name without what wrappers add, and the wrappers that it shows."""
    seen = []
    for wrapper in WRAPPERS:
        bare = wrapper.pattern.sub(wrapper.bare, name)
        if bare != name:
            name = bare
            seen.append(wrapper)
    return name, seen


def _remedies(wrappers: Iterable[_Wrapper], trainer: bool) -> list[str]:
    """What to write about some wrappers at one end, each once."""
    end = "the trainer's" if trainer else "the engine's"
    texts = [
        f"; {end} name has what {wrapper.kind} adds: write {wrapper.trainer if trainer else wrapper.engine}"
        for wrapper in wrappers
    ]
    return list(dict.fromkeys(texts))
