"""Every verb that can use a GPU, where there is none (or none is visible): one sentence, exit 2, nothing written."""

import subprocess

import pytest

from python.tests.conftest import assert_one_sentence, run_text

ATTENTION = ["bench", "attention", "--device", "cuda", "--seq-len", "512"]
TRAIN = ["train", "--config", "{config}", "--out", "{out}", "--train.device", "cuda"]
VERBS = [
    TRAIN,
    [*TRAIN, "--dry-run"],
    [*TRAIN, "--nproc", "2"],
    [*TRAIN, "--model.dtype", "bf16"],
    [*TRAIN, "--model.dtype", "float32"],
    ["bench", "train", "--config", "{config}", "--set", "train.device=cuda"],
    ["bench", "train", "--config", "{config}", "--set", "train.device=cuda"]
    + ["--set", "model.dtype=bf16", "--ranks", "2"],
    ["bench", "train", "--config", "{config}", "--device", "cuda", "--nproc", "2"],
    ["eval", "perplexity", "--checkpoint", "{out}", "--data", "{data}"]
    + ["--set", "train.device=cuda"],
    ATTENTION,
    [*ATTENTION, "--p", ".9"],
    [*ATTENTION, "--dtype", "float64"],
    [*ATTENTION, "--dtype", "float32"],
    [*ATTENTION, "--dtype", "int8"],
    [*ATTENTION, "--head-dim", "12"],
    [*ATTENTION, "--head-dim", "512"],
    [*ATTENTION, "--heads", "3"],
    [*ATTENTION, "--kv-heads", "0"],
    [*ATTENTION, "--density", "2"],
    [*ATTENTION, "--repeats", "0"],
    [*ATTENTION, "--backend", "sm70"],
    [*ATTENTION, "--pattern", "absent.json"],
    [*ATTENTION, "--layout", "striped", "--cp-size", "2"],
    ["bench", "attention", "--device", "cuda:0"],
    ["bench", "attention", "--device", "cuda", "--seq-len", "0"],
    ["bench", "attention", "--device", "cuda", "--seq-len", "-5"],
]


@pytest.mark.parametrize("words", VERBS, ids=[" ".join(words) for words in VERBS])
def test_a_gpu_that_is_not_there_is_one_sentence(job, words):
    known = {"config": job.config, "out": job.out, "data": job.data}
    before = sorted(job.folder.rglob("*"))
    result = run_text(
        [job.binary, *(word.format(**known) for word in words)],
        cwd=job.folder,
        env={**job.environment(), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert_one_sentence(result)
    assert result.stdout == ""
    assert sorted(job.folder.rglob("*")) == before


def test_doctor_says_that_training_runs_on_the_cpu(binary, environment):
    result = subprocess.run(
        [str(binary), "doctor", "--no-links"],
        env={**environment, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stderr == "" and "training runs here" in result.stdout
