"""An engine whose weights lie in memory that may only be read is refused by name, before the first write."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.refits import Weights

from dcr.codecs.patch import Change, Operation
from dcr.errors import LayoutError
from dcr.layout import frames
from dcr.layout.frames import Layout
from dcr.layout.schema import Schema, TensorSpec
from dcr.loaders.module import ModuleLoader
from dcr.loaders.native import NativeLoader
from dcr.loaders.writable import Extent, require_writable
from dcr.sources.module import ModuleSource

NUMEL = 5000  # several pages


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "weights.bin").write_bytes(np.arange(NUMEL, dtype=np.float32).tobytes())
    return tmp_path / "weights.bin"


def mapped(file: Path, access: int) -> torch.Tensor:
    with file.open("rb") as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it may not be written
        return torch.frombuffer(mmap.mmap(handle.fileno(), 0, access=access), dtype=torch.float32)


def of_numpy(file: Path) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(np.memmap(file, np.float32, "r"))


READ_ONLY: dict[str, Callable[[Path], torch.Tensor]] = {
    "mmap": lambda file: mapped(file, mmap.ACCESS_READ),
    "memmap": of_numpy,
    "its last page": lambda file: mapped(file, mmap.ACCESS_READ)[-8:],
}
WRITABLE: dict[str, Callable[[Path], torch.Tensor]] = {
    "private mapping": lambda file: mapped(file, mmap.ACCESS_COPY),
    "torch's mapping": lambda file: torch.from_file(str(file), size=NUMEL, dtype=torch.float32),
    "plain": lambda file: torch.zeros(NUMEL),
}


def layout_of(module: torch.nn.Module) -> Layout:
    source = ModuleSource(module)
    return Layout(source.schema, tuple(frame.spec for frame in frames.plan(source.schema, source.shards)))


class Copying:
    """An engine whose loader copies by name."""

    replaces = False

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def load(self, pairs: Any) -> None:
        own = dict(self.module.named_parameters())
        for name, tensor in pairs:
            own[name].data.copy_(tensor)

    def settle(self, modules: Any) -> None:
        """Nothing to do."""

    def fingerprint(self) -> bytes:
        return b"copying"


LOADERS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "module": ModuleLoader,
    "engine": lambda module: NativeLoader(Copying(module)),
}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system has no list of mappings")
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", READ_ONLY)
def test_read_only_memory_is_refused_by_name(file: Path, kind: str, loader: str) -> None:
    engine = Weights({"fine": torch.zeros(3), "weight": READ_ONLY[kind](file)})
    layout = layout_of(Weights({"fine": torch.zeros(3), "weight": torch.zeros(engine.weight.shape)}))
    with pytest.raises(LayoutError, match=r"^weight lies in memory that may only be read \(.*weights\.bin\).*clone"):
        LOADERS[loader](engine).bind(layout)


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("kind", WRITABLE)
def test_memory_that_may_be_written_is_installed_to(file: Path, kind: str, loader: str) -> None:
    engine = Weights({"weight": WRITABLE[kind](file)})
    layout = Layout(Schema((TensorSpec("weight", "float32", (NUMEL,)),)), layout_of(engine).specs)
    bound = LOADERS[loader](engine).bind(layout)
    bound.install(bound.prepare(0, Change(Operation.OVERWRITE, None, np.arange(NUMEL, dtype=np.uint32))))
    assert engine.weight.view(torch.int32).tolist() == list(range(NUMEL))


def test_a_waived_weight_may_be_read_only(file: Path) -> None:
    engine = Weights({"fine": torch.zeros(3), "table": of_numpy(file)})
    layout = layout_of(Weights({"fine": torch.zeros(3)}))
    ModuleLoader(engine, waive=["table"]).bind(layout)
    NativeLoader(Copying(engine), waive=["table"]).bind(layout)


LIST = """\
1000-2000 r--p 00000000 08:01 1 /weights/a file.bin
2000-3000 rw-p 00001000 08:01 1 /weights/a file.bin
5000-6000 ---p 00000000 00:00 0
6000-7000 rw-s 00000000 00:00 0 [heap]
"""


@pytest.mark.parametrize(
    ("start", "stop", "where"),
    [
        (0x1000, 0x2000, "a file.bin"),
        (0x1FFF, 0x2800, "a file.bin"),
        (0x0F00, 0x1001, "a file.bin"),
        (0x4FF0, 0x7000, "an anonymous mapping"),
        (0x5FFF, 0x6001, "an anonymous mapping"),
        (0x2000, 0x3000, None),
        (0x3000, 0x5000, None),
        (0x6000, 0x7000, None),
        (0x1800, 0x1800, None),
        (0x0500, 0x1000, None),
    ],
)
def test_memory_is_looked_up_by_address(tmp_path: Path, start: int, stop: int, where: str | None) -> None:
    (tmp_path / "maps").write_text(LIST)
    if where is None:
        require_writable([Extent("w", start, stop)], tmp_path / "maps")
        return
    with pytest.raises(LayoutError, match=rf"^w lies in memory that may only be read \(.*{where}\)"):
        require_writable([Extent("w", start, stop)], tmp_path / "maps")


def test_a_system_without_a_list_of_mappings_says_nothing(tmp_path: Path) -> None:
    require_writable([Extent("w", 0x1000, 0x2000)], tmp_path / "none")
