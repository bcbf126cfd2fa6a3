"""ring_attention: the executor over torch.distributed's ranks, with gradients.

In:   this rank's shards of q, k, v (layout.shard), a process group or device mesh, a pattern. Out: this rank's rows of attention
over the whole sequence. Next: the caller's output projection.
"""

import collections
import os
import weakref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mtraining import library as _library  # noqa: F401 registers torch.classes.mtraining
from mtraining.blocks import BlockIndex, of_bits
from mtraining.index import Index
from mtraining.layout import Ranks, ranks_of
from mtraining.ops import as_document_starts, as_scale, check_tensors
from mtraining.pattern import Dense, Moba, Pattern, XAttention, checked

# Rings that one group keeps open: each holds communicators, threads and buffers of its own.
MAX_OPEN_RINGS = 8


class _GroupRings:
    """The open rings of one process group, by what stays the same over calls; the least recently used one is closed first."""

    def __init__(self):
        self.opened = 0
        self.rings = collections.OrderedDict()

    def get(self, ranks: Ranks, **shape):
        key = (ranks.members, ranks.nodes, *sorted(shape.items()))
        if key in self.rings:
            self.rings.move_to_end(key)
            return key, self.rings[key]
        self.opened += 1  # counted where opening fails, too: all ranks count alike
        ring = torch.classes.mtraining.Ring.open(
            ranks.group.boxed(),
            list(ranks.members),
            f"ring{self.opened} of {'.'.join(map(str, ranks.members))}",
            os.environ.get("MASTER_ADDR", ""),
            _timeout_ms(ranks.group),
            ranks.nodes,
            shape["seq_len"],
            shape["layout"],
            shape["stripe"],
            shape["ring"],
            shape["inner"],
            shape["ring_stride"],
            shape["prefetch_steps"],
            shape["columns"],
            shape["gradient_transport"],
            shape["deterministic"],
            shape["on_device"],
        )
        if len(self.rings) >= MAX_OPEN_RINGS:
            _, oldest = self.rings.popitem(last=False)
            oldest.barrier()  # nobody is still waiting for its last message
        self.rings[key] = ring
        return key, ring

    def drop(self, key):
        self.rings.pop(key, None)


