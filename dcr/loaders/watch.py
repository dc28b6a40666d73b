"""What a loader does while it runs, seen operator by operator: evidence for the record's reasons, never its proof.

A dispatch mode belongs to one thread: what workers do is not seen here, and is found in the stand-ins afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

OVERWRITES = frozenset({"copy_", "fill_", "zero_", "set_", "resize_"})


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which memories are written, by whatever operator, or read before they are; and whether values reach Python.

    memories: numbers by the address of their stand-in. values_read: operators that take values of a source to Python.
    """

    def __init__(self, memories: Mapping[int, int], sources: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
        self.read: set[int] = set()
        self.values_read: set[str] = set()
        self._memories = memories
        self._tainted = {_address(tensor): tensor for tensor in sources}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; True would import torch's compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        tainted = any(_address(tensor) in self._tainted for tensor in inputs)
        out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        targets = _written(func, args, kwargs)
        if _looks(func):
            overwritten = {id(tensor) for tensor in targets if _overwrites(func)}
            self.read |= self._numbers(t for t in inputs if id(t) not in overwritten) - self.written
        self.written |= self._numbers(targets)
        writes = [_address(tensor) for tensor in targets]
        if tainted:
            self._taint([*outputs, *_written(func, args, kwargs)])
            if not outputs and not writes and out is not None:
                self.values_read.add(str(func).removesuffix(".default"))
        return out

    def _numbers(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """The memories that some tensors lie in, if they have elements there."""
        addresses = {_address(tensor) for tensor in tensors if tensor.numel()}
        return {self._memories[address] for address in addresses & self._memories.keys()}

    def _taint(self, tensors: Iterable[torch.Tensor]) -> None:
        """Kept, so that no later tensor gets the same address."""
        for tensor in tensors:
            address = _address(tensor)
            if address:
                self._tainted.setdefault(address, tensor)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operator's schema says it writes."""
    found: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tree_leaves(value)
    return [value for value in found if isinstance(value, torch.Tensor)]


def _looks(func: Any) -> bool:
    """False for views, and for operators that take only a shape and a dtype from their argument."""
    name = func._schema.name.removeprefix("aten::")
    if name.endswith("_like") or name.startswith("new_"):
        return False
    return not any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)


def _overwrites(func: Any) -> bool:
    """True for operators whose result does not depend on what was there before."""
    return func._schema.name.removeprefix("aten::") in OVERWRITES


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor's storage begins; 0 if it has none."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return 0
    return tensor.untyped_storage().data_ptr()
