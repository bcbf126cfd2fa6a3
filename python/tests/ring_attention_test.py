"""ring_attention, shard and unshard in 2 and 4 processes over Gloo against sparse_attention on the whole sequence.

One launch of processes a size: starting them costs more than what they do. A failure in any process fails the test with its
traceback.
"""

import os
import pathlib
import sys
import tempfile
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import mtraining

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from block_cases import random_blocks  # noqa: E402
from dense_reference import attention, mask_of, structured  # noqa: E402

SPARSE = mtraining.VerticalSlash(
    p_vertical=0.3, p_slash=0.3, sink_tokens=3, local_blocks=1, dense_threshold=1.0
)
FEW_BLOCKS = mtraining.XAttention(xattention_block=64, xattention_threshold=0.5)
FEW_CHUNKS = mtraining.Moba(moba_chunk=64, moba_top_k=3)


def equals_one_process(mesh, seq_len, pattern, documents=None, dtype=torch.float32, **options):
    """Forward, lse, index and gradients of one call, against one process on the whole sequence."""
    inputs = [x.requires_grad_() for x in structured(2, seq_len, 4, 2, 64, dtype=dtype)]
    weight = torch.randn(2, seq_len, 4, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    want, want_lse, index = mtraining.sparse_attention(
        *inputs, pattern=pattern, document_starts=documents, return_lse=True, return_index=True
    )
    want_grads = torch.autograd.grad((want * weight).sum(), inputs)

    where = {key: options[key] for key in ("layout", "stripe") if key in options}
    parts = [mtraining.shard(x, mesh, **where) for x in (*inputs, weight)]
    named = {"device_mesh": mesh} if mesh is None or hasattr(mesh, "mesh") else {"group": mesh}
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
    if isinstance(index, mtraining.BlockIndex):
        assert torch.equal(used.blocks(), index.blocks())
        assert 0 < index.density() < 0.9
    lists = () if isinstance(index, mtraining.BlockIndex) else (used.lists(), index.lists())
    for mine, theirs in zip(*lists, strict=True):  # bit for bit
        assert torch.equal(mine, theirs[..., : mine.shape[-1]] if mine.dim() == 3 else theirs)
    grads = torch.autograd.grad((out * parts[3]).sum(), inputs)

    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]

    def check(a, b, what):
        error = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-6)
        assert error < tolerance, f"{what}: {error} ({call})"

    whole = mtraining.unshard(out, mesh, seq_len=seq_len, **where)
    check(whole, want, "out")
    whole_lse = mtraining.unshard(lse, mesh, dim=2, seq_len=seq_len, **where)
    check(whole_lse, want_lse, "lse")
    for mine, theirs, name in zip(grads, want_grads, "qkv", strict=True):
        total = mine.double()
        dist.all_reduce(total, group=None if mesh is None or hasattr(mesh, "mesh") else mesh)
        check(total, theirs, f"d{name}")
    # The same index once more, replayed: it knows the sequence's length, documents and scale.
    del call["seq_len"], call["document_starts"]
    again = mtraining.ring_attention(*parts[:3], index=used, **call)
    assert torch.equal(again, out)


def given_blocks_equal_one_process():
    q, k, v = structured(2, 500, 4, 2, 64)
    index = mtraining.block_index(random_blocks(2, 4, 500, 128), seq_len=500, block_size=128)
    want, want_lse = mtraining.attend(q, k, v, index)
    parts = [mtraining.shard(x) for x in (q, k, v)]
    out, lse = mtraining.ring_attention(*parts, index=index, return_lse=True)
    torch.testing.assert_close(mtraining.unshard(out, seq_len=500), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        mtraining.unshard(lse, dim=2, seq_len=500), want_lse, rtol=0, atol=1e-5
    )


def round_trips(mesh):
    """shard and unshard undo one another, for every layout and dimension; positions say what is where."""
    ranks = mtraining.layout.ranks_of(mesh)
    for layout, stripe in (
        ("block_striped", 64),
        ("block_striped", 128),
        ("zigzag", 64),
        ("contiguous", 64),
        ("striped", 64),
    ):
        for seq_len in (1, 700, 128 * ranks.cp_size * 3):
            where = {"layout": layout, "stripe": stripe}
            whole = torch.arange(seq_len)
            part = mtraining.shard(whole, mesh, dim=0, pad_value=-100, **where)
            mine = mtraining.positions(seq_len, mesh, **where)
            assert torch.equal(part, torch.where(mine < seq_len, mine, -100))
            assert torch.equal(
                mtraining.unshard(part, mesh, dim=0, seq_len=seq_len, **where), whole
            )
            wide = torch.randn(2, 3, seq_len, generator=torch.Generator().manual_seed(0)).bfloat16()
            part = mtraining.shard(wide, mesh, dim=2, **where)
            assert torch.equal(mtraining.unshard(part, mesh, dim=2, seq_len=seq_len, **where), wide)
    if not hasattr(mesh, "mesh") and ranks.cp_size == 2 and ranks.cp_rank == 0:
        expected = torch.cat([torch.arange(64) + 128 * i for i in range(4)])
        assert torch.equal(mtraining.positions(512, mesh), expected)


