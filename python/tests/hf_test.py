"""transformers' models with attn_implementation="mtraining" against their own eager attention."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import mtraining

SPARSE = mtraining.VerticalSlash(
    p_vertical=0.2, p_slash=0.2, sink_tokens=3, local_blocks=1, dense_threshold=1.0
)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


def models(kind, **changes):
    """The same random weights twice: eager, and with this package's attention."""
    config_type, model_type = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[kind]
    torch.manual_seed(0)
    eager = model_type(config_type(**SIZES, **changes, attn_implementation="eager")).eval()
    ours = model_type(config_type(**SIZES, **changes, attn_implementation="mtraining")).eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def tokens(batch, length):
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def registered():
    mtraining.hf.register(mtraining.Dense())


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.parametrize("length", [1, 63, 200])
def test_dense_logits_are_eagers(kind, length):
    eager, ours = models(kind)
    ids = tokens(2, length)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, eager(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_one_training_step_is_eagers(kind):
    ids, results = tokens(2, 150), []
    for model in models(kind):
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        results.append((loss, {name: p.detach() for name, p in model.named_parameters()}))
    (eager_loss, eager), (loss, ours) = results
    torch.testing.assert_close(loss, eager_loss, rtol=0, atol=1e-5)
    for name, parameter in eager.items():
        torch.testing.assert_close(ours[name], parameter, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_sparse_runs_trains_and_differs_from_dense(kind):
    eager, ours = models(kind)
    ids = tokens(1, 400)
    mtraining.hf.register(SPARSE)
    out = ours(ids, labels=ids)
    out.loss.backward()
    assert torch.isfinite(out.logits).all()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters())
    difference = (out.logits - eager(ids).logits).abs()
    assert difference[:, :64].max() < 1e-5  # the first block is always whole
    assert difference[:, 64:].max() > 1e-4
    before = out.loss.item()
    torch.optim.SGD(ours.parameters(), lr=0.5).step()
    assert ours(ids, labels=ids).loss.item() < before


def test_gradient_checkpointing_changes_nothing():
    mtraining.hf.register(SPARSE)
    _, ours = models("qwen2")
    ids, again = tokens(1, 300), copy.deepcopy(ours)
    again.gradient_checkpointing_enable({"use_reentrant": False})
    for model in (ours, again):
        model.train()
        model(ids, labels=ids, use_cache=False).loss.backward()
    for a, b in zip(ours.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_padding_on_the_right_leaves_each_sample_as_if_alone():
    eager, ours = models("qwen2")
    ids = tokens(3, 200)
    lengths = (200, 77, 1)
    mask = torch.stack([(torch.arange(200) < n).long() for n in lengths])
    for pattern in (mtraining.Dense(), SPARSE):
        mtraining.hf.register(pattern)
        logits = ours(ids, attention_mask=mask).logits
        assert torch.isfinite(logits).all()
        for sample, n in enumerate(lengths):
            alone = ours(ids[sample : sample + 1, :n]).logits[0]
            torch.testing.assert_close(logits[sample, :n], alone, rtol=0, atol=1e-5)
    mtraining.hf.register(mtraining.Dense())
    labels = torch.where(mask.bool(), ids, -100)
    losses = [m(ids, attention_mask=mask, labels=labels).loss for m in (eager, ours)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-5)
    grads = [
        torch.autograd.grad(x, m.parameters()) for x, m in zip(losses, (eager, ours), strict=True)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-5)


def test_packed_sequences_are_documents():
    eager, ours = models("llama")
    ids = tokens(1, 200)
    position_ids = torch.cat([torch.arange(n) for n in (70, 1, 129)])[None]
    got = ours(ids, position_ids=position_ids, use_cache=False).logits
    want = eager(ids, position_ids=position_ids, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    alone = ours(ids[:, 71:], use_cache=False).logits
    torch.testing.assert_close(got[:, 71:], alone, rtol=0, atol=1e-5)


def test_packed_masks_are_known_in_the_forms_of_several_versions():
    masking = pytest.importorskip("transformers.masking_utils")
    numbers = torch.tensor([[0, 0, 1, 1, 1]])
    packed = masking.packed_sequence_mask_function(numbers)
    with_causal = masking.and_masks(masking.causal_mask_function, packed)
    starts = mtraining.hf.attention_mask(1, 5, 5, mask_function=with_causal)
    assert starts.tolist() == [[0, 0, 2, 2, 2]]
    with pytest.raises(NotImplementedError, match="non-causal"):
        mtraining.hf.attention_mask(1, 5, 5, mask_function=packed)


def test_generation_attends_densely_to_the_cache():
    eager, ours = models("llama")
    ids = tokens(2, 80)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))


def test_what_is_not_supported_is_named():
    _, ours = models("qwen2")
    ids = tokens(2, 100)
    left = torch.ones(2, 100, dtype=torch.long)
    left[1, :30] = 0
    with pytest.raises(NotImplementedError, match="padding on the left"):
        ours(ids, attention_mask=left)
    with pytest.raises(NotImplementedError, match="4 dimensions"):
        ours(ids, attention_mask=torch.zeros(2, 1, 100, 100))
    _, windowed = models("qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=0)
    with pytest.raises(NotImplementedError, match="sliding.window"):
        windowed(ids)
    _, dropping = models("qwen2", attention_dropout=0.1)
    with pytest.raises(NotImplementedError, match="dropout"):
        dropping.train()(ids)
    _, both_ways = models("llama", is_causal=False)
    with pytest.raises(NotImplementedError, match="non-causal"):
        both_ways(ids)
    with pytest.raises(NotImplementedError, match="static"):
        ours.generate(ids, max_new_tokens=2, cache_implementation="static", pad_token_id=0)
    q = torch.zeros(1, 4, 64, 16)
    for name, value in (("softcap", 30.0), ("is_causal", False), ("s_aux", q)):
        with pytest.raises(
            NotImplementedError, match=name if name != "is_causal" else "non-causal"
        ):
            mtraining.hf.attention_forward(ours, q, q, q, None, scaling=1.0, **{name: value})
    with pytest.raises(ValueError, match="pattern: expected"):
        mtraining.hf.register("dense")
