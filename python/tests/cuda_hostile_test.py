"""Input that nobody should give a GPU, and uses that are legal but odd: each is right, or refused in one sentence.

After each case the device must still answer a plain call with the same bits: no crash, no poisoned context, no other work spoilt.
Marked cuda: without a CUDA device, or a library built with CUDA, these cases are left out and counted as not run.
"""

import copy
import dataclasses
import io
import itertools
import os
import pathlib
import pickle
import sys
import threading

import pytest
import torch
import torch.distributed as dist

import mtraining

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from dense_reference import attention, structured  # noqa: E402
from dense_reference import plain as written_out  # noqa: E402

pytestmark = pytest.mark.cuda

SPARSE = mtraining.VerticalSlash(
    p_vertical=0.3, p_slash=0.3, sink_tokens=3, local_blocks=1, dense_threshold=1.0
)


def inputs(seq_len=200, heads=4, kv_heads=2, head_dim=64, batch=1, dtype=torch.bfloat16, seed=0):
    return [
        x.cuda() for x in structured(batch, seq_len, heads, kv_heads, head_dim, seed, dtype=dtype)
    ]


def layer(q, k, v, **options):
    """Out and gradients of one call, deterministic."""
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    out = mtraining.sparse_attention(*given, pattern=SPARSE, **options)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, given, weight)]


@pytest.fixture(scope="module")
def plain():
    return inputs()


@pytest.fixture(scope="module")
def known(plain):
    torch.use_deterministic_algorithms(True)
    result = layer(*plain)
    torch.cuda.synchronize()
    yield result
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def the_device_still_answers(plain, known):
    yield
    torch.cuda.synchronize()
    for got, want in zip(layer(*plain), known, strict=True):
        assert torch.equal(got, want)
    torch.cuda.synchronize()


def refused(call, *names, kinds=(ValueError, NotImplementedError)):
    with pytest.raises(kinds) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and "frame #" not in text, text
    assert any(name in text for name in names), (names, text)


def assert_right(q, k, v, pattern=SPARSE, **options):
    """Out and gradients of one call against float64 under its own mask, by twice the error of the plain computation."""
    given = [x.detach().requires_grad_() for x in (q, k, v)]
    out, index = mtraining.sparse_attention(*given, pattern=pattern, return_index=True, **options)
    mask, scale = index.mask(), options.get("softmax_scale")
    exact = [x.detach().double().requires_grad_() for x in given]
    want, _ = attention(*exact, mask, scale)
    plainly = written_out(*given, mask, scale)
    weight = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    got = [out, *torch.autograd.grad(out, given, weight)]
    rough = [plainly, *torch.autograd.grad(plainly, given, weight)]
    wanted = [want, *torch.autograd.grad(want, exact, weight.double())]
    for a, b, c, name in zip(got, rough, wanted, ("out", "dq", "dk", "dv"), strict=True):
        error, allowed = (a.double() - c).norm(), 2 * (b.double() - c).norm() + 2e-3 * c.norm()
        if name in ("dq", "dk"):  # dout . v less dout . out, which is kept in 16 bits of its dtype
            sizes = weight.double().norm(dim=-1) * want.norm(dim=-1)
            most = max(x.double().norm(dim=-1).max() for x in given[:2])
            allowed = allowed + 2**-19 * sizes.norm() * most * (scale or q.shape[-1] ** -0.5)
        assert error <= allowed + 1e-6, (name, error.item(), allowed.item(), tuple(q.shape))


PATTERNS = [SPARSE, mtraining.Dense()]


@pytest.mark.parametrize("pattern", PATTERNS, ids=["sparse", "dense"])
@pytest.mark.parametrize("which", [0, 1, 2], ids="qkv")
@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.float32, torch.float64, torch.int32, torch.bool, torch.complex64]
    + [torch.float8_e4m3fn, torch.uint8],
    ids=str,
)
def test_one_tensor_of_another_dtype(plain, which, dtype, pattern):
    given = list(plain)
    given[which] = given[which].to(dtype)
    refused(lambda: mtraining.sparse_attention(*given, pattern=pattern), "q", "k", "v")
    if which < 2:
        refused(lambda: mtraining.build_index(*given[:2], pattern=SPARSE), "q", "k")
    index = mtraining.build_index(*plain[:2], pattern=SPARSE)
    refused(lambda: mtraining.attend(*given, index), "q", "k", "v")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool], ids=str)
