"""Rows of scaling runs: which are there already, what they say together, as a table and as a picture.

In:   scaling.jsonl. Out: names of rows that need not be measured again; efficiency against one GPU; Markdown; a picture.
Next: docs/benchmarks/scaling.md.

A row of a scaling run has `row` (its case's name), `run`, `gpus`, `status` ("measured", "failed", "not run", "left out") with `why`, and
`host` (how many GPUs of which kind). Rows without `row` are of other programs and are passed over.
"""

from __future__ import annotations

import json
import pathlib
import statistics

MEASURED = ("ring", "train")


def read(path: pathlib.Path) -> list[dict]:
    """Rows that have a name, in their order; none where there is no file. Errors: ValueError naming the line."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not valid JSON: {error}") from None
        if isinstance(row, dict) and "row" in row:
            rows.append(row)
    return rows


def done(rows: list[dict], commit: str, gpu: str) -> set[str]:
    """Names that were measured at this commit, of an unchanged tree, on such GPUs."""
    if not commit:
        return set()
    return {
        row["row"]
        for row in rows
        if row["status"] == "measured"
        and row["case"] in MEASURED
        and row.get("commit") == commit
        and not row.get("modified")
        and row["host"]["gpu"] == gpu
    }


def latest(rows: list[dict]) -> list[dict]:
    """One row a name and kind of GPU, in the order of first appearance: the last measured one, else the last; `phases` by name, ms.

    Of a train case that did not come to its end the last step stands for it.
    """
    kept: dict[tuple, dict] = {}
    for row in rows:
        key = (row["row"], row["host"]["gpu"])
        if row["case"] in ("ring phase", "train phase"):
            at = "ms_largest_rank" if row["case"] == "ring phase" else "ms"
            if key in kept:
                kept[key].setdefault("phases", {})[row["phase"]] = row[at]
            continue
        if row["case"] not in (*MEASURED, "train step", "status"):
            continue
        before = kept.get(key)
        whole = before is not None and before["case"] in MEASURED
        if before is not None and before["status"] == "measured":
            same = before.get("commit") == row.get("commit")
            if row["status"] != "measured" and (whole or same):
                if not whole:  # some steps came, then it failed
                    before["why"] = row.get("why", "")
                continue
            if row["case"] == "train step" and whole and same:
                continue
        kept[key] = dict(row)
    return list(kept.values())


def total_ms(row: dict) -> float:
    return row["fwd_ms"] + row["bwd_ms"]


def alone_ms(row: dict, rows: list[dict]) -> dict[str, float] | None:
    """fwd_ms, bwd_ms and both of one GPU at the same work, commit and kind of GPU; medians where there are several."""
    same = [
        other
        for other in rows
        if other["case"] == "ring"
        and other["status"] == "measured"
        and other["gpus"] == 1
        and other["run"] == ("dense" if row["run"] == "dense" else "attention")
        and "peer" not in other
        and all(
            other.get(key) == row.get(key)
            for key in ("seq_len", "pattern", "heads", "kv_heads", "head_dim", "dtype", "commit")
        )
        and other["host"]["gpu"] == row["host"]["gpu"]
    ]
    if not same:
        return None
    median = statistics.median
    return {
        "fwd_ms": median(other["fwd_ms"] for other in same),
        "bwd_ms": median(other["bwd_ms"] for other in same),
        "both": median(total_ms(other) for other in same),
    }


def efficiency(row: dict, rows: list[dict]) -> dict[str, float] | None:
    """One GPU's time over `gpus` times this one's: forward, backward, both. Ranks that share a GPU: those ranks' number instead.

    None where one GPU was not measured at the same work and commit.
    """
    alone = alone_ms(row, rows)
    if alone is None:
        return None
    ranks = row["gpus"]
    if "virtual" in row:
        nodes, each = map(int, row["virtual"].split("x"))
        ranks = nodes * each
    return {
        "fwd": alone["fwd_ms"] / ranks / row["fwd_ms"],
        "bwd": alone["bwd_ms"] / ranks / row["bwd_ms"],
        "both": alone["both"] / ranks / total_ms(row),
    }


def link_ms(row: dict, backward: bool) -> tuple[float, float]:
    """How long a rank's link to other nodes carries what it sends, and the share of the work that can begin only when the last K and V are there."""
    nodes, ranks = map(int, row["virtual"].split("x"))
    world = nodes * ranks
    kv_bytes = row["seq_len"] // world * row["kv_heads"] * row["head_dim"] * 2 * 2
    flat = row["ring"] == "flat"
    hops = world - 1 if flat else nodes - 1
    last = (world - 1) % row["launch_shards"] or row["launch_shards"]
    share = last / world if flat else 1 / nodes
    if flat and row["launch_shards"] >= world:  # one launch, of all
        share = 1.0
    sent = hops * kv_bytes
    if backward:  # gradients, float32, make a hop more
        sent += (hops + 1) * 2 * kv_bytes
    return sent / row["outer_gb_per_s"] * 1e-6, share


