"""Model files beside the Python packages: safetensors both ways, config.json and rotary frequencies against transformers.

The C++ side is the program build/<preset>/tests/checkpoint_python_parity (mtraining/checkpoint/python_parity_test.cc).
"""

import itertools
import json
import os
import pathlib
import subprocess

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import safetensors
import safetensors.torch
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

ROTARY = {
    "llama": LlamaRotaryEmbedding,
    "qwen2": Qwen2RotaryEmbedding,
    "qwen3": Qwen3RotaryEmbedding,
}
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def ours(*arguments: object) -> str:
    program = (
        pathlib.Path(os.environ["MTRAINING_BINARY_DIR"]) / "tests" / "checkpoint_python_parity"
    )
    done = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def some_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    shapes = [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (4, 3, 2)]
    return {
        f"layers.{i}.{dtype}".replace("torch.", ""): (torch.randn(shape) * 50).to(dtype)
        for i, (dtype, shape) in enumerate(itertools.product(DTYPES, shapes))
    }


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.contiguous()
        .view(-1)
        .view(torch.uint8)
        .equal(b.contiguous().view(-1).view(torch.uint8))
    )


def test_a_file_of_the_python_package_comes_back_byte_for_byte(tmp_path):
    tensors = some_tensors()
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", {"format": "pt", "k": "ü"})
    ours("copy", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "b.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bytes(loaded[name], tensor), name
    with safetensors.safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "k": "ü"}
    described = json.loads(ours("describe", tmp_path / "a.safetensors"))
    assert described == json.loads(ours("describe", tmp_path / "b.safetensors"))
    assert described["layers.4.float64"] == ["F64", [3, 5]]


# ---------------------------------------------------------------- rotary frequencies
def yarn(**fields: object) -> dict:
    base = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32768}
    return base | fields


def llama3(**fields: object) -> dict:
    base = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return base | fields


ROPES = [
    None,
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 1.5},
    yarn(),
    yarn(factor=2.5, original_max_position_embeddings=64),
    yarn(factor=1.0),
    yarn(original_max_position_embeddings=4),
    yarn(beta_fast=64.0, beta_slow=2.0),
    yarn(beta_fast=4.0, beta_slow=4.0),
    yarn(attention_factor=1.7),
    yarn(mscale=1.0, mscale_all_dim=0.707),
    yarn(mscale=0.707, mscale_all_dim=1.0, factor=40.0),
    yarn(mscale=2.0),
    yarn(truncate=False),
    yarn(truncate=False, beta_fast=24.0, beta_slow=1.5, factor=7.0),
    llama3(),
    llama3(factor=32.0),
    llama3(low_freq_factor=2.0, high_freq_factor=8.0, original_max_position_embeddings=4096),
]


def tiny_config(
    family: str, theta: float, rope: dict | None, head_dim: int, **more: object
) -> dict:
    config = {
        "model_type": family,
        "architectures": [
            {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[family] + "ForCausalLM"
        ],
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
        "rope_scaling": rope,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return config | more


def write_config(folder: pathlib.Path, config: dict) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rope_of(folder: pathlib.Path) -> tuple[float, torch.Tensor]:
    """What transformers makes of a config.json: attention factor, inverse frequencies."""
    config = transformers.AutoConfig.from_pretrained(folder)
    rotary = ROTARY[config.model_type](config)
    return float(rotary.attention_scaling), rotary.inv_freq


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: json.dumps(r) if r else "default")
def test_frequencies_equal_those_of_transformers(tmp_path, rope):
    for head_dim, theta, family in [
        (128, 1e6, "qwen2"),
        (64, 5e5, "llama"),
        (80, 1.28e8, "qwen3"),
        (16, 1e4, "llama"),
    ]:
        folder = write_config(tmp_path / f"{head_dim}", tiny_config(family, theta, rope, head_dim))
        factor, inverse = rope_of(folder)
        lines = ours("rope", folder).split()
        got = torch.tensor([float.fromhex(line) for line in lines[1:]], dtype=torch.float64)
        assert float.fromhex(lines[0]) == pytest.approx(factor, rel=1e-12)
        assert got.shape == inverse.shape == (head_dim // 2,)
        relative = ((got - inverse.double()) / inverse.double()).abs().max()
        assert relative < 1e-6, f"head_dim {head_dim}: off by {relative:.2e}"


# ---------------------------------------------------------------- config.json
@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.parametrize("rope", [None, ROPES[1], ROPES[9], ROPES[13], ROPES[14]], ids=range(5))
def test_a_written_config_is_read_alike_at_the_trained_length(tmp_path, family, rope):
    source = tiny_config(family, 1e6, rope, 16, tie_word_embeddings=True, eos_token_id=[3, 5])
    if rope:  # the length that the rope was made for is not always spelled out
        source["rope_scaling"] = {
            k: v
            for k, v in rope.items()
            if k != "original_max_position_embeddings" or family == "llama"
        }
        if rope["rope_type"] == "llama3":
            source["rope_scaling"] = rope
    first = write_config(tmp_path / "first", source)
    (tmp_path / "second").mkdir()
    ours("config", first / "config.json", tmp_path / "second/config.json", 4096)
    before = transformers.AutoConfig.from_pretrained(first)
    after = transformers.AutoConfig.from_pretrained(tmp_path / "second")
    assert type(after) is type(before)
    assert after.max_position_embeddings == 4096
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "tie_word_embeddings",
        "eos_token_id",
        "hidden_act",
        "architectures",
        "dtype",
        "initializer_range",
    ):
        assert getattr(after, key) == getattr(before, key), key
    want, got = rope_of(first), rope_of(tmp_path / "second")
    assert want[0] == got[0]
    assert torch.equal(want[1], got[1]), "the rope must not follow the new length"


def test_a_config_of_this_transformers_is_read(tmp_path):
    """Whatever spelling the installed version writes."""
    for family, rope in itertools.product(ROTARY, [None, ROPES[9], ROPES[14]]):
        folder = write_config(tmp_path / "read", tiny_config(family, 5e5, rope, 16))
        config = transformers.AutoConfig.from_pretrained(folder)
        config.save_pretrained(tmp_path / "saved")
        assert ours("rope", tmp_path / "saved") == ours("rope", folder)


# ---------------------------------------------------------------- models
@pytest.mark.parametrize("max_shard_bytes", [20_000, 10**9])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ROTARY)
def test_a_model_that_passed_through_our_files_gives_the_same_logits(
    tmp_path, family, tied, max_shard_bytes
):
    source = tiny_config(
        family, 1e4, yarn(original_max_position_embeddings=64), 16, tie_word_embeddings=tied
    )
    config = transformers.AutoConfig.from_pretrained(write_config(tmp_path / "config", source))
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too
            parameter.normal_(0, 0.5)
    model.save_pretrained(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    ours("copy_folder", tmp_path / "theirs", tmp_path / "ours", max_shard_bytes)
    ours("config", tmp_path / "theirs/config.json", tmp_path / "ours/config.json", 300)
    files = sorted(p.name for p in (tmp_path / "ours").glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (max_shard_bytes == 10**9), files
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert again.config.max_position_embeddings == 300
    ids = torch.randint(0, 96, (1, 300))  # beyond the original length
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
