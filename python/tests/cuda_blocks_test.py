"""Attention over given and chosen blocks on a GPU: against dense attention in float64, against the CPU's bits, without waiting.

Marked cuda: without a CUDA device, or a library built with CUDA, these cases are left out and counted as not run.
"""

import dataclasses
import pathlib
import sys

import pytest
import torch

import mtraining

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from block_cases import as_lists, pair_mask, random_blocks  # noqa: E402
from dense_reference import attention, plain, row_error, structured  # noqa: E402
from device_waits import assert_the_host_does_not_wait  # noqa: E402

pytestmark = pytest.mark.cuda

SHAPES = [  # batch, length, heads, kv heads, head_dim, dtype, block_size
    (1, 1, 1, 1, 64, torch.bfloat16, 64),
    (2, 65, 4, 4, 64, torch.float16, 128),
    (1, 333, 7, 1, 128, torch.bfloat16, 64),
    (2, 700, 4, 2, 128, torch.float16, 128),
    (1, 1500, 16, 2, 128, torch.bfloat16, 128),
    (1, 1280, 16, 16, 128, torch.bfloat16, 64),
    (2, 400, 4, 2, 80, torch.bfloat16, 64),
]


def on_gpu(*tensors):
    return [x.cuda() for x in tensors]


def check_gradients(got, rough, exact):
    for a, b, c, name in zip(got, rough, exact, "qkv", strict=True):
        error, rough_error, size = (x.double().norm() for x in (a - c, b - c, c))
        if size < 1e-6:  # one token: dq and dk are 0
            assert a.norm() < 1e-3, name
        else:
            assert error <= 2 * rough_error + 2e-3 * size, (name, error / size, rough_error / size)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    ("batch", "seq_len", "heads", "kv_heads", "head_dim", "dtype", "block_size"), SHAPES
)
def test_out_lse_and_gradients_are_those_of_dense_attention_under_the_mask(
    batch, seq_len, heads, kv_heads, head_dim, dtype, block_size, documents
):
    starts = None
    if documents:
        starts = torch.arange(seq_len, dtype=torch.int32).div(150, rounding_mode="floor") * 150
        starts = starts.cuda()
    blocks = random_blocks(batch, heads, seq_len, block_size).cuda()
    index = mtraining.block_index(
        blocks, seq_len=seq_len, block_size=block_size, document_starts=starts
    )
    mask = pair_mask(blocks, seq_len, block_size, starts)
    assert torch.equal(index.mask(), mask)
    cpu = structured(batch, seq_len, heads, kv_heads, head_dim, dtype=dtype)
    inputs = [x.requires_grad_() for x in on_gpu(*cpu)]
    out, lse = mtraining.attend(*inputs, index)
    rows = mask.any(-1).transpose(1, 2)
    want, want_lse = attention(*inputs, mask)
    rough = torch.where(rows[..., None], plain(*inputs, mask), 0)
    assert row_error(out, want) <= 2 * row_error(rough, want) + 1e-6 or not rows.any()
    assert (out[~rows] == 0).all()
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-3)

    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    got = torch.autograd.grad((out * weight).sum(), inputs)
    # An empty row's softmax is not a number: its queries see themselves there, and are not looked at.
    own = torch.eye(seq_len, dtype=torch.bool, device="cuda") & ~mask.any(-1, keepdim=True)
    rough = torch.where(rows[..., None], plain(*inputs, mask | own), 0)
    rough = torch.autograd.grad((rough * weight).sum(), inputs)
    exact = torch.autograd.grad((want * weight.double()).sum(), inputs)
    check_gradients(got, rough, exact)


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("seq_len", [1, 65, 1000, 5000])
def test_bits_of_masks_and_lists_are_the_cpus(seq_len, block_size):
    blocks = random_blocks(2, 3, seq_len, block_size)
    options = {"seq_len": seq_len, "block_size": block_size}
    want = mtraining.block_index(blocks, **options)
    offsets, indices = on_gpu(*as_lists(blocks))
    for got in (
        mtraining.block_index(blocks.cuda(), **options),
        mtraining.block_index(offsets=offsets, indices=indices, **options),
    ):
        assert torch.equal(got.bits.cpu(), want.bits)
        assert torch.equal(got.pairs().cpu(), want.pairs())
        longest = mtraining.library.ops.longest_block_list
        sizes = got.query_unit, got.key_unit, seq_len
        assert longest(got.bits, *sizes).item() == longest(want.bits, *sizes).item()


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("seq_len", [200, 1000, 3000])
def test_patterns_choose_the_cpus_blocks_up_to_the_threshold(seq_len, documents):
    starts = torch.arange(seq_len, dtype=torch.int32) // 700 * 700 if documents else None
    q, k, v = structured(2, seq_len, 8, 2, 64, dtype=torch.bfloat16)
    for pattern, most in (
        (mtraining.XAttention(xattention_threshold=0.6), 0.01),
        (mtraining.Moba(moba_chunk=256, moba_top_k=3), 0.002),
    ):
        want = mtraining.build_index(q, k, pattern=pattern, document_starts=starts)
        got = mtraining.build_index(
            *on_gpu(q, k),
            pattern=pattern,
            document_starts=None if starts is None else starts.cuda(),
        )
        assert got.bits.shape == want.bits.shape and got.capacity == want.capacity
        differ = (got.blocks().cpu() ^ want.blocks()).sum() / want.blocks().sum()
        assert differ <= most, differ
        torch.testing.assert_close(
            got.recall(*on_gpu(q, k)).cpu(), want.recall(q, k), rtol=0, atol=1e-2
        )
        out, _ = mtraining.attend(*on_gpu(q, k, v), got)
        exact, _ = attention(*on_gpu(q, k, v), got.mask())
        assert (out.double() - exact).norm() <= 1e-2 * exact.norm()


