"""What a checkpoint directory holds is read as a stranger's: what is wrong is refused by name, and nothing changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from support.checkpoints import WEIGHTS, bound, load, save

from dcr.codecs.patch import Change, Operation
from dcr.errors import SchemaError
from dcr.loaders.checkpoint import INDEX, SINGLE, entries_of, match, placement_of
from dcr.loaders.safetensors import SafetensorsLoader
from dcr.testing.conformance.bench import layout_of
from dcr.testing.loaders import Weight

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write(path: Path, header: object, data: bytes = b"") -> int:
    """A file with this header, however wrong it is; where its data begins."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return 8 + len(text)


def tensor(dtype: str, shape: list[int], *offsets: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def require_refused(folder: Path, message: str) -> None:
    """Binding is refused, and everything in the directory is as it was."""
    before = {path.name: (path.stat(), path.read_bytes()) for path in folder.iterdir()}
    with pytest.raises(SchemaError, match=message) as refused:
        bound(folder)
    assert str(refused.value).encode()
    after = {path.name: (path.stat(), path.read_bytes()) for path in folder.iterdir()}
    assert {name: data for name, (_, data) in after.items()} == {name: data for name, (_, data) in before.items()}


# ---------------------------------------------------------------------- one file


def test_a_header_that_is_cut_is_refused_with_where_it_should_end(tmp_path: Path) -> None:
    save(tmp_path, WEIGHTS, 1)
    data = (tmp_path / SINGLE).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    (tmp_path / SINGLE).write_bytes(data[:50])
    require_refused(tmp_path, rf"{SINGLE} is cut short: its header ends at byte {end}, the file at 50; copy it anew")


def test_a_file_that_is_cut_is_refused_with_the_tensor_that_it_lacks(tmp_path: Path) -> None:
    save(tmp_path, WEIGHTS, 1)
    data = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(data[:-2])
    require_refused(tmp_path, rf"{SINGLE} is cut short: w3 ends at byte {len(data)}, the file at {len(data) - 2}")


def test_tensors_that_overlap_are_refused_with_both_names(tmp_path: Path) -> None:
    header = {"w0": tensor("BF16", [40], 0, 80), "w1": tensor("BF16", [40], 78, 158)}
    start = write(tmp_path / SINGLE, header, bytes(158))
    require_refused(tmp_path, rf"{SINGLE}: w1 begins at byte {start + 78}, within w0")


def test_a_tensor_within_another_is_refused_behind_a_small_one_too(tmp_path: Path) -> None:
    header = {"a": tensor("U8", [9], 0, 9), "b": tensor("U8", [1], 1, 2), "c": tensor("U8", [1], 5, 6)}
    write(tmp_path / SINGLE, header, bytes(9))
    require_refused(tmp_path, "b begins at byte .*, within a")


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (tensor("BF16", [5, 8], 0, 78), r"w0 takes 78 bytes at 0 of the data, expected 80 for BF16 \[5, 8\]"),
        (tensor("F4", [5], 0, 3), r"takes 3 bytes at 0 of the data, expected 2.5 for F4 \[5\]"),
        (tensor("BF16", [0], 8, 4), "w0 ends at byte 4 of the data, before it begins at 8"),
        (tensor("BF16", [-5, -8], 0, 80), "expected a dtype, a shape and two offsets"),
        (tensor("BF16", [5, 8.0], 0, 80), "expected a dtype, a shape and two offsets"),  # type: ignore[list-item]
        (tensor("BF16", [True], 0, 2), "expected a dtype, a shape and two offsets"),
        (tensor("BF16", [5, 8], 0, 80, 80), "is not a safetensors file"),
        (tensor("BF16", [1 << 80], 0, 1 << 81), "is cut short"),
        ({"dtype": ["BF16"], "shape": [1], "data_offsets": [0, 2]}, "expected a dtype, a shape and two offsets"),
        ([1, 2], "is not a safetensors file"),
        (None, "is not a safetensors file"),
    ],
)
def test_a_tensor_that_makes_no_sense_is_refused_by_name(tmp_path: Path, about: object, message: str) -> None:
    write(tmp_path / SINGLE, {"w0": about}, bytes(80))
    require_refused(tmp_path, f"{SINGLE}.*{message}")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[]", "expected a JSON object, found list"),
        (b"[" * 100_000, "RecursionError"),
        (b'{"w0":' * 100_000, "RecursionError"),
        (b'{"w0":{},"w0":{}}', "'w0' occurs twice"),
        (b'{"\xff":{}}', "is not a safetensors file"),
    ],
    ids=["list", "deep list", "deep object", "twice", "no UTF-8"],
)
def test_a_header_that_is_none_is_refused(tmp_path: Path, header: bytes, message: str) -> None:
    write(tmp_path / SINGLE, header)
    require_refused(tmp_path, f"{SINGLE}.*{message}")


