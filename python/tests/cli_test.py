"""What the executable prints and writes; wrong input is in bad_input_test.py."""

import json
import os
import socket
import subprocess

import pytest

from python.tests.conftest import assert_one_sentence, metrics_of, run_text


def test_results_that_are_there_are_kept(job):
    job.out.mkdir()
    kept = {"config.toml": "mine\n", "metrics.jsonl": '{"train_step": 1}\n', "summary.json": "{}"}
    for name, text in kept.items():
        (job.out / name).write_text(text)
    for nproc in (None, 2):
        assert_one_sentence(job.run(nproc=nproc), str(job.out), "metrics.jsonl")
        assert_one_sentence(job.run("--data.train=absent", nproc=nproc), "absent.idx")
    assert {name: (job.out / name).read_text() for name in kept} == kept


@pytest.mark.parametrize("nproc", [None, 2])
def test_a_run_goes_on_when_nobody_reads_its_progress(job, nproc):
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen(job.command(nproc=nproc), stdout=write, env=job.environment())
    os.close(write)
    assert process.wait(60) == 0
    assert len((job.out / "metrics.jsonl").read_text().splitlines()) == 3


def test_numbers_of_the_resolved_configuration_are_short_and_exact(job):
    text = job.run("--optim.lr", "3e-4", "--data.train", f"{job.data}", "--dry-run").stdout
    for line in (
        "p_vertical = 0.9\n",
        "lr = 3e-04\n",
        "betas = [ 0.9, 0.95 ]\n",
        "clip_norm = 1.0\n",
    ):
        assert line in text, text


def test_hierarchical_ring_needs_the_ranks_of_a_node(job):
    env = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29599"}
    assert_one_sentence(job.run(env=env), "parallel.cp_inner_size", "LOCAL_WORLD_SIZE")
    # It is known there: then it is not an error.
    assert job.run("--dry-run", env={**env, "LOCAL_WORLD_SIZE": "2"}).returncode == 0
    for inner in ("1", "4"):
        assert job.run("--dry-run", "--parallel.cp_inner_size", inner, env=env).returncode == 0
    assert job.run("--dry-run", "--attention.ring", "flat", env=env).returncode == 0


def test_launcher_and_nproc_exclude_each_other(job):
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    assert_one_sentence(job.run(nproc=2, env=env), "--nproc", "torchrun")
    assert_one_sentence(job.run(env=env), "MASTER_ADDR")
    assert_one_sentence(job.run(env={**env, "RANK": "x"}), "RANK")


def test_help_has_examples(binary, environment):
    for arguments in (["--help"], ["train", "--help"]):
        result = run_text([binary, *arguments], env=environment)
        assert result.returncode == 0
        assert "examples:" in result.stdout


def test_results_that_cannot_be_printed_are_a_failure(binary, environment):
    simulate = ["simulate", "--topology", "4x8", "--t-comp-ms", ".51", "--t-intra-ms", ".13"]
    simulate += ["--t-inter-ms", ".98", "--t-index-ms", "1.13", "--t-cpu-ms", "2.08"]
    for words in (["eval", "--help"], simulate, ["doctor"]):
        with open("/dev/full", "w") as full:
            result = subprocess.run(
                [str(binary), *words],
                env=environment,
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        result.stdout = ""
        assert_one_sentence(result, "standard output cannot be written", code=1)


def test_a_run_writes_its_folder_and_a_resolved_configuration_that_repeats_it(job):
    result = job.run("--parallel.cp_inner_size", "2", nproc=4)
    assert result.returncode == 0, result.stderr
    assert "\r" not in result.stdout  # plain lines where there is no terminal
    assert "first batch: loss dense" in result.stdout
    names = {path.name for path in job.out.iterdir()}
    assert {"config.toml", "metrics.jsonl", "trace.json", "summary.json"} <= names
    first = metrics_of(job.out)
    assert [row["train_step"] for row in first] == [1, 2, 3]
    trace = json.loads((job.out / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1, 2, 3}

    again = job.folder / "again"
    job.config = job.out / "config.toml"
    repeated = job.run("--out", str(again), nproc=4)
    assert repeated.returncode == 0, repeated.stderr
    second = metrics_of(again)
    assert [row["loss"] for row in first] == [row["loss"] for row in second]


def test_override_forms_agree(job):
    forms = [
        ["--set", "train.steps=2"],
        ["--set=train.steps=2"],
        ["--train.steps", "2"],
        ["--train.steps=2"],
    ]
    outputs = {job.run(*form, "--dry-run").stdout for form in forms}
    assert len(outputs) == 1
    assert "steps = 2" in outputs.pop()
    assert not job.out.exists()


def test_torchrun_environment_is_understood(job):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            job.command(),
            cwd=job.folder,
            env={
                **job.environment(),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert "train_step 3/3" in outputs[0][0]
    assert outputs[1][0] == ""  # only rank 0 prints


def test_two_launches_at_once_do_not_meet(job):
    other = job.folder / "other"
    first = subprocess.Popen(job.command(nproc=2), env=job.environment(), stdout=subprocess.DEVNULL)
    second = subprocess.Popen(
        [*job.command(nproc=2), "--out", str(other)],
        env=job.environment(),
        stdout=subprocess.DEVNULL,
    )
    assert [first.wait(60), second.wait(60)] == [0, 0]
