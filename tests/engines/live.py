"""vLLM engines that really run: one rank in this process (`LLM`), or ranks in worker processes (`AsyncLLM`)."""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dcr.transports.local import LocalTransport

FAST = LocalTransport(poll_s=0.01, fsync=False)
PROMPTS = [[5, 6, 7, 8, 9], [100, 200, 300]]

SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "worker_extension_cls": "inspector.Inspector",
    "weight_transfer_config": {"backend": "dcr"},
}


def sampling(count: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


class Engine:
    """An engine under test: one rank in this process (`LLM`), or several in worker processes (`AsyncLLM`)."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    async def ask(self, method: str, *args: Any) -> list[Any]:
        """What a method of the inspector says in each worker."""
        if hasattr(self.engine, "llm_engine"):
            return self.engine.collective_rpc(method, args=args)
        return await self.engine.collective_rpc(method, args=args)

    async def tokens(self) -> list[list[int]]:
        """What it generates, greedily."""
        if hasattr(self.engine, "llm_engine"):
            prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
            done = self.engine.generate(prompts, sampling(8), use_tqdm=False)
            return [list(one.outputs[0].token_ids) for one in done]
        return [await self.answer(prompt, 8) for prompt in PROMPTS]

    async def answer(self, prompt: list[int], count: int) -> list[int]:
        """What an `AsyncLLM` says to one prompt."""
        async for one in self.engine.generate(
            {"prompt_token_ids": prompt}, sampling(count), request_id=os.urandom(8).hex()
        ):
            last = one
        return list(last.outputs[0].token_ids)

    async def version(self) -> str:
        """The version that it shows."""
        if hasattr(self.engine, "llm_engine"):
            return self.engine.get_weight_version()
        return await self.engine.get_weight_version()


@asynccontextmanager
async def running(
    checkpoint: Path, ranks: int, monkeypatch: pytest.MonkeyPatch, *, in_process: bool | None = None, **settings: Any
) -> AsyncIterator[Engine]:
    """An engine; in_process: an `LLM`, as it is by default if it has one rank."""
    in_process = ranks == 1 if in_process is None else in_process
    settings = SETTINGS | {"tensor_parallel_size": ranks} | settings
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if in_process else "1")
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    if in_process:
        one = Engine(LLM(model=str(checkpoint), **settings))
        try:
            yield one
        finally:
            one.engine.llm_engine.engine_core.shutdown()
            del one.engine
            gc.collect()
            cleanup_dist_env_and_memory()
        return
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(model=str(checkpoint), **settings)
    one = Engine(AsyncLLM.from_engine_args(arguments))
    try:
        yield one
    finally:
        one.engine.shutdown()
        del one.engine
        gc.collect()
