"""Lists of blocks given by the caller or chosen by XAttention and Moba, against dense attention in float64 under the blocks' mask."""

import json
import pathlib
import sys

import pytest
import torch

import mtraining
from python.tests.conftest import run_text

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from block_cases import (  # noqa: E402
    as_lists,
    moba_blocks,
    pair_mask,
    random_blocks,
    xattention_blocks,
)
from dense_reference import assert_attends_under, attention, row_error, structured  # noqa: E402

LENGTHS = [1, 64, 65, 129, 300, 700]


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("seq_len", LENGTHS)
@pytest.mark.parametrize("heads", [(4, 2), (7, 1)])
def test_out_and_lse_are_those_of_dense_attention_under_the_mask(seq_len, heads, block_size):
    blocks = random_blocks(2, heads[0], seq_len, block_size)
    index = mtraining.block_index(blocks, seq_len=seq_len, block_size=block_size)
    mask = pair_mask(blocks, seq_len, block_size)
    assert torch.equal(index.mask(), mask)
    q, k, v = structured(2, seq_len, *heads, 64)
    out, lse = mtraining.attend(q, k, v, index)
    want, want_lse = attention(q, k, v, mask)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=2e-5)
    empty = ~mask.any(-1)
    assert (out.transpose(1, 2)[empty] == 0).all() and (lse[empty] == float("-inf")).all()
    if seq_len == 700:
        assert empty.any() and mask.sum() < 0.8 * torch.ones_like(mask).tril().sum()


@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("seq_len", LENGTHS)
def test_lists_in_any_order_are_the_mask(seq_len, block_size):
    blocks = random_blocks(2, 3, seq_len, block_size)
    options = {"seq_len": seq_len, "block_size": block_size}
    given = mtraining.block_index(blocks, **options)
    for dtype in (torch.int32, torch.int64):
        offsets, indices = as_lists(blocks)
        listed = mtraining.block_index(
            offsets=offsets.to(dtype), indices=indices.to(dtype), **options
        )
        assert torch.equal(listed.bits, given.bits)
        assert (listed.query_unit, listed.key_unit) == (given.query_unit, given.key_unit)
    # Entries between the heads' lists belong to none.
    offsets = offsets + torch.arange(6).view(2, 3, 1) + 1
    wide = torch.full((indices.numel() + 6,), -5, dtype=torch.int64)
    for row, begins in enumerate(offsets.view(6, -1)):
        wide[begins[0] : begins[-1]] = indices[begins[0] - row - 1 : begins[-1] - row - 1]
    apart = mtraining.block_index(offsets=offsets, indices=wide, **options)
    assert torch.equal(apart.bits, given.bits)


def test_no_entries_are_empty_rows():
    offsets, indices = torch.zeros(1, 2, 4, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    index = mtraining.block_index(offsets=offsets, indices=indices, seq_len=130, block_size=64)
    assert not index.mask().any() and index.density() == 0
    q, k, v = (x.requires_grad_() for x in structured(1, 130, 2, 1, 16))
    out, lse = mtraining.attend(q, k, v, index)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert (lse == float("-inf")).all() and all((x == 0).all() for x in (out, *gradients))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("seq_len", "block_size"), [(63, 64), (300, 64), (300, 128), (512, 128)])
def test_gradients_are_those_of_dense_attention_under_the_mask(seq_len, block_size, dtype):
    blocks = random_blocks(2, 4, seq_len, block_size)
    index = mtraining.block_index(blocks, seq_len=seq_len, block_size=block_size)
    mask = pair_mask(blocks, seq_len, block_size)
    inputs = [x.requires_grad_() for x in structured(2, seq_len, 4, 2, 64, dtype=dtype)]
    weight = torch.randn(2, seq_len, 4, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = torch.autograd.grad((mtraining.attend(*inputs, index)[0] * weight).sum(), inputs)
    reference = [x.detach().double().requires_grad_() for x in inputs]
    want_out, _ = attention(*reference, mask)
    want = torch.autograd.grad((want_out * weight.double()).sum(), reference)
    tolerance = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for gradient, expected, name in zip(got, want, "qkv", strict=True):
        assert gradient.dtype == dtype
        error = (gradient.double() - expected).norm() / expected.norm()
        assert expected.norm() > 0 and error < tolerance, name


def test_gradcheck_of_given_blocks():
    q, k, v = (x.requires_grad_() for x in structured(1, 150, 2, 1, 8, dtype=torch.float64))
    blocks = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 1]], dtype=torch.bool)
    index = mtraining.block_index(
        torch.stack([blocks, blocks.flip(0)])[None], seq_len=150, block_size=64
    )

    def some(*x):  # all rows would take minutes
        return mtraining.attend(*x, index)[0][:, ::37]

    assert torch.autograd.gradcheck(some, (q, k, v), fast_mode=True)
    (first,) = torch.autograd.grad(some(q, k, v).sum(), v, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(first.pow(2).sum(), q)


@pytest.mark.parametrize("block_size", [64, 128])
def test_documents_do_not_see_one_another(block_size):
    seq_len = 300
    position = torch.arange(seq_len)
    starts = torch.stack([torch.where(position < 77, 0, 77), position // 50 * 50])
    blocks = random_blocks(2, 2, seq_len, block_size)
    index = mtraining.block_index(
        blocks, seq_len=seq_len, block_size=block_size, document_starts=starts
    )
    mask = pair_mask(blocks, seq_len, block_size, starts)
    assert torch.equal(index.mask(), mask)
    inputs = [x.requires_grad_() for x in structured(2, seq_len, 2, 1, 32)]
    out, _ = mtraining.attend(*inputs, index)
    assert_attends_under(mask, inputs, out)


def test_scale_reaches_scores():
    q, k, v = structured(1, 150, 2, 1, 32)
    blocks = random_blocks(1, 2, 150, 64)
    index = mtraining.block_index(blocks, seq_len=150, block_size=64, softmax_scale=0.7)
    want, _ = attention(q, k, v, pair_mask(blocks, 150, 64), 0.7)
    torch.testing.assert_close(
        mtraining.attend(q, k, v, index)[0].double(), want, rtol=0, atol=1e-4
    )


def test_pairs_density_recall_and_plot_say_what_is_covered(tmp_path):
    seq_len = 500
    blocks = random_blocks(2, 4, seq_len, 128)
    index = mtraining.block_index(blocks, seq_len=seq_len, block_size=128)
    mask = pair_mask(blocks, seq_len, 128)
    halves = torch.nn.functional.pad(mask, (0, 12, 0, 12)).view(2, 4, 8, 64, 8, 64).any((-1, -3))
    assert torch.equal(index.blocks(), halves)
    assert torch.equal(index.pairs(), halves.sum((-1, -2)) * 4096)
    assert index.density() == pytest.approx(halves.sum().item() * 4096 / (8 * seq_len**2 / 2))
    q, k, _ = structured(2, seq_len, 4, 2, 64)
    scores = (q.transpose(1, 2) @ k.transpose(1, 2).repeat_interleave(2, 1).transpose(-1, -2)) / 8
    causal = torch.ones(seq_len, seq_len).tril().bool()
    share = scores.masked_fill(~causal, float("-inf")).double().softmax(-1)
    every_row = index.recall(q, k, rows=seq_len)
    torch.testing.assert_close(every_row, (share * mask).sum(-1).mean(-1), rtol=0, atol=1e-5)
    assert not torch.equal(index.recall(q, k, rows=20), index.recall(q, k, rows=20, seed=1))
    index.plot(head=3, sample=1, path=tmp_path / "blocks.png")
    assert (tmp_path / "blocks.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="head 0 .. 3"):
        index.plot(head=4)


def test_a_pattern_file_is_what_simulate_reads(tmp_path, binary):
    q, k, _ = structured(2, 1000, 4, 2, 32)
    index = mtraining.build_index(q, k, pattern=mtraining.XAttention(xattention_threshold=0.5))
    index.write_pattern(tmp_path / "blocks.json", name="chosen", sample=1)
    simulate = [binary, "simulate", "--topology", "2x2", "--json", "--pattern"]
    said = run_text([*simulate, tmp_path / "blocks.json"])
    assert said.returncode == 0, said.stderr
    read = json.loads(said.stdout)["pattern"]
    assert (read["name"], read["seq_len"], read["heads"]) == ("chosen", 1000, 4)
    assert read["pairs"] == index.pairs()[1].sum() < index.pairs().sum()
    with pytest.raises(ValueError, match="sample: expected 0 .. 1, got 2"):
        index.write_pattern(tmp_path / "x.json", sample=2)


# ---------------------------------------------------------------- patterns
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("seq_len", [1, 200, 450])
def test_patterns_choose_the_blocks_of_their_definitions(seq_len, documents):
    position = torch.arange(seq_len)
    starts = torch.where(position < 2 * seq_len // 5, 0, 2 * seq_len // 5) if documents else None
    q, k, v = structured(1, seq_len, 4, 2, 32)
    for pattern, want in (
        (mtraining.XAttention(), xattention_blocks(q, k, 128, 16, 0.9, starts)),
        (
            mtraining.XAttention(
                xattention_block=64, xattention_stride=8, xattention_threshold=0.5
            ),
            xattention_blocks(q, k, 64, 8, 0.5, starts),
        ),
        (mtraining.Moba(moba_chunk=128, moba_top_k=2), moba_blocks(q, k, 128, 2, starts)),
        (mtraining.Moba(moba_chunk=64, moba_top_k=3), moba_blocks(q, k, 64, 3, starts)),
    ):
        out, index = mtraining.sparse_attention(
            q, k, v, pattern=pattern, document_starts=starts, return_index=True
        )
        assert torch.equal(index.blocks(), want), pattern
        mask = pair_mask(want, seq_len, 64, starts)
        assert torch.equal(index.mask(), mask)
        torch.testing.assert_close(out.double(), attention(q, k, v, mask)[0], rtol=0, atol=2e-5)
        if seq_len == 450:
            assert want.sum() < torch.ones_like(want).tril().sum()


@pytest.mark.parametrize(
    "pattern",
    [
        mtraining.XAttention(xattention_threshold=0.6),
        mtraining.Moba(moba_chunk=128, moba_top_k=2),  # its units of queries and keys differ
    ],
    ids=["xattention", "moba"],
)
def test_a_pattern_trains_and_bf16_is_as_exact_as_its_rounding(pattern):
    inputs = [x.requires_grad_() for x in structured(1, 400, 4, 2, 64, dtype=torch.bfloat16)]
    out, index = mtraining.sparse_attention(*inputs, pattern=pattern, return_index=True)
    want, _ = attention(*inputs, index.mask())
    assert row_error(out, want) < 2e-2
    got = torch.autograd.grad(out.float().pow(2).sum(), inputs)
    expected = torch.autograd.grad(want.pow(2).sum(), inputs)
    for a, b in zip(got, expected, strict=True):
        assert (a.float() - b.float()).norm() / b.float().norm() < 3e-2


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(dynamic):
    def layer(q, k, v, index):
        chosen = mtraining.sparse_attention(
            q * 1.5, k, v, pattern=mtraining.Moba(moba_chunk=64, moba_top_k=2)
        )
        return mtraining.attend(q, k, v, index)[0] + chosen

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for seq_len in (200, 330):
        index = mtraining.block_index(
            random_blocks(2, 4, seq_len, 64), seq_len=seq_len, block_size=64
        )
        inputs = [x.requires_grad_() for x in structured(2, seq_len, 4, 2, 16)]
        results = []
        for function in (layer, compiled):
            out = function(*inputs, index)
            results.append([out, *torch.autograd.grad(out.pow(2).sum(), inputs)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_shapes_are_known_without_data():
    q, k, v = (x.to("meta") for x in structured(2, 200, 4, 2, 16, dtype=torch.bfloat16))
    for pattern, units in (
        (mtraining.XAttention(), (2, 1)),
        (mtraining.Moba(moba_chunk=64, moba_top_k=2), (4, 1)),
    ):
        out, lse, index = mtraining.sparse_attention(
            q, k, v, pattern=pattern, return_lse=True, return_index=True
        )
        assert out.shape == q.shape and lse.shape == (2, 4, 200)
        assert index.bits.shape == (2, 4, *units) and index.bits.dtype == torch.int32
    given = torch.zeros(2, 4, 4, 4, dtype=torch.bool, device="meta")
    assert mtraining.block_index(given, seq_len=200, block_size=64).bits.shape == (2, 4, 4, 1)


# ---------------------------------------------------------------- errors
MASK = torch.ones(1, 4, 2, 2, dtype=torch.bool)
OFFSETS, INDICES = torch.zeros(1, 1, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
Q = torch.zeros(1, 100, 4, 32)


def made(mask=None, seq_len=100, block_size=64, **more):
    return mtraining.block_index(mask, seq_len=seq_len, block_size=block_size, **more)


def listed(offsets, indices):
    return made(
        offsets=torch.tensor(offsets).view(1, 1, 3),
        indices=torch.tensor(indices, dtype=torch.int32),
    )


ERRORS = [
    (lambda: made(MASK, block_size=32), NotImplementedError, "block_size: .*64 or 128.*got 32"),
    (lambda: made(MASK, block_size=256), NotImplementedError, "block_size: .*64 or 128.*got 256"),
    (lambda: made(MASK, block_size=64.0), ValueError, "block_size: expected an int, got 64.0"),
    (lambda: made(MASK, seq_len=0), ValueError, "seq_len: expected at least 1, got 0"),
    (lambda: made(), ValueError, "a mask, or offsets and indices, got neither"),
    (lambda: made(offsets=OFFSETS), ValueError, "or offsets and indices, got offsets"),
    (
        lambda: made(MASK, offsets=OFFSETS, indices=INDICES),
        ValueError,
        "got mask and offsets and indices",
    ),
    (lambda: made(MASK, indices=INDICES), ValueError, "got mask and indices"),
    (lambda: made([[True]]), ValueError, "mask: expected a tensor, got list"),
    (lambda: made(MASK.int()), ValueError, r"mask: .*\[B, H, 2, 2\] bool.*got .* int32"),
    (lambda: made(MASK[0]), ValueError, r"mask: .*got \[4, 2, 2\]"),
    (lambda: made(MASK, seq_len=129), ValueError, r"mask: .*3, 3.* 129 tokens.*got \[1, 4, 2, 2\]"),
    (lambda: made(MASK[:, :0]), ValueError, "mask: expected .*none of them 0"),
    (lambda: made(MASK.to_sparse()), ValueError, "mask: expected a strided tensor"),
    (
        lambda: made(offsets=OFFSETS.float(), indices=INDICES),
        ValueError,
        r"offsets: .*\[B, H, 3\] int32 or int64.*got .*float32",
    ),
    (lambda: made(offsets=OFFSETS[..., :2], indices=INDICES), ValueError, "offsets: .*1, 1, 2"),
    (lambda: made(offsets=OFFSETS, indices=MASK), ValueError, r"indices: .*\[entries\].*bool"),
    (
        lambda: made(offsets=OFFSETS, indices=INDICES.to("meta")),
        ValueError,
        "indices: expected device cpu as offsets, got meta",
    ),
    (lambda: listed([0, 2, 1], [0, 1]), ValueError, r"offsets\[0, 0, 2\]: .*ascending.*got 1"),
    (lambda: listed([-1, 1, 2], [0, 1]), ValueError, r"offsets\[0, 0, 0\]: .*\[0, 2\].*got -1"),
    (lambda: listed([0, 1, 3], [0, 1]), ValueError, r"offsets\[0, 0, 2\]: .*\[0, 2\].*got 3"),
    (lambda: listed([0, 1, 2], [0, 2]), ValueError, r"indices\[1\]: .*\[0, 2\), got 2"),
    (lambda: listed([0, 1, 2], [-1, 1]), ValueError, r"indices\[0\]: .*\[0, 2\), got -1"),
    (
        lambda: made(MASK, document_starts=torch.zeros(99, dtype=torch.int32)),
        ValueError,
        r"document_starts: expected \[B=1, S=100\]",
    ),
    (
        lambda: made(MASK, document_starts=torch.zeros(100, dtype=torch.int32, device="meta")),
        ValueError,
        "document_starts: expected device cpu as mask, got meta",
    ),
    (
        lambda: mtraining.attend(
            Q, Q, Q, made(MASK, document_starts=torch.full((100,), 9, dtype=torch.int32))
        ),
        ValueError,
        r"document_starts\[0, 0\]: expected 0 .. 0, got 9",
    ),
    (lambda: made(MASK, softmax_scale=0), ValueError, "softmax_scale"),
    (
        lambda: mtraining.attend(Q[:, :, :2], Q, Q, made(MASK)),
        ValueError,
        "k: expected num_kv_heads Hk that divides H=2",
    ),
    (
        lambda: mtraining.attend(Q, Q, Q, made(MASK[:, :2])),
        ValueError,
        r"bits: expected \[B=1, H=4, query units=2, words=1\] int32, got \[1, 2, 2, 1\]",
    ),
    (lambda: mtraining.attend(Q[:, :64], Q, Q, made(MASK)), ValueError, "q: expected .*S=100"),
    (lambda: made(MASK).recall(Q[:, :64], Q), ValueError, "q: expected .*S=100.*got"),
    (lambda: made(MASK).recall(Q, Q[..., :16]), ValueError, "k: expected .*D=32.*got"),
    (lambda: made(MASK).recall(Q, Q, rows=0), ValueError, "rows: expected an int of at least 1"),
    (lambda: mtraining.XAttention(xattention_block=96), ValueError, "xattention_block: .*got 96"),
    (lambda: mtraining.XAttention(xattention_stride=48), ValueError, "xattention_stride.*got 48"),
    (lambda: mtraining.XAttention(xattention_threshold=2), ValueError, "xattention_threshold"),
    (lambda: mtraining.XAttention(xattention_block="x"), ValueError, "an int, got 'x'"),
    (lambda: mtraining.Moba(moba_chunk=100), ValueError, "moba_chunk: .*64, got 100"),
    (lambda: mtraining.Moba(moba_top_k=0), ValueError, "moba_top_k: expected at least 1"),
    (lambda: mtraining.Moba(moba_top_k=1.5), ValueError, "moba_top_k: expected an int"),
    (
        lambda: mtraining.sparse_attention(Q / 0, Q, Q, pattern=mtraining.XAttention()),
        ValueError,
        "q: expected finite values, got NaN or inf at sample 0, head 0, position 0",
    ),
    (
        lambda: mtraining.sparse_attention(Q, Q / 0, Q, pattern=mtraining.Moba()),
        ValueError,
        "k: expected finite values, got NaN or inf at sample 0, head 0, block 0",
    ),
    (
        lambda: mtraining.build_index(Q, Q[:, :99], pattern=mtraining.Moba()),
        ValueError,
        "k: expected .*S=100",
    ),
    (
        lambda: mtraining.build_index(Q, Q.to("meta"), pattern=mtraining.XAttention()),
        ValueError,
        "k: expected device cpu as q, got meta",
    ),
    (
        lambda: mtraining.library.ops.longest_block_list(made(MASK).bits[0], 1, 1, 100),
        ValueError,
        "bits: expected .*B, H, query units, words",
    ),
]


@pytest.mark.parametrize("call, kind, text", ERRORS, ids=range(len(ERRORS)))
def test_errors_are_one_sentence_of_their_kind(call, kind, text):
    with pytest.raises(kind, match=text) as caught:
        call()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value) and "frame #" not in str(caught.value)
