"""What an engine adapter supplies, and how the tensors are found that its loader may write."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, MutableMapping, MutableSequence, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dcr.errors import SchemaError
from dcr.layout.schema import waived
from dcr.layout.views import UNSIGNED, Bits
from dcr.probing.bits import storage_bits
from dcr.probing.tensors import require_plain

Octets = NDArray[np.uint8]
TORCH_OWN = ("_parameters", "_buffers", "_modules")
Pairs = Sequence[tuple[str, torch.Tensor]]


class Adapter(Protocol):
    """One engine rank: its model, its own loader, and its post-load steps. Nothing else of an engine is known here."""

    @property
    def module(self) -> torch.nn.Module:
        """The root of everything that the loader and post-load steps write."""
        ...

    def load(self, pairs: Pairs) -> None:
        """Run the engine's own loader on some checkpoint tensors, in this order; names it does not know may raise."""
        ...

    def settle(self, modules: Set[str]) -> None:
        """Run the post-load steps that depend on these modules, given by name, after a load wrote to them."""
        ...

    @property
    def replaces(self) -> bool:
        """True if the loader is meant to put new tensors into the model: what they hold belongs where the old lie."""
        ...

    def fingerprint(self) -> bytes:
        """Engine, version, topology, expert map: whatever decides where its loader puts what."""
        ...


Key = Any  # of a dict or a list


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """One tensor of a model, and where the model keeps it.

    module, name: the module's name, and the tensor's within it. holder, key: holder[key] is the tensor. saved: True if
    it belongs to the model's state (a parameter or a persistent buffer).
    """

    module: str
    name: str
    holder: MutableMapping[Any, Any] | MutableSequence[Any]
    key: Key
    tensor: torch.Tensor
    saved: bool = False

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}" if self.module else self.name

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    def now(self) -> Any:
        """What the model keeps there now; None if nothing."""
        try:
            return self.holder[self.key]
        except (KeyError, IndexError):
            return None

    def put(self, tensor: torch.Tensor) -> None:
        """Let the model keep a tensor there, if the place is still there."""
        if not isinstance(self.holder, list) or self.key < len(self.holder):
            self.holder[self.key] = tensor


def slots_of(root: torch.nn.Module, waive: Sequence[str] = ()) -> list[Slot]:
    """Every tensor with memory of its own that a model keeps: parameters, buffers, and other attributes.

    Attributes count if they are tensors, or lists and dicts of tensors. Of what does not belong to the model's state,
    tensors elsewhere (on a device, sparse) are left out: what happens to them is not seen here. waive: patterns of
    paths that may be of any kind.

    Raises:
        SchemaError: a parameter or persistent buffer is not dense host memory; names it.
    """
    slots = list(_slots(root))
    for slot in slots:
        if slot.saved and not waived(slot.path, waive) and _is_odd(slot.tensor):
            require_plain(slot.path, slot.tensor)
    return [slot for slot in slots if _has_memory(slot.tensor)]


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """One storage of a model: the slots in it, and its live bytes."""

    slots: tuple[Slot, ...]
    live: Octets

    @property
    def width(self) -> int:
        """Bytes per word."""
        return min(self.slots[0].tensor.element_size(), 8)

    @property
    def dtype(self) -> torch.dtype:
        """How its elements are read: a floating type where slots differ."""
        kinds = [slot.tensor.dtype for slot in self.slots]
        return next((kind for kind in kinds if kind.is_floating_point), kinds[0])

    @property
    def path(self) -> str:
        return self.slots[0].path

    def bits(self, octets: Octets) -> Bits:
        """Whole elements of a picture of this memory."""
        whole: Bits = octets[: len(octets) // self.width * self.width].view(UNSIGNED[self.width])
        return whole


def memories_of(slots: Sequence[Slot]) -> list[Memory]:
    """The storages under some slots, in the order of their first slots.

    Raises:
        SchemaError: tensors of different widths share memory; names them.
    """
    groups: dict[int, list[Slot]] = defaultdict(list)
    for slot in slots:
        groups[slot.tensor.untyped_storage().data_ptr()].append(slot)
    return [_memory(group) for group in groups.values()]


def _memory(slots: Sequence[Slot]) -> Memory:
    first = slots[0]
    for slot in slots:
        if slot.tensor.element_size() != first.tensor.element_size():
            raise SchemaError(f"{slot.path} and {first.path} share memory but not an element width")
    live = storage_bits(first.tensor, 1).view(np.uint8)
    return Memory(tuple(slots), live)


def _slots(root: torch.nn.Module) -> Iterator[Slot]:
    for name, module in root.named_modules():
        attributes = vars(module)
        for holder in (attributes["_parameters"], attributes["_buffers"]):
            for key, tensor in holder.items():
                if tensor is not None:
                    yield Slot(name, key, holder, key, tensor, key not in module._non_persistent_buffers_set)
        yield from _found(name, "", attributes, [key for key in attributes if key not in TORCH_OWN])


def _found(module: str, prefix: str, holder: Any, keys: Iterable[Key], above: tuple[int, ...] = ()) -> Iterator[Slot]:
    """Tensors in a holder, and in the lists and dicts in it, unless they hold each other."""
    within = (*above, id(holder))
    for key in keys:
        value = holder[key]
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            yield Slot(module, name, holder, key, value)
        elif isinstance(value, list | dict) and id(value) not in within:
            inner = range(len(value)) if isinstance(value, list) else list(value)
            yield from _found(module, name + ".", value, inner, within)


def _is_odd(tensor: torch.Tensor) -> bool:
    """Whether a tensor may have elements, but not as dense host memory."""
    return torch.nn.parameter.is_lazy(tensor) or tensor.is_nested or (tensor.numel() > 0 and not _has_memory(tensor))


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements that can be read as words where they lie."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.is_nested or tensor.is_quantized:
        return False
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.numel():
        return False
    return tensor.untyped_storage().data_ptr() % min(tensor.element_size(), 8) == 0
