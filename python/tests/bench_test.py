"""mtraining bench and its rows: what a pattern chooses from q and k beside numpy in float64, and everything that can be wrong."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from mtraining import benchmarks
from python.tests.conftest import assert_one_sentence, rows_of, run_text

HEADS, KV_HEADS, LENGTH, DIM, WINDOW, BLOCK = 4, 2, 1000, 32, 64, 64


@pytest.fixture
def bench(binary, tmp_path, environment):
    def run(*arguments: object, timeout: float = 60):
        command = [str(binary), "bench", *map(str, arguments)]
        return run_text(command, cwd=tmp_path, env=environment, timeout=timeout)

    return run


def structured_qk() -> tuple[np.ndarray, np.ndarray]:
    """Keys with a direction that turns with their position, some of them loud; queries that look a little back."""
    random = np.random.default_rng(7)
    angles = np.arange(LENGTH)[:, None] * 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))

    def turned(shift: float) -> np.ndarray:
        at = angles - shift * 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
        return np.concatenate([np.cos(at), np.sin(at)], axis=1)

    k = np.stack([turned(0) + 0.4 * random.normal(size=(LENGTH, DIM)) for _ in range(KV_HEADS)])
    k[:, random.integers(0, LENGTH, 12), 0] += 6
    q = np.stack(
        [
            (3.0 - 0.6 * h) * turned(90.0 * h) + 0.3 * random.normal(size=(LENGTH, DIM))
            for h in range(HEADS)
        ]
    )
    q[:, :, 0] += 1.5
    return q.astype(np.float32), k.astype(np.float32)


def top_p(scores: np.ndarray, p: float) -> np.ndarray:
    """The fewest entries in descending order, the lower index first among equals, whose sum reaches p of the total."""
    order = np.lexsort((np.arange(scores.size), -scores))
    count = int(np.searchsorted(np.cumsum(scores[order]), p * scores.sum() * (1 - 1e-12))) + 1
    return np.sort(order[:count])


def expected_row(q: np.ndarray, k: np.ndarray, pooling: str, p: float) -> dict:
    """One head, by the words of docs/math/pattern.md."""
    q, k = q.astype(np.float64), k.astype(np.float64)
    positions = np.arange(LENGTH - WINDOW, LENGTH)
    scores = q[positions] @ k.T / math.sqrt(DIM)
    scores[np.arange(LENGTH) > positions[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    columns = top_p(weights.mean(axis=0), p)
    offsets = np.zeros(LENGTH)
    for i, position in enumerate(positions):
        offsets[: position + 1] += weights[i, position::-1] / WINDOW
    blocks = -(-LENGTH // BLOCK)
    if pooling == "block":
        pooled = np.zeros(blocks + 1)
        for o, mass in enumerate(offsets):
            pooled[o // BLOCK] += mass * (BLOCK - o % BLOCK) / BLOCK
            pooled[o // BLOCK + 1] += mass * (o % BLOCK) / BLOCK
        chosen = set(top_p(pooled[:blocks], p).tolist())
    else:
        chosen = set()
        for o in top_p(offsets, p).tolist():
            chosen |= {o // BLOCK, o // BLOCK + (o % BLOCK != 0)}
        chosen = {c for c in chosen if c < blocks}
    chosen.add(0)
    pairs = sum((blocks - c) * BLOCK * BLOCK for c in chosen)
    for j in columns.tolist():
        b = j // BLOCK
        pairs += sum(BLOCK for query in range(b, blocks) if query - b not in chosen)
    on = np.array([c in chosen for c in range(blocks)])
    mask = np.zeros((WINDOW, LENGTH), dtype=bool)
    for i, position in enumerate(positions):
        keys = np.arange(position + 1)
        mask[i, : position + 1] = on[position // BLOCK - keys // BLOCK] | np.isin(keys, columns)
    return {
        "columns": columns.size,
        "diagonals": len(chosen),
        "density": pairs / (LENGTH**2 / 2),
        "window_recall": (weights * mask).sum() / WINDOW,
        "first_diagonals": sorted(chosen)[:8],
        "first_columns": columns.tolist()[:8],
    }


def test_qk_rows_are_those_of_numpy_on_one_and_four_ranks(bench, tmp_path):
    q, k = structured_qk()
    path = tmp_path / "qk.safetensors"
    save_file({"q": q, "k": k}, path)
    one = rows_of(bench("attention", "--qk", path))
    assert len(one) == HEADS * 4
    for row in one:
        head = row["head"]
        want = expected_row(q[head], k[head * KV_HEADS // HEADS], row["slash_pooling"], row["p"])
        where = (head, row["slash_pooling"], row["p"])
        # Scores are float32: an entry at the threshold may differ.
        assert abs(row["columns"] - want["columns"]) <= 2, where
        assert row["diagonals"] == want["diagonals"], where
        assert row["first_diagonals"] == want["first_diagonals"], where
        assert row["first_columns"] == want["first_columns"], where
        assert row["density"] == pytest.approx(want["density"], abs=4e-3), where
        assert row["window_recall"] == pytest.approx(want["window_recall"], abs=2e-3), where
        assert 0 <= row["recall"] <= 1
        assert {"block_striped 64", "zigzag", "contiguous"} <= row["imbalance"].keys()
    assert {(row["slash_pooling"], row["p"]) for row in one} == {
        (pooling, p) for pooling in ("block", "token") for p in (0.9, 0.95)
    }
    four = rows_of(bench("attention", "--qk", path, "--ranks", 4))
    assert [{**row, "ranks": 1} for row in four] == one
    fewer = rows_of(
        bench(
            "attention", "--qk", path, "--p", 0.5, "--slash-pooling", "paper", "--sink-tokens", 64
        )
    )
    assert len(fewer) == HEADS
    assert all(row["first_columns"] == list(range(8)) for row in fewer)


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        ({"k": (2, 64, 16)}, ("tensor q", "[H, S, D]")),
        ({"q": (4, 64, 16)}, ("tensor k", "[Hk, S, D]")),
        ({"q": (4, 64), "k": (2, 64, 16)}, ("tensor q", "F32 [4, 64]")),
        ({"q": (4, 64, 16), "k": (2, 65, 16)}, ("same S and D", "F32 [2, 65, 16]")),
        ({"q": (4, 64, 16), "k": (3, 64, 16)}, ("divisor", "F32 [3, 64, 16]")),
    ],
)
def test_files_that_are_no_q_and_k_are_refused(bench, tmp_path, tensors, parts):
    path = tmp_path / "odd.safetensors"
    save_file({name: np.zeros(shape, dtype=np.float32) for name, shape in tensors.items()}, path)
    assert_one_sentence(bench("attention", "--qk", path), str(path), *parts)


def test_bad_input_of_bench_gets_one_sentence(bench, tmp_path):
    odd = tmp_path / "odd.safetensors"
    save_file({"q": np.zeros((2, 64, 16), np.int32), "k": np.zeros((1, 64, 16), np.int32)}, odd)
    assert_one_sentence(bench("attention", "--qk", odd), "F64, F32, BF16 or F16")
    nan = tmp_path / "nan.safetensors"
    save_file(
        {"q": np.full((2, 64, 16), np.nan, np.float32), "k": np.zeros((1, 64, 16), np.float32)}, nan
    )
    assert_one_sentence(bench("attention", "--qk", nan), "q")
    (tmp_path / "text.safetensors").write_text("no tensors")
    for arguments, parts in [
        ((), ("attention, ring or train",)),
        (("atention",), ("atention", "nearest: attention")),
        (("attention", "--qk", "absent.safetensors"), ("absent.safetensors",)),
        (("attention", "--qk", "text.safetensors"), ("text.safetensors",)),
        (("attention", "--qk", nan, "--density", ".1"), ("--density", "--qk")),
        (("attention", "--ranks", "2"), ("--ranks", "--qk")),
        (("attention", "--qk", nan, "--p", "1.5"), ("--p", "1.5")),
        (("attention", "--pattern", "absent.json"), ("absent.json",)),
        (("attention", "--density", "0"), ("--density", "(0, 1]")),
        (("attention", "--densty", "1"), ("--densty", "--density")),
        (("attention", "--device", "cuda"), ("--device cuda",)),
        (("attention", "--dtype", "int8"), ("--dtype", "int8")),
        (("attention", "--heads", "5"), ("--kv-heads", "5")),
        (("attention", "--cp-size", "2", "--peer", "sdpa"), ("--peer", "not the same work")),
        (("attention", "--shape", "round"), ("round", "typical")),
        (("ring", "--virtual", "2by2"), ("2by2", "NODESxRANKS")),
        (("ring", "--density", ".1", "--shape", "local"), ("one of",)),
        (("ring", "--ring-stride", "2", "--virtual", "1x4", "--ring", "flat"), ("stride",)),
        (("train",), ("--config",)),
        (("train", "--config", "absent.toml"), ("absent.toml",)),
    ]:
        assert_one_sentence(bench(*arguments), *parts)


def test_rows_of_attention_have_the_keys_that_others_read(bench):
    rows = rows_of(
        bench(
            "attention",
            "--seq-len",
            512,
            "--density",
            0.3,
            1,
            "--p",
            0.9,
            "--repeats",
            2,
            "--threads",
            1,
        )
    )
    assert [row.get("peer") for row in rows] == ["torch sdpa", None, None, None]
    for row in rows:
        for key in (
            "case",
            "pattern",
            "seq_len",
            "pairs",
            "fwd_ms",
            "bwd_ms",
            "index_ms",
            "fwd_tflops",
            "bwd_tflops",
            "device",
            "commit",
        ):
            assert key in row, key
        assert row["repeats"] == 2
        assert row["fwd_ms_min"] <= row["fwd_ms"] <= row["fwd_ms_max"]
    assert "peer" not in rows[1]
    assert rows[1]["ratio_to_dense_sdpa"]["min"] <= rows[1]["ratio_to_dense_sdpa"]["median"]
    shape = rows_of(
        bench(
            "attention",
            "--shape",
            "local",
            "--seq-len",
            2048,
            "--cp-size",
            4,
            "--cp-rank",
            3,
            "--repeats",
            1,
        )
    )
    assert len(shape) == 1
    assert shape[0]["index_ms"] is None
    assert shape[0]["query_rows"] == 512


def test_a_pattern_file_is_a_case(bench, tmp_path):
    heads = [{"offset_ranges": [[0, 64 * (h + 1)]], "columns": [1, 7 + h]} for h in range(4)]
    (tmp_path / "p.json").write_text(json.dumps({"name": "mine", "seq_len": 512, "heads": heads}))
    row = rows_of(bench("attention", "--pattern", "p.json", "--repeats", 1, "--peer", "none"))[0]
    assert (row["pattern"], row["seq_len"], row["heads"]) == ("mine", 512, 4)
    assert_one_sentence(
        bench("attention", "--pattern", "p.json", "--seq-len", 1024), "p.json", "512", "1024"
    )


def test_train_steps_are_timed_on_random_tokens(bench, job):
    lines = rows_of(
        bench("train", "--config", job.config, "--ranks", 2, "--steps", 2, "--breakdown")
    )
    lines = [line for line in lines if line["case"] != "train step"]
    row, parts = lines[0], lines[1:]
    assert row["case"] == "train"
    assert row["repeats"] == 2
    assert row["steps_per_s"] == pytest.approx(1e3 / row["step_ms"], rel=1e-2)
    assert row["tokens_per_s"] == pytest.approx(256 * row["steps_per_s"], rel=1e-2)
    assert row["loss"] == pytest.approx(math.log(64), rel=0.1)
    assert row["comm_bytes"] > 0
    assert any("attention" in part["part"] for part in parts)
    assert not job.out.exists()


def test_fewer_layers_and_a_dense_arm_in_one_run(bench, job):
    few = {"p_vertical": 0, "p_slash": 0, "sink_tokens": 0, "dense_threshold": 1}
    options = ["--steps", 1, "--warm-up", 1, "--layers", 1, "--dense-arm"]
    for key, value in few.items():
        options += ["--set", f"attention.{key}={value}"]
    sparse, dense, ratio = rows_of(bench("train", "--config", job.config, *options))
    assert (sparse["pattern"], dense["pattern"], ratio["case"]) == (
        "sparse",
        "dense",
        "train ratio",
    )
    for row in (sparse, dense):
        assert (row["layers_run"], row["layers"]) == (1, 2)
        assert row["step_ms"] < row["step_ms_all_layers"] < 2 * row["step_ms"] + 1e-3
    assert sparse["attention_density"] < dense["attention_density"]
    assert ratio["dense_over_sparse"] == pytest.approx(
        dense["step_ms"] / sparse["step_ms"], abs=1e-3
    )
    for arguments, parts in [
        (("--layers", 3), ("--layers", "2", "3")),
        (("--kernels",), ("--kernels", "cuda")),
        (("--device", "tpu"), ("train.device", "tpu")),
    ]:
        assert_one_sentence(bench("train", "--config", job.config, *arguments), *parts)


def test_an_index_is_chosen_beside_a_given_pattern_unless_told_otherwise(bench, job):
    heads = [{"offset_ranges": [[0, 64]], "columns": [0, 3]}] * 4
    pattern = {"name": "few", "seq_len": 256, "heads": heads}
    (job.folder / "few.json").write_text(json.dumps(pattern))
    options = ["--config", job.config, "--steps", 1, "--warm-up", 0, "--breakdown"]
    options += ["--set", "attention.pattern=fixed", "--set", "attention.pattern_file=few.json"]
    for more, chosen in [((), True), (("--set", "attention.estimate=false"), False)]:
        step, row, *parts = rows_of(bench("train", *options, *more))
        assert (step["case"], row["case"]) == ("train step", "train")
        assert row["pattern"] == "sparse" and row["attention_density"] < 1
        assert any(part["part"] == "ring: index" for part in parts) == chosen, parts


def test_tables_compare_equal_work_alone(tmp_path):
    work = {key: "same" for key in benchmarks.WORK}
    times = {"fwd_ms": 1.0, "bwd_ms": 2.0, "index_ms": 1.0}
    row = {
        "case": "attention",
        "pattern": "density 0.05",
        "density": 0.05,
        **work,
        **times,
        "seq_len": 512,
        "head_dim": 64,
    }
    peer = {**row, "peer": "torch sdpa", "fwd_ms": 10.0, "bwd_ms": 30.0, "index_ms": None}
    assert benchmarks.ratio(peer, row) == 10
    assert "| 10.0 |" in benchmarks.table([peer, row])
    for key in benchmarks.WORK:
        with pytest.raises(ValueError, match=key):
            benchmarks.ratio({**peer, key: "other"}, row)
        with pytest.raises(ValueError, match=key):
            benchmarks.ratio({k: v for k, v in peer.items() if k != key}, row)
    assert "| 10.0 |" not in benchmarks.table([{**peer, "dtype": "bf16"}, row])
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in (peer, row)) + "\n")
    picture = tmp_path / "rows.png"
    assert benchmarks.main([str(path), "--plot", str(picture)]) == 0
    assert picture.stat().st_size > 1000
    path.write_text("{}\n")
    assert benchmarks.main([str(path)]) == 2
