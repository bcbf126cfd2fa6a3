"""The operator attend beside FlashAttention-4's block-sparse attention on the same patterns, in turn, in one process: a JSON line an arm.

    python bench/beside_fa4.py typical.json wide.json [--repeats 9] [--kernels] [--deterministic] [--without-peer] [--compile-only]
    python bench/beside_fa4.py --uniform .1 --seq-len 40960 --heads 16 --kv-heads 2 16

In:   pattern files (docs/formats.md) of 16 query heads; flash-attn-4 with its needs on PYTHONPATH. Out: rows in the keys of `mtraining bench`.
Ours computes the pattern in blocks of 64 and its columns; the peer the same offsets in blocks of 128 and no columns, since it has no such thing.
Times are those of whole operators by CUDA events: lists, rounding and reductions included, on both sides. Inputs: normal values.
Each repeat runs both arms, forward and backward: ratio_to_fa4 is taken repeat by repeat.

--uniform: a causal mask of 128 x 128 blocks at random, the same share of each row of blocks, its own among them (uniform_index of
bench/sm90_case.cuh draws the same one), given to both arms as lists made beforehand: here mtraining.block_index. Pairs count blocks whole, of the peer's
128 tokens and of ours of 64, of which the one after the diagonal of an own block is not computed.
"""

import argparse
import json
import os
import pathlib
import statistics
import time

import torch

import mtraining

KV_HEADS, HEAD_DIM = 2, 128
PEER_BLOCK = 128


def read_pattern(path):
    pattern = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    return pattern["name"], pattern["seq_len"], pattern["heads"]


