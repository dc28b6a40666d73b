"""Raw bits of a module's state, taken without dcr: what the audit compares, and the fault that it has to find."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dcr.cli.demo import audit

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def view(tensor: Tensor) -> npt.NDArray[np.generic]:
    """The tensor's bits as integers of its width, without a copy where it is contiguous."""
    return tensor.detach().contiguous().view(INTEGERS[tensor.element_size()]).numpy()


def dump(folder: Path, model: nn.Module, *, member: str, version: int) -> None:
    """Write every parameter and persistent buffer under every name it has; fp32 parameters as the bf16 they stand for.

    A serving copy has none of those: what it holds is written as it is.
    """
    masters = {parameter.data_ptr() for parameter in model.parameters() if parameter.dtype == torch.float32}
    tensors = []
    for name, tensor in model.state_dict().items():
        held = tensor.to(torch.bfloat16) if tensor.data_ptr() in masters else tensor
        tensors.append((name, str(held.dtype).removeprefix("torch."), tuple(held.shape), view(held)))
    audit.write_dump(folder, member=member, version=version, tensors=tensors)


def flip(model: nn.Module, *, seed: int) -> str:
    """Flip one bit of one live weight, chosen by `seed`; says which."""
    draw = np.random.default_rng(seed)
    names = sorted(name for name, tensor in model.named_parameters() if tensor.dim() > 1)
    name = str(draw.choice(names))
    bits = view(model.get_parameter(name)).reshape(-1)
    index = int(draw.integers(bits.size))
    bit = int(draw.integers(8 * bits.itemsize - 1))
    bits[index] ^= bits.dtype.type(1 << bit)
    return f"flipped bit {bit} of {name}[{index}] in live memory"
