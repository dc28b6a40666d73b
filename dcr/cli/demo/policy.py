"""The policy that the demo trains: a small decoder-only transformer, its generation, reward and loss.

The same module serves (bf16, with a key/value cache) and trains (fp32 masters). The task is one whose reward
anybody can recompute from the tokens: emit tokens that ascend.

Shapes: B sequences, T positions, S positions so far, D model width, H heads, E width of a head, V vocabulary,
G generated tokens.
"""

import math

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional


class Sizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How big the policy and its samples are; token counts are per sequence, `group` is sequences per prompt."""

    vocab: int
    width: int
    heads: int
    layers: int
    prompt: int
    generated: int
    group: int


SIZES = {
    "small": Sizes(vocab=8192, width=512, heads=8, layers=8, prompt=8, generated=40, group=4),
    "tiny": Sizes(vocab=512, width=64, heads=4, layers=2, prompt=4, generated=12, group=4),
}


class Block(nn.Module):
    """One pre-norm layer: attention and a gated MLP, both without biases."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate_up = nn.Linear(width, 2 * 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor] | None) -> Tensor:
        """x (B, T, D). `cache` holds keys and values of the S positions up to these T: views, written here."""
        rows, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, E) each
        query, key = rotate(query, turn), rotate(key, turn)
        if cache is not None:
            cache[0][:, :, -length:] = key
            cache[1][:, :, -length:] = value
            key, value = cache  # (B, H, S, E) each
        # More than one position at a time are read only at the start, where S == T.
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=length > 1)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)  # type: ignore[no-any-return]


class Policy(nn.Module):
    """A decoder-only transformer with a tied head and one persistent buffer (the rotary frequencies)."""

    frequencies: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = nn.Embedding(sizes.vocab, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-5)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)
        self.head.weight = self.embed.weight
        half = sizes.width // sizes.heads // 2
        self.register_buffer("frequencies", torch.pow(10_000.0, -torch.arange(half) / half))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, *, start: int = 0, cache: "Cache | None" = None) -> Tensor:
        """Logits (B, T, V) in the dtype of the weights; the first token lies at position `start`."""
        stop = start + tokens.shape[1]
        angles = torch.arange(start, stop)[:, None] * self.frequencies[None, :]
        x = self.embed(tokens)
        turn = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        for layer, block in enumerate(self.blocks):
            x = block(x, turn, None if cache is None else cache.layer(layer, stop))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def to_serving(model: Policy) -> Policy:
    """The same module as rollouts hold it: parameters in bf16, buffers as they are, nothing to train."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model.requires_grad_(False)


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding of both halves of each head: x (B, H, T, E), cosines and sines (T, E / 2)."""
    cos, sin = turn
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Cache:
    """Keys and values of all layers for B sequences of at most `length` positions, bf16."""

    def __init__(self, sizes: Sizes, rows: int, length: int) -> None:
        shape = (2, sizes.layers, rows, sizes.heads, length, sizes.width // sizes.heads)
        self._data = torch.zeros(shape, dtype=torch.bfloat16)

    def layer(self, index: int, stop: int) -> tuple[Tensor, Tensor]:
        """The keys and values of one layer up to position `stop`: (B, H, S, E) views."""
        return self._data[0, index, :, :, :stop], self._data[1, index, :, :, :stop]


class Decoding:
    """One group of samples of one prompt, decoded step by step with a serving copy of the policy.

    Keys and values that older weights left in the cache stay when a version is installed half-way, as engines do
    that update in flight; the log-probabilities are those under which the tokens were really drawn.
    """

    def __init__(self, model: Policy, generator: torch.Generator) -> None:
        sizes = model.sizes
        self._model, self._generator, self._sizes = model, generator, sizes
        length = sizes.prompt + sizes.generated
        self._cache = Cache(sizes, sizes.group, length)
        self.tokens = torch.zeros((sizes.group, length), dtype=torch.int64)  # (B, T)
        self.logprobs = torch.zeros((sizes.group, sizes.generated))  # (B, G)
        self.tokens[:, : sizes.prompt] = torch.randint(sizes.vocab, (sizes.prompt,), generator=generator)
        self._read = 0
        self._drawn = sizes.prompt

    @property
    def done(self) -> bool:
        """All tokens of the group are drawn."""
        return self._drawn == self.tokens.shape[1]

    @torch.inference_mode()
    def step(self) -> None:
        """Draw the next token of each sequence; the first step reads the prompt."""
        logits = self._model(self.tokens[:, self._read : self._drawn], start=self._read, cache=self._cache)
        logprobs = logits[:, -1].float().log_softmax(-1)  # (B, V)
        drawn = torch.multinomial(logprobs.exp(), 1, generator=self._generator)
        self.tokens[:, self._drawn] = drawn[:, 0]
        self.logprobs[:, self._drawn - self._sizes.prompt] = logprobs.gather(1, drawn)[:, 0]
        self._read, self._drawn = self._drawn, self._drawn + 1


def reward(tokens: Tensor, prompt: int) -> Tensor:
    """The share of generated tokens that are greater than the one before: (B,), in [0, 1]."""
    return (tokens[:, prompt:] > tokens[:, prompt - 1 : -1]).float().mean(1)


def advantage(rewards: Tensor) -> Tensor:
    """How much better than its group each sample is, in standard deviations (GRPO, arXiv 2402.03300)."""
    return (rewards - rewards.mean()) / (rewards.std() + 1e-4)


def loss(
    logits: Tensor, tokens: Tensor, behaviour: Tensor, advantages: Tensor, *, clip: float = 0.2
) -> tuple[Tensor, float, float]:
    """The clipped policy-gradient loss (PPO, arXiv 1707.06347) over the generated tokens.

    logits (B, T, V), tokens (B, T), advantages (B,); `behaviour` (B, G) are the log-probabilities under the
    weights that drew the tokens. Returns the loss, the mean importance ratio, and the share of tokens whose ratio
    was clipped.
    """
    prompt = tokens.shape[1] - behaviour.shape[1]
    everywhere = logits[:, prompt - 1 : -1].log_softmax(-1)  # (B, G, V)
    logprobs = everywhere.gather(2, tokens[:, prompt:, None])[:, :, 0]  # (B, G)
    ratio = (logprobs - behaviour).exp()
    bounded = ratio.clamp(1 - clip, 1 + clip)
    gain = torch.minimum(ratio * advantages[:, None], bounded * advantages[:, None])
    clipped = (ratio != bounded).float().mean()
    return -gain.mean(), float(ratio.detach().mean()), float(clipped)


def parameters_total(model: nn.Module) -> int:
    """Elements of all parameters and buffers, tied ones counted once."""
    return sum(math.prod(tensor.shape) for tensor in (*model.parameters(), *model.buffers()))
