"""How a run is saved, stopped, killed and resumed by the command line."""

import json
import resource
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from python.tests.conftest import assert_one_sentence, metrics_of
from python.tests.launcher_test import assert_nobody_left, finish, start_long

STEPS = ["--train.steps", "6", "--checkpoint.every", "2", "--train.preflight", "false"]


def checkpoint(out: Path, step: int) -> Path:
    return out / "checkpoints" / f"step-{step:08d}"


def published(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir() if path.is_dir())


def assert_same_run(one: Path, other: Path) -> None:
    """The same numbers at every step and the same bytes at the end."""
    keys = ("train_step", "loss", "grad_norm", "lr", "tokens_total", "skipped", "valid_loss")
    a, b = metrics_of(one), metrics_of(other)
    assert [[row[key] for key in keys] for row in a] == [[row[key] for key in keys] for row in b]
    last = a[-1]["train_step"]
    names = ["model.safetensors", *state_files(checkpoint(one, last))]
    assert state_files(checkpoint(other, last)) == names[1:]
    for name in names:
        left, right = checkpoint(one, last) / name, checkpoint(other, last) / name
        assert left.read_bytes() == right.read_bytes(), name


def state_files(folder: Path) -> list[str]:
    files = (folder / "training_state").glob("*.safetensors")
    return sorted(f"training_state/{path.name}" for path in files)


def whole_run(job, nproc, *extra: str) -> Path:
    out = job.folder / "whole"
    result = job.run(*STEPS, "--out", str(out), *extra, nproc=nproc)
    assert result.returncode == 0, result.stderr
    return out


TWO_BY_TWO = ["--parallel.cp_inner_size", "2", "--parallel.dp_size", "1"]


@pytest.mark.parametrize(
    ("nproc", "extra"),
    [(None, []), (4, TWO_BY_TWO), (4, ["--parallel.dp_size", "2", "--parallel.zero", "2"])],
    ids=["1", "2x2", "dp2_zero2"],
)
@pytest.mark.parametrize("place", ["forward", "checkpoint"])
def test_a_killed_run_goes_on_from_its_last_checkpoint_bit_by_bit(job, nproc, extra, place):
    extra = [*extra, "--train.global_batch_size", "2"]
    whole = whole_run(job, nproc, *extra)
    rank = 0 if nproc is None else nproc - 1
    fault = f"rank={rank},step={4 if place == 'checkpoint' else 5},at={place},kind=kill"
    killed = job.run(*STEPS, *extra, nproc=nproc, env={"MTRAINING_FAULT": fault})
    assert killed.returncode != 0
    last = 2 if place == "checkpoint" else 4
    assert f"step-{last:08d}\n" == (job.out / "checkpoints" / "latest").read_text()
    again = job.run(*STEPS, *extra, nproc=nproc)
    assert again.returncode == 0, again.stderr
    assert f"goes on from {checkpoint(job.out, last)}" in again.stdout
    assert_same_run(whole, job.out)
    assert published(job.out) == ["step-00000004", "step-00000006"]  # keep = 2, nothing left over
    assert not any(path.name.startswith(".") for path in (job.out / "checkpoints").iterdir())


def test_a_stopped_run_continues_with_the_same_command(job):
    process = start_long(job)
    process.send_signal(signal.SIGTERM)
    out, err = finish(process, 30)
    assert process.returncode == 0, err
    step = metrics_of(job.out)[-1]["train_step"]
    assert out.splitlines()[-1] == f"stopped at train_step {step}; the same command continues"
    assert published(job.out)[-1] == f"step-{step:08d}"
    steps = ["--train.steps", str(step + 2)]
    result = job.run(*steps, nproc=2)
    assert result.returncode == 0, result.stderr
    assert [row["train_step"] for row in metrics_of(job.out)] == list(range(1, step + 3))
    assert f"train.steps = {step + 2} from here on, 100000 before" in result.stdout
    result = job.run(*steps, nproc=2)
    assert result.returncode == 0, result.stderr
    assert "nothing is left to train" in result.stdout
    assert_nobody_left(job.folder)


def test_a_stop_within_a_long_step_drops_it_at_a_layer(job):
    """The signal comes at the beginning of the second step, which is one micro-step of a second or more."""
    extra = ["--train.steps", "50", "--model.num_hidden_layers", "16", "--train.seq_len", "4096"]
    extra += ["--train.preflight", "false"]
    fault = "rank=1,step=2,at=forward,kind=stop"
    result = job.run(*extra, nproc=2, env={"MTRAINING_FAULT": fault})
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "stopped at train_step 1; the same command continues"
    assert len(metrics_of(job.out)) == 1
    assert published(job.out) == ["step-00000001"]


