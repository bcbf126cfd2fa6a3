"""The operators as torch sees them: schemas, shapes without data, autograd registration, compilation."""

import pathlib
import sys

import pytest
import torch

import mtraining

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from dense_reference import structured  # noqa: E402

PATTERN = mtraining.VerticalSlash(p_vertical=0.3, p_slash=0.3, dense_threshold=1.0)
CAPPED = mtraining.VerticalSlash(max_columns=9, sink_tokens=4)


def samples(name):
    """Arguments of an operator, with and without documents."""
    ops = mtraining.library.ops
    documents = (torch.arange(100, dtype=torch.int32) // 40 * 40).expand(2, 100).contiguous()
    for starts, pattern, dtype in (
        (None, PATTERN, torch.float32),
        (documents, PATTERN, torch.bfloat16),
        (None, CAPPED, torch.float32),
    ):
        q, k, v = structured(2, 100, 4, 2, 16, dtype=dtype)
        if name == "build_index":
            yield (q, k, starts, 0.0, *pattern.arguments())
            continue
        lists = mtraining.build_index(q, k, pattern=pattern, document_starts=starts).lists()
        if name == "recall":
            yield (q, k, *lists, starts, 0.0, 64, "last", 8, 1)
        elif name == "index_mask":
            yield (*lists, starts, 100)
        elif name == "index_pairs":
            yield (*lists, 100)
        else:
            q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
            attend = (q, k, v, *lists, starts, 0.0)
            if name == "attend":
                yield attend
                continue
            attended = [x.detach() for x in ops.attend(*attend)]
            grad = torch.randn(q.shape).to(q.dtype)
            yield (grad, *(x.detach() for x in (q, k, v)), *attended, *lists, starts, 0.0)


@pytest.mark.parametrize(
    "name", ["build_index", "attend", "attend_backward", "recall", "index_mask", "index_pairs"]
)
def test_opcheck(name):
    operator = getattr(mtraining.library.ops, name).default
    for arguments in samples(name):
        results = torch.library.opcheck(operator, arguments)
        assert set(results.values()) == {"SUCCESS"}, results


def test_shapes_are_known_without_data():
    q, k, v = (x.to("meta") for x in structured(2, 100, 4, 2, 16, dtype=torch.bfloat16))
    out, lse, index = mtraining.sparse_attention(
        q, k, v, pattern=CAPPED, return_lse=True, return_index=True
    )
    assert out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == (2, 4, 100) and lse.dtype == torch.float32
    assert index.diagonals.shape == (2, 4, 2) and index.columns.shape == (2, 4, 13)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_as_one_graph(dynamic):
    def layer(q, k, v):
        return mtraining.sparse_attention(q * 1.5, k, v, pattern=PATTERN) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for seq_len in (100, 130):
        inputs = [x.requires_grad_() for x in structured(2, seq_len, 4, 2, 16)]
        results = []
        for function in (layer, compiled):
            out = function(*inputs)
            results.append([out, *torch.autograd.grad(out.pow(2).sum(), inputs)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_torchs_thread_count_is_followed_and_changes_nothing():
    inputs = [x.requires_grad_() for x in structured(1, 500, 4, 2, 64)]
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            out = mtraining.sparse_attention(*inputs, pattern=PATTERN)
            results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_checkpointed_recomputation_changes_nothing():
    inputs = [x.requires_grad_() for x in structured(1, 300, 4, 2, 64)]

    def layer(q, k, v):
        return mtraining.sparse_attention(q, k, v, pattern=PATTERN)

    plain = torch.autograd.grad(layer(*inputs).pow(2).sum(), inputs)
    out = torch.utils.checkpoint.checkpoint(layer, *inputs, use_reentrant=False)
    again = torch.autograd.grad(out.pow(2).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