def test_all_tensors_of_a_dtype_that_has_no_kernel(plain, dtype):
    given = [x.to(dtype) for x in plain]
    refused(lambda: mtraining.sparse_attention(*given, pattern=SPARSE), "q: ", "bf16")


@pytest.mark.parametrize("pattern", PATTERNS, ids=["sparse", "dense"])
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=str)
def test_tensors_on_two_devices(plain, which, pattern):
    given = [x.cpu() if i in which else x for i, x in enumerate(plain)]
    refused(lambda: mtraining.sparse_attention(*given, pattern=pattern), "device")
    index = mtraining.build_index(*plain[:2], pattern=pattern)
    refused(lambda: mtraining.attend(*given, index), "device")


def test_lists_and_documents_on_another_device(plain):
    starts = torch.zeros(1, 200, dtype=torch.int32)
    refused(lambda: mtraining.build_index(*plain[:2], document_starts=starts), "document_starts")
    refused(
        lambda: mtraining.sparse_attention(
            *plain, pattern=mtraining.Dense(), document_starts=starts
        ),
        "document_starts",
    )
    index = mtraining.build_index(*plain[:2], pattern=SPARSE, document_starts=starts.cuda())
    host = [x.cpu() for x in plain]
    for name in ("diagonals", "num_diagonals", "columns", "num_columns", "document_starts"):
        there = dataclasses.replace(index, **{name: getattr(index, name).cpu()})
        refused(lambda there=there: mtraining.attend(*plain, there), "device")
        refused(lambda there=there: there.recall(*plain[:2]), "device")
        refused(lambda there=there: there.mask(), "device")
    refused(lambda: mtraining.attend(*host, index), "device")
    refused(lambda: index.recall(*host[:2]), "device")


SHAPES = {
    "no batch": lambda q, k, v: (q[:0], k[:0], v[:0]),
    "no tokens": lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0]),
    "no heads": lambda q, k, v: (q[:, :, :0], k, v),
    "no kv heads": lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]),
    "no dim": lambda q, k, v: (q[..., :0], k[..., :0], v[..., :0]),
    "three dimensions": lambda q, k, v: (q[0], k[0], v[0]),
    "five dimensions": lambda q, k, v: (q[None], k[None], v[None]),
    "longer k": lambda q, k, v: (q[:, :100], k, v),
    "shorter k": lambda q, k, v: (q, k[:, :100], v[:, :100]),
    "shorter v": lambda q, k, v: (q, k, v[:, :100]),
    "heads that do not divide": lambda q, k, v: (q[:, :, :3], k, v),
    "v of other heads": lambda q, k, v: (q, k, v[:, :, :1]),
    "another batch": lambda q, k, v: (q, k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1)),
    "narrower k": lambda q, k, v: (q, k[..., :32], v),
    "narrower v": lambda q, k, v: (q, k, v[..., :32]),
    "sparse": lambda q, k, v: (q, k.to_sparse(), v),
}


@pytest.mark.parametrize("pattern", PATTERNS, ids=["sparse", "dense"])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_do_not_fit(plain, name, pattern):
    given = SHAPES[name](*plain)
    refused(lambda: mtraining.sparse_attention(*given, pattern=pattern), "q", "k", "v")
    index = mtraining.build_index(*plain[:2], pattern=pattern)
    refused(lambda: mtraining.attend(*given, index), "q", "k", "v")


@pytest.mark.parametrize("seq_len", [1, 2, 63, 64, 65, 127, 128, 129, 191])
def test_lengths_around_a_block(seq_len):
    for heads, kv_heads, head_dim in ((1, 1, 64), (4, 2, 128)):
        assert_right(*inputs(seq_len, heads, kv_heads, head_dim))