def test_the_host_does_not_wait_for_the_device():
    q, k, v = on_gpu(*structured(1, 2000, 8, 2, 128, dtype=torch.bfloat16))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    blocks = random_blocks(1, 8, 2000, 128)
    offsets, indices = on_gpu(*as_lists(blocks))
    blocks = blocks.cuda()
    sizes = {"seq_len": 2000, "block_size": 128}

    def layers():
        gradients = []
        for index in (
            mtraining.block_index(blocks, **sizes),
            mtraining.block_index(offsets=offsets, indices=indices, **sizes),
            mtraining.build_index(q, k, pattern=mtraining.XAttention()),
            mtraining.build_index(q, k, pattern=mtraining.Moba(moba_chunk=256, moba_top_k=2)),
        ):
            out, _ = mtraining.attend(*inputs, index)
            gradients += torch.autograd.grad(out, inputs, torch.ones_like(out))
        return gradients

    assert_the_host_does_not_wait(layers)


def refused(text):
    """The next call on the device throws once, in the CPU's words."""
    torch.cuda.synchronize()
    good = torch.ones(1, 1, 2, 2, dtype=torch.bool, device="cuda")
    index = mtraining.block_index(good, seq_len=100, block_size=64)
    q = torch.zeros(1, 100, 1, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=text):
        mtraining.attend(q, q, q, index)
    out, _ = mtraining.attend(q, q, q, index)
    assert torch.isfinite(out).all()


