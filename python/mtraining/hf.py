"""Attention of transformers' models by this package: register(), then attn_implementation="mtraining".

In:   a model of transformers 5 whose attention goes through its AttentionInterface (Llama, Qwen2, Qwen3, ..).
Out:  the same model with sparse attention in training and prefill. Next: the model's own loss and optimizer.

What the two registered functions take, and what they refuse (NotImplementedError naming it):
  causal self-attention over whole sequences           the pattern's pairs
  padding on the right (attention_mask ends in zeros)  each sample is cut at its length; its padded rows give 0
  packed sequences (position_ids that start again)     documents: no token attends beyond its own
  new tokens behind a cache (generation)               dense over the cache, since a pattern is chosen from a whole sequence
  padding on the left, holes in the mask, sliding window, chunked attention, softcap, sinks, dropout, bidirectional or custom
  masks, static caches                                 refused
"""

import logging

import torch

from mtraining.ops import sparse_attention
from mtraining.pattern import Pattern, checked

NAME = "mtraining"
_log = logging.getLogger("mtraining")
_registered: Pattern | None = None
_said_dense = False


def register(pattern: Pattern | None = None) -> None:
    """Makes attn_implementation="mtraining" known to transformers, with its mask function. Calling it again changes the pattern
    of every model that uses the name.

    Args: pattern: VerticalSlash or Dense for all layers; None: VerticalSlash().
    Errors: ValueError for another pattern; ImportError where transformers is not installed.
    """
    global _registered
    pattern = checked(pattern)
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            f"mtraining.hf needs transformers 5: pip install transformers ({error})"
        ) from None
    _registered = pattern
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=None,
    attention_mask: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor | None:
    """transformers' mask function: what attention_forward needs to know instead of a mask.

    Returns: None for plain causal attention; int64 [B] real lengths for padding on the right; int32 [B, S] document starts for
    packed sequences. Errors: NotImplementedError naming what the mask asks for beyond that.
    """
    if isinstance(q_offset, torch.Tensor) or kv_offset != 0 or q_offset + q_length != kv_length:
        raise NotImplementedError(
            f"attention_mask: static and sliding caches are not supported (q_length {q_length} at {q_offset}, kv_length "
            f"{kv_length} at {kv_offset})"
        )
    packed = _packed_sequences(mask_function)
    if packed is not None:
        return _starts_of(packed.expand(batch_size, -1))
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] != kv_length:
        raise NotImplementedError(
            f"attention_mask: expected [B, {kv_length}], got {list(attention_mask.shape)}"
        )
    kept = attention_mask.bool()
    if bool(kept.all()):
        return None
    lengths = kept.sum(1)
    behind = torch.arange(kv_length, device=kept.device) >= lengths[:, None]
    if bool((kept & behind).any()):
        raise NotImplementedError(
            "attention_mask: padding on the left and holes are not supported; pad on the right"
        )
    if q_length != kv_length:
        raise NotImplementedError(
            "attention_mask: padding inside the cache is not supported; generate for one length at a time"
        )
    return lengths


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function. Differentiable.

    Shapes: query [B, H, S, D], key, value [B, Hk, S', D] with S' >= S; attention_mask: as the function above returns it.
    Returns: (out [B, S, H, D], None). Errors: NotImplementedError naming what is not supported.
    """
    _refuse(module, attention_mask, dropout, kwargs)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if q.shape[1] != k.shape[1]:
        return _behind_cache(query, key, value, scaling), None
    call = {"pattern": _registered, "softmax_scale": scaling}
    if attention_mask is None:
        return sparse_attention(q, k, v, **call), None
    if attention_mask.dim() == 2:
        return sparse_attention(q, k, v, document_starts=attention_mask, **call), None
    rows = []
    for sample, length in enumerate(attention_mask.tolist()):
        parts = [x[sample : sample + 1, :length] for x in (q, k, v)]
        out = sparse_attention(*parts, **call) if length else parts[0]
        rows.append(torch.nn.functional.pad(out, (0, 0, 0, 0, 0, q.shape[1] - length)))
    return torch.cat(rows), None


def _refuse(module, attention_mask, dropout: float, kwargs: dict) -> None:
    if dropout:
        raise NotImplementedError(f"dropout {dropout} in attention is not supported")
    for name in ("sliding_window", "softcap", "s_aux", "head_mask"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{name} is not supported, got {kwargs[name]}")
    causal = kwargs.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    if not causal:
        raise NotImplementedError("non-causal attention is not supported")
    if attention_mask is not None and attention_mask.dim() > 2:
        raise NotImplementedError(
            f"a prepared attention mask of {attention_mask.dim()} dimensions is not supported; pass [B, S]"
        )


def _behind_cache(query, key, value, scaling) -> torch.Tensor:
    """The last rows of a longer sequence, dense: [B, S, H, D]."""
    global _said_dense
    if not _said_dense:
        _log.warning("new tokens attend densely to the cache; the pattern serves whole sequences")
        _said_dense = True
    new, length = query.shape[2], key.shape[2]
    rows = torch.arange(length - new, length, device=query.device)
    mask = torch.arange(length, device=query.device) <= rows[:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2)


# What transformers composes masks of, and what its parts ask for. Only the first two are causal attention over documents.
_PACKED = {"remap_positions_for_packed_sequence", "packed_sequence_mask_function"}
_REFUSED = {
    "sliding_window_overlay": "sliding window",
    "chunked_overlay": "chunked attention",
    "blockwise_overlay": "blockwise bidirectional attention",
    "bidirectional_mask_function": "non-causal attention",
    "sliding_window_bidirectional_overlay": "non-causal attention",
}


def _packed_sequences(mask_function) -> torch.Tensor | None:
    """The [B, S] sequence numbers of a packed batch, None for plain causal attention."""
    if mask_function is None:
        return None
    names, packed = set(), None
    for part in _parts(mask_function):
        name = part.__qualname__.split(".")[0]
        names.add(name)
        if name == "packed_sequence_mask_function":
            packed = _closure(part)["packed_sequence_mask"]
    if names == {"causal_mask_function"}:
        return None
    unknown = sorted(names - _PACKED - {"causal_mask_function"})
    if packed is not None and not unknown and names != {"packed_sequence_mask_function"}:
        return packed  # some versions of transformers remap positions besides, others do not
    what = ", ".join(_REFUSED.get(name, f"the mask {name}") for name in unknown)
    what = what or "non-causal attention"
    raise NotImplementedError(f"attention_mask: {what} is not supported")


def _closure(function) -> dict:
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in cells), strict=True))


def _parts(mask_function) -> list:
    """The functions that and_masks and or_masks joined, or the function itself."""
    inner = _closure(mask_function).get("mask_functions")
    if inner is None:
        remapped = _closure(mask_function).get("mask_function")
        return [mask_function, *(_parts(remapped) if remapped is not None else ())]
    if mask_function.__qualname__.split(".")[0] != "and_masks":
        raise NotImplementedError("attention_mask: a custom mask (or_masks) is not supported")
    return [part for function in inner for part in _parts(function)]


def _starts_of(sequence: torch.Tensor) -> torch.Tensor:
    """[B, S] ascending sequence numbers -> int32 [B, S] the first place with each row's number."""
    return torch.searchsorted(sequence.contiguous(), sequence.contiguous()).to(torch.int32)
