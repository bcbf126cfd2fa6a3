"""`mtraining doctor`, the help of every verb, and the progress bar of a terminal."""

import fcntl
import json
import os
import pty
import re
import resource
import struct
import subprocess
import termios

import pytest


def doctor(binary, environment, *arguments: str, **more) -> tuple[int, dict]:
    result = subprocess.run(
        [str(binary), "doctor", "--json", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        **more,
    )
    assert result.stderr == ""
    return result.returncode, json.loads(result.stdout)


def check(report: dict, name: str) -> dict:
    return next(c for c in report["checks"] if c["name"] == name)


def test_this_machine_can_train(binary, environment, tmp_path):
    code, report = doctor(binary, environment, "--out", str(tmp_path / "a/b"))
    assert code == 0 and report["usable"]
    assert report["torch"].startswith("2.")
    assert report["cores"] == len(os.sched_getaffinity(0))
    assert report["links"]["gloo"]["bytes_per_s"] > 1e7
    assert report["links"]["gloo"]["small_us"] < 1e6
    assert report["launcher"]["name"] == "none"
    on_cpu = {
        (k["direction"], k["dtype"], k["head_dim"]): k["backend"]
        for k in report["kernels"]
        if k["device"] == "cpu"
    }
    for direction in ("forward", "backward"):
        for head_dim in (64, 96, 128, 256):
            assert on_cpu[direction, "float32", head_dim] == "ref"
    assert check(report, "out folder")["text"].startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []  # it looks and leaves no trace


@pytest.mark.parametrize(("limit", "verdict"), [(100, "FAIL"), (500, "note"), (1024, "ok")])
def test_a_limit_on_open_files_comes_with_its_remedy(binary, environment, tmp_path, limit, verdict):
    code, report = doctor(
        binary,
        environment,
        *("--no-links", "--out", str(tmp_path)),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 4096)),
    )
    found = check(report, "open files")
    assert found["verdict"] == verdict and code == (1 if verdict == "FAIL" else 0)
    assert ("remedy" in found) == (verdict != "ok")
    assert verdict == "ok" or "ulimit -n" in found["remedy"]


def test_an_out_folder_that_cannot_be_is_a_failure(binary, environment, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file/run", "/sys/kernel/run"):
        code, report = doctor(binary, environment, "--no-links", "--out", str(out))
        assert code == 1 and not report["usable"]
        assert check(report, "out folder")["verdict"] == "FAIL"


def test_instruction_sets_are_those_that_kernels_use(binary, environment):
    lower = {**environment, "MTRAINING_REF_ISA": "baseline"}
    code, report = doctor(binary, lower, "--no-links")
    assert code == 0 and report["cpu_kernels"] == "baseline"
    assert check(report, "cpu kernels")["verdict"] == "note"


def test_the_launcher_is_shown_as_a_rank_sees_it(binary, environment):
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_STEP_NUM_TASKS": "7"}
    slurm |= {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
    slurm |= {"SLURM_STEP_NODELIST": "gpu[03-06]", "SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0"}
    code, report = doctor(binary, environment | slurm, "--no-links")
    launcher = report["launcher"]
    assert code == 0
    assert (launcher["name"], launcher["rank"], launcher["world_size"]) == ("srun", 5, 7)
    assert launcher["local_world_size"] is None and launcher["address"] == "gpu03"
    assert len(launcher["ports"]) == 16
    broken = environment | slurm | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}
    code, report = doctor(binary, broken, "--no-links")
    assert code == 1
    assert "expected 7 tasks" in check(report, "launcher")["text"]


def test_every_verb_has_help_with_examples(binary, environment):
    def run(*arguments: str) -> str:
        result = subprocess.run(
            [str(binary), *arguments], env=environment, capture_output=True, text=True, timeout=30
        )
        assert result.returncode == 0 and result.stderr == ""
        return result.stdout

    overview = run("--help")
    verbs = re.findall(r"^  ([a-z]+)  ", overview.split("VERB --help")[0], re.MULTILINE)
    assert {"train", "simulate", "bench", "plan", "doctor", "inspect", "convert"} <= set(verbs)
    for verb in verbs:
        _, found, examples = run(verb, "--help").lower().partition("examples:")
        assert found, verb
        assert f"mtraining {verb}" in examples, verb


def run_on_terminal(job, columns: int, *extra: str, kind: str = "xterm") -> bytes:
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        job.command(*extra),
        env={**job.environment(), "TERM": kind},
        stdout=terminal,
        stderr=subprocess.PIPE,
    )
    os.close(terminal)
    seen = b""
    try:
        while piece := os.read(controller, 4096):
            seen += piece
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(controller)
    assert process.wait(60) == 0, process.stderr.read()
    return seen


@pytest.mark.parametrize("columns", [20, 80, 200])
def test_a_bar_stays_on_one_line_of_any_terminal(job, columns):
    seen = run_on_terminal(job, columns, "--train.preflight", "false", "--train.steps", "5")
    bars = [b for b in seen.replace(b"\r\n", b"\n").split(b"\r") if b"/5" in b]
    assert 2 <= len(bars) <= 5
    for bar in bars:
        text = bar.split(b"\x1b[K")[0]
        assert len(text) < columns and b"\n" not in text
    last = bars[-1].split(b"\x1b[K")[0].decode()
    assert "5/5" in last
    assert ("density" in last) == (columns == 200)
    if columns >= 80:
        assert "tokens/s" in last and "loss" in last and "left" in last


def test_a_terminal_that_cannot_go_back_gets_lines(job):
    for columns, kind in ((80, "dumb"), (0, "xterm")):  # as mpirun gives one: no columns
        job.out = job.folder / kind
        seen = run_on_terminal(job, columns, kind=kind)
        assert b"\x1b" not in seen and b"train_step 3/3" in seen
