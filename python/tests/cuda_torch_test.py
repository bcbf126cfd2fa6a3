"""The operators on a GPU as torch and transformers use them: schemas, compilation, recomputation, a model's attention.

Marked cuda: without a CUDA device, or a library built with CUDA, these cases are left out and counted as not run.
"""

import copy
import pathlib
import sys

import pytest
import torch

import mtraining
from python.tests.operator_samples import (
    BLOCK_NAMES,
    NAMES,
    PATTERN,
    block_samples,
    operator_samples,
)

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from dense_reference import structured  # noqa: E402

pytestmark = pytest.mark.cuda

# Every causal pair, yet through the index and the kernels.
EVERY_PAIR = mtraining.VerticalSlash(p_vertical=1.0, p_slash=1.0, dense_threshold=1.0)


@pytest.mark.parametrize("name", NAMES + BLOCK_NAMES)
def test_opcheck(name):
    operator = getattr(mtraining.library.ops, name).default
    samples = block_samples if name in BLOCK_NAMES else operator_samples
    for arguments in samples(name, "cuda", 200, 64, torch.float16):
        results = torch.library.opcheck(operator, arguments)
        assert set(results.values()) == {"SUCCESS"}, results


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("backend", "dynamic"), [("aot_eager", False), ("aot_eager", True), ("inductor", False)]
)
def test_compiles_as_one_graph(backend, dynamic, deterministic):
    def layer(q, k, v):
        return mtraining.sparse_attention(q * 1.5, k, v, pattern=PATTERN) + 1

    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=dynamic)
    for seq_len in (300, 450) if dynamic else (300,):
        inputs = [
            x.cuda().requires_grad_()
            for x in structured(2, seq_len, 4, 2, 64, dtype=torch.bfloat16)
        ]
        results = []
        for function in (layer, compiled):
            out = function(*inputs)
            results.append([out, *torch.autograd.grad(out.float().pow(2).sum(), inputs)])
        for a, b in zip(*results, strict=True):
            error = (a.float() - b.float()).norm() / a.float().norm()
            assert error < 1e-2, error  # a fused graph rounds q * 1.5 and out + 1 elsewhere


def test_checkpointed_recomputation_changes_nothing(deterministic):
    inputs = [
        x.cuda().requires_grad_() for x in structured(1, 900, 4, 2, 128, dtype=torch.bfloat16)
    ]

    def layer(q, k, v):
        return mtraining.sparse_attention(q, k, v, pattern=PATTERN)

    plain = torch.autograd.grad(layer(*inputs).float().pow(2).sum(), inputs)
    out = torch.utils.checkpoint.checkpoint(layer, *inputs, use_reentrant=False)
    again = torch.autograd.grad(out.float().pow(2).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


# ---------------------------------------------------------------- transformers


def models(pattern):
    """The same random bf16 weights twice: eager, and with this package's attention."""
    transformers = pytest.importorskip("transformers")
    mtraining.hf.register(pattern)
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 256,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
    }
    made = [
        transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(**sizes, attn_implementation=attention)
        ).to("cuda", torch.bfloat16)
        for attention in ("eager", "mtraining")
    ]
    made[1].load_state_dict(made[0].state_dict())
    return made


def tokens(batch, length):
    return torch.randint(
        1, 97, (batch, length), generator=torch.Generator().manual_seed(3), dtype=torch.long
    ).cuda()


def close(got, want, most):
    error = (got.float() - want.float()).norm() / want.float().norm()
    assert error < most, error


@pytest.mark.parametrize("pattern", [EVERY_PAIR, mtraining.Dense()], ids=["every_pair", "dense"])
def test_a_models_logits_and_gradients_are_eagers_where_every_pair_counts(pattern):
    eager, ours = models(pattern)
    ids = tokens(2, 300)
    outs = [model(ids, labels=ids) for model in (eager, ours)]
    close(outs[1].logits, outs[0].logits, 2e-2)
    for out in outs:
        out.loss.backward()
    for (name, a), b in zip(eager.named_parameters(), ours.parameters(), strict=True):
        error = (b.grad.float() - a.grad.float()).norm() / a.grad.float().norm()
        assert error < 5e-2 or a.grad.norm() < 1e-3, (name, error)


def test_a_sparse_model_trains_recomputes_and_differs_from_dense(deterministic):
    eager, ours = models(
        mtraining.VerticalSlash(
            p_vertical=0.2, p_slash=0.2, sink_tokens=3, local_blocks=1, dense_threshold=1.0
        )
    )
    ids = tokens(1, 600)
    with torch.no_grad():
        difference = (ours(ids).logits - eager(ids).logits).float().abs()
    assert (
        difference[:, 64:].max() > 4 * difference[:, :64].max()
    )  # the first block is always whole
    again = copy.deepcopy(ours)
    again.gradient_checkpointing_enable({"use_reentrant": False})
    losses = []
    for model in (ours, again):
        model.train()
        losses.append(model(ids, labels=ids, use_cache=False).loss)
        losses[-1].backward()
    for a, b in zip(ours.parameters(), again.parameters(), strict=True):
        assert torch.isfinite(a.grad).all() and torch.equal(a.grad, b.grad)
    torch.optim.SGD(ours.parameters(), lr=0.5).step()
    assert ours(ids, labels=ids).loss < losses[0]


def test_padding_and_packed_sequences_are_samples_alone():
    _, ours = models(EVERY_PAIR)
    ids = tokens(2, 200)
    mask = torch.stack([(torch.arange(200) < n).long() for n in (200, 77)]).cuda()
    with torch.no_grad():
        logits = ours(ids, attention_mask=mask).logits
        for sample, length in enumerate((200, 77)):
            alone = ours(ids[sample : sample + 1, :length]).logits[0]
            close(logits[sample, :length], alone, 2e-2)
        position_ids = torch.cat([torch.arange(n) for n in (70, 130)])[None].cuda()
        packed = ours(ids[:1], position_ids=position_ids, use_cache=False).logits[0]
        for first, last in ((0, 70), (70, 200)):
            alone = ours(ids[:1, first:last], use_cache=False).logits[0]
            close(packed[first:last], alone, 2e-2)


def test_generation_attends_densely_to_the_cache():
    _, ours = models(mtraining.VerticalSlash())
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    generated = ours.generate(tokens(2, 80), **options)
    assert generated.shape == (2, 85)
