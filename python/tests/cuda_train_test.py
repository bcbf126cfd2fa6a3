"""mtraining train on a GPU: its losses beside the CPU's, repeats, resume, what is kept where, what a step needs, what is refused.

Marked cuda: left out where there is no GPU. Runs are short and shared: a run is made when a case first asks for it.
"""

import functools
import itertools
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from mtraining.prepare import write_token_file

from python.tests.conftest import assert_one_sentence, clean_environment, metrics_of

pytestmark = pytest.mark.cuda

CONFIG = """
[model]
vocab_size = 256
hidden_size = 128
intermediate_size = 352
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 64
initializer_range = 0.05
embedding_initializer_range = 0.05
dtype = "bf16"

[data]
train = "{data}"
valid = "{data}"
shuffle_seed = 3

[attention]
pattern = "vertical_slash"
dense_threshold = 1.0

[train]
seq_len = 1024
steps = 20
preflight = false
recall_every = 0

[optim]
lr = 3e-4
warmup_steps = 4

[eval]
batches = 1

[trace]
chrome = false
"""


class Runs:
    """Runs of one small model, by the flags that differ; each is made once."""

    def __init__(self, binary: Path, folder: Path):
        self.binary, self.folder = binary, folder
        self.data = folder / "tokens"
        random = np.random.default_rng(7)
        ids = random.integers(0, 256, 60_000)
        follows = (
            random.random(ids.size) < 0.7
        )  # a language that a small model learns in a few steps
        for i in range(1, ids.size):
            if follows[i]:
                ids[i] = (ids[i - 1] * 5 + 3) % 256
        write_token_file(self.data, [ids])
        self.config = folder / "small.toml"
        self.config.write_text(CONFIG.format(data=self.data))
        self.count = itertools.count()

    def command(self, out: Path, *flags: str) -> list[str]:
        return [str(self.binary), "train", "--config", str(self.config), "--out", str(out), *flags]

    def start(self, out: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(out, *flags),
            cwd=self.folder,
            env={**clean_environment(), **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            preexec_fn=take_four_cores,
        )

    @functools.cache  # noqa: B019 lives as long as the module's fixture
    def out(self, *flags: str) -> Path:
        out = self.folder / f"run{next(self.count)}"
        result = self.start(out, *flags)
        assert result.returncode == 0, result.stderr
        return out

    def rows(self, *flags: str) -> list[dict]:
        return metrics_of(self.out(*flags))

    def losses(self, *flags: str) -> np.ndarray:
        return np.array([row["loss"] for row in self.rows(*flags)])


def take_four_cores() -> None:
    """Runs of other tests are under way on the other cores."""
    cores = sorted(os.sched_getaffinity(0))
    first = os.getpid() * 4 % len(cores)
    os.sched_setaffinity(0, (cores + cores)[first : first + 4])


def weights(out: Path) -> bytes:
    last = sorted((out / "checkpoints").glob("step-*"))[-1]
    return (last / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def runs(binary: Path, tmp_path_factory) -> Runs:
    return Runs(binary, tmp_path_factory.mktemp("cuda_train"))


CUDA = ("--train.device", "cuda")


def test_losses_are_the_cpus(runs):
    on_cpu, on_gpu = runs.losses("--train.device", "cpu"), runs.losses(*CUDA)
    print("cpu", on_cpu, "gpu", on_gpu)
    assert on_gpu[-1] < on_gpu[0] - 0.5  # it learns
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-3)
    valid = [runs.rows(*flags)[-1]["valid_loss"] for flags in (("--train.device", "cpu"), CUDA)]
    np.testing.assert_allclose(valid[1], valid[0], rtol=2e-3)


def test_a_gpu_that_is_there_is_taken_where_the_file_names_no_device(runs):
    out = runs.out("--train.steps", "1")
    assert "device = 'cuda'" in (out / "config.toml").read_text()
    assert runs.losses("--train.steps", "1")[0] == runs.losses(*CUDA)[0]


def test_repeats_are_bitwise_equal(runs):
    again = runs.folder / "again"
    assert runs.start(again, *CUDA).returncode == 0
    assert [row["loss"] for row in metrics_of(again)] == list(runs.losses(*CUDA))
    assert weights(again) == weights(runs.out(*CUDA))


def assert_resumes_bit_by_bit(runs, name: str, flags: tuple[str, ...]) -> None:
    """A run that stops after 10 steps and goes on has the losses and weights of the one that does not stop."""
    out = runs.folder / name
    half = runs.start(out, *flags, "--train.steps", "10")
    assert half.returncode == 0, half.stderr
    rest = runs.start(out, *flags)
    assert rest.returncode == 0, rest.stderr
    assert [row["loss"] for row in metrics_of(out)] == list(runs.losses(*flags))
    assert weights(out) == weights(runs.out(*flags))


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--parallel.offload_optimizer", "true", "--parallel.zero", "2"),
        ("--train.recompute", "layer", "--train.offload_layers", "3"),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(runs, flags):
    flags = (*CUDA, *flags)
    assert_resumes_bit_by_bit(runs, f"resumed{len(flags)}{len(''.join(flags))}", flags)


RUNS_OF_TOKENS = ("--train.mlp_tile", "384")  # three of a sequence's 1024
RECOMPUTED = [
    ((), "layer", ()),
    ((), "except_attention", ("--train.offload_layers", "4")),
    (RUNS_OF_TOKENS, "layer", ()),
    (RUNS_OF_TOKENS, "except_attention", ()),
    (RUNS_OF_TOKENS, "layer", ("--train.offload_layers", "3")),
    (RUNS_OF_TOKENS, "layer", ("--train.recompute_span", "3", "--train.offload_layers", "1")),
]


@pytest.mark.parametrize(("base", "mode", "flags"), RECOMPUTED)
def test_what_is_made_again_or_kept_in_host_memory_has_the_same_bits(runs, base, mode, flags):
    kept, again = (*CUDA, *base), (*CUDA, *base, "--train.recompute", mode, *flags)
    assert list(runs.losses(*again)) == list(runs.losses(*kept))
    assert weights(runs.out(*again)) == weights(runs.out(*kept))


LONG = ("--train.seq_len", "16384", "--train.steps", "6", "--data.valid", "[]")


def test_recomputation_spans_and_host_memory_save_memory(runs):
    def peak(*flags):
        return runs.rows(*CUDA, *LONG, "--train.mlp_tile", "2048", *flags)[-1]["peak_tensor_bytes"]

    kept = [
        peak(),
        peak("--train.recompute", "except_attention"),
        peak("--train.recompute", "layer"),
        peak("--train.recompute", "layer", "--train.recompute_span", "2"),
    ]
    assert kept == sorted(kept, reverse=True), kept
    assert kept[3] < 0.8 * kept[0], kept
    away = peak("--train.recompute", "except_attention", "--train.offload_layers", "4")
    assert away < kept[1], (away, kept)


@pytest.mark.parametrize(
    "flags",
    [
        ("--parallel.offload_optimizer", "true"),
        ("--parallel.zero", "2"),
        ("--parallel.zero", "2", "--parallel.offload_optimizer", "true"),
        ("--parallel.offload_optimizer", "true", "--parallel.optimizer_threads", "3"),
    ],
)
def test_where_the_optimizer_lives_changes_little(runs, flags):
    """torch's update on the host rounds otherwise than on the device; sharded weights lie otherwise for the matrix library."""
    np.testing.assert_allclose(runs.losses(*CUDA, *flags), runs.losses(*CUDA), rtol=3e-3)


# Lists of the same sizes in every step.
BUDGETS = ("--attention.pattern", "fixed")
BUDGETS += ("--attention.fixed_columns", "200", "--attention.fixed_diagonals", "12")


@pytest.mark.parametrize(
    "flags", [(), ("--train.recompute", "layer", "--train.offload_layers", "2")]
)
def test_memory_does_not_grow_with_steps(runs, flags):
    steps = runs.rows(*CUDA, *LONG, *BUDGETS, *flags)
    for key in ("peak_tensor_bytes", "peak_memory_bytes"):
        peaks = [row[key] for row in steps]
        assert len(set(peaks[1:])) == 1, (key, peaks)
    assert steps[5]["peak_memory_bytes"] >= steps[5]["peak_tensor_bytes"]


WIDE = {
    "train.seq_len": "32768",
    "train.steps": "2",
    "train.loss_chunk": "4096",
    "train.mlp_tile": "4096",
    "data.valid": "[]",
    "model.hidden_size": "1024",
    "model.intermediate_size": "2816",
    "model.num_attention_heads": "8",
    "model.head_dim": "128",
    "attention.pattern": "fixed",
    "attention.stripe": "128",
}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"train.recompute": "except_attention", "train.offload_layers": "3"},
        {"train.recompute": "layer", "parallel.offload_optimizer": "true"},
        {"train.recompute": "layer", "train.recompute_span": "2", "optim.grad_dtype": "bf16"},
        {"train.recompute": "layer", "attention.deterministic": "false"},
    ],
)
def test_a_steps_memory_is_the_plans(runs, more):
    pattern = runs.folder / "pattern.json"
    head = {"offset_ranges": [[0, 512], [9000, 9256]], "columns": list(range(0, 20000, 77))}
    pattern.write_text(json.dumps({"name": "few", "seq_len": 32768, "heads": [head] * 8}))
    keys = {**WIDE, "attention.pattern_file": str(pattern), **more}
    flags = [f"--{key}={value}" for key, value in keys.items()]
    peak = max(row["peak_tensor_bytes"] for row in runs.rows(*CUDA, *flags))
    command = [str(runs.binary), "plan", "--config", str(runs.config), "--topology", "1x1"]
    for key, value in keys.items():
        command += ["--set", f"{key}={value}"]
    result = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    plan = json.loads(result.stdout)["plan"]
    assert plan["device_bytes"] == pytest.approx(peak, rel=0.05), plan["memory"]


