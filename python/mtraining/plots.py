"""Pictures: of a run its loss curves, and one head's attention beside the mask that was computed; of a needle test its heat map.

In:   metrics.jsonl of runs; <run>/example/{q.npy, k.npy, index.json}; rows of mtraining.task_scores. Out: a PNG. Next: the reader.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def read_metrics(run: Path) -> list[dict]:
    """One dict a train step."""
    with open(run / "metrics.jsonl", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def attention_map(q: np.ndarray, k: np.ndarray, scale: float, cells: int) -> np.ndarray:
    """Causal softmax(q k^T scale), summed over keys and averaged over queries of cells x cells squares: [cells, cells]."""
    n = q.shape[0]
    edges = np.linspace(0, n, cells + 1).astype(int)
    result = np.zeros((cells, cells))
    for row in range(cells):
        low, high = edges[row], edges[row + 1]
        scores = (q[low:high] @ k[:high].T) * scale
        scores[np.arange(low, high)[:, None] < np.arange(high)[None, :]] = -np.inf
        scores -= scores.max(axis=1, keepdims=True)
        weights = np.exp(scores)
        weights /= weights.sum(axis=1, keepdims=True)
        mean = np.zeros(n)
        mean[:high] = weights.mean(axis=0)
        result[row] = np.add.reduceat(mean, edges[:-1])
    return result


def mask_map(index: dict, cells: int) -> np.ndarray:
    """Share of each cell's (query, key) pairs that the index computes, from its definition: [cells, cells]."""
    n, block = index["seq_len"], index["block"]
    num_blocks = -(-n // block)
    on = np.zeros(num_blocks, dtype=bool)
    on[index["diagonals"]] = True
    column = np.zeros(n, dtype=bool)
    column[index["columns"]] = True
    edges = np.linspace(0, n, cells + 1).astype(int)
    keys = np.arange(n)
    result = np.zeros((cells, cells))
    for row in range(cells):
        total = np.zeros(n)
        for query in range(edges[row], edges[row + 1]):
            distance = query // block - keys // block
            seen = (distance >= 0) & (on[np.clip(distance, 0, None)] | column) & (keys <= query)
            total += seen
        widths = np.diff(edges)
        result[row] = np.add.reduceat(total, edges[:-1]) / (widths * widths[row])
    return result


def plot_comparison(runs: dict[str, Path], example: Path, unigram: float, out: Path) -> None:
    """Loss curves of `runs` (name -> folder) on the left, the example head's attention and mask on the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    figure, (losses, attention, mask) = plt.subplots(
        1, 3, figsize=(15, 4.6), width_ratios=[1.4, 1, 1], constrained_layout=True
    )
    for (name, folder), style in zip(runs.items(), ("-", "--", ":"), strict=False):
        rows = [row for row in read_metrics(folder) if row["loss"] is not None]
        steps = [row["train_step"] for row in rows]
        losses.plot(steps, [row["loss"] for row in rows], style, label=f"{name}, train", lw=1.2)
        held = [(r["train_step"], r["valid_loss"]) for r in rows if r["valid_loss"] is not None]
        if held:
            losses.plot(*zip(*held, strict=True), "o", ms=4, label=f"{name}, held-out")
    losses.axhline(unigram, color="gray", lw=0.8, label=f"byte-unigram entropy {unigram:.2f}")
    losses.set_ylim(
        top=min(losses.get_ylim()[1], 2 * unigram)
    )  # the first steps would hide the rest
    losses.set(xlabel="train step", ylabel="loss, nats a byte", title="loss")
    losses.legend(fontsize=8)
    with open(example / "index.json", encoding="utf-8") as text:
        index = json.load(text)
    q, k = np.load(example / "q.npy"), np.load(example / "k.npy")
    cells = min(128, index["seq_len"])
    weights = attention_map(q, k, index["softmax_scale"], cells)
    top = weights.max()
    image = attention.imshow(np.maximum(weights, top * 1e-5), norm=LogNorm(top * 1e-4, top))
    where = f"layer {index['layer']} head {index['head']}"
    attention.set(title=f"attention, {where}", xlabel="key", ylabel="query", xticks=[], yticks=[])
    figure.colorbar(image, ax=attention, shrink=0.8)
    mask.imshow(mask_map(index, cells), cmap="gray_r", vmin=0, vmax=1)
    mask.set(
        title=f"computed: {len(index['diagonals'])} diagonals, {len(index['columns'])} columns",
        xlabel="key",
        ylabel="query",
        xticks=[],
        yticks=[],
    )
    figure.savefig(out, dpi=110)
    plt.close(figure)


def plot_benchmarks(rows: list[dict], out: Path) -> None:
    """Forward + backward + index of rows of `bench attention`, against density and against length; peers as dashed lines.

    One line a length, dtype and head_dim on the left, one a pattern (or peer), dtype and head_dim on the right; devices are told
    apart where there are several. `out`: PNG or SVG.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.fonttype"] = "none"
    several_devices = len({row["device"] for row in rows}) > 1

    def milliseconds(row: dict) -> float:
        return sum(row[k] for k in ("fwd_ms", "bwd_ms", "index_ms") if row.get(k) is not None)

    def kind(row: dict) -> tuple:
        return (row["dtype"], row["head_dim"], row["device"] if several_devices else "")

    def words(kind: tuple) -> str:
        return f"{kind[0]}, D {kind[1]}" + (f", {kind[2]}" if kind[2] else "")

    figure, (densities, lengths) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if row["pattern"].startswith("dens") and not row.get("peer"):
            groups.setdefault((row["seq_len"], *kind(row)), []).append(row)
    for (seq_len, *which), group in sorted(groups.items()):
        group.sort(key=lambda row: row["density"])
        label = f"{seq_len} tokens, {words(which)}"
        at = [row["density"] for row in group], [milliseconds(row) for row in group]
        line = densities.plot(*at, "o-", ms=3, label=label)
        for row in rows:
            if row.get("peer") and (row["seq_len"], *kind(row)) == (seq_len, *which):
                style = {"ls": "--", "lw": 0.8, "color": line[0].get_color()}
                densities.axhline(milliseconds(row), label=f"{row['peer']}, {label}", **style)
    densities.set(
        xscale="log", yscale="log", xlabel="density", ylabel="ms, forward + backward + index"
    )
    by_pattern: dict[tuple, list[dict]] = {}
    for row in rows:
        by_pattern.setdefault((row.get("peer") or row["pattern"], *kind(row)), []).append(row)
    for (name, *which), group in sorted(by_pattern.items()):
        group.sort(key=lambda row: row["seq_len"])
        lengths.plot(
            [row["seq_len"] for row in group],
            [milliseconds(row) for row in group],
            "o--" if group[0].get("peer") else "o-",
            ms=3,
            label=f"{name}, {words(which)}",
        )
    lengths.set(xscale="log", yscale="log", xlabel="tokens")
    for axes in (densities, lengths):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=7)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def cells_of(rows: list[dict], lengths: list[int], depths: list[float]) -> np.ndarray:
    """Scores [depths, lengths]; NaN where there is no row."""
    cells = np.full((len(depths), len(lengths)), np.nan)
    for row in rows:
        cells[depths.index(row["depth"]), lengths.index(row["length"])] = row["score"]
    return cells


