"""A coverage-guided fuzz of what a member reads from the wire: chunk bodies of every codec, and messages.

    pip install . atheris && python tests/fuzz/bodies.py [-max_total_time=60] [-runs=N] [CORPUS_DIR]

Any body gives a change that is sound, or a named error; the compiled kernels and the numpy reference agree on which.
Any bytes give messages, or a WireError. The options are libFuzzer's; bodies that encoders write are where it starts.

An input is: 0 for a body or 1 for messages; for a body, 6 bytes of operation, log of the width, K and N - K; the bytes.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from pathlib import Path

import atheris
import numpy as np

with atheris.instrument_imports(include=["dcr"]):
    from dcr import kernels
    from dcr.codecs import codec
    from dcr.codecs.patch import Change, Operation
    from dcr.errors import BaseMismatch, PayloadError, WireError
    from dcr.kernels import Kernels, checked, compiled
    from dcr.layout.views import UNSIGNED, Bits
    from dcr.protocol import wire

HEADER = struct.Struct("<BBBHH")
VERBS = tuple(name for name in vars(Kernels) if not name.startswith("_"))


def base_of(numel: int, width: int) -> Bits:
    """Old bits [N], always the same."""
    return np.random.default_rng(0).integers(0, 1 << 8 * width, numel, UNSIGNED[width], endpoint=False)


def decoded(body: bytes, operation: Operation, changed: int, numel: int, width: int) -> Change | None:
    """The change of a body, None where it is refused."""
    try:
        return codec.SMALL.decode(
            body, operation=operation, changed=changed, numel=numel, width=width, base=base_of(numel, width)
        )
    except (PayloadError, BaseMismatch):
        return None


def read_body(data: bytes) -> None:
    """One input: sound or refused, whichever implementation reads it."""
    _, operation, log, changed, more = HEADER.unpack_from(data)
    numel, width = min(changed + more, 1 << 14), 1 << log % 4
    body, kind = data[HEADER.size :], Operation(operation % len(Operation))
    found = []
    for implementation in (checked, compiled):
        for verb in VERBS:
            setattr(kernels, verb, getattr(implementation, verb))
        found.append(decoded(body, kind, changed, numel, width))
    defined, ours = found
    assert (ours is None) == (defined is None), "the implementations do not agree whether to read it"
    if ours is None or defined is None:
        return
    assert np.array_equal(ours.values, defined.values)
    assert ours.values.dtype == UNSIGNED[width]
    assert (ours.positions is None) == (defined.positions is None)
    if ours.positions is None:
        assert len(ours.values) == numel
        return
    assert np.array_equal(ours.positions, defined.positions)  # type: ignore[arg-type]
    ascending = ours.positions.astype(np.int64)
    assert len(ascending) == len(ours.values) == changed
    assert (np.diff(ascending, prepend=-1) > 0).all()
    assert (ascending < numel).all()


def read_messages(data: bytes) -> None:
    """Messages that arrive in pieces are those that arrive at once."""
    reader, pieces = wire.Reader(), wire.Reader()
    try:
        whole = reader.feed(data)
    except WireError:
        return
    apart = [message for at in range(0, len(data), 7) for message in pieces.feed(data[at : at + 7])]
    assert whole == apart


def one_input(data: bytes) -> None:
    """What the fuzzer calls."""
    if len(data) < HEADER.size:
        return
    (read_messages if data[0] % 2 else read_body)(data[1:] if data[0] % 2 else data)


def write_seeds(folder: Path) -> None:
    """What the encoders write, of every codec and width."""
    rng = np.random.default_rng(1)
    for log, width in enumerate(UNSIGNED):
        numel = 6000
        base = base_of(numel, width)
        for share in (0.02, 0.8):
            positions = np.flatnonzero(rng.random(numel) < share).astype(np.uint32)
            values = rng.geometric(0.6, len(positions)).astype(UNSIGNED[width])
            sparse = Change(Operation.STEP, positions, values)
            dense = Change(Operation.OVERWRITE, None, base + rng.integers(0, 3, numel).astype(UNSIGNED[width]))
            for name, change in (("sparse", sparse), ("dense", dense)):
                header = HEADER.pack(0, int(change.operation), log, len(change.values), numel - len(change.values))
                bodies = {one.name: one.encode(change, numel) for one in (codec.RAW, codec.FAST, codec.BALANCED)}
                bodies["classes"] = codec.SMALL.encode(change, numel, base=base)
                for codec_name, body in bodies.items():
                    (folder / f"{name}-{codec_name}-{width}-{share}").write_bytes(header + body)

    abort = wire.Message(wire.Abort(wire.Identity("run", 1, 2, 1), "because"))
    chunk = wire.Message(wire.Chunk(wire.Identity("run", 1, 2, 1), 0, "gaps", 2, 9, b"d" * 32, b"c" * 16), b"body")
    for name, messages in (("abort", [abort]), ("chunk", [chunk]), ("several", [chunk, abort, chunk])):
        (folder / name).write_bytes(b"\x01" + b"".join(map(wire.encode, messages)))


def main() -> None:
    """Seeds go to a folder of their own, beside one that may be given."""
    with tempfile.TemporaryDirectory() as folder:
        write_seeds(Path(folder))
        atheris.Setup([*sys.argv, folder], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
