"""mtraining bench train over processes: rows as of threads; what cannot be, in one sentence; on GPUs phases that add up."""

import pytest

from python.tests.conftest import assert_one_sentence, rows_of, run_text

FLAGS = (
    "--set train.seq_len=256 --set attention.p_slash=0.5 --set parallel.cp_size=2"
    " --set parallel.cp_inner_size=2 --set train.device={device}"
)


@pytest.fixture
def bench(job):
    def run(flags: str, device: str = "cpu"):
        words = f"bench train --config {job.config} {FLAGS.format(device=device)} {flags}".split()
        command = [job.binary, *words]
        return run_text(command, cwd=job.folder, env=job.environment(), timeout=120)

    return run


def test_processes_train_what_threads_train_and_one_of_them_prints(bench):
    processes, threads = (
        rows_of(bench(f"{ranks} --steps 2 --dense-arm --breakdown"))
        for ranks in ("--nproc 2", "--ranks 2")
    )
    for rows in (processes, threads):  # each step as it ends, warm-up included, of both arms
        assert [row.pop("train_step") for row in rows[:6]] == [1, 2, 3, 1, 2, 3]
        assert rows[2]["loss"] == rows[6]["loss"]
        assert {row["case"] for row in rows[:6]} == {"train step"}
        del rows[:6]
    assert [row["case"] for row in processes[:3]] == ["train", "train", "train ratio"]
    for ours, theirs in zip(processes[:2], threads[:2], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        for key in ("pattern", "attention_density", "comm_bytes", "cp_size", "repeats"):
            assert ours[key] == theirs[key], key
    assert {row.get("part") for row in processes} == {row.get("part") for row in threads}


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--nproc 0", ["--nproc", "1 to 64", "got 0"]),
        ("--nproc 2 --ranks 2", ["--nproc", "--ranks", "both"]),
        ("--nproc 3", ["parallel.cp_size", "3 are running"]),
        ("--nproc=2 --layers 99", ["--layers", "got 99"]),
    ],
)
def test_a_mistake_is_one_sentence_whoever_finds_it(bench, flags, parts):
    assert_one_sentence(bench(flags), *parts)


@pytest.mark.cuda
@pytest.mark.multi_gpu
def test_phases_of_two_gpus_add_up(bench):
    flags = "--set model.dtype=bf16 --set model.head_dim=64 --set train.recompute=layer --nproc 2"
    rows = rows_of(bench(f"{flags} --layers 1 --steps 2 --breakdown --kernels", "cuda"))
    step = next(row for row in rows if row["case"] == "train")
    assert step["layers_run"] == 1 and step["device"].startswith("2 x ")
    assert step["step_ms_all_layers"] > 0
    phases = {row["phase"]: row["ms"] for row in rows if row["case"] == "train phase"}
    del phases["norm, of the above"]
    assert sum(phases.values()) == pytest.approx(step["step_ms"], rel=0.05)
    assert {"attention_backward", "mlp_backward", "head_and_loss", "reduce"} <= phases.keys()
    kernels = next(row["kernels_us"] for row in rows if row["case"] == "train kernels")
    assert any("forward_kernel" in name for name in kernels)
    assert any("nccl" in name.lower() for name in kernels)
