"""sparse_attention, build_index and attend against dense attention in float64 under the index's own mask."""

import dataclasses
import pathlib
import sys
import warnings

import pytest
import torch

import mtraining

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from dense_reference import assert_attends_under, attention, mask_of, plain, row_error, structured  # noqa: E402

SPARSE = mtraining.VerticalSlash(
    p_vertical=0.3, p_slash=0.3, sink_tokens=3, local_blocks=1, dense_threshold=1.0
)


def ragged_index(seq_len, diagonals, columns, batch=1, heads=1, **more):
    """An index given by hand, the same lists for every head."""

    def lists(values):
        values = torch.tensor([*values, -1], dtype=torch.int32).expand(batch, heads, -1)
        count = torch.full((batch, heads), values.shape[-1] - 1, dtype=torch.int32)
        return values, count

    flags = torch.zeros(batch, heads, dtype=torch.bool), torch.tensor(0)
    return mtraining.Index(seq_len, *lists(diagonals), *lists(columns), *flags, **more)


@pytest.mark.parametrize("seq_len", [1, 2, 63, 64, 65, 129, 300, 700])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (7, 1)])
def test_out_and_lse_are_those_of_dense_attention_under_the_mask(seq_len, heads):
    q, k, v = structured(2, seq_len, *heads, 64)
    out, lse, index = mtraining.sparse_attention(
        q, k, v, pattern=SPARSE, return_lse=True, return_index=True
    )
    mask = index.mask()
    assert torch.equal(mask, mask_of(index))
    want, want_lse = attention(q, k, v, mask)
    assert out.dtype == q.dtype and lse.shape == (2, heads[0], seq_len)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=2e-5)
    if seq_len == 700:
        assert mask.sum() < 0.8 * torch.ones(seq_len, seq_len).tril().sum() * 2 * heads[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_error_of_each_dtype_is_at_most_twice_a_plain_computations(dtype, head_dim):
    q, k, v = structured(1, 333, 4, 2, head_dim, dtype=dtype)
    out, index = mtraining.sparse_attention(q, k, v, pattern=SPARSE, return_index=True)
    mask = index.mask()
    want, _ = attention(q, k, v, mask)
    floor = 1e-14 if dtype == torch.float64 else 1e-6
    assert row_error(out, want) <= 2 * row_error(plain(q, k, v, mask), want) + floor


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("seq_len", [1, 63, 65, 300])
def test_gradients_are_those_of_dense_attention_under_the_mask(seq_len, dtype):
    inputs = [x.requires_grad_() for x in structured(2, seq_len, 4, 2, 64, dtype=dtype)]
    weight = torch.randn(2, seq_len, 4, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    out, index = mtraining.sparse_attention(*inputs, pattern=SPARSE, return_index=True)
    got = torch.autograd.grad((out * weight).sum(), inputs)
    reference = [x.detach().double().requires_grad_() for x in inputs]
    want_out, _ = attention(*reference, index.mask())
    want = torch.autograd.grad((want_out * weight.double()).sum(), reference)
    tolerance = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for gradient, expected, name in zip(got, want, "qkv", strict=True):
        assert gradient.dtype == dtype
        error = (gradient.double() - expected).norm() / expected.norm().clamp_min(1e-30)
        small = expected.norm() < 1e-12  # S = 1: dq and dk are 0
        assert (gradient.norm() < 1e-12) if small else error < tolerance, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_error_of_each_row_is_at_most_twice_a_plain_computations(dtype):
    """Also where one key has nearly all of a row's weight and the gradient of q is a small difference."""
    inputs = [x.requires_grad_() for x in structured(1, 700, 4, 2, 64, dtype=dtype)]
    weight = torch.randn(1, 700, 4, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    out, index = mtraining.sparse_attention(*inputs, pattern=SPARSE, return_index=True)
    mask = index.mask()
    got = torch.autograd.grad((out * weight).sum(), inputs)
    rough = torch.autograd.grad((plain(*inputs, mask) * weight).sum(), inputs)
    reference = [x.detach().double().requires_grad_() for x in inputs]
    want = torch.autograd.grad((attention(*reference, mask)[0] * weight).sum(), reference)
    for a, b, c, name in zip(got, rough, want, "qkv", strict=True):
        assert row_error(a, c) <= 2 * row_error(b, c), name


def test_gradcheck_with_a_frozen_index():
    q, k, v = (x.requires_grad_() for x in structured(1, 70, 2, 1, 8, dtype=torch.float64))
    index = ragged_index(70, [0], [3, 10], heads=2)
    assert mask_of(index).sum() < 2 * 70 * 71 / 2  # some causal pairs are left out
    assert torch.autograd.gradcheck(lambda *x: mtraining.attend(*x, index)[0], (q, k, v))


def test_lse_is_not_differentiable_and_a_second_derivative_is_refused_by_name():
    q, k, v = (x.requires_grad_() for x in structured(1, 20, 2, 1, 8))
    out, lse = mtraining.attend(q, k, v, mtraining.build_index(q, k))
    assert out.requires_grad and not lse.requires_grad
    (first,) = torch.autograd.grad(out.sum(), v, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(first.pow(2).sum(), q)


@pytest.mark.parametrize("make", ["slices", "transposed", "expanded", "flipped_dims"])
def test_strides_do_not_matter(make):
    q, k, v = structured(2, 130, 4, 2, 64)

    def view(x):
        if make == "slices":  # every fourth element of a wider tensor
            wide = torch.full((*x.shape[:3], 4 * x.shape[3]), float("nan"))
            wide[..., : x.shape[3]] = x
            return wide[..., : x.shape[3]]
        if make == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if make == "flipped_dims":
            return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        return x[:1].expand(2, -1, -1, -1)

    given = [view(x).detach().requires_grad_() for x in (q, k, v)]
    copies = [x.detach().contiguous().clone().requires_grad_() for x in given]
    results = []
    for inputs in (given, copies):
        out = mtraining.sparse_attention(*inputs, pattern=SPARSE)
        dout = torch.ones(()).expand_as(out)  # stride 0, as from sum()
        results.append([out, *torch.autograd.grad(out, inputs, dout)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.isfinite(results[0][1]).all()


def test_empty_rows_give_zero_and_minus_infinity_and_no_gradient():
    q, k, v = (x.requires_grad_() for x in structured(1, 200, 2, 1, 16))
    index = ragged_index(200, [2], [], heads=2)  # the first two block rows have no key
    out, lse = mtraining.attend(q, k, v, index)
    assert (out[:, :128] == 0).all() and (lse[:, :, :128] == float("-inf")).all()
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert (dq[:, :128] == 0).all() and (dk[:, 128:] == 0).all() and (dv[:, 128:] == 0).all()
    assert all(torch.isfinite(g).all() for g in (dq, dk, dv)) and dv[:, :128].abs().min() > 0


def test_a_single_key_has_exact_gradients():
    q, k, v = (3 * torch.randn(1, 1, 1, 64) for _ in range(3))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = mtraining.sparse_attention(*inputs)
    dq, dk, dv = torch.autograd.grad(out.sum(), inputs)
    assert torch.equal(out, v) and (dq == 0).all() and (dk == 0).all() and (dv == 1).all()


@pytest.mark.parametrize("starts", ["one", "middle", "every_token", "by_sample"])
def test_documents_do_not_see_one_another(starts):
    seq_len = 200
    position = torch.arange(seq_len)
    documents = {
        "one": torch.zeros(seq_len, dtype=torch.int64),
        "middle": torch.where(position < 77, 0, 77),
        "every_token": position,
        "by_sample": torch.stack([torch.where(position < 64, 0, 64), position // 50 * 50]),
    }[starts]
    inputs = [x.requires_grad_() for x in structured(2, seq_len, 2, 2, 32)]
    out, index = mtraining.sparse_attention(
        *inputs, pattern=SPARSE, document_starts=documents, return_index=True
    )
    both = documents.expand(2, seq_len)
    mask = index.mask()
    assert torch.equal(mask, mask_of(index, both))
    assert_attends_under(mask, inputs, out)


def test_softmax_scale_reaches_scores_choice_and_gradient():
    q, k, v = structured(1, 150, 2, 1, 32)
    out, index = mtraining.sparse_attention(
        q, k, v, pattern=SPARSE, softmax_scale=0.7, return_index=True
    )
    torch.testing.assert_close(
        out.double(), attention(q, k, v, index.mask(), 0.7)[0], rtol=0, atol=1e-4
    )
    assert index.softmax_scale == 0.7
    torch.testing.assert_close(out, mtraining.attend(q, k, v, index)[0], rtol=0, atol=0)


def test_dense_is_every_causal_pair_and_equals_torch():
    q, k, v = structured(2, 200, 4, 2, 64)
    out, index = mtraining.sparse_attention(q, k, v, pattern=mtraining.Dense(), return_index=True)
    assert torch.equal(index.mask(), torch.ones(200, 200).tril().bool().expand(2, 4, -1, -1))
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-5)


def test_p_of_one_is_dense_and_density_and_recall_say_so():
    q, k, _ = structured(1, 512, 2, 1, 64)
    whole = mtraining.build_index(q, k, pattern=mtraining.VerticalSlash(p_vertical=1, p_slash=1))
    dense = mtraining.build_index(q, k, pattern=mtraining.Dense())
    assert torch.equal(whole.mask(), dense.mask()) and whole.dense_heads.all()
    assert dense.density() == pytest.approx(8 * 9 / 2 * 64 * 64 / (512 * 512 / 2))
    assert dense.recall(q, k).min() > 1 - 1e-6


def test_recall_is_the_covered_share_of_dense_attention():
    q, k, v = structured(1, 700, 2, 1, 64)
    index = mtraining.build_index(q, k, pattern=SPARSE)
    scores = (q.transpose(1, 2) @ k.transpose(1, 2).repeat_interleave(2, 1).transpose(-1, -2)) / 8
    causal = torch.ones(700, 700).tril().bool()
    share = scores.masked_fill(~causal, float("-inf")).double().softmax(-1)
    covered = (share * index.mask()).sum(-1)
    # All 636 rows outside the window: one row in each part of the rest.
    recall = index.recall(q, k, rows=636)
    torch.testing.assert_close(recall, covered[..., :636].mean(-1), rtol=0, atol=1e-5)
    assert index.window_recall(q, k) == pytest.approx(covered[..., 636:].mean().item(), abs=1e-5)
    assert index.window_recall(q, k) >= 0.3


def test_window_recall_looks_at_the_rows_that_the_index_was_chosen_from():
    q, k, _ = structured(1, 700, 2, 1, 64)
    pattern = mtraining.VerticalSlash(
        p_vertical=0.6, p_slash=0.6, window="strided", sink_tokens=0, local_blocks=1
    )
    strided = mtraining.build_index(q, k, pattern=pattern)
    assert strided.window_recall(q, k) >= 0.6
    last = dataclasses.replace(strided, window="last")
    assert last.window_recall(q, k) != pytest.approx(strided.window_recall(q, k), abs=1e-3)


def test_forced_parts_and_caps():
    q, k, _ = structured(1, 1000, 2, 2, 64)
    pattern = dataclasses.replace(
        SPARSE, p_vertical=1.0, max_columns=7, max_diagonals=3, sink_tokens=5, local_blocks=2
    )
    index = mtraining.build_index(q, k, pattern=pattern)
    assert index.columns.shape[-1] == 12 and index.num_columns.max() <= 12
    assert (index.columns[..., :5] == torch.arange(5)).all()
    assert (index.diagonals[..., :2] == torch.arange(2)).all() and index.num_diagonals.max() <= 5
    assert index.caps_hit == 2


def test_unsorted_and_repeated_lists_mean_the_same_set():
    q, k, v = structured(1, 300, 1, 1, 16)
    tidy = mtraining.attend(q, k, v, ragged_index(300, [0, 2], [5, 70, 200]))
    untidy = mtraining.attend(q, k, v, ragged_index(300, [2, 0, 2], [200, 5, 70, 5]))
    assert all(torch.equal(a, b) for a, b in zip(tidy, untidy, strict=True))


def test_a_plot_shows_the_columns_and_diagonals(tmp_path):
    q, k, _ = structured(1, 700, 2, 1, 64)
    index = mtraining.build_index(q, k, pattern=SPARSE)
    index.plot(head=1, path=tmp_path / "mask.png")
    assert (tmp_path / "mask.png").stat().st_size > 1000
    shares = index._block_shares(1, 0)
    chosen = index.mask()[0, 1].float()
    chosen = torch.nn.functional.pad(chosen, (0, 4, 0, 4)).view(11, 64, 11, 64).mean((1, 3))
    below = torch.ones(10, 10).tril(-1).bool()  # whole blocks
    torch.testing.assert_close(shares[:10, :10][below], chosen[:10, :10][below])
    with pytest.raises(ValueError, match="head 0 .. 1"):
        index.plot(head=2)


Q = torch.zeros(1, 64, 4, 32)
QUANTIZED = torch.quantize_per_tensor(Q, 0.1, 0, torch.qint8)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls them a prototype
    NESTED = torch.nested.nested_tensor([Q[0], Q[0, :5]])


def freed() -> torch.Tensor:
    """As FSDP leaves a parameter: the shape stays, the memory is gone."""
    x = Q.clone()
    x.untyped_storage().resize_(0)
    return x


def changed_index(**fields):
    return dataclasses.replace(ragged_index(64, [0], [3], heads=4), **fields)


ERRORS = [
    (lambda: mtraining.sparse_attention(Q[0], Q, Q), ValueError, r"q: expected \[B, S, H, D\]"),
    (lambda: mtraining.sparse_attention(Q, Q[:, :63], Q), ValueError, r"k: expected \[B=1, S=64"),
    (lambda: mtraining.sparse_attention(Q, Q, Q[..., :16]), ValueError, "v: expected .*D=32"),
    (lambda: mtraining.sparse_attention(Q, Q[:, :, :3], Q[:, :, :3]), ValueError, "divides H=4"),
    (lambda: mtraining.sparse_attention(Q, Q.bfloat16(), Q), ValueError, "k: expected .* float32"),
    (
        lambda: mtraining.sparse_attention(Q[:, :0], Q[:, :0], Q[:, :0]),
        ValueError,
        "none of them 0",
    ),
    (
        lambda: mtraining.sparse_attention(Q[..., :4], Q[..., :4], Q[..., :4]),
        NotImplementedError,
        "head_dim: expected a multiple of 8",
    ),
    (lambda: mtraining.sparse_attention(Q.int(), Q, Q), NotImplementedError, "q: .* got int32"),
    (lambda: mtraining.sparse_attention(Q, Q, Q, pattern="dense"), ValueError, "pattern: expected"),
    (lambda: mtraining.sparse_attention(Q, Q, Q, softmax_scale=-1), ValueError, "softmax_scale"),
    (lambda: mtraining.build_index(Q / 0, Q), ValueError, "q: expected finite values"),
    (
        lambda: mtraining.build_index(Q, Q, document_starts=torch.zeros(63, dtype=torch.int32)),
        ValueError,
        r"document_starts: expected \[B=1, S=64\]",
    ),
    (
        lambda: mtraining.build_index(Q, Q, document_starts=torch.full((64,), 9)),
        ValueError,
        r"document_starts\[0, 0\]: expected 0 .. 0, got 9",
    ),
    (
        lambda: mtraining.attend(Q, Q, Q, ragged_index(65, [0], [], heads=4)),
        ValueError,
        "S=65",
    ),
    (
        lambda: mtraining.attend(Q, Q, Q, ragged_index(64, [0], [])),
        ValueError,
        "index: expected B=1, H=4",
    ),
    (
        lambda: mtraining.attend(Q, Q, Q, ragged_index(64, [1], [], heads=4)),
        ValueError,
        "diagonal",
    ),
    (
        lambda: mtraining.attend(Q, Q, Q, ragged_index(64, [0], [64], heads=4)),
        ValueError,
        "column",
    ),
    (lambda: mtraining.VerticalSlash(p_slash=1.5), ValueError, r"p_slash: .*\[0, 1\], got 1.5"),
    (lambda: mtraining.VerticalSlash(last_q=0), ValueError, "last_q: expected at least 1"),
    (lambda: mtraining.VerticalSlash(last_q=6.5), ValueError, "last_q: expected .*int"),
    (
        lambda: mtraining.VerticalSlash(window="first"),
        ValueError,
        r"window: expected last \| strided",
    ),
    (
        lambda: mtraining.VerticalSlash(slash_pooling="x"),
        ValueError,
        "slash_pooling: expected block",
    ),
    (lambda: mtraining.VerticalSlash(selection="x"), ValueError, "selection: expected head"),
    (lambda: mtraining.VerticalSlash(local_blocks=0), ValueError, "local_blocks"),
    (lambda: mtraining.VerticalSlash(max_columns=-1), ValueError, "max_columns"),
    (lambda: mtraining.VerticalSlash(p_vertical="x"), ValueError, "p_vertical: .* number, got 'x'"),
    (lambda: mtraining.VerticalSlash(p_slash=None), ValueError, "p_slash: .* number, got None"),
    (lambda: mtraining.sparse_attention([1.0], Q, Q), ValueError, "q: .*tensor, got list"),
    (lambda: mtraining.sparse_attention(Q, None, Q), ValueError, "k: .*tensor, got NoneType"),
    (lambda: mtraining.sparse_attention(Q, Q, 1.0), ValueError, "v: .*tensor, got float"),
    (lambda: mtraining.sparse_attention(Q.to_sparse(), Q, Q), ValueError, "q: .*strided"),
    (lambda: mtraining.sparse_attention(Q, Q, Q.to_sparse()), ValueError, "v: .*strided"),
    (lambda: mtraining.attend(Q, Q, Q, None), ValueError, "index: expected an Index.*got NoneType"),
    (
        lambda: mtraining.build_index(Q, Q, document_starts=[0] * 64),
        ValueError,
        "document_starts: expected a tensor, got list",
    ),
    (lambda: mtraining.build_index(Q, Q, softmax_scale="1"), ValueError, "softmax_scale.*'1'"),
    (lambda: mtraining.build_index(Q, Q, softmax_scale=[1]), ValueError, r"softmax_scale.*\[1\]"),
    (lambda: mtraining.build_index(Q, Q, softmax_scale=True), ValueError, "softmax_scale.*True"),
    (lambda: mtraining.positions(10), RuntimeError, "init_process_group"),
    (lambda: mtraining.VerticalSlash(max_columns=2**63), ValueError, "max_columns: .*below 2.63"),
    (lambda: mtraining.VerticalSlash(max_columns=2**63 - 1), ValueError, "max_columns: .*below"),
    (lambda: mtraining.VerticalSlash(p_slash=10**400), ValueError, "p_slash: .*below 2.63"),
    (lambda: mtraining.build_index(Q, Q, softmax_scale=10**400), ValueError, "softmax_scale: "),
    (
        lambda: mtraining.build_index(Q, Q, softmax_scale=torch.ones(2).numpy()),
        ValueError,
        "softmax_scale: expected a positive number",
    ),
    (  # 2^32 is 0 in 32 bits
        lambda: mtraining.build_index(Q, Q, document_starts=torch.full((64,), 2**32)),
        ValueError,
        r"document_starts\[0, 0\]: expected 0 .. 0",
    ),
    (lambda: mtraining.sparse_attention(QUANTIZED, Q, Q), ValueError, "q: .*got a quantized one"),
    (lambda: mtraining.sparse_attention(Q, NESTED, Q), ValueError, "k: .*got a nested one"),
    (lambda: mtraining.sparse_attention(freed(), Q, Q), ValueError, "q: expected a storage of"),
    (lambda: mtraining.sparse_attention(Q, Q, freed()), ValueError, "v: .*32768 bytes.*got 0"),
    (lambda: changed_index(columns=None).mask(), ValueError, "columns: .*tensor, got NoneType"),
    (lambda: changed_index(seq_len=64.0).pairs(), ValueError, "seq_len: expected an int, got 64.0"),
    (lambda: changed_index(seq_len=2**63).pairs(), ValueError, "seq_len: .*64 bits"),
    (lambda: changed_index(window=None).recall(Q, Q), ValueError, "window: .*string, got None"),
    (lambda: changed_index().recall(Q, Q, rows=1.5), ValueError, "rows: expected an int, got 1.5"),
    (lambda: changed_index().recall(Q, Q, seed=2**64), ValueError, "seed: .*64 bits"),
    (lambda: changed_index(softmax_scale=None).recall(Q, Q), ValueError, "softmax_scale: .*None"),
    (
        lambda: changed_index(columns=torch.full((1, 4, 2), -5, dtype=torch.int32)).plot(),
        ValueError,
        "column",
    ),
    (lambda: changed_index().plot(head="0"), ValueError, "head: expected an int, got '0'"),
]


def elsewhere(index, name):
    return dataclasses.replace(index, **{name: getattr(index, name).to("meta")})


def test_tensors_on_two_devices_are_refused_by_name():
    """Never read through a raw pointer, and never answered with memory that nobody wrote."""
    q, k, v = structured(1, 128, 2, 1, 16)
    starts = torch.zeros(1, 128, dtype=torch.int32)
    index = mtraining.build_index(q, k, pattern=SPARSE, document_starts=starts)
    far = {x: t.to("meta") for x, t in {"q": q, "k": k, "v": v, "starts": starts}.items()}
    cases = {
        "k": [
            lambda: mtraining.sparse_attention(q, far["k"], v),
            lambda: mtraining.build_index(q, far["k"], pattern=SPARSE),
            lambda: mtraining.attend(q, far["k"], v, index),
            lambda: index.recall(q, far["k"]),
            lambda: mtraining.sparse_attention(q, far["k"], v, pattern=mtraining.Dense()),
        ],
        "v": [
            lambda: mtraining.sparse_attention(q, k, far["v"], pattern=SPARSE),
            lambda: mtraining.attend(q.requires_grad_(), k, far["v"], index),
        ],
        "document_starts": [
            lambda: mtraining.build_index(q, k, document_starts=far["starts"]),
            lambda: mtraining.build_index(
                q, k, document_starts=far["starts"], pattern=mtraining.Dense()
            ),
            lambda: elsewhere(index, "document_starts").recall(q, k),
            lambda: mtraining.attend(q, k, v, elsewhere(index, "document_starts")),
        ],
    }
    for name in ("diagonals", "num_diagonals", "columns", "num_columns"):
        other = elsewhere(index, name)
        cases[name] = [
            lambda other=other: mtraining.attend(q, k, v, other),
            lambda other=other: other.recall(q, k),
        ]
    for name, calls in cases.items():
        for call in calls:
            with pytest.raises(ValueError, match=f"^{name}: expected device cpu as q, got meta$"):
                call()
    with pytest.raises(ValueError, match="^num_columns: expected device cpu as diagonals"):
        elsewhere(index, "num_columns").mask()
    with pytest.raises(ValueError, match="^columns: expected device cpu as diagonals"):
        elsewhere(index, "columns").pairs()
    with pytest.raises(ValueError, match="^k: expected device meta as q, got cpu"):
        mtraining.build_index(far["q"], k)


@pytest.mark.parametrize("call, kind, text", ERRORS, ids=range(len(ERRORS)))
def test_errors_are_one_sentence_of_their_kind(call, kind, text):
    with pytest.raises(kind, match=text) as caught:
        call()
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value) and "frame #" not in str(caught.value)


def test_keywords_are_the_configurations():
    assert [f.name for f in dataclasses.fields(mtraining.VerticalSlash)] == (
        "p_vertical p_slash last_q window slash_pooling selection sink_tokens local_blocks max_columns max_diagonals "
        "dense_threshold recall_floor recall_rows"
    ).split()
