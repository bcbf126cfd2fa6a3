"""Pattern files of a density: what they hold, counted by hand; the same again; what cannot be had."""

import json

import numpy as np
import pytest

from mtraining import pattern_files


def mask_of(head: dict, seq_len: int) -> np.ndarray:
    """[S, S] pairs as the kernels compute them: whole 64 x 64 blocks on diagonals, columns elsewhere below the diagonal."""
    offsets = np.arange(seq_len)[:, None] - np.arange(seq_len)[None, :]
    on = np.zeros((seq_len, seq_len), bool)
    for low, high in head["offset_ranges"]:
        on |= (offsets >= low) & (offsets < high)
    blocks = seq_len // 64
    tiles = on.reshape(blocks, 64, blocks, 64).any(axis=(1, 3))
    whole = np.zeros_like(tiles)
    for d in range(blocks):
        if tiles.diagonal(-d).any():
            whole |= np.eye(blocks, k=-d, dtype=bool)
    mask = np.kron(whole, np.ones((64, 64), bool))
    # A column meets its own block and all later ones, whole blocks at a time.
    rows = np.arange(seq_len)[:, None] // 64
    for column in head["columns"]:
        mask[:, column] |= (rows >= column // 64)[:, 0]
    return mask


@pytest.mark.parametrize("wanted", [0.85, 0.95])
def test_heads_have_the_density_asked_for(wanted):
    seq_len = 4096
    pattern = pattern_files.make_pattern(seq_len, 3, wanted)
    assert pattern["seq_len"] == seq_len and len(pattern["heads"]) == 3
    for head in pattern["heads"]:
        counted = mask_of(head, seq_len).sum() / (seq_len**2 / 2)
        assert pattern_files.density(head, seq_len) == pytest.approx(counted, abs=1e-12)
        assert wanted - 0.04 < counted <= wanted
        assert all(0 <= low < high <= seq_len for low, high in head["offset_ranges"])
        assert head["columns"] == sorted(set(head["columns"])) and head["columns"][-1] < seq_len
    assert pattern["heads"][0] != pattern["heads"][1]


def test_long_patterns_come_within_a_diagonal_and_are_the_same_again(capsys):
    arguments = ["--seq-len", "131072", "--heads", "2", "--density", ".08", "--seed", "3"]
    assert pattern_files.main(arguments) == 0
    first = capsys.readouterr().out
    assert pattern_files.main(arguments) == 0
    assert capsys.readouterr().out == first
    for head in json.loads(first)["heads"]:
        assert 0.078 < pattern_files.density(head, 131072) <= 0.08


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"--density": ".001"}, "density: expected"),
        ({"--density": "1.5"}, "to 1, got 1.5"),
        ({"--seq-len": "1000"}, "a multiple of 64"),
        ({"--heads": "0"}, "heads: expected at least 1"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(changes, says, capsys):
    options = {"--seq-len": "8192", "--heads": "1", "--density": ".5", **changes}
    assert pattern_files.main([word for pair in options.items() for word in pair]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mtraining: error: ") and says in error and error.count("\n") == 1
