"""Dense attention in float64 with a boolean mask: what every test of this folder compares with. Shares no code with the package."""

import torch


def attention(q, k, v, mask, softmax_scale=None):
    """(out [B, S, H, D], lse [B, H, S]) in float64; mask bool [B, H, S, S]; an empty row gives 0 and -inf. Differentiable."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0)[..., None]).exp()
    return (weights @ v).transpose(1, 2), lse


def assert_attends_under(mask, inputs, out) -> None:
    """out and the gradients of its squares' sum are those of dense attention over inputs (q, k, v, float32) under the mask."""
    want, _ = attention(*inputs, mask)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    got = torch.autograd.grad(out.pow(2).sum(), inputs)
    for a, b in zip(got, torch.autograd.grad(want.pow(2).sum(), inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def mask_of(index, document_starts=None):
    """bool [B, H, S, S] from the lists of an index and the definition alone."""
    batch, heads = index.num_diagonals.shape
    position = torch.arange(index.seq_len)
    query, key = position[:, None], position[None, :]
    mask = torch.zeros(batch, heads, index.seq_len, index.seq_len, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            diagonals = index.diagonals[b, h, : index.num_diagonals[b, h]]
            columns = index.columns[b, h, : index.num_columns[b, h]]
            chosen = torch.isin(query // 64 - key // 64, diagonals.long())
            chosen = chosen | torch.isin(key, columns.long())
            start = torch.zeros(index.seq_len) if document_starts is None else document_starts[b]
            mask[b, h] = chosen & (key <= query) & (key >= start[:, None])
    return mask


def plain(q, k, v, mask, softmax_scale=None):
    """The same sums written out in q's dtype with a float32 softmax, as a yardstick of what its rounding costs. Differentiable."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = (q @ k.transpose(-1, -2)).float() * scale
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return (weights.to(q.dtype) @ v).transpose(1, 2)


def row_error(got, want):
    """Largest over rows of |got - want| / |want|; rows of nearly nothing (dq of the first token is 0) by the mean row."""
    error, size = (got.double() - want).norm(dim=-1), want.norm(dim=-1)
    return (error / torch.maximum(size, 1e-3 * size.mean())).max().item()


def structured(batch, seq_len, heads, kv_heads, head_dim, seed=0, dtype=torch.float32):
    """q, k, v whose attention is truly sparse: means shared over positions under rotary embedding (slashes), some keys that
    every query likes (verticals), noise."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    half = head_dim // 2
    angle = torch.arange(seq_len)[:, None] * 1e4 ** (-torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]

    def rotate(x):
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    mean = 1.5 * normal(1, 1, 1, head_dim)
    q = rotate(mean + 0.5 * normal(batch, seq_len, heads, head_dim))
    k = rotate(mean + 0.5 * normal(batch, seq_len, kv_heads, head_dim))
    liked = torch.randperm(seq_len, generator=random)[: max(1, seq_len // 50)]
    k[:, liked] += 0.5 * q.mean((1, 2), keepdim=True)
    return [x.to(dtype) for x in (q, k, normal(batch, seq_len, kv_heads, head_dim))]
