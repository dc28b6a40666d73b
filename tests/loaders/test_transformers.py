"""transformers models: refits under checkpoint names leave what `from_pretrained` would load, tied heads included."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import dcr
from dcr.engines.transformers import TransformersEngine
from dcr.errors import SchemaError
from dcr.layout.frames import Layout
from dcr.layout.schema import Schema, TensorSpec
from dcr.loaders.engine import Adapter, Pairs
from dcr.loaders.record import Kind
from dcr.testing.engines import EngineTests

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2}
MODELS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama with biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
    "qwen3, tied": lambda: transformers.Qwen3Config(**SIZES | {"tie_word_embeddings": True}, head_dim=8),
    "qwen3 moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES,
        **EXPERTS,
        head_dim=8,
        num_experts=4,
        moe_intermediate_size=12,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4, sliding_window=None),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **SIZES, **EXPERTS, head_dim=8, num_local_experts=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "deepseek v3": lambda: transformers.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        **EXPERTS,
        moe_intermediate_size=12,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=4,
    ),
}
FUSED = {"qwen3 moe", "mixtral", "deepseek v3"}  # in memory, and apart in a checkpoint


@pytest.fixture(scope="session", autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A saved model of each kind, built once."""
    made: dict[str, Path] = {}

    def checkpoint(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("model")
            model = AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.bfloat16)
            for path, buffer in model.named_buffers():
                if path.endswith("e_score_correction_bias"):  # fp32 in checkpoints; transformers 5.19 makes it bf16
                    buffer.data = buffer.data.float()
            model.save_pretrained(made[name])
        return made[name]

    return checkpoint


@pytest.mark.parametrize("name", MODELS)
class TestTransformers(EngineTests):
    """The kit for engines; what it compares with is loaded by `from_pretrained`, from files."""

    refits = 3
    frame_elems = 1500

    @pytest.fixture(autouse=True)
    def _model(self, name: str, checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
        self.folder, self.scratch = checkpoints(name), tmp_path

    def schema(self) -> Schema:
        held = load_file(self.folder / "model.safetensors")
        return Schema(
            tuple(
                TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                for name, tensor in held.items()
            )
        )

    def native(self, pairs: Pairs) -> Adapter:
        return TransformersEngine(from_files(self.folder, self.scratch, dict(pairs)))

    def test_a_checkpoint_is_what_is_published(self, name: str) -> None:
        """Experts are apart, and a tied head is not there: its names are not those of the model's own state."""
        world = self._world()
        names = {spec.name for spec in world.schema.tensors}
        state = set(world.engine.module.state_dict())
        assert (names == state) == (name not in FUSED and "tied" not in name)


def from_files(folder: Path, scratch: Path, tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    """A checkpoint of these tensors, written and loaded."""
    save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(folder / "config.json", scratch)
    return AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.bfloat16)


def test_stand_ins_for_tied_weights_are_not_warned_about_and_the_verbosity_is_as_before(
    checkpoints: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Some tensors are loaded without the others: where both names of a tied weight are absent, transformers warns."""
    folder = checkpoints("qwen3, tied")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    held = load_file(folder / "model.safetensors")
    specs = [TensorSpec(name, "bfloat16", tuple(tensor.shape)) for name, tensor in held.items()]
    verbosity = transformers.utils.logging.get_verbosity()
    caplog.clear()
    try:
        transformers.utils.logging.set_verbosity_info()
        dcr.loader(model, kind="transformers").bind(Layout(Schema(tuple(specs)), ()))
        assert transformers.utils.logging.get_verbosity() == transformers.utils.logging.INFO
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    assert "corrupted" not in caplog.text


def test_a_tied_head_stays_tied(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoints("qwen3, tied")
    model = from_files(folder, tmp_path, load_file(folder / "model.safetensors"))
    loader = dcr.loader(model, kind="transformers")
    held = load_file(folder / "model.safetensors")
    specs = tuple(TensorSpec(name, "bfloat16", tuple(tensor.shape)) for name, tensor in held.items())
    loader.bind(Layout(Schema(specs), ()))
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.0.gate_proj.weight", "model.nothing.weight"])
def test_a_tensor_that_transformers_does_not_take_is_refused_by_name(
    checkpoints: Callable[[str], Path], name: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoints("llama"), dtype=torch.bfloat16)
    specs = [TensorSpec(key, "bfloat16", tuple(tensor.shape)) for key, tensor in model.state_dict().items()]
    with pytest.raises(SchemaError, match=f"{name} is published and goes nowhere here"):
        dcr.loader(model, kind="transformers").bind(Layout(Schema((*specs, TensorSpec(name, "bfloat16", (2, 2)))), ()))


def test_an_fp32_buffer_is_recorded_as_it_is(checkpoints: Callable[[str], Path]) -> None:
    """DeepSeek's correction of expert scores stays fp32 in a bf16 model, and is no parameter."""
    folder = checkpoints("deepseek v3")
    held = load_file(folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    specs = tuple(
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in held.items()
    )
    loader = dcr.loader(model, kind="transformers")
    loader.bind(Layout(Schema(specs), ()))
    kinds = {
        spec.dtype: verdict.kind
        for spec, verdict in zip(specs, loader.record.verdicts, strict=True)
        if "e_score_correction_bias" in spec.name
    }
    assert kinds == {"float32": Kind.BITS}
