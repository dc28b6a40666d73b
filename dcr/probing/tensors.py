"""The tensors of a torch module as integer storages: what module sources and module loaders share.

Every parameter and every persistent buffer counts, under each of its names. Tensors that are one and the same region
of one storage are tied: they have one owner, the name that comes first.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dcr.errors import LayoutError, OptionError, SchemaError
from dcr.layout.boxes import Box, is_injective, whole
from dcr.layout.schema import DTYPES, PAIRS, require_text, waived, width_of
from dcr.layout.views import Bits
from dcr.probing.bits import is_lazy, storage_bits


@dataclass(frozen=True, slots=True, eq=False)
class Tied:
    """One tensor and all the names that it has in a module, the owner's first."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    is_parameter: bool

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def home(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...], str]:
        """What must not change while a map of this tensor is in use: where it lies, its shape, strides and dtype."""
        tensor = self.tensor
        storage = tensor.untyped_storage().data_ptr()
        return storage, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), self.dtype

    def span(self) -> tuple[int, int]:
        """Addresses of its first and of its last byte."""
        low, high = self.box().here_bounds
        start, width = self.tensor.untyped_storage().data_ptr(), width_of(self.dtype)
        return start + low * width, start + (high + 1) * width - 1

    def octets(self, memory: NDArray[np.uint8], origin: int) -> NDArray[np.uint8]:
        """Its bytes, as a view of a picture of the memory that begins at the address `origin`."""
        tensor, width = self.tensor, self.tensor.element_size()
        return np.lib.stride_tricks.as_strided(
            memory[self.span()[0] - origin :], (*tensor.shape, width), (*(width * s for s in tensor.stride()), 1)
        )

    def box(self) -> Box:
        """From its storage to canonical coordinates, in words."""
        return self._box(int(self.tensor.storage_offset()))

    def own_box(self) -> Box:
        """From its own memory, which begins with its first element, to canonical coordinates, in words."""
        return self._box(0)

    def _box(self, offset: int) -> Box:
        shape, strides = self.tensor.shape, self.tensor.stride()
        if self.dtype in PAIRS:
            return whole((*shape, 2), (*(2 * stride for stride in strides), 1), 2 * offset)
        return whole(shape, strides, offset)


def tensors_of(module: torch.nn.Module, waive: Sequence[str] = (), published: Container[str] = ()) -> list[Tied]:
    """All tensors of a module in the order of their owners' names.

    waive: patterns of names that are left out, unless they are published.

    Raises:
        SchemaError: a tensor is not dense host memory of a known dtype; names it.
    """
    return tied(entry for entry in named(module) if entry[0] in published or not waived(entry[0], waive))


def tied(tensors: Iterable[tuple[str, torch.Tensor, bool]]) -> list[Tied]:
    """Named tensors (True: a parameter) with those that are one and the same region of memory put together.

    Raises:
        SchemaError: a tensor is not dense host memory of a known dtype; names it.
    """
    groups: dict[object, tuple[list[str], torch.Tensor, bool]] = {}
    for name, tensor, is_parameter in tensors:
        require_plain(name, tensor)
        one = Tied((name,), tensor, is_parameter)
        key: object = one.home if tensor.numel() else name
        names, _, _ = groups.setdefault(key, ([], tensor.detach(), is_parameter))
        names.append(name)
    return [Tied(tuple(names), tensor, is_parameter) for names, tensor, is_parameter in groups.values()]


def tie_of(tensor: torch.Tensor) -> Hashable:
    """What all names of a tensor have in common, whether or not it can be published: where it lies, or the object."""
    if torch.nn.parameter.is_lazy(tensor) or _remedy(tensor) or not tensor.numel():
        return id(tensor)
    home = Tied(("",), tensor, False).home
    return home if home[0] else id(tensor)


