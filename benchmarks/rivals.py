"""What dcr is measured beside, in plain torch and numpy: the encoders that are in use elsewhere, and torch's own apply.

N  elements of a tensor      K  changed ones
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch
import zstandard
from workloads import Words


def index_value(old: Words, new: Words) -> bytes:
    """int32 indices and the new values, as they are."""
    index = _changed(old, new)
    return index.to(torch.int32).numpy().tobytes() + _bits(new)[index].numpy().tobytes()


def gap16_xor_zstd(old: Words, new: Words) -> bytes:
    """The whole path: ne, nonzero, gather, diff, serialise, zstd-1, blake2b. A gap over 65,534 is 65,535 and itself."""
    index = _changed(old, new)
    values = (_bits(new)[index] ^ _bits(old)[index]).numpy()
    gaps = torch.diff(index, prepend=torch.tensor([-1])).sub_(1).numpy()
    long = gaps >= 0xFFFF
    short = np.where(long, 0xFFFF, gaps).astype(np.uint16)
    packed = zstandard.ZstdCompressor(level=1).compress(
        short.tobytes() + gaps[long].astype(np.uint32).tobytes() + values.tobytes()
    )
    return packed + hashlib.blake2b(packed, digest_size=32).digest()


def dense_xor_zstd(old: Words, new: Words) -> bytes:
    """The XOR of all elements, zstd-1."""
    return zstandard.ZstdCompressor(level=1).compress((_bits(old) ^ _bits(new)).numpy())


def index_put(target: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """Apply: int64 positions [K] and values [K], ready."""
    target.index_put_((index,), values)


def index_copy(target: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """Apply: the same by the other call."""
    target.index_copy_(0, index, values)


def _bits(words: Words) -> torch.Tensor:
    return torch.from_numpy(words.view(np.int16))


def _changed(old: Words, new: Words) -> torch.Tensor:
    return torch.nonzero(torch.ne(_bits(new), _bits(old))).squeeze(1)


ENCODERS: dict[str, Callable[[Words, Words], bytes]] = {
    "index-value": index_value,
    "gap16-xor-zstd": gap16_xor_zstd,
    "dense-xor-zstd": dense_xor_zstd,
}
APPLIERS = {"index_put": index_put, "index_copy": index_copy}
