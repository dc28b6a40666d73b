"""What a loader does while it runs, seen operator by operator: evidence for the record's reasons, never its proof.

A dispatch mode belongs to one thread: what workers do is not seen here, and is found in the stand-ins afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which memories are written, by whatever operator, and whether values of the sources reach Python.

    memories: numbers by the address of their stand-in.
    """

    def __init__(self, memories: Mapping[int, int], sources: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[int] = set()
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
        writes = [_address(tensor) for tensor in _written(func, args, kwargs)]
        self.written.update(self._memories[address] for address in writes if address in self._memories)
        if tainted:
            self._taint([*outputs, *_written(func, args, kwargs)])
            if not outputs and not writes and out is not None:
                self.values_read.add(str(func).removesuffix(".default"))
        return out

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


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor's storage begins; 0 if it has none."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return 0
    return tensor.untyped_storage().data_ptr()