def plot_needle(means: list[dict], out: Path) -> None:
    """Scores over length (across) and depth (down), a panel an attention: rows of task_scores.means with "by" task,length,depth.

    Cells that nothing was asked of stay white. Errors: ValueError where no row has length and depth.
    """
    rows = [
        r for r in means if r["by"] == "task,length,depth" and None not in (r["length"], r["depth"])
    ]
    if not rows:
        raise ValueError("a heat map: expected samples with length and depth, got none")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    arms = list(dict.fromkeys(row["attention"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    size = (1.6 + len(arms) * (1.6 + 0.5 * len(lengths)), 1.6 + 0.32 * max(len(depths), 4))
    figure, panels = plt.subplots(
        1, len(arms), figsize=size, squeeze=False, constrained_layout=True
    )
    for panel, arm in zip(panels[0], arms, strict=True):
        own = [row for row in rows if row["attention"] == arm]
        cells = cells_of(own, lengths, depths)
        image = panel.imshow(cells, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        panel.set(title=f"{arm}, mean {np.nanmean(cells):.3f}", xlabel="tokens", ylabel="depth")
        panel.set_xticks(range(len(lengths)), [str(n) for n in lengths], rotation=90)
        panel.set_yticks(range(len(depths)), [f"{d:g}" for d in depths])
    figure.colorbar(image, ax=panels[0][-1], label="score")
    figure.savefig(out, dpi=110)
    plt.close(figure)
