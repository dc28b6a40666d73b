"""What an engine computes with besides its weights: constants and packed copies that no install reaches.

After an install such an engine's weights are right and its output is old. What can be seen of it is warned of.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from dcr.errors import StaleCopyWarning


def warn_of_copies(module: torch.nn.Module) -> None:
    """Warn of each kind of copy of its weights that a module shows, once, with the first module that has it."""
    seen: set[str] = set()
    for name, part in module.named_modules():
        for what in _copies(part):
            if what not in seen:
                seen.add(what)
                warnings.warn(
                    f"{name or type(part).__name__} {what}; an install does not reach that copy: make it anew after "
                    "each install, or do without it",
                    StaleCopyWarning,
                    stacklevel=3,
                )


def warn_of_frozen_graphs(compilation: Any) -> None:
    """Warn if an engine of vLLM compiles its weights into its graphs; compilation: its `compilation_config`.

    With max_autotune vLLM's CPU worker turns Inductor's freezing on while it compiles, and off again: a look at
    Inductor's own setting would come too late.
    """
    inductor = compilation.inductor_compile_config
    setting = next((name for name in ("freezing", "max_autotune") if inductor.get(name)), None)
    if compilation.mode and setting:
        warnings.warn(
            f"the engine is compiled with inductor_compile_config[{setting!r}], which can make its weights constants; "
            "an install does not reach those: make the engine without it",
            StaleCopyWarning,
            stacklevel=3,
        )


def _copies(part: torch.nn.Module) -> Iterator[str]:
    """The copies of weights that a module itself shows, without its children."""
    if isinstance(part, torch.jit.ScriptModule):
        if _has_constants(part):
            yield "is a frozen ScriptModule (torch.jit.freeze), which computes with constants of its code"
    elif any(_is_packed(value) for value in vars(part).values()):
        yield "keeps weights packed for an operator library beside its parameters"
    if _is_compiled(part) and _is_freezing():
        yield "is compiled while torch._inductor.config.freezing is on, which makes constants of its weights"


def _has_constants(script: torch.jit.ScriptModule) -> bool:
    try:
        nodes = script.graph.nodes()
    except (AttributeError, RuntimeError):  # it has no forward
        return False
    return any(node.kind() == "prim::Constant" and node.output().type().kind() == "TensorType" for node in nodes)


def _is_packed(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return str(value.layout) == "torch._mkldnn"
    return isinstance(value, torch.ScriptObject)


def _is_compiled(part: torch.nn.Module) -> bool:
    """Whether a module was compiled: wrapped, in place, or by its forward alone."""
    return (
        type(part).__name__ == "OptimizedModule"
        or getattr(part, "_compiled_call_impl", None) is not None
        or hasattr(vars(part).get("forward"), "_torchdynamo_orig_callable")
    )


def _is_freezing() -> bool:
    """Whether Inductor freezes; it is not imported for that."""
    return bool(getattr(sys.modules.get("torch._inductor.config"), "freezing", False))
