"""model.init_from: Hugging Face weights in, training, Hugging Face weights out, held beside transformers."""

import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from mtraining.prepare import write_token_file

from python.tests.conftest import assert_one_sentence
from python.tests.model_logits_test import (
    assert_same,
    our_logits,
    save_random_model,
    some_ids,
    their_logits,
    write_config,
)
from python.tests.resume_test import checkpoint

VOCABULARY = 96
CONFIG = """
[model]
init_from = "{folder}"

[data]
train = "{data}"
valid = "{data}"

[attention]
pattern = "dense"

[train]
device = "cpu"
seq_len = 256
steps = 3
preflight = false

[optim]
lr = 1e-3

[eval]
batches = 1
"""


@pytest.fixture
def start(job):
    """A job whose weights are those of a folder that transformers wrote."""

    def make(family="qwen2", bias=None, tied=False, rope="default", sharded=False, **more) -> Path:
        config = write_config(job.folder / "config", family, bias, tied, rope, **more)
        folder = job.folder / "theirs"
        save_random_model(config, folder)
        if sharded:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
            (folder / "model.safetensors").unlink()
            model.save_pretrained(folder, max_shard_size="40KB")
        (folder / "tokenizer.json").write_text('{"a": 1}')
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        data = job.folder / "text"
        write_token_file(data, [np.random.default_rng(2).integers(0, VOCABULARY, 3000)])
        job.config.write_text(CONFIG.format(folder=folder, data=data))
        job.ids = torch.from_numpy(np.random.default_rng(2).integers(0, VOCABULARY, 3000))
        return folder

    return make


