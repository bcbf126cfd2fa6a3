"""Pattern files of a wanted density: fixed diagonals and columns for benchmarks, the same on every machine.

In:   tokens, query heads, a density, a seed. Out: a pattern file (docs/formats.md) for attention.pattern_file and `mtraining simulate`.
Next: docs/benchmarks/train_gpu.md.

    python -m mtraining.pattern_files --seq-len 524288 --heads 16 --density .05 > density_05.json

Every head has a band of near offsets (1024, 1536 or 2048, in turn), 16 single offsets and one column for every 256 tokens (the first 64, the
others denser towards the start); clusters of 256 neighbouring offsets fill it up to the density. Heads differ in where these lie.
Density: as the metrics count it, 64 x 64 blocks whole, over half of seq_len^2.
"""

from __future__ import annotations

import json
import random
import sys

from mtraining.command_line import Parser, reported

BLOCK = 64
BANDS = (1024, 1536, 2048)
CLUSTER = 256
LINES = 16
TOKENS_A_COLUMN = 256
FIRST_COLUMNS = 64


def diagonals(ranges: list[list[int]], seq_len: int) -> set[int]:
    """Block diagonals (query block - key block) that ranges of offsets touch."""
    found = set()
    for low, high in ranges:
        found.update(range(low // BLOCK, (high - 1 + BLOCK - 1) // BLOCK + 1))
    return {d for d in found if d < seq_len // BLOCK}


def density(head: dict, seq_len: int) -> float:
    """Of one head of a pattern file."""
    blocks = seq_len // BLOCK
    chosen = diagonals(head["offset_ranges"], seq_len)
    pairs = sum(blocks - d for d in chosen) * BLOCK * BLOCK
    ordered = sorted(chosen)
    # Diagonals below `reach`, for every reach: a column of block b meets query blocks b .. blocks - 1.
    below = [0] * (blocks + 1)
    at = 0
    for reach in range(blocks + 1):
        while at < len(ordered) and ordered[at] < reach:
            at += 1
        below[reach] = at
    for column in head["columns"]:
        reach = blocks - column // BLOCK
        pairs += (reach - below[reach]) * BLOCK
    return pairs / (seq_len * seq_len / 2)


def make_head(number: int, seq_len: int, wanted: float, seed: int) -> dict:
    """Errors: ValueError where the density cannot be had."""
    rng = random.Random(f"{seed}/{number}")
    band = min(BANDS[number % len(BANDS)], seq_len)
    ranges = [[0, band]]
    ranges += [[low, low + 1] for low in (rng.randrange(seq_len) for _ in range(LINES))]
    columns = set(range(min(FIRST_COLUMNS, seq_len)))
    while len(columns) < seq_len // TOKENS_A_COLUMN:
        columns.add(int(seq_len * rng.random() ** 2))
    head = {"offset_ranges": sorted(ranges), "columns": sorted(columns)}
    least = density(head, seq_len)
    if not least <= wanted <= 1:
        raise ValueError(
            f"density: expected {least:.4f} (the band, lines and columns of head {number}) to 1, got {wanted}"
        )
    # A cluster at a time; the last one is cut, a diagonal at a time, to what is left.
    places = list(range(band // BLOCK + 1, seq_len // BLOCK - CLUSTER // BLOCK))
    rng.shuffle(places)
    for place in places:
        low = place * BLOCK
        for length in range(CLUSTER, 0, -BLOCK):
            with_it = {
                **head,
                "offset_ranges": sorted([*head["offset_ranges"], [low, low + length]]),
            }
            if density(with_it, seq_len) <= wanted:
                head = with_it
                break
        if length < CLUSTER:
            break
    return head


def make_pattern(seq_len: int, heads: int, wanted: float, seed: int = 0) -> dict:
    """A pattern file as a dict. Errors: ValueError on sizes and densities."""
    if seq_len < 2 * CLUSTER or seq_len % BLOCK != 0:
        raise ValueError(
            f"seq_len: expected a multiple of {BLOCK}, at least {2 * CLUSTER}, got {seq_len}"
        )
    if heads < 1:
        raise ValueError(f"heads: expected at least 1, got {heads}")
    return {
        "name": f"density {wanted:g}",
        "seq_len": seq_len,
        "heads": [make_head(h, seq_len, wanted, seed) for h in range(heads)],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m mtraining.pattern_files", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seq-len", type=int, required=True, help="tokens, a multiple of 64")
    parser.add_argument("--heads", type=int, default=16, help="query heads (16)")
    parser.add_argument("--density", type=float, required=True, help="of each head, .01 to 1")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    def work() -> None:
        pattern = make_pattern(options.seq_len, options.heads, options.density, options.seed)
        print(json.dumps(pattern))

    return reported(work)


if __name__ == "__main__":
    sys.exit(main())
