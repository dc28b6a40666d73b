"""BLAKE3 in numpy: the definition of what binds a chunk's body (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020).

P  pieces of 1024 bytes      words of all pieces are compressed at once: arrays of uint32 [words, P]
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

PIECE, BLOCK = 1024, 64  # bytes
PIECE_START, PIECE_END, PARENT, ROOT = 1, 2, 4, 8
START = np.array(
    [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19], np.uint32
)
PERMUTED = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8]
COLUMNS = ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15])
DIAGONALS = ([0, 1, 2, 3], [5, 6, 7, 4], [10, 11, 8, 9], [15, 12, 13, 14])


def blake3(data: bytes | memoryview) -> bytes:
    """The hash (32 bytes) of some bytes."""
    octets = np.frombuffer(data, np.uint8)
    whole = max(0, len(octets) - 1) // PIECE  # the last piece is apart: it may be short, or all there is
    pieces = octets[: whole * PIECE].view("<u4").reshape(whole, PIECE // BLOCK, 16).transpose(1, 2, 0)
    values = _piece(pieces, [BLOCK] * 16, np.arange(whole), 0)
    padded = np.zeros((PIECE // BLOCK, BLOCK), np.uint8)
    rest = octets[whole * PIECE :]
    padded.reshape(-1)[: len(rest)] = rest
    blocks = max(1, -(-len(rest) // BLOCK))
    lengths = [min(BLOCK, len(rest) - at * BLOCK) for at in range(blocks)]
    last = _piece(padded[:blocks].view("<u4")[:, :, None], lengths, np.array([whole]), 0 if whole else ROOT)
    values = np.concatenate([values, last], axis=1)
    while values.shape[1] > 1:
        values = _parents(values)
    return values[:, 0].astype("<u4").tobytes()


def _piece(blocks: NDArray[np.uint32], lengths: Sequence[int], counters: NDArray[np.int64], last_flags: int) -> Words:
    """Values [8, P] of pieces that are given block by block, [blocks, 16, P]."""
    values = np.repeat(START[:, None], len(counters), axis=1)
    for at, (block, length) in enumerate(zip(blocks, lengths, strict=True)):
        is_last = at + 1 == len(lengths)
        flags = (PIECE_START if at == 0 else 0) | (PIECE_END | last_flags if is_last else 0)
        values = _compressed(values, block, counters.astype(np.uint64), length, flags)
    return values


def _parents(values: Words) -> Words:
    """Two neighbours [8, P] become one; what is left over goes up as it is."""
    pairs = values.shape[1] // 2
    blocks = np.concatenate([values[:, 0 : 2 * pairs : 2], values[:, 1 : 2 * pairs : 2]])
    flags = PARENT | (ROOT if values.shape[1] == 2 else 0)
    start = np.repeat(START[:, None], pairs, axis=1)
    parents = _compressed(start, blocks, np.zeros(pairs, np.uint64), BLOCK, flags)
    return np.concatenate([parents, values[:, 2 * pairs :]], axis=1)


def _compressed(values: Words, block: Words, counters: NDArray[np.uint64], length: int, flags: int) -> Words:
    """Values [8, P] after a block [16, P]."""
    rest = np.zeros((8, values.shape[1]), np.uint32)
    rest[:4] = START[:4, None]
    rest[4], rest[5] = counters.astype(np.uint32), (counters >> np.uint64(32)).astype(np.uint32)
    rest[6], rest[7] = length, flags
    state: Words = np.concatenate([values, rest])
    words = list(range(16))
    for _ in range(7):
        _mix(state, COLUMNS, block[words[0:8:2]], block[words[1:8:2]])
        _mix(state, DIAGONALS, block[words[8::2]], block[words[9::2]])
        words = [words[i] for i in PERMUTED]
    lower, upper = np.split(state, 2)
    return lower ^ upper


def _mix(state: Words, rows: Sequence[list[int]], x: Words, y: Words) -> None:
    a, b, c, d = (state[row] for row in rows)
    for added, first, second in ((x, 16, 12), (y, 8, 7)):
        a = a + b + added
        d = _rotated(d ^ a, first)
        c = c + d
        b = _rotated(b ^ c, second)
    for row, mixed in zip(rows, (a, b, c, d), strict=True):
        state[row] = mixed


def _rotated(words: Words, bits: int) -> Words:
    return words >> np.uint32(bits) | words << np.uint32(32 - bits)
