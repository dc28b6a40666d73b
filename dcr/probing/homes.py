"""Where the tensors of a module lie, and a look at whether they lie there still that costs little at every version.

Such a look is taken within a pause. It compares what is there with what was noted, and makes nothing of its own: no
names, no objects that live on (those of 20,000 tensors would set off Python's collector while an engine stands still).
A subclass's own code is not asked: it says nothing of where memory lies, and vLLM's parameters take four times as long.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from dcr.probing.bits import is_lazy


@dataclass(frozen=True, slots=True, eq=False)
class _Home:
    """One entry of a holder: its key, its tensor (None: there was none), and where and how that lies."""

    holder: Mapping[Any, Any] | list[Any]
    key: Any
    tensor: torch.Tensor | None
    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_lazy: bool

    def is_left(self) -> bool:
        """Whether the same tensor lies in the same place, and shows what lies there as it did (as `is_lazy` asks).

        What has no strides or address any more does not.
        """
        tensor = self.holder[self.key]
        return tensor is self.tensor and (
            tensor is None
            or (
                tensor.data_ptr() == self.address
                and tensor.shape == self.shape
                and tensor.stride() == self.stride
                and tensor.dtype is self.dtype
                and (tensor.is_neg() or (tensor.dtype.is_complex and tensor.is_conj())) is self.is_lazy
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """One module: its holders, how many entries they had, and its children. A tree is the same if all its nodes are."""

    module: torch.nn.Module
    parameters: Mapping[str, Any]
    buffers: Mapping[str, Any]
    parameter_count: int
    buffer_count: int
    passing: set[str]
    children: tuple[torch.nn.Module | None, ...]

    def is_left(self) -> bool:
        """Whether it has the same holders, entries and children."""
        module, children = self.module, self.module._modules
        return (
            module._parameters is self.parameters
            and module._buffers is self.buffers
            and len(self.parameters) == self.parameter_count
            and len(self.buffers) == self.buffer_count
            and module._non_persistent_buffers_set == self.passing
            and len(children) == len(self.children)
            and all(map(is_, children.values(), self.children))
        )


class Homes:
    """The parameters and persistent buffers of a module, as they lay when this was made.

    also: other tensors to look at, as (the dict or list that holds one, its key): holders that a module keeps for good.
    """

    def __init__(self, root: torch.nn.Module, also: Iterable[tuple[Any, Any]] = ()) -> None:
        modules = list(modules_of(root))
        self._nodes = [_node(module) for module in modules]
        with torch._C.DisableTorchFunctionSubclass():
            self._homes = [_home(*entry) for module in modules for entry in _entries(module)]
            self._homes += [_home(holder, key) for holder, key in also]

    def are_left(self) -> bool:
        """Whether nothing was moved, replaced, added or taken away."""
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return all(map(_Node.is_left, self._nodes)) and all(map(_Home.is_left, self._homes))
        except (KeyError, IndexError, RuntimeError):  # an entry is gone, or is no longer dense memory
            return False


def modules_of(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Every module once; as `torch.nn.Module.modules`, without a generator for each level."""
    seen, waiting = {root}, [root]
    while waiting:
        module = waiting.pop()
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)


def _node(module: torch.nn.Module) -> _Node:
    parameters, buffers, passing = module._parameters, module._buffers, set(module._non_persistent_buffers_set)
    children = tuple(module._modules.values())
    return _Node(module, parameters, buffers, len(parameters), len(buffers), passing, children)


def _entries(module: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    yield from ((module._parameters, key) for key in module._parameters)
    yield from ((module._buffers, key) for key in module._buffers if key not in module._non_persistent_buffers_set)


def _home(holder: Any, key: Any) -> _Home:
    tensor = holder[key]
    if tensor is None:
        return _Home(holder, key, None, 0, torch.Size(()), (), torch.uint8, False)
    try:
        place = tensor.data_ptr(), tensor.shape, tensor.stride()
    except RuntimeError:  # a tensor without memory, strides or shape: a look at it fails again, and is never "left"
        place = 0, torch.Size(()), ()
    return _Home(holder, key, tensor, *place, tensor.dtype, is_lazy(tensor))
