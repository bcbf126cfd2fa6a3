"""How a job ends: one rank fails, or somebody asks it to stop."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest


def ranks_of(folder: Path) -> list[int]:
    """Processes that run a job of this folder, the launcher too."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in line and b"mtraining" in line.split(b"\0")[0]:
            found.append(int(entry.name))
    return found


def finish(process: subprocess.Popen, timeout: float) -> tuple[str, str]:
    """What it printed; one that does not end leaves nothing behind but the failure."""
    try:
        return process.communicate(timeout=timeout)
    finally:
        process.kill()


def assert_nobody_left(folder: Path) -> None:
    end = time.monotonic() + 5
    while ranks_of(folder) and time.monotonic() < end:
        time.sleep(0.05)
    assert ranks_of(folder) == []


@pytest.mark.parametrize("place", ["loader", "forward", "backward"])
@pytest.mark.parametrize("kind", ["throw", "kill", "exit"])
def test_a_rank_that_fails_ends_the_job_with_the_first_cause(job, place, kind):
    start = time.monotonic()
    fault = f"rank=2,step=2,at={place},kind={kind}"
    extra = ["--train.steps", "500", "--parallel.cp_inner_size", "2"]
    result = job.run(*extra, nproc=4, env={"MTRAINING_FAULT": fault}, timeout=30)
    assert time.monotonic() - start < 30
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr
    expected = {
        "throw": f"rank 2: fault injected in {place} of train_step 2",
        "kill": "rank 2: killed by signal 9",
        "exit": "rank 2",
    }[kind]
    assert lines[0].startswith("mtraining: error: ")
    assert expected in lines[0]
    assert_nobody_left(job.folder)


