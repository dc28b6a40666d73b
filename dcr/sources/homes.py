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

    def is_left(self) -> bool:
        """Whether the same tensor lies in the same place, and shows the bits that lie there (as `is_lazy` asks).

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
                and not tensor.is_neg()
                and not (tensor.dtype.is_complex and tensor.is_conj())
            )
        )


class Homes:
    """The parameters and persistent buffers of a module, as they lay when this was made.

    also: other tensors to look at, as (the dict or list that holds one, its key): holders that a module keeps for good.
    """

    def __init__(self, root: torch.nn.Module, also: Iterable[tuple[Any, Any]] = ()) -> None:
        self._root = root
        self._modules = list(_modules(root))
        self._holders = [(module._parameters, module._buffers) for module in self._modules]
        self._passing = [set(module._non_persistent_buffers_set) for module in self._modules]
        self._sizes = [_sizes(module) for module in self._modules]
        with torch._C.DisableTorchFunctionSubclass():
            self._homes = [_home(*entry) for module in self._modules for entry in _entries(module)]
            self._homes += [_home(holder, key) for holder, key in also]

    def are_left(self) -> bool:
        """Whether nothing was moved, replaced, added or taken away."""
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return self._is_same_tree() and all(map(_Home.is_left, self._homes))
        except (KeyError, IndexError, RuntimeError):  # an entry is gone, or is no longer dense memory
            return False

    def _is_same_tree(self) -> bool:
        modules = list(_modules(self._root))
        if len(modules) != len(self._modules) or not all(map(is_, modules, self._modules)):
            return False
        kept = zip(modules, self._holders, self._sizes, self._passing, strict=True)
        return all(
            module._parameters is parameters
            and module._buffers is buffers
            and _sizes(module) == sizes
            and module._non_persistent_buffers_set == passing
            for module, (parameters, buffers), sizes, passing in kept
        )


def _modules(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Every module once; as `torch.nn.Module.modules`, without a generator for each level."""
    seen, waiting = {root}, [root]
    while waiting:
        module = waiting.pop()
        yield module
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)


def _sizes(module: torch.nn.Module) -> tuple[int, int]:
    return len(module._parameters), len(module._buffers)


def _entries(module: torch.nn.Module) -> Iterator[tuple[Any, Any]]:
    yield from ((module._parameters, key) for key in module._parameters)
    yield from ((module._buffers, key) for key in module._buffers if key not in module._non_persistent_buffers_set)


def _home(holder: Any, key: Any) -> _Home:
    tensor = holder[key]
    if tensor is None:
        return _Home(holder, key, None, 0, torch.Size(()), (), torch.uint8)
    try:
        place = tensor.data_ptr(), tensor.shape, tensor.stride()
    except RuntimeError:  # a tensor without memory, strides or shape: a look at it fails again, and is never "left"
        place = 0, torch.Size(()), ()
    return _Home(holder, key, tensor, *place, tensor.dtype)
