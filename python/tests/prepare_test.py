"""Token files written in Python are what the format says; the text is split without overlap."""

import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mtraining.plots import attention_map, mask_map
from mtraining.prepare import prepare_bytes, python_sources, unigram_entropy, write_token_file


def test_bytes_of_the_index(tmp_path):
    write_token_file(tmp_path / "t", [np.array([1, 2, 3]), np.array([4])], dtype="uint16")
    index = (tmp_path / "t.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0"
    assert struct.unpack_from("<QBQQ", index, 9) == (1, 8, 2, 3)
    assert struct.unpack_from("<2i2q3q", index, 34) == (3, 1, 0, 6, 0, 1, 2)
    assert len(index) == 34 + 8 + 16 + 24
    assert (tmp_path / "t.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 4)


def test_ids_are_never_wrapped(tmp_path):
    for ids in ([151643], [-1]):
        with pytest.raises(ValueError, match="do not fit"):
            write_token_file(tmp_path / "t", [np.array(ids)], dtype="uint16")
    with pytest.raises(ValueError, match="dtype"):
        write_token_file(tmp_path / "t", [], dtype="float32")


def test_what_fails_leaves_the_files_that_were_there(tmp_path):
    write_token_file(tmp_path / "t", [np.array([1, 2, 3])])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for documents in ([np.array([5]), np.array([300])], (1 / 0 for _ in range(1))):
        with pytest.raises((ValueError, ZeroDivisionError)):
            write_token_file(tmp_path / "t", documents)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_entropy():
    assert unigram_entropy(np.zeros(10, dtype=np.uint8)) == 0
    assert math.isclose(unigram_entropy(np.arange(256, dtype=np.uint8)), math.log(256))


def test_text_is_split_by_file_and_repeats(tmp_path):
    first = prepare_bytes(tmp_path / "a", "numpy", train_bytes=20000, valid_bytes=5000)
    second = prepare_bytes(tmp_path / "b", "numpy", train_bytes=20000, valid_bytes=5000)
    assert (first.train_tokens, first.valid_tokens) == (20000, 5000)
    for name in ("train.bin", "valid.bin", "train.idx", "valid.idx"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert first.unigram_entropy == second.unigram_entropy
    valid = (tmp_path / "a" / "valid.bin").read_bytes()
    assert valid[:400] not in (tmp_path / "a" / "train.bin").read_bytes()
    with pytest.raises(ValueError, match="no_such_package"):
        python_sources("no_such_package")


def prepare(*arguments):
    root = Path(__file__).resolve().parents[1]
    return subprocess.run(
        [sys.executable, "-m", "mtraining.prepare", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_mistakes_are_one_sentence_and_exit_2(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for arguments, words in (
        (["--out", file / "below", "--package", "numpy"], "file"),  # OSError: below a file
        (["--out", tmp_path, "--package", "no_such.package"], "no_such"),
        (["--out", tmp_path, "--package", "no_such"], "no_such"),
        (["--out", tmp_path, "--train-bytes", "0"], "--train-bytes: expected"),
        (["--out", tmp_path, "--valid-bytes", "-5"], "--valid-bytes: expected"),
        (["--out", tmp_path, "--train-bytes", "many"], "--train-bytes: expected"),
        ([], "--out"),
    ):
        result = prepare(*arguments)
        assert result.returncode == 2, result.stderr
        assert result.stderr.startswith("mtraining: error: ") and words in result.stderr
        assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr


def test_help_says_what_each_option_means_and_its_default():
    text = " ".join(prepare("--help").stdout.split())
    for words in ("(default: torch)", "(default: 8388608)", "(default: 16385)", "held out"):
        assert words in text, text


def test_pictures_follow_the_definition():
    n, dim = 256, 8
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(n, dim)), rng.normal(size=(n, dim))
    scores = q @ k.T * 0.3
    scores[np.triu_indices(n, 1)] = -np.inf
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    cells = 16
    expected = weights.reshape(cells, n // cells, cells, n // cells).sum(3).mean(1)
    np.testing.assert_allclose(attention_map(q, k, 0.3, cells), expected, atol=1e-12)

    index = {"seq_len": n, "block": 64, "diagonals": [0, 2], "columns": [5, 70]}
    full = np.zeros((n, n), dtype=bool)
    for i in range(n):
        for j in range(i + 1):
            full[i, j] = (i // 64 - j // 64) in (0, 2) or j in (5, 70)
    expected = full.reshape(cells, n // cells, cells, n // cells).mean((1, 3))
    np.testing.assert_allclose(mask_map(index, cells), expected)


@pytest.mark.parametrize("module", ["prepare", "generate", "benchmarks", "quickstart"])
def test_help_names_no_default_that_is_none(module):
    command = [sys.executable, "-m", f"mtraining.{module}", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--" in shown
    assert "None" not in shown and "default: False" not in shown and "==SUPPRESS==" not in shown
    if module == "prepare":
        assert "(default: torch)" in shown and "(default: 1)" in shown
