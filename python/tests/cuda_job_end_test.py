"""How a job over GPUs ends: a rank that dies, or no longer comes to a transfer while another one's GPU waits for it.

Marked multi_gpu: left out where there are fewer than two GPUs.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from python.tests.conftest import clean_environment
from python.tests.cuda_train_test import CUDA, Runs

pytestmark = pytest.mark.multi_gpu


@pytest.fixture(scope="module")
def runs(binary: Path, tmp_path_factory) -> Runs:
    return Runs(binary, tmp_path_factory.mktemp("cuda_job_end"))


def ranks_of(launcher: int) -> list[int]:
    """Its child processes, by rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return sorted(int(child) for child in children)


def end_of(runs: Runs, name: str, sent: int, *flags: str) -> tuple[str, float]:
    """What the job says after rank 1 was sent a signal in the middle of its steps, and how long it took."""
    out = runs.folder / name
    endless = ("--nproc", "2", *CUDA, "--train.steps", "100000", *flags)
    process = subprocess.Popen(
        runs.command(out, *endless),
        cwd=runs.folder,
        env=clean_environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        metrics = out / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks = ranks_of(process.pid)
        assert len(ranks) == 2
        begin = time.monotonic()
        os.kill(ranks[1], sent)
        _, error = process.communicate(timeout=60)
        assert process.returncode == 1, error
        return error, time.monotonic() - begin
    finally:
        process.kill()


@pytest.mark.parametrize("transfers", ["collectives", "peer_copies"])
def test_a_rank_that_is_killed_ends_the_job_within_seconds(runs, transfers):
    error, seconds = end_of(
        runs, f"killed_{transfers}", signal.SIGKILL, "--attention.transfers", transfers
    )
    assert "rank 1: killed by signal 9" in error.splitlines()[-1], error
    assert seconds < 15


@pytest.mark.parametrize("transfers", ["collectives", "peer_copies"])
def test_a_rank_that_hangs_ends_the_job_within_its_timeout_with_the_cause(runs, transfers):
    error, seconds = end_of(
        runs,
        f"hung_{transfers}",
        signal.SIGSTOP,
        "--parallel.timeout_s",
        "20",  # also of the ranks' meeting, which takes seconds where a GPU is busy
        "--attention.transfers",
        transfers,
    )
    last = error.splitlines()[-1]
    assert last.startswith("mtraining: error: "), error
    assert "communicator '" in last and "rank 0" in last, error
    assert "timeout" in last.lower() or "timed out" in last.lower(), error
    assert 15 < seconds < 50