def storages_of(tensors: Sequence[Tied]) -> tuple[list[Bits], list[int]]:
    """The distinct storages under some tensors as flat unsigned arrays that share their memory, and each one's index.

    Raises:
        SchemaError: two tensors of different element widths share a storage.
    """
    index: dict[int, int] = {}
    owner: dict[int, Tied] = {}
    storages: list[Bits] = []
    of_tensor: list[int] = []
    for tied in tensors:
        pointer = tied.tensor.untyped_storage().data_ptr()
        if pointer == 0 or pointer not in index:
            index[pointer] = len(storages)
            owner[pointer] = tied
            require_memory(tied.name, tied.tensor)
            storages.append(storage_bits(tied.tensor))
        elif width_of(owner[pointer].dtype) != width_of(tied.dtype):
            raise SchemaError(f"{tied.name} and {owner[pointer].name} share memory but not an element width")
        of_tensor.append(index[pointer])
    return storages, of_tensor


def require_separate(tensors: Sequence[Tied]) -> None:
    """Writable tensors: no byte of memory may belong to two of them, or twice to one.

    Raises:
        LayoutError: names the tensors.
    """
    for tied in tensors:
        if not is_injective([(dim.n, dim.here) for dim in tied.box().dims]):
            raise LayoutError(
                f"{tied.name} is expanded (stride {tied.tensor.stride()}): "
                "it has no memory of its own; make it contiguous"
            )
    cluster: list[Tied] = []
    end = 0
    for tied in sorted((tied for tied in tensors if tied.tensor.numel()), key=lambda tied: tied.span()):
        first, last = tied.span()
        if first > end:
            _require_disjoint(cluster)
            cluster = []
        cluster.append(tied)
        end = max(end, last)
    _require_disjoint(cluster)