def _ring_words(row: dict) -> str:
    if row.get("peer"):
        return f"{row['peer']}, {row['rotate']}" if "rotate" in row else row["peer"]
    if "count" in row:
        return f"{row['count']} rings"
    words = [row["topology"], row["ring"]]
    words += [
        row[key] for key in ("inner", "transfers") if row.get(key) not in (None, "collectives")
    ]
    if "outer_gb_per_s" in row:
        words.append(f"{row['outer_gb_per_s']:g} GB/s")
    return " ".join(words)


def _failed(row: dict) -> str:
    return (
        ""
        if row["status"] == "measured" and not row.get("why")
        else f"{row['status']}: {row.get('why', '')}"
    )


def _table(head: list[str], lines: list[list[str]]) -> str:
    text = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(text + ["| " + " | ".join(line) + " |" for line in lines])


def _gathered(rows: list[dict]) -> list[dict]:
    """Neighbours that one thing kept from being measured as one row of all their rings."""
    gathered: list[dict] = []
    for row in rows:
        alike = ("run", "seq_len", "gpus", "status", "why")
        last = gathered[-1] if gathered else {}
        if row["status"] == "measured" or any(row.get(k) != last.get(k) for k in alike):
            gathered.append(dict(row))
            continue
        last["count"] = last.get("count", 1) + 1
    return gathered


def ring_table(rows: list[dict]) -> str:
    """Rings and their peers; one line a row, also of those that were not measured."""
    lines = []
    for row in _gathered(rows):
        line = [row["run"], f"{row.get('seq_len', '')}", str(row["gpus"]), _ring_words(row)]
        line += [
            str(row.get("prefetch_steps", "")),
            " ".join(row[key] for key in ("computed", "between_halves") if key in row),
        ]
        if row["status"] != "measured":
            lines.append([*line, "", "", "", "", "", "", _failed(row)])
            continue
        share = efficiency(row, rows) if "peer" not in row and row["run"] != "slow link" else None
        tflops = (
            f"{row['fwd_tflops'] / row['gpus']:.0f} / {row['bwd_tflops'] / row['gpus']:.0f}"
            if row["run"] != "launches alone"
            else ""
        )
        phases = row.get("phases", {})
        waits = [phases.get(f"{way} wait") for way in ("forward", "backward")]
        lines.append(
            [
                *line,
                f"{row['fwd_ms']:.2f} + {row['bwd_ms']:.2f}",
                tflops,
                ""
                if share is None
                else f"{share['both']:.3f} ({share['fwd']:.3f}, {share['bwd']:.3f})",
                str(row.get("worker_imbalance_time", "")),
                "" if waits == [None, None] else " + ".join(f"{w or 0:.1f}" for w in waits),
                str(row.get("commit") or ""),
                "",
            ]
        )
    head = [
        "run",
        "tokens",
        "GPUs",
        "ring",
        "prefetch",
        "link",
        "fwd + bwd, ms",
        "fwd / bwd TFLOP/s a GPU",
    ]
    head += [
        "efficiency (fwd, bwd)",
        "imbalance, time",
        "waits, ms",
        "commit",
        "not measured because",
    ]
    return _table(head, lines)


