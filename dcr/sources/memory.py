"""The memory of a rank's tensors: looked for at each capture, read by address, and kept by nobody in between.

A trainer may move its weights between two captures (`tensor.data = ...`, offloading in each step, a storage that was
freed and allocated again): what has the same name, shape, strides and dtype is bound again, and the shard map stays.
A source holds no storage of the trainer's while nothing is captured, so memory that was given up is free at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import torch

from dcr.errors import SchemaError, StorageRebound
from dcr.layout.frames import Shard
from dcr.layout.schema import width_of, words_of
from dcr.layout.views import Bits
from dcr.probing.bits import bits_at, dtype_of, is_lazy
from dcr.probing.tensors import Tied, require_memory, require_plain
from dcr.seams import Twins

# Where and how tensors lie: addresses, shapes, strides, dtypes.
_Places = tuple[list[int], list[torch.Size], list[tuple[int, ...]], list[torch.dtype]]


class Borrowed(tuple[Bits, ...]):
    """Live memory: per tensor its words [n] from the first to the last one, strided as the tensor is.

    The arrays are good for as long as this sequence is held: it keeps the storages.
    """

    kept: Sequence[torch.UntypedStorage] = ()


class SourceMemory:
    """The tensors of one rank by name. Array i is that of tensors[i]; those of further names (aliases) follow.

    find: gives every name and its tensor as they are now, in host memory, without copying any.
    """

    def __init__(self, tensors: Sequence[Tied], find: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self._find = find
        self._names = [one.name for one in tensors]
        self.aliases: dict[tuple[int, str], int] = {}  # (tensor, further name): its array
        for number, one in enumerate(tensors):
            for name in one.names[1:]:
                self.aliases[number, name] = len(self._names)
                self._names.append(name)
        self._walk: list[str] = []
        self._order: list[int] = []  # the arrays of what `find` gives, in its order
        found = self._found()
        for name, tensor in zip(self._names, found, strict=True):
            require_memory(name, tensor)
        self._shapes = [tensor.shape for tensor in found]
        self._dtypes = [tensor.dtype for tensor in found]
        self._strides = [_strides(tensor) for tensor in found]
        self._places: _Places = ([0] * len(found), self._shapes, [() for _ in found], self._dtypes)
        self._arrays: list[Bits] = [bits_at(0, 0, 1)] * len(found)
        self._bind(found)

    def borrow(self) -> Borrowed:
        """The memory as it lies now. What stayed costs a look at where it lies; what moved is bound again.

        Raises:
            StorageRebound: a tensor is gone, new, or no longer what it was; names it. Nothing has changed here.
        """
        tensors = self._stayed()
        if tensors is None:
            tensors = self._found()
            self._bind(tensors)
        borrowed = Borrowed(self._arrays)
        borrowed.kept = [tensor.untyped_storage() for tensor in tensors]
        return borrowed

    def _stayed(self) -> list[torch.Tensor] | None:
        """The tensors of now, if each lies where and as it lay.

        No object is made that outlives its turn of the loop: those of 20,000 tensors would set off Python's collector,
        which costs ten times the look itself.
        """
        tensors: list[torch.Tensor] = []
        addresses, shapes, strides, dtypes = self._places
        try:
            for (name, tensor), known, index in zip(self._find(), self._walk, self._order, strict=True):
                if (
                    name != known
                    or tensor.data_ptr() != addresses[index]
                    or tensor.shape != shapes[index]
                    or tensor.stride() != strides[index]
                    or tensor.dtype is not dtypes[index]
                    or is_lazy(tensor)
                ):
                    return None
                tensors.append(tensor)
        except (RuntimeError, ValueError):  # no dense memory any more; or other tensors than there were
            return None
        return tensors

    def _found(self) -> list[torch.Tensor]:
        """The tensors of now, in the order of their arrays."""
        found = list(self._find())
        walk = [name for name, _ in found]
        if walk != self._walk:
            at = {name: index for index, name in enumerate(walk)}
            for name in self._names:
                if name not in at:
                    raise StorageRebound(f"{name} is gone since the source was made; {_AGAIN}")
            if len(at) > len(self._names):
                new = sorted(at.keys() - set(self._names))[0]
                raise StorageRebound(f"{new} was added since the source was made; {_AGAIN}")
            number = {name: index for index, name in enumerate(self._names)}
            self._walk, self._order = walk, [number[name] for name in walk]
        by_name = dict(found)
        return [by_name[name] for name in self._names]

    def _bind(self, tensors: Sequence[torch.Tensor]) -> None:
        """Judge all that moved, and only then take it."""
        arrays = list(self._arrays)
        addresses, shapes, strides, dtypes = self._places
        for index, tensor in enumerate(tensors):
            now = _place(tensor)
            if now == (addresses[index], shapes[index], strides[index], dtypes[index]):
                continue
            self._require_alike(index, tensor)
            dtype = dtype_of(tensor)
            reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            elems = (reach + 1) * words_of(dtype) if tensor.numel() else 0
            arrays[index] = bits_at(tensor.data_ptr(), elems, width_of(dtype))
        self._places = _places(tensors)
        self._arrays = arrays

    def _require_alike(self, index: int, tensor: torch.Tensor) -> None:
        name = self._names[index]
        try:
            require_plain(name, tensor)
            require_memory(name, tensor)
        except SchemaError as error:
            raise StorageRebound(f"{error}. It was host memory when the source was made; {_AGAIN}") from error
        was = (self._dtypes[index], tuple(self._shapes[index]), self._strides[index])
        if (now := (tensor.dtype, tuple(tensor.shape), _strides(tensor))) != was:
            raise StorageRebound(
                f"{name}: expected {was[0]} {was[1]} with strides {was[2]}, as when the source was made, "
                f"found {now[0]} {now[1]} with strides {now[2]}; {_AGAIN}"
            )


def aliased(memory: SourceMemory, tensors: Sequence[Tied], shards: Sequence[Shard]) -> list[Twins]:
    """The further names of tensors: published as one, so whenever they lie apart, they must hold the same.

    shards: of regions that lie in arrays of `tensors`.
    """
    by_array: dict[int, list[Shard]] = defaultdict(list)
    for shard in shards:
        by_array[shard.storage].append(shard)
    return [
        Twins(
            (tensors[number].name, name),
            tuple(by_array[number]),
            tuple(msgspec.structs.replace(shard, storage=array) for shard in by_array[number]),
        )
        for (number, name), array in memory.aliases.items()
    ]


_AGAIN = "put it back, or make a new source and a new publisher"


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that matter; along a dimension of one element torch may give any."""
    if tensor.numel() == 0:
        return ()
    return tuple(stride if n > 1 else 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _place(tensor: torch.Tensor) -> Any:
    """Where and how one tensor lies; None if it is no dense memory with its own bits."""
    try:
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    except RuntimeError:
        return None
    return None if is_lazy(tensor) else place


def _places(tensors: Sequence[torch.Tensor]) -> _Places:
    """The same of all of them."""
    return (
        list(map(torch.Tensor.data_ptr, tensors)),
        [tensor.shape for tensor in tensors],
        list(map(torch.Tensor.stride, tensors)),
        [tensor.dtype for tensor in tensors],
    )