@pytest.mark.parametrize(
    ("family", "bias", "tied", "rope", "nproc"),
    [
        ("qwen2", None, True, "default", 2),
        ("qwen3", False, False, "yarn", None),
        ("llama", False, False, "llama3", 2),
        ("llama", True, True, "linear", None),
    ],
)
def test_trained_weights_are_those_that_transformers_loads(
    job, start, family, bias, tied, rope, nproc
):
    folder = start(family, bias, tied, rope, sharded=nproc == 2)
    result = job.run(nproc=nproc)
    assert result.returncode == 0, result.stderr
    saved = checkpoint(job.out, 3)
    ids, positions = some_ids(), torch.arange(some_ids().shape[1])
    theirs = their_logits(saved, ids, positions)
    assert_same(our_logits(saved, ids, positions), theirs)
    assert (theirs - their_logits(folder, ids, positions)).abs().max() > 1e-3  # they were trained
    # The weights in memory, by which we evaluated, are the ones in the file.
    model = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    with torch.no_grad():
        logits = model(job.ids[None, :256]).logits[0]
    want = torch.nn.functional.cross_entropy(logits, job.ids[1:257]).item()
    evaluations = json.loads((job.out / "summary.json").read_text())["evaluations"]
    assert abs(evaluations[0]["loss"] - want) < 1e-4
    # A tied head is one tensor before and after, and is stored once.
    names = safetensors.torch.load_file(saved / "model.safetensors").keys()
    assert ("lm_head.weight" in names) == (not tied)
    config = json.loads((saved / "config.json").read_text())
    assert config["max_position_embeddings"] == 256
    assert (saved / "tokenizer.json").read_text() == '{"a": 1}'
    assert (saved / "chat_template.jinja").exists()


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_weights_that_are_not_trained_come_back_byte_by_byte(job, start, dtype):
    folder = start("qwen2", tied=True)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    if dtype == "bf16":
        tensors = {name: value.to(torch.bfloat16) for name, value in tensors.items()}
        safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    result = job.run("--optim.lr", "0", "--model.dtype", dtype)
    assert result.returncode == 0, result.stderr
    saved = safetensors.torch.load_file(checkpoint(job.out, 3) / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for name, value in tensors.items():
        assert saved[name].dtype == value.dtype and torch.equal(saved[name], value), name


def test_a_longer_context_is_written_as_transformers_reads_it(job, start):
    start("qwen2", tied=True)
    yarn = '{ rope_type = "yarn", factor = 16.0, original_max_position_embeddings = 64 }'
    result = job.run("--set", f"model.rope_scaling={yarn}")
    assert result.returncode == 0, result.stderr
    saved = checkpoint(job.out, 3)
    scaling = json.loads((saved / "config.json").read_text())["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("yarn", 16)
    ids, positions = some_ids(), torch.arange(500, 500 + some_ids().shape[1])
    assert_same(our_logits(saved, ids, positions), their_logits(saved, ids, positions))
    assert job.run("--set", f"model.rope_scaling={yarn}").returncode == 0  # resumes: finished
    assert_one_sentence(job.run(), "model.rope_scaling.rope_type", "with 'yarn', got 'none'")


RECIPES = [  # keys, what the resolved configuration says
    (
        ["rope_type=yarn", "factor=16.0", "original_max_position_embeddings=32768"],
        ["rope_scaling.rope_type = 'yarn'", "rope_scaling.factor = 16.0", "beta_fast = 32.0"],
    ),
    (["rope_type=yarn", "factor=4.0"], ["original_max_position_embeddings = 1024"]),
    (["rope_type=yarn", "factor=4.0", "attention_factor=1.5"], ["attention_factor = 1.5"]),
    (["rope_type=linear", "factor=2.0"], ["rope_scaling.factor = 2.0"]),
    (["rope_type=none"], ["rope_scaling.rope_type = 'none'"]),
]


@pytest.mark.parametrize(("keys", "expected"), RECIPES)
def test_rope_keys(job, start, keys, expected):
    start("llama", False, rope="llama3" if keys == ["rope_type=none"] else "default")
    extra = [part for key in keys for part in ("--set", f"model.rope_scaling.{key}")]
    text = job.run(*extra, "--model.rope_theta", "1.28e8", "--dry-run").stdout
    for line in [*expected, "rope_theta = 1.28e+08"]:
        assert line in text, text
    job.config.write_text(text)
    assert job.run("--dry-run").stdout == text  # what is written reads back


WRONG = [
    (["--model.hidden_size", "64"], ["model.hidden_size", "expected 48", "got 64"]),
    (["--model.architecture", "llama"], ["model.architecture", "'qwen2'", "'llama'"]),
    (["--model.tie_word_embeddings", "true"], ["model.tie_word_embeddings", "expected false"]),
    (["--model.rms_norm_eps", "1e-6"], ["model.rms_norm_eps"]),
    (["--model.attention_bias", "true"], ["model.attention_bias"]),
    (["--model.init_from", "absent"], ["model.init_from", "config.json", "absent"]),
    (["--model.rope_scaling.factor", "2.0"], ["model.rope_scaling.factor", "rope_type"]),
    (["--model.rope_scaling.rope_type", "yarn"], ["needs model.rope_scaling.factor"]),
    (["--model.rope_scaling.rope_type", "ntk"], ["rope_scaling.rope_type", '"yarn"', "ntk"]),
    (
        ["--set", "model.rope_scaling={rope_type='linear', factor=2.0, beta_fast=3.0}"],
        ["beta_fast", "no field", "linear"],
    ),
    (["--set", "model.rope_scaling={rope_type='linear', factor=0.5}"], ["factor", ">= 1"]),
    (["--set", "model.rope_scaling={rope_typ='linear'}"], ["unknown key", "rope_type"]),
]


@pytest.mark.parametrize(("extra", "parts"), WRONG, ids=[" ".join(case[0]) for case in WRONG])
def test_keys_that_disagree_are_refused(job, start, extra, parts):
    start("qwen2")
    for more in ([], ["--dry-run"]):
        assert_one_sentence(job.run(*extra, *more), *parts)
    assert not job.out.exists()


def edit(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path, {"format": "pt"})


def cut_last_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def drop(name: str):
    return lambda folder: edit(folder, lambda tensors: tensors.pop(name))


BAD_FOLDERS = {
    "a head is missing": (drop("lm_head.weight"), ["missing", '"lm_head.weight"']),
    "one bias is missing": (
        drop("model.layers.1.self_attn.k_proj.bias"),
        ["1 parameters missing", "layers.1.self_attn.k_proj.bias"],
    ),
    "a tensor is unused": (
        lambda folder: edit(folder, lambda t: t.update({"model.extra": torch.zeros(2)})),
        ["1 tensors unused", "model.extra"],
    ),
    "a shape differs": (
        lambda folder: edit(folder, lambda t: t.update({"model.norm.weight": torch.zeros(3)})),
        ["model.norm.weight", "expected [48]", "[3]"],
    ),
    "integers": (
        lambda folder: edit(
            folder, lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int64)})
        ),
        ["no floats", "model.norm.weight"],
    ),
    "truncated": (
        lambda folder: cut_last_byte(folder / "model.safetensors"),
        ["model.safetensors"],
    ),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["no safetensors file"]),
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), ["config.json"]),
    "another architecture": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "mamba"}'),
        ["mamba"],
    ),
}


@pytest.mark.parametrize("nproc", [None, 2])
@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_bad_weight_folders_are_one_sentence(job, start, name, nproc):
    spoil, parts = BAD_FOLDERS[name]
    spoil(start("qwen2"))
    assert_one_sentence(job.run(nproc=nproc, timeout=30), "model.init_from", *parts)
    assert not job.out.exists()


@pytest.mark.parametrize("nproc", [None, 4])
def test_a_missing_shard_is_named_before_anything_is_built(job, start, nproc):
    folder = start("qwen2", sharded=True)
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    assert_one_sentence(job.run(nproc=nproc, timeout=30), "missing", shards[1].name)
    assert not job.out.exists()


def test_left_over_files_are_not_read_and_said(job, start):
    folder = start("qwen2")
    safetensors.torch.save_file({"model.norm.weight": torch.zeros(48)}, folder / "old.safetensors")
    result = job.run()
    assert result.returncode == 0, result.stderr
    assert "old.safetensors is not read" in result.stdout
