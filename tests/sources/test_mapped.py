"""Who of several holders owns what: each element once, bytes even, whatever the holders' memory looks like."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.pieces import expand

from dcr.errors import SchemaError
from dcr.layout.boxes import Box, Dim
from dcr.layout.schema import Schema, TensorSpec
from dcr.sources.mapped import Piece, demoted, shared, united

examples = settings(deadline=None, max_examples=60)


class Thread:
    """One of several threads that meet as ranks do."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: list[bytes]) -> None:
        self.rank, self.size, self._barrier, self._board = rank, len(board), barrier, board

    def gather(self, data: bytes) -> list[bytes]:
        self._board[self.rank] = data
        self._barrier.wait(20)
        found = list(self._board)
        self._barrier.wait(20)
        return found


def together(size: int, act: Callable[[Any], Any]) -> list[Any]:
    barrier, board = threading.Barrier(size), [b""] * size
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: act(Thread(rank, barrier, board)), range(size)))


def schema(*shapes: tuple[int, ...], dtype: str = "bfloat16") -> Schema:
    return Schema(tuple(TensorSpec(f"t{i}", dtype, shape) for i, shape in enumerate(shapes)))


def laid(shape: tuple[int, ...], order: Sequence[int], start: int = 0) -> Box:
    """A whole tensor kept in memory in another order of dimensions."""
    here = {d: math.prod(shape[o] for o in order[k + 1 :]) for k, d in enumerate(order)}
    return Box(start, 0, tuple(Dim(n, here[d], math.prod(shape[d + 1 :])) for d, n in enumerate(shape)))


@examples
@given(st.data())
def test_replicas_own_each_element_once_and_evenly(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 4))
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4))
    model = schema(*shapes)
    orders = [[data.draw(st.permutations([0, 1])) for _ in shapes] for _ in range(size)]
    sequence = [data.draw(st.permutations(range(len(shapes)))) for _ in range(size)]

    def act(rank: Any) -> list[Piece]:
        held = [Piece(t, t, laid(shapes[t], orders[rank.rank][t], 3 * rank.rank)) for t in sequence[rank.rank]]
        return shared(held, model, rank).owned

    owned = together(size, act)
    taken = sorted((piece.tensor, there) for some in owned for piece in some for _, there in expand(piece.box).tolist())
    assert taken == [(t, i) for t, shape in enumerate(shapes) for i in range(math.prod(shape))]
    counts = [sum(piece.box.numel for piece in some) for some in owned]
    assert max(counts) - min(counts) <= 1
    for rank, some in enumerate(owned):
        for piece in some:
            whole = dict(expand(laid(shapes[piece.tensor], orders[rank][piece.tensor], 3 * rank))[:, ::-1].tolist())
            assert all(whole[there] == here for here, there in expand(piece.box).tolist())


def test_holders_of_different_sets_share_each_set_among_themselves() -> None:
    """Tensor parallel with data parallel: ranks 0, 2 hold the left half, 1, 3 the right one, all hold the norm."""
    model = schema((4, 8), (8,))

    def act(rank: Any) -> list[Piece]:
        half = Box(0, 4 * (rank.rank % 2), (Dim(4, 4, 8), Dim(4, 1, 1)))
        return shared([Piece(0, 0, half), Piece(1, 1, Box(0, 0, (Dim(8, 1, 1),)))], model, rank).owned

    owned = together(4, act)
    elems = [[sum(piece.box.numel for piece in some if piece.tensor == t) for t in (0, 1)] for some in owned]
    assert elems == [[8, 2]] * 4


def test_a_region_that_one_rank_lists_twice_is_owned_once() -> None:
    """Copies on one rank, such as those of a tied embedding."""
    model = schema((6,))
    line = Box(0, 0, (Dim(6, 1, 1),))
    owned = together(2, lambda rank: shared([Piece(0, 0, line), Piece(0, 1, line)], model, rank).owned)
    assert [[piece.local for piece in some] for some in owned] == [[0], [0]]
    assert sum(piece.box.numel for some in owned for piece in some) == 6


def test_wide_and_narrow_tensors_count_in_bytes() -> None:
    model = Schema((TensorSpec("wide", "float32", (4,)), TensorSpec("narrow", "bfloat16", (8,))))
    held = [Piece(0, 0, Box(0, 0, (Dim(4, 1, 1),))), Piece(1, 1, Box(0, 0, (Dim(8, 1, 1),)))]
    owned = together(2, lambda rank: shared(held, model, rank).owned)
    assert [[(piece.tensor, piece.box.numel) for piece in some] for some in owned] == [[(0, 4)], [(1, 8)]]


def test_the_schema_of_all_is_that_of_each_in_order_of_ranks() -> None:
    mine = [[TensorSpec("b", "bool", (1,)), TensorSpec("a", "bool", (2,))], [TensorSpec("a", "bool", (2,))], []]
    found = together(3, lambda rank: united(mine[rank.rank], rank))
    assert [[spec.name for spec in one.tensors] for one in found] == [["b", "a"]] * 3


def test_two_ranks_that_say_different_things_of_one_name_are_refused() -> None:
    def act(rank: Any) -> str:
        with pytest.raises(SchemaError, match="another rank has"):
            united([TensorSpec("a", "bool", (rank.rank,))], rank)
        return "refused"

    assert together(2, act) == ["refused", "refused"]


def test_the_first_rank_that_knows_a_reason_is_heard() -> None:
    reasons = [{}, {"a": "one"}, {"a": "two", "b": "three"}]
    assert together(3, lambda rank: demoted(reasons[rank.rank], rank)) == [{"a": "one", "b": "three"}] * 3