def test_a_name_with_a_lone_surrogate_is_refused_in_a_message_that_can_be_printed(tmp_path: Path) -> None:
    write(tmp_path / SINGLE, {"w\ud800": tensor("U8", [1], 0, 1)}, b"x")
    require_refused(tmp_path, rf"{SINGLE}: the name 'w\\ud800' is no text")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / SINGLE).mkdir()
    with pytest.raises(SchemaError, match=f"{SINGLE} is not a safetensors file"):
        bound(tmp_path)


def test_a_tensor_off_its_alignment_is_refused_with_its_byte(tmp_path: Path) -> None:
    header = {"flag": tensor("U8", [1], 0, 1), "w0": tensor("BF16", [40], 1, 81)}
    start = write(tmp_path / SINGLE, header, bytes(81))
    layout = layout_of({"w0": Weight("bfloat16", np.zeros(40, np.uint16))})
    with pytest.raises(SchemaError, match=rf"{SINGLE}: w0 begins at byte {start + 1}, expected a multiple of its"):
        SafetensorsLoader(tmp_path, waive=["flag"]).bind(layout)


def test_a_tensor_off_its_alignment_can_be_waived(tmp_path: Path) -> None:
    header = {"flag": tensor("U8", [1], 0, 1), "odd": tensor("BF16", [40], 1, 81)}
    write(tmp_path / SINGLE, header, bytes(81))
    layout = layout_of({"flag": Weight("uint8", np.zeros(1, np.uint8))})
    SafetensorsLoader(tmp_path, waive=["odd"]).bind(layout)


@given(st.data())
def test_a_flipped_header_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """And what the format's own package reads as well is read as the same."""
    folder = tmp_path_factory.mktemp("flipped")
    save(folder, {name: WEIGHTS[name] for name in ("w0", "w1")}, 1)
    octets = bytearray((folder / SINGLE).read_bytes())
    end = 8 + int.from_bytes(octets[:8], "little")
    for at in data.draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=3)):
        octets[at] = data.draw(st.integers(0, 255))
    (folder / SINGLE).write_bytes(octets)
    try:
        entries = entries_of(folder)
    except SchemaError:
        return
    try:
        with safe_open(folder / SINGLE, "np") as opened:
            names = list(opened.keys())
    except SafetensorError:
        return
    assert sorted(entry.spec.name for entry in entries) == sorted(names)


# ---------------------------------------------------------------------- an index and its files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path, WEIGHTS, 2)
    return tmp_path


def change_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_a_missing_shard_is_refused_with_what_should_be_in_it(folder: Path) -> None:
    (folder / SECOND).unlink()
    require_refused(folder, rf"{SECOND} is missing: {INDEX} expects w1 and 1 more tensors in it; copy")


def test_more_than_one_missing_shard_is_counted(folder: Path) -> None:
    (folder / FIRST).unlink()
    (folder / SECOND).unlink()
    require_refused(folder, rf"{FIRST} is missing: .*, and 1 more files are missing; copy the checkpoint anew")


def test_a_cut_shard_is_refused_by_name(folder: Path) -> None:
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:-1])
    require_refused(folder, rf"{SECOND} is cut short: w3 ends at byte")


def test_a_tensor_in_two_shards_is_refused_with_both(folder: Path) -> None:
    write(folder / "more.safetensors", {"w0": tensor("BF16", [40], 0, 80)}, bytes(80))
    change_index(folder, lambda where: where.update(w0="more.safetensors"))
    require_refused(folder, rf"w0 lies in {FIRST}, more\.safetensors, expected in one file only")


def test_a_tensor_of_the_index_that_no_file_has_is_refused(folder: Path) -> None:
    change_index(folder, lambda where: where.update(w9=FIRST))
    require_refused(folder, rf"{INDEX} expects w9 in {FIRST}, and it is in none of its files")


def test_a_tensor_in_another_file_than_the_index_says_is_refused(folder: Path) -> None:
    change_index(folder, lambda where: where.update(w0=SECOND))
    require_refused(folder, rf"{INDEX} expects w0 in {SECOND}, and it is in {FIRST} \(1 tensors differ so\)")