def differentiates_the_sum_of_losses(mesh):
    """unshard(shard(x)): each rank's loss counts."""
    ranks = mtraining.layout.ranks_of(mesh)
    x = torch.randn(1, 200, generator=torch.Generator().manual_seed(0)).requires_grad_()
    whole = mtraining.unshard(mtraining.shard(x, mesh), mesh, seq_len=200)
    (grad,) = torch.autograd.grad((whole.sum() * (ranks.cp_rank + 1)), x)
    dist.all_reduce(grad)
    assert (grad == ranks.cp_size * (ranks.cp_size + 1) / 2).all()


def errors_are_told_to_all(rank):
    parts = [mtraining.shard(x) for x in structured(1, 300, 4, 2, 64)]
    # The same mistake everywhere: the same sentence, and the next call works.
    with pytest.raises(ValueError, match=r"v: expected \[B=1, S_local=192, Hk=2, D=64\] float32"):
        mtraining.ring_attention(parts[0], parts[1], parts[2][..., :32], seq_len=300)
    before = mtraining.ring_attention(*parts, seq_len=300)
    # A mistake on one rank: the other does not wait for its timeout.
    begin = time.monotonic()
    kind, given = (ValueError, parts[2].double()) if rank == 1 else (RuntimeError, parts[2])
    with pytest.raises(kind, match="v: expected") as caught:
        mtraining.ring_attention(parts[0], parts[1], given, seq_len=300)
    assert "\n" not in str(caught.value) and time.monotonic() - begin < 20
    if rank == 0:
        assert "rank 1" in str(caught.value)
    assert torch.equal(mtraining.ring_attention(*parts, seq_len=300), before)
    # Ranks that mean different things: both say in what, at once.
    odd = mtraining.VerticalSlash(p_vertical=0.5 if rank else 0.9)
    either = mtraining.Dense() if rank else mtraining.VerticalSlash()
    documents = torch.arange(300) // (100 + 50 * rank) * (100 + 50 * rank)
    index = mtraining.ring_attention(*parts, seq_len=300, return_index=True)[1]
    for change, text in (
        (
            {"pattern": odd},
            r"pattern \(p_vertical\): rank 0 has 0.9\d*, rank 1 has 0.5",
        ),
        ({"pattern": either}, "pattern: rank 0 has VerticalSlash, rank 1 has Dense"),
        (
            {"pattern": mtraining.Moba(moba_chunk=64 + 64 * rank)},
            r"pattern \(moba_chunk\): rank 0 has 64, rank 1 has 128",
        ),
        ({"document_starts": documents}, "document_starts: rank 0"),
        ({"softmax_scale": 0.5 + rank}, "softmax_scale: rank 0 has 0.5, rank 1 has 1.5"),
        ({"index": index if rank else None}, "pattern: .*rank 1 has a given index"),
        ({"dtype": torch.float64 if rank else torch.float32}, "dtype: .* rank 1 has float64"),
        ({"heads": 2 if rank else 4}, r"shape of q: rank 0 has \[1, 192, 4, 64\], rank 1"),
    ):
        dtype, heads = change.pop("dtype", torch.float32), change.pop("heads", 4)
        given = [x.to(dtype) for x in (parts[0][:, :, :heads], *parts[1:])]
        begin = time.monotonic()
        with pytest.raises(ValueError, match=f"ranks differ in {text}"):
            mtraining.ring_attention(*given, **{"seq_len": 300, **change})
        assert time.monotonic() - begin < 10
    assert torch.equal(mtraining.ring_attention(*parts, seq_len=300), before)
    for call, kind, text in (
        (
            {"group": dist.group.WORLD, "device_mesh": init_device_mesh("cpu", (2,))},
            ValueError,
            "got both",
        ),
        ({"layout": "diagonal"}, ValueError, "layout: expected one of"),
        ({"layout": "striped"}, NotImplementedError, "striped"),
        ({"stripe": 100}, ValueError, "stripe: expected a positive multiple of 64"),
        ({"ring": "square"}, ValueError, "ring"),
        ({"columns": "twice"}, ValueError, r"columns: expected once \| per_step"),
        ({"seq_len": 1000}, ValueError, "S_local=512"),
        ({"pattern": 3}, ValueError, "pattern: expected"),
        ({"document_starts": torch.zeros(7, dtype=torch.int64)}, ValueError, "document_starts"),
    ):
        with pytest.raises(kind, match=text):
            mtraining.ring_attention(*parts, **{"seq_len": 300, **call})