def test_ranks_without_a_launcher_of_ours_end_with_the_first_cause(job):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(port)}
    start = time.monotonic()
    ranks = []
    # One configuration for all; the file that it names is missing where rank 1 runs.
    elsewhere = job.folder / "elsewhere"
    elsewhere.mkdir()
    for rank, folder in ((0, job.folder), (1, elsewhere)):
        ranks.append(
            subprocess.Popen(
                job.command("--data.train", job.data.name),
                cwd=folder,
                env={**job.environment(), **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        errors = [process.communicate(timeout=30)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert time.monotonic() - start < 30
    assert [process.returncode for process in ranks] == [1, 2]
    # Rank 0 waits for rank 1 to open a communicator, and is told why it does not.
    for error in errors:
        assert error.count("\n") == 1
        assert "tokens.idx: cannot be opened" in error


def start_long(job, *flags: str) -> subprocess.Popen:
    process = subprocess.Popen(
        job.command("--train.steps", "100000", *flags, nproc=2),
        cwd=job.folder,
        env=job.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if "train_step 1/" in line:
            return process
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_stop_signal_ends_all_ranks_after_the_step(job, number):
    process = start_long(job)
    process.send_signal(number)
    out, err = finish(process, 30)
    assert process.returncode == 0, err
    assert err == ""
    assert out.splitlines()[-1].startswith("stopped at train_step ")
    assert (job.out / "summary.json").exists()
    assert_nobody_left(job.folder)


def test_a_stop_signal_within_a_step_adds_no_step(job):
    fault = "rank=1,step=3,at=forward,kind=stop"
    result = job.run("--train.steps", "500", nproc=2, env={"MTRAINING_FAULT": fault}, timeout=30)
    assert result.returncode == 0, result.stderr
    # At a layer of the step, or at its end where steps are too short for that.
    assert result.stdout.splitlines()[-1].startswith(
        ("stopped at train_step 2; the same", "stopped at train_step 3; the same")
    )
    assert_nobody_left(job.folder)


def test_a_killed_launcher_leaves_no_ranks(job):
    process = start_long(job)
    assert len(ranks_of(job.folder)) == 3
    process.kill()
    process.communicate(timeout=10)
    assert_nobody_left(job.folder)


def test_a_rank_killed_from_outside_is_named(job):
    process = start_long(job)
    rank = next(pid for pid in ranks_of(job.folder) if pid != process.pid)
    os.kill(rank, signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert err.count("\n") == 1
    assert "killed by signal 9" in err
    assert_nobody_left(job.folder)


def test_a_rank_that_hangs_ends_the_job_within_its_timeout(job):
    process = start_long(job, "--parallel.timeout_s", "1.5")
    rank = next(pid for pid in ranks_of(job.folder) if pid != process.pid)
    start = time.monotonic()
    os.kill(rank, signal.SIGSTOP)
    _, err = process.communicate(timeout=30)
    assert 1 < time.monotonic() - start < 15
    assert process.returncode == 1
    assert "communicator '" in err
    assert "1500" in err
    assert_nobody_left(job.folder)


@pytest.mark.parametrize("nproc", [None, 2])
@pytest.mark.parametrize("delay", [0.15, 0.4])
def test_a_stop_signal_in_the_first_second_is_heeded(job, nproc, delay):
    process = subprocess.Popen(
        job.command("--train.steps", "100000", nproc=nproc),
        env=job.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(delay)
    process.send_signal(signal.SIGTERM)
    out, err = finish(process, 15)
    assert process.returncode == 0, (out, err)
    assert err == ""
    assert out.splitlines()[-1].startswith("stopped ")
    assert_nobody_left(job.folder)


@pytest.mark.parametrize("which", [0, 3])
def test_a_signal_to_one_rank_before_the_first_step_ends_all(job, which):
    process = subprocess.Popen(
        job.command("--train.steps", "100000", nproc=4),
        env=job.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    chosen = []
    while len(ranks := ranks_of(job.folder)) < 5 or not chosen:
        assert process.poll() is None
        name = b"RANK=%d" % which  # set between fork and exec
        chosen = [
            pid for pid in ranks if name in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ]
    os.kill(chosen[0], signal.SIGTERM)
    out, err = finish(process, 20)
    assert process.returncode == 0, (out, err)
    assert err == ""
    assert out == "stopped before the first step; the same command starts again\n"
    assert_nobody_left(job.folder)


def start_alone(job, *extra: str) -> subprocess.Popen:
    """Rank 0 of two, whose peer never comes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        job.command(*extra),
        env={**job.environment(), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_rank_that_waits_for_its_peers_heeds_a_stop_signal(job, number):
    process = start_alone(job)
    time.sleep(2)
    process.send_signal(number)
    out, err = finish(process, 5)
    assert process.returncode == 0, err
    assert out == "stopped before the first step; the same command starts again\n"


@pytest.mark.parametrize("insist", [False, True])
def test_a_step_that_does_not_end_is_dropped_after_the_grace(job, insist):
    extra = ["--train.steps", "500", "--train.stop_grace_s", "60" if insist else "2"]
    process = subprocess.Popen(
        job.command(*extra),
        env={**job.environment(), "MTRAINING_FAULT": "rank=0,step=3,at=forward,kind=hang"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 30
    metrics = job.out / "metrics.jsonl"
    while time.monotonic() < end:
        if metrics.exists() and metrics.read_text().count("\n") == 2:
            break
        time.sleep(0.05)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    if insist:
        time.sleep(1.2)
        process.send_signal(signal.SIGTERM)
    out, err = finish(process, 15)
    assert 1 < time.monotonic() - start < 8
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == (
        "stopped at train_step 2; no checkpoint was kept: the same command begins anew"
    )


def test_a_stop_signal_is_heeded_between_micro_steps(job):
    fault = "rank=1,step=3,at=forward,kind=stop"
    extra = ["--train.steps", "500", "--train.global_batch_size", "4"]
    result = job.run(*extra, nproc=2, env={"MTRAINING_FAULT": fault}, timeout=30)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("stopped at train_step 2;")
    assert (job.out / "metrics.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize("nproc", [None, 2])
def test_training_that_diverges_fails_with_its_step(job, nproc):
    # Steps so large that attention sees values beyond every bound.
    extra = ["--train.steps", "60", "--optim.lr", "1e30", "--optim.clip_norm", "0"]
    result = job.run(*extra, nproc=nproc, timeout=60)
    assert result.returncode == 1, result.stdout
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("mtraining: error: train_step ")
    assert "training has diverged" in result.stderr


@pytest.mark.parametrize("steps", ["3", "60"])
def test_steps_that_are_all_skipped_are_a_failure(job, steps):
    fault = "rank=0,step=0,at=gradient,kind=nan"
    result = job.run("--train.steps", steps, nproc=2, env={"MTRAINING_FAULT": fault})
    assert result.returncode == 1, result.stdout
    count = min(int(steps), 10)
    assert f"train_step {count}: training has diverged: {count} steps in a row" in result.stderr
    assert (job.out / "metrics.jsonl").read_text().count("\n") == count
