"""Dense causal attention by torch's context parallel (ring over NCCL, cuDNN), as rows beside `mtraining bench ring`.

torchrun --nproc-per-node N bench/context_parallel_peer.py --seq-len 262144 --heads 16 --head-dim 128

Forward and backward between CUDA events from barrier to barrier, median over the repeats, of the slowest rank. Rates count
4 D flops a causal pair forward and 10 D backward over all ranks, divided by the number of GPUs.
"""

import argparse
import json
import os
import statistics

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel


def measure(options: argparse.Namespace) -> dict:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (world,))
    set_rotate_method(options.rotate)

    def make(heads: int) -> torch.Tensor:
        return torch.randn(
            1, heads, options.seq_len, options.head_dim, device="cuda", dtype=torch.bfloat16
        )

    # Key and value heads as many as query heads: its ring does not take fewer.
    q, k, v, grad = (make(options.heads) for _ in range(4))
    forward_ms, backward_ms = [], []
    with context_parallel(mesh, buffers=[q, k, v, grad], buffer_seq_dims=[2, 2, 2, 2]):
        for tensor in (q, k, v):
            tensor.requires_grad_(True)
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            for repeat in range(-options.warm_up, options.repeats):
                marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
                for tensor in (q, k, v):
                    tensor.grad = None
                dist.barrier()
                torch.cuda.synchronize()
                marks[0].record()
                out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                marks[1].record()
                out.backward(grad)
                marks[2].record()
                torch.cuda.synchronize()
                times = torch.tensor(
                    [marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])],
                    device="cuda",
                )
                dist.all_reduce(times, dist.ReduceOp.MAX)
                if repeat >= 0:
                    forward_ms.append(times[0].item())
                    backward_ms.append(times[1].item())
                del out
        # The context gives its buffers their whole shape back, which it cannot where they require gradients.
        for tensor in (q, k, v):
            tensor.grad = None
            tensor.requires_grad_(False)
    pairs = options.heads * options.seq_len * (options.seq_len + 1) / 2
    fwd, bwd = statistics.median(forward_ms), statistics.median(backward_ms)
    flops = 4 * options.head_dim * pairs
    row = {
        "case": "ring",
        "pattern": "dense",
        "seq_len": options.seq_len,
        "pairs": pairs,
        "fwd_ms": round(fwd, 3),
        "bwd_ms": round(bwd, 3),
        "index_ms": None,
        "fwd_tflops": round(flops / fwd * 1e-9, 1),
        "bwd_tflops": round(2.5 * flops / bwd * 1e-9, 1),
        "fwd_tflops_a_gpu": round(flops / fwd * 1e-9 / world, 1),
        "bwd_tflops_a_gpu": round(2.5 * flops / bwd * 1e-9 / world, 1),
        "peer": f"torch {torch.__version__} context_parallel, cuDNN",
        "rotate": options.rotate,
        "device": f"{world} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}",
        "commit": os.environ.get("MTRAINING_COMMIT", ""),
        "num_q_heads": options.heads,
        "num_kv_heads": options.heads,
        "head_dim": options.head_dim,
        "dtype": "bf16",
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "repeats": options.repeats,
    }
    return row if rank == 0 else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seq-len", type=int, default=262144)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument(
        "--rotate",
        choices=["allgather", "alltoall"],
        default="allgather",
        help="how K and V travel",
    )
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=device)
    try:
        row = measure(options)
        if row:
            print(json.dumps(row), flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