def diagonals_of(head, block, blocks):
    """Block diagonals that hold a pair at one of the head's offsets, ascending."""
    found = set()
    for low, high in head["offset_ranges"]:
        found.update(range(low // block, -(-(high - 1) // block) + 1))
    return sorted(d for d in found if d < blocks)


def our_arm(heads, seq_len):
    def padded(rows):
        width = max(1, *map(len, rows))
        values = torch.full((1, len(rows), width), -1, dtype=torch.int32)
        for at, row in enumerate(rows):
            values[0, at, : len(row)] = torch.tensor(row, dtype=torch.int32)
        counts = torch.tensor([[len(row) for row in rows]], dtype=torch.int32)
        return values.cuda(), counts.cuda()

    lists = [
        *padded([diagonals_of(head, 64, seq_len // 64) for head in heads]),
        *padded([head["columns"] for head in heads]),
    ]
    no_head = torch.zeros(1, len(heads), dtype=torch.bool, device="cuda")
    index = mtraining.Index(seq_len, *lists, no_head, torch.tensor(0, device="cuda"))

    def attention(q, k, v):
        return mtraining.attend(q, k, v, index)[0]

    return attention, int(index.pairs().sum())


def our_blocks_arm(chosen, seq_len):
    """chosen: bool [heads, blocks, blocks]."""
    index = mtraining.block_index(chosen[None].cuda(), seq_len=seq_len, block_size=PEER_BLOCK)

    def attention(q, k, v):
        return mtraining.attend(q, k, v, index)[0]

    return attention, int(index.pairs().sum())


def uniform_blocks(num_heads, seq_len, density):
    """bool [heads, blocks, blocks] on the host: the mask of uniform_index."""
    blocks, state = seq_len // PEER_BLOCK, 1
    chosen = torch.eye(blocks, dtype=torch.bool).repeat(num_heads, 1, 1)
    for head in range(num_heads):
        for row in range(blocks):
            before = list(range(row))
            count = max(0, int(density * (row + 1) + 0.5) - 1)
            for n in range(count):
                state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
                other = n + (state >> 33) % (row - n)
                before[n], before[other] = before[other], before[n]
            chosen[head, row, before[:count]] = True
    return chosen


def pattern_blocks(heads, seq_len):
    blocks = seq_len // PEER_BLOCK
    chosen = torch.zeros(len(heads), blocks, blocks, dtype=torch.bool)
    for at, head in enumerate(heads):
        for d in diagonals_of(head, PEER_BLOCK, blocks):
            chosen[at].diagonal(-d).fill_(True)
    return chosen


def peer_arm(chosen):
    """chosen: bool [heads, blocks, blocks]."""
    import cutlass.cute as cute
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import flash_attn_func

    @cute.jit
    def at_or_before(batch, head, query, key, seqlen_info, aux):
        return key <= query

    chosen, blocks = chosen.cuda(), chosen.shape[-1]

    def numbered(which):
        """int32 counts and ascending block numbers of each row, as the peer reads them."""
        numbers = torch.arange(blocks, device="cuda").expand_as(which)
        order = torch.where(which, numbers, blocks).sort(-1).values.clamp_max(blocks - 1)
        return which.sum(-1).int()[None].contiguous(), order.int()[None].contiguous()

    def tensors(which):
        masked = torch.eye(blocks, dtype=torch.bool, device="cuda")  # the causal edge crosses these
        return BlockSparseTensorsTorch(
            *numbered(which & masked), *numbered(which & ~masked), block_size=(PEER_BLOCK,) * 2
        )

    by_query, by_key = tensors(chosen), tensors(chosen.transpose(1, 2))

    def attention(q, k, v):
        return flash_attn_func(
            q,
            k,
            v,
            mask_mod=at_or_before,
            block_sparse_tensors=by_query,
            block_sparse_tensors_bwd=by_key,
            pack_gqa=False,
        )[0]

    return attention, int(chosen.sum()) * PEER_BLOCK**2


def timed(call):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    result = call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), result


def kernels_of(call):
    """Microseconds by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    return {e.key[:80]: round(e.self_device_time_total, 1) for e in trace.key_averages()}


class Arm:
    def __init__(self, name, attention, pairs):
        self.name, self.attention, self.pairs = name, attention, pairs
        self.forward, self.backward, self.peak_bytes = [], [], 0

    def run(self, inputs, dout, counts):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward, out = timed(lambda: self.attention(*inputs))
        backward, _ = timed(lambda: torch.autograd.grad(out, inputs, dout))
        self.peak_bytes = torch.cuda.max_memory_allocated() - before
        if counts:
            self.forward.append(forward)
            self.backward.append(backward)

    def row(self, name, seq_len, heads, kv_heads):
        forward, backward = statistics.median(self.forward), statistics.median(self.backward)
        flops = 4e-9 * HEAD_DIM * self.pairs
        return {
            **({} if self.name == "ours" else {"peer": self.name}),
            "case": "attention beside fa4",
            "pattern": name,
            "seq_len": seq_len,
            "pairs": self.pairs,
            "fwd_ms": round(forward, 3),
            "bwd_ms": round(backward, 3),
            "index_ms": None,
            "fwd_tflops": round(flops / forward, 1),
            "bwd_tflops": round(2.5 * flops / backward, 1),
            "device": torch.cuda.get_device_name(),
            "commit": os.environ.get("MTRAINING_COMMIT"),
            "fwd_ms_min": round(min(self.forward), 3),
            "fwd_ms_max": round(max(self.forward), 3),
            "bwd_ms_min": round(min(self.backward), 3),
            "bwd_ms_max": round(max(self.backward), 3),
            "repeats": len(self.forward),
            "dtype": "bf16",
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": HEAD_DIM,
            "peak_bytes": self.peak_bytes,
        }


def random_inputs(seq_len, heads, kv_heads):
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, seq_len, h, HEAD_DIM, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]
    return inputs, torch.randn_like(inputs[0])


def measure_uniform(kv_heads, options):
    chosen = uniform_blocks(options.heads, options.seq_len, options.uniform)
    arms = [] if options.compile_only else [Arm("ours", *our_blocks_arm(chosen, options.seq_len))]
    if not options.without_peer:
        arms.append(Arm("fa4", *peer_arm(chosen)))
    more = {"case": "uniform 128x128 beside fa4", "density": options.uniform}
    rows = in_turn(arms, "uniform", options.seq_len, options.heads, kv_heads, options)
    return [{**row, **more} for row in rows]


def measure(path, options):
    name, seq_len, heads = read_pattern(path)
    arms = [] if options.compile_only else [Arm("ours", *our_arm(heads, seq_len))]
    if not options.without_peer:
        arms.append(Arm("fa4", *peer_arm(pattern_blocks(heads, seq_len))))
    return in_turn(arms, name, seq_len, len(heads), KV_HEADS, options)


def in_turn(arms, name, seq_len, heads, kv_heads, options):
    """Rows of the arms, run one after the other in each repeat."""
    inputs, dout = random_inputs(seq_len, heads, kv_heads)
    for repeat in range(-1 if options.compile_only else -3, options.repeats):
        if options.compile_only and repeat == 0:
            return []
        for arm in arms:
            arm.run(inputs, dout, repeat >= 0)
    rows = [arm.row(name, seq_len, heads, kv_heads) for arm in arms]
    rows[0]["deterministic"] = options.deterministic
    if len(arms) == 2:
        ours, peer = arms
        parts = {
            "forward": [b / a for a, b in zip(ours.forward, peer.forward, strict=True)],
            "backward": [b / a for a, b in zip(ours.backward, peer.backward, strict=True)],
            "both": [
                (b + d) / (a + c)
                for a, b, c, d in zip(
                    ours.forward, peer.forward, ours.backward, peer.backward, strict=True
                )
            ],
        }
        rows[0]["ratio_to_fa4"] = {
            part: [round(f(x), 4) for f in (statistics.median, min, max)]
            for part, x in parts.items()
        }
    for arm, row in zip(arms, rows, strict=True):
        if options.kernels:
            row["fwd_kernels"] = kernels_of(lambda arm=arm: arm.attention(*inputs))
            out = arm.attention(*inputs)
            row["bwd_kernels"] = kernels_of(
                lambda out=out: torch.autograd.grad(out, inputs, dout, retain_graph=True)
            )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("patterns", nargs="*", help="pattern files")
    parser.add_argument("--uniform", type=float, help="density of a mask of 128 x 128 blocks")
    parser.add_argument("--seq-len", type=int, default=40960, help="of --uniform")
    parser.add_argument("--heads", type=int, default=16, help="of --uniform")
    parser.add_argument(
        "--kv-heads",
        type=int,
        nargs="+",
        default=[KV_HEADS],
        help="of --uniform, one after another",
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--kernels", action="store_true", help="also the time of each kernel")
    parser.add_argument("--deterministic", action="store_true", help="our backward")
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument(
        "--compile-only", action="store_true", help="run the peer once, so that its cache is filled"
    )
    options = parser.parse_args()
    torch.use_deterministic_algorithms(options.deterministic, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # with NaN, before they are written
    if not options.patterns and options.uniform is None:
        parser.error("expected pattern files or --uniform, got neither")
    cases = [*options.patterns, *(options.kv_heads if options.uniform is not None else [])]
    for case in cases:
        begin = time.time()
        run = measure if isinstance(case, str) else measure_uniform
        for row in run(case, options):
            print(json.dumps(row), flush=True)
        if options.compile_only:
            done = {"compiled": case, "s": round(time.time() - begin, 1)}
            print(json.dumps(done), flush=True)


if __name__ == "__main__":
    main()