@pytest.mark.parametrize(
    "head_dim", [1, 4, 8, 12, 24, 32, 40, 63, 72, 80, 96, 112, 160, 192, 256, 264, 512]
)
def test_other_head_dims_are_right_or_refused_by_name(head_dim):
    given = [torch.randn(1, 130, h, head_dim, device="cuda").bfloat16() for h in (4, 2, 2)]
    index = mtraining.build_index(*inputs(130)[:2], pattern=SPARSE)
    index = dataclasses.replace(index, softmax_scale=0.0)
    try:
        exact = [x.double().requires_grad_() for x in given]
        given = [x.requires_grad_() for x in given]
        out, _ = mtraining.attend(*given, index)
        gradients = torch.autograd.grad(out.sum(), given)
    except NotImplementedError as error:
        assert "head_dim" in str(error) and "\n" not in str(error), error
        assert head_dim % 8 or head_dim > 256, "a multiple of 8 up to 256 is supported"
    else:
        want, _ = attention(*exact, index.mask())
        wanted = torch.autograd.grad(want.sum(), exact)
        for a, b in zip([out, *gradients], [want, *wanted], strict=True):
            assert (a.double() - b).norm() < 2e-2 * b.norm() + 1e-2
    try:
        mtraining.build_index(*(x.detach() for x in given[:2]), pattern=SPARSE)
    except NotImplementedError as error:
        assert "head_dim" in str(error) and "\n" not in str(error), error


VIEWS = {
    "broadcast over heads": lambda q, k, v: (
        q[:, :, :1].expand(-1, -1, 4, -1),
        k[:, :, :1].expand(-1, -1, 2, -1),
        v[:, :, :1].expand(-1, -1, 2, -1),
    ),
    "one row for all tokens": lambda q, k, v: tuple(
        x[:, :1].expand(-1, 200, -1, -1) for x in (q, k, v)
    ),
    "windows that overlap": lambda q, k, v: tuple(
        x.contiguous().flatten().as_strided(x.shape, (0, 8, 64, 1)) for x in (q, k, v)
    ),
    "an odd offset": lambda q, k, v: tuple(
        torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in (q, k, v)
    ),
    "every second token": lambda q, k, v: tuple(
        x.repeat_interleave(2, 1)[:, ::2] for x in (q, k, v)
    ),
    "dim not innermost": lambda q, k, v: tuple(
        x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)
    ),
    "one fused tensor": lambda q, k, v: torch.cat([q, k, v], 2).split([4, 2, 2], 2),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_equal_their_copies(plain, name):
    views = VIEWS[name](*plain)
    for got, want in zip(layer(*views), layer(*(x.clone() for x in views)), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ["float32", "expanded", "transposed", "nan"])
def test_gradients_of_any_form(plain, kind):
    given = [x.detach().requires_grad_() for x in plain]
    out = mtraining.sparse_attention(*given, pattern=SPARSE)
    dout = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).bfloat16()
    form = {
        "float32": dout.float(),
        "expanded": dout[:, :1].expand_as(out),
        "transposed": dout.transpose(1, 2).contiguous().transpose(1, 2),
        "nan": torch.full_like(dout, float("nan")),
    }[kind]
    got = torch.autograd.grad(out, given, form, retain_graph=True)
    want = torch.autograd.grad(out, given, form.contiguous().clone().bfloat16())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert kind != "nan" or got[2].isnan().any()


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_a_nan_spoils_no_block_before_it(plain, which):
    index = mtraining.build_index(*plain[:2], pattern=SPARSE)
    clean, lse = mtraining.attend(*plain, index)
    given = [x.clone() for x in plain]
    given["qkv".index(which)][:, 150] = float("nan")
    out, spoiled_lse = mtraining.attend(*given, index)
    assert torch.equal(out[:, :128], clean[:, :128])
    assert torch.equal(spoiled_lse[..., :128], lse[..., :128])
    if which == "q":  # one row alone
        others = [i for i in range(200) if i != 150]
        assert torch.equal(out[:, others], clean[:, others])
    assert not out[:, 150].isfinite().any(), "a NaN must not become a number"
    if which != "v":  # nobody waits for the choice: the next call says what was wrong, once
        mtraining.build_index(*given[:2], pattern=SPARSE)
        torch.cuda.synchronize()
        refused(lambda: mtraining.build_index(*plain[:2], pattern=SPARSE), f"{which}: ", "finite")


