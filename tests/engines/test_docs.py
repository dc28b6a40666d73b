"""The programs of docs/engines.md that need vLLM run as they stand, by the page's commands, in an empty directory."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from live import FAST
from models import Trainer, make_checkpoint, make_tokenizer

import dcr

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

PAGE = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
FILES = {name: text for language, text in BLOCK.findall(PAGE) for name in re.findall(r"\A# (\w+\.py): ", text)}
COMMANDS = [text for language, text in BLOCK.findall(PAGE) if language == "sh"]
# Of the machine that tests run on, and not of the page: few cores, no network.
MACHINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def command_of(file: str) -> str:
    """The page's command that runs a file."""
    (command,) = [
        found
        for text in COMMANDS
        for found in re.findall(r"^engines/bin/python (?:\\\n|.)*$", text, flags=re.MULTILINE)
        if file in found
    ]
    return str(command)


@asynccontextmanager
async def running(
    file: str, run: str, model: Path, folder: Path, more: str = ""
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The page's files in an empty directory, one of them running as the page says."""
    for name in ("follow.py", "serve.py"):
        (folder / name).write_text(FILES[name].replace("range(40)", "range(250)"))  # on a loaded machine it lasts too
    (folder / "engines").symlink_to(sys.prefix)
    (exports,) = {
        line.partition("#")[0] for text in COMMANDS for line in text.splitlines() if line.startswith("export ")
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTHON"))}
    process = await asyncio.create_subprocess_exec(
        *("bash", "-euc", f"{exports}\nexec {command_of(file)} {more}"),
        cwd=folder,
        env=environment | MACHINE | {"RUN": run, "MODEL": str(model), "VLLM_SERVER_DEV_MODE": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=(folder / "stderr").open("w"),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()


@asynccontextmanager
async def publishing(url: str, trainer: Trainer) -> AsyncIterator[dcr.Publisher]:
    """A publisher with a version of what the engine will be loaded with."""
    async with dcr.publisher(url, source=dcr.source(trainer), transport=FAST) as publisher:
        await (await publisher.publish(1)).committed()
        yield publisher


async def publish(publisher: dcr.Publisher, trainer: Trainer, number: int) -> dcr.Refit:
    trainer.step(seed=number)
    refit = await publisher.publish(number)
    await refit.committed()
    return refit


@pytest.fixture
def model(checkpoints: Path) -> Path:
    return make_tokenizer(make_checkpoint("llama", checkpoints / "llama"))


async def test_the_engine_of_the_page_follows_a_run_while_it_generates(model: Path, tmp_path: Path) -> None:
    trainer, url = Trainer(model), f"local://{tmp_path / 'run'}"
    folder = tmp_path / "empty"
    folder.mkdir()
    async with publishing(url, trainer) as publisher, running("follow.py", url, model, folder) as process:
        await publisher.joined(1)
        for number in (2, 3):
            installed = await (await publish(publisher, trainer, number)).installed()
            assert list(installed) == ["engine-0"]
        said, _ = await process.communicate()
    assert process.returncode == 0, (folder / "stderr").read_text()[-4000:]
    shown = [name for name in re.findall(r"version='(\w+)'", said.decode()) if name != "default"]
    assert sorted(set(shown)) == ["1", "2", "3"]
    assert shown == sorted(shown)


async def test_the_server_of_the_page_follows_a_run_and_leaves_pauses_and_sleeps_to_others(
    model: Path, tmp_path: Path
) -> None:
    trainer, url = Trainer(model), f"local://{tmp_path / 'run'}"
    folder = tmp_path / "empty"
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def ask(path: str, method: str = "GET") -> bytes:
        request = Request(f"http://127.0.0.1:{port}{path}", method=method)
        with urlopen(request, timeout=60) as answer:
            return bytes(answer.read())

    def label() -> str:
        return str(json.loads(ask("/weight_info"))["weight_version"])

    async def later(path: str, method: str = "POST") -> None:
        await asyncio.to_thread(ask, path, method)

    arguments = f"--port {port} --host 127.0.0.1 --max-model-len 128 --enforce-eager"
    async with publishing(url, trainer) as publisher, running("serve.py", url, model, folder, arguments) as process:
        await publisher.joined(1)
        while True:
            try:
                await later("/health", "GET")
                break
            except OSError:
                assert process.returncode is None, (folder / "stderr").read_text()[-4000:]
                await asyncio.sleep(0.2)
        assert await asyncio.to_thread(label) == "1"
        await later("/pause?mode=keep")
        await (await publish(publisher, trainer, 2)).installed()
        assert json.loads(await asyncio.to_thread(ask, "/is_paused")) == {"is_paused": True}
        await later("/resume")
        await later("/sleep?level=1")
        refit = await publish(publisher, trainer, 3)
        assert await asyncio.to_thread(label) == "2"
        await later("/wake_up")
        assert str((await refit.installed())["engine-0"]).startswith("installed")
        for _ in range(600):  # it is resumed once it has answered
            if json.loads(await asyncio.to_thread(ask, "/is_paused")) == {"is_paused": False}:
                break
            await asyncio.sleep(0.1)
        else:
            raise AssertionError("the engine stayed paused")
        process.terminate()
        await asyncio.wait_for(process.communicate(), 60)
