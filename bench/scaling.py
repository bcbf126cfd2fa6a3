"""Scaling over the GPUs of one host: three commands, each under 10 minutes on 8 GPUs, and a fourth that needs one.

    python bench/scaling.py attention     vertical_slash, forward and backward, 1 -> 2 -> 4 -> 8 GPUs: rings, gathers, prefetch; imbalance
    python bench/scaling.py dense         dense rings and torch's context parallel; a slow link between two halves on purpose
    python bench/scaling.py train         train steps of the Qwen2.5-3B shape and of an 8B shape, dense and sparse
    python bench/scaling.py links         one GPU as 2x4 and 4x2 ranks, what leaves a node at set rates: flat beside hierarchical
    python bench/scaling.py table         tables and pictures again, of the rows that are there

Rows are appended to OUT/scaling.jsonl as they come; tables and pictures are OUT/scaling_<command>.md and .svg. What needs more GPUs than
the host has, failed, or found no time gets a row that says so. Rows of the same commit and kind of GPU that are there are not measured
again. --rehearse runs the same commands small, over processes on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "python")]

import scaling_cases  # noqa: E402
import scaling_job  # noqa: E402
import scaling_rows  # noqa: E402

COMMANDS = {
    "attention": scaling_cases.attention_jobs,
    "dense": scaling_cases.dense_jobs,
    "links": scaling_cases.links_jobs,
}
LIMIT_S = 590
LEAST_S = 10  # a job that would have less is not started
RECIPES = {
    "3B": "qwen2.5-3b-512k-two-gpus.toml",
    "8B": "llama-3.1-8b-512k.toml",
    "tiny": "quickstart.toml",
}
# Of what a GPU and the host have: the allocator's rounding and libraries come on top of what is planned.
GPU_SHARE, HOST_SHARE = 0.85, 0.75


@dataclasses.dataclass(frozen=True)
class Host:
    gpus: int
    gpu: str  # its name; "cpu" in a rehearsal
    gpu_bytes: int
    host_bytes: int


class Runner:
    """Runs jobs one after another and keeps their rows; starts none when the time is over."""

    def __init__(self, options: argparse.Namespace, host: Host, commit: str):
        self.options = options
        self.host = host
        self.commit = commit
        self.end_at = time.monotonic() + options.limit_s
        self.file = pathlib.Path(options.out) / "scaling.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        there = scaling_rows.read(self.file)
        self.done = set() if options.again else scaling_rows.done(there, commit, host.gpu)
        self.counts = {"measured": 0, "failed": 0, "not run": 0, "left out": 0, "there": 0}

    def left_s(self) -> float:
        return self.end_at - time.monotonic()

    def keep(self, case: scaling_cases.Case, row: dict, status: str, more: dict) -> None:
        head = {"row": case.name, "run": case.run, "command": self.options.what}
        head |= {"status": status, "gpus": case.gpus}
        host = {"gpus": self.host.gpus, "gpu": self.host.gpu}
        with open(self.file, "a") as file:
            file.write(json.dumps({**case.facts, **row, **more, **head, "host": host}) + "\n")

    def say(
        self, case: scaling_cases.Case, status: str, why: str, more: dict | None = None
    ) -> None:
        self.counts[status] += 1
        row = {"case": "status", "why": why, "commit": self.commit}
        self.keep(case, row, status, more or {})
        if status == "not run":  # counted at the end, one by one in the rows
            return
        print(f"{status}: {case.name}: {why}", file=sys.stderr, flush=True)

    def wanted(self, job: scaling_cases.Job) -> list[scaling_cases.Case]:
        """Cases of a job that are to be measured now; those that cannot be get their row."""
        wanted = []
        for case in job.cases:
            if any(word not in case.name for word in self.options.only):
                continue
            if case.name in self.done:
                self.counts["there"] += 1
            elif case.gpus > self.host.gpus:
                self.say(case, "not run", f"needs {case.gpus} GPUs, this host has {self.host.gpus}")
            else:
                wanted.append(case)
        return wanted

    def measure(self, job: scaling_cases.Job, more: dict | None = None) -> None:
        """All cases of a job. One that fails gets its row, and those behind it are tried in a job of their own."""
        more = more or {}
        pending = self.wanted(job)
        row_limit_s = self.options.row_limit_s or job.row_limit_s
        while pending:
            if self.left_s() < LEAST_S:
                for case in pending:
                    self.say(case, "left out", "the time of the whole run was over", more)
                return
            measured: list[scaling_cases.Case] = []

            def on_line(line: str, pending=pending, measured=measured) -> None:
                if not line.startswith("{"):
                    return
                row = json.loads(line)
                if row["case"] in scaling_rows.MEASURED:
                    case = pending[len(measured)]
                    measured.append(case)
                    self.counts["measured"] += 1
                    print(
                        f"measured, {self.left_s():.0f} s left: {case.name}",
                        file=sys.stderr,
                        flush=True,
                    )
                else:  # phases lie behind their row, train steps before it
                    case = pending[max(0, len(measured) - 1)]
                self.keep(case, row, "measured", more)

            commands, environments = self.ranks_of(job, pending)
            why = scaling_job.run_job(
                commands, environments, on_line, row_limit_s, self.end_at, ROOT
            )
            pending = pending[len(measured) :]
            if pending:
                self.say(pending[0], "failed", why or "the program ended without its row", more)
                pending = pending[1:]
            elif why:
                print(f"{job.cases[0].name}: {why}", file=sys.stderr, flush=True)

    def ranks_of(self, job: scaling_cases.Job, cases: list[scaling_cases.Case]):
        """A command and an environment for each process of a job."""
        ranks = 1 if job.virtual or job.program == "train" else job.gpus
        words = [f"--{key}={value}" for key, value in job.flags.items()]
        if job.program == "peer":
            script = str(ROOT / "bench" / "context_parallel_peer.py")
            command = [sys.executable, script, *words]
        elif job.program == "train":
            command = [binary_of(self.options), "bench", "train", *words, *job.switches]
        else:
            place = "--virtual" if job.virtual else "--topology"
            command = [binary_of(self.options), "bench", "ring", place]
            command += [cases[0].facts["topology"], *words, *job.switches]
            for case in cases:
                command += ["--variant", case.variant]
        port = scaling_job.free_port()
        environments = []
        for rank in range(ranks):
            environment = {"OMP_NUM_THREADS": "1"} if job.program != "train" else {}
            if job.program == "peer" and "MTRAINING_COMMIT" not in os.environ:
                environment["MTRAINING_COMMIT"] = self.commit
            if job.program != "train" and not job.virtual:
                environment |= scaling_job.rank_environment(rank, ranks, port)
            if job.halves_apart:
                environment |= scaling_job.half_environment(rank, ranks)
            environments.append(environment)
        return [command] * ranks, environments


def binary_of(options: argparse.Namespace) -> str:
    if options.binary:
        return str(pathlib.Path(options.binary).resolve())
    folder = os.environ.get("MTRAINING_BINARY_DIR")
    places = (
        [pathlib.Path(folder) / "mtraining", pathlib.Path(folder) / "bin" / "mtraining"]
        if folder
        else []
    )
    builds = ("cpu", "cuda") if options.rehearse else ("cuda", "cpu")
    places += [ROOT / "build" / build / "bin" / "mtraining" for build in builds]
    for path in places:
        if path.is_file():
            return str(path.resolve())
    raise SystemExit("scaling.py: no build/*/bin/mtraining: run ./dev build, or give --binary")


def train_settings(case: scaling_cases.TrainCase, gpus: int) -> dict:
    """Keys of the configuration that a case changes in its recipe; attention's are train_attention()'s."""
    cp_size = gpus // case.dp_size
    settings = {
        "parallel.cp_size": cp_size,
        "parallel.cp_inner_size": cp_size,
        "parallel.dp_size": case.dp_size,
        "parallel.zero": 2 if gpus > 1 else 0,
        "train.seq_len": case.seq_len,
        "train.global_batch_size": case.dp_size,
        "data.document_mask": "false",
        "attention.deterministic": "false",
        "trace.example_layer": -1,
    }
    if case.shape != "tiny":
        settings |= {"train.mlp_tile": 16384, "train.loss_chunk": 4096}
        settings |= {"train.peak_flops_per_s": "989.4e12"}
    return settings


def set_flags(settings: dict) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def planned(
    options: argparse.Namespace, recipe: pathlib.Path, gpus: int, settings: dict, density: float
) -> dict:
    """`mtraining plan` of a setting. Errors: RuntimeError with its words."""
    command = [
        binary_of(options),
        "plan",
        "--config",
        str(recipe),
        "--topology",
        f"1x{gpus}",
        "--json",
    ]
    command += ["--density", f"{density:g}", *set_flags(settings)]
    if density >= 1:
        command += set_flags({"attention.pattern": "dense"})
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise RuntimeError(scaling_job.cause_in(done.stderr))
    return json.loads(done.stdout)["plan"]


def host_bytes_of(plan: dict) -> int:
    return sum(item["bytes"] for item in plan["memory"].values() if item["on_host"])


class DoesNotFit(RuntimeError):
    pass


def first_that_fits(host: Host, plan_of, choices: list[dict]) -> tuple[dict, dict]:
    """The first of `choices` (quickest first) whose memory the host and its GPUs hold, and its plan.

    Errors: DoesNotFit that says what the least would take.
    """
    least = None
    for choice in choices:
        plan = plan_of(choice)
        fits_host = host_bytes_of(plan) * host.gpus <= HOST_SHARE * host.host_bytes
        if plan["device_bytes"] <= GPU_SHARE * host.gpu_bytes and fits_host:
            return choice, plan
        if least is None or plan["device_bytes"] < least["device_bytes"]:
            least = plan
    raise DoesNotFit(
        f"no setting fits: the least takes {least['device_bytes'] / 1e9:.1f} GB a GPU of {host.gpu_bytes / 1e9:.1f} and "
        f"{host_bytes_of(least) / 1e9:.1f} GB of host memory a GPU"
    )


def layers_and_setting(host: Host, plan_of, layers: int) -> tuple[int, dict, dict]:
    """All layers and their setting, else half of them, a quarter, ..: so many, the setting, its plan. Errors: DoesNotFit."""
    count = layers
    while True:
        number = {"model.num_hidden_layers": count}
        try:
            choices = scaling_cases.memory_choices(count)
            found = first_that_fits(
                host, lambda choice, number=number: plan_of({**choice, **number}), choices
            )
            return count, *found
        except DoesNotFit:
            if count == 1:
                raise
            count //= 2


def write_pattern(path: pathlib.Path, seq_len: int, heads: int, density: float) -> None:
    from mtraining.pattern_files import make_pattern

    path.write_text(json.dumps(make_pattern(seq_len, heads, density)))


def shape_of(recipe: pathlib.Path) -> dict:
    import tomllib

    return tomllib.loads(recipe.read_text())["model"]


def train_case(runner: Runner, folder: pathlib.Path, train: scaling_cases.TrainCase) -> None:
    """Steps of one shape through `mtraining bench train`: whole, or of as many layers as the budget has time for."""
    options, gpus = runner.options, runner.host.gpus
    needed = gpus if train.dp_size == 1 else max(gpus, 2 * train.dp_size)
    case = scaling_cases.Case("train", needed, train.facts)
    recipe = ROOT / "recipes" / RECIPES[train.shape]
    shape = shape_of(recipe)
    layers = shape["num_hidden_layers"]
    if not runner.wanted(scaling_cases.Job("train", (case,), {})):
        return
    settings = train_settings(train, gpus)
    steps = options.warm_up + 1

    def plan_of(changes: dict) -> dict:
        return planned(options, recipe, gpus, {**settings, **changes}, train.density)

    try:
        fitting, choice, plan = layers_and_setting(runner.host, plan_of, layers)
        budget_s = min(train.budget_s, runner.left_s() - 20)
        run = options.layers or scaling_cases.layers_that_fit(
            fitting, plan["step_s"], steps, budget_s
        )
        # So many of the layers that run as the plan has of its own.
        on_host = min(run, -(-choice["train.offload_layers"] * run // fitting))
        choice = {**choice, "train.offload_layers": on_host}
        plan = plan_of({**choice, "model.num_hidden_layers": run})
    except RuntimeError as error:
        runner.say(case, "failed", str(error))
        return
    settings |= choice
    if train.density < 1:
        pattern = folder / f"{train.shape}_{train.seq_len}_{train.density:g}.json"
        if not pattern.exists():
            write_pattern(pattern, train.seq_len, shape["num_attention_heads"], train.density)
        settings |= {"attention.pattern": "fixed", "attention.pattern_file": pattern}
    else:
        settings |= {"attention.pattern": "dense"}
    flags = {"config": recipe, "warm-up": options.warm_up, "steps": 1, "nproc": gpus}
    flags |= {"device": "cpu" if options.rehearse else "cuda", "layers": run if run < layers else 0}
    more = {
        "recompute": choice["train.recompute"],
        "offload_layers": choice["train.offload_layers"],
        "offload_optimizer": choice["parallel.offload_optimizer"],
        "plan_bytes": plan["device_bytes"],
        "plan_step_s": plan["step_s"],
        "warm_up": options.warm_up,
    }
    if run < layers:
        more["scaled"] = f"{run} of {layers} layers ran, the step of all is computed"
        if fitting < layers:
            more["scaled"] += f"; {layers} layers do not fit this host, {fitting} do"
    print(f"{case.name}: {run} of {layers} layers, {choice}", file=sys.stderr, flush=True)
    job = scaling_cases.Job(
        "train",
        (case,),
        flags,
        ("--breakdown", *set_flags(settings)),
        row_limit_s=90 + 2 * plan["step_s"],
    )
    runner.measure(job, more)


def tables(out: pathlib.Path, commands: list[str]) -> None:
    rows = scaling_rows.read(out / "scaling.jsonl")
    for command in commands:
        if not any(row["command"] == command for row in rows):
            continue
        table = scaling_rows.table_of(command, rows)
        head = f"<!-- python bench/scaling.py table: of scaling.jsonl -->\n# Scaling: {command}\n\n"
        (out / f"scaling_{command}.md").write_text(head + table + "\n")
        print(table)
        try:
            scaling_rows.plot(command, rows, out / f"scaling_{command}.svg")
        except ImportError:
            print("scaling.py: no picture: matplotlib is not installed", file=sys.stderr)


def find_host(options: argparse.Namespace) -> Host:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = pathlib.Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        memory = min(memory, int(limit.read_text()))
    if options.rehearse:
        return Host(options.gpus or 4, "cpu", memory, memory)
    import torch

    found = torch.cuda.device_count()
    if options.gpus is not None and options.gpus > found:
        raise SystemExit(
            f"scaling.py: --gpus: expected at most the {found} of this host, got {options.gpus}"
        )
    if found == 0:
        raise SystemExit("scaling.py: no GPU here: --rehearse runs the same commands on the CPU")
    properties = torch.cuda.get_device_properties(0)
    return Host(options.gpus or found, properties.name, properties.total_memory, memory)


def find_commit() -> str:
    """Of the tree; "" where it is not known or differs from its commit: rows of it are never taken for measured."""
    named = os.environ.get("MTRAINING_COMMIT")
    if named is not None:
        return named if named.isalnum() else ""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run(
        [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    changed = subprocess.run(
        [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False
    )
    return "" if changed.stdout.strip() else commit.stdout.strip()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=[*COMMANDS, "train", "table"])
    parser.add_argument("--gpus", type=int, help="GPUs of this host to use (absent: all)")
    parser.add_argument("--binary", help="the mtraining to run (absent: build/*/bin/mtraining)")
    parser.add_argument(
        "--out", help="folder of rows, tables and pictures (absent: docs/benchmarks)"
    )
    parser.add_argument(
        "--limit-s", type=float, default=LIMIT_S, help="the run ends then, whatever is under way"
    )
    parser.add_argument(
        "--row-limit-s",
        type=float,
        help="a job ends when no row has come for so long (absent: its own)",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="only rows whose name has this; may be repeated: all of them",
    )
    parser.add_argument(
        "--again", action="store_true", help="also rows that this commit has already"
    )
    parser.add_argument(
        "--layers", type=int, help="train: so many layers instead of what the budget has time for"
    )
    parser.add_argument("--warm-up", type=int, default=1, help="train: steps before the timed one")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="small, on the CPU; rows go to --out, else to a folder that goes away",
    )
    options = parser.parse_args(arguments)
    if options.gpus is not None and options.gpus < 1:
        parser.error(f"--gpus: expected at least 1, got {options.gpus}")
    if options.warm_up < 0:
        parser.error(f"--warm-up: expected at least 0, got {options.warm_up}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory() as folder:
        if options.out is None:
            options.out = folder if options.rehearse else ROOT / "docs" / "benchmarks"
        out = pathlib.Path(options.out).resolve()
        options.out = out
        if options.what == "table":
            tables(out, [*COMMANDS, "train"])
            return 0
        runner = Runner(options, find_host(options), find_commit())
        sizes = scaling_cases.REHEARSAL if options.rehearse else scaling_cases.Sizes()
        if options.what == "train":
            cases = scaling_cases.TRAIN_REHEARSAL if options.rehearse else scaling_cases.TRAIN
            for case in cases:
                train_case(runner, pathlib.Path(folder), case)
        else:
            for job in COMMANDS[options.what](sizes):
                runner.measure(job)
        tables(out, [options.what])
    counts = ", ".join(f"{count} {status}" for status, count in runner.counts.items() if count)
    print(f"rows: {counts or 'none'}; {options.limit_s - runner.left_s():.0f} s", file=sys.stderr)
    return 0 if runner.counts["measured"] + runner.counts["there"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
