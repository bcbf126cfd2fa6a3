"""bench/scaling.py without GPUs: which rows are planned, what becomes of those that fail or hang, what is measured again, efficiency.

A stand-in for `mtraining` prints the rows that a job asks for, and fails or hangs where FAKE says.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
cases = importlib.import_module("scaling_cases")
job = importlib.import_module("scaling_job")
rows_of_runs = importlib.import_module("scaling_rows")
scaling = importlib.import_module("scaling")

STAND_IN = """#!{python}
import json, os, subprocess, sys, time
topology = sys.argv[sys.argv.index("bench") + 3]
variants = [b for a, b in zip(sys.argv, sys.argv[1:]) if a == "--variant"]
what, which = os.environ.get("FAKE", "none:").split(":")
seq_len = next(int(w.split("=")[1]) for w in sys.argv if w.startswith("--seq-len="))
for variant in variants:
    if variant + "@" + topology == which:
        if what == "fail":
            if os.environ["RANK"] == "1":
                sys.exit("mtraining: error: this one cannot be had")
            time.sleep(60)  # it waits for the rank that failed
        if what == "hang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            open(os.environ["PIDS"], "a").write(f"{{os.getpid()}} {{child.pid}} ")
            time.sleep(60)
    if os.environ.get("RANK", "0") == "0":
        flags = dict(word.split("=") for word in variant.split(","))
        row = {{"case": "ring", "pattern": "dense", "seq_len": seq_len, "topology": topology, "fwd_ms": 1.0, "bwd_ms": 3.0,
               "fwd_tflops": 8.0, "bwd_tflops": 8.0, "commit": os.environ["MTRAINING_COMMIT"], "modified": False,
               "heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": "float32", "prefetch_steps": 2, "ring": flags["ring"]}}
        print(json.dumps(row), flush=True)
        print(json.dumps({{"case": "ring phase", "phase": "forward wait", "ms_largest_rank": 0.5}}), flush=True)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a rehearsal of a command over the stand-in; the rows of its file, phases left out."""
    binary = tmp_path / "mtraining"
    binary.write_text(STAND_IN.format(python=sys.executable))
    binary.chmod(0o755)
    monkeypatch.setattr(job, "GRACE_S", 0.5)

    def go(command="attention", gpus=2, fake="none:", commit="abc1234", more=()):
        monkeypatch.setenv("FAKE", fake)
        monkeypatch.setenv("MTRAINING_COMMIT", commit)
        monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
        out = tmp_path / "out"
        words = [command, "--rehearse", "--gpus", str(gpus), "--out", str(out)]
        code = scaling.main([*words, "--binary", str(binary), *more])
        found = rows_of_runs.read(out / "scaling.jsonl")
        return code, [row for row in found if row["case"] != "ring phase"]

    return go


SIZES = [cases.Sizes(), cases.REHEARSAL]
MAKERS = [cases.attention_jobs, cases.dense_jobs, cases.links_jobs]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("make", MAKERS)
def test_every_case_has_a_name_of_its_own_and_ranks_are_the_gpus(make, sizes):
    jobs = make(sizes)
    names = [case.name for one in jobs for case in one.cases]
    assert len(set(names)) == len(names)
    for one in jobs:
        assert {case.gpus for case in one.cases} == {one.gpus}
        for case in one.cases:
            if "topology" in case.facts and not one.virtual:
                nodes, ranks = map(int, case.facts["topology"].split("x"))
                assert nodes * ranks == case.gpus


def test_attention_is_planned_over_counts_topologies_rings_and_prefetch():
    planned = {
        (case.gpus, *(case.facts.get(k) for k in ("topology", "ring", "inner", "prefetch_steps")))
        for one in cases.attention_jobs(cases.Sizes())
        for case in one.cases
        if case.run == "attention" and case.facts["seq_len"] == 1048576
    }
    for gpus in (2, 4, 8):
        assert {(gpus, f"1x{gpus}", "flat", None, p) for p in (1, 2, 3)} <= planned
    for topology in ("2x4", "4x2"):
        wanted = {
            (8, topology, "hierarchical", inner, p)
            for inner in ("gather", "ring")
            for p in (1, 2, 3)
        }
        assert wanted <= planned
    assert not any(row[1] == "1x1" and row[0] != 1 for row in planned)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_planned_case_has_one_row_and_those_that_lack_gpus_say_so(run, gpus):
    code, rows = run(gpus=gpus, more=["--only", "seq_len=2048"])
    assert code == 0
    planned = [case for one in cases.attention_jobs(cases.REHEARSAL) for case in one.cases]
    planned = [case for case in planned if case.facts["seq_len"] == 2048]
    assert sorted(row["row"] for row in rows) == sorted(case.name for case in planned)
    for row in rows:
        assert row["status"] == ("measured" if row["gpus"] <= gpus else "not run")
        if row["gpus"] > gpus:
            assert row["why"] == f"needs {row['gpus']} GPUs, this host has {gpus}"


RINGS = [cases.variant_of(ring) for ring in cases.rings_of("1x2", False)]


@pytest.mark.parametrize("which", RINGS)
def test_a_row_that_fails_keeps_the_others(run, which):
    code, rows = run(fake=f"fail:{which}@1x2", more=["--only", "gpus=2", "--only", "2048"])
    assert code == 0
    by_ring = {row["row"]: row for row in rows}
    assert len(by_ring) == len(rows) == len(RINGS)
    failed = [row for row in rows if row["status"] == "failed"]
    assert len(failed) == 1 and [row["status"] for row in rows].count("measured") == len(RINGS) - 1
    facts = dict(word.split("=") for word in which.split(","))
    assert all(str(failed[0][key.replace("-", "_")]) == value for key, value in facts.items())
    assert failed[0]["why"] == "rank 1 ended with 1: mtraining: error: this one cannot be had"


def test_a_rank_that_hangs_is_ended_with_what_it_started(run, tmp_path):
    begin = time.monotonic()
    more = ["--only", "gpus=2", "--only", "2048", "--row-limit-s", "1"]
    _, rows = run(fake=f"hang:{RINGS[1]}@1x2", more=more)
    assert time.monotonic() - begin < 10
    states = [row["status"] for row in rows]
    assert states == ["measured", "failed", "measured", "measured"]
    assert rows[1]["why"] == "no row within 1 s: the job was ended"
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 4  # two ranks, a child each
    for pid in pids:
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_the_end_of_the_run_ends_what_is_under_way(run, monkeypatch):
    monkeypatch.setattr(scaling, "LEAST_S", 0.5)
    more = ["--only", "gpus=2", "--limit-s", "1.5"]
    begin = time.monotonic()
    _, rows = run(fake=f"hang:{RINGS[0]}@1x2", more=more)
    assert time.monotonic() - begin < 8
    assert rows[0]["why"] == "the time of the whole run was over: the job was ended"
    assert {row["status"] for row in rows[1:]} == {"left out"}
    assert len(rows) == 2 * len(RINGS)


def test_what_a_commit_has_is_not_measured_again(run):
    more = ["--only", "gpus=2", "--only", "2048"]
    first = run(fake=f"fail:{RINGS[2]}@1x2", more=more)[1]
    second = run(more=more)[1][len(first) :]
    assert [row["row"] for row in second] == [r["row"] for r in first if r["status"] == "failed"]
    assert second[0]["status"] == "measured"
    before = len(first) + len(second)
    assert len(run(more=more)[1]) == before
    assert len(run(more=[*more, "--again"])[1]) == before + len(RINGS)
    assert len(run(more=more, commit="def5678")[1]) == before + 2 * len(RINGS)
    # Of a tree that differs from its commit nothing counts as measured.
    for _ in range(2):
        before = len(run(more=more, commit="def5678 modified")[1])
    assert before == len(first) + len(second) + 4 * len(RINGS)


def ring_row(gpus, fwd, bwd, **more):
    row = {"case": "ring", "status": "measured", "run": "attention", "gpus": gpus, "commit": "a"}
    row |= {"fwd_ms": fwd, "bwd_ms": bwd, "seq_len": 1024, "pattern": "typical", "heads": 4}
    row |= {"kv_heads": 2, "head_dim": 64, "dtype": "bf16", "host": {"gpus": 8, "gpu": "H200"}}
    return {"row": f"{gpus} {fwd}", "command": "attention", **row, **more}


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_efficiency_is_one_gpus_time_over_that_of_all(gpus):
    ones = [ring_row(1, 10.0, 30.0), ring_row(1, 12.0, 32.0), ring_row(1, 20.0, 22.0)]
    row = ring_row(gpus, 12.0 / gpus / 0.5, 30.0 / gpus / 0.8)
    share = rows_of_runs.efficiency(row, [*ones, row])
    assert share["fwd"] == pytest.approx(0.5) and share["bwd"] == pytest.approx(0.8)
    assert share["both"] == pytest.approx(42 / gpus / (row["fwd_ms"] + row["bwd_ms"]))
    for other in ({"commit": "b"}, {"seq_len": 2048}, {"pattern": "dense"}, {"run": "slow link"}):
        assert rows_of_runs.efficiency({**row, **other}, ones) is None or "run" in other
    for not_it in ({"status": "failed"}, {"peer": "torch"}, {"host": {"gpus": 8, "gpu": "H100"}}):
        assert rows_of_runs.efficiency(row, [{**one, **not_it} for one in ones]) is None
    assert rows_of_runs.efficiency({**row, "virtual": "2x4", "gpus": 1}, ones)[
        "both"
    ] == pytest.approx(42 / 8 / (row["fwd_ms"] + row["bwd_ms"]))


def test_the_last_measured_row_stands_and_steps_stand_for_a_train_case_that_was_ended():
    host = {"gpus": 2, "gpu": "H200"}
    step = {"case": "train step", "row": "t", "status": "measured", "commit": "a", "host": host}
    ended = {"case": "status", "row": "t", "status": "failed", "why": "over", "commit": "a"}
    ended["host"] = host
    whole = {**step, "case": "train", "step_ms": 5}
    two = [{**step, "train_step": 1}, {**step, "train_step": 2}]
    (kept,) = rows_of_runs.latest([*two, ended])
    assert kept["train_step"] == 2 and kept["why"] == "over" and kept["status"] == "measured"
    phase = {"case": "train phase", "phase": "head", "ms": 2.0, "row": "t", "host": host}
    (kept,) = rows_of_runs.latest([*two, whole, phase, ended])
    assert kept["case"] == "train" and "why" not in kept and kept["phases"] == {"head": 2.0}
    (kept,) = rows_of_runs.latest([ended, *two, whole])
    assert kept["case"] == "train"
    (kept,) = rows_of_runs.latest([whole, {**two[0], "commit": "b"}, {**ended, "commit": "b"}])
    assert kept["commit"] == "b" and kept["train_step"] == 1
    (kept,) = rows_of_runs.latest([whole, two[0], ended])  # measured again, and ended
    assert kept["case"] == "train" and "why" not in kept
    other = {**whole, "host": {"gpus": 2, "gpu": "H100"}}
    assert len(rows_of_runs.latest([whole, other])) == 2


@pytest.mark.parametrize("whole", [1, 2, 32, 36])
@pytest.mark.parametrize("budget_s", [1, 20, 80, 1000])
@pytest.mark.parametrize("step_s", [0.5, 30, 200])
def test_layers_fit_their_budget_and_one_more_would_not(whole, budget_s, step_s):
    layers = cases.layers_that_fit(whole, step_s, 2, budget_s)
    assert 1 <= layers <= whole
    takes = 2 * step_s / whole
    assert layers == 1 or layers * takes <= budget_s
    assert layers == whole or (layers + 1) * takes > budget_s * 0.999


def test_the_quickest_setting_that_memory_holds_is_taken():
    host = scaling.Host(gpus=2, gpu="H200", gpu_bytes=100, host_bytes=200)
    choices = cases.memory_choices(36)
    assert choices[0]["train.recompute"] == "except_attention"
    assert choices[-1] == {
        "train.recompute": "layer",
        "train.offload_layers": 36,
        "parallel.offload_optimizer": "true",
    }

    def plan(choice):  # 90 with nothing in host memory; layers free 1 each there
        on_host = choice["train.offload_layers"]
        kept = 95 if choice["train.recompute"] == "except_attention" else 88
        item = {"bytes": 4 * on_host, "on_host": True}
        return {"device_bytes": kept - on_host, "memory": {"layers": item}}

    choice, _ = scaling.first_that_fits(host, plan, choices)
    assert choice["train.recompute"] == "except_attention"  # 12 layers leave 83 of 85 ..
    assert choice["train.offload_layers"] == 12  # .. and take 48 of 75 a GPU
    tight = scaling.Host(gpus=8, gpu="H200", gpu_bytes=100, host_bytes=300)  # 28 a GPU
    choice, _ = scaling.first_that_fits(tight, plan, choices)
    assert (choice["train.recompute"], choice["train.offload_layers"]) == ("layer", 6)
    none = scaling.Host(gpus=8, gpu="H200", gpu_bytes=10, host_bytes=300)
    with pytest.raises(RuntimeError, match="no setting fits: the least takes"):
        scaling.first_that_fits(none, plan, choices)


@pytest.mark.parametrize(("memory", "fitting"), [(1000, 36), (500, 18), (300, 9), (40, 1)])
def test_fewer_layers_stand_for_all_where_those_do_not_fit(memory, fitting):
    host = scaling.Host(gpus=1, gpu="H200", gpu_bytes=memory, host_bytes=0)

    def plan(changes):
        assert changes["train.offload_layers"] <= changes["model.num_hidden_layers"]
        return {"device_bytes": 20 * changes["model.num_hidden_layers"], "memory": {}}

    count, choice, _ = scaling.layers_and_setting(host, plan, 36)
    assert count == fitting and choice["train.offload_layers"] == 0
    none = scaling.Host(gpus=1, gpu="H200", gpu_bytes=20, host_bytes=0)
    with pytest.raises(scaling.DoesNotFit, match="no setting fits"):
        scaling.layers_and_setting(none, plan, 36)


def test_a_flat_rings_link_carries_all_shards_but_one_a_hierarchical_rings_one_a_node():
    row = {"virtual": "2x4", "seq_len": 8192, "kv_heads": 2, "head_dim": 128, "launch_shards": 1}
    row["outer_gb_per_s"] = 1.0
    shard_ms = 1024 * 2 * 128 * 2 * 2 * 1e-6
    flat, share = rows_of_runs.link_ms({**row, "ring": "flat"}, False)
    assert flat == pytest.approx(7 * shard_ms) and share == pytest.approx(1 / 8)
    inside, share = rows_of_runs.link_ms({**row, "ring": "hierarchical"}, False)
    assert inside == pytest.approx(shard_ms) and share == pytest.approx(1 / 2)
    assert rows_of_runs.link_ms({**row, "ring": "flat"}, True)[0] == pytest.approx(23 * shard_ms)


def test_the_peer_knows_every_flag_that_it_gets():
    source = (ROOT / "bench" / "context_parallel_peer.py").read_text()
    jobs = [one for one in cases.dense_jobs(cases.Sizes()) if one.program == "peer"]
    assert {one.gpus for one in jobs} == {2, 4, 8}
    for one in jobs:
        assert all(f'"--{flag}"' in source for flag in one.flags)


def test_halves_are_hosts_of_their_own():
    for ranks in (2, 4, 8):
        names = [job.half_environment(rank, ranks)["NCCL_HOSTID"] for rank in range(ranks)]
        assert names == ["half0"] * (ranks // 2) + ["half1"] * (ranks // 2)


def test_tables_hold_every_row_and_say_why_one_is_missing(run, tmp_path):
    run(fake=f"fail:{RINGS[0]}@1x2", more=["--only", "seq_len=2048"])
    table = (tmp_path / "out" / "scaling_attention.md").read_text()
    lines = [line for line in table.splitlines() if line.startswith("| attention")]
    assert sum("| abc1234 |" in line for line in lines) == 2 + len(RINGS) - 1
    assert any("failed: rank 1 ended with 1" in line for line in lines)
    assert any("10 rings" in line and "needs 4 GPUs" in line for line in lines)
    two = next(line for line in lines if "1x2 flat" in line)
    assert "0.500 (0.500, 0.500)" in two and "0.5 + 0.0" in two


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["attention", "--gpus", "0"], "--gpus: expected at least 1, got 0"),
        (["train", "--warm-up", "-1"], "--warm-up: expected at least 0, got -1"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_a_mistake_is_named(words, says):
    command = [sys.executable, str(ROOT / "bench" / "scaling.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 2 and says in done.stderr


def test_train_steps_of_two_ranks_leave_a_row(tmp_path, binary):
    out = tmp_path / "out"
    words = ["train", "--rehearse", "--gpus", "2", "--out", str(out), "--binary", str(binary)]
    environment = {**os.environ, "MTRAINING_COMMIT": "abc1234"}
    command = [sys.executable, str(ROOT / "bench" / "scaling.py"), *words]
    command += ["--only", "density=1", "--layers", "1", "--warm-up", "0"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (out / "scaling.jsonl").read_text().splitlines()]
    assert [row["case"] for row in rows[:2]] == ["train step", "train"]
    row = rows[1]
    assert row["layers_run"] == 1 and row["layers"] == 4 and row["scaled"].startswith("1 of 4")
    assert row["step_ms_all_layers"] > row["step_ms"] and row["plan_bytes"] > 0
    assert row["recompute"] == "except_attention" and row["status"] == "measured"