def test_what_the_device_finds_wrong_is_left_out_and_said_by_the_next_call():
    sizes = {"seq_len": 200, "block_size": 64}

    def listed(offsets, indices):
        offsets = torch.tensor(offsets, device="cuda").view(1, 1, 5)
        indices = torch.tensor(indices, device="cuda", dtype=torch.int32)
        return mtraining.block_index(offsets=offsets, indices=indices, **sizes)

    index = listed([0, 1, 2, 3, 4], [0, 7, -2, 1])
    assert index.blocks()[0, 0].nonzero().tolist() == [[0, 0], [3, 1]]
    refused(r"indices\[1\]: expected a block in \[0, 4\), got 7")
    listed([0, 1, 5, 2, 4], [0, 1, 2, 3])
    refused(r"offsets\[0, 0, 2\]: expected ascending offsets in \[0, 4\].* got 5")

    q, k, v = on_gpu(*structured(1, 200, 2, 1, 64, dtype=torch.bfloat16))
    blocks = torch.ones(1, 2, 4, 4, dtype=torch.bool, device="cuda")
    starts = torch.zeros(200, dtype=torch.int32, device="cuda")
    starts[70] = 71
    late = mtraining.block_index(blocks, document_starts=starts, **sizes)
    mtraining.attend(q, k, v, late)
    refused(r"document_starts\[0, 70\]: expected 0 .. 70, got 71")

    whole = mtraining.block_index(blocks, **sizes)
    tight = dataclasses.replace(whole, capacity=3)  # 10 blocks do not fit
    out, _ = mtraining.attend(q, k, v, tight)
    refused("capacity: expected the longest list of a head, 10 blocks, or more, got 3")
    want, _ = mtraining.attend(q, k, v, whole)
    assert torch.equal(out[:, :128], want[:, :128])  # what has room is as ever
    assert torch.isfinite(out).all()

    bad = q.clone()
    bad[0, 130, 1, 5] = float("nan")
    mtraining.build_index(bad, k, pattern=mtraining.XAttention())
    refused("q: expected finite values, got NaN or inf at sample 0, head 1, position 130")


def test_deterministic_gradients_are_the_same_bits():
    inputs = [
        x.cuda().requires_grad_() for x in structured(1, 3000, 8, 2, 128, dtype=torch.bfloat16)
    ]
    index = mtraining.block_index(
        random_blocks(1, 8, 3000, 128).cuda(), seq_len=3000, block_size=128
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        out, _ = mtraining.attend(*inputs, index)
        dout = torch.randn_like(out)
        first = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        for _ in range(20):
            again = torch.autograd.grad(out, inputs, dout, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_long_lists_get_the_room_that_they_need():
    """Where the most that there could be is too much, the host waits for how long the longest list is."""
    seq_len, heads = 1 << 18, 16
    blocks = torch.eye(seq_len // 128, dtype=torch.bool, device="cuda")
    blocks[:, 0] = True
    blocks = blocks.expand(1, heads, -1, -1)
    index = mtraining.block_index(blocks, seq_len=seq_len, block_size=128)
    assert index.capacity == seq_len // 128 * 7 - 4  # 3 of the own unit, 4 of the first one
    random = torch.Generator("cuda").manual_seed(1)
    q, k, v = (
        torch.randn(
            1, seq_len, h, 64, device="cuda", dtype=torch.bfloat16, generator=random
        ).requires_grad_()
        for h in (heads, 2, 2)
    )
    out, _ = mtraining.attend(q, k, v, index)
    rows = torch.tensor([0, 127, 128, 1000, seq_len - 1], device="cuda")
    for row in rows.tolist():
        keys = torch.arange(seq_len, device="cuda")
        seen = ((keys < 128) | (keys // 128 == row // 128)) & (keys <= row)
        scores = q[0, row].double() @ k[0, seen, 0].double().T / 8
        want = scores[:8].softmax(-1) @ v[0, seen, 0].double()
        assert (out[0, row, :8].double() - want).norm() < 1e-2 * want.norm()
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(torch.isfinite(x.float()).all() for x in gradients)
    # Each row's weights add up to 1, so dv adds up to the number of rows and heads.
    total = gradients[2].double().sum((0, 1, 3)) / 64
    torch.testing.assert_close(total, torch.full_like(total, seq_len * 8.0), rtol=1e-2, atol=0)