def test_accumulation_and_bf16_gradients(runs):
    whole = runs.losses(*CUDA, "--train.global_batch_size", "2", "--train.micro_batch_size", "2")
    parts = runs.losses(*CUDA, "--train.global_batch_size", "2")
    np.testing.assert_allclose(parts, whole, rtol=1e-3)
    low = runs.losses(*CUDA, "--train.global_batch_size", "2", "--optim.grad_dtype", "bf16")
    np.testing.assert_allclose(low, whole, rtol=2e-3)


def test_what_a_machine_without_gpus_is_told(runs):
    result = runs.start(runs.folder / "none", *CUDA, CUDA_VISIBLE_DEVICES="")
    assert_one_sentence(result, "train.device", "needs a GPU", "got 0")
    assert not (runs.folder / "none").exists()


def test_more_ranks_than_gpus_are_refused(runs):
    result = runs.start(runs.folder / "many", *CUDA, "--nproc", "64")
    assert_one_sentence(result, "train.device", "64 ranks")


def test_float32_is_refused_on_a_gpu(runs):
    result = runs.start(runs.folder / "wide", *CUDA, "--model.dtype", "float32")
    assert_one_sentence(result, "train.device", "bf16", "float32")


TWO = (*CUDA, "--nproc", "2")


@pytest.mark.multi_gpu
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--parallel.zero", "2"),
        ("--parallel.zero", "2", "--parallel.offload_optimizer", "true"),
        ("--train.recompute", "layer", "--train.offload_layers", "2", "--parallel.zero", "2"),
        ("--attention.ring", "flat", "--attention.stripe", "128"),
    ],
)
def test_two_gpus_have_the_losses_of_one(runs, flags):
    """One sequence over both, over NCCL; beside one GPU whose optimizer lives in the same place."""
    optimizer = [
        flag
        for pair in zip(flags[::2], flags[1::2], strict=True)
        for flag in pair
        if pair[0].startswith("--parallel")
    ]
    two, one = runs.losses(*TWO, *flags), runs.losses(*CUDA, *optimizer)
    print("largest relative difference", np.max(np.abs(two / one - 1)))
    assert len(two) == 20
    np.testing.assert_allclose(two, one, rtol=1e-3)


@pytest.mark.multi_gpu
def test_two_gpus_with_a_sequence_each_have_the_losses_of_one(runs):
    batch = ("--train.global_batch_size", "2")
    split = (*batch, "--parallel.dp_size", "2", "--parallel.zero", "2")
    np.testing.assert_allclose(runs.losses(*TWO, *split), runs.losses(*CUDA, *batch), rtol=1e-3)


@pytest.mark.multi_gpu
def test_two_gpus_repeat_and_resume_bit_by_bit(runs):
    assert_resumes_bit_by_bit(runs, "resumed_on_two", (*TWO, "--parallel.zero", "2"))
