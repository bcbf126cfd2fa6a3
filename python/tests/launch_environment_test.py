"""Ranks started by torchrun, mpirun, srun or by hand: the same run as --nproc, and one fate before the first step."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from python.tests.conftest import ROOT, Job, free_port, metrics_of

STEPS = 3


def by_hand(rank: int, size: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return {k: str(v) for k, v in numbers.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def srun(rank: int, tasks: list[int], job_id: int, hosts: str) -> dict[str, str]:
    """What srun sets for one task; `tasks` are those of each node."""
    node = next(n for n in range(len(tasks)) if rank < sum(tasks[: n + 1]))
    per_node = ",".join(str(count) for count in tasks)
    if len(tasks) > 1 and len(set(tasks)) == 1:
        per_node = f"{tasks[0]}(x{len(tasks)})"
    numbers = {
        "SLURM_JOB_ID": job_id,
        "SLURM_JOBID": job_id,
        "SLURM_STEP_ID": 0,
        "SLURM_STEPID": 0,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank - sum(tasks[:node]),
        "SLURM_NODEID": node,
        "SLURM_NTASKS": sum(tasks),
        "SLURM_NPROCS": sum(tasks),
        "SLURM_NNODES": len(tasks),
        "SLURM_STEP_NUM_TASKS": sum(tasks),
        "SLURM_STEP_NUM_NODES": len(tasks),
    }
    texts = {
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_TASKS_PER_NODE": per_node,
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
    }
    return {name: str(value) for name, value in numbers.items()} | texts


def start(job, environment: dict[str, str], *extra: str, cwd=None) -> subprocess.Popen:
    return subprocess.Popen(
        job.command(*extra),
        cwd=cwd or job.folder,
        env={**job.environment(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def ended(processes: list[subprocess.Popen]):
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def finish(processes: list[subprocess.Popen], timeout: float) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each, within `timeout` for all."""
    end = time.monotonic() + timeout
    with ended(processes):
        results = [p.communicate(timeout=max(0.1, end - time.monotonic())) for p in processes]
    return [(p.returncode, *result) for p, result in zip(processes, results, strict=True)]


def run_srun(job, tasks: list[int], job_id: int, hosts: str, *extra: str):
    ranks = range(sum(tasks))
    return finish([start(job, srun(r, tasks, job_id, hosts), *extra) for r in ranks], 60)