_rings: "weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupRings]" = weakref.WeakKeyDictionary()


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    pattern: Pattern | None = None,
    softmax_scale: float | None = None,
    document_starts: torch.Tensor | None = None,
    deterministic: bool | None = None,
    seq_len: int | None = None,
    layout: str = "block_striped",
    stripe: int = 64,
    ring: str | None = None,
    inner: str = "gather",
    ring_stride: int = 1,
    prefetch_steps: int = 2,
    columns: str = "once",
    gradient_transport: str = "fp32",
    index: Index | BlockIndex | None = None,
    return_lse: bool = False,
    return_index: bool = False,
):
    """Causal attention over a sequence that is spread over ranks, on the pairs that the pattern chooses. Differentiable.

    Collective over the group or mesh: all ranks call it alike, in the same order, and their backward passes likewise. Where ranks
    differ in pattern, index, dtype, shapes, scale or documents, all of them raise the same ValueError that says in what.

    Args:
        q: [B, S_local, H, D]; k, v: [B, S_local, Hk, D]: this rank's shards, as shard() with the same layout, stripe and mesh
            gives them; bf16, fp16, float32, float64; any strides.
        group: one flat ring over its ranks (None: all ranks). device_mesh: 1-D likewise; 2-D is outer (nodes) x inner (ranks of
            a node) and runs the hierarchical ring. Not both.
        pattern: VerticalSlash, Dense, XAttention or Moba; None: VerticalSlash(). softmax_scale: None: 1 / sqrt(D).
        document_starts: int [B, S] of the whole sequence, the same on every rank; None: one document.
        deterministic: None: torch.are_deterministic_algorithms_enabled(). On the CPU results are the same from run to run
            either way.
        seq_len: real tokens S of the whole sequence; None: document_starts' length, else S_local * cp_size.
            Rows of padding: out = 0, no gradient.
        layout, stripe, ring ("flat" or "hierarchical"; None: what the mesh says), inner, ring_stride, prefetch_steps, columns,
            gradient_transport: keys of the configuration's [attention] table.
        index: an Index that was returned earlier, or a BlockIndex of the whole sequence, to be used instead of choosing one;
            seq_len, document_starts and softmax_scale are then its own where they are not given.

    Returns: out [B, S_local, H, D] in q's dtype; with return_lse and return_index a tuple (out[, lse][, index]): lse
    [B, H, S_local] float32, not differentiable; the index is the same on every rank.
    Cost: messages of K and V (and of their gradients) W - 1 times around, or by node; see docs.
    Errors: ValueError, NotImplementedError naming the input, before any communication; RuntimeError where a rank has failed,
    with the first rank's cause. After an error the communicators are closed, and the next call opens new ones.
    Source: MTraining, arXiv 2510.18830, Algorithm 2.
    """
    pattern = checked(pattern)
    check_tensors(q=q, k=k, v=v)
    if index is not None:
        if not isinstance(index, (Index, BlockIndex)):
            raise ValueError(f"index: expected an Index or None, got {type(index).__name__}")
        seq_len = index.seq_len if seq_len is None else seq_len
        document_starts = index.document_starts if document_starts is None else document_starts
    replayed = index is not None and softmax_scale is None
    scale = index.softmax_scale if replayed else as_scale(softmax_scale)
    if group is not None and device_mesh is not None:
        raise ValueError("ring_attention: expected group or device_mesh, got both")
    ranks = ranks_of(device_mesh if device_mesh is not None else group)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or 0 in x.shape:
            heads = "H" if name == "q" else "Hk"
            raise ValueError(
                f"{name}: expected [B, S_local, {heads}, D] with none of them 0, got {list(x.shape)}"
            )
    if q.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"q: expected a tensor on cpu or cuda, got one on {q.device}")
    if seq_len is None:
        if document_starts is not None:
            check_tensors(document_starts=document_starts)
        whole = document_starts.shape[-1] if document_starts is not None else None
        seq_len = whole if whole is not None else q.shape[1] * ranks.cp_size
    documents = as_document_starts(document_starts, q.shape[0], seq_len)
    documents = None if documents is None else documents.cpu()
    ring = ring or ("hierarchical" if ranks.nodes > 1 else "flat")
    if ring == "flat" and ranks.nodes > 1 and layout == "block_striped":
        # shard() numbers stripes node by node over such a mesh, a flat ring rank by rank.
        raise ValueError(
            "ring: expected hierarchical over a 2-D device_mesh with layout block_striped, got flat; pass the ranks as a "
            "group or a 1-D mesh, to shard as well"
        )
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    rings = _rings.setdefault(ranks.group, _GroupRings())
    key, opened = rings.get(
        ranks,
        seq_len=seq_len,
        layout=layout,
        stripe=stripe,
        ring=ring,
        inner=inner,
        ring_stride=ring_stride,
        prefetch_steps=prefetch_steps,
        columns=columns,
        gradient_transport=gradient_transport,
        deterministic=deterministic,
        on_device=q.is_cuda,
    )
    try:
        if isinstance(index, BlockIndex):
            given = index.bits, index.query_unit, index.key_unit
            out, lse, used = opened.attend_blocks(q, k, v, *given, documents, scale)
        elif index is not None:
            out, lse, used = opened.attend_index(q, k, v, list(index.lists()), documents, scale)
        elif isinstance(pattern, Dense):
            out, lse, used = opened.attend_dense(q, k, v, documents, scale, return_index)
        else:
            attend = opened.attend_vertical_slash
            if isinstance(pattern, (XAttention, Moba)):
                attend = (
                    opened.attend_moba if isinstance(pattern, Moba) else opened.attend_xattention
                )
            out, lse, used = attend(q, k, v, documents, scale, return_index, *pattern.arguments())
    except Exception:
        rings.drop(key)
        raise
    if not (return_lse or return_index):
        return out
    if return_index and index is None and isinstance(pattern, (XAttention, Moba)):
        index = of_bits(used[0], seq_len, 1, 1, documents, scale)
    elif return_index and index is None:
        observed = () if isinstance(pattern, Dense) else (pattern.last_q, pattern.window)
        index = Index(seq_len, *used, documents, scale, *observed)
    return (out, *([lse] if return_lse else []), *([index] if return_index else []))


def _timeout_ms(group: dist.ProcessGroup) -> int:
    """The group's own timeout where its CPU backend says it."""
    try:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        timeout = dist.default_pg_timeout
    return max(1, round(timeout.total_seconds() * 1000))