def test_a_tensor_that_the_index_does_not_know_is_refused(folder: Path) -> None:
    change_index(folder, lambda where: where.pop("w0") and None)
    require_refused(folder, rf"{INDEX} does not know w0 of {FIRST}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"w0": "a", "w0": "b"}}', "'w0' occurs twice"),
        ("[" * 100_000, "RecursionError"),
        ('{"weight_map": {"w\\ud800": "model-00001-of-00002.safetensors"}}', r"'w\\ud800' is no text"),
        ('{"weight_map": {"w0": "\\udfff"}}', r"the name '\\udfff' is no text"),
        ('{"weight_map": {"w0": ".."}}', "is not a safetensors file"),
        ('{"weight_map": {"w0": "a/b"}}', "names 'a/b', expected the name of a file in its directory"),
        ('{"weight_map": {"w0": "a\\u0000b"}}', "is missing"),
    ],
    ids=["twice", "deep", "surrogate", "surrogate file", "parent", "path", "nul"],
)
def test_an_index_that_misleads_is_refused(folder: Path, text: str, message: str) -> None:
    (folder / INDEX).write_text(text)
    require_refused(folder, message)


# ---------------------------------------------------------------------- dtypes

WHOLE = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
    "F4": ("float4_e2m1fn_x2", 1),
}


def data_of(path: Path) -> tuple[dict[str, Any], bytes]:
    octets = path.read_bytes()
    end = 8 + int.from_bytes(octets[:8], "little")
    return json.loads(octets[8:end]), octets[end:]


@pytest.mark.parametrize("dtype", WHOLE)
def test_every_dtype_of_the_format_is_written_as_bits_and_keeps_its_shape(tmp_path: Path, dtype: str) -> None:
    name, width = WHOLE[dtype]
    shape = [3, 8] if dtype == "F4" else [3, 4]
    write(tmp_path / SINGLE, {"w": tensor(dtype, shape, 0, 12 * width)}, bytes(12 * width))
    header, _ = data_of(tmp_path / SINGLE)
    bits = np.frombuffer(np.random.default_rng(3).bytes(12 * width), f"u{width}").reshape(3, 4)
    layout = layout_of({"w": Weight(name, bits)})
    loader = SafetensorsLoader(tmp_path, fsync=False)
    weights = loader.bind(layout)
    for frame in layout.frames:
        dense = bits.reshape(-1)[sum(f.numel for f in layout.frames[: frame.index]) :][: frame.numel]
        weights.install(weights.prepare(frame.index, Change(Operation.OVERWRITE, None, dense)))
    loader.finalize()
    assert data_of(tmp_path / SINGLE) == (header, bits.tobytes())


OPAQUE: Mapping[str, tuple[str, list[int], bytes]] = {
    "six bits": ("F6_E3M2", [4], b"abc"),
    "half bytes in rows": ("F4", [2, 3], b"abc"),
    "of a later version": ("F128", [1], bytes(range(16))),
    "torch's word": ("bfloat16", [1], b"ab"),
}


@pytest.mark.parametrize("kind", OPAQUE)
def test_what_cannot_be_published_stays_as_it_lies_once_it_is_waived(tmp_path: Path, kind: str) -> None:
    dtype, shape, octets = OPAQUE[kind]
    header = {"w": tensor("U8", [4], 0, 4), "odd": tensor(dtype, shape, 4, 4 + len(octets))}
    write(tmp_path / SINGLE, header, bytes(4) + octets)
    new = np.array([1, 2, 3, 4], np.uint8)
    layout = layout_of({"w": Weight("uint8", new)})
    with pytest.raises(SchemaError, match=rf"{SINGLE}: odd has dtype {dtype}.*write waive=\['odd'\]"):
        SafetensorsLoader(tmp_path).bind(layout)
    loader = SafetensorsLoader(tmp_path, waive=["odd"], fsync=False)
    weights = loader.bind(layout)
    weights.install(weights.prepare(0, Change(Operation.OVERWRITE, None, new)))
    loader.finalize()
    assert data_of(tmp_path / SINGLE) == (header, new.tobytes() + octets)


def test_what_cannot_be_published_is_refused_where_it_is_published(tmp_path: Path) -> None:
    write(tmp_path / SINGLE, {"w": tensor("bfloat16", [1], 0, 2)}, b"ab")
    with pytest.raises(SchemaError, match=rf"w: published as bfloat16 \(1,\), in .*{SINGLE} it is bfloat16"):
        SafetensorsLoader(tmp_path).bind(layout_of({"w": Weight("bfloat16", np.zeros(1, np.uint16))}))


def test_a_directory_is_read_without_being_owned(folder: Path) -> None:
    layout = layout_of(WEIGHTS, frame_elems=50)
    names = sorted(path.name for path in folder.iterdir())
    entries = entries_of(folder)
    placement = placement_of(folder, layout, entries, match(folder, layout, entries, ()), {})
    assert (
        placement.read(0).tobytes()
        == b"".join(load(folder)[name] for name in sorted(WEIGHTS))[: 2 * layout.frames[0].numel]
    )
    assert sorted(path.name for path in folder.iterdir()) == names