UNCHOOSABLE = "expected finite values below 2^50, got NaN, inf or a larger one at sample 1, "


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 2.0**50], ids=str)
@pytest.mark.parametrize(
    ("which", "place", "where"),
    [("q", (1, 390, 2, 63), "head 2, position 390"), ("k", (1, 5, 1, 0), "position 5")],
    ids=["q", "k"],
)
def test_the_call_after_a_refused_choice_says_where_the_value_was_and_the_one_after_works(
    which, place, where, value
):
    q, k, v = inputs(400, batch=2)
    index = mtraining.build_index(q, k, pattern=SPARSE)
    bad = [x.clone() for x in (q, k)]
    bad["qk".index(which)][place] = value
    later = {
        "build_index": lambda: mtraining.build_index(q, k, pattern=SPARSE),
        "attend": lambda: mtraining.attend(q, k, v, index),
        "sparse_attention": lambda: mtraining.sparse_attention(q, k, v, pattern=SPARSE),
        "recall": lambda: index.recall(q, k),
    }
    for name, call in later.items():
        call()
        mtraining.build_index(*bad, pattern=SPARSE)  # enqueued: nobody waits, nothing is thrown
        torch.cuda.synchronize()
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) == f"{which}: {UNCHOOSABLE}{where}", name
        call()
    # Within one call too: attention refuses what its own index could not be chosen from, or the next call does.
    with pytest.raises(ValueError, match=f"^{which}: expected finite values"):
        mtraining.sparse_attention(*bad, v, pattern=SPARSE)
        torch.cuda.synchronize()
        call()


def broken(index, **changes):
    return dataclasses.replace(index, **changes)


def test_an_index_of_another_call(plain):
    index = mtraining.build_index(*plain[:2], pattern=SPARSE)
    for other in (
        mtraining.build_index(*inputs(199)[:2], pattern=SPARSE),
        mtraining.build_index(*inputs(heads=2)[:2], pattern=SPARSE),
        mtraining.build_index(*inputs(batch=2)[:2], pattern=SPARSE),
        broken(index, diagonals=index.diagonals.long()),
        broken(index, num_columns=index.num_columns[..., None]),
        broken(index, columns=index.columns[0]),
        broken(index, num_diagonals=index.num_diagonals.float()),
        broken(index, document_starts=torch.zeros(1, 100, dtype=torch.int32, device="cuda")),
        broken(index, document_starts=torch.zeros(1, 200, device="cuda")),
        broken(index, softmax_scale=float("nan")),
        broken(index, softmax_scale=-1.0),
    ):
        refused(
            lambda other=other: mtraining.attend(*plain, other),
            "index",
            "S=",
            "diagonals",
            "columns",
            "document_starts",
            "softmax_scale",
        )


def told(call, *words):
    """What an earlier call found wrong is said by this one, once."""
    torch.cuda.synchronize()
    refused(call, *words)
    torch.cuda.synchronize()
    call()


def test_lists_full_of_rubbish_read_no_memory_of_others_and_are_told(plain):
    """Values and counts out of range are cut or dropped; what is left is what the mask says. The next call says what was wrong."""
    index = mtraining.build_index(*plain[:2], pattern=SPARSE)
    random = torch.Generator().manual_seed(1)

    def rubbish(like):
        return torch.randint(-(2**31), 2**31 - 1, like.shape, generator=random).int().cuda()

    for _ in range(4):
        wild = broken(
            index,
            diagonals=rubbish(index.diagonals),
            num_diagonals=rubbish(index.num_diagonals),
            columns=rubbish(index.columns),
            num_columns=rubbish(index.num_columns),
        )
        mask = wild.mask()
        told(index.pairs, "num_", "diagonals", "columns")
        assert not mask.triu(1).any()
        given = [x.detach().requires_grad_() for x in plain]
        out, _ = mtraining.attend(*given, wild)
        told(index.pairs, "num_", "diagonals", "columns")
        want, _ = attention(*(x.detach() for x in given), mask)
        assert (out.double() - want).norm() <= 2e-2 * want.norm()
        gradients = torch.autograd.grad(out.sum(), given)
        told(lambda: mtraining.attend(*plain, index), "num_", "diagonals", "columns")
        assert all(x.isfinite().all() for x in gradients)


@pytest.mark.parametrize("start", [-1, 151, 2**31 - 1])
def test_document_starts_of_an_index_that_make_no_sense_are_told_by_the_next_call(plain, start):
    index = mtraining.build_index(*plain[:2], pattern=SPARSE)
    starts = torch.zeros(1, 200, dtype=torch.int32, device="cuda")
    mtraining.attend(*plain, broken(index, document_starts=starts))
    torch.cuda.synchronize()
    mtraining.attend(*plain, index)  # nothing was wrong
    starts[0, 150] = start
    out, _ = mtraining.attend(*plain, broken(index, document_starts=starts))
    told(
        lambda: mtraining.attend(*plain, index),
        f"document_starts[0, 150]: expected 0 .. 150, got {start}",
    )
    assert out[:, :150].isfinite().all()