def test_a_stopped_accumulation_is_kept_and_continued(job):
    extra = [*STEPS, "--train.global_batch_size", "6", "--checkpoint.save_accumulation", "true"]
    whole = job.folder / "whole"
    assert job.run(*extra, "--out", str(whole)).returncode == 0
    fault = {"MTRAINING_FAULT": "rank=0,step=4,at=accumulation,kind=stop"}
    stopped = job.run(*extra, env=fault)
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.splitlines()[-1] == "stopped at train_step 3; the same command continues"
    state = checkpoint(job.out, 3) / "training_state" / "rank-00000-of-00001.json"
    progress = json.loads(state.read_text())["progress"]
    assert progress["micro_step"] == 1
    assert progress["sample_position"] == 18 + 1
    again = job.run(*extra)
    assert again.returncode == 0, again.stderr
    assert_same_run(whole, job.out)


def test_micro_steps_of_the_first_step_are_kept_too(job):
    extra = ["--train.steps", "2", "--train.global_batch_size", "4"]
    extra += ["--train.preflight", "false", "--checkpoint.save_accumulation", "true"]
    fault = {"MTRAINING_FAULT": "rank=0,step=1,at=accumulation,kind=stop"}
    stopped = job.run(*extra, env=fault)
    assert stopped.returncode == 0, stopped.stderr
    last = stopped.stdout.splitlines()[-1]
    assert last == "stopped before the end of the first step; the same command continues"
    again = job.run(*extra)
    assert again.returncode == 0, again.stderr
    assert f"goes on from {checkpoint(job.out, 0)}" in again.stdout
    assert [row["train_step"] for row in metrics_of(job.out)] == [1, 2]


def test_minutes_save_the_middle_of_a_step_from_a_kill(job):
    extra = ["--train.steps", "3", "--train.global_batch_size", "6", "--train.preflight", "false"]
    extra += ["--checkpoint.save_accumulation", "true", "--checkpoint.save_every_minutes", "1e-6"]
    whole = job.folder / "whole"
    assert job.run(*extra, "--out", str(whole)).returncode == 0
    fault = {"MTRAINING_FAULT": "rank=0,step=3,at=accumulation,kind=kill,skip=2"}
    assert job.run(*extra, env=fault).returncode == -signal.SIGKILL
    state = checkpoint(job.out, 2) / "training_state" / "rank-00000-of-00001.json"
    assert json.loads(state.read_text())["progress"]["micro_step"] == 2
    again = job.run(*extra)
    assert again.returncode == 0, again.stderr
    assert_same_run(whole, job.out)


def test_another_split_takes_each_remaining_sample_once(job):
    extra = [*STEPS, "--attention.pattern", "dense", "--train.global_batch_size", "4"]
    whole = whole_run(job, None, *extra[2:])
    fault = {"MTRAINING_FAULT": "rank=3,step=5,at=forward,kind=kill"}
    assert job.run(*extra, "--parallel.dp_size", "4", nproc=4, env=fault).returncode == 1
    again = job.run(*extra, "--parallel.dp_size", "2", "--parallel.zero", "2", nproc=2)
    assert again.returncode == 0, again.stderr
    for a, b in zip(metrics_of(whole), metrics_of(job.out), strict=True):
        assert a["train_step"] == b["train_step"] and a["tokens_total"] == b["tokens_total"]
        assert abs(a["loss"] / b["loss"] - 1) < 1e-5


def test_a_run_killed_before_its_first_checkpoint_begins_anew(job):
    fault = {"MTRAINING_FAULT": "rank=0,step=2,at=forward,kind=kill"}
    assert job.run(env=fault).returncode != 0
    assert len(metrics_of(job.out)) == 1
    result = job.run()
    assert result.returncode == 0, result.stderr
    assert "begins anew" in result.stdout
    assert [row["train_step"] for row in metrics_of(job.out)] == [1, 2, 3]


@pytest.fixture
def stopped(job):
    """A run that has done 4 of 6 steps."""
    fault = {"MTRAINING_FAULT": "rank=0,step=5,at=forward,kind=kill"}
    assert job.run(*STEPS, env=fault).returncode != 0
    return job


OTHER_RUNS = [
    ("model.num_key_value_heads", "1", "with 2, got 1"),
    ("model.rope_theta", "5e5", "with 10000.0, got 5e+05"),
    ("data.shuffle_seed", "9", "with 0, got 9"),
    ("train.seq_len", "128", "with 256, got 128"),
    ("train.global_batch_size", "2", "with 1, got 2"),
    ("train.seed", "9", "with 0, got 9"),
    ("optim.lr", "5e-3", "with 0.001, got 0.005"),
    ("attention.pattern", "dense", "with 'vertical_slash', got 'dense'"),
    ("attention.p_slash", "0.5", "with 0.9, got 0.5"),
]


def test_another_configuration_is_refused_by_its_key(stopped):
    before = (stopped.out / "metrics.jsonl").read_text()
    for key, value, shown in OTHER_RUNS:
        result = stopped.run(*STEPS, f"--{key}", value)
        assert_one_sentence(result, f"{key}: ", shown, "--out")
    assert (stopped.out / "metrics.jsonl").read_text() == before


