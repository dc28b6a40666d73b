"""Small models of the families that are tested, in checkpoints on disk; and a trainer's side of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

FAMILIES = ("llama", "qwen3", "qwen3_moe", "mixtral", "gpt_oss")

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}


def config_of(family: str) -> Any:
    """A transformers configuration."""
    from transformers import GptOssConfig, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

    match family:
        case "llama":
            return LlamaConfig(**SMALL, attention_bias=True)
        case "qwen3":
            return Qwen3Config(**SMALL | {"tie_word_embeddings": True}, head_dim=32)
        case "qwen3_moe":
            sparse = {"num_experts": 4, "moe_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": []}
            return Qwen3MoeConfig(**SMALL, **EXPERTS, **sparse, head_dim=32)
        case "mixtral":
            return MixtralConfig(**SMALL, **EXPERTS, num_local_experts=4, sliding_window=None)
        case "gpt_oss":
            kinds = ["sliding_attention", "full_attention"]
            more = {"num_local_experts": 4, "sliding_window": 64, "layer_types": kinds}
            return GptOssConfig(**SMALL, **EXPERTS, **more, head_dim=32)
    raise ValueError(family)


def make_checkpoint(family: str, folder: Path) -> Path:
    """A checkpoint with random weights, norms and biases too; a second call finds the first one's."""
    if (folder / "model.safetensors").exists():
        return folder
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or name.endswith("bias"):
            base = 1.0 if "norm" in name else 0.0
            tensors[name] = (base + 0.2 * torch.randn(tensor.shape)).to(tensor.dtype)
        elif "embed" in name:  # small, so that what layers add decides what is said
            tensors[name] = tensor * 0.1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Trainer(torch.nn.Module):
    """The tensors of a checkpoint, as parameters under their own names."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        for name, tensor in load_file(checkpoint / "model.safetensors").items():
            *path, leaf = name.split(".")
            module: torch.nn.Module = self
            for step in path:
                if step not in module._modules:
                    module.add_module(step, torch.nn.Module())
                module = module._modules[step]  # type: ignore[assignment]
            module.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))

    def step(self, seed: int, share: float = 0.02) -> None:
        """Change some elements of every tensor: low bits of most of them, the sign of some."""
        rng = np.random.default_rng(seed)
        for tensor in self.state_dict().values():
            bits = tensor.view(torch.uint8).numpy().reshape(-1).view(f"u{tensor.element_size()}")
            at = np.unique(rng.integers(0, len(bits), max(1, int(len(bits) * share))))
            masks = rng.integers(1, 1 << 6, len(at)) | (rng.random(len(at)) < 0.1) << (8 * bits.itemsize - 1)
            bits[at] ^= masks.astype(bits.dtype)

    def save(self, folder: Path) -> Path:
        """The checkpoint as it is now."""
        folder.mkdir(parents=True, exist_ok=True)
        for file in self.checkpoint.glob("*.json"):
            (folder / file.name).write_text(file.read_text())
        tensors: Mapping[str, torch.Tensor] = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        json.loads((folder / "config.json").read_text())
        return folder


def make_tokenizer(folder: Path) -> Path:
    """A tokenizer of single characters, beside a checkpoint."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(code): code - 29 for code in range(32, 127)}
    words = Tokenizer(models.WordLevel(characters, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder
