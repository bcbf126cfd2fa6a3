"""The operators on a GPU: against dense attention in float64 under the index's own mask, and against the CPU's choice.

Marked cuda: without a CUDA device, or a library built with CUDA, these cases are left out and counted as not run.
"""

import pathlib
import sys

import pytest
import torch

import mtraining

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from dense_reference import attention, mask_of, plain, row_error, structured  # noqa: E402
from device_waits import assert_the_host_does_not_wait  # noqa: E402

pytestmark = pytest.mark.cuda

SPARSE = mtraining.VerticalSlash(
    p_vertical=0.3, p_slash=0.3, sink_tokens=3, local_blocks=1, dense_threshold=1.0
)


def on_gpu(*tensors):
    return [x.cuda() for x in tensors]


def lists_equal_up_to_the_threshold(got, want, most):
    """Two choices of every head: how many entries differ, at most `most` of them and 2 %."""
    for row_got, n_got, row_want, n_want in zip(
        got[0].flatten(0, 1),
        got[1].flatten(),
        want[0].flatten(0, 1),
        want[1].flatten(),
        strict=True,
    ):
        a, b = set(row_got[:n_got].tolist()), set(row_want[:n_want].tolist())
        assert len(a ^ b) <= max(most, 0.02 * len(b)), (sorted(a ^ b), len(a), len(b))


SHAPES = [  # batch, length, heads, kv heads, head_dim, dtype
    (1, 1, 1, 1, 64, torch.bfloat16),
    (2, 65, 4, 2, 64, torch.float16),
    (1, 333, 7, 1, 128, torch.bfloat16),
    (2, 700, 4, 2, 128, torch.float16),
    (1, 1500, 16, 2, 128, torch.bfloat16),
]


@pytest.mark.parametrize(("batch", "seq_len", "heads", "kv_heads", "head_dim", "dtype"), SHAPES)
def test_out_lse_and_gradients_are_those_of_dense_attention_under_the_mask(
    batch, seq_len, heads, kv_heads, head_dim, dtype
):
    cpu = structured(batch, seq_len, heads, kv_heads, head_dim, dtype=dtype)
    inputs = [x.requires_grad_() for x in on_gpu(*cpu)]
    out, lse, index = mtraining.sparse_attention(
        *inputs, pattern=SPARSE, return_lse=True, return_index=True
    )
    assert out.is_cuda and index.diagonals.is_cuda and lse.dtype == torch.float32
    mask = index.mask()
    lists = [x.cpu() for x in index.lists()]
    host = mtraining.Index(seq_len, *lists, index.dense_heads.cpu(), index.caps_hit.cpu())
    assert torch.equal(mask.cpu(), mask_of(host))
    assert torch.equal(index.pairs().cpu(), host.pairs())
    want, want_lse = attention(*inputs, mask)
    assert row_error(out, want) <= 2 * row_error(plain(*inputs, mask), want) + 1e-6
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-3)

    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()
    got = torch.autograd.grad((out * weight).sum(), inputs)
    rough = torch.autograd.grad((plain(*inputs, mask) * weight).sum(), inputs)
    exact = torch.autograd.grad((want * weight.double()).sum(), inputs)
    for a, b, c, name in zip(got, rough, exact, "qkv", strict=True):
        error, rough_error, size = (
            (a - c).double().norm(),
            (b - c).double().norm(),
            c.double().norm(),
        )
        if size < 1e-6:  # one token: dq and dk are 0
            assert a.norm() < 1e-3, name
        else:
            assert error <= 2 * rough_error + 2e-3 * size, (name, error / size, rough_error / size)


@pytest.mark.parametrize("window", ["last", "strided"])
@pytest.mark.parametrize("selection", ["head", "kv_group"])
@pytest.mark.parametrize("seq_len", [100, 777, 3000])
def test_the_choice_is_the_cpus_up_to_entries_at_the_threshold(window, selection, seq_len):
    q, k, _ = structured(2, seq_len, 8, 2, 128, dtype=torch.bfloat16)
    pattern = mtraining.VerticalSlash(
        p_vertical=0.6, p_slash=0.6, window=window, selection=selection, sink_tokens=5
    )
    got = mtraining.build_index(*on_gpu(q, k), pattern=pattern)
    want = mtraining.build_index(q, k, pattern=pattern)
    for a, b in zip(got.lists(), want.lists(), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
    assert torch.equal(got.dense_heads.cpu(), want.dense_heads)
    lists_equal_up_to_the_threshold(got.lists()[:2], want.lists()[:2], 1)
    lists_equal_up_to_the_threshold(got.lists()[2:], want.lists()[2:], 3)
    assert abs(got.density() - want.density()) < 0.02
    torch.testing.assert_close(
        got.recall(*on_gpu(q, k)).cpu(), want.recall(q, k), rtol=0, atol=5e-3
    )


@pytest.mark.parametrize("pooling", ["paper", "token"])
@pytest.mark.parametrize("selection", ["head", "kv_group"])
@pytest.mark.parametrize("max_diagonals", [None, 4])
def test_pooling_by_offsets_is_the_cpus_up_to_offsets_at_the_threshold(
    pooling, selection, max_diagonals
):
    q, k, _ = structured(1, 1500, 8, 2, 128, dtype=torch.bfloat16)
    q = 0.3 * q  # flatter, so that the three rules differ
    options = {"p_vertical": 0.6, "p_slash": 0.5, "selection": selection, "dense_threshold": 1.0}
    pattern = mtraining.VerticalSlash(slash_pooling=pooling, max_diagonals=max_diagonals, **options)
    got = mtraining.build_index(*on_gpu(q, k), pattern=pattern)
    want = mtraining.build_index(q, k, pattern=pattern)
    lists_equal_up_to_the_threshold(got.lists()[:2], want.lists()[:2], 2)
    lists_equal_up_to_the_threshold(got.lists()[2:], want.lists()[2:], 3)
    assert abs(got.caps_hit.item() - want.caps_hit.item()) <= 1
    block = mtraining.build_index(q, k, pattern=mtraining.VerticalSlash(**options))
    assert not torch.equal(block.num_diagonals, want.num_diagonals)  # a rule of its own


@pytest.mark.parametrize("selection", ["head", "kv_group"])
@pytest.mark.parametrize("documents", [False, True])
def test_heads_below_the_floor_of_recall_go_dense_as_on_the_cpu(selection, documents):
    seq_len = 900
    q, k, _ = structured(2, seq_len, 8, 2, 64, dtype=torch.bfloat16)
    position = torch.arange(seq_len)
    starts = None
    if documents:
        starts = torch.stack([position // 300 * 300, torch.where(position < 500, 0, 500)])
    options = {"p_vertical": 0.2, "p_slash": 0.2, "selection": selection, "dense_threshold": 1.0}
    loose = mtraining.build_index(
        q, k, pattern=mtraining.VerticalSlash(**options), document_starts=starts
    )
    recall = loose.recall(q, k)
    seen = set()
    # Between two heads' recall, so that rounding decides nothing.
    ordered = recall.flatten().sort().values
    gap = int((ordered[1:] - ordered[:-1]).argmax())
    for floor in (1e-6, float(ordered[gap] + ordered[gap + 1]) / 2, 1.0):
        pattern = mtraining.VerticalSlash(**options, recall_floor=floor)
        want = mtraining.build_index(q, k, pattern=pattern, document_starts=starts)
        got = mtraining.build_index(
            *on_gpu(q, k),
            pattern=pattern,
            document_starts=None if starts is None else starts.cuda(),
        )
        assert torch.equal(got.dense_heads.cpu(), want.dense_heads), floor
        assert torch.equal(
            got.num_diagonals.cpu()[want.dense_heads], want.num_diagonals[want.dense_heads]
        )
        assert (got.num_columns.cpu()[want.dense_heads] == 0).all()
        seen.add(int(want.dense_heads.sum()))
    assert len(seen) >= 2, seen


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (16, 2), (5, 5)])
def test_every_head_dim_chooses_as_the_cpu(head_dim, heads):
    q, k, _ = structured(1, 800, *heads, head_dim, dtype=torch.float16)
    pattern = mtraining.VerticalSlash(p_vertical=0.6, p_slash=0.6, dense_threshold=1.0)
    got = mtraining.build_index(*on_gpu(q, k), pattern=pattern)
    want = mtraining.build_index(q, k, pattern=pattern)
    lists_equal_up_to_the_threshold(got.lists()[:2], want.lists()[:2], 1)
    lists_equal_up_to_the_threshold(got.lists()[2:], want.lists()[2:], 3)


@pytest.mark.parametrize("seq_len", [1, 63, 64, 65, 4097])
def test_equal_scores_give_the_cpus_choice_exactly(seq_len):
    # Zeros: every key of a row has the same mass, and ties decide all.
    q = torch.zeros(1, seq_len, 4, 64, dtype=torch.bfloat16)
    k = torch.zeros(1, seq_len, 2, 64, dtype=torch.bfloat16)
    for p in (0.1, 0.5, 0.9, 0.99, 1.0):
        for cap in (None, 3):
            pattern = mtraining.VerticalSlash(
                p_vertical=p, p_slash=p, max_columns=cap, sink_tokens=2, dense_threshold=1.0
            )
            got = mtraining.build_index(*on_gpu(q, k), pattern=pattern)
            want = mtraining.build_index(q, k, pattern=pattern)
            # Masses of keys that all rows see are equal; those of the last 63 differ by rounding.
            lists_equal_up_to_the_threshold(got.lists()[2:], want.lists()[2:], 1)
            lists_equal_up_to_the_threshold(got.lists()[:2], want.lists()[:2], 1)
            assert got.caps_hit.item() == want.caps_hit.item()


def test_values_that_are_refused_are_named_by_the_next_call_in_the_cpus_words():
    clean = on_gpu(*structured(2, 600, 4, 2, 64, dtype=torch.bfloat16)[:2])
    for name, place, value in (
        ("k", (1, 77, 1, 5), float("nan")),
        ("k", (0, 599, 0, 63), float("inf")),
        ("k", (1, 300, 0, 0), 2.0**50),
        ("q", (1, 590, 3, 7), float("-inf")),
    ):
        q, k = (x.clone() for x in clean)
        (q if name == "q" else k)[place] = value
        with pytest.raises(ValueError) as host:
            mtraining.build_index(q.cpu(), k.cpu())
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            index = mtraining.build_index(q, k)  # nobody waits, and nothing is thrown yet
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        with pytest.raises(ValueError) as device:
            index.density()
        assert str(device.value) == str(host.value)
        mtraining.build_index(*clean)  # said once
        torch.cuda.synchronize()
        mtraining.build_index(*clean)
    q, k = (x.clone() for x in clean)
    q[0, 10] = float("nan")  # not an observed row: the CPU does not look at it either
    mtraining.build_index(q, k)
    torch.cuda.synchronize()
    mtraining.build_index(*clean)


def test_memory_is_proportional_to_the_length():
    def peak(seq_len):
        q, k = on_gpu(*structured(1, seq_len, 4, 2, 64, dtype=torch.bfloat16)[:2])
        pattern = mtraining.VerticalSlash(max_columns=256)
        mtraining.build_index(q, k, pattern=pattern)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            index = mtraining.build_index(q, k, pattern=pattern)
        after = torch.cuda.memory_allocated()
        del index
        return torch.cuda.max_memory_allocated() - before, after - before

    short, kept_short = peak(4096)
    long, kept_long = peak(8 * 4096)
    assert 0 < kept_short < short and long < 8.5 * short and kept_long < 8.5 * kept_short


def test_caps_and_p_0_and_1_are_the_cpus_exactly():
    q, k, _ = structured(1, 1000, 4, 2, 64, dtype=torch.bfloat16)
    for options in (
        {"p_vertical": 0.0, "p_slash": 0.0},
        {"p_vertical": 1.0, "p_slash": 1.0, "dense_threshold": 1.0},
        {"max_columns": 0, "max_diagonals": 0},
        {"p_vertical": 1.0, "p_slash": 1.0},
    ):
        pattern = mtraining.VerticalSlash(sink_tokens=7, local_blocks=2, **options)
        got = mtraining.build_index(*on_gpu(q, k), pattern=pattern)
        want = mtraining.build_index(q, k, pattern=pattern)
        for a, b in zip(got.lists(), want.lists(), strict=True):
            assert torch.equal(a.cpu(), b), options
        assert torch.equal(got.dense_heads.cpu(), want.dense_heads)
        assert got.caps_hit.item() == want.caps_hit.item()


def test_documents_do_not_see_one_another():
    seq_len = 700
    position = torch.arange(seq_len)
    documents = torch.stack([position // 130 * 130, torch.where(position < 64, 0, 64)])
    q, k, v = structured(2, seq_len, 4, 2, 64, dtype=torch.bfloat16)
    out, index = mtraining.sparse_attention(
        *on_gpu(q, k, v), pattern=SPARSE, document_starts=documents.cuda(), return_index=True
    )
    mask = index.mask().cpu()
    assert not mask[0, :, 500, :390].any() and not mask[1, :, 64:, :64].any()
    want, _ = attention(q, k, v, mask)
    assert row_error(out.cpu(), want) <= 2 * row_error(plain(q, k, v, mask), want) + 1e-6
    host = mtraining.build_index(q, k, pattern=SPARSE, document_starts=documents)
    lists_equal_up_to_the_threshold(index.lists()[:2], host.lists()[:2], 1)
    lists_equal_up_to_the_threshold(index.lists()[2:], host.lists()[2:], 3)
    torch.testing.assert_close(
        index.recall(*on_gpu(q, k)).cpu(), host.recall(q, k), rtol=0, atol=2e-2
    )


def test_the_host_does_not_wait_for_the_device_within_a_layer():
    q, k, v = on_gpu(*structured(1, 2000, 8, 2, 128, dtype=torch.bfloat16))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def layer():
        out = mtraining.sparse_attention(*inputs, pattern=mtraining.VerticalSlash())
        return torch.autograd.grad(out, inputs, torch.ones_like(out))

    assert_the_host_does_not_wait(layer)


def test_work_is_ordered_on_the_current_stream():
    q, k, v = structured(1, 1500, 4, 2, 128, dtype=torch.bfloat16)
    want, index = mtraining.sparse_attention(*on_gpu(q, k, v), pattern=SPARSE, return_index=True)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = [torch.zeros_like(x, device="cuda") for x in (q, k, v)]
        torch.cuda._sleep(20_000_000)  # about 10 ms in which another stream would read zeros
        for to, x in zip(late, on_gpu(q, k, v), strict=True):
            to.copy_(x)
        out = mtraining.sparse_attention(*late, pattern=SPARSE)
    stream.synchronize()
    assert torch.equal(out, want)


def test_lists_given_by_a_user_are_put_in_order_and_bad_values_dropped_and_told():
    given = structured(1, 300, 2, 1, 64, dtype=torch.bfloat16)
    q, k, v = on_gpu(*given)

    def index(diagonals, columns, device="cuda", capacity=6):
        def lists(values):
            padded = torch.tensor(values + [-1] * (capacity - len(values)), dtype=torch.int32)
            counts = torch.full((1, 2), len(values), dtype=torch.int32, device=device)
            return padded.to(device).expand(1, 2, -1), counts

        flags = torch.zeros(1, 2, dtype=torch.bool, device=device), torch.tensor(0, device=device)
        return mtraining.Index(300, *lists(diagonals), *lists(columns), *flags)

    clean = index([0, 2], [4, 9])
    want = mtraining.attend(q, k, v, clean)
    for diagonals, columns, right in (
        ([2, 0, 0], [9, 4, 4], True),
        ([2, 0, 0, 5], [9, 4, 4], False),
        ([0, 2, -3], [4, 9], False),
        ([2, 0], [9, 4, 300, 4], False),
        ([0, 2], [-1, 4, 9], False),
    ):
        out = mtraining.attend(q, k, v, index(diagonals, columns))
        assert all(map(torch.equal, out, want))
        torch.cuda.synchronize()
        if not right:
            with pytest.raises(ValueError) as told:  # by the next call, whichever it is
                mtraining.attend(q, k, v, clean)
            with pytest.raises(ValueError) as refused:
                mtraining.attend(*given, index(diagonals, columns, "cpu"))
            # Of two heads either may be the one that is named.
            assert str(told.value).replace("head 1", "head 0") == str(refused.value)
        assert all(map(torch.equal, mtraining.attend(q, k, v, clean), want))  # said once


def test_empty_rows_give_zero_and_minus_infinity():
    q, k, v = on_gpu(*structured(1, 200, 2, 1, 64, dtype=torch.bfloat16))
    ints = {"dtype": torch.int32, "device": "cuda"}
    index = mtraining.Index(
        200,
        torch.tensor([[[2], [2]]], **ints),
        torch.ones(1, 2, **ints),
        torch.full((1, 2, 1), -1, **ints),
        torch.zeros(1, 2, **ints),
        torch.zeros(1, 2, dtype=torch.bool, device="cuda"),
        torch.tensor(0, device="cuda"),
    )
    out, lse = mtraining.attend(q, k, v, index)
    assert (out[:, :128] == 0).all() and (lse[:, :, :128] == float("-inf")).all()
    assert torch.isfinite(lse[:, :, 128:]).all()


@pytest.mark.parametrize("make", ["slices", "transposed", "expanded", "odd"])
def test_strides_do_not_matter(make):
    def view(x):
        if make == "slices":
            wide = torch.full((*x.shape[:3], 4 * x.shape[3]), float("nan")).to(x)
            wide[..., : x.shape[3]] = x
            return wide[..., : x.shape[3]]
        if make == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if make == "odd":  # rows that are not 16-byte aligned
            wide = torch.full((*x.shape[:3], x.shape[3] + 3), float("nan")).to(x)
            wide[..., 1:-2] = x
            return wide[..., 1:-2]
        return x[:1].expand(2, -1, -1, -1)

    given = [
        view(x).detach().requires_grad_()
        for x in on_gpu(*structured(2, 130, 4, 2, 64, dtype=torch.bfloat16))
    ]
    copies = [x.detach().contiguous().clone().requires_grad_() for x in given]
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for inputs in (given, copies):
            out = mtraining.sparse_attention(*inputs, pattern=SPARSE)
            dout = torch.ones((), device="cuda", dtype=out.dtype).expand_as(out)
            results.append([out, *torch.autograd.grad(out, inputs, dout)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_dense_equals_torch_with_and_without_an_index():
    inputs = [
        x.requires_grad_() for x in on_gpu(*structured(2, 300, 4, 2, 64, dtype=torch.bfloat16))
    ]
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in inputs), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    alone = mtraining.sparse_attention(*inputs, pattern=mtraining.Dense())
    out, lse = mtraining.sparse_attention(*inputs, pattern=mtraining.Dense(), return_lse=True)
    torch.testing.assert_close(alone, want)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
    assert torch.isfinite(lse).all()


def test_what_a_gpu_does_not_do_is_refused_by_name():
    q, k, v = on_gpu(*structured(1, 100, 2, 1, 64))
    with pytest.raises(NotImplementedError, match="bf16"):
        mtraining.sparse_attention(q, k, v)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    with pytest.raises(ValueError, match="device"):
        mtraining.build_index(q, k.cpu())
    with pytest.raises(NotImplementedError, match="head_dim"):
        mtraining.build_index(q[..., :32], k[..., :32])
    many = torch.zeros(1, 64, 4096, 64, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(NotImplementedError, match="kv_group over 4096 heads"):
        mtraining.build_index(
            many, many[:, :, :1], pattern=mtraining.VerticalSlash(selection="kv_group")
        )


@pytest.mark.parametrize("name", ["build_index", "attend", "attend_backward", "index_pairs"])
def test_opcheck(name):
    q, k, v = on_gpu(*structured(2, 100, 4, 2, 64, dtype=torch.bfloat16))
    ops = mtraining.library.ops
    lists = mtraining.build_index(q, k, pattern=SPARSE).lists()
    attend = (*(x.requires_grad_() for x in (q, k, v)), *lists, None, 0.0)
    arguments = {
        "build_index": (q.detach(), k.detach(), None, 0.0, *SPARSE.arguments()),
        "attend": attend,
        "index_pairs": (*lists, 100),
    }
    if name == "attend_backward":
        saved = [x.detach() for x in ops.attend(*attend)]
        grad = torch.ones_like(q)
        arguments[name] = (grad, *(x.detach() for x in (q, k, v)), *saved, *lists, None, 0.0)
    results = torch.library.opcheck(getattr(ops, name).default, arguments[name])
    assert set(results.values()) == {"SUCCESS"}, results