def losses(job) -> list[float]:
    rows = metrics_of(job.out)
    assert [row["train_step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def expected(binary, tmp_path_factory) -> list[float]:
    job = Job(binary, tmp_path_factory.mktemp("nproc"))
    result = job.run(nproc=2)
    assert result.returncode == 0, result.stderr
    return losses(job)


def launch(job, command: list[str]) -> None:
    environment = job.environment() | {
        "PYTHONPATH": str(ROOT / "python"),
        "MTRAINING_BINARY": str(job.binary),
    }
    result = subprocess.run(
        command, cwd=job.folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("train_step 3/3") == 1  # only rank 0 prints


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.mark.parametrize("form", [["--no-python"], ["--standalone", "--no-python"], ["-m"]])
def test_torchrun_gives_the_run_of_nproc(job, expected, form):
    program = ["mtraining"] if "-m" in form else [str(job.binary)]
    launch(job, [*TORCHRUN, *form, *program, *job.command()[1:]])
    assert losses(job) == expected


def mpirun(count: int) -> list[str]:
    found = shutil.which("mpirun")
    assert found, "mpirun is missing: apt-get install openmpi-bin (apt-packages-test.txt)"
    return [found, "--allow-run-as-root", "--oversubscribe", "-n", str(count)]


def test_mpirun_gives_the_run_of_nproc_and_needs_no_address(job, expected):
    launch(job, [*mpirun(2), *job.command()])
    assert losses(job) == expected


@pytest.mark.parametrize(("tasks", "hosts"), [([2], "gpu07"), ([1, 1], "127.0.0.[1-2]")])
def test_srun_gives_the_run_of_nproc(job, expected, tasks, hosts):
    # Two nodes of one task make another ring than one node of two.
    for code, _, err in run_srun(job, tasks, os.getpid(), hosts, "--parallel.cp_inner_size", "2"):
        assert code == 0, err
    assert losses(job) == expected


def test_nodes_with_unequal_tasks_need_to_be_told_the_inner_ring(job):
    results = run_srun(job, [2, 1], os.getpid(), "127.0.0.[1-2]", "--attention.ring", "flat")
    assert [code for code, _, _ in results] == [0, 0, 0], results
    job.out = job.folder / "other"
    for code, _, err in run_srun(job, [2, 1], os.getpid(), "127.0.0.[1-2]"):
        assert (code, err.count("\n")) == (2, 1)
        assert "parallel.cp_inner_size" in err


def test_two_jobs_of_mpirun_at_once_do_not_meet(job, expected):
    other = Job(job.binary, job.folder / "other")
    jobs = [job, other]
    started = [
        subprocess.Popen(
            [*mpirun(2), *each.command()],
            env=each.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for each in jobs
    ]
    for code, _, err in finish(started, 60):
        assert code == 0, err
    assert losses(job) == losses(other) == expected


def ports_of(job, environment: dict[str, str]) -> list[int]:
    """Where ranks of this environment would meet."""
    result = subprocess.run(
        [str(job.binary), "doctor", "--json", "--no-links", "--out", str(job.folder)],
        env={**job.environment(), **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )
    return json.loads(result.stdout)["launcher"]["ports"]


def test_strangers_at_the_derived_port_are_passed_over(job, expected):
    first, second = ports_of(job, srun(0, [2], 77, "gpu07"))[:2]
    with socket.socket() as silent, socket.socket() as talking:
        for stranger, port in ((silent, first), (talking, second)):
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            stranger.bind(("127.0.0.1", port))
            stranger.listen()
        ranks = [start(job, srun(rank, [2], 77, "gpu07")) for rank in range(2)]
        with ended(ranks):
            peer, _ = talking.accept()
            peer.sendall(b"HTTP/1.0 400 who are you\n")
            results = finish(ranks, 60)
            peer.close()
    assert [code for code, _, _ in results] == [0, 0], results
    assert losses(job) == expected


def test_a_given_port_in_use_is_named(job):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        [(code, _, err)] = finish([start(job, by_hand(0, 2, port))], 20)
    assert (code, err.count("\n")) == (2, 1)
    assert f"MASTER_PORT: {port} of this host cannot be listened on: Address already in use" in err
    assert not job.out.exists()


def test_a_second_job_at_a_given_port_is_told(job):
    port = free_port()
    first = start(job, by_hand(0, 3, port))
    second = start(job, by_hand(1, 3, port))
    with ended([first, second]):
        time.sleep(1.5)
        [(code, _, err)] = finish([start(job, by_hand(1, 3, port))], 20)
        assert (code, err.count("\n")) == (2, 1)
        assert "rank 1 has come already" in err and f"port {port}" in err
        assert first.poll() is None and second.poll() is None


def test_ranks_that_expect_another_number_are_refused_everywhere(job):
    port = free_port()
    ranks = [start(job, by_hand(0, 2, port)), start(job, by_hand(1, 3, port))]
    for code, _, err in finish(ranks, 20):
        assert (code, err.count("\n")) == (2, 1), err
        assert "rank 1 expects 3 ranks, rank 0 expects 2" in err
    assert not job.out.exists()


def test_ranks_with_different_configurations_are_refused_everywhere(job):
    port = free_port()
    ranks = [
        start(job, by_hand(0, 2, port)),
        start(job, by_hand(1, 2, port), "--train.seq_len", "512"),
    ]
    for code, _, err in finish(ranks, 20):
        assert (code, err.count("\n")) == (2, 1), err
        assert 'rank 1 has [train] "seq_len = 512", rank 0 has "seq_len = 256"' in err
    assert not job.out.exists()


def test_ranks_that_do_not_come_are_named(job):
    soon = {"MTRAINING_RENDEZVOUS_TIMEOUT_S": "1.5"}
    port = free_port()
    ranks = [start(job, by_hand(rank, 4, port) | soon) for rank in (0, 2)]
    for code, _, err in finish(ranks, 20):
        assert (code, err.count("\n")) == (1, 1), err
        assert "2 of 4 ranks came within 1 s; missing: 1, 3" in err
    [(code, _, err)] = finish([start(job, by_hand(1, 2, free_port()) | soon)], 20)
    assert (code, err.count("\n")) == (1, 1), err
    assert "rank 0 was not found at 127.0.0.1" in err


@pytest.mark.parametrize(
    ("environment", "part"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "1"}
            | {"OMPI_COMM_WORLD_SIZE": "4"},
            "expected one launcher, got two",
        ),
        (srun(1, [2], 5, "gpu07") | {"RANK": "0", "WORLD_SIZE": "4"}, "SLURM_PROCID = 1"),
        (srun(1, [2, 2], 5, "gpu[07-08") | {"SLURM_STEP_NUM_NODES": ""}, "gpu[07-08"),
        (srun(1, [2], 5, "gpu07") | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "got 4 in '2(x2)'"),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
            | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "mpirun -x MASTER_ADDR=HOST",
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
            | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "MASTER_PORT",
        ),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_environments_that_do_not_fit_are_one_sentence(job, environment, part):
    [(code, _, err)] = finish([start(job, environment)], 20)
    assert (code, err.count("\n")) == (2, 1), err
    assert err.startswith("mtraining: error: ") and part in err
    assert not job.out.exists()


def test_nproc_is_obeyed_in_a_batch_script_and_in_a_step_of_one_task(job):
    batch = {"SLURM_JOB_ID": "9", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    for environment in (batch, srun(0, [1], 9, "gpu07")):
        assert job.run("--dry-run", nproc=2, env=environment).returncode == 0
    refused = job.run("--dry-run", nproc=2, env=srun(0, [2], 9, "gpu07"))
    assert refused.returncode == 2 and "srun has already started the ranks" in refused.stderr


def wait_for_handlers(process: subprocess.Popen) -> None:
    """Until the process, which may not have begun, catches SIGTERM."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(status.split("SigCgt:")[1].split()[0], 16)
        if caught >> (signal.SIGTERM - 1) & 1:
            return
        time.sleep(0.005)
    raise AssertionError("no handlers")


# Ranks meet, and then rank 0 goes no further: the first step never comes.
HELD = {"MTRAINING_FAULT": "rank=0,step=0,at=start,kind=hang"}


def wait_until_met(job) -> None:
    """Until rank 0 has claimed the run's folder, which it does once all ranks are there."""
    end = time.monotonic() + 20
    while not (job.out / ".lock").exists():
        assert time.monotonic() < end, "ranks did not meet"
        time.sleep(0.02)


@pytest.mark.parametrize("signalled", [0, 1])
@pytest.mark.parametrize("delay", [0.0, 0.4, None])
def test_a_rank_that_is_stopped_alone_before_the_first_step_takes_all_along(job, signalled, delay):
    port = free_port()
    ranks = [start(job, by_hand(rank, 2, port) | HELD) for rank in range(2)]
    wait_for_handlers(ranks[signalled])
    if delay is None:
        wait_until_met(job)
    else:
        time.sleep(delay)
    ranks[signalled].send_signal(signal.SIGTERM)
    results = finish(ranks, 12)
    assert [code for code, _, _ in results] == [0, 0], results
    assert [out for _, out, _ in results] == [
        "stopped before the first step; the same command starts again\n",
        "",
    ]
    assert [err for _, _, err in results] == ["", ""]


def test_a_rank_that_comes_late_learns_of_a_stop(job):
    port = free_port()
    first = start(job, by_hand(0, 3, port))
    wait_for_handlers(first)
    first.send_signal(signal.SIGTERM)
    late = [start(job, by_hand(rank, 3, port)) for rank in (1, 2)]
    results = finish([first, *late], 12)
    assert [code for code, _, _ in results] == [0, 0, 0], results


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_before_the_first_step_is_named(job, killed):
    port = free_port()
    ranks = [start(job, by_hand(rank, 2, port) | HELD) for rank in range(2)]
    wait_until_met(job)
    ranks[killed].kill()
    results = finish(ranks, 10)
    code, _, err = results[1 - killed]
    assert (code, err.count("\n")) == (1, 1), results
    assert f"rank {killed}: ended before the first step, without a word" in err
