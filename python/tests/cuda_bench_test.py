"""mtraining bench attention --device cuda: rows that say what ran, how exact it was and how much memory it took.

Marked cuda: without a CUDA device, or an executable built with CUDA, these cases are left out and counted as not run.
"""

import pytest

from python.tests.conftest import assert_one_sentence, rows_of, run_text

pytestmark = pytest.mark.cuda


@pytest.fixture
def bench(binary, tmp_path, environment):
    def run(*arguments: object):
        command = [str(binary), "bench", "attention", "--device", "cuda", *map(str, arguments)]
        return run_text(command, cwd=tmp_path, env=environment, timeout=120)

    return run


def exact(row, dtype):
    """Rows against float64: what rounding to the dtype and a float32 sum leave, no more."""
    unit = {"bf16": 2**-8, "fp16": 2**-11}[dtype]
    assert row["out_error"] < 2 * unit, row["out_error"]
    assert row["lse_error"] < 1e-3
    for key in ("dq_error", "dk_error", "dv_error"):
        if key in row:
            assert row[key] < 4 * unit, (key, row[key])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_name_kernels_memory_and_errors(bench, dtype, head_dim):
    peer, sparse, dense, chosen = rows_of(
        bench(
            *("--seq-len", 4000, "--heads", 8, "--head-dim", head_dim, "--dtype", dtype),
            *("--density", 0.2, 1, "--p", 0.9, "--repeats", 3, "--warm-up", 1),
        )
    )
    assert peer["peer"] == "torch sdpa"
    assert any("cudnn" in name or "flash" in name for name in peer["fwd_kernels"])
    for row in (sparse, dense, chosen):
        exact(row, dtype)
        assert row["dtype"] == dtype and row["inputs"] == peer["inputs"]
        assert row["device"] == peer["device"] and "CUDA" in row["device"]
        assert row["backend"]["forward"].split(",")[0] in ("sm80", "sm90")
        assert any("forward" in name for name in row["fwd_kernels"])
        assert any("backward" in name for name in row["bwd_kernels"])
        assert sum(row["fwd_kernels"].values()) > 0
        # out, dq in float32 at the least
        assert row["peak_bytes"] >= 2 * 4000 * 8 * head_dim * 4
        assert row["index_ms"] > 0 and row["op_fwd_ms"] > 0 and row["op_bwd_ms"] > 0
        assert row["deterministic"] is False
        assert row["ratio_to_dense_sdpa"]["median"] > 0
    assert sparse["pairs"] < 0.25 * dense["pairs"]


@pytest.mark.parametrize("layout", ["block_striped", "zigzag", "contiguous"])
def test_a_ranks_share_is_as_exact(bench, layout):
    for rank in (0, 3):
        (row,) = rows_of(
            bench(
                *("--seq-len", 5000, "--shape", "typical", "--head-dim", 64, "--repeats", 1),
                *("--cp-size", 4, "--cp-rank", rank, "--layout", layout, "--deterministic"),
            )
        )
        exact(row, "bf16")
        assert (row["layout"], row["cp_rank"]) == (layout, rank)
        assert row["deterministic"] is True and row["index_ms"] is None
        assert "dk_error" not in row and "op_fwd_ms" not in row


def test_what_a_gpu_does_not_run_is_refused_by_name(bench):
    assert_one_sentence(bench("--dtype", "float32"), "--dtype", "bf16", "float32")
    assert_one_sentence(bench("--head-dim", 20), "head_dim", "20")
    assert_one_sentence(bench("--heads", 5), "--kv-heads", "5")
