"""Who holds which position of a sequence in a context-parallel group, and how tensors get there and back.

In:   whole sequences, a process group or device mesh. Out: this rank's shards, their positions, whole sequences again.
Next: ring_attention takes the shards.

Source: MTraining, arXiv 2510.18830, section 3.3 (block-striped layout).
"""

import dataclasses

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mtraining.library import ops


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The ranks of a context-parallel group, in cp_rank order (node by node), and this process among them."""

    group: dist.ProcessGroup  # holds all members, maybe more
    members: tuple[int, ...]  # ranks in `group`
    cp_rank: int
    nodes: int
    gather_groups: tuple[
        dist.ProcessGroup, ...
    ]  # innermost first: one after another they reach all members

    @property
    def cp_size(self) -> int:
        return len(self.members)


def ranks_of(mesh: DeviceMesh | dist.ProcessGroup | None) -> Ranks:
    """A process group is one ring; a 1-D mesh likewise; a 2-D mesh is outer (nodes) x inner (ranks of a node); None: all ranks.

    Errors: ValueError where the mesh has more dimensions, is not ascending, or lacks this rank; RuntimeError before
    torch.distributed.init_process_group.
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call init_process_group first")
    if mesh is None:
        mesh = dist.group.WORLD
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim == 1:
            return ranks_of(mesh.get_group())
        if mesh.ndim != 2:
            raise ValueError(f"device_mesh: expected 1 or 2 dimensions, got {mesh.ndim}")
        members = mesh.mesh.flatten().tolist()
        if members != sorted(members):
            raise ValueError(f"device_mesh: expected ascending ranks, got {mesh.mesh.tolist()}")
        if dist.get_rank() not in members:
            raise ValueError(f"device_mesh: rank {dist.get_rank()} is not in {mesh.mesh.tolist()}")
        groups = (mesh.get_group(1), mesh.get_group(0))
        cp_rank = members.index(dist.get_rank())
        return Ranks(dist.group.WORLD, tuple(members), cp_rank, mesh.mesh.shape[0], groups)
    if not isinstance(mesh, dist.ProcessGroup):
        raise ValueError(
            f"mesh: expected a DeviceMesh, a ProcessGroup or None, got {type(mesh).__name__}"
        )
    return Ranks(mesh, tuple(range(mesh.size())), mesh.rank(), 1, (mesh,))


def positions(
    n: int,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    *,
    layout: str = "block_striped",
    stripe: int = 64,
) -> torch.Tensor:
    """The positions that this rank holds of a sequence of n tokens, int64 [S_local], ascending; for rotary embedding and labels.

    Positions at and beyond n are padding: the sequence is padded at its end to a multiple of 64 * cp_size (contiguous, striped),
    128 * cp_size (zigzag), stripe * cp_size (block_striped), the same on all ranks.

    Args: n: tokens; mesh: see ranks_of; layout: "block_striped", "zigzag", "contiguous" or "striped" (dense only); stripe:
    tokens, a multiple of 64. Errors: ValueError naming the argument.
    """
    ranks = ranks_of(mesh)
    return ops.layout_positions(layout, n, ranks.cp_size, stripe, ranks.nodes, ranks.cp_rank)


def shard(
    x: torch.Tensor,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    dim: int = 1,
    *,
    layout: str = "block_striped",
    stripe: int = 64,
    pad_value: float = 0,
) -> torch.Tensor:
    """This rank's part of a whole sequence: [.., S, ..] -> [.., S_local, ..] along `dim`. Local; every rank passes the same x.

    Padding behind the last token is pad_value (labels: -100). Differentiable: the gradient goes to this rank's own places.
    Pass the real length S to ring_attention (seq_len) and to unshard where S is no multiple of the padding.
    """
    mine = positions(x.shape[dim], mesh, layout=layout, stripe=stripe).to(x.device)
    real = mine < x.shape[dim]
    if bool(real.all()):
        return x.index_select(dim, mine)
    part = x.index_select(dim, mine[real])  # real positions are a prefix of every shard
    shape = list(x.shape)
    shape[dim] = int((~real).sum())
    return torch.cat([part, part.new_full(shape, pad_value)], dim)


def unshard(
    x_local: torch.Tensor,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    dim: int = 1,
    *,
    seq_len: int | None = None,
    layout: str = "block_striped",
    stripe: int = 64,
) -> torch.Tensor:
    """The whole sequence on every rank: [.., S_local, ..] -> [.., S, ..]; shard's inverse. Collective over the mesh.

    Args: seq_len: real tokens; None: S_local * cp_size. The others as shard's.
    Differentiable: a rank's gradient is the sum of what all ranks give for its places, so that the sum of the ranks' losses is
    what is differentiated. Errors: ValueError where S_local does not fit seq_len.
    """
    ranks = ranks_of(mesh)
    length = x_local.shape[dim] * ranks.cp_size if seq_len is None else seq_len
    held = [
        ops.layout_positions(layout, length, ranks.cp_size, stripe, ranks.nodes, r)
        for r in range(ranks.cp_size)
    ]
    if len(held[0]) != x_local.shape[dim]:
        raise ValueError(
            f"x_local: expected {len(held[0])} tokens along dim {dim} (layout {layout}, stripe {stripe}, cp_size "
            f"{ranks.cp_size}, seq_len {length}), got {x_local.shape[dim]}"
        )
    gathered = _Gather.apply(x_local.movedim(dim, 0), ranks.gather_groups)
    place = torch.cat(held).argsort()[:length].to(x_local.device)
    return gathered.index_select(0, place).movedim(0, dim)


class _Gather(torch.autograd.Function):
    """[n, ..] of every member, in cp_rank order -> [cp_size * n, ..]."""

    @staticmethod
    def forward(ctx, x, groups):
        ctx.groups = groups
        x = x.contiguous()
        for group in groups:
            parts = [torch.empty_like(x) for _ in range(group.size())]
            # As bytes: not every backend knows every dtype.
            dist.all_gather([_bytes(p) for p in parts], _bytes(x), group=group)
            x = torch.cat(parts)
        return x

    @staticmethod
    def backward(ctx, grad):
        for group in reversed(ctx.groups):
            grad = grad.float() if grad.dtype in (torch.bfloat16, torch.float16) else grad.clone()
            grad = grad.contiguous()
            dist.all_reduce(grad, group=group)
            grad = grad.chunk(group.size())[group.rank()]
        return grad, None


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)
