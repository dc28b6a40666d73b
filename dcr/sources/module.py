"""A whole torch module on one host as a source: every tensor is one box."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dcr.errors import SchemaError
from dcr.layout.frames import Shard
from dcr.layout.schema import Schema, TensorSpec, patterns
from dcr.layout.views import Bits
from dcr.probing.state import require_named
from dcr.probing.tensors import named, require_module, require_unflattened, tensors_of, tie_of
from dcr.seams import Copy, Residual
from dcr.sources.casts import Dtypes, canonical_dtype, kind, named_dtypes
from dcr.sources.memory import SourceMemory, aliased
from dcr.sources.waivers import require_waivable


class ModuleSource:
    """All parameters and persistent buffers of a module in host memory, any dtype, any strides, tied ones once.

    dtype: the checkpoint's dtype where it is not the module's own, by name or torch's. One applies to all float32
    *parameters* (fp32 masters of a bf16 checkpoint); buffers keep theirs. A mapping from name patterns (as in fnmatch)
    to dtypes says more; the first pattern that fits counts, and what fits none stays as it is.
    waive: patterns of names that are not published, of any kind; an engine has to waive them, too. Each has to fit
    something, and all names of a tied tensor or none.

    Raises:
        TypeError: this is no module, or no dtype. SchemaError: a tensor cannot be published or cast as asked,
            a waived pattern does not fit, or the module's checkpoint holds more than tensors; names it.
    """

    def __init__(self, module: torch.nn.Module, *, dtype: Dtypes = None, waive: Sequence[str] = ()) -> None:
        require_module(module)
        require_unflattened(module)
        waive = patterns(waive)
        require_waivable(((name, tie_of(tensor)) for name, tensor, _ in named(module)), waive, module)
        require_named(module, waive)
        tensors = tensors_of(module, waive)
        if not tensors:
            raise SchemaError(f"{type(module).__name__} has neither parameters nor persistent buffers")
        asked = named_dtypes(dtype, [tied.names for tied in tensors])
        wanted = [canonical_dtype(tied.name, tied.dtype, tied.is_parameter, asked) for tied in tensors]
        self.schema = Schema(
            tuple(
                TensorSpec(tied.name, want, tuple(tied.tensor.shape), tied.names[1:])
                for tied, want in zip(tensors, wanted, strict=True)
            )
        )
        self.shards: Sequence[Shard] = [
            Shard(number, number, tied.own_box(), kind(tied.name, tied.dtype, want))
            for number, (tied, want) in enumerate(zip(tensors, wanted, strict=True))
        ]
        self.residual: Sequence[Residual] = ()
        self._memory = SourceMemory(tensors, lambda: ((name, tensor) for name, tensor, _ in named(module, waive)))
        self.copies: Sequence[Copy] = ()
        self.twins = aliased(self._memory, tensors, self.shards)

    def storages(self) -> Sequence[Bits]:
        """See `dcr.seams.Source.storages`."""
        return self._memory.borrow()