def many_lengths_keep_few_rings():
    from mtraining import ring

    for seq_len in range(130, 130 + 64 * (ring.MAX_OPEN_RINGS + 2), 64):
        q, k, v = (mtraining.shard(x) for x in structured(1, seq_len, 2, 1, 16))
        q.requires_grad_()
        out = mtraining.ring_attention(q, k, v, pattern=mtraining.Dense(), seq_len=seq_len)
        if seq_len == 130:
            first, first_q = out, q
    rings = ring._rings[dist.group.WORLD].rings
    assert len(rings) == ring.MAX_OPEN_RINGS
    # The first ring is closed for new calls, yet its graph still works.
    assert torch.isfinite(torch.autograd.grad(first.sum(), first_q)[0]).all()


def two_processes(rank):
    round_trips(None)
    differentiates_the_sum_of_losses(None)
    equals_one_process(None, 700, SPARSE)
    equals_one_process(None, 1, SPARSE)
    equals_one_process(None, 300, mtraining.Dense(), layout="striped")
    equals_one_process(None, 700, SPARSE, layout="zigzag", dtype=torch.float64)
    equals_one_process(None, 700, SPARSE, stripe=128, columns="per_step")
    equals_one_process(None, 700, SPARSE, dtype=torch.bfloat16)
    documents = torch.stack(
        [torch.arange(700) // 77 * 77, torch.where(torch.arange(700) < 64, 0, 64)]
    )
    equals_one_process(None, 700, SPARSE, documents=documents)
    equals_one_process(None, 700, FEW_BLOCKS, documents=documents)
    equals_one_process(None, 700, FEW_CHUNKS, layout="zigzag")
    given_blocks_equal_one_process()
    equals_one_process(init_device_mesh("cpu", (2,)), 300, SPARSE, deterministic=True)
    errors_are_told_to_all(rank)
    many_lengths_keep_few_rings()


def four_processes(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    round_trips(None)
    round_trips(mesh)
    differentiates_the_sum_of_losses(mesh)
    equals_one_process(None, 700, SPARSE, ring_stride=3)
    equals_one_process(mesh, 700, SPARSE)
    equals_one_process(mesh, 700, SPARSE, inner="ring", prefetch_steps=1)
    equals_one_process(mesh, 700, FEW_BLOCKS)
    equals_one_process(mesh, 700, mtraining.Dense(), layout="contiguous")
    equals_one_process(mesh, 700, SPARSE, ring="flat", layout="zigzag")
    with pytest.raises(ValueError, match="ring: expected hierarchical over a 2-D device_mesh"):
        equals_one_process(mesh, 700, SPARSE, ring="flat")  # its shards would lie elsewhere
    # Two rings of two ranks each side by side.
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    equals_one_process(halves[rank // 2], 300, SPARSE)
    # Against the definition, not only against ourselves.
    q, k, v = structured(1, 500, 4, 2, 32)
    parts = [mtraining.shard(x, mesh) for x in (q, k, v)]
    out, index = mtraining.ring_attention(
        *parts, device_mesh=mesh, pattern=SPARSE, seq_len=500, return_index=True
    )
    want, _ = attention(q, k, v, mask_of(index))
    torch.testing.assert_close(
        mtraining.unshard(out, mesh, seq_len=500).double(), want, rtol=0, atol=2e-5
    )


def a_rank_dies(rank):
    parts = [mtraining.shard(x).requires_grad_() for x in structured(1, 300, 4, 2, 64)]
    out = mtraining.ring_attention(*parts, seq_len=300)
    if rank == 1:
        os._exit(0)
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(out.sum(), parts)
    assert "rank" in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(RuntimeError):
        mtraining.ring_attention(*parts, seq_len=300)
    assert time.monotonic() - begin < 20
    os._exit(0)  # torch.distributed's own shutdown would wait for the dead rank


def _process(rank, body, size, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=size)
    body(rank)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("size, body", [(2, two_processes), (4, four_processes), (2, a_rank_dies)])
def test_processes_equal_one_process(size, body):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (body, size, folder), nprocs=size)


def test_one_process_is_a_ring_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/init", rank=0, world_size=1)
    try:
        q, k, v = structured(1, 200, 2, 1, 32)
        want = mtraining.sparse_attention(q, k, v, pattern=SPARSE)
        parts = [mtraining.shard(x) for x in (q, k, v)]
        out = mtraining.ring_attention(*parts, pattern=SPARSE, seq_len=200)
        torch.testing.assert_close(mtraining.unshard(out, seq_len=200), want, rtol=0, atol=1e-6)
    finally:
        dist.destroy_process_group()
