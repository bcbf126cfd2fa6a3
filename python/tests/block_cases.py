"""Masks of blocks for tests, what they mean by positions, and the definitions of the patterns that choose blocks, in float64. Shares no code with the
package."""

import torch

PRIME = 1_000_003


def random_blocks(batch, heads, seq_len, block_size, seed=0):
    """bool [B, H, N, N]: about half of all, later blocks than the query's too; every fifth row of blocks of a head is empty."""
    blocks = -(-seq_len // block_size)
    random = torch.Generator().manual_seed(seed + seq_len * PRIME + block_size)
    chosen = torch.rand(batch, heads, blocks, blocks, generator=random) < 0.5
    row = torch.arange(blocks)[:, None] + torch.arange(heads)[:, None, None]
    return chosen & (row % 5 != 1)


def as_lists(blocks, seed=0):
    """(offsets, indices) int64: each row's blocks in a random order, some of them twice."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for row in blocks.flatten(0, 2):
        (listed,) = row.nonzero(as_tuple=True)
        listed = torch.cat([listed, listed[: len(listed) // 2]])
        rows.append(listed[torch.randperm(len(listed), generator=random)])
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0)
    count = blocks.shape[-1]
    offsets = torch.stack([ends[i : i + count + 1] for i in range(0, len(rows), count)])
    return offsets.view(*blocks.shape[:2], count + 1), torch.cat(rows)


def pair_mask(blocks, seq_len, block_size, starts=None):
    """bool [B, H, S, S] by positions. starts: int [S] or [B, S]."""
    position = torch.arange(seq_len, device=blocks.device)
    at = position // block_size
    mask = blocks[:, :, at][..., at] & (position[None, :] <= position[:, None])
    if starts is None:
        return mask
    starts = starts.to(blocks.device).expand(blocks.shape[0], seq_len)
    return mask & (position >= starts[:, None, :, None])


def _starts(starts, batch, seq_len):
    starts = torch.zeros(seq_len, dtype=torch.int64) if starts is None else starts
    return starts.expand(batch, seq_len)


def xattention_blocks(q, k, block, stride, threshold, starts=None):
    """bool [B, H, N, N] of blocks of 64: the choice by its definition, row by row."""
    (batch, seq_len, heads, dim), shared = q.shape, q.shape[2] // k.shape[2]
    starts = _starts(starts, batch, seq_len)
    groups, wide = -(-seq_len // stride), -(-seq_len // block)

    def grouped(x):
        padded = torch.nn.functional.pad(x.double(), (0, 0, 0, groups * stride - seq_len))
        return padded.view(groups, stride, dim)

    chosen = torch.zeros(batch, heads, wide, wide, dtype=torch.bool)
    per_block = block // stride
    for b in range(batch):
        for h in range(heads):
            queries, keys = grouped(q[b, :, h]).flip(1), grouped(k[b, :, h // shared])
            scores = torch.einsum("isd,jsd->ij", queries, keys) * dim**-0.5 / stride
            for row in range(wide):
                mass = torch.zeros(wide, dtype=torch.float64)
                for i in range(row * per_block, min((row + 1) * per_block, groups)):
                    first = int(starts[b, i * stride]) // stride
                    share = scores[i, first : i + 1].softmax(0)
                    mass.index_add_(0, torch.arange(first, i + 1) // per_block, share)
                sink = int(starts[b, row * block]) // block
                taken = {row, sink}
                held = sum(mass[x].item() for x in taken)
                between = sorted(range(sink + 1, row), key=lambda x: (-mass[x].item(), x))
                for x in between:
                    if held >= threshold * mass.sum().item():
                        break
                    taken.add(x)
                    held += mass[x].item()
                chosen[b, h, row, list(taken)] = True
    return _in_64(chosen, block, block, seq_len)


def moba_blocks(q, k, chunk, top_k, starts=None):
    """bool [B, H, N, N] of blocks of 64."""
    (batch, seq_len, heads, _), shared = q.shape, q.shape[2] // k.shape[2]
    starts = _starts(starts, batch, seq_len)
    blocks, chunks = -(-seq_len // 64), -(-seq_len // chunk)
    chosen = torch.zeros(batch, heads, blocks, chunks, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for row in range(blocks):
                own, first = row * 64 // chunk, int(starts[b, row * 64]) // chunk
                mean = q[b, row * 64 : row * 64 + 64, h].double().mean(0)
                gate = {
                    c: (
                        mean @ k[b, c * chunk : (c + 1) * chunk, h // shared].double().mean(0)
                    ).item()
                    for c in range(first, own)
                }
                best = sorted(gate, key=lambda c: (-gate[c], c))[: top_k - 1]
                chosen[b, h, row, [own, *best]] = True
    return _in_64(chosen, 64, chunk, seq_len)


def _in_64(chosen, query_tokens, key_tokens, seq_len):
    blocks = -(-seq_len // 64)
    whole = chosen.repeat_interleave(query_tokens // 64, 2).repeat_interleave(key_tokens // 64, 3)
    return whole[:, :, :blocks, :blocks].tril()