def named(module: torch.nn.Module, waive: Sequence[str] = ()) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Every parameter and persistent buffer under each of its names; True for a parameter.

    waive: patterns of names that are left out.
    """
    require_module(module)
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = prefix + "." if prefix else ""
        for name, parameter in child._parameters.items():
            if parameter is not None and not (waive and waived(dot + name, waive)):
                yield dot + name, parameter, True
        for name, buffer in child._buffers.items():
            kept = buffer is not None and name not in child._non_persistent_buffers_set
            if kept and not (waive and waived(dot + name, waive)):
                yield dot + name, buffer, False


def require_module(given: object) -> None:
    """
    Raises:
        OptionError: it is something else; says what.
    """
    if not isinstance(given, torch.nn.Module):
        raise OptionError(f"expected a torch.nn.Module, whose tensors are the weights; found {type(given).__name__}")


def require_tensors(given: object, waive: Sequence[str] = (), *, kinds: tuple[type, ...] = (torch.Tensor,)) -> None:
    """Check weights that are given by name: a mapping from texts to tensors, or to other kinds that a source takes.

    Raises:
        OptionError: it is no mapping. SchemaError: it holds something else that is not waived; names it.
    """
    if not isinstance(given, Mapping):
        raise OptionError(
            f"expected a torch.nn.Module, or a mapping from names to tensors; found {type(given).__name__}"
        )
    for name, value in given.items():
        if not isinstance(name, str):
            raise SchemaError(f"expected tensors by name, as text; found {name!r}")
        require_text(name)
        if not isinstance(value, kinds) and not waived(name, waive):
            raise SchemaError(
                f"{name}: expected {' or '.join(kind.__name__ for kind in kinds)}, found {type(value).__name__}: only "
                f"tensors are kept in step; leave it out, or write waive=[{name!r}] if no engine needs it"
            )


def require_unflattened(module: torch.nn.Module) -> None:
    """Refuse a module whose parameters are views of flat ones that come and go.

    Raises:
        SchemaError: names the part that FSDP1 wraps.
    """
    for name, part in module.named_modules():
        kinds = [kind for kind in type(part).__mro__ if kind.__name__ == "FullyShardedDataParallel"]
        if any(kind.__module__.startswith("torch.distributed.") for kind in kinds):
            raise SchemaError(
                f"{name or 'the model'} is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters "
                "are freed between uses: shard it with torch.distributed.fsdp.fully_shard (FSDP2) and write "
                "dcr.source(model, kind='dtensor'), or copy its full state dict into a plain module after each step "
                "and publish that"
            )


def require_plain(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor is dense host memory of a known dtype, with a name that can be sent.

    Raises:
        SchemaError: it is not; says what it is, and what to do.
    """
    require_text(name)
    if torch.nn.parameter.is_lazy(tensor):
        raise SchemaError(f"{name} is not initialised yet; run the module once first")
    if remedy := _remedy(tensor):
        kind = type(tensor.data).__name__ if isinstance(tensor.data, torch.Tensor) else type(tensor).__name__
        raise SchemaError(
            f"{name}: expected a dense tensor in host memory, found {kind} "
            f"({str(tensor.dtype).removeprefix('torch.')}, {tensor.layout}, {tensor.device}); {remedy}, "
            f"or write waive=[{name!r}] at both ends if it never changes"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if is_lazy(tensor):
        raise SchemaError(
            f"{name}: a lazily conjugated or negated view, its memory holds other bits; "
            "call resolve_conj() and resolve_neg() first"
        )
    if dtype not in DTYPES:
        raise SchemaError(
            f"{name}: dtype {dtype} is not one of {', '.join(DTYPES)}; to leave it as it lies, write "
            f"waive=[{name!r}] at both ends"
        )
    width, address = width_of(dtype), tensor.untyped_storage().data_ptr()
    if address % width:
        raise SchemaError(
            f"{name}: its memory begins at an address that is no multiple of its {width} bytes per element; "
            "give it memory of its own, with clone()"
        )


def _remedy(tensor: torch.Tensor) -> str:
    """What to do about a tensor that is not dense host memory; nothing if it is."""
    if tensor.is_nested:
        return "publish what it consists of, each part a tensor by itself"
    if tensor.is_quantized:
        return "publish the model that it was made of, or keep its integers (int_repr) and scales as buffers"
    if tensor.layout == torch._mkldnn:  # type: ignore[attr-defined]
        return "convert it back with to_dense(), and pack it after each install"
    if tensor.layout != torch.strided:
        return "convert it with to_dense(), or keep its indices and values as buffers"
    if tensor.device.type == "meta":
        return "load the weights first (to_empty, load_state_dict)"
    if tensor.device.type != "cpu" or type(tensor.data) is not torch.Tensor:
        return "it needs a source or loader of its kind (see `dcr plugins`)"
    return ""


def require_memory(name: str, tensor: torch.Tensor) -> None:
    """Check that all elements lie in the storage: kernels read addresses, and look no further.

    Raises:
        SchemaError: they do not; names the tensor.
    """
    if not tensor.numel():
        return
    width, storage = tensor.element_size(), tensor.untyped_storage()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed_bytes = (int(tensor.storage_offset()) + last + 1) * width
    if storage.nbytes() < needed_bytes or not storage.data_ptr():
        raise SchemaError(
            f"{name}: its storage holds {storage.nbytes()} bytes of the {needed_bytes} that it needs: "
            "it was freed or resized; bring the weights back first"
        )


def _require_disjoint(cluster: Sequence[Tied]) -> None:
    """Tensors whose spans overlap may be interleaved, but not share a byte; the memory this takes is the span's."""
    if len(cluster) < 2:
        return
    origin = cluster[0].span()[0]
    taken = np.zeros(max(tied.span()[1] for tied in cluster) - origin + 1, np.uint8)
    for number, tied in enumerate(cluster):
        octets = tied.octets(taken, origin)
        if octets.any():
            taken[:] = 0
            octets[...] = 1
            other = next(before for before in cluster[:number] if before.octets(taken, origin).any())
            raise LayoutError(f"{other.name} and {tied.name} share part of their memory")
        octets[...] = 1
