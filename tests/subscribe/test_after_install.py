"""What an engine keeps of its weights besides them is made anew within each install, by a function of its user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.loaders import Through
from support.refits import FAST, publish, state

import dcr
from dcr.errors import Poisoned


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(8, 8)


def frozen(engine: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    """The engine as torch.jit compiles it: with a copy of the weights of this moment."""
    return torch.jit.freeze(torch.jit.trace(engine.eval(), torch.ones(1, 8)))


def change(trainer: torch.nn.Linear) -> None:
    with torch.no_grad():
        trainer.weight.neg_()


class Copies:
    """A hook that counts its calls, keeps what it saw, and fails when it is told to."""

    def __init__(self, engine: torch.nn.Module) -> None:
        self.engine = engine
        self.seen: list[Any] = []
        self.failing = 0

    def __call__(self) -> None:
        self.seen.append(state(self.engine)["weight"].tolist())
        if self.failing:
            self.failing -= 1
            raise ZeroDivisionError("no room for a compiled copy")


def weight_of(module: torch.nn.Module) -> Any:
    return state(module)["weight"].tolist()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
async def test_a_compiled_copy_follows_the_weights(tmp_path: Path) -> None:
    trainer, engine = linear(), linear()
    compiled = [frozen(engine)]

    def compile_again() -> None:
        compiled[:] = [frozen(engine)]

    url, x = f"local://{tmp_path}", torch.randn(3, 8)
    async with (
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
        dcr.subscriber(
            url, loader=dcr.loader(engine), member="m", transport=FAST, after_install=compile_again
        ) as versions,
    ):
        for version in (1, 2):  # a seed, and a delta
            await publish(publisher, version)
            before = compiled[0](x)
            await (await anext(versions)).install()
            assert not torch.equal(before, compiled[0](x))
            assert torch.equal(trainer(x), compiled[0](x))
            change(trainer)


async def test_its_error_undoes_a_version_and_it_is_called_again(tmp_path: Path) -> None:
    trainer, engine = linear(), linear()
    hook = Copies(engine)
    url = f"local://{tmp_path}"
    async with (
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
        dcr.subscriber(url, loader=dcr.loader(engine), member="m", transport=FAST, after_install=hook) as versions,
    ):
        await publish(publisher, 1)
        await (await anext(versions)).install()
        old = weight_of(trainer)
        change(trainer)
        await publish(publisher, 2)
        version = await anext(versions)
        hook.failing = 1
        with pytest.raises(ZeroDivisionError, match="no room"):
            await version.install()
        assert (weight_of(engine), versions.version, versions.may_serve) == (old, 1, True)
        await version.install()
        new = weight_of(trainer)
        assert (hook.seen, versions.version) == ([old, new, old, new], 2)


async def test_its_error_after_a_seed_poisons(tmp_path: Path) -> None:
    trainer, engine = linear(), linear()
    hook = Copies(engine)
    url = f"local://{tmp_path}"
    async with (
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
        dcr.subscriber(url, loader=dcr.loader(engine), member="m", transport=FAST, after_install=hook) as versions,
    ):
        await publish(publisher, 1)
        hook.failing = 1
        with pytest.raises(ZeroDivisionError):
            await (await anext(versions)).install()
        assert not versions.may_serve
        await (await anext(versions)).install()
        assert versions.may_serve
        assert weight_of(engine) == weight_of(trainer)


def write(engine: torch.nn.Linear) -> None:
    engine.weight.data.mul_(2)


def replace(engine: torch.nn.Linear) -> None:
    engine.weight.data = engine.weight.data.clone()


@pytest.mark.parametrize("kind", ["seed", "delta"])
@pytest.mark.parametrize(("harm", "said"), [(write, "written the weights"), (replace, "replaced it")])
async def test_a_function_that_changes_the_weights_themselves_poisons(
    tmp_path: Path, harm: Callable[[torch.nn.Linear], None], said: str, kind: str
) -> None:
    trainer, engine = linear(), linear()
    if kind == "delta":
        engine.load_state_dict(trainer.state_dict())
    url = f"local://{tmp_path}"
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
        await publish(publisher, 1)
        async with dcr.subscriber(
            url,
            loader=dcr.loader(engine),
            member="m",
            transport=FAST,
            after_install=lambda: harm(engine),
        ) as versions:
            change(trainer)
            await publish(publisher, 2)
            version = await anext(versions)
            assert version.kind == kind
            with pytest.raises(Poisoned, match=f"after_install has {said}"):
                await version.install()
            assert not versions.may_serve


async def test_what_a_function_leaves_alone_is_looked_at_once(tmp_path: Path) -> None:
    trainer, engine = linear(), linear()
    url, loader = f"local://{tmp_path}", Through(dcr.loader(engine))
    async with (
        dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher,
        dcr.subscriber(url, loader=loader, member="m", transport=FAST, after_install=lambda: None) as versions,
    ):
        await publish(publisher, 1)
        await (await anext(versions)).install()
        looks, digest = [], loader.digest
        loader.digest = lambda: looks.append(1) or digest()
        for number in (2, 3):
            change(trainer)
            await publish(publisher, number)
            await (await anext(versions)).install()
    assert not looks


@pytest.mark.parametrize("answer", [7, "recompile"])
def test_what_is_no_function_is_refused(tmp_path: Path, answer: object) -> None:
    with pytest.raises(TypeError, match="expected a function without arguments"):
        dcr.subscriber(f"local://{tmp_path}", loader=dcr.loader(linear()), member="m", after_install=answer)


def test_a_coroutine_function_is_refused(tmp_path: Path) -> None:
    async def recompile() -> None: ...

    with pytest.raises(TypeError, match="not on the event loop"):
        dcr.subscriber(f"local://{tmp_path}", loader=dcr.loader(linear()), member="m", after_install=recompile)
