"""mtraining bench ring over processes of a job, and alone: rows as of threads, what cannot be, a rank that dies."""

import json
import os
import signal
import subprocess
import time

import pytest

from python.tests.conftest import assert_one_sentence, free_port

SMALL = "--seq-len 1024 --heads 4 --kv-heads 2 --head-dim 32 --density .2 --repeats 1"


@pytest.fixture
def job(binary, tmp_path, environment):
    """Starts ranks as a launcher would."""
    started = []

    def start(ranks: int, flags: str):
        port = str(free_port())
        for rank in range(ranks):
            own = {
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            started.append(
                subprocess.Popen(
                    [str(binary), "bench", "ring", *flags.split()],
                    cwd=tmp_path,
                    env=own,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def test_processes_send_what_threads_send_and_rank_0_has_the_rows(job, binary, environment):
    flags = f"{SMALL} --ring hierarchical"
    processes = job(4, f"--topology 2x2 {flags} --breakdown")
    texts = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, texts
    assert [bool(out) for out, _ in texts] == [True, False, False, False]
    row, *phases = (json.loads(line) for line in texts[0][0].splitlines())
    threads = subprocess.run(
        [str(binary), "bench", "ring", *f"--virtual 2x2 {flags}".split()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    other = json.loads(threads.stdout.splitlines()[0])
    ring_bytes = {k: v for k, v in row["bytes_by_channel"].items() if k != "other"}
    assert sum(ring_bytes.values()) == row["predicted_ring_bytes"]
    assert ring_bytes == {k: v for k, v in other["bytes_by_channel"].items() if k != "other"}
    assert row["pairs"] == other["pairs"]
    assert row["inputs"] == other["inputs"]
    assert {"forward", "backward"} <= {phase["phase"] for phase in phases}
    assert row["worker_imbalance_time"] >= 1


def test_more_shards_a_launch_change_no_bytes(binary, environment):
    variants = [f"--variant ring=flat,launch-shards={shards}" for shards in (1, 3)]
    done = subprocess.run(
        [
            str(binary),
            "bench",
            "ring",
            *f"--virtual 1x4 --alone {SMALL} {' '.join(variants)}".split(),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["launch_shards"] for row in rows] == [1, 3]
    assert rows[0]["bytes_by_channel"] == rows[1]["bytes_by_channel"]
    assert rows[0]["buffer_bytes"] < rows[1]["buffer_bytes"]


def test_a_job_of_another_size_is_refused(job):
    (process,) = job(1, f"--topology 1x2 {SMALL}")
    out, err = process.communicate(timeout=30)
    done = subprocess.CompletedProcess([], process.returncode, out, err)
    assert_one_sentence(done, "--topology", "1x2", "2 processes", "a job of 1")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--topology 1x2 --virtual 1x2", ("--topology", "--virtual")),
        ("--virtual 1x2 --outer-gb-per-s 5", ("--outer-gb-per-s", "--device cuda")),
        ("--device gpu", ("--device", "'gpu'")),
        ("--virtual 1x2 --launch-shards -1", ("launch_shards", "-1")),
        ("--virtual 1x2 --variant ring=flat,speed=2", ("--variant", "'speed'")),
        ("--virtual 1x2 --variant launch-shards=x", ("--variant", "launch-shards", "'x'")),
        ("--virtual 1x2 --layer --density .5", ("--layer", "given mask")),
        ("--virtual 1x2 --transfers peer_copies", ("copies between GPUs",)),
    ],
)
def test_what_cannot_be_is_one_sentence(binary, environment, flags, parts):
    done = subprocess.run(
        [str(binary), "bench", "ring", *flags.split()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert_one_sentence(done, *parts)


def test_a_killed_rank_ends_the_job(job):
    processes = job(2, "--topology 1x2 --seq-len 4096 --heads 4 --kv-heads 2 --head-dim 32 "
                       "--density 1 --repeats 100000")  # fmt: skip
    time.sleep(2)
    assert [process.poll() for process in processes] == [None, None]
    os.kill(processes[1].pid, signal.SIGKILL)
    begin = time.monotonic()
    _, err = processes[0].communicate(timeout=40)
    assert processes[0].returncode == 1, err
    assert time.monotonic() - begin < 30
    assert "error:" in err
