"""The main job on this machine's CPU: four ranks (2 x 2, Gloo) train one small model twice, dense and vertical_slash.

In:   the built executable, recipes/quickstart.toml, the Python sources of installed packages.
Out:  runs/quickstart/: token files, two runs (metrics.jsonl, trace.json, summary.json), comparison.png; a table.
Next: README tells how to read it.

Both runs start from one seed and see the same batches in the same order.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from mtraining.__main__ import candidates
from mtraining.plots import plot_comparison, read_metrics
from mtraining.prepare import Prepared, prepare_bytes

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = ("dense", "vertical_slash")
LAST = 20  # train steps that the means of the table run over


class QuickstartError(Exception):
    """Said in one line; the exit code is the failed command's, or 1."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


def find_binary() -> Path:
    """The executable that `python -m mtraining` runs."""
    for path in candidates():
        if path.is_file():
            return path
    raise QuickstartError("no executable in build/*/bin: run ./dev build first", 2)


def train(binary: Path, data: Prepared, pattern: str, out: Path, extra: list[str]) -> None:
    command = [str(binary), "train", "--config", str(ROOT / "recipes" / "quickstart.toml")]
    command += ["--nproc", "4", "--out", str(out), "--attention.pattern", pattern]
    command += [f'--data.train="{data.train}"', f'--data.valid="{data.valid}"', *extra]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code != 0:
        raise QuickstartError(f"the {pattern} run ended with status {code}", code)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def read_summary(run: Path) -> dict:
    with open(run / "summary.json", encoding="utf-8") as text:
        return json.load(text)


def table_row(run: Path) -> dict[str, float]:
    rows = read_metrics(run)
    last = rows[-LAST:]
    recalls = [r["attention_recall"] for r in last if r["attention_recall"] is not None]
    return {
        "train loss": mean([r["loss"] for r in last]),
        "held-out loss": rows[-1]["valid_loss"],
        "tokens_per_s": mean([r["tokens_per_s"] for r in last]),
        "attention_density": mean([r["attention_density"] for r in last]),
        "recall (other rows)": mean(recalls) if recalls else float("nan"),
        "worker_imbalance": mean([r["worker_imbalance"] for r in last]),
        "step_imbalance": mean([r["step_imbalance"] for r in last]),
    }


def print_table(rows: dict[str, dict[str, float]]) -> None:
    columns = list(next(iter(rows.values())))
    widths = [max(len(column), 9) for column in columns]
    first = max(len(name) for name in rows)
    print(" " * first, *(c.rjust(w) for c, w in zip(columns, widths, strict=True)), sep="  ")
    for name, row in rows.items():
        cells = [
            (f"{value:.0f}" if column == "tokens_per_s" else f"{value:.3f}").rjust(width)
            for (column, value), width in zip(row.items(), widths, strict=True)
        ]
        print(name.ljust(first), *cells, sep="  ")


def density_curve(run: Path, points: int = 10) -> str:
    rows = read_metrics(run)
    picked = sorted({round(i * (len(rows) - 1) / (points - 1)) for i in range(points)})
    return "  ".join(f"{rows[i]['train_step']}: {rows[i]['attention_density']:.3f}" for i in picked)


def report(runs: dict[str, Path], data: Prepared) -> bool:
    """Prints everything the two runs showed; returns whether each expectation held."""
    rows = {name: table_row(run) for name, run in runs.items()}
    print()
    print_table(rows)
    sparse = read_summary(runs["vertical_slash"])
    own = next(e for e in sparse["evaluations"] if e["pattern"] == "vertical_slash")
    other = [e for e in sparse["evaluations"] if e["pattern"] == "vertical_slash" and e is not own]
    print(f"\ndensity by train step (p {own['p']}): {density_curve(runs['vertical_slash'])}")
    for e in (own, *other):
        layers = "  ".join(f"{d:.3f}" for d in e["density_by_layer"])
        print(
            f"held-out at p {e['p']}: loss {e['loss']:.4f}, density {mean(e['density_by_layer']):.3f} "
            f"(by layer {layers}), recall on sampled other rows {mean(e['recall_by_layer']):.3f} "
            f"(by layer {'  '.join(f'{r:.3f}' for r in e['recall_by_layer'])})"
        )
    gap = abs(rows["vertical_slash"]["train loss"] / rows["dense"]["train loss"] - 1)
    last_density = read_metrics(runs["vertical_slash"])[-1]["attention_density"]
    checks = {
        f"both held-out losses below the byte-unigram entropy {data.unigram_entropy:.3f}": all(
            row["held-out loss"] < data.unigram_entropy for row in rows.values()
        ),
        f"train losses within 2 % ({100 * gap:.2f} %)": gap < 0.02,
        f"last density {last_density:.3f} below .7": last_density < 0.7,
        f"mean recall {mean(own['recall_by_layer']):.3f} at least p - .05": mean(
            own["recall_by_layer"]
        )
        >= own["p"] - 0.05,
    }
    for e in other:
        value = mean(e["density_by_layer"])
        checks[f"density {value:.3f} of the same weights at p {e['p']} below .5"] = value < 0.5
    print()
    for text, held in checks.items():
        print(f"{'yes' if held else 'NO '}  {text}")
    return all(checks.values())


def run(out: Path, extra: list[str]) -> bool:
    start = time.monotonic()
    binary = find_binary()
    data = prepare_bytes(out / "data")
    print(
        f"text: Python sources of {data.package}, {data.train_tokens} bytes to train on, "
        f"{data.valid_tokens} held out with a byte-unigram entropy of {data.unigram_entropy:.3f} nats",
        flush=True,
    )
    runs = {pattern: out / pattern for pattern in PATTERNS}
    for pattern, folder in runs.items():
        if (folder / "metrics.jsonl").exists():
            shutil.rmtree(
                folder
            )  # a run's folder is written once; this one is the quickstart's own
        train(binary, data, pattern, folder, extra)
    held = report(runs, data)
    picture = out / "comparison.png"
    plot_comparison(runs, runs["vertical_slash"] / "example", data.unigram_entropy, picture)
    shown = os.path.relpath(out, ROOT)
    print(f"\nmetrics  {shown}/{{dense,vertical_slash}}/metrics.jsonl")
    print(f"trace    {shown}/vertical_slash/trace.json  (open in ui.perfetto.dev)")
    print(f"picture  {shown}/comparison.png")
    print(f"took {time.monotonic() - start:.0f} s")
    return held


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mtraining.quickstart", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "quickstart")
    arguments, extra = parser.parse_known_args()
    try:
        return 0 if run(arguments.out.resolve(), extra) else 1
    except (QuickstartError, ValueError, OSError) as error:
        print(f"mtraining: error: {error}", file=sys.stderr)
        return getattr(error, "code", 1)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
