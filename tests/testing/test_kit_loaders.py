"""The kit for loaders: over the built-in one, and over ones that are wrong, each of which some test of it notices."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from support.bent import Bent, kit_tests, replacing
from support.loaders import Through
from support.refits import Weights

import dcr
from dcr.codecs.patch import Change, Operation
from dcr.errors import SchemaError, StateError
from dcr.layout.frames import Layout
from dcr.layout.schema import WIDTHS
from dcr.memory.ready import Ready, Write
from dcr.seams import Loader
from dcr.testing import LoaderTests
from dcr.testing.loaders import Weight


class ModuleKit(LoaderTests):
    """Over a torch module."""

    dtypes = tuple(WIDTHS)

    def make(self, weights: Mapping[str, Weight]) -> tuple[Any, Loader]:
        engine = Weights({name: _tensor(weight) for name, weight in weights.items()})
        return engine, dcr.loader(engine)

    def raw(self, engine: Any) -> Mapping[str, bytes]:
        return {name: _octets(tensor).numpy().tobytes() for name, tensor in engine.state_dict().items()}

    def pointers(self, engine: Any) -> Mapping[str, int]:
        return {name: tensor.data_ptr() for name, tensor in engine.state_dict().items()}

    def write(self, engine: Any, name: str, bits: Any) -> None:
        _octets(engine.state_dict()[name]).copy_(torch.from_numpy(bits.view(np.uint8)))

    def move(self, engine: Any, name: str) -> None:
        tensor = getattr(engine, name)
        tensor.data = tensor.data.clone()


class TestModule(ModuleKit):
    pass


def _tensor(weight: Weight) -> torch.Tensor:
    flat = torch.from_numpy(weight.bits.reshape(-1).view(np.uint8).copy())
    return flat.view(getattr(torch, weight.dtype)).reshape(weight.bits.shape)


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's own memory."""
    return tensor.detach().view(-1).view(torch.uint8)


# ---------------------------------------------------------------------- what is wrong with loaders


