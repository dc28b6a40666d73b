"""What is measured on: bf16 weights before and after one optimizer step, made here from fixed seeds.

    llm           one layer of an 8-billion-parameter model and a part of its head, after simulated Adam steps
    adamw         a small language model trained here with AdamW on Python's own sources; the last step is a real one
    moe           experts of which 90 % see hardly a token: their changes are thinned to a hundredth
    uniform-ulp   random positions, relative noise of 1e-2
    uniform-bits  random positions, random bits

The nominal density of `llm`, `adamw` and `moe` (there: of the experts that see tokens) is reached by the learning rate
of the last step; which elements change, and by how much, follows from weights and gradients.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.uint16]
DENSITIES = (0.003, 0.01, 0.03, 0.05)

# Layer 0 of Llama 3.1 8B, its norms, and a quarter of its head: 252 million elements, 503 MB.
LLM_SHAPES = {
    "q_proj": (4096, 4096),
    "k_proj": (1024, 4096),
    "v_proj": (1024, 4096),
    "o_proj": (4096, 4096),
    "gate_proj": (14336, 4096),
    "up_proj": (14336, 4096),
    "down_proj": (4096, 14336),
    "input_norm": (4096,),
    "post_norm": (4096,),
    "lm_head": (8192, 4096),
}
STEPS, WARM = 36, 10
ROWS_AT_ONCE = 256  # what a block of the simulation touches stays in the cache


@dataclass(frozen=True, slots=True)
class Workload:
    """Weights of some tensors before a step, and after it at each nominal density."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    old: list[Words]
    new: dict[float, list[Words]]

    @property
    def numel(self) -> int:
        return sum(len(words) for words in self.old)

    @property
    def nbytes(self) -> int:
        return 2 * self.numel

    def changed(self, density: float) -> int:
        """Elements that differ."""
        return sum(int(np.count_nonzero(a != b)) for a, b in zip(self.old, self.new[density], strict=True))


def build(name: str, densities: Sequence[float], scale: float = 1.0, cache: Path | None = None) -> Workload:
    """A workload by name.

    scale: of the number of rows; 1 gives 503 MB for `llm`. cache: a directory where what was made is kept.
    """
    if cache is None:
        return BUILDERS[name](densities, scale)
    every = DENSITIES if set(densities) <= set(DENSITIES) else tuple(densities)
    key = hashlib.blake2b(repr((name, every, scale)).encode() + Path(__file__).read_bytes(), digest_size=8)
    path = cache / f"{name}-{key.hexdigest()}.npz"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _save(path, BUILDERS[name](every, scale))
    return _load(path, name, densities)


def _save(path: Path, made: Workload) -> None:
    olds = zip(made.shapes, made.old, strict=True)
    arrays = {f"old {tensor}": old.reshape(made.shapes[tensor]) for tensor, old in olds}
    for density, news in made.new.items():
        arrays |= {f"{density} {tensor}": new for tensor, new in zip(made.shapes, news, strict=True)}
    np.savez(path, **arrays)


def _load(path: Path, name: str, densities: Sequence[float]) -> Workload:
    with np.load(path) as arrays:
        olds = {key.removeprefix("old "): arrays[key] for key in arrays.files if key.startswith("old ")}
        new = {density: [arrays[f"{density} {tensor}"] for tensor in olds] for density in densities}
    return Workload(name, {t: old.shape for t, old in olds.items()}, [old.reshape(-1) for old in olds.values()], new)


# ---------------------------------------------------------------------- llm


def llm(densities: Sequence[float], scale: float) -> Workload:
    shapes = {name: (max(1, int(shape[0] * scale)), *shape[1:]) for name, shape in LLM_SHAPES.items()}
    old: list[Words] = []
    new: dict[float, list[Words]] = {density: [] for density in densities}
    for seed, shape in enumerate(shapes.values(), start=1):
        weights, update = _adam(*(shape if len(shape) == 2 else (1, *shape)), seed=seed)
        old.append(words(weights))
        for density in densities:
            new[density].append(_step(weights, update, old[-1], density))
    return Workload("llm", shapes, old, new)


