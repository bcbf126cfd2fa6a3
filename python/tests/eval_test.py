"""mtraining eval: the loss of a run's weights over a token file, held against what the run itself reported."""

import json
import math

import numpy as np
import pytest
from mtraining.prepare import write_token_file

from python.tests.conftest import (
    Job,
    assert_one_sentence,
    clean_environment,
    rows_of,
    run_text,
)

PATTERN = ["--set", "attention.last_q=32", "--set", "attention.sink_tokens=8"]


@pytest.fixture(scope="module")
def trained(binary, tmp_path_factory):
    job = Job(binary, tmp_path_factory.mktemp("eval"))
    result = job.run()
    assert result.returncode == 0, result.stderr
    return job


def evaluate(job, *extra: str, checkpoint=None, data=None):
    command = [str(job.binary), "eval", "perplexity"]
    command += ["--checkpoint", str(checkpoint or job.out), "--data", str(data or job.data)]
    return run_text([*command, *extra], cwd=job.folder, env=clean_environment())


def test_the_first_window_has_the_losses_that_the_run_reported(trained):
    reported = json.loads((trained.out / "summary.json").read_text())["evaluations"]
    got = rows_of(evaluate(trained, "--max-windows", "1", *PATTERN))
    assert [row["attention"] for row in got] == ["dense", "vertical_slash"]
    for row, want in zip(got, reported, strict=True):
        assert row["loss"] == want["loss"] and row["scored_tokens"] == 256
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
        assert row["density_by_layer"] == want["density_by_layer"]
    assert got[0]["recall"] == 1 and 0 < got[1]["recall_worst"] <= got[1]["recall"] <= 1


def test_every_token_is_scored_once_whatever_the_windows(trained):
    for window, stride in ((256, 256), (300, 77), (699, 1)):
        extra = ["--window", str(window), "--stride", str(stride), "--attention", "dense"]
        data = trained.folder / "short"
        write_token_file(data, [np.arange(700) % 64])
        (row,) = rows_of(evaluate(trained, *extra, data=data))
        assert row["scored_tokens"] == 699
        assert row["windows"] == math.ceil((699 - window) / stride) + 1


def test_every_pattern_has_its_row(trained):
    extra = ["--attention", "dense", "vertical_slash", "fixed", "xattention", "moba"]
    extra += ["--set", "attention.fixed_columns=9", "--set", "attention.fixed_diagonals=1"]
    extra += ["--set", "attention.moba_chunk=64", "--set", "attention.moba_top_k=2"]
    got = rows_of(evaluate(trained, "--max-windows", "2", *extra, *PATTERN))
    assert [row["attention"] for row in got] == extra[1:6]
    assert all(math.isfinite(row["loss"]) for row in got)
    assert got[2]["density"] < got[0]["density"]


BAD = [
    (["--window", "0"], ["--window", "at least 1"]),
    (["--window", "5000"], ["--window", "4999"]),
    (["--stride", "999"], ["--stride", "window = 256"]),
    (["--attention", "sparse"], ["attention.pattern", "sparse"]),
    (["--attention", "fixed"], ["attention.pattern", "fixed_columns"]),
    (["--set", "attention.p_slash=2"], ["attention.p_slash"]),
    (["--set", "attention.p_slahs=0.5"], ["unknown key", "attention.p_slash"]),
    (["--set", "train.seq_len=8"], ["train.seq_len"]),
    (["--set", "train.device=cuda"], ["train.device"]),
    (["--set", "nothing"], ["--set", "key=value"]),
    (["--checkpoint", "absent"], ["absent"]),
    (["--data", "absent"], ["absent", "cannot be opened"]),
    (["--data", "wide"], ["wide", "vocabulary"]),
    (["--data", "one"], ["one", "2 tokens"]),
    (["--batches", "3"], ["unknown option --batches"]),
]


@pytest.mark.parametrize(("extra", "parts"), BAD, ids=[" ".join(extra) for extra, _ in BAD])
def test_mistakes_are_one_sentence(trained, extra, parts):
    write_token_file(trained.folder / "wide", [np.full(400, 99)])
    write_token_file(trained.folder / "one", [np.array([1])])
    for flag in ("--checkpoint", "--data"):
        if flag in extra:
            kinds = {"--checkpoint": "checkpoint", "--data": "data"}
            given = {kinds[flag]: trained.folder / extra[1]}
            assert_one_sentence(evaluate(trained, **given), *parts)
            return
    assert_one_sentence(evaluate(trained, *extra), *parts)


def test_a_flipped_bit_of_the_weights_is_named(trained):
    file = trained.out / "checkpoints" / "step-00000003" / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    try:
        assert_one_sentence(evaluate(trained), str(file), "is damaged")
    finally:
        file.write_bytes(whole)


def test_kinds_that_there_are_not_are_named(binary):
    for kind, says in (
        ("needle", "expected --checkpoint"),
        ("perplexitty", "expected perplexity, needle, ruler or infinitebench, got perplexitty"),
        ("", "none"),
    ):
        command = [str(binary), "eval", *([kind] if kind else [])]
        assert_one_sentence(run_text(command), "eval", says)
