"""Where the built executable is, for the tests that run it."""

import json
import os
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest
from mtraining.prepare import write_token_file

ROOT = Path(__file__).resolve().parents[2]


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a CUDA device and a library built with CUDA")
    config.addinivalue_line("markers", "multi_gpu: needs two of them")


def pytest_collection_modifyitems(config, items):
    """Cases that cannot run here are left out: deselected, so that they are counted neither passed nor skipped."""
    needs = {
        item: 2 if item.get_closest_marker("multi_gpu") else 1
        for item in items
        if item.get_closest_marker("cuda") or item.get_closest_marker("multi_gpu")
    }
    if not needs:
        return
    import torch

    from mtraining import library  # noqa: F401 registers the operators

    built = torch._C._dispatch_has_kernel_for_dispatch_key("mtraining::attend", "CUDA")
    devices = torch.cuda.device_count() if built else 0
    left_out = [item for item, gpus in needs.items() if gpus > devices]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def find_binary() -> Path | None:
    given = os.environ.get("MTRAINING_BINARY")
    if given:
        return Path(given).resolve()
    folder = os.environ.get("MTRAINING_BINARY_DIR")
    built = (
        [Path(folder) / "bin" / "mtraining"]
        if folder
        else sorted(ROOT.glob("build/*/bin/mtraining"), key=lambda path: path.stat().st_mtime)
    )
    return built[-1] if built and built[-1].exists() else None


@pytest.fixture(scope="session")
def binary() -> Path:
    found = find_binary()
    assert found is not None, "no executable in build/*/bin: run ./dev build first"
    return found


def run_text(command, *, cwd=None, env=None, timeout: float = 60) -> subprocess.CompletedProcess:
    """Runs a command to its end, whatever its exit code; what it says as text."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rows_of(result) -> list[dict]:
    """The JSON object of each line that a verb printed; it must have ended well."""
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def metrics_of(out: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def tiny_qwen2(**changes):
    """A configuration of transformers with ids of bytes, without special tokens."""
    from transformers import Qwen2Config

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    plain = {"vocab_size": 256, "eos_token_id": None, "bos_token_id": None}
    return Qwen2Config(**(sizes | heads | plain | {"max_position_embeddings": 400} | changes))


def assert_one_sentence(result, *parts: str, code: int = 2) -> None:
    lines = [line for line in result.stderr.splitlines() if line]
    assert len(lines) == 1, result.stderr + result.stdout
    assert lines[0].startswith("mtraining: error: "), lines[0]
    for part in parts:
        assert part in lines[0], (part, lines[0])
    assert result.returncode == code, lines[0]


CONFIG = """
[model]
vocab_size = 64
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16

[data]
train = "{data}"
valid = "{data}"

[attention]
last_q = 32
sink_tokens = 8

[train]
device = "cpu"
seq_len = 256
steps = 3

[optim]
lr = 1e-3

[eval]
batches = 1
"""


class Job:
    """A tiny configuration with its data in a folder of its own, and the means to run it."""

    def __init__(self, binary: Path, folder: Path):
        self.binary, self.folder = binary, folder
        self.data = folder / "tokens"
        ids = np.random.default_rng(1).integers(0, 64, 5000)
        write_token_file(self.data, [ids])
        self.config = folder / "tiny.toml"
        self.config.write_text(CONFIG.format(data=self.data))
        self.out = folder / "run"

    def command(self, *extra: str, nproc: int | None = None) -> list[str]:
        command = [str(self.binary), "train", "--config", str(self.config), "--out", str(self.out)]
        if nproc is not None:
            command += ["--nproc", str(nproc)]
        return [*command, *extra]

    def environment(self) -> dict[str, str]:
        return clean_environment()

    def run(self, *extra: str, nproc: int | None = None, env: dict | None = None, timeout=60):
        return run_text(
            self.command(*extra, nproc=nproc),
            cwd=self.folder,
            env={**self.environment(), **(env or {})},
            timeout=timeout,
        )


def clean_environment() -> dict[str, str]:
    launchers = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    prefixes = ("OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_")
    ours = ("MTRAINING_FAULT", "MTRAINING_RENDEZVOUS_TIMEOUT_S")
    return {
        k: v
        for k, v in os.environ.items()
        if k not in launchers and k not in ours and not k.startswith(prefixes)
    }


@pytest.fixture
def environment() -> dict[str, str]:
    """This process's, without what a launcher or a fault test may have left in it."""
    return clean_environment()


@pytest.fixture
def job(binary: Path, tmp_path: Path) -> Job:
    return Job(binary, tmp_path)
