"""The kit for loaders: subclass `LoaderTests`, say how to make an engine and look at its memory; pytest collects it.

    N  elements of a frame      K  changed elements

What an engine holds is compared byte by byte with what it should hold, and digests with sums that are computed here
from `dcr.kernels.reference.mix`, one tensor at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dcr.codecs.patch import Change, Operation
from dcr.errors import LayoutError, SchemaError
from dcr.layout.schema import WIDTHS
from dcr.layout.views import Bits
from dcr.memory.ready import Ready
from dcr.seams import Loader
from dcr.testing.conformance.bench import Bench, Weight, any_bits, layout_of

__all__ = ["LoaderTests", "Weight"]

OPERATIONS = pytest.mark.parametrize("operation", list(Operation), ids=lambda operation: operation.name.lower())
SHAPES = ((6, 5), (7,), (2, 3, 4), (1,))


class LoaderTests:
    """Everything that a loader has to hold.

    dtypes: those that the engine's weights may have.
    """

    dtypes: Sequence[str] = ("bfloat16", "float32")

    # ------------------------------------------------------------------ what the author says

    def make(self, weights: Mapping[str, Weight]) -> tuple[Any, Loader]:
        """An engine that holds these weights under these names, and a loader for it that is not bound yet."""
        pytest.fail(f"{type(self).__name__}: override make, which makes an engine and its loader of {list(weights)}")

    def raw(self, engine: Any) -> Mapping[str, bytes]:
        """What the engine's memory holds now: for each weight its elements in row-major order, under its name.

        Other memory that no refit may touch can be added under names of its own.
        """
        pytest.fail(f"{type(self).__name__}: override raw, which reads the bytes of {type(engine).__name__}")

    def pointers(self, engine: Any) -> Mapping[str, int]:
        """Where each weight lies now."""
        pytest.fail(f"{type(self).__name__}: override pointers, which says where {type(engine).__name__} keeps weights")

    def write(self, engine: Any, name: str, bits: Bits) -> None:
        """Overwrite one weight in place, behind the loader's back."""
        pytest.fail(f"{type(self).__name__}: override write, to put {len(bits)} elements into {name} of {engine}")

    def move(self, engine: Any, name: str) -> None:
        """Give one weight new memory of the same contents, behind the loader's back."""
        pytest.fail(f"{type(self).__name__}: override move, which gives {name} of {type(engine).__name__} new memory")

    # ------------------------------------------------------------------ bind

    def test_binding_writes_nothing(self) -> None:
        bench = self._bench()
        bench.require_held("binding")

    def test_a_published_tensor_without_a_place_is_refused_by_name(self) -> None:
        bench = self._bench()
        more = Weight(self.dtypes[0], any_bits(np.random.default_rng(0), self.dtypes[0], (3,)))
        self._refuse(bench, bench.weights | {"foreign": more}, "foreign")

    def test_a_weight_that_is_not_published_is_refused_by_name(self) -> None:
        bench = self._bench()
        self._refuse(bench, {name: weight for name, weight in bench.weights.items() if name != "w1"}, "w1")

    def test_another_dtype_of_the_same_width_is_refused_by_name(self) -> None:
        bench = self._bench()
        self._refuse(bench, bench.weights | {"w0": _of_another_dtype(bench.weights["w0"])}, "w0")

    def test_another_shape_of_as_many_elements_is_refused_by_name(self) -> None:
        bench = self._bench()
        turned = replace(bench.weights["w0"], bits=bench.weights["w0"].bits.reshape(5, 6))
        self._refuse(bench, bench.weights | {"w0": turned}, "w0")

    def test_a_first_binding_is_refused_too(self) -> None:
        weights = self._weights()
        _, loader = self.make(weights)
        with pytest.raises(SchemaError, match="w0"):
            loader.bind(layout_of(weights | {"w0": _of_another_dtype(weights["w0"])}))

    def test_a_refused_binding_leaves_the_one_before_it(self) -> None:
        bench = self._bench()
        self._refuse(bench, bench.weights | {"w0": _of_another_dtype(bench.weights["w0"])}, "w0")
        bench.refit(bench.change(0, Operation.STEP))
        bench.require_held("a refit after a binding that was refused")

    def test_it_can_be_bound_to_another_layout(self) -> None:
        bench = self._bench()
        bench.bind(layout_of(bench.weights, frame_elems=13))
        bench.refit(*bench.changes(Operation.STEP))
        bench.require_held("a refit after another layout was bound")

    # ------------------------------------------------------------------ prepare

    @OPERATIONS
    def test_preparing_writes_nothing(self, operation: Operation) -> None:
        bench = self._bench()
        for frame, change in bench.changes(operation):
            bench.live.prepare(frame, change)
        bench.require_unwritten("preparing")

    def test_preparing_a_whole_frame_writes_nothing(self) -> None:
        bench = self._bench()
        for frame in bench.frames():
            bench.live.prepare(*bench.whole(frame))
        bench.require_unwritten("preparing a whole frame")

    @OPERATIONS
    def test_prepared_bits_are_absolute(self, operation: Operation) -> None:
        bench = self._bench()
        for frame, change in bench.changes(operation):
            (write, *_) = bench.live.prepare(frame, change).writes
            assert change.positions is not None
            assert np.array_equal(write.bits, bench.dense(frame)[change.positions])

    @OPERATIONS
    def test_prepared_frames_keep_the_old_bits(self, operation: Operation) -> None:
        bench = self._bench()
        old = {frame: bench.dense(frame) for frame in bench.frames()}
        for frame, change in bench.changes(operation):
            (write, *_) = bench.live.prepare(frame, change).writes
            assert change.positions is not None
            assert np.array_equal(write.old, old[frame][change.positions])

    @OPERATIONS
    def test_sums_of_old_and_new_bits_are_those_of_the_reference(self, operation: Operation) -> None:
        bench = self._bench()
        for frame in bench.frames():
            before = bench.dense(frame)
            _, change = bench.change(frame, operation)
            ready = bench.live.prepare(frame, change)
            assert change.positions is not None
            bench.require_sums("old", ready.old_sums, frame, change.positions, before)
            bench.require_sums("new", ready.new_sums, frame, change.positions, bench.dense(frame))

    def test_sums_of_a_whole_frame_are_those_of_the_reference(self) -> None:
        bench = self._bench()
        for frame in bench.frames():
            before = bench.dense(frame)
            ready = bench.live.prepare(*bench.whole(frame))
            everything = np.arange(len(before), dtype=np.uint32)
            bench.require_sums("old", ready.old_sums, frame, everything, before)
            bench.require_sums("new", ready.new_sums, frame, everything, bench.dense(frame))

    def test_no_change_can_be_prepared_and_installed(self) -> None:
        bench = self._bench()
        for frame in bench.frames():
            bench.refit(bench.change(frame, Operation.STEP, share=0.0))
        bench.require_held("a refit without changes")

    # ------------------------------------------------------------------ install

    @OPERATIONS
    def test_an_install_writes_the_named_elements_and_no_others(self, operation: Operation) -> None:
        bench = self._bench()
        bench.refit(*bench.changes(operation))
        bench.require_held("an install")

    @OPERATIONS
    def test_an_install_of_one_frame_leaves_the_others(self, operation: Operation) -> None:
        bench = self._bench()
        bench.refit(bench.change(len(bench.layout.frames) // 2, operation))
        bench.require_held("an install of one frame")

    def test_an_install_of_whole_frames_writes_all_elements(self) -> None:
        bench = self._bench()
        bench.refit(*(bench.whole(frame) for frame in bench.frames()))
        bench.require_held("an install of whole frames")

    def test_the_first_and_the_last_element_of_a_frame_are_written(self) -> None:
        bench = self._bench()
        for frame in bench.frames():
            numel = bench.layout.frames[frame].numel
            bench.refit(bench.change_at(frame, Operation.XOR, np.unique([0, numel - 1])))
        bench.require_held("an install of the first and the last element")

    def test_every_pattern_of_two_bytes_is_written_as_it_is(self) -> None:
        dtypes = [dtype for dtype in self.dtypes if WIDTHS[dtype] == 2]
        if not dtypes:
            pytest.skip("no weight of this engine has two bytes")
        weights = {f"w{index}": Weight(dtype, np.zeros(1 << 16, np.uint16)) for index, dtype in enumerate(dtypes)}
        bench = self._bench(weights, frame_elems=1 << 16)
        for frame, name in enumerate(bench.schema_names()):
            bench.held[name] = np.arange(1 << 16, dtype=np.uint16)
            bench.refit((frame, Change(Operation.OVERWRITE, None, np.arange(1 << 16, dtype=np.uint16))))
        bench.require_held("an install of every pattern")

    def test_installing_twice_does_no_harm(self) -> None:
        bench = self._bench()
        readies = bench.prepare(*bench.changes(Operation.XOR))
        for ready in [*readies, *readies]:
            bench.live.install(ready)
        bench.loader.finalize()
        bench.require_held("an install that was repeated")

    def test_refits_follow_one_another(self) -> None:
        bench = self._bench()
        for operation in [*Operation] * 2:
            bench.refit(*bench.changes(operation))
        bench.require_held("six refits")

    def test_changes_of_other_elements_of_one_frame_are_installed_and_undone_together(self) -> None:
        """What a member that is behind installs: all that it missed as one, a change for each operation."""
        bench = self._bench()
        changes = [
            bench.change_at(frame, operation, np.arange(first, bench.layout.frames[frame].numel, len(Operation)))
            for frame in bench.frames()
            for first, operation in enumerate(Operation)
        ]
        readies = bench.prepare(*changes)
        for ready in readies:
            bench.live.install(ready)
        bench.loader.finalize()
        bench.require_held("an install of three changes to each frame")
        bench.require_digest("after it")
        for ready in reversed(readies):
            bench.live.undo(ready)
        bench.loader.finalize()
        bench.require_unwritten("its undo")

    def test_no_weight_moves(self) -> None:
        bench = self._bench()
        before = dict(self.pointers(bench.engine))
        bench.refit(*bench.changes(Operation.STEP))
        bench.refit(*(bench.whole(frame) for frame in bench.frames()))
        assert dict(self.pointers(bench.engine)) == before

    def test_worker_threads_may_call_it(self) -> None:
        bench = self._bench()
        changes = list(bench.changes(Operation.STEP))
        _elsewhere(lambda: bench.refit(*changes))
        bench.require_held("a refit in another thread")

    # ------------------------------------------------------------------ undo

    @OPERATIONS
    def test_an_undo_restores_every_byte(self, operation: Operation) -> None:
        bench = self._bench()
        readies = bench.prepare(*bench.changes(operation))
        self._install_and_undo(bench, readies)
        bench.require_unwritten("an undo")

    def test_an_undo_of_whole_frames_restores_every_byte(self) -> None:
        bench = self._bench()
        readies = bench.prepare(*(bench.whole(frame) for frame in bench.frames()))
        self._install_and_undo(bench, readies)
        bench.require_unwritten("an undo of whole frames")

    def test_an_undo_of_what_was_not_installed_does_no_harm(self) -> None:
        bench = self._bench()
        for ready in bench.prepare(*bench.changes(Operation.XOR)):
            bench.live.undo(ready)
        bench.loader.finalize()
        bench.require_unwritten("an undo of what was only prepared")

    def test_what_was_undone_can_be_installed_again(self) -> None:
        bench = self._bench()
        readies = bench.prepare(*bench.changes(Operation.STEP))
        self._install_and_undo(bench, readies)
        for ready in readies:
            bench.live.install(ready)
        bench.loader.finalize()
        bench.require_held("an install after an undo")

    # ------------------------------------------------------------------ digest

    def test_the_digest_is_that_of_the_reference(self) -> None:
        bench = self._bench()
        bench.require_digest("at first")

    @OPERATIONS
    def test_the_digest_follows_installs(self, operation: Operation) -> None:
        bench = self._bench()
        bench.refit(*bench.changes(operation))
        bench.require_digest("after a refit")

    def test_the_digest_follows_undos(self) -> None:
        bench = self._bench()
        before = bench.live.digest()
        self._install_and_undo(bench, bench.prepare(*bench.changes(Operation.STEP)))
        assert np.array_equal(bench.live.digest(), before)

    def test_the_digest_is_that_of_memory_whoever_wrote_it(self) -> None:
        bench = self._bench()
        bench.live.digest()
        name = bench.schema_names()[0]
        bench.held[name] = bench.held[name] ^ bench.held[name].dtype.type(1)
        self.write(bench.engine, name, bench.held[name])
        bench.require_digest("after a write behind the loader's back")

    def test_the_digest_does_not_depend_on_the_cut_into_frames(self) -> None:
        bench = self._bench()
        before = bench.live.digest()
        bench.bind(layout_of(bench.weights, frame_elems=1 << 20))
        assert np.array_equal(bench.live.digest(), before)

    def test_digesting_writes_nothing(self) -> None:
        bench = self._bench()
        bench.live.digest()
        bench.require_held("a digest")

    # ------------------------------------------------------------------ fingerprint

    def test_the_fingerprint_stays_while_nothing_moves(self) -> None:
        bench = self._bench()
        before = bench.loader.fingerprint()
        bench.refit(*bench.changes(Operation.STEP))
        assert bench.loader.fingerprint() == before

    def test_the_fingerprint_changes_when_a_weight_is_given_new_memory(self) -> None:
        for name in list(self._weights())[:: len(SHAPES)]:
            bench = self._bench()
            before = bench.loader.fingerprint()
            self.move(bench.engine, name)
            assert bench.loader.fingerprint() != before, f"{name} was given new memory, and the fingerprint is the same"

    # ------------------------------------------------------------------

    def _weights(self) -> dict[str, Weight]:
        """Four weights of each dtype, w0 and so on, with any bits."""
        rng = np.random.default_rng(7)
        kinds = [(dtype, shape) for dtype in self.dtypes for shape in SHAPES]
        return {f"w{index}": Weight(dtype, any_bits(rng, dtype, shape)) for index, (dtype, shape) in enumerate(kinds)}

    def _bench(self, weights: Mapping[str, Weight] | None = None, frame_elems: int = 7) -> Bench:
        """An engine whose loader is bound."""
        chosen = self._weights() if weights is None else weights
        engine, loader = self.make(chosen)
        bench = Bench(chosen, engine, loader, lambda: self.raw(engine))
        bench.bind(layout_of(chosen, frame_elems=frame_elems))
        return bench

    def _refuse(self, bench: Bench, published: Mapping[str, Weight], name: str) -> None:
        """What is published does not fit: it is refused by name, and nothing is written."""
        with pytest.raises((SchemaError, LayoutError), match=name):
            bench.loader.bind(layout_of(published))
        bench.require_held(f"a binding that was refused because of {name}")

    def _install_and_undo(self, bench: Bench, readies: Sequence[Ready]) -> None:
        for ready in readies:
            bench.live.install(ready)
        bench.loader.finalize()
        for ready in reversed(readies):
            bench.live.undo(ready)
        bench.loader.finalize()


def _of_another_dtype(weight: Weight) -> Weight:
    """The same bits, as another dtype of the same width."""
    others = [dtype for dtype, width in WIDTHS.items() if width == weight.bits.itemsize and dtype != "bool"]
    return replace(weight, dtype=next(dtype for dtype in others if dtype != weight.dtype))


def _elsewhere(work: Callable[[], None]) -> None:
    """Do something in another thread."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
