"""Sparse attention on one device: choose an index, attend over it, differentiate through it."""

import sys

import torch

from mtraining.blocks import BlockIndex, of_bits
from mtraining.index import Index
from mtraining.library import ops
from mtraining.pattern import Dense, Moba, Pattern, XAttention, checked

_LARGEST = sys.float_info.max  # a longer int is no float
# Asked once: a compiled function cannot ask.
_BUILT_WITH_CUDA = torch._C._dispatch_has_kernel_for_dispatch_key("mtraining::attend", "CUDA")


def build_index(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    pattern: Pattern | None = None,
    softmax_scale: float | None = None,
    document_starts: torch.Tensor | None = None,
) -> Index | BlockIndex:
    """Chooses which pairs to compute. No gradient flows through the choice.

    Args:
        q: [B, S, H, D]; k: [B, S, Hk, D], after rotary embedding; any strides, any S >= 1; bf16, fp16, float32, float64 on the
            CPU; bf16, fp16 with D 64 or 128 on a GPU. Query head h reads key/value head h // (H // Hk).
        pattern: VerticalSlash, Dense, XAttention or Moba; None: VerticalSlash().
        softmax_scale: None: 1 / sqrt(D).
        document_starts: int [B, S] or [S]: position of the first token of each token's document; None: one document.

    Returns: an Index on q's device, a BlockIndex for XAttention and Moba (which take any D). Cost: 6 * last_q * S * D * H flops (4 on a
    GPU), those patterns' as they say. On a GPU the host does not wait, except with document_starts, and for what block_index
    waits for; values that are not finite are then not reported, they count as no attention.
    Errors: ValueError (shapes, dtypes, NaN or values from 2^50 on in k or in the observed rows of q), NotImplementedError
    (device, dtype), each naming the input, what was expected and got.
    Source: MTraining, arXiv 2510.18830, Algorithm 1.
    """
    pattern = checked(pattern)
    check_tensors(q=q, k=k)
    _check_device(q)
    if q.dim() != 4:
        raise ValueError(f"q: expected [B, S, H, D], got {list(q.shape)}")
    documents = as_document_starts(document_starts, q.shape[0], q.shape[1])
    scale = as_scale(softmax_scale)
    q, k = q.detach(), k.detach()
    if isinstance(pattern, Dense):
        if documents is not None and documents.device != q.device:
            raise ValueError(
                f"document_starts: expected device {q.device} as q, got {documents.device}"
            )
        return _dense_index(q, documents, scale)
    if isinstance(pattern, XAttention):
        bits = ops.choose_xattention(q, k, documents, scale, *pattern.arguments())
        unit = pattern.xattention_block // 64
        return of_bits(bits, q.shape[1], unit, unit, documents, scale)
    if isinstance(pattern, Moba):
        bits = ops.choose_moba(q, k, documents, *pattern.arguments())
        chunk = pattern.moba_chunk // 64
        most = chunk * pattern.moba_top_k
        return of_bits(bits, q.shape[1], 1, chunk, documents, scale, most)
    lists = ops.build_index(q, k, documents, scale, *pattern.arguments())
    return Index(q.shape[1], *lists, documents, scale, pattern.last_q, pattern.window)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: Index | BlockIndex
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the pairs of an index. Differentiable in q, k and v; the index is a constant.

    Args: q [B, S, H, D], k, v [B, S, Hk, D], one dtype, any strides, D a multiple of 8 up
    to 512; index: as build_index or block_index returns it, with its document_starts
    and its softmax_scale.

    Returns: (out, lse): out [B, S, H, D] in q's dtype; lse [B, H, S] float32 (float64 for float64), natural logarithm, not
    differentiable. A row without a pair: out = 0, lse = -inf. Sums are float32 inside (float64 for float64).
    Cost: 4 * D flops a pair forward, 10 * D backward. Deterministic on the CPU; on a GPU where
    torch.use_deterministic_algorithms is on. On a GPU everything is ordered on the current stream, and the host does not wait
    unless the columns' capacity (the pattern's max_columns bounds it) would take more than 1 GiB of copies.
    Errors: ValueError, NotImplementedError as above; NotImplementedError for a second derivative. On a GPU lists and document starts
    of the index that are out of range are dropped, and the next call on that device raises the ValueError: nobody waits.
    Source: MTraining, arXiv 2510.18830, section 3.2: the gradient is exactly as sparse as the attention.
    """
    check_tensors(q=q, k=k, v=v)
    if not isinstance(index, (Index, BlockIndex)):
        raise ValueError(
            f"index: expected an Index, as build_index or block_index returns it, got {type(index).__name__}"
        )
    _check_device(q)
    if q.dim() != 4 or q.shape[1] != index.seq_len:
        raise ValueError(
            f"q: expected [B, S={index.seq_len}, H, D] as the index has it, got {list(q.shape)}"
        )
    documents, scale = index.document_starts, index.softmax_scale
    if isinstance(index, BlockIndex):
        units = index.query_unit, index.key_unit
        return ops.attend_blocks(q, k, v, index.bits, *units, index.capacity, documents, scale)[:2]
    return ops.attend(q, k, v, *index.lists(), documents, scale)[:2]  # the third is for backward


def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    pattern: Pattern | None = None,
    softmax_scale: float | None = None,
    document_starts: torch.Tensor | None = None,
    return_lse: bool = False,
    return_index: bool = False,
):
    """Causal attention over the pairs that the pattern chooses: build_index, then attend. Arguments and errors as there.

    Returns: out [B, S, H, D]; with return_lse and return_index a tuple (out[, lse][, index]) of what was asked for, in this order.
    """
    check_tensors(q=q, k=k, v=v)
    only_out = not (return_lse or return_index)
    if only_out and document_starts is None and isinstance(pattern, Dense) and q.is_cuda:
        return _dense_on_gpu(q, k, v, softmax_scale)
    index = build_index(
        q, k, pattern=pattern, softmax_scale=softmax_scale, document_starts=document_starts
    )
    out, lse = attend(q, k, v, index)
    if only_out:
        return out
    return (out, *([lse] if return_lse else []), *([index] if return_index else []))


def as_scale(softmax_scale: float | None) -> float:
    """0 stands for 1 / sqrt(D) in operators. Errors: ValueError unless positive and finite."""
    if softmax_scale is None:
        return 0.0
    # Not a check for float and int: a compiled function's numbers may be symbols.
    sized = hasattr(softmax_scale, "__len__")  # text, arrays, tensors
    if sized or isinstance(softmax_scale, bool) or not hasattr(softmax_scale, "__float__"):
        raise ValueError(f"softmax_scale: expected a positive number, got {softmax_scale!r}")
    if not 0 < softmax_scale <= _LARGEST:
        raise ValueError(f"softmax_scale: expected a positive number, got {softmax_scale}")
    return float(softmax_scale)


def check_tensors(**named) -> None:
    """Errors: ValueError naming what is no tensor, or one without strides (sparse, nested) or plain numbers (quantized)."""
    for name, given in named.items():
        if not isinstance(given, torch.Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(given).__name__}")
        if given.layout != torch.strided:
            raise ValueError(f"{name}: expected a strided tensor, got layout {given.layout}")
        if given.is_nested or given.is_quantized:
            kind = "nested" if given.is_nested else "quantized"
            raise ValueError(f"{name}: expected a plain tensor, got a {kind} one")


def as_document_starts(given, batch: int, seq_len: int) -> torch.Tensor | None:
    """int32 [B, S]. Errors: ValueError naming the type, the shape or the dtype."""
    if given is None:
        return None
    check_tensors(document_starts=given)
    if given.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"document_starts: expected int32 or int64, got {given.dtype}")
    if tuple(given.shape) not in ((seq_len,), (batch, seq_len)):
        raise ValueError(
            f"document_starts: expected [B={batch}, S={seq_len}], got {list(given.shape)}"
        )
    if given.dtype == torch.int64:
        given = given.clamp(-1, 2**31 - 1)  # out of range on either side stays so, and is named
    return given.to(torch.int32).expand(batch, seq_len)


def _check_device(q: torch.Tensor) -> None:
    kind = q.device.type
    if kind == "cuda" and not _BUILT_WITH_CUDA:
        raise NotImplementedError("q: this build has no CUDA operators, got a tensor on cuda")
    if kind not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(f"q: expected a tensor on cpu or cuda, got one on {kind}")


def _dense_on_gpu(q, k, v, softmax_scale) -> torch.Tensor:
    """Every causal pair of one document: torch's own kernels are as exact and quicker."""
    for name, x in (("k", k), ("v", v)):
        if x.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} as q, got {x.device}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name}: expected dtype {q.dtype} as q, got {x.dtype}")
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise NotImplementedError(
            f"q: expected bf16, fp16, float32 or float64 for dense attention, got {q.dtype}"
        )
    if (
        q.dim() != 4
        or k.dim() != 4
        or k.shape != v.shape
        or 0 in q.shape
        or k.shape[2] == 0
        or q.shape[2] % k.shape[2]
        or (*k.shape[:2], k.shape[3]) != (*q.shape[:2], q.shape[3])
    ):
        raise ValueError(
            f"q, k, v: expected [B, S, H, D], none of them 0, and twice [B, S, Hk, D] with Hk a divisor of H, got "
            f"{list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    scale = as_scale(softmax_scale) or None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


def _dense_index(q: torch.Tensor, documents: torch.Tensor | None, scale: float) -> Index:
    batch, seq_len, heads = q.shape[:3]
    blocks = (seq_len + 63) // 64

    def ints(*shape, fill=0, dtype=torch.int32):
        return torch.full(shape, fill, dtype=dtype, device=q.device)

    diagonals = torch.arange(blocks, dtype=torch.int32, device=q.device)
    return Index(
        seq_len,
        diagonals.expand(batch, heads, blocks),
        ints(batch, heads, fill=blocks),
        ints(batch, heads, 1, fill=-1),
        ints(batch, heads),
        ints(batch, heads, fill=True, dtype=torch.bool),
        ints(dtype=torch.int64),
        documents,
        scale,
    )
