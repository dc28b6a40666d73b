"""What a module's checkpoint holds besides parameters and persistent buffers, which are all that is published.

Extra state (`get_extra_state`), what a class adds in `_save_to_state_dict` or `state_dict` (the packed weights of
quantised layers), and what a hook adds. A module of plain layers is told by its classes: nothing of it is called.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from dcr.errors import SchemaError, StorageRebound
from dcr.layout.schema import waived

EXTRA = "_extra_state"  # torch's own key


def require_exportable(module: Module, waive: Sequence[str] = ()) -> list[tuple[str, Module]]:
    """Check that an exporter, which gets parameters and persistent buffers, gets all that a checkpoint holds.

    Extra state that is None or an empty tensor is none: whole families of layers have such. These parts are returned
    with their names, since some may come: see `require_silent`.

    Raises:
        SchemaError: it holds more; names it.
    """
    if all(_is_plain(part) for part in module.modules()):
        return []
    able = [(name, part) for name, part in extras(module) if not waived(name, waive)]
    more = {name: _what(...) for name, part in able if not _is_silent(name, part)}
    more |= {name: what for name, what in beyond(module).items() if not name.endswith(EXTRA)}
    for name, what in more.items():
        if not waived(name, waive):
            raise SchemaError(
                f"{name} is in this module's state_dict() and is {what}, no parameter or persistent buffer: an "
                f"exporter is not given it; register it as a buffer, or write waive=[{name!r}] if no engine needs it"
            )
    return able


def require_silent(parts: Sequence[tuple[str, Module]]) -> None:
    """Check that parts without extra state have none still.

    Raises:
        StorageRebound: one has some; names it.
    """
    for name, part in parts:
        if not _is_silent(name, part):
            raise StorageRebound(
                f"{name} is extra state that was none when the source was made, and an exporter is not given it: make "
                f"a new source and a new publisher, with waive=[{name!r}] if no engine needs it"
            )


def _is_silent(name: str, part: Module) -> bool:
    try:
        state = part.get_extra_state()
    except Exception as error:  # somebody else's class may raise anything
        raise SchemaError(f"{name} cannot be told: get_extra_state raised {error!r}") from error
    return state is None or (isinstance(state, torch.Tensor) and not state.numel())


def require_named(module: Module, waive: Sequence[str] = ()) -> None:
    """Check that a module's checkpoint holds parameters and persistent buffers only.

    waive: patterns of what may stay as it is at every end.

    Raises:
        SchemaError: it holds more; names it.
    """
    if all(_is_plain(part) for part in module.modules()):
        return
    for name, what in beyond(module).items():
        if not waived(name, waive):
            raise SchemaError(
                f"{name} is in this module's state_dict() and is {what}, no parameter or persistent buffer: "
                "only those are kept in step; register it as a buffer, publish the model that this one was made of, "
                f"or write waive=[{name!r}] at both ends if it never changes"
            )


def extras(module: Module) -> Iterator[tuple[str, Module]]:
    """The parts of a module that can have extra state, by the name of that: its path, whatever hooks make of it."""
    return ((path + "." * bool(path) + EXTRA, part) for path, part in module.named_modules() if _has_extra(part))


def beyond(module: Module) -> dict[str, str]:
    """What a module's checkpoint holds besides parameters and persistent buffers: names, and what they are.

    Tensors over memory of a parameter or buffer do not count, whatever a hook calls them. Pre-hooks are not run: they
    cannot add to a checkpoint, and those of sharded modules move weights.

    Raises:
        SchemaError: a class or a hook of somebody else's fails.
    """
    with torch.no_grad():
        own = dict(_own(module))
        known = {_storage(tensor) for tensor in own.values()}
        return {
            name: _what(value)
            for name, value in saved_by(module).items()
            if name not in own and value is not None and (_storage(value) is None or _storage(value) not in known)
        }


def _is_plain(part: Module) -> bool:
    """Whether a module itself, without its children, saves what torch's base class saves of it."""
    kind = type(part)
    return not (_has_extra(part) or part._state_dict_hooks) and (
        kind._save_to_state_dict is Module._save_to_state_dict and kind.state_dict is Module.state_dict
    )


def _has_extra(part: Module) -> bool:
    return type(part).get_extra_state is not Module.get_extra_state


def _own(module: Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, part in module.named_modules(remove_duplicate=False):
        yield from _tensors(part, prefix + "." if prefix else "")


def _tensors(part: Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*part._parameters.items(), *part._buffers.items()):
        if tensor is not None and name not in part._non_persistent_buffers_set:
            yield prefix + name, tensor


def saved_by(module: Module) -> Mapping[str, Any]:
    saved: OrderedDict[str, Any] = OrderedDict()
    saved._metadata = OrderedDict()  # type: ignore[attr-defined]  # hooks look for it
    whole: Mapping[str, Any] = _save(module, "", saved)
    return whole


def _save(part: Module, prefix: str, into: Any) -> Any:
    """As `Module.state_dict`, but what torch's base class saves is not asked for: extra state is named only."""
    kind, metadata = type(part), {"version": part._version}
    try:
        if kind.state_dict is not Module.state_dict:
            return part.state_dict(destination=into, prefix=prefix, keep_vars=True)
        if kind._save_to_state_dict is not Module._save_to_state_dict:
            part._save_to_state_dict(into, prefix, True)
        else:
            into.update(_tensors(part, prefix))
            if _has_extra(part):
                into[prefix + EXTRA] = ...
        for name, child in part._modules.items():
            if child is not None:
                into = _save(child, f"{prefix}{name}.", into)
        for hook in part._state_dict_hooks.values():
            changed = hook(part, into, prefix, metadata)
            into = into if changed is None or getattr(hook, "_from_public_api", False) else changed
    except SchemaError:
        raise
    except Exception as error:  # a class or hook of somebody else's may raise anything
        raise SchemaError(
            f"{prefix.removesuffix('.') or 'the module'}: what its checkpoint holds cannot be told, "
            f"saving {kind.__name__} raised {error!r}"
        ) from error
    return into


def _storage(value: object) -> int | None:
    """Where a tensor's memory begins; None if it is none, or has none."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return value.untyped_storage().data_ptr() or None
    except Exception:  # a subclass of somebody else's may refuse in any way: it has no memory to look at
        return None


def _what(value: object) -> str:
    if value is ...:
        return "extra state (get_extra_state)"
    return f"a tensor ({value.dtype})" if isinstance(value, torch.Tensor) else f"of {type(value).__name__}"