def test_documents_that_make_no_sense_are_refused(plain):
    for starts in (
        torch.full((1, 200), 7, dtype=torch.int32),
        torch.full((1, 200), -1, dtype=torch.int32),
        torch.full((1, 200), 2**31 - 1, dtype=torch.int32),
    ):
        refused(
            lambda starts=starts: mtraining.build_index(*plain[:2], document_starts=starts.cuda()),
            "document_starts",
        )
    for starts in (torch.zeros(1, 199, dtype=torch.int32), torch.zeros(1, 200)):
        refused(
            lambda starts=starts: mtraining.sparse_attention(
                *plain, document_starts=starts.cuda(), pattern=SPARSE
            ),
            "document_starts",
        )


@pytest.mark.parametrize("scale", [1e-6, 0.01, 1.0, 30.0])
def test_scales_that_flatten_or_sharpen(plain, scale):
    assert_right(*plain, softmax_scale=scale)


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3))[1:], ids=str)
def test_gradients_of_some_inputs_only(plain, known, wanted):
    given = [x.detach().requires_grad_(w) for x, w in zip(plain, wanted, strict=True)]
    out = mtraining.sparse_attention(*given, pattern=SPARSE)
    weight = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(out.dtype)
    out.backward(weight)
    for x, w, want in zip(given, wanted, known[1:], strict=True):
        assert torch.equal(x.grad, want) if w else x.grad is None


def test_modes_without_gradients(plain, known):
    given = [x.detach().requires_grad_() for x in plain]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = mtraining.sparse_attention(*given, pattern=SPARSE)
        assert torch.equal(out, known[0]) and not out.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(plain, known, dtype):
    with torch.autocast("cuda", dtype):
        for got, want in zip(layer(*plain), known, strict=True):
            assert torch.equal(got, want)
        refused(
            lambda: mtraining.sparse_attention(*(x.float() for x in plain), pattern=SPARSE), "bf16"
        )


def test_a_second_derivative_is_refused(plain):
    given = [x.detach().requires_grad_() for x in plain]
    out = mtraining.sparse_attention(*given, pattern=SPARSE)
    (dq,) = torch.autograd.grad(out.float().square().sum(), given[:1], create_graph=True)
    refused(lambda: torch.autograd.grad(dq.sum(), given), "second derivative")


def test_inputs_that_change_before_backward_are_noticed(plain):
    given = [x.detach().clone().requires_grad_() for x in plain]
    out = mtraining.sparse_attention(*given, pattern=SPARSE)
    with torch.no_grad():
        given[1].add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()


