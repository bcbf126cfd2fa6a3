"""Our decoder beside transformers': the same logits from the same folder, and from folders that we write.

The C++ side is the program build/<preset>/tests/model_parity (mtraining/checkpoint/model_parity_test.cc).
"""

import json
import os
import pathlib
import subprocess

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import safetensors.torch
import torch
import transformers

TOLERANCE = 1e-4
ORIGINAL_LENGTH = 64
LENGTH = 300
FAMILIES = {
    "qwen2": [None],
    "qwen3": [False, True],
    "llama": [False, True],
}  # attention_bias
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": ORIGINAL_LENGTH}
ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": YARN,
    "yarn_attention_factor": YARN | {"attention_factor": 1.7},
    "yarn_mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn_ramp": YARN | {"beta_fast": 8.0, "beta_slow": 0.5, "truncate": False},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    },
}
VARIANTS = [(family, bias) for family, biases in FAMILIES.items() for bias in biases]


def ours(*arguments: object) -> None:
    program = pathlib.Path(os.environ["MTRAINING_BINARY_DIR"]) / "tests" / "model_parity"
    done = subprocess.run(
        [program, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def write_config(
    folder: pathlib.Path,
    family: str,
    bias: bool | None,
    tied: bool,
    rope: str,
    head_dim: int = 16,
    theta: float = 1e4,
    **more: object,
) -> pathlib.Path:
    name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "llama": "Llama"}[family]
    config = {
        "model_type": family,
        "architectures": [name + "ForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": head_dim,  # not hidden_size / num_attention_heads
        "max_position_embeddings": 16 * ORIGINAL_LENGTH,
        "rms_norm_eps": 1e-3,
        "rope_theta": theta,
        "rope_scaling": ROPES[rope],
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
    }
    if bias is not None:
        config["attention_bias"] = bias
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


def save_random_model(config_folder: pathlib.Path, folder: pathlib.Path) -> None:
    """By transformers. Biases and norms are random too: at 0 and 1 they could be left out unseen."""
    config = transformers.AutoConfig.from_pretrained(config_folder)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 2.0)
            elif name.endswith("embed_tokens.weight"):
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)


def their_logits(folder: pathlib.Path, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(ids, position_ids=positions.expand(ids.shape)).logits


def our_logits(folder: pathlib.Path, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    scratch = folder.parent / f"{folder.name}_io"
    scratch.mkdir(exist_ok=True)
    safetensors.torch.save_file({"ids": ids, "positions": positions}, scratch / "in.safetensors")
    ours("logits", folder, scratch / "in.safetensors", scratch / "out.safetensors")
    return safetensors.torch.load_file(scratch / "out.safetensors")["logits"]


def some_ids() -> torch.Tensor:
    return torch.randint(0, 96, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype == torch.float32 and got.shape == want.shape
    assert want.abs().max() > 1, "logits too small to tell models apart"
    worst = (got - want).abs().max().item()
    assert worst < TOLERANCE, f"off by {worst:.2e}"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(("family", "bias"), VARIANTS)
def test_logits_are_those_of_transformers(tmp_path, family, bias, rope, tied):
    config = write_config(tmp_path / "config", family, bias, tied, rope)
    folder = tmp_path / "theirs"
    save_random_model(config, folder)
    ids = some_ids()
    first = 500_000 if tied else 0  # runs past the original length, or lies beyond it
    positions = torch.arange(first, first + LENGTH)
    want = their_logits(folder, ids, positions)
    assert_same(our_logits(folder, ids, positions), want)
    # What we save, transformers loads, and computes the same bits as from its own files.
    (tmp_path / "ours").mkdir()
    ours("save", folder, tmp_path / "ours", 4096)
    assert torch.equal(their_logits(tmp_path / "ours", ids, positions), want)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(("head_dim", "theta"), [(128, 1e6), (64, 1.28e8), (80, 5e5)])
def test_wide_heads_turn_by_the_same_float32_phases(tmp_path, head_dim, theta, rope):
    """One unit in the last place of a frequency would be .03 of a radian here."""
    config = write_config(tmp_path / "config", "qwen3", False, False, rope, head_dim, theta)
    save_random_model(config, tmp_path / "theirs")
    ids = some_ids()
    positions = torch.arange(524_288 - LENGTH, 524_288)
    assert_same(
        our_logits(tmp_path / "theirs", ids, positions),
        their_logits(tmp_path / "theirs", ids, positions),
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("family", "bias"), VARIANTS)
def test_a_model_that_we_initialise_is_a_model_of_transformers(tmp_path, family, bias, tied):
    config = write_config(tmp_path / "config", family, bias, tied, "yarn", initializer_range=0.3)
    folder = tmp_path / "ours"
    folder.mkdir()
    ours("init", config / "config.json", folder, 11)
    ids, positions = some_ids(), torch.arange(LENGTH)
    _, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert_same(our_logits(folder, ids, positions), their_logits(folder, ids, positions))


@pytest.mark.parametrize("tensor", ["q_norm", "k_norm", "q_proj.bias", "o_proj.bias", "lm_head"])
def test_a_folder_without_a_tensor_of_its_family_is_refused(tmp_path, tensor):
    config = write_config(tmp_path / "config", "qwen3", True, False, "default")
    folder = tmp_path / "theirs"
    save_random_model(config, folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if tensor not in name}
    assert len(kept) < len(tensors)
    safetensors.torch.save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(AssertionError, match=f"parameters missing.*{tensor}"):
        our_logits(folder, some_ids(), torch.arange(LENGTH))
