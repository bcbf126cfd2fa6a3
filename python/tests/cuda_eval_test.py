"""mtraining eval and generate on a GPU against the CPU, bf16 on both.

Marked cuda: without a CUDA device, or a library built with CUDA, these cases are left out and counted as not run.
"""

import json
import subprocess

import numpy as np
import pytest
import torch
from mtraining.prepare import write_token_file
from transformers import Qwen2Config, Qwen2ForCausalLM

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("eval")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = Qwen2Config(
        vocab_size=256, max_position_embeddings=1024, initializer_range=0.2, **sizes, **heads
    )
    Qwen2ForCausalLM(config).save_pretrained(made / "model")
    write_token_file(made / "tokens", [np.random.default_rng(1).integers(0, 256, 3000)])
    return made


def verb(binary, environment, *words):
    result = subprocess.run(
        [str(binary), *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def on(device):
    return ["--set", f"train.device={device}", "--set", "model.dtype=bf16"]


def test_losses_are_the_cpus(binary, environment, folder):
    words = ["eval", "perplexity", "--checkpoint", folder / "model", "--data", folder / "tokens"]
    words += ["--window", 1000, "--stride", 500, "--set", "attention.p_slash=0.5"]
    cpu, gpu = (verb(binary, environment, *words, *on(device)) for device in ("cpu", "cuda"))
    for a, b in zip(gpu, cpu, strict=True):
        assert a["device"].startswith("cuda") and b["device"] == "cpu"
        assert a["scored_tokens"] == b["scored_tokens"] == 2999
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-2)
        assert a["density"] == pytest.approx(b["density"], rel=5e-2)
        assert a["recall"] == pytest.approx(b["recall"], abs=5e-2)


def test_ids_are_mostly_the_cpus(binary, environment, folder):
    random = np.random.default_rng(2)
    lines = [json.dumps({"ids": random.integers(0, 256, n).tolist()}) for n in (1, 64, 65, 300)]
    (folder / "ids.jsonl").write_text("\n".join(lines) + "\n")
    words = ["generate", "--checkpoint", folder / "model", "--input", folder / "ids.jsonl"]
    words += ["--max-new-tokens", 5]
    cpu, gpu = (verb(binary, environment, *words, *on(device)) for device in ("cpu", "cuda"))
    assert [len(row["output"]) for row in gpu] == [5] * 4
    same = sum(a["output"][0] == b["output"][0] for a, b in zip(gpu, cpu, strict=True))
    assert same >= 3, (gpu, cpu)
