"""Times choosing an index on a GPU and attention over it: one JSON object a line.

python bench/index_on_device.py [--lengths 8192 32768 131072 524288] [--heads 16 --kv-heads 2 --head-dim 128] [--profile]
                                [--pattern vertical_slash xattention moba]

index_ms: build_index alone, median of CUDA events over `--repeats`, the host's launches included; in_layer_ms: what it adds to a
layer whose launches are ahead of the device (build_index after work that keeps the device busy); host_us: time of the call itself;
attend_ms: forward over that index; share: in_layer_ms of attend_ms; index_bytes: memory beyond q and k at the peak.
--profile: a further line with the microseconds of each kernel.
"""

import argparse
import json
import math
import os
import statistics
import time

import torch

import mtraining

LOCAL, CLUSTERS, CLUSTER = 500, 40, 12


def structured(seq_len, heads, kv_heads, head_dim):
    """q, k, v whose choice at p .9 is about as large as a typical pattern's: some 1000 keys that the last rows look at, the last
    LOCAL ones and CLUSTERS runs of CLUSTER, hold .93 of their attention, whatever the length; the rest is noise.
    """
    random = torch.Generator("cuda").manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=random, device="cuda")

    liked = torch.zeros(1, seq_len, kv_heads, 1, device="cuda")
    liked[:, -LOCAL:] = 1
    for head in range(kv_heads):
        begins = torch.randint(seq_len - CLUSTER, (CLUSTERS,), generator=random, device="cuda")
        liked[0, (begins[:, None] + torch.arange(CLUSTER, device="cuda")).flatten(), head] = 1
    direction = torch.nn.functional.normalize(normal(head_dim), dim=0)
    # exp(score) times the liked keys is .93 / .07 of exp(noise) times the others.
    score = math.log(0.93 / 0.07 * seq_len / (LOCAL + CLUSTERS * CLUSTER)) + 0.12
    length = 9.3
    q = (length * direction + 0.5 * normal(1, seq_len, heads, head_dim)).bfloat16()
    k = liked * (score * head_dim**0.5 / length) * direction
    k = (k + 0.5 * normal(1, seq_len, kv_heads, head_dim)).bfloat16()
    return [q, k, normal(1, seq_len, kv_heads, head_dim).bfloat16()]


def median_ms(call, repeats):
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times), min(times), max(times)


def in_layer_ms(call, host_us, repeats):
    """As median_ms, the device kept busy until the host, which needs host_us, has launched everything."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(
            2_000_000 + round(3_000 * host_us)
        )  # a millisecond, and 1.5 times host_us
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def host_us(call, repeats):
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(times)


def measure(seq_len, name, pattern, options):
    """The line of one length, as a dict."""
    q, k, v = structured(seq_len, options.heads, options.kv_heads, options.head_dim)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    index = mtraining.build_index(q, k, pattern=pattern)
    peak = torch.cuda.max_memory_allocated() - before
    index_ms, fastest, slowest = median_ms(
        lambda: mtraining.build_index(q, k, pattern=pattern), options.repeats
    )
    index_host = host_us(lambda: mtraining.build_index(q, k, pattern=pattern), options.repeats)
    layer_ms = in_layer_ms(
        lambda: mtraining.build_index(q, k, pattern=pattern), index_host, options.repeats
    )
    with torch.no_grad():
        attend_ms, _, _ = median_ms(lambda: mtraining.attend(q, k, v, index), 7)
        attend_host = host_us(lambda: mtraining.attend(q, k, v, index), options.repeats)
    return {
        "case": "index on a GPU",
        "device": torch.cuda.get_device_name(),
        "commit": os.environ.get("MTRAINING_COMMIT"),
        "pattern": name,
        "seq_len": seq_len,
        "heads": [options.heads, options.kv_heads],
        "head_dim": options.head_dim,
        "density": round(index.density(), 4),
        **chosen(index, options),
        "index_ms": round(index_ms, 4),
        "index_ms_range": [round(fastest, 4), round(slowest, 4)],
        "in_layer_ms": round(layer_ms, 4),
        "share": round(layer_ms / attend_ms, 4),
        "index_host_us": round(index_host, 1),
        "index_bytes": peak,
        "attend_ms": round(attend_ms, 3),
        "attend_host_us": round(attend_host, 1),
    }


def chosen(index, options):
    """What the choice was, of patterns of diagonals and columns."""
    if isinstance(index, mtraining.BlockIndex):
        return {"bits_bytes": index.bits.nbytes, "list_capacity": index.capacity}
    return {
        "p": options.p,
        "columns": round(index.num_columns.float().mean().item(), 1),
        "diagonals": round(index.num_diagonals.float().mean().item(), 1),
    }


def profile(seq_len, pattern, options):
    """Microseconds of each kernel of one build_index, mean of 10 calls."""
    q, k, v = structured(seq_len, options.heads, options.kv_heads, options.head_dim)

    def layer():
        mtraining.build_index(q, k, pattern=pattern)

    with torch.no_grad():
        layer()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            for _ in range(10):
                layer()
            torch.cuda.synchronize()
    times = {
        event.key[:90]: round(event.self_device_time_total / 10, 1)
        for event in trace.key_averages()
    }
    return {
        "case": "kernels",
        "seq_len": seq_len,
        "us": dict(sorted(times.items(), key=lambda x: -x[1])),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072, 524288])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--p", type=float, default=0.9)
    parser.add_argument(
        "--pattern",
        nargs="+",
        choices=["vertical_slash", "xattention", "moba"],
        default=["vertical_slash"],
    )
    parser.add_argument("--max-columns", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="also the time of each kernel")
    options = parser.parse_args()
    patterns = {
        "vertical_slash": mtraining.VerticalSlash(
            p_vertical=options.p, p_slash=options.p, max_columns=options.max_columns
        ),
        "xattention": mtraining.XAttention(),
        "moba": mtraining.Moba(),
    }
    for seq_len in options.lengths:
        for name in options.pattern:
            print(json.dumps(measure(seq_len, name, patterns[name], options)), flush=True)
            if options.profile:
                print(json.dumps(profile(seq_len, patterns[name], options)), flush=True)


if __name__ == "__main__":
    main()