def test_backward_twice_gives_the_same_bits(plain):
    given = [x.detach().requires_grad_() for x in plain]
    out = mtraining.sparse_attention(*given, pattern=SPARSE)
    first = torch.autograd.grad(out.sum(), given, retain_graph=True)
    second = torch.autograd.grad(out.sum(), given)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_copies_and_pickles_of_patterns_and_indices(plain):
    for pattern in (*PATTERNS, mtraining.VerticalSlash(max_columns=7, window="strided")):
        assert copy.deepcopy(pattern) == pattern
        assert pickle.loads(pickle.dumps(pattern)) == pattern
    index = mtraining.build_index(*plain[:2], pattern=SPARSE)
    want = mtraining.attend(*plain, index)
    file = io.BytesIO()
    torch.save(index, file)
    file.seek(0)
    for other in (
        copy.deepcopy(index),
        pickle.loads(pickle.dumps(index)),
        torch.load(file, weights_only=False),
    ):
        got = mtraining.attend(*plain, other)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_captured_layer_replays_with_new_inputs():
    """Forward and backward in one CUDA graph, the choice of the index included."""
    first, second = inputs(700, seed=1), inputs(700, seed=2)
    static = [x.clone().requires_grad_() for x in first]
    weight = torch.ones_like(static[0])

    def run():
        out = mtraining.sparse_attention(*static, pattern=SPARSE)
        return [out, *torch.autograd.grad(out, static, weight)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for given in (second, first):
        with torch.no_grad():
            for to, x in zip(static, given, strict=True):
                to.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
        fresh = [x.detach().requires_grad_() for x in given]
        out = mtraining.sparse_attention(*fresh, pattern=SPARSE)
        want = [out, *torch.autograd.grad(out, fresh, weight)]
        for a, b in zip(captured, want, strict=True):
            assert torch.equal(a, b)


def test_streams_that_run_beside_each_other(known, plain):
    """Inputs die right after the call; each stream's work is its own."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    ready = torch.cuda.Event()
    ready.record()
    results = []
    for turn in range(12):
        stream = streams[turn % 4]
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            mine = [x.clone() for x in plain]
            results.append(layer(*mine))
            del mine
            torch.full((1 << 20,), float("nan"), device="cuda")  # takes what was freed
    torch.cuda.synchronize()
    for result in results:
        for got, want in zip(result, known, strict=True):
            assert torch.equal(got, want)


def test_threads_each_with_a_stream_of_its_own():
    cases = [inputs(300 + 64 * i, seed=i) for i in range(3)]
    wanted = [layer(*case) for case in cases]
    torch.cuda.synchronize()
    faults = []

    def work(i):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(8):
                    got = layer(*cases[i])
                    torch.cuda.current_stream().synchronize()
                    assert all(torch.equal(a, b) for a, b in zip(got, wanted[i], strict=True))
        except BaseException as error:  # noqa: BLE001 told to the test's own thread
            faults.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not faults and not any(thread.is_alive() for thread in threads), faults


def test_memory_that_is_not_there_is_torchs_own_error():
    index = mtraining.build_index(*inputs(64)[:2], pattern=SPARSE)
    huge = dataclasses.replace(index, seq_len=1 << 21)
    with pytest.raises(torch.OutOfMemoryError):
        huge.mask()


# ---------------------------------------------------------------- ring_attention, one rank on one GPU
@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "pattern",
    [
        SPARSE,
        mtraining.XAttention(xattention_block=64, xattention_threshold=0.5),
        mtraining.Moba(moba_chunk=64, moba_top_k=2),
    ],
    ids=lambda pattern: type(pattern).__name__,
)
def test_a_ring_of_one_gpu_is_sparse_attention(alone, plain, pattern):
    given = [x.detach().requires_grad_() for x in plain]
    out, index = mtraining.sparse_attention(*given, pattern=pattern, return_index=True)
    want = [out, *torch.autograd.grad(out.sum(), given)]
    padded = [torch.nn.functional.pad(x.detach(), (0, 0, 0, 0, 0, 56)) for x in plain]
    for options in ({"pattern": pattern}, {"index": index}):
        mine = [x.clone().requires_grad_() for x in padded]
        out = mtraining.ring_attention(*mine, seq_len=200, **options)
        got = [out, *torch.autograd.grad(out.sum(), mine)]
        for a, b in zip(got, want, strict=True):
            assert (a[:, :200].double() - b.double()).norm() <= 1e-2 * b.double().norm()
            assert not a[:, 200:].any()


def test_a_ring_refuses_what_it_cannot_do(alone, plain):
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 56)) for x in plain)
    nan = k.clone()
    nan[:, 3] = float("nan")
    cases = {
        "other dtype": (q.float(), k.float(), v.float()),
        "mixed dtype": (q, k.half(), v),
        "k on the host": (q, k.cpu(), v),
        "v on the host": (q, k, v.cpu()),
        "shorter k": (q, k[:, :192], v),
        "empty": (q[:0], k[:0], v[:0]),
        "no kv heads": (q, k[:, :, :0], v[:, :, :0]),
        "heads": (q[:, :, :3], k, v),
        "head_dim": tuple(x[..., :12] for x in (q, k, v)),
        "not finite": (q, nan, v),
    }
    for given in cases.values():
        refused(
            lambda given=given: mtraining.ring_attention(*given, pattern=SPARSE, seq_len=200),
            "q",
            "k",
            "v",
            "head_dim",
            "bf16",
        )
    refused(lambda: mtraining.ring_attention(q, k, v, pattern=SPARSE, seq_len=300), "seq_len", "q")
    # After refusals a ring opens anew.
    assert mtraining.ring_attention(q, k, v, pattern=SPARSE, seq_len=200).isfinite().all()


def test_a_ring_gives_gradients_of_some_inputs_only(alone, plain):
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 56)) for x in plain)
    for wanted in itertools.product([False, True], repeat=3):
        given = [x.clone().requires_grad_(w) for x, w in zip((q, k, v), wanted, strict=True)]
        out = mtraining.ring_attention(*given, pattern=SPARSE, seq_len=200)
        assert out.requires_grad == any(wanted)
        if any(wanted):
            out.sum().backward()
        for x, w in zip(given, wanted, strict=True):
            assert (x.grad is not None and x.grad.isfinite().all()) if w else x.grad is None
