"""mtraining eval and generate on a GPU against the CPU, bf16 on both; a model made by hand finds its needles there.

Marked cuda: without a CUDA device, or a library built with CUDA, these cases are left out and counted as not run.
"""

import json

import numpy as np
import pytest
import torch
from mtraining.prepare import write_token_file
from transformers import Qwen2ForCausalLM

from python.tests.conftest import rows_of, run_text, tiny_qwen2
from python.tests.eval_tasks_test import SPARSE, grid, retriever

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("eval")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64}
    config = tiny_qwen2(max_position_embeddings=1024, initializer_range=0.2, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(made / "model")
    write_token_file(made / "tokens", [np.random.default_rng(1).integers(0, 256, 3000)])
    return made


def verb(binary, environment, *words):
    return rows_of(run_text([binary, *words], env=environment, timeout=120))


def on(device):
    return ["--set", f"train.device={device}", "--set", "model.dtype=bf16", "--threads", 2]


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


def test_needles_are_found_where_the_pattern_looks(binary, environment, tmp_path):
    weights, data = retriever(tmp_path / "weights"), tmp_path / "n.jsonl"
    samples = grid(data, lengths=(300, 2000))
    words = ["eval", "needle", "--checkpoint", weights, "--data", data]
    words += ["--attention", "dense", "vertical_slash", "fixed"]
    words += [word for key in SPARSE for word in ("--set", key)]
    rows = [row for row in verb(binary, environment, *words, *on("cuda")) if "id" in row]
    found = {(row["attention"], row["id"]): row["score"] for row in rows}
    assert len(found) == 3 * len(samples)
    for (attention, name), score in found.items():
        assert score == float(attention != "fixed" or not name.endswith("/0.5")), (attention, name)


def test_likelihoods_of_options_are_the_cpus(binary, environment, folder):
    random = np.random.default_rng(3)
    lines = []
    for n in (1, 64, 300):
        options = [random.integers(0, 256, size).tolist() for size in (1, 2, 40)]
        sample = {"id": f"{n}", "task": "code_debug", "ids": random.integers(0, 256, n).tolist()}
        lines.append(json.dumps(sample | {"options": options, "correct": [0]}))
    (folder / "choice.jsonl").write_text("\n".join(lines))
    words = [
        "eval",
        "infinitebench",
        "--checkpoint",
        folder / "model",
        "--data",
        folder / "choice.jsonl",
    ]
    words += ["--attention", "dense"]
    cpu, gpu = (verb(binary, environment, *words, *on(device)) for device in ("cpu", "cuda"))
    for a, b in zip(gpu, cpu, strict=True):
        if "id" in a:
            assert a["log_likelihoods"] == pytest.approx(b["log_likelihoods"], rel=3e-2, abs=0.2)
