"""Tensors as bits: by address, stand-ins of random bits, and whether an exported tensor is what a map says.

`Tensor.numpy()` is not used on live memory: torch takes a storage that numpy has seen for shared with it and never lets
it be resized again, which breaks whoever frees weights by resizing (FSDP1, offloading).

N  words of a tensor: elements, but for complex128, whose elements are two
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dcr import kernels
from dcr.errors import LayoutError, SchemaError
from dcr.kernels import reference
from dcr.layout.boxes import Box
from dcr.layout.schema import PAIRS, SHELLS, width_of, words_of
from dcr.layout.views import UNSIGNED, Bits, Table, rows_of

# What is no number, or infinite, by dtype: bits under a mask, and what they are then. Arithmetic may not keep these.
ENDLESS = {
    "bfloat16": (0x7F80, 0x7F80),
    "float16": (0x7C00, 0x7C00),
    "float32": (0x7F800000, 0x7F800000),
    "float64": (0x7FF0 << 48, 0x7FF0 << 48),
    "float8_e4m3fn": (0x7F, 0x7F),
    "float8_e5m2": (0x7C, 0x7C),
    "float8_e4m3fnuz": (0xFF, 0x80),
    "float8_e5m2fnuz": (0xFF, 0x80),
    "float8_e8m0fnu": (0xFF, 0xFF),
}
# The dtype of the two halves of an element.
HALVES = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
# Dtypes for which torch has no arithmetic or which do not count: no loader or exporter makes other values of them.
SYMBOLIC = frozenset({"float8_e8m0fnu", "float4_e2m1fn_x2", *SHELLS})
BLOCK = 1 << 15  # words that are worked on at a time: they stay in cache
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Memory:
    """Some bytes for numpy. keep: what owns them; numpy holds it for as long as any array over them is held."""

    __slots__ = ("__array_interface__", "keep")

    def __init__(self, address: int, elems: int, width: int, keep: object) -> None:
        self.__array_interface__ = {
            "version": 3,
            "shape": (elems,),
            "typestr": UNSIGNED[width].str,
            "data": (address, False),
        }
        self.keep = keep


def bits_at(address: int, elems: int, width: int, keep: object = None) -> Bits:
    """Host memory at an address as unsigned integers [elems], writable, whoever owns it.

    keep: its owner, which then lives as long as the array does; None: the caller sees to that.
    """
    if not elems:
        return np.zeros(0, UNSIGNED[width])
    return np.asarray(_Memory(address, elems, width, keep))


def storage_bits(tensor: torch.Tensor, width: int | None = None) -> Bits:
    """The storage of a tensor as unsigned integers of a width, else that of its words; it shares the memory.

    Raises:
        SchemaError: it is not in host memory.
    """
    storage, width = tensor.untyped_storage(), width or min(tensor.element_size(), 8)
    _require_host(tensor)
    return bits_at(storage.data_ptr(), storage.nbytes() // width, width, storage)


def dtype_of(tensor: torch.Tensor) -> str:
    """The name of a tensor's dtype in a schema."""
    return name_of(tensor.dtype)


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name in a schema."""
    return str(dtype).removeprefix("torch.")


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether this is a conjugated or negated view, whose memory holds other bits than it shows.

    `tensor.data = tensor.data.conj()` makes one of a weight, at the same address, with its shape, strides and dtype.
    """
    return tensor.is_conj() or tensor.is_neg()


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of a width that torch can move: it has no kernels for uint4 and its like.

    A lazily conjugated or negated view has no memory with its bits: its are a copy.
    """
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if dtype_of(plain) in PAIRS else plain
    return plain.view(INTEGERS[plain.element_size()])


def bits_of(tensor: torch.Tensor) -> Bits:
    """The words of a dense tensor, row-major, as unsigned integers [N]; shares memory where it can."""
    plain = words(tensor).cpu().contiguous()
    _require_host(plain)
    return bits_at(plain.data_ptr(), plain.numel(), plain.element_size(), plain.untyped_storage())


def _require_host(tensor: torch.Tensor) -> None:
    """What follows reads addresses: a tensor without memory of its own would be no error there, but a crash."""
    if tensor.device.type != "cpu" or (tensor.numel() and not tensor.untyped_storage().data_ptr()):
        raise SchemaError(f"expected a tensor in host memory, found {tensor.dtype} on {tensor.device} without memory")


def tensor_of(bits: Bits, dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `bits_of`; shares memory."""
    return torch.from_numpy(bits.view(np.uint8)).view(getattr(torch, dtype)).reshape(tuple(shape))


def counted(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Small numbers in a dtype: as values, or as patterns where it cannot count."""
    if name_of(dtype) in SYMBOLIC:
        return numbers.to(INTEGERS[dtype.itemsize]).view(dtype)
    return numbers.to(dtype)


def random_bits(numel: int, dtype: str, seed: Sequence[int]) -> Bits:
    """Random words of `numel` elements of a dtype, as `tame` leaves them."""
    width = width_of(dtype)
    octets = np.frombuffer(np.random.default_rng(list(seed)).bytes(numel * width * words_of(dtype)), np.uint8)
    bits: Bits = octets.view(UNSIGNED[width]).copy()
    tame(bits, dtype)
    return bits


def tame(bits: Bits, dtype: str) -> None:
    """Make any patterns [N] of a dtype valid and finite ones, in place: every sign and exponent stays among them."""
    if dtype == "bool":
        bits &= bits.dtype.type(1)
    part = HALVES.get(dtype, dtype)
    if part not in ENDLESS:
        return
    bits = bits.view(UNSIGNED[width_of(part)])
    mask, pattern = (bits.dtype.type(word) for word in ENDLESS[part])
    lowest = bits.dtype.type(int(mask) & -int(mask))
    for start in range(0, len(bits), BLOCK):
        block = bits[start : start + BLOCK]
        block ^= ((block & mask) == pattern).astype(bits.dtype) * lowest


def wrong_bytes(memory: Bits, canonical: Bits, boxes: Sequence[Box], kind: int = reference.NONE) -> int:
    """How many bytes of an exported tensor differ from what boxes from some memory to it predict.

    Raises:
        LayoutError: a box leaves one of the two.
    """
    if kind == reference.NONE and len(boxes) == 1 and len(boxes[0].dims) == 1 and boxes[0].dims[0][1:] == (1, 1):
        here, there, n = boxes[0].here0, boxes[0].there0, boxes[0].numel
        expected, found = memory[here : here + n], canonical[there : there + n]
        if min(len(expected), len(found)) < n:
            raise LayoutError(f"{boxes[0]} leaves {len(memory)} elements of memory or {len(canonical)} canonical ones")
    else:
        expected = kernels.read(Table((memory,), rows_of([(0, 0, box) for box in boxes])), kind)
        found = kernels.read(Table((canonical,), rows_of([(0, 0, box.inverted()) for box in boxes])))
    if expected.dtype != found.dtype:
        return found.nbytes
    return int(np.count_nonzero(expected.view(np.uint8) != found.view(np.uint8)))
