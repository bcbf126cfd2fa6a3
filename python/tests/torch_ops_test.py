"""The operators as torch sees them: schemas, shapes without data, autograd registration, compilation."""

import pathlib
import sys

import pytest
import torch

import mtraining
from python.tests.operator_samples import (
    BLOCK_NAMES,
    CAPPED,
    NAMES,
    PATTERN,
    block_samples,
    operator_samples,
)

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from dense_reference import structured  # noqa: E402


@pytest.mark.parametrize("name", NAMES + BLOCK_NAMES)
def test_opcheck(name):
    operator = getattr(mtraining.library.ops, name).default
    samples = block_samples if name in BLOCK_NAMES else operator_samples
    for arguments in samples(name, "cpu", 100, 16, torch.float32):
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
