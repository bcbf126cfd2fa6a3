"""A run's folder belongs to one launch, and a launch that does not begin leaves nothing behind."""

import fcntl
import os
import signal
import subprocess
from pathlib import Path

import pytest

from python.tests.conftest import assert_one_sentence, metrics_of
from python.tests.resume_test import STEPS

HELD = {
    "MTRAINING_FAULT": "rank=0,step=0,at=start,kind=hang"
}  # its folder is locked, nothing is built


def names_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="module")
def done(binary, tmp_path_factory):
    """A finished run of six steps."""
    from python.tests.conftest import Job

    job = Job(binary, tmp_path_factory.mktemp("done"))
    result = job.run(*STEPS)
    assert result.returncode == 0, result.stderr
    return job


REFUSED = [
    (["--resume", "{run}", "--model.head_dim", "8"], "model.head_dim"),
    (["--resume", "{run}", "--data.shuffle_seed", "5"], "data.shuffle_seed"),
    (["--resume", "{run}/absent"], "none of that name"),
    (["--model.init_from", "{run}/checkpoints/step-00000006", "--model.head_dim", "8"], "head_dim"),
    (["--data.train", "absent"], "cannot be opened"),
]


@pytest.mark.parametrize(("extra", "says"), REFUSED, ids=[says for _, says in REFUSED])
@pytest.mark.parametrize(("nproc", "there"), [(None, False), (2, True)], ids=["new", "2_empty"])
def test_a_refused_launch_leaves_nothing_behind(done, tmp_path, extra, says, nproc, there):
    out = tmp_path / "a" / "b" / "new"
    if there:
        out.mkdir(parents=True)
    before = names_below(tmp_path)
    extra = [text.format(run=done.out) for text in extra]
    refused = done.run(*STEPS, *extra, "--out", str(out), nproc=nproc)
    assert_one_sentence(refused, says)
    assert names_below(tmp_path) == before


def test_a_finished_run_that_is_named_makes_no_folder(done, tmp_path):
    out = tmp_path / "new"
    result = done.run(*STEPS, "--resume", str(done.out), "--out", str(out))
    assert result.returncode == 0 and "nothing is left to train" in result.stdout, result.stderr
    assert names_below(tmp_path) == []


def test_a_folder_that_holds_a_run_is_refused_untouched(done):
    before = names_below(done.out)
    (done.out / ".lock").unlink()
    refused = done.run(*STEPS, "--resume", "never")
    assert_one_sentence(refused, str(done.out), "holds a run already")
    assert names_below(done.out) == [name for name in before if name != ".lock"]


@pytest.mark.parametrize("nproc", [None, 2])
def test_a_stop_before_the_run_begins_leaves_nothing_behind(job, nproc):
    fault = {"MTRAINING_FAULT": "rank=0,step=0,at=start,kind=stop"}
    stopped = job.run(*STEPS, nproc=nproc, env=fault)
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout.splitlines()[-1].startswith("stopped before the first step")
    assert not job.out.exists()


def test_what_a_folder_holds_is_decided_under_its_lock(done):
    """Whatever another launch is doing there: its folder is in use, not finished and not of another configuration."""
    with (done.out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for extra in ([], ["--optim.lr", "1"], ["--resume", "never"]):
            refused = done.run(*STEPS, *extra)
            assert_one_sentence(refused, str(done.out), "in use by another run")
    assert "nothing is left to train" in done.run(*STEPS).stdout


def test_of_launches_at_once_one_trains_and_the_others_say_why_not(job):
    command = job.command(*STEPS)
    started = [
        subprocess.Popen(
            command,
            env=job.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    ended = [(process.communicate(timeout=60), process.returncode) for process in started]
    trained = [out for (out, _), code in ended if code == 0 and "nothing is left" not in out]
    assert len(trained) == 1, ended
    for (_, err), code in ended:
        assert code == 0 or (code == 2 and "in use by another run" in err), err
    assert [row["train_step"] for row in metrics_of(job.out)] == [1, 2, 3, 4, 5, 6]


def test_a_lock_file_that_was_taken_away_is_no_claim(job):
    """A launch that waited for a file which a refused launch has removed since must not hold a lock that nobody can see."""
    held = subprocess.Popen(
        job.command(*STEPS),
        env={**job.environment(), **HELD},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        lock = job.out / ".lock"
        while not lock.exists():
            assert held.poll() is None
        refused = job.run(*STEPS)
        assert_one_sentence(refused, "in use by another run")
        assert lock.exists()  # the refused launch did not take away the other's
        held.send_signal(signal.SIGTERM)
        assert held.wait(20) == 0
        assert not os.path.lexists(job.out)
    finally:
        held.kill()
    assert job.run(*STEPS).returncode == 0
