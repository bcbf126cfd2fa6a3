"""Rows of benchmarks as a table and as a picture.

In:   *.jsonl that `mtraining bench` wrote. Out: a Markdown table; a picture (plots.plot_benchmarks). Next: docs/benchmarks/README.md.

    python -m mtraining.benchmarks docs/benchmarks/cpu_attention.jsonl [--plot out.png | out.svg]
"""

from __future__ import annotations

import sys
from pathlib import Path

from mtraining.command_line import Parser, reported
from mtraining.json_lines import read_json_lines

WORK = (
    "mask",
    "dtype",
    "seq_len",
    "query_rows",
    "heads",
    "kv_heads",
    "head_dim",
    "inputs",
    "device",
    "harness",
)


def read_rows(path: Path) -> list[dict]:
    """Rows of attention, one dict a line. Errors: ValueError naming file and line."""
    return [row for _, row in read_json_lines(path, {"case": (str,)})]


def difference(one: dict, other: dict) -> str:
    """The first fact of the work in which two rows differ, or "": without it they must not be compared."""
    for key in WORK:
        if one.get(key) is None or one.get(key) != other.get(key):
            return f"{key}: {one.get(key)} beside {other.get(key)}"
    return ""


def total_ms(row: dict) -> float:
    """Forward, backward and index; what was not measured is left out."""
    return sum(row[key] for key in ("fwd_ms", "bwd_ms", "index_ms") if row.get(key) is not None)


def ratio(peer: dict, row: dict) -> float:
    """How many times longer the peer takes. Errors: ValueError where the work is not the same."""
    why = difference(peer, row)
    if why:
        raise ValueError(f"expected rows of the same work, got {why}")
    return total_ms(peer) / total_ms(row)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(rows: list[dict]) -> str:
    """Markdown; a ratio only where a peer's row of the same work stands in the same list."""
    columns = (
        "peer",
        "pattern",
        "seq_len",
        "dtype",
        "heads",
        "head_dim",
        "density",
        "pairs",
        "fwd_ms",
        "bwd_ms",
        "index_ms",
        "fwd_tflops",
        "bwd_tflops",
        "out_error",
    )
    lines = [
        "| " + " | ".join((*columns, "peer / this", "commit")) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for row in rows:
        peers = [
            p for p in rows if p.get("peer") and not row.get("peer") and not difference(p, row)
        ]
        shown = [_cell(row.get(key)) for key in columns]
        shown[4] = f"{row.get('heads')}/{row.get('kv_heads')}"
        shown += [f"{ratio(peers[0], row):.1f}" if peers else "", _cell(row.get("commit"))]
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m mtraining.benchmarks", description=__doc__.split("\n")[0])
    parser.add_argument("files", type=Path, nargs="+", help="rows, one JSON object a line")
    parser.add_argument(
        "--plot", type=Path, help="also a PNG or SVG: time against density and against length"
    )
    a = parser.parse_args(arguments)

    def work() -> None:
        rows = [row for path in a.files for row in read_rows(path) if row["case"] == "attention"]
        print(table(rows))
        if a.plot:
            from .plots import plot_benchmarks

            plot_benchmarks(rows, a.plot)

    return reported(work)


if __name__ == "__main__":
    sys.exit(main())