def _adam(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [rows * columns] after simulated Adam steps, and the update that comes next, both fp32.

    Weights are heavy-tailed (Student's t of 8 degrees, rms about 0.02) with log-normal scales of rows and columns;
    gradients are of rank 32 with heavy-tailed factors, a signal that persists, and 0.5 % of outlier columns.
    """
    along = torch.Generator().manual_seed(seed)
    column_scale = torch.exp(0.2 * torch.randn(1, columns, generator=along))
    column_gradient = torch.exp(0.7 * torch.randn(1, columns, generator=along))
    column_gradient[:, torch.randperm(columns, generator=along)[: columns // 200]] *= 20
    column_signal = torch.randn(4, columns, generator=along) * column_gradient
    inputs = [
        _student(np.random.default_rng((seed, step)), (32, columns), 3.0) * column_gradient for step in range(STEPS)
    ]
    weights, update = torch.empty(rows, columns), torch.empty(rows, columns)
    for first in range(0, rows, ROWS_AT_ONCE):
        block = slice(first, min(rows, first + ROWS_AT_ONCE))
        weights[block], update[block] = _adam_rows(
            block.stop - first, np.random.default_rng((seed, STEPS, first)), column_scale, column_signal, inputs
        )
    return weights.reshape(-1), update.reshape(-1)


def _adam_rows(
    rows: int,
    rng: np.random.Generator,
    column_scale: torch.Tensor,
    column_signal: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    beta1: float = 0.9,
    beta2: float = 0.95,
) -> tuple[torch.Tensor, torch.Tensor]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape, np.float32))

    columns = column_scale.shape[1]
    weights = _student(rng, (rows, columns), 8.0) * (0.018 * column_scale) * torch.exp(0.2 * normal(rows, 1))
    row_gradient = torch.exp(normal(rows, 1))
    signal = 0.15 * (normal(rows, 4) * row_gradient) @ column_signal
    first, second = torch.zeros(rows, columns), torch.zeros(rows, columns)
    for step, tokens in enumerate(inputs):
        errors = _student(rng, (rows, 32), 3.0) * row_gradient * (torch.exp(normal(32)) / math.sqrt(32))
        gradient = torch.addmm(signal, errors, tokens).mul_(1e-5)
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if step >= WARM:
            update = (first / (1 - beta1 ** (step + 1))) / ((second / (1 - beta2 ** (step + 1))).sqrt_().add_(1e-8))
            if step < STEPS - 1:
                weights.add_(update, alpha=-1e-6)
    return weights, update


def _student(rng: np.random.Generator, shape: tuple[int, ...], degrees: float) -> torch.Tensor:
    normal = torch.from_numpy(rng.standard_normal(shape, np.float32))
    chi2 = torch.from_numpy(rng.standard_gamma(degrees / 2, shape, np.float32)).mul_(2 / degrees)
    return normal.mul_(chi2.rsqrt_())


def words(weights: torch.Tensor) -> Words:
    """The bits of weights rounded to bf16."""
    rounded: Words = weights.detach().reshape(-1).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return rounded


def _step(weights: torch.Tensor, update: torch.Tensor, old: Words, density: float) -> Words:
    """The bits after one more step, with the learning rate that changes so many of them."""
    some = torch.from_numpy(np.random.default_rng(0).integers(0, len(old), min(len(old), 1 << 20)))
    sample, sample_update, sample_old = weights[some], update[some], old[some.numpy()]
    low, high = 1e-9, 1e-1
    for _ in range(40):
        rate = math.sqrt(low * high)
        reached = np.mean(words(sample - rate * sample_update) != sample_old)
        low, high = (rate, high) if reached < density else (low, rate)
    return words(weights - math.sqrt(low * high) * update)


# ---------------------------------------------------------------------- the others


class _Bytes(torch.nn.Module):
    """A small transformer that predicts the next byte."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.embed, self.place = torch.nn.Embedding(256, width), torch.nn.Embedding(context, width)
        layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.embed(tokens) + self.place.weight[:length]
        logits: torch.Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return logits


def adamw(densities: Sequence[float], scale: float) -> Workload:
    torch.manual_seed(0)
    context, steps = 64, 40
    model = _Bytes(width=max(64, int(384 * scale) // 64 * 64), layers=6, context=context)
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(path.read_bytes() for path in sources), np.uint8)
    rng = np.random.default_rng(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.01)
    for _ in range(steps):
        starts = rng.integers(0, len(text) - context - 1, 8)
        batch = torch.from_numpy(np.stack([text[start : start + context + 1] for start in starts]).astype(np.int64))
        loss = torch.nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.step()
    updates = [(was - now.detach()) / 3e-4 for was, now in zip(before, model.parameters(), strict=True)]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    old = [words(was) for was in before]
    everything, update = torch.cat([was.flatten() for was in before]), torch.cat([one.flatten() for one in updates])
    new = {}
    for density in densities:
        after, ends = _step(everything, update, np.concatenate(old), density), np.cumsum([len(one) for one in old])
        new[density] = np.split(after, ends[:-1])
    return Workload("adamw", shapes, old, new)


def moe(densities: Sequence[float], scale: float) -> Workload:
    experts, shape = 40, (max(1, int(2048 * scale)), 1024)
    rng = np.random.default_rng(0)
    busy = set(rng.permutation(experts)[: experts // 10].tolist())
    old: list[Words] = []
    new: dict[float, list[Words]] = {density: [] for density in densities}
    for expert in range(experts):
        weights, update = _adam(*shape, seed=1000 + expert)
        old.append(words(weights))
        for density in densities:
            after = _step(weights, update, old[-1], density)
            if expert not in busy:
                after = np.where(rng.random(len(after)) < 0.01, after, old[-1])
            new[density].append(after)
    return Workload("moe", {f"experts.{expert}": shape for expert in range(experts)}, old, new)


def uniform_ulp(densities: Sequence[float], scale: float) -> Workload:
    def noisy(bits: Words, rng: np.random.Generator) -> Words:
        values = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float()
        noise = torch.from_numpy(rng.standard_normal(len(bits), np.float32))
        return words(values * (1 + 1e-2 * noise))

    return _uniform("uniform-ulp", densities, scale, noisy)


def uniform_bits(densities: Sequence[float], scale: float) -> Workload:
    def random(bits: Words, rng: np.random.Generator) -> Words:
        return rng.integers(0, 1 << 16, len(bits), np.uint16)

    return _uniform("uniform-bits", densities, scale, random)


def _uniform(
    name: str, densities: Sequence[float], scale: float, change: Callable[[Words, np.random.Generator], Words]
) -> Workload:
    rng = np.random.default_rng(0)
    rows, columns = max(1, int(12288 * scale)), 4096
    old = words(torch.from_numpy(rng.standard_normal(rows * columns, np.float32)) * 0.02)
    new = {}
    for density in densities:
        after = old.copy()
        at = np.flatnonzero(rng.random(len(old), np.float32) < density)
        changed = change(old[at], rng)
        after[at] = np.where(changed == old[at], changed ^ 1, changed)
        new[density] = [after]
    return Workload(name, {"weight": (rows, columns)}, [old], new)


BUILDERS: dict[str, Callable[[Sequence[float], float], Workload]] = {
    "llm": llm,
    "adamw": adamw,
    "moe": moe,
    "uniform-ulp": uniform_ulp,
    "uniform-bits": uniform_bits,
}