class Engine:
    """What a bent loader may do wrong to the module under it."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def flip(self, name: str | None = None, at: int = 0) -> None:
        """Change a byte of a weight: of the first one, if none is named."""
        tensor = self.module.state_dict()[name or next(iter(self.module.state_dict()))]
        _octets(tensor)[at] += 1

    def move(self) -> None:
        """Give the first weight new memory."""
        ModuleKit().move(self.module, "w0")


Bend = Callable[[Engine, Loader], Any]


def doing(method: str, also: Callable[[Engine], None], *, before: bool = False) -> Bend:
    """A loader that does something wrong besides, in one of its methods."""

    def bend(engine: Engine, loader: Loader) -> Bent:
        def wrong(straight: Loader, *args: Any) -> Any:
            if before:
                also(engine)
            result = getattr(straight, method)(*args)
            if not before:
                also(engine)
            return result

        return replacing(**{method: wrong})(loader)

    return bend


def method(**methods: Callable[..., Any]) -> Bend:
    """A loader with a method that is wrong."""
    return lambda engine, loader: replacing(**methods)(loader)


def readies(change: Callable[[Ready], Ready]) -> Bend:
    """A loader that prepares something wrong."""
    return method(prepare=lambda loader, frame, asked: change(loader.prepare(frame, asked)))


def written(change: Callable[[Write], Write]) -> Callable[[Ready], Ready]:
    return lambda ready: dataclasses.replace(ready, writes=tuple(map(change, ready.writes)))


def _canonical(write: Write) -> Write:
    """The one NaN instead of many: of bfloat16 and of float32."""
    exponent = {2: 0x7F80, 4: 0x7F800000}[write.bits.itemsize]
    magnitude = write.bits & write.bits.dtype.type((1 << 8 * write.bits.itemsize - 1) - 1)
    nan = magnitude > exponent
    return dataclasses.replace(write, bits=np.where(nan, write.bits.dtype.type(exponent + 1), write.bits))


def _all_but_the_edges(write: Write) -> Write:
    return Write(write.home, write.positions[:-1], write.bits[:-1], write.old[:-1])


def _anything_goes(engine: Engine, loader: Loader) -> Bent:
    """What does not fit is left out without a word."""
    fits: list[bool] = []

    def bind(straight: Loader, layout: Layout) -> None:
        try:
            straight.bind(layout)
            fits.append(True)
        except SchemaError:
            fits.append(False)

    return replacing(bind=bind)(loader)


def _unbinding(engine: Engine, loader: Loader) -> Bent:
    """A binding that is refused takes the one before it along."""

    refused: list[Layout] = []

    def bind(straight: Loader, layout: Layout) -> None:
        refused[:] = [layout]
        straight.bind(layout)
        refused.clear()

    def prepare(straight: Loader, frame: int, change: Change) -> Ready:
        if refused:
            raise StateError("nothing is bound")
        return straight.prepare(frame, change)

    return replacing(bind=bind, prepare=prepare)(loader)


def _nameless(engine: Engine, loader: Loader) -> Bent:
    def bind(straight: Loader, layout: Layout) -> None:
        try:
            straight.bind(layout)
        except SchemaError:
            raise SchemaError("it does not fit") from None

    return replacing(bind=bind)(loader)


def _bound_once(engine: Engine, loader: Loader) -> Bent:
    bound: list[Layout] = []

    def bind(straight: Loader, layout: Layout) -> None:
        if not bound:
            straight.bind(layout)
            bound.append(layout)

    return replacing(bind=bind)(loader)


def _relative(engine: Engine, loader: Loader) -> Bent:
    """A loader that resolves a change when it is installed, not when it is prepared."""

    def install(straight: Any, ready: Ready) -> None:
        (write,) = ready.writes
        now = straight.prepare(ready.frame, Change(Operation.OVERWRITE, write.positions, write.bits)).writes[0].old
        again = dataclasses.replace(write, bits=now ^ write.old ^ write.bits)
        straight.install(dataclasses.replace(ready, writes=(again,)))

    return replacing(install=install)(loader)


def _of_one_thread(engine: Engine, loader: Loader) -> Bent:
    home = threading.get_ident()

    def prepare(straight: Loader, *args: Any) -> Ready:
        assert threading.get_ident() == home, "not in this thread"
        return straight.prepare(*args)

    return replacing(prepare=prepare)(loader)


def _carried(engine: Engine, loader: Loader) -> Bent:
    """A digest that is computed once."""
    kept: list[Any] = []

    def digest(straight: Loader) -> Any:
        kept[:] = kept or [straight.digest()]
        return kept[0]

    return replacing(digest=digest)(loader)


def _counting(engine: Engine, loader: Loader) -> Bent:
    count = iter(range(1000))
    return replacing(fingerprint=lambda straight: b"%d" % next(count))(loader)


def _by_frames(engine: Engine, loader: Loader) -> Bent:
    """A digest that depends on the cut."""

    def bind(straight: Loader, layout: Layout) -> None:
        straight.bind(layout)
        bent.frames = np.uint64(len(layout.frames))

    bent = replacing(bind=bind)(loader)
    bent.digest = lambda: loader.digest() + bent.frames
    return bent


def _undone_backwards(engine: Engine, loader: Loader) -> Bent:
    """An undo that flips bits instead of writing them."""

    def undo(straight: Any, ready: Ready) -> None:
        (write,) = ready.writes
        now = straight.prepare(ready.frame, Change(Operation.OVERWRITE, write.positions, write.bits)).writes[0].old
        bits = now ^ write.old ^ write.bits
        straight.install(dataclasses.replace(ready, writes=(dataclasses.replace(write, bits=bits),)))

    return replacing(undo=undo)(loader)


def _installed_once(engine: Engine, loader: Loader) -> Bent:
    seen: list[Ready] = []

    def install(straight: Loader, ready: Ready) -> None:
        if not any(one is ready for one in seen):
            straight.install(ready)
        seen.append(ready)

    return replacing(install=install)(loader)


def _once_per_frame(engine: Engine, loader: Loader) -> Bent:
    seen: set[int] = set()

    def install(straight: Loader, ready: Ready) -> None:
        if ready.frame not in seen:
            straight.install(ready)
        seen.add(ready.frame)

    return replacing(install=install)(loader)


def _nothing(straight: Loader, *args: Any) -> None:
    pass


def _refusing_nothing(straight: Loader, frame: int, change: Change) -> Ready:
    assert len(change.values), "there is nothing to do"
    return straight.prepare(frame, change)


def _flip(engine: Engine) -> None:
    engine.flip()


def _flip_the_last(engine: Engine) -> None:
    engine.flip(list(engine.module.state_dict())[-1])


def _sums(name: str) -> Bend:
    return readies(lambda ready: dataclasses.replace(ready, **{name: getattr(ready, name) + np.uint64(1)}))


def _unless_refused(engine: Engine, loader: Loader) -> Bent:
    """A binding writes before it looks."""

    def bind(straight: Loader, layout: Layout) -> None:
        if len(layout.schema.tensors) < len(engine.module.state_dict()):
            engine.flip()
        straight.bind(layout)

    return replacing(bind=bind)(loader)


OPERATIONS = [(operation,) for operation in Operation]
NEW_BITS = readies(written(lambda write: dataclasses.replace(write, bits=write.bits ^ write.bits.dtype.type(1))))
OLD_BITS = readies(written(lambda write: dataclasses.replace(write, old=write.old ^ write.old.dtype.type(1))))

BREAKS: list[tuple[str, list[Any], Bend]] = [
    ("binding_writes_nothing", [()], doing("bind", _flip)),
    ("a_published_tensor_without_a_place_is_refused_by_name", [()], _anything_goes),
    ("a_published_tensor_without_a_place_is_refused_by_name", [()], _nameless),
    ("a_weight_that_is_not_published_is_refused_by_name", [()], _anything_goes),
    ("another_dtype_of_the_same_width_is_refused_by_name", [()], _anything_goes),
    ("another_shape_of_as_many_elements_is_refused_by_name", [()], _anything_goes),
    ("a_weight_that_is_not_published_is_refused_by_name", [()], _unless_refused),
    ("a_first_binding_is_refused_too", [()], _anything_goes),
    ("a_refused_binding_leaves_the_one_before_it", [()], _unbinding),
    ("it_can_be_bound_to_another_layout", [()], _bound_once),
    #
    ("preparing_writes_nothing", OPERATIONS, doing("prepare", _flip)),
    ("preparing_a_whole_frame_writes_nothing", [()], doing("prepare", _flip)),
    ("prepared_bits_are_absolute", OPERATIONS, NEW_BITS),
    ("prepared_frames_keep_the_old_bits", OPERATIONS, OLD_BITS),
    ("sums_of_old_and_new_bits_are_those_of_the_reference", OPERATIONS, _sums("old_sums")),
    ("sums_of_old_and_new_bits_are_those_of_the_reference", OPERATIONS, _sums("new_sums")),
    ("sums_of_a_whole_frame_are_those_of_the_reference", [()], _sums("new_sums")),
    ("no_change_can_be_prepared_and_installed", [()], method(prepare=_refusing_nothing)),
    #
    ("an_install_writes_the_named_elements_and_no_others", OPERATIONS, doing("install", _flip_the_last)),
    ("an_install_writes_the_named_elements_and_no_others", OPERATIONS, method(install=_nothing)),
    ("an_install_writes_the_named_elements_and_no_others", OPERATIONS, NEW_BITS),
    ("an_install_of_one_frame_leaves_the_others", OPERATIONS, doing("install", _flip_the_last)),
    ("an_install_of_whole_frames_writes_all_elements", [()], readies(written(_all_but_the_edges))),
    ("the_first_and_the_last_element_of_a_frame_are_written", [()], readies(written(_all_but_the_edges))),
    ("every_pattern_of_two_bytes_is_written_as_it_is", [()], readies(written(_canonical))),
    ("installing_twice_does_no_harm", [()], _relative),
    ("refits_follow_one_another", [()], _once_per_frame),
    ("changes_of_other_elements_of_one_frame_are_installed_and_undone_together", [()], _once_per_frame),
    ("no_weight_moves", [()], doing("install", Engine.move)),
    ("worker_threads_may_call_it", [()], _of_one_thread),
    #
    ("an_undo_restores_every_byte", OPERATIONS, method(undo=_nothing)),
    ("an_undo_of_whole_frames_restores_every_byte", [()], OLD_BITS),
    ("an_undo_of_what_was_not_installed_does_no_harm", [()], _undone_backwards),
    ("what_was_undone_can_be_installed_again", [()], _installed_once),
    #
    ("the_digest_is_that_of_the_reference", [()], method(digest=lambda loader: loader.digest() + np.uint64(1))),
    ("the_digest_follows_installs", OPERATIONS, method(install=_nothing)),
    ("the_digest_follows_undos", [()], method(undo=_nothing)),
    ("the_digest_is_that_of_memory_whoever_wrote_it", [()], _carried),
    ("the_digest_does_not_depend_on_the_cut_into_frames", [()], _by_frames),
    ("digesting_writes_nothing", [()], doing("digest", _flip)),
    #
    ("the_fingerprint_stays_while_nothing_moves", [()], _counting),
    ("the_fingerprint_changes_when_a_weight_is_given_new_memory", [()], method(fingerprint=lambda loader: b"for ever")),
]
EACH = [pytest.param(test, one, bend, id=f"{test}{one}") for test, args, bend in BREAKS for one in args]


def _as_weights(bent: Any) -> Any:
    """A bent loader that is its own live weights, so that both are bent."""
    bind = bent.bind

    def bound(layout: Layout) -> Any:
        bind(layout)
        return bent

    bent.bind = bound
    return bent


@pytest.mark.parametrize(("test", "args", "bend"), EACH)
def test_the_kit_notices(test: str, args: tuple[Any, ...], bend: Bend) -> None:
    class Kit(ModuleKit):
        dtypes = ("bfloat16", "float32")

        def make(self, weights: Mapping[str, Weight]) -> tuple[Any, Loader]:
            engine, loader = super().make(weights)
            return engine, _as_weights(bend(Engine(engine), Through(loader)))

    with pytest.raises((AssertionError, pytest.fail.Exception, dcr.DcrError)):
        getattr(Kit(), f"test_{test}")(*args)


def test_every_test_of_the_kit_can_fail() -> None:
    assert kit_tests(LoaderTests) - {f"test_{name}" for name, *_ in BREAKS} == set()


@pytest.mark.parametrize("hook", ["make", "raw", "pointers", "write", "move"])
def test_a_hook_that_is_missing_is_asked_for_by_name(hook: str) -> None:
    args = {
        "make": ({},),
        "raw": (None,),
        "pointers": (None,),
        "write": (None, "w0", np.zeros(1)),
        "move": (None, "w0"),
    }
    with pytest.raises(pytest.fail.Exception, match=f"override {hook}"):
        getattr(LoaderTests(), hook)(*args.get(hook, (None,)))


def test_an_engine_without_two_byte_weights_skips_their_patterns() -> None:
    class Kit(ModuleKit):
        dtypes = ("float32",)

    with pytest.raises(pytest.skip.Exception, match="no weight of this engine has two bytes"):
        Kit().test_every_pattern_of_two_bytes_is_written_as_it_is()
