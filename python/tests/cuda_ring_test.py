"""ring_attention on GPUs, a process each over NCCL, against sparse_attention on one of them.

Marked multi_gpu: left out, and counted as not run, where there are fewer than two GPUs. One launch of processes for all cases.
"""

import dataclasses
import os
import pathlib
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import mtraining

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from dense_reference import structured  # noqa: E402

SPARSE = mtraining.VerticalSlash(
    p_vertical=0.3, p_slash=0.3, sink_tokens=3, local_blocks=1, dense_threshold=1.0
)


def equals_one_gpu(mesh, seq_len, pattern, documents=None, **options):
    """Out, lse, index and gradients of one call against one GPU on the whole sequence."""
    head_dim = options.pop("head_dim", 64)
    inputs = [
        x.requires_grad_() for x in structured(2, seq_len, 4, 2, head_dim, dtype=torch.bfloat16)
    ]
    weight = torch.randn(
        2, seq_len, 4, head_dim, generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    on_gpu = [x.detach().cuda().requires_grad_() for x in inputs]
    index = mtraining.build_index(
        *on_gpu[:2],
        pattern=pattern,
        document_starts=None if documents is None else documents.cuda(),
    )

    where = {key: options[key] for key in ("layout", "stripe") if key in options}
    parts = [mtraining.shard(x, mesh, **where).cuda() for x in (*inputs, weight)]
    named = {"device_mesh": mesh} if hasattr(mesh, "mesh") else {"group": mesh}
    call = {
        "pattern": pattern,
        "document_starts": documents,
        "seq_len": seq_len,
        **named,
        **options,
    }
    out, lse, used = mtraining.ring_attention(
        *parts[:3], return_lse=True, return_index=True, **call
    )
    assert out.is_cuda
    of_blocks = isinstance(index, mtraining.BlockIndex)
    if of_blocks:  # float32 products of parts of q and k: equal up to the threshold
        differ = (used.blocks() ^ index.blocks()).sum() / index.blocks().sum()
        assert differ < 0.02 and index.density() < 0.9, differ
        starts = None if documents is None else documents.cuda().int()
        index = dataclasses.replace(used, document_starts=starts)
    lists = () if of_blocks else (used.lists(), index.lists())
    for mine, theirs in zip(*lists, strict=True):  # bit for bit
        theirs = theirs[..., : mine.shape[-1]] if mine.dim() == 3 else theirs
        if not torch.equal(mine, theirs):
            counts = used.num_columns if mine.dim() == 3 else None
            raise AssertionError(f"index differs: {mine} {theirs} {counts}")
    grads = torch.autograd.grad((out * parts[3]).sum(), inputs)
    want, want_lse = mtraining.attend(*on_gpu, index)
    want_grads = torch.autograd.grad((want * weight.cuda()).sum(), on_gpu)

    def check(a, b, what):
        error = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-6)
        assert error < 1e-2, f"{what}: {error} ({call})"

    whole = mtraining.unshard(out.cpu(), mesh, seq_len=seq_len, **where)
    check(whole, want.cpu(), "out")
    whole_lse = mtraining.unshard(lse.cpu(), mesh, dim=2, seq_len=seq_len, **where)
    torch.testing.assert_close(whole_lse, want_lse.cpu(), rtol=0, atol=1e-3)
    for mine, theirs, name in zip(grads, want_grads, "qkv", strict=True):
        total = mine.double()
        dist.all_reduce(total)
        check(total, theirs.cpu(), f"d{name}")
    return whole


def run(rank, size, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(size))
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    position = torch.arange(777)
    documents = torch.stack([torch.where(position < 300, 0, 300), position // 100 * 100])
    nodes = init_device_mesh("cpu", (size, 1))  # every hop between nodes
    node = init_device_mesh("cpu", (1, size))  # every hop inside one
    flat = dist.group.WORLD
    # Each set of options opens communicators of its own, which takes longer than its calls.
    results = [
        equals_one_gpu(mesh, 777, SPARSE, **options)
        for mesh, options in (
            (flat, {}),
            (nodes, {}),
            (node, {}),
            (node, {"inner": "ring"}),
            (flat, {"columns": "per_step"}),
        )
    ]
    for other in results[1:]:  # flat == hierarchical, to the rounding of out
        torch.testing.assert_close(other, results[0], rtol=2e-2, atol=1e-2)
    equals_one_gpu(node, 1024, SPARSE)  # no padding
    equals_one_gpu(flat, 777, SPARSE, documents=documents)
    equals_one_gpu(node, 777, mtraining.Dense())
    blocks = mtraining.XAttention(xattention_block=64, xattention_threshold=0.5)
    equals_one_gpu(flat, 777, blocks, documents=documents)
    equals_one_gpu(flat, 777, mtraining.Moba(moba_chunk=64, moba_top_k=3), layout="zigzag")
    equals_one_gpu(flat, 777, SPARSE, layout="zigzag")
    equals_one_gpu(flat, 777, SPARSE, stripe=128, head_dim=128)
    equals_one_gpu(flat, 777, SPARSE, gradient_transport="bf16", deterministic=True)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.multi_gpu
def test_rings_of_gpus_equal_one_gpu():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (min(2, torch.cuda.device_count()), folder), nprocs=2)
