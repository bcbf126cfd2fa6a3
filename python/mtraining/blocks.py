"""BlockIndex: which blocks of 64 or 128 tokens each head attends to, given by the caller or chosen by XAttention and MoBA.

In:   a boolean mask of blocks, or lists of them; or what build_index chose. Out: an index for attend, with gradients in q, k, v.
Next: ops.attend.
"""

import dataclasses
import json
import pathlib

import torch

from mtraining.index import check_place, draw
from mtraining.library import ops

BLOCK_SIZES = (64, 128)
_BLOCK = 64  # what kernels compute
_WORD = 32
# Room for the lists of a call on a GPU that is taken without asking how much is needed.
_MOST_ROOM_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class BlockIndex:
    """Blocks of each sample and query head, a bit each. Query i attends to key j iff document_starts[i] <= j <= i and the bit of
    (i // (64 * query_unit), j // (64 * key_unit)) is set. Nothing of it is differentiated.

    Shapes: bits int32 [B, H, query units, words], bit u of a row is key unit u; every pattern of bits is allowed: blocks after a
    query's own do not count. capacity: blocks of 64 x 64 that the longest list of a head has room for. document_starts int32
    [B, S] or None. softmax_scale: what scores are multiplied with; 0 means 1 / sqrt(D).
    """

    seq_len: int
    bits: torch.Tensor
    query_unit: int
    key_unit: int
    capacity: int
    document_starts: torch.Tensor | None = None
    softmax_scale: float = 0.0

    def blocks(self) -> torch.Tensor:
        """bool [B, H, N, N] of blocks of 64 x 64 tokens, N = ceil(S / 64); none after the query's own."""
        return torch.stack(
            [
                torch.stack([self._blocks_of(b, h) for h in range(self.bits.shape[1])])
                for b in range(self.bits.shape[0])
            ]
        )

    def mask(self) -> torch.Tensor:
        """bool [B, H, S, S], True where a pair is computed. For small S: it takes B H S^2 bytes."""
        whole = self.blocks().repeat_interleave(_BLOCK, -1).repeat_interleave(_BLOCK, -2)
        pairs = whole[..., : self.seq_len, : self.seq_len].tril()
        if self.document_starts is None:
            return pairs
        keys = torch.arange(self.seq_len, device=self.bits.device)
        return pairs & (keys >= self.document_starts[:, None, :, None])

    def pairs(self) -> torch.Tensor:
        """int64 [B, H]: pairs that a kernel computes: each block of 64 x 64 whole."""
        batch, heads = self.bits.shape[:2]
        counts = [self._blocks_of(b, h).sum() for b in range(batch) for h in range(heads)]
        return torch.stack(counts).view(batch, heads) * _BLOCK**2

    def density(self) -> float:
        """pairs() over all heads / (B H S^2 / 2): 1 is about the cost of dense causal attention."""
        pairs = self.pairs()
        return float(pairs.sum()) / (pairs.numel() * self.seq_len**2 / 2)

    @torch.no_grad()
    def recall(
        self, q: torch.Tensor, k: torch.Tensor, *, rows: int = 256, seed: int = 0
    ) -> torch.Tensor:
        """Share of the attention probability that the blocks cover, float64 [B, H], on a row at random of each of `rows` equal
        parts of the sequence.

        Shapes: q [B, S, H, D], k [B, S, Hk, D]. Cost: 2 * rows * S * D flops and 12 * rows * S bytes a head, one after the other.
        Errors: ValueError.
        """
        from mtraining.ops import check_tensors

        check_tensors(q=q, k=k)
        batch, heads = self.bits.shape[:2]
        if q.dim() != 4 or tuple(q.shape[:3]) != (batch, self.seq_len, heads):
            raise ValueError(
                f"q: expected [B={batch}, S={self.seq_len}, H={heads}, D] as the index has it, got {list(q.shape)}"
            )
        if (
            k.dim() != 4
            or (k.shape[0], k.shape[1], k.shape[3]) != (batch, self.seq_len, q.shape[3])
            or k.shape[2] == 0
            or heads % k.shape[2]
        ):
            raise ValueError(
                f"k: expected [B={batch}, S={self.seq_len}, Hk, D={q.shape[3]}] with Hk a divisor of H={heads}, got {list(k.shape)}"
            )
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise ValueError(f"rows: expected an int of at least 1, got {rows!r}")
        count = min(rows, self.seq_len)
        edges = torch.arange(count + 1) * self.seq_len // count
        at = torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        sampled = (edges[:-1] + (at * (edges[1:] - edges[:-1])).long()).to(q.device)
        exact = torch.float64 if q.device.type == "cpu" else torch.float32
        scale = self.softmax_scale or q.shape[3] ** -0.5
        keys = torch.arange(self.seq_len, device=q.device)
        covered = []
        for b in range(batch):
            hidden = keys > sampled[:, None]
            if self.document_starts is not None:
                hidden = hidden | (keys < self.document_starts[b, sampled][:, None])
            for h in range(heads):
                scores = q[b, sampled, h].to(exact) @ k[b, :, h * k.shape[2] // heads].to(exact).T
                share = (scores * scale).masked_fill(hidden, float("-inf")).softmax(-1)
                chosen = self._blocks_of(b, h)[sampled // _BLOCK].repeat_interleave(_BLOCK, -1)
                covered.append((share * chosen[:, : self.seq_len]).sum(-1).double().mean())
        return torch.stack(covered).view(batch, heads)

    def plot(self, head: int = 0, sample: int = 0, path=None):
        """Draws one head's blocks. Needs matplotlib. Arguments, result and errors as Index.plot."""
        check_place(head, sample, *self.bits.shape[:2])
        image = self._blocks_of(sample, head)
        title = f"head {head}: {int(image.sum())} blocks"
        return draw(image.float().cpu(), self.seq_len, title, path)

    def write_pattern(self, path, name: str = "blocks", sample: int = 0) -> None:
        """Writes one sample's lists as a pattern file for `mtraining simulate --pattern` (docs/formats.md). Errors: ValueError where the sample is
        out of range; OSError."""
        batch, heads = self.bits.shape[:2]
        if not 0 <= sample < batch:
            raise ValueError(f"sample: expected 0 .. {batch - 1}, got {sample}")
        lists = []
        for head in range(heads):
            rows = self._blocks_of(sample, head).cpu()
            lists.append({"key_blocks": [row.nonzero().flatten().tolist() for row in rows]})
        whole = {"name": name, "seq_len": self.seq_len, "heads": lists}
        pathlib.Path(path).write_text(json.dumps(whole), encoding="utf-8")

    def _blocks_of(self, sample: int, head: int) -> torch.Tensor:
        """bool [N, N] of one head."""
        blocks = -(-self.seq_len // _BLOCK)
        places = torch.arange(_WORD, dtype=torch.int32, device=self.bits.device)
        units = (self.bits[sample, head, :, :, None] >> places & 1).bool().flatten(1)
        wide = units.repeat_interleave(self.query_unit, 0).repeat_interleave(self.key_unit, 1)
        return wide[:blocks, :blocks].tril()


def block_index(
    mask: torch.Tensor | None = None,
    *,
    offsets: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    seq_len: int,
    block_size: int,
    softmax_scale: float | None = None,
    document_starts: torch.Tensor | None = None,
) -> BlockIndex:
    """The index of blocks that the caller gives, as a mask or as lists (CSR), for each sample and query head.

    Args:
        mask: bool [B, H, N, N], N = ceil(seq_len / block_size): query block, key block.
        offsets, indices: int [B, H, N + 1] and [entries], int32 or int64: query block i of a head attends to the key blocks
            indices[offsets[b, h, i] : offsets[b, h, i + 1]], in any order; one that is there twice counts once. Offsets ascend over
            all of [B, H, N + 1], so heads follow one another; entries between two heads' belong to none.
        seq_len: tokens; the last block may be cut by it.
        block_size: 64 or 128 tokens.
        softmax_scale: None: 1 / sqrt(D). document_starts: int [B, S] or [S] as in build_index.

    Attention is causal: of a query's own block the pairs up to the query count, of later blocks none, whether they are given or
    not. A query block without a key block gives out = 0, lse = -inf.

    Returns: a BlockIndex where mask or offsets are. On a GPU the host does not wait, unless the longest lists that there could be would take
    more than 256 MB (16 heads: from about 180000 tokens on): then for one number.
    Errors: ValueError naming the argument, what was expected and got; NotImplementedError for another block_size. On a GPU offsets
    and indices out of range are left out, and the next call on that device raises the ValueError: nobody waits.
    """
    from mtraining.ops import as_document_starts, as_scale, check_tensors

    for name, given in (("seq_len", seq_len), ("block_size", block_size)):
        if isinstance(given, (bool, float, str, bytes, torch.Tensor)) or not hasattr(
            given, "__index__"
        ):
            raise ValueError(f"{name}: expected an int, got {given!r}")
    if seq_len < 1:
        raise ValueError(f"seq_len: expected at least 1, got {seq_len}")
    if block_size not in BLOCK_SIZES:
        raise NotImplementedError(f"block_size: expected 64 or 128 tokens, got {block_size}")
    blocks = -(-seq_len // block_size)
    if (mask is None) == (offsets is None) or (offsets is None) != (indices is None):
        said = [
            n
            for n, x in (("mask", mask), ("offsets", offsets), ("indices", indices))
            if x is not None
        ]
        raise ValueError(
            f"block_index: expected a mask, or offsets and indices, got {' and '.join(said) or 'neither'}"
        )
    if mask is not None:
        check_tensors(mask=mask)
        if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2:] != (blocks, blocks):
            raise ValueError(
                f"mask: expected [B, H, {blocks}, {blocks}] bool for {seq_len} tokens in blocks of {block_size}, "
                f"got {list(mask.shape)} {_name(mask.dtype)}"
            )
        bits = ops.block_bits_of_mask(mask)
    else:
        check_tensors(offsets=offsets, indices=indices)
        if not _is_int(offsets) or offsets.dim() != 3 or offsets.shape[2] != blocks + 1:
            raise ValueError(
                f"offsets: expected [B, H, {blocks + 1}] int32 or int64 for {seq_len} tokens in blocks of {block_size}, "
                f"got {list(offsets.shape)} {_name(offsets.dtype)}"
            )
        if not _is_int(indices) or indices.dim() != 1:
            raise ValueError(
                f"indices: expected [entries] int32 or int64, got {list(indices.shape)} {_name(indices.dtype)}"
            )
        bits = ops.block_bits_of_lists(offsets.long(), indices)
    documents = as_document_starts(document_starts, bits.shape[0], seq_len)
    if documents is not None and documents.device != bits.device:
        given = "mask" if mask is not None else "offsets"
        raise ValueError(
            f"document_starts: expected device {bits.device} as {given}, got {documents.device}"
        )
    unit = block_size // _BLOCK
    return of_bits(bits, seq_len, unit, unit, documents, as_scale(softmax_scale))


def of_bits(
    bits: torch.Tensor,
    seq_len: int,
    query_unit: int,
    key_unit: int,
    documents: torch.Tensor | None,
    scale: float,
    most_key_blocks: int | None = None,
) -> BlockIndex:
    """most_key_blocks: of 64 tokens, that a query block can have; None: all up to its own."""
    blocks = (seq_len + _BLOCK - 1) // _BLOCK
    full = blocks if most_key_blocks is None else min(blocks, most_key_blocks)
    capacity = full * (full + 1) // 2 + (blocks - full) * full
    rows = bits.shape[0] * bits.shape[1]
    if bits.device.type == "cuda" and rows * capacity * 4 > _MOST_ROOM_BYTES:
        capacity = max(1, int(ops.longest_block_list(bits, query_unit, key_unit, seq_len)))
    return BlockIndex(seq_len, bits, query_unit, key_unit, capacity, documents, scale)


def _is_int(x: torch.Tensor) -> bool:
    return x.dtype in (torch.int32, torch.int64)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
