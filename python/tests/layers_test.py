"""Patterns by layer and packed documents through the executable: what is resolved repeats the run."""

import json

import numpy as np
from mtraining.prepare import write_token_file

LAYERS = """
[[attention.layers]]
range = 1
pattern = "dense"

[[attention.layers]]
range = "0-0"
p_slash = 0.25
max_columns = 7
"""


def test_ranges_of_layers_are_resolved_and_repeat_themselves(job, tmp_path):
    text = job.config.read_text() + LAYERS
    job.config.write_text(text)
    first = job.run("--dry-run")
    assert first.returncode == 0, first.stderr
    (line,) = [line for line in first.stdout.splitlines() if line.startswith("layers = ")]
    assert "range = '1-1', pattern = 'dense'" in line
    assert "range = '0-0', pattern = 'vertical_slash'" in line
    assert "p_slash = 0.25" in line and "max_columns = 7" in line
    again = job.run("--dry-run", "--attention.layers", line.removeprefix("layers = "))
    assert line in again.stdout.splitlines(), again.stderr
    job.config.write_text(text.replace("range = 1\n", 'range = "0-1"\n'))
    refused = job.run("--dry-run")
    assert refused.returncode == 2
    assert "attention.layers[1].range: layer 0 is in attention.layers[0] too" in refused.stderr
    assert f"{job.config.name}:" in refused.stderr


def test_a_run_on_documents_reports_what_it_trains_on(job, tmp_path):
    lengths = [40, 300, 7, 1, 500, 90]
    tokens = [np.arange(n) % 50 for n in lengths]
    write_token_file(tmp_path / "documents", tokens)
    run = job.run(
        "--data.document_mask", "true", "--data.train", str(tmp_path / "documents"), nproc=2
    )
    assert run.returncode == 0, run.stderr
    (row,) = json.loads((job.out / "summary.json").read_text())["data"]
    assert row["tokens"] == sum(lengths) == row["in_samples"] + row["dropped"]
    assert 0 < row["labels"] <= row["in_samples"]
    assert "document_mask = true" in (job.out / "config.toml").read_text()