def test_what_splits_measures_and_saves_may_change(stopped):
    extra = ["--checkpoint.keep", "5", "--eval.batches", "2", "--trace.chrome", "false"]
    extra += ["--train.mlp_tile", "64", "--train.peak_flops_per_s", "1e12"]
    extra += ["--train.recompute", "layer", "--train.loss_chunk", "100"]
    result = stopped.run(*STEPS, *extra, "--attention.layout", "zigzag", nproc=2)
    assert result.returncode == 0, result.stderr


def test_a_named_checkpoint_is_taken_and_may_get_another_learning_rate(stopped):
    other = stopped.folder / "other"
    extra = ["--resume", str(checkpoint(stopped.out, 2)), "--optim.lr", "5e-3"]
    result = stopped.run(*STEPS, *extra, "--out", str(other))
    assert result.returncode == 0, result.stderr
    assert "optim.lr = 0.005 from here on, 0.001 before" in result.stdout
    assert [(row["train_step"], row["lr"]) for row in metrics_of(other)] == [
        (step, 5e-3) for step in (3, 4, 5, 6)
    ]
    refused = stopped.run(*STEPS, "--resume", str(stopped.out), "--out", str(other))
    assert_one_sentence(refused, str(other), "holds another run")
    refused = stopped.run(*STEPS, "--resume", str(stopped.out), "--model.head_dim", "8")
    assert_one_sentence(refused, "model.head_dim", "with 16, got 8")
    back = stopped.run(*STEPS, "--resume", str(checkpoint(stopped.out, 2)))
    assert back.returncode == 0, back.stderr
    assert [row["train_step"] for row in metrics_of(stopped.out)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("nproc", [None, 2])
def test_bad_folders_are_one_sentence(stopped, nproc):
    foreign = stopped.folder / "foreign"
    foreign.mkdir()

    def refused(path: Path, *parts: str) -> None:
        out = ["--out", str(stopped.folder / "fresh")]
        assert_one_sentence(
            stopped.run(*STEPS, "--resume", str(path), *out, nproc=nproc), "--resume", *parts
        )
        assert not (stopped.folder / "fresh").exists()

    refused(stopped.folder / "absent", "absent", "none of that name")
    refused(foreign, "foreign", "complete.json")
    (foreign / "config.json").write_text("{}")
    refused(foreign, "no training state", "model.init_from")
    cut = stopped.folder / "cut"
    shutil.copytree(checkpoint(stopped.out, 4), cut)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-1])
    refused(cut, "is not complete", "model.safetensors")
    assert_one_sentence(stopped.run(*STEPS, "--resume", "never"), "holds a run already")
    # The last checkpoint is damaged: the one before it counts. All are: nothing is overwritten.
    for step in (4, 2):
        (checkpoint(stopped.out, step) / "config.json").unlink()
        if step == 4:
            stopped.run(*STEPS, "--train.steps", "2")
    assert_one_sentence(
        stopped.run(*STEPS, nproc=nproc), "without a whole checkpoint", "config.json"
    )


def test_the_checkpoint_before_a_damaged_one_counts(stopped):
    (checkpoint(stopped.out, 4) / "training_state" / "rank-00000-of-00001.json").unlink()
    result = stopped.run(*STEPS)
    assert result.returncode == 0, result.stderr
    assert f"goes on from {checkpoint(stopped.out, 2)}" in result.stdout
    assert [row["train_step"] for row in metrics_of(stopped.out)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("nproc", [None, 2])
def test_a_full_disk_leaves_the_checkpoint_before_whole(job, nproc):
    big = ["--model.vocab_size", "4096", *STEPS]  # 128 KiB of embedding a tensor and rank at least
    first = job.run(*big, "--train.steps", "2", nproc=nproc)
    assert first.returncode == 0, first.stderr

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then writing fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    command = job.command(*big, nproc=nproc)
    full = subprocess.run(
        command, env=job.environment(), capture_output=True, text=True, preexec_fn=limit, timeout=60
    )
    assert full.returncode == 1, full.stdout
    assert full.stderr.count("\n") == 1, full.stderr
    assert "checkpoint of train_step 4: " in full.stderr
    assert published(job.out) == ["step-00000002"]
    again = job.run(*big, nproc=nproc)
    assert again.returncode == 0, again.stderr
    assert f"goes on from {checkpoint(job.out, 2)}" in again.stdout
    assert [row["train_step"] for row in metrics_of(job.out)] == [1, 2, 3, 4, 5, 6]


def test_minutes_between_checkpoints(job):
    extra = [*STEPS, "--checkpoint.every", "0", "--checkpoint.save_every_minutes", "1e-6"]
    result = job.run(*extra, "--checkpoint.keep", "0", nproc=2)
    assert result.returncode == 0, result.stderr
    assert published(job.out) == [f"step-{step:08d}" for step in range(1, 7)]
