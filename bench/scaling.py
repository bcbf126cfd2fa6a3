"""Scaling over the GPUs of one host: three commands, each under 10 minutes on 8 GPUs, that append rows to docs/benchmarks/scaling.jsonl.

    python bench/scaling.py attention     vertical_slash, forward and backward, 1 -> all GPUs, rings, gathers, prefetch; imbalance
    python bench/scaling.py dense         dense rings and torch's context parallel; a slow link between two halves on purpose
    python bench/scaling.py links         one GPU as 2x4 and 4x8 ranks, what leaves a node at set rates: flat beside hierarchical
    python bench/scaling.py train         train steps of the Qwen2.5-3B shape (an 8B shape too), dense and sparse

Each prints a table of what it measured. --rehearse runs the same commands small, over processes on the CPU, to see that they work.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROWS = ROOT / "docs" / "benchmarks" / "scaling.jsonl"
LIMIT_S = 590
RANKS_END_S = 40  # torchrun kills after 30 s those that do not end


class Runner:
    """Runs jobs one after another, keeps their rows, and starts none that would pass the limit."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.begin = time.monotonic()
        self.rows: list[dict] = []
        self.port = 29500 + os.getpid() % 400

    def left_s(self) -> float:
        return self.options.limit_s - (time.monotonic() - self.begin)

    def launch(self, processes: int, command: list[str], timeout_s: float, extra: dict) -> bool:
        """One job of `processes` ranks; its JSON lines with `extra` become rows. False where there was no time or it failed."""
        what = " ".join(f"{key}={value}" for key, value in extra.items())
        if self.left_s() < timeout_s / 2:
            print(f"left out, {self.left_s():.0f} s left: {what}", file=sys.stderr)
            return False
        self.port += 1
        launcher = [sys.executable, "-m", "torch.distributed.run"]
        launcher += ["--nproc-per-node", str(processes), "--master-port", str(self.port)]
        if "--virtual" in command:
            full = command  # ranks are its threads
        elif command[0].endswith(".py"):
            full = launcher + command
        else:
            full = [*launcher, "--no-python", *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        job = subprocess.Popen(
            full,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            output, errors = job.communicate(timeout=min(timeout_s, max(5, self.left_s())))
        except subprocess.TimeoutExpired:
            end(job)
            print(f"over {timeout_s:.0f} s: {what}", file=sys.stderr)
            return False
        if job.returncode != 0:
            said = [line for line in errors.splitlines() if "rror:" in line]
            print(f"failed ({job.returncode}): {what}", *said[:4], sep="\n  ", file=sys.stderr)
            return False
        for line in output.splitlines():
            if line.startswith("{"):
                self.keep({**json.loads(line), **extra})
        return True

    def keep(self, row: dict) -> None:
        self.rows.append(row)
        if self.options.rows is not None:
            with open(self.options.rows, "a") as file:
                file.write(json.dumps(row) + "\n")


def end(job: subprocess.Popen) -> None:
    """Ends a job with all its ranks, or the next one would be timed beside them."""
    job.terminate()  # torchrun ends its ranks, which lead sessions of their own
    try:
        job.wait(RANKS_END_S)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(job.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    job.communicate()


def binary_of(options: argparse.Namespace) -> str:
    if options.binary:
        return options.binary
    for build in ("cpu", "cuda") if options.rehearse else ("cuda", "cpu"):
        path = ROOT / "build" / build / "bin" / "mtraining"
        if path.exists():
            return str(path)
    raise SystemExit("scaling.py: no build/*/bin/mtraining: run ./dev build, or give --binary")


def ring_command(options: argparse.Namespace, topology: str, seq_len: int, **more) -> list[str]:
    sizes = (
        {"device": "cpu", "heads": 4, "kv-heads": 2, "head-dim": 32, "dtype": "float32"}
        if options.rehearse
        else {"device": "cuda", "heads": 16, "kv-heads": 2, "head-dim": 128, "dtype": "bf16"}
    )
    flags = {"stripe": 128, "warm-up": 1, "repeats": 3, **sizes, **more}
    command = [binary_of(options), "bench", "ring", "--topology", topology]
    command += ["--seq-len", str(seq_len), "--breakdown"]
    if not options.rehearse:
        command.append("--any-order")
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    return command


def sizes_of(options: argparse.Namespace) -> list[int]:
    return [2048, 4096] if options.rehearse else [524288, 1048576]


def rings_over(gpus: int) -> list[dict]:
    """Which rings are measured over so many GPUs: topology and flags."""
    if gpus == 1:
        return [{"topology": "1x1", "ring": "flat"}]
    one_node = f"1x{gpus}"
    rings = [{"topology": one_node, "ring": "flat", "prefetch-steps": p} for p in (1, 2, 3)]
    rings.append({"topology": one_node, "ring": "hierarchical", "inner": "gather"})
    if gpus < 4:
        return [rings[1], rings[3]]
    halves, pairs = f"2x{gpus // 2}", f"{gpus // 2}x2"
    for inner in ("gather", "ring"):
        rings += [
            {"topology": halves, "ring": "hierarchical", "inner": inner, "prefetch-steps": p}
            for p in ((1, 2, 3) if gpus >= 8 else (2,))
        ]
        if pairs != halves:
            rings.append({"topology": pairs, "ring": "hierarchical", "inner": inner})
    return rings if gpus >= 8 else [rings[1], *rings[3:]]


def counts_up_to(gpus: int) -> list[int]:
    return [count for count in (1, 2, 4, 8, 16) if count <= gpus]


def attention(runner: Runner) -> None:
    options = runner.options
    mask = {"density": 0.1} if options.rehearse else {"shape": "typical"}
    for seq_len in sizes_of(options):
        for gpus in counts_up_to(options.gpus):
            for ring in rings_over(gpus):
                flags = {**ring, **mask}
                topology = flags.pop("topology")
                command = ring_command(options, topology, seq_len, **flags)
                runner.launch(gpus, command, 60, {"run": "attention", "gpus": gpus})
    alone = {
        row["seq_len"]: row["fwd_ms"] + row["bwd_ms"]
        for row in runner.rows
        if row["case"] == "ring" and row["gpus"] == 1
    }
    print_table(
        runner.rows,
        {
            "seq_len": lambda r: r["seq_len"],
            "gpus": lambda r: r["gpus"],
            "ring": lambda r: f"{r['topology']} {r['ring']} {r.get('inner', '')}".strip(),
            "prefetch": lambda r: r["prefetch_steps"],
            "fwd ms": lambda r: f"{r['fwd_ms']:.2f}",
            "bwd ms": lambda r: f"{r['bwd_ms']:.2f}",
            "efficiency": lambda r: (
                f"{alone[r['seq_len']] / r['gpus'] / (r['fwd_ms'] + r['bwd_ms']):.3f}"
                if r["seq_len"] in alone
                else ""
            ),
            "imbalance": lambda r: r.get("worker_imbalance_time", ""),
        },
    )


def halves_apart(command: list[str], gpus: int) -> list[str]:
    """The command of a rank, in a half that NCCL takes for another host, with sockets between the halves."""
    script = f'export NCCL_HOSTID=half$((LOCAL_RANK * 2 / {gpus})) NCCL_NET=Socket; exec "$0" "$@"'
    return ["bash", "-c", script, *command]


def dense(runner: Runner) -> None:
    options = runner.options
    seq_lens = [2048] if options.rehearse else [262144, 524288]
    for gpus in [count for count in counts_up_to(options.gpus) if count > 1]:
        for seq_len in seq_lens:
            heads = {} if options.rehearse else {"kv-heads": 16}
            for ring in ("flat", "hierarchical"):
                command = ring_command(
                    options, f"1x{gpus}", seq_len, ring=ring, density=1, repeats=2, **heads
                )
                runner.launch(gpus, command, 60, {"run": "dense", "gpus": gpus})
            if not options.rehearse:
                peer = [str(ROOT / "bench" / "context_parallel_peer.py")]
                peer += ["--seq-len", str(seq_len), "--heads", "16", "--repeats", "2"]
                runner.launch(gpus, peer, 90, {"run": "dense", "gpus": gpus})
    gpus = counts_up_to(options.gpus)[-1]
    if gpus > 1:
        mask = {"density": 0.1} if options.rehearse else {"shape": "typical"}
        for link in ("as it is", "slow"):
            for topology, ring in ((f"1x{gpus}", "flat"), (f"2x{gpus // 2}", "hierarchical")):
                command = ring_command(options, topology, sizes_of(options)[0], ring=ring, **mask)
                if link == "slow":
                    command = halves_apart(command, gpus)
                extra = {"run": "slow link", "gpus": gpus, "between_halves": link}
                runner.launch(gpus, command, 120, extra)
    print_table(
        runner.rows,
        {
            "run": lambda r: f"{r['run']} {r.get('between_halves', '')}".strip(),
            "who": lambda r: r.get("peer") or f"{r['topology']} {r['ring']}",
            "seq_len": lambda r: r["seq_len"],
            "gpus": lambda r: r["gpus"],
            "fwd ms": lambda r: f"{r['fwd_ms']:.2f}",
            "bwd ms": lambda r: f"{r['bwd_ms']:.2f}",
            "fwd TFLOP/s a GPU": lambda r: f"{r['fwd_tflops'] / r['gpus']:.0f}",
            "bwd TFLOP/s a GPU": lambda r: f"{r['bwd_tflops'] / r['gpus']:.0f}",
        },
    )


def link_ms(row: dict, backward: bool) -> tuple[float, float]:
    """How long a rank's link to other nodes carries what it sends, and the share of the work that can begin only when the last K and V are there."""
    nodes, ranks = map(int, row["virtual"].split("x"))
    world = nodes * ranks
    kv_bytes = row["seq_len"] // world * row["kv_heads"] * row["head_dim"] * 2 * 2
    flat = row["ring"] == "flat"
    hops = world - 1 if flat else nodes - 1
    last = (world - 1) % row["launch_shards"] or row["launch_shards"]
    share = last / world if flat else 1 / nodes
    sent = hops * kv_bytes
    if backward:  # gradients, float32, make a hop more
        sent += (hops + 1) * 2 * kv_bytes
    return sent / row["outer_gb_per_s"] * 1e-6, share


def links(runner: Runner) -> None:
    """Ranks share one GPU, so that a row's time is that of all ranks' work; what leaves a node is held as long as its bytes would take."""
    options = runner.options
    rates = [10, 2] if options.rehearse else [100, 50, 25, 10, 5, 2.5]
    seq_len = 4096 if options.rehearse else 131072
    mask = {"density": 0.1} if options.rehearse else {"shape": "typical"}
    for topology in ("2x4", "4x8"):
        command = ring_command(options, topology, seq_len, **mask)
        command[command.index("--topology")] = "--virtual"
        for rate in [0, *rates]:
            for ring in ("flat", "hierarchical"):
                held = "" if options.rehearse else f",outer-gb-per-s={rate}"
                command += ["--variant", f"ring={ring}{held}"]
        runner.launch(1, command, 120, {"run": "links", "gpus": 1})
    free: dict[tuple, dict] = {}
    shown: list[dict] = []
    for row in runner.rows:
        if row["case"] == "ring":
            shown.append(row)
            if "outer_gb_per_s" not in row:
                free[row["virtual"], row["ring"]] = row
        elif row["case"] == "ring phase":
            shown[-1][row["phase"]] = row["ms_largest_rank"]

    def predicted(row: dict, backward: bool) -> str:
        if "outer_gb_per_s" not in row:
            return ""
        alone = free[row["virtual"], row["ring"]]["bwd_ms" if backward else "fwd_ms"]
        link, share = link_ms(row, backward)
        # Backward ends with a hop under which nothing is left to do; its share of the link's time is small beside the sum.
        return f"{max(alone, link + (0 if backward else share * alone)):.1f}"

    print_table(
        shown,
        {
            "ranks": lambda r: r["virtual"],
            "GB/s between nodes": lambda r: r.get("outer_gb_per_s", "no limit"),
            "ring": lambda r: r["ring"],
            "fwd ms": lambda r: f"{r['fwd_ms']:.1f}",
            "predicted": lambda r: predicted(r, False),
            "of that waiting": lambda r: f"{r.get('forward wait', 0):.1f}",
            "bwd ms": lambda r: f"{r['bwd_ms']:.1f}",
            "bwd predicted": lambda r: predicted(r, True),
            "bwd waiting": lambda r: f"{r.get('backward wait', 0):.1f}",
        },
    )


SHAPES = {
    # layers, hidden, ffn, heads, kv heads, head_dim, vocabulary, tied
    "3B": (36, 2048, 11008, 16, 2, 128, 151936, True),
    "8B": (32, 4096, 14336, 32, 8, 128, 128256, False),
    "tiny": (2, 64, 128, 4, 2, 16, 256, True),
}


def train_config(shape: str, seq_len: int, layers: int, data: str, pattern: str, steps: int) -> str:
    _, hidden, ffn, heads, kv_heads, head_dim, vocabulary, tied = SHAPES[shape]
    sparse = (
        f'pattern = "fixed"\npattern_file = "{pattern}"\nestimate = true'
        if pattern
        else 'pattern = "dense"'
    )
    on_gpu = shape != "tiny"
    return f"""
[model]
architecture = "qwen2"
vocab_size = {vocabulary}
hidden_size = {hidden}
intermediate_size = {ffn}
num_hidden_layers = {layers}
num_attention_heads = {heads}
num_key_value_heads = {kv_heads}
head_dim = {head_dim}
rms_norm_eps = 1e-6
tie_word_embeddings = {str(tied).lower()}
rope_theta = 1000000.0
dtype = "{"bf16" if on_gpu else "float32"}"
[data]
train = "{data}"
[parallel]
zero = 2
[attention]
{sparse}
stripe = 128
deterministic = false
[train]
device = "{"cuda" if on_gpu else "cpu"}"
seq_len = {seq_len}
steps = {steps}
recompute = "except_attention"
preflight = false
recall_every = 0
[optim]
lr = 2e-5
"""


def write_pattern(path: pathlib.Path, seq_len: int, heads: int) -> None:
    """About .05 of the causal pairs: a band, scattered diagonals and columns, another choice for each head."""
    scale = seq_len / 131072
    lists = []
    for head in range(heads):
        pick = random.Random(f"typical/{head}")
        band = max(64, int((1024, 2048, 3072)[head % 3] * scale))
        ranges = [[0, band]]
        for _ in range(max(1, int(6 * scale))):
            first = pick.randrange(band, seq_len - 256)
            ranges.append([first, first + 256])
        columns = set(range(64))
        while len(columns) < max(80, int(1024 * scale)):
            columns.add(int(seq_len * pick.random() ** 2))
        lists.append({"offset_ranges": sorted(ranges), "columns": sorted(columns)})
    path.write_text(json.dumps({"name": "typical", "seq_len": seq_len, "heads": lists}))


def train_case(runner: Runner, folder: pathlib.Path, case: dict) -> None:
    """Steps of one shape; the last step's metrics become a row."""
    sys.path.insert(0, str(ROOT / "python"))
    import numpy
    from mtraining.prepare import write_token_file

    options, gpus, seq_len, shape = runner.options, case["gpus"], case["seq_len"], case["shape"]
    whole_layers = SHAPES[shape][0]
    layers = case.get("layers", whole_layers)
    data = folder / f"tokens_{shape}_{seq_len}"
    steps = 2
    if not pathlib.Path(f"{data}.bin").exists():
        tokens = numpy.random.default_rng(1).integers(0, SHAPES[shape][6], (seq_len + 1) * 8)
        write_token_file(data, list(tokens.reshape(8, -1)), "int32")
    pattern = ""
    if case["pattern"] != "dense":
        pattern = str(folder / f"pattern_{shape}_{seq_len}.json")
        write_pattern(pathlib.Path(pattern), seq_len, SHAPES[shape][3])
    config = folder / "config.toml"
    config.write_text(train_config(shape, seq_len, layers, str(data), pattern, steps))
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [binary_of(options), "train", "--config", str(config), "--out", str(out)]
    dp_size = case.get("dp_size", 1)
    command += [f"--parallel.dp_size={dp_size}", f"--train.global_batch_size={dp_size}"]
    extra = {"run": "train", **case, "layers": layers}
    if not runner.launch(gpus, command, case["limit_s"], extra):
        return
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = metrics[-1]
    row = {
        "case": "train",
        **{key: value for key, value in extra.items() if key != "limit_s"},
        **{
            key: last.get(key)
            for key in (
                "step_s",
                "tokens_per_s",
                "tokens_per_s_per_gpu",
                "mfu",
                "attention_density",
                "worker_imbalance",
                "step_imbalance",
                "peak_memory_bytes",
                "peak_tensor_bytes",
                "loss",
            )
        },
    }
    if layers != whole_layers:
        row["step_s_all_layers"] = (
            last["step_s"] * whole_layers / layers
        )  # head and loss counted as layers
    runner.keep(row)


def train(runner: Runner) -> None:
    options = runner.options
    gpus = counts_up_to(options.gpus)[-1]
    if options.rehearse:
        base = {"gpus": gpus, "shape": "tiny", "seq_len": 1024, "limit_s": 60}
        cases = [{**base, "pattern": "dense"}, {**base, "pattern": "typical"}]
        if gpus >= 2:
            cases.append({**base, "pattern": "typical", "dp_size": 2})
    else:
        base = {"gpus": gpus, "limit_s": 150}
        cases = [
            {**base, "shape": "3B", "seq_len": 524288, "pattern": "typical"},
            {**base, "shape": "3B", "seq_len": 524288, "pattern": "dense", "layers": 4},
            {**base, "shape": "3B", "seq_len": 1048576, "pattern": "typical", "layers": 12},
            {**base, "shape": "3B", "seq_len": 1048576, "pattern": "dense", "layers": 2},
            {**base, "shape": "8B", "seq_len": 1048576, "pattern": "typical", "layers": 8},
        ]
        if gpus >= 4:
            cases.append(
                {**base, "shape": "3B", "seq_len": 524288, "pattern": "typical", "dp_size": 2}
            )
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            train_case(runner, pathlib.Path(folder), case)
    rows = [row for row in runner.rows if row["case"] == "train"]
    print_table(
        rows,
        {
            "shape": lambda r: r["shape"],
            "layers": lambda r: r["layers"],
            "seq_len": lambda r: r["seq_len"],
            "pattern": lambda r: r["pattern"],
            "gpus": lambda r: f"{r['gpus']}" + (f" (dp {r['dp_size']})" if "dp_size" in r else ""),
            "step s": lambda r: f"{r['step_s']:.2f}",
            "tokens/s": lambda r: f"{r['tokens_per_s']:.0f}",
            "MFU": lambda r: "" if r["mfu"] is None else f"{r['mfu']:.3f}",
            "peak GB": lambda r: (
                f"{max(r['peak_memory_bytes'] or 0, r['peak_tensor_bytes'] or 0) / 1e9:.1f}"
            ),
        },
    )


def print_table(rows: list[dict], columns: dict) -> None:
    rows = [row for row in rows if row.get("case") != "ring phase"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(str(cell(row)) for cell in columns.values()) + " |")


def gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["attention", "dense", "links", "train"])
    parser.add_argument("--gpus", type=int, help="GPUs of this host to use (absent: all)")
    parser.add_argument("--binary", help="the mtraining to run (absent: build/*/bin/mtraining)")
    parser.add_argument("--rows", default=str(ROWS), help="file that rows are appended to")
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help="no job starts that would end later"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="small, on the CPU; rows are not kept"
    )
    options = parser.parse_args()
    if options.rehearse:
        options.rows = None
        options.gpus = options.gpus or 4
    options.gpus = options.gpus or gpus_here()
    if options.gpus < 1:
        parser.error("no GPU here: --rehearse runs the same commands on the CPU")
    runner = Runner(options)
    {"attention": attention, "dense": dense, "links": links, "train": train}[options.what](runner)
    print(f"{len(runner.rows)} rows in {time.monotonic() - runner.begin:.0f} s", file=sys.stderr)
    return 0 if runner.rows else 1


if __name__ == "__main__":
    sys.exit(main())