def train_table(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        line = [row["shape"], str(row["seq_len"]), f"{row['density']:g}"]
        split = f"{row['gpus']}" + (f" (dp {row['dp_size']})" if row.get("dp_size", 1) > 1 else "")
        line.append(split)
        if row["status"] != "measured":
            lines.append([*line, "", "", "", "", "", "", "", "", _failed(row)])
            continue
        whole = row["case"] == "train"
        layers = f"{row['layers_run']}" + (f" of {row['layers']}" if "layers" in row else "")
        memory = max(row.get("process_memory_bytes") or 0, row.get("peak_tensor_bytes") or 0)
        mfu = f"{row['mfu']:.3f}" if row.get("mfu") else ""
        if row.get("mfu_outside_attention"):
            mfu += f" ({row['mfu_outside_attention']:.3f})"
        lines.append(
            [
                *line,
                f"{row['recompute']}, {row['offload_layers']} layers"
                + (", optimizer" if row["offload_optimizer"] == "true" else "")
                + " in host memory",
                layers,
                f"{row['step_ms'] * 1e-3:.2f}"
                if whole
                else f"{row['step_s']:.2f} (step {row['train_step']})",
                f"{row['step_ms_all_layers'] * 1e-3:.2f}" if whole else "",
                f"{row['tokens_per_s']:.0f}",
                mfu,
                f"{memory / 1e9:.1f} ({(row.get('peak_tensor_bytes') or 0) / 1e9:.1f}; {row['plan_bytes'] / 1e9:.1f})",
                str(row.get("commit") or ""),
                row.get("why", ""),
            ]
        )
    head = [
        "shape",
        "tokens",
        "density",
        "GPUs",
        "kept",
        "layers run",
        "step, s",
        "all layers, s",
        "tokens/s",
    ]
    head += [
        "MFU (outside attention)",
        "memory, GB (tensors; plan)",
        "commit",
        "not measured because",
    ]
    return _table(head, lines)


def links_table(rows: list[dict]) -> str:
    """Ranks of one GPU with rates between nodes; beside what was measured what the bytes and the work foretell."""
    free = {
        (row["virtual"], row["ring"]): row
        for row in rows
        if row["status"] == "measured" and "outer_gb_per_s" not in row
    }
    lines = []
    for row in rows:
        if row["status"] != "measured":
            lines.append([_ring_words(row), *[""] * 6, _failed(row)])
            continue
        line = [f"{row['virtual']} {row['ring']}", f"{row.get('outer_gb_per_s', 'no limit')}"]
        for backward, key, phase in ((False, "fwd_ms", "forward"), (True, "bwd_ms", "backward")):
            foretold = ""
            if "outer_gb_per_s" in row and (row["virtual"], row["ring"]) in free:
                alone = free[row["virtual"], row["ring"]][key]
                link, share = link_ms(row, backward)
                # Backward ends with a hop under which nothing is left to do; its share of the link's time is small beside the sum.
                foretold = f"{max(alone, link + (0 if backward else share * alone)):.1f}"
            line += [
                f"{row[key]:.1f}",
                foretold,
                f"{row.get('phases', {}).get(phase + ' wait', 0):.1f}",
            ]
        lines.append([*line, ""])
    head = [
        "ranks",
        "GB/s between nodes",
        "fwd ms",
        "foretold",
        "waiting",
        "bwd ms",
        "foretold",
        "waiting",
        "not measured because",
    ]
    return _table(head, lines)


def table_of(command: str, rows: list[dict]) -> str:
    own = [row for row in latest(rows) if row["command"] == command]
    makers = {
        "attention": ring_table,
        "dense": ring_table,
        "links": links_table,
        "train": train_table,
    }
    return makers[command](own)


def plot(command: str, rows: list[dict], out: pathlib.Path) -> bool:
    """A picture of a command's measured rows; False where there is nothing to draw. Errors: ImportError without matplotlib."""
    own = [r for r in latest(rows) if r["command"] == command and r["status"] == "measured"]
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.fonttype"] = "none"
    series: dict[tuple, list[tuple[float, float]]] = {}
    if command == "attention":
        y_words = "efficiency against one GPU, forward + backward"
        for row in own:
            share = efficiency(row, own)
            if share and row["run"] == "attention":
                words = _ring_words(row).split(" ", 1)[-1] if row["gpus"] > 1 else "one GPU"
                key = (row["seq_len"], words, row["prefetch_steps"])
                series.setdefault(key, []).append((row["gpus"], share["both"]))
    elif command == "dense":
        y_words = "TFLOP/s a GPU, forward + backward"
        for row in own:
            if row["run"] == "dense":
                flops = row["fwd_tflops"] * row["fwd_ms"] + row["bwd_tflops"] * row["bwd_ms"]
                rate = flops / total_ms(row) / row["gpus"]
                words = _ring_words(row) if "peer" in row else _ring_words(row).split(" ", 1)[-1]
                series.setdefault((row["seq_len"], words), []).append((row["gpus"], rate))
    elif command == "links":
        y_words = "forward + backward, ms"
        for row in own:
            if "outer_gb_per_s" in row:
                key = (row["virtual"], row["ring"])
                series.setdefault(key, []).append((row["outer_gb_per_s"], total_ms(row)))
    else:
        y_words = "tokens/s, all layers"
        for row in own:
            key = (
                row["shape"],
                f"density {row['density']:g}",
                f"dp {row.get('dp_size', 1)}, {row['gpus']} GPUs",
            )
            series.setdefault(key, []).append((row["seq_len"], row["tokens_per_s"]))
    if not series:
        return False
    figure, axes = plt.subplots(figsize=(8.5, 4.5), constrained_layout=True)
    for key, points in sorted(series.items(), key=str):
        points.sort()
        axes.plot(*zip(*points, strict=True), "o-", ms=3, lw=0.8, label=", ".join(map(str, key)))
    x_words = {"links": "GB/s between nodes", "train": "tokens"}.get(command, "GPUs")
    axes.set(xlabel=x_words, ylabel=y_words)
    if command in ("links", "train"):
        axes.set_xscale("log")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(out, dpi=110)
    plt.close(figure)
    return True
