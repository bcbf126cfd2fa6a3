"""`python -m mtraining` is the executable."""

import os
import subprocess
import sys

from python.tests.conftest import ROOT


def run(*arguments, **environment):
    env = os.environ | {"PYTHONPATH": str(ROOT / "python")} | environment
    command = [sys.executable, "-m", "mtraining", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_arguments_output_and_exit_code_are_the_executables(binary):
    environment = {"MTRAINING_BINARY": str(binary)}
    times = "--t-comp-ms .51 --t-intra-ms .13 --t-inter-ms .98 --t-index-ms 1.13 --t-cpu-ms 2.08"
    ran = run("simulate", "--topology", "4x8", *times.split(), **environment)
    assert ran.returncode == 0 and "34.10" in ran.stdout and "19.53" in ran.stdout
    wrong = run("trian", **environment)
    assert wrong.returncode == 2 and wrong.stderr.startswith("mtraining: error: ")


def test_a_missing_executable_is_one_sentence(tmp_path):
    ran = run("train", MTRAINING_BINARY=str(tmp_path / "none"))
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1 and "./dev build" in ran.stderr
